//! Profiles: how to install, configure and launch each harness.

//! Profiles: how to install, configure and launch a harness, and what is known of its habits.
//!
//! A harness is a black box. Everything Espalier knows of one is **data**: a file
//! `harnesses/NAME.toml`. Adding a harness needs no Rust; the files of the repository are put
//! into the binary by the build script, and a folder of the user's overrides them by name.
//!
//! | module | owns |
//! |---|---|
//! | [`profile`] | what is known of a harness, and where profiles are found |
//! | `read` | the file: strict reading, every error with file, line, key and what was expected |
//! | [`template`] | the variables that a profile may use, and rendering |
//! | [`install`] | bundles in the cache: locked, complete or absent, never half |
//! | `warm` | one run of a fresh bundle in a sandbox, to keep what it compiles |
//! | [`launch`] | a profile + one rollout's facts → files, process, mounts |
//!
//! # Invariants
//! - A profile with an unknown key, a wrong type or an unknown template variable is refused when
//!   it is read, not when it is launched.
//! - A bundle folder under its final name is complete: it is filled under another name and renamed
//!   under an exclusive lock. A broken install leaves no folder with the final name.
//! - Rendering is pure: the same profile, bundle and facts give the same launch.
//!
//! # Limits
//! | limit | value | at the limit |
//! |---|---|---|
//! | profile file | 256 KiB | [`HarnessError::Read`] |
//! | waiting for another process's install | `install_s` of the profile (default 900) | [`HarnessError::Busy`] |
//! | one install | `install_s` | [`HarnessError::Install`], its processes are killed |
//! | one argument | 128 KiB − 1 (the kernel's) | [`HarnessError::Render`]: give it on stdin |
//! | kept tail of an installer's output | 4 KiB | the head is cut |

mod builtin;
pub mod error;
pub mod install;
pub mod launch;
mod lock;
mod npm;
mod pip;
pub mod profile;
mod read;
mod run;
pub mod template;
mod warm;

pub use error::{HarnessError, ProfileError};
pub use install::{Installed, cache_folder};
pub use launch::{Launch, LaunchContext, ToolServer};
pub use profile::{Echo, ExitMeaning, Habits, Install, Profile, Spawn, ToolServers, names, word};

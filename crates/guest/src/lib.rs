//! Our static binary in and around every sandbox.
//!
//! * [`warden`]: one process per provider that makes sandboxes and cleans up after everybody.
//! * `init`: PID 1 of each sandbox, a fork of the warden: processes, files, port forwarder.
//! * [`react`]: our own small harness: Chat Completions and four tools.
//! * [`probe`]: tries what this machine allows, for `doctor`.
//! * [`protocol`]: what they say to the host; the only part that the host links.
//!
//! Invariants: no threads (forks and namespaces need that), no async runtime, no TLS, no name
//! resolution (a static glibc cannot), no unsafe code but in `sys`. Nothing here writes to a
//! folder of the host: all files live in tmpfs mounts that die with their namespaces.

mod cgroup;
mod init;
pub mod probe;
pub mod protocol;
pub mod react;
mod setup;
mod stage;
mod sys;
pub mod warden;

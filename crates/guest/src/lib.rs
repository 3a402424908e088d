//! Our static binary in and around every sandbox.
//!
//! * [`warden`]: one process per provider that makes sandboxes and cleans up after everybody.
//! * `init`: PID 1 of each sandbox: processes, files, port forwarder. A fork of the warden, or,
//!   through [`container`], the first process of a container that an engine made.
//! * [`install`]: prepares a sandbox from an init container of a cluster.
//! * [`archive`]: folders as tar streams.
//! * [`react`]: our own small harness: Chat Completions and four tools.
//! * [`mcp`]: tools by the Model Context Protocol, from both ends.
//! * [`user`]: who a program runs as, from a sandbox's own lists of users and groups.
//! * [`probe`]: tries what this machine allows, for `doctor`.
//! * [`reach`]: tries to get out, for probes of a network policy.
//! * [`protocol`]: what they say to the host; with the transport-free part of [`mcp`], the only
//!   part that the host links.
//!
//! Invariants: no threads but in [`reach`], [`container::relay`] and `guest mcp --http` (forks and namespaces need that), no async runtime, no
//! TLS, no name resolution (a static glibc cannot), no unsafe code but in `sys`. Nothing here writes to a
//! folder of the host: all files live in tmpfs mounts that die with their namespaces.

pub mod archive;
mod cgroup;
pub mod checks;
pub mod container;
mod http;
mod ids;
mod init;
pub mod install;
pub mod mcp;
mod privileges;
pub mod probe;
pub mod protocol;
pub mod reach;
pub mod react;
mod rootfs;
mod seccomp;
mod setup;
mod stage;
mod sys;
pub mod user;
pub mod warden;

pub use privileges::CAPABILITIES;

//! What can go wrong between a profile file and a process that can be launched.

use std::path::PathBuf;

/// A profile that cannot be used as written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}: `{key}`: {problem}")]
pub struct ProfileError {
    /// The file, as it was named; `(built in) NAME.toml` for those inside the binary.
    pub file: String,
    /// Line, from 1.
    pub line: usize,
    /// The key or value at fault, as written; empty when the text is not TOML at all.
    pub key: String,
    /// What was found and what was expected.
    pub problem: String,
}

/// Why a harness cannot be used. None of these is about one rollout: all are for the person who
/// set the run up, and stop it before it starts.
#[derive(Debug, thiserror::Error)]
pub enum HarnessError {
    /// No profile has this name. Not retryable.
    #[error(
        "no harness profile `{name}`: looked into {looked}; known: {known}; add a file {name}.toml (docs/harnesses.md shows one)"
    )]
    Unknown {
        /// The name asked for.
        name: String,
        /// Where it was looked for.
        looked: String,
        /// Names that exist, comma separated.
        known: String,
    },
    /// The profile does not offer this dialect. Not retryable.
    #[error(
        "harness {name} does not speak `{wanted}`: its profile offers {offered}; leave `:{wanted}` out or add it to `dialects`"
    )]
    Dialect {
        /// The harness.
        name: String,
        /// The dialect asked for.
        wanted: String,
        /// Those of the profile, comma separated.
        offered: String,
    },
    /// A task brings a tool server that this harness cannot be told of. Not retryable.
    #[error(
        "harness {name} cannot be told of the tool server `{server}`: {reason}; use another harness or leave the task out"
    )]
    ToolServers {
        /// The harness.
        name: String,
        /// The server.
        server: String,
        /// Why not.
        reason: String,
    },
    /// The profile file cannot be read. Not retryable.
    #[error("harness profile {path}: {reason}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason, or the limit that was passed.
        reason: String,
    },
    /// The profile cannot be used as written. Not retryable.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// A program that the install needs is missing or too old. Not retryable.
    #[error("harness {name} needs `{tool}`: {found}; {advice}")]
    Tool {
        /// The harness.
        name: String,
        /// The program.
        tool: String,
        /// What was found instead.
        found: String,
        /// What to do.
        advice: String,
    },
    /// The installer failed. Worth a retry when the registry was out of reach.
    #[error("installing harness {name} failed ({outcome}): `{command}`\n{tail}\n{advice}")]
    Install {
        /// The harness.
        name: String,
        /// The command line.
        command: String,
        /// Exit code, signal or timeout.
        outcome: String,
        /// The end of what it printed.
        tail: String,
        /// What to do.
        advice: String,
    },
    /// The installer said all is well, but what the profile launches is not there. Not retryable.
    #[error(
        "harness {name}: the install ended well but {missing} is not in it; check `[install]` and `provides` of its profile"
    )]
    Incomplete {
        /// The harness.
        name: String,
        /// The missing file, relative to the bundle.
        missing: String,
    },
    /// Another process holds the install lock and does not finish. Retryable.
    #[error(
        "harness {name}: another process has been installing it for more than {waited_s} s; wait for it, or end it and remove {lock}"
    )]
    Busy {
        /// The harness.
        name: String,
        /// How long was waited, in seconds.
        waited_s: u64,
        /// The lock file.
        lock: PathBuf,
    },
    /// The cache cannot be used (full disk, permissions). Not retryable.
    #[error("harness cache {path}: {reason}; set XDG_CACHE_HOME to a folder with room")]
    Cache {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        reason: String,
    },
    /// A template cannot be rendered with the facts of this rollout. Not retryable.
    #[error("harness {name}: {what}: {reason}")]
    Render {
        /// The harness.
        name: String,
        /// Which template.
        what: String,
        /// What is wrong.
        reason: String,
    },
}

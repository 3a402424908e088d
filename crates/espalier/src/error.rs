//! What went wrong, for a person: the chain of causes, then what to do.

use std::{error::Error, process::ExitCode};

/// A command's failure.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    /// Something did not work. Exit code 1.
    #[error("{what}")]
    Failed {
        what: String,
        #[source]
        source: Option<Box<dyn Error + Send + Sync>>,
        hint: Option<String>,
    },
    /// The command was asked for something impossible. Exit code 2.
    #[error("{what}")]
    Usage { what: String, hint: String },
    /// Ctrl-C; everything finished is saved. Exit code 130.
    #[error("interrupted; {resume}")]
    Interrupted { resume: String },
}

impl CliError {
    pub(crate) fn failed(
        what: impl Into<String>,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self::Failed {
            what: what.into(),
            source: Some(source.into()),
            hint: None,
        }
    }

    pub(crate) fn plain(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Failed {
            what: what.into(),
            source: None,
            hint: Some(hint.into()),
        }
    }

    pub(crate) fn usage(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Usage {
            what: what.into(),
            hint: hint.into(),
        }
    }
}

/// Prints the error and gives the exit code.
#[expect(
    clippy::print_stderr,
    reason = "this is where the command line speaks to a person"
)]
pub(crate) fn report(error: &CliError) -> ExitCode {
    eprintln!("error: {error}");
    let mut source = error.source();
    while let Some(cause) = source {
        eprintln!("  cause: {cause}");
        source = cause.source();
    }
    match error {
        CliError::Failed { hint, .. } => {
            if let Some(hint) = hint {
                eprintln!("  hint: {hint}");
            }
            ExitCode::from(1)
        }
        CliError::Usage { hint, .. } => {
            eprintln!("  hint: {hint}");
            ExitCode::from(2)
        }
        CliError::Interrupted { .. } => ExitCode::from(130),
    }
}

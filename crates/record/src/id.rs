//! Names. All ids are short printable strings, so that they can be read in logs, used in
//! URLs and as file names, and sorted.

use serde::{Deserialize, Serialize};

/// The longest id accepted, in bytes.
pub const ID_BYTES_MAX: usize = 128;

/// Why a string is not an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{kind} id {found:?} is not valid: expected 1 to 128 of letters, digits, `.`, `_`, `-`, `:`, starting with a letter or digit"
)]
pub struct IdError {
    /// What the id was to name, e.g. `task`.
    pub kind: &'static str,
    /// The offending text, cut to 160 characters.
    pub found: String,
}

fn check(kind: &'static str, text: &str) -> Result<(), IdError> {
    let body = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | ':');
    let starts_well = text
        .chars()
        .next()
        .is_some_and(|c| c.is_ascii_alphanumeric());
    if starts_well && text.len() <= ID_BYTES_MAX && text.chars().all(body) {
        Ok(())
    } else {
        Err(IdError {
            kind,
            found: text.chars().take(160).collect(),
        })
    }
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// Takes the text as an id.
            ///
            /// # Errors
            /// [`IdError`] when it is empty, too long or has other characters.
            pub fn new(text: impl Into<String>) -> Result<Self, IdError> {
                let text = text.into();
                check($kind, &text)?;
                Ok(Self(text))
            }

            /// The id as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;
            fn try_from(text: String) -> Result<Self, IdError> {
                Self::new(text)
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }
    };
}

id!(
    /// Names a task. Unique within a task set, stable over runs.
    TaskId, "task"
);
id!(
    /// Names one rollout. Unique within a run. The orchestrator derives it from the step, the
    /// task and the sample number, so that a resumed run gives the same rollout the same name.
    RolloutId, "rollout"
);
id!(
    /// Names the rollouts whose rewards are compared with each other.
    GroupId, "group"
);

/// One call of one rollout: the rollout and the arrival number, from 0.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CallId {
    /// The rollout that made the call.
    pub rollout: RolloutId,
    /// Arrival order within the rollout, from 0.
    pub index: u32,
}

impl std::fmt::Display for CallId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}#{}", self.rollout, self.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_refuse_what_would_break_paths_and_urls() {
        for bad in ["", "-x", "a/b", "a b", "a\n", &"x".repeat(129)] {
            assert!(TaskId::new(bad).is_err(), "{bad:?} was accepted");
        }
        assert_eq!(
            TaskId::new("chores-0001.a_b:c")
                .map(String::from)
                .as_deref(),
            Ok("chores-0001.a_b:c")
        );
    }

    #[test]
    fn ids_are_checked_when_they_are_read() {
        assert!(serde_json::from_str::<RolloutId>("\"a/b\"").is_err());
    }
}

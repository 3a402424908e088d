//! Keys and tokens, kept out of logs by their type.

/// A key or token. It is printed by nothing: neither `Debug` nor a log line nor JSON shows it,
/// and whoever needs it says so with [`Secret::expose`].
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Secret(String);

impl Secret {
    /// Takes the text as a secret.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text itself, for the one place that sends or compares it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

/// So that a map by secrets can be asked with the text that a client sent.
impl std::borrow::Borrow<str> for Secret {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[secret]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_prints_it() {
        let secret = Secret::new("sk-abc");
        let shown = format!("{secret:?} {:#?} {:?}", Some(&secret), [&secret]);
        assert!(!shown.contains("sk-abc"), "{shown}");
        assert_eq!(secret.expose(), "sk-abc");
    }
}

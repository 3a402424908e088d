//! The profiles that travel inside the binary.

include!(concat!(env!("OUT_DIR"), "/profiles.rs"));

/// The text of a profile, by name.
pub(crate) fn text(name: &str) -> Option<&'static str> {
    PROFILES
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, text)| *text)
}

/// All names, sorted.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    PROFILES.iter().map(|(name, _)| *name)
}

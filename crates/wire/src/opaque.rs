//! Opaque marks that clients carry from a reply into the next request.

use base64::{Engine, engine::general_purpose::STANDARD};
use sha2::{Digest, Sha256};

const HEAD: &[u8] = b"espalier1";
const CHECK_BYTES: usize = 8;

fn check(text: &[u8]) -> [u8; CHECK_BYTES] {
    let hash = Sha256::new()
        .chain_update(HEAD)
        .chain_update(text)
        .finalize();
    let mut check = [0; CHECK_BYTES];
    check.copy_from_slice(&hash[..CHECK_BYTES]);
    check
}

/// A signature of reasoning: the same text has the same one. Clients only carry it.
#[must_use]
pub fn signature(reasoning: &str) -> String {
    STANDARD.encode(
        Sha256::new()
            .chain_update(HEAD)
            .chain_update(reasoning)
            .finalize(),
    )
}

/// Reasoning as opaque content, for clients that keep nothing else of it.
#[must_use]
pub fn seal(reasoning: &str) -> String {
    let mut bytes = HEAD.to_vec();
    bytes.extend(check(reasoning.as_bytes()));
    bytes.extend(reasoning.as_bytes());
    STANDARD.encode(bytes)
}

/// The reasoning of [`seal`]; `None` for opaque content of another origin.
#[must_use]
pub fn unseal(sealed: &str) -> Option<String> {
    let bytes = STANDARD.decode(sealed).ok()?;
    let (found, text) = bytes.strip_prefix(HEAD)?.split_at_checked(CHECK_BYTES)?;
    if found != check(text) {
        return None;
    }
    String::from_utf8(text.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_sealed_here_is_unsealed() {
        let sealed = seal("ümläut\n");
        assert_eq!(unseal(&sealed).as_deref(), Some("ümläut\n"));
        assert_eq!(unseal(&seal("")).as_deref(), Some(""));
        for other in [
            "",
            "ZW5jcnlwdGVk",
            "not base64!",
            &sealed[..8],
            &signature("a"),
        ] {
            assert_eq!(unseal(other), None, "{other}");
        }
        let mut bytes = STANDARD.decode(&sealed).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        assert_eq!(unseal(&STANDARD.encode(bytes)), None);
        assert_eq!(signature("a"), signature("a"));
        assert_ne!(signature("a"), signature("b"));
    }
}

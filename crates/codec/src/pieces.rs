//! Ids of texts that stand between special tokens.
//!
//! Rollouts of one harness begin with the same system prompt and tools, some 20,000 tokens, and a
//! history that cannot be continued is encoded again as a whole. A tokenizer never merges across a
//! special token, so what stands between two of them has the same ids wherever it stands, and is
//! encoded once. [`crate::tokens`] checks that this is so for the tokenizer at hand.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use sha2::{Digest, Sha256};

/// Shorter pieces are encoded faster than looked up.
pub(crate) const PIECE_BYTES_MIN: usize = 256;
/// Ids and keys kept, in bytes; then what was not used lately is forgotten.
pub(crate) const BYTES_MAX: usize = 64 << 20;

type Key = [u8; 32];

/// Two generations: what is used again moves to the young one; when that is full, the old one
/// goes.
#[derive(Default)]
struct Kept {
    young: HashMap<Key, Arc<[u32]>>,
    old: HashMap<Key, Arc<[u32]>>,
    young_bytes: usize,
}

/// Encoded pieces.
#[derive(Default)]
pub(crate) struct Pieces(Mutex<Kept>);

impl Pieces {
    /// The ids of a piece, encoded unless they are known.
    pub(crate) fn get<E>(
        &self,
        piece: &str,
        encode: impl FnOnce() -> Result<Vec<u32>, E>,
    ) -> Result<Arc<[u32]>, E> {
        let key: Key = Sha256::digest(piece.as_bytes()).into();
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ids) = kept.young.get(&key) {
            return Ok(Arc::clone(ids));
        }
        let known = kept.old.remove(&key);
        // Encoding takes milliseconds: others need not wait for it.
        drop(kept);
        let ids = match known {
            Some(ids) => ids,
            None => encode()?.into(),
        };
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.young_bytes += size_of::<Key>() + size_of_val(&*ids);
        kept.young.insert(key, Arc::clone(&ids));
        if kept.young_bytes > BYTES_MAX / 2 {
            kept.old = std::mem::take(&mut kept.young);
            kept.young_bytes = 0;
        }
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_encoded_once_and_forgotten_when_there_is_no_room() {
        let pieces = Pieces::default();
        let encoded = std::cell::Cell::new(0);
        let get = |piece: &str, ids: usize| {
            pieces
                .get(piece, || {
                    encoded.set(encoded.get() + 1);
                    Ok::<_, ()>(vec![piece.len() as u32; ids])
                })
                .unwrap()
        };
        assert_eq!(*get("abc", 2), [3, 3]);
        assert_eq!(*get("abc", 2), [3, 3]);
        assert_eq!(encoded.get(), 1);
        // Two generations of others later it is gone; used once in between, it is not.
        let large = BYTES_MAX / 2 / size_of::<u32>();
        get("large 1", large);
        get("abc", 2);
        assert_eq!(encoded.get(), 2);
        get("large 2", large);
        get("large 3", large);
        get("abc", 2);
        assert_eq!(encoded.get(), 5);
    }
}

//! The tokenizer: text ⇄ ids, special tokens kept in both directions.

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::Tokenizer;

use crate::{
    CodecError,
    pieces::{PIECE_BYTES_MIN, Pieces},
};

/// A Hugging Face tokenizer without padding, truncation and added specials.
pub struct Tokens {
    tokenizer: Tokenizer,
    vocabulary: u32,
    /// Texts of the added tokens with their ids, longest first.
    added: Vec<(String, u32)>,
    /// Finds the added tokens, when texts between them can be encoded by themselves.
    cuts: Option<AhoCorasick>,
    pieces: Pieces,
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokens")
            .field("vocabulary", &self.vocabulary)
            .finish_non_exhaustive()
    }
}

impl Tokens {
    /// Reads the content of a `tokenizer.json`. `name` is for messages.
    ///
    /// # Errors
    /// [`CodecError::BadTokenizer`].
    pub fn new(json: &[u8], name: &str) -> Result<Self, CodecError> {
        let bad = |reason: String| CodecError::BadTokenizer {
            path: name.to_owned(),
            reason,
        };
        let mut tokenizer = Tokenizer::from_bytes(json).map_err(|error| bad(error.to_string()))?;
        tokenizer
            .with_truncation(None)
            .map_err(|error| bad(error.to_string()))?;
        tokenizer.with_padding(None);
        let largest = tokenizer.get_vocab(true).values().copied().max();
        let vocabulary = largest.ok_or_else(|| bad("its vocabulary is empty".into()))? + 1;
        let mut added: Vec<(String, u32)> = tokenizer
            .get_added_tokens_decoder()
            .into_iter()
            .map(|(id, token)| (token.content, id))
            .collect();
        added.sort_by(|a, b| b.0.len().cmp(&a.0.len()).then(a.0.cmp(&b.0)));
        let mut tokens = Self {
            tokenizer,
            vocabulary,
            added,
            cuts: None,
            pieces: Pieces::default(),
        };
        tokens.cuts = tokens.cuts();
        Ok(tokens)
    }

    /// The finder of added tokens; `None` when a text depends on what stands before it: some
    /// tokenizers treat the first one otherwise, or let a token swallow the space beside it.
    fn cuts(&self) -> Option<AhoCorasick> {
        const PROBES: [&str; 8] = ["a", " a", "a ", "\n\nA b\n", "1 23", "é ", " ", "_x y_"];
        let cuts = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(self.added.iter().map(|(token, _)| token))
            .ok()
            .filter(|_| !self.added.is_empty())?;
        let alone = self.added.iter().all(|(token, id)| {
            PROBES.iter().all(|probe| {
                let (Ok(piece), Ok(whole)) = (
                    self.encode_whole(probe),
                    self.encode_whole(&format!("{probe}{token}{probe}{token}")),
                ) else {
                    return false;
                };
                let end = [*id];
                [&piece[..], &end, &piece, &end].concat() == whole
            })
        });
        alone.then_some(cuts)
    }

    /// One more than the largest id.
    #[must_use]
    pub fn vocabulary(&self) -> u32 {
        self.vocabulary
    }

    /// The id of a token's text.
    #[must_use]
    pub fn id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// The first added token in `text`: byte position, token text, id.
    #[must_use]
    pub fn first_added(&self, text: &str) -> Option<(usize, &str, u32)> {
        self.added
            .iter()
            .filter_map(|(token, id)| Some((text.find(token.as_str())?, token.as_str(), *id)))
            // Longest first in the list, and `min_by_key` keeps the first of equals.
            .min_by_key(|(at, _, _)| *at)
    }

    /// Encodes text; special tokens in it are recognised, none are added.
    ///
    /// # Errors
    /// [`CodecError::Encode`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, CodecError> {
        let Some(cuts) = self.cuts.as_ref().filter(|_| text.len() >= PIECE_BYTES_MIN) else {
            return self.encode_whole(text);
        };
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut from = 0;
        for cut in cuts.find_iter(text) {
            self.encode_piece(&text[from..cut.start()], &mut ids)?;
            ids.push(self.added[cut.pattern().as_usize()].1);
            from = cut.end();
        }
        self.encode_piece(&text[from..], &mut ids)?;
        Ok(ids)
    }

    fn encode_piece(&self, piece: &str, ids: &mut Vec<u32>) -> Result<(), CodecError> {
        if piece.len() < PIECE_BYTES_MIN {
            if !piece.is_empty() {
                ids.append(&mut self.encode_whole(piece)?);
            }
            return Ok(());
        }
        let known = self.pieces.get(piece, || self.encode_whole(piece))?;
        ids.extend_from_slice(&known);
        Ok(())
    }

    fn encode_whole(&self, text: &str) -> Result<Vec<u32>, CodecError> {
        self.tokenizer
            .encode_fast(text, false)
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|error| CodecError::Encode {
                bytes: text.len(),
                reason: error.to_string(),
            })
    }

    /// Decodes ids, special tokens included.
    #[must_use]
    pub fn decode(&self, ids: &[u32]) -> String {
        // The library's decoders fail on no list of ids; a failure would lose text, so say so
        // in the text instead of hiding it.
        self.tokenizer
            .decode(ids, false)
            .unwrap_or_else(|_| "\u{fffd}".into())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn policy() -> Tokens {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policy");
        Tokens::new(
            &std::fs::read(folder.join("tokenizer.json")).unwrap(),
            "policy",
        )
        .unwrap()
    }

    #[test]
    fn the_built_in_tokenizer_takes_pieces_by_themselves() {
        assert!(policy().cuts.is_some());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever stands beside it, whether it was encoded before or not.
        #[test]
        fn pieces_give_the_ids_of_the_whole(
            parts in prop::collection::vec(prop_oneof![
                "[ -~\n]{0,700}",
                Just("<|im_end|>".to_owned()),
                Just("<|im_start|>".to_owned()),
                Just("<|im_".to_owned()),
                "\\PC{0,40}",
            ], 0..12)
        ) {
            thread_local! { static TOKENS: Tokens = policy(); }
            TOKENS.with(|tokens| {
                let text = parts.concat();
                for _ in 0..2 {
                    prop_assert_eq!(tokens.encode(&text).unwrap(), tokens.encode_whole(&text).unwrap());
                }
                Ok(())
            })?;
        }
    }
}

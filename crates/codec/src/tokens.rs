//! The tokenizer: text ⇄ ids, special tokens kept in both directions.

use tokenizers::Tokenizer;

use crate::CodecError;

/// A Hugging Face tokenizer without padding, truncation and added specials.
pub struct Tokens {
    tokenizer: Tokenizer,
    vocabulary: u32,
    /// Texts of the added tokens with their ids, longest first.
    added: Vec<(String, u32)>,
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
        Ok(Self {
            tokenizer,
            vocabulary,
            added,
        })
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

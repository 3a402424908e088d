//! Tokens as text, where a tokenizer is at hand.

use std::{path::Path, sync::Arc};

use codec::Codec;

use crate::{error::CliError, policy, recipe::Recipe};

/// Decodes tokens.
pub(super) struct Speech {
    codec: Arc<Codec>,
}

impl Speech {
    /// The tokenizer that was named, else that of the run's policy.
    pub(super) fn load(named: Option<&Path>, recipe: Option<&Recipe>) -> Result<Self, CliError> {
        let folder = named.or(recipe.map(|recipe| recipe.policy.folder.as_path()));
        let Some(folder) = folder else {
            return Err(CliError::usage(
                "the run has no recipe, so it is not known which tokenizer decodes its tokens",
                "add --tokenizer DIR, the folder that was given to serve",
            ));
        };
        Ok(Self {
            codec: policy::load_codec(folder)?,
        })
    }

    pub(super) fn text(&self, tokens: &[u32]) -> String {
        self.codec.decode(tokens)
    }
}

#[cfg(test)]
impl Speech {
    pub(super) fn of(codec: Arc<Codec>) -> Self {
        Self { codec }
    }
}

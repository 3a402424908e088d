//! Answers of judges by digest, in memory and, when a folder is named, on disk: a second run over
//! the same work asks nobody and costs nothing.

use std::{
    collections::HashMap,
    fs,
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

/// Answers kept in memory; beyond, the folder alone remembers.
const ENTRIES_MAX: usize = 100_000;

/// A cache of answers.
#[derive(Debug, Default)]
pub struct Cache {
    known: Mutex<HashMap<String, String>>,
    folder: Option<PathBuf>,
}

impl Cache {
    /// In memory only.
    #[must_use]
    pub fn memory() -> Self {
        Self::default()
    }

    /// In a folder too, one file per answer. It is made when the first answer comes.
    #[must_use]
    pub fn folder(folder: PathBuf) -> Self {
        Self {
            known: Mutex::default(),
            folder: Some(folder),
        }
    }

    pub(super) fn get(&self, key: &str) -> Option<String> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(text) = known.get(key) {
            return Some(text.clone());
        }
        fs::read_to_string(self.folder.as_ref()?.join(key)).ok()
    }

    /// Keeps an answer. A folder that cannot be written to is a warning: the answer counts, it
    /// only has to be asked for again.
    pub(super) fn put(&self, key: &str, text: &str) {
        if let Some(folder) = &self.folder {
            // Written beside and moved, so that a killed process leaves no half answer.
            let draft = folder.join(format!("{key}.{}", std::process::id()));
            let written = fs::create_dir_all(folder)
                .and_then(|()| fs::write(&draft, text))
                .and_then(|()| fs::rename(&draft, folder.join(key)));
            if let Err(error) = written {
                tracing::warn!(folder = %folder.display(), %error, "a judge's answer is not kept");
            }
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() < ENTRIES_MAX {
            known.insert(key.to_owned(), text.to_owned());
        }
    }
}

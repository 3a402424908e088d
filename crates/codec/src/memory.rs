//! What a rollout has generated so far: a tree of texts and ids. A call that continues another
//! one stores only what it adds, so the memory grows with the conversation and not with its
//! square.

use std::{
    collections::HashMap,
    hash::{Hash, Hasher},
};

use record::Message;

use crate::{
    Prompt,
    continuation::{Pattern, Place},
    echo::meaning,
};

/// Calls that one rollout remembers.
pub const CALLS_MAX: usize = 4096;
/// Bytes of text and ids that one rollout remembers.
pub const BYTES_MAX: usize = 256 << 20;
/// Raw texts that are tried for one echoed turn.
pub const CANDIDATES_MAX: usize = 16;

/// What became of [`Memory::remember`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remembered {
    /// Stored.
    Stored,
    /// This call was stored before; the first one stays.
    Already,
    /// A limit is reached: not stored. Later prompts continue from the calls stored so far and
    /// encode the rest.
    Full,
}

/// One generated reply together with its prompt.
#[derive(Debug)]
struct Entry {
    call: u32,
    children: Vec<usize>,
    /// Text behind the parent's text: rest of the prompt, then the reply.
    text: String,
    /// Where the reply begins in `text`.
    reply_start: usize,
    /// What was said, word for word.
    wording: u64,
    generated: u32,
    /// Ids behind the parent's ids.
    ids: Vec<u32>,
    parent: Option<usize>,
    text_bytes_total: usize,
    ids_total: usize,
}

/// What one rollout has generated so far.
#[derive(Debug, Default)]
pub struct Memory {
    entries: Vec<Entry>,
    roots: Vec<usize>,
    by_call: HashMap<u32, usize>,
    by_meaning: HashMap<String, Vec<usize>>,
    bytes: usize,
}

/// The recorded call that a new prompt extends.
#[derive(Debug)]
pub(crate) struct Found {
    /// Its number.
    pub(crate) call: u32,
    /// Where it ends in the pattern.
    pub(crate) place: Place,
    /// Its prompt and reply, exactly as the engine had them.
    pub(crate) ids: Vec<u32>,
    /// Length of its text.
    pub(crate) text_bytes: usize,
}

/// An echo of a recorded reply.
#[derive(Debug)]
pub(crate) struct Echoed<'a> {
    /// The distinct raw texts that it may be: those of the first form before those of the second,
    /// newest first.
    pub(crate) raw_texts: Vec<&'a str>,
    /// Generated tokens of the reply when the echo repeats it in other words; 0 when it is word for
    /// word what one of ours said.
    pub(crate) reworded_tokens: u32,
}

impl Memory {
    /// Stores a finished call: the prompt that was sent to the engine, the ids that it generated,
    /// the text of these ids, and the message that the harness got.
    pub fn remember(
        &mut self,
        call: u32,
        prompt: &Prompt,
        generated_ids: &[u32],
        raw_text: &str,
        reply: &Message,
    ) -> Remembered {
        if self.by_call.contains_key(&call) {
            return Remembered::Already;
        }
        let parent = prompt
            .continuation
            .parent
            .and_then(|parent| self.by_call.get(&parent).copied());
        let (text_from, ids_from) = parent.map_or((0, 0), |parent| {
            let parent = &self.entries[parent];
            (parent.text_bytes_total, parent.ids_total)
        });
        // A parent that does not fit would be a defect of the caller; as a root it is still right.
        let fits = ids_from == prompt.continuation.exact as usize;
        let (parent, rest, ids_from) = match prompt.text.get(text_from..) {
            Some(rest) if fits && ids_from <= prompt.ids.len() => (parent, rest, ids_from),
            _ => (None, prompt.text.as_str(), 0),
        };
        let mut ids = prompt.ids[ids_from..].to_vec();
        ids.extend_from_slice(generated_ids);
        let text = format!("{rest}{raw_text}");
        let bytes = text.len() + ids.len() * size_of::<u32>();
        if self.entries.len() >= CALLS_MAX || self.bytes + bytes > BYTES_MAX {
            return Remembered::Full;
        }
        self.bytes += bytes;
        let index = self.entries.len();
        match parent {
            Some(parent) => self.entries[parent].children.push(index),
            None => self.roots.push(index),
        }
        self.by_call.insert(call, index);
        self.by_meaning
            .entry(meaning(reply))
            .or_default()
            .push(index);
        self.entries.push(Entry {
            call,
            children: Vec::new(),
            reply_start: rest.len(),
            wording: wording(reply),
            generated: u32::try_from(generated_ids.len()).unwrap_or(u32::MAX),
            text,
            ids,
            parent,
            text_bytes_total: prompt.text.len() + raw_text.len(),
            ids_total: prompt.ids.len() + generated_ids.len(),
        });
        Remembered::Stored
    }

    /// How many calls are stored.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is stored.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes of text and ids held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// What the recorded replies are that say the same as one of these forms of an echo; the first
    /// form is the echo as it came. `None` when it is not ours.
    pub(crate) fn echoed(&self, forms: &[&Message]) -> Option<Echoed<'_>> {
        let found = forms
            .iter()
            .filter_map(|form| self.by_meaning.get(&meaning(form)));
        let ours: Vec<&Entry> = found
            .flat_map(|entries| entries.iter().rev())
            .map(|&index| &self.entries[index])
            .collect();
        let newest = ours.first()?;
        let mut raw_texts: Vec<&str> = Vec::new();
        for entry in &ours {
            let raw = &entry.text[entry.reply_start..];
            if !raw_texts.contains(&raw) {
                raw_texts.push(raw);
            }
            if raw_texts.len() == CANDIDATES_MAX {
                break;
            }
        }
        let wording = wording(forms.first()?);
        let word_for_word = ours.iter().any(|ours| ours.wording == wording);
        Some(Echoed {
            raw_texts,
            reworded_tokens: if word_for_word { 0 } else { newest.generated },
        })
    }

    /// The recorded call with the longest text that is a prefix of the pattern; of equal ones
    /// the latest. A reply that was cut must end in a turn of ours: it may by chance be the
    /// beginning of somebody else's turn, whose ids must not be split there.
    pub(crate) fn longest(&self, pattern: &Pattern, stop_texts: &[String]) -> Option<Found> {
        let mut best: Option<(usize, Place)> = None;
        let mut open: Vec<(usize, Place)> = self
            .roots
            .iter()
            .map(|&root| (root, pattern.start()))
            .collect();
        while let Some((index, place)) = open.pop() {
            let entry = &self.entries[index];
            let ended = stop_texts.iter().any(|stop| entry.text.ends_with(stop));
            for place in pattern.advance(&place, &entry.text) {
                if !ended && !pattern.in_turn_of_ours(&place) {
                    continue;
                }
                let better = best.as_ref().is_none_or(|(other, _)| {
                    let other = &self.entries[*other];
                    (entry.text_bytes_total, entry.call) > (other.text_bytes_total, other.call)
                });
                for &child in &entry.children {
                    open.push((child, place.clone()));
                }
                if better {
                    best = Some((index, place));
                }
            }
        }
        best.map(|(index, place)| Found {
            call: self.entries[index].call,
            place,
            ids: self.ids(index),
            text_bytes: self.entries[index].text_bytes_total,
        })
    }

    /// All ids of an entry, from its root.
    fn ids(&self, index: usize) -> Vec<u32> {
        let mut chain = Vec::new();
        let mut at = Some(index);
        while let Some(index) = at {
            chain.push(index);
            at = self.entries[index].parent;
        }
        let mut ids = Vec::with_capacity(self.entries[index].ids_total);
        for &index in chain.iter().rev() {
            ids.extend_from_slice(&self.entries[index].ids);
        }
        ids
    }
}

/// A hash of what a turn says word for word: text, reasoning, calls with their ids and arguments
/// in the order of their keys.
fn wording(message: &Message) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    message.text_content().hash(&mut hasher);
    message.reasoning.hash(&mut hasher);
    for call in &message.tool_calls {
        (&call.id, &call.name, call.arguments.to_string()).hash(&mut hasher);
    }
    hasher.finish()
}

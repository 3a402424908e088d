//! Placeholders of images and the like. Their ids are equal whatever they stand for, so while a
//! tree is built each placeholder has a key of its own, by payload, size and place within the
//! payload: prompts with unequal images part where the first image begins. Keys are above all ids
//! of vocabularies and are turned back when the tree is laid out.

use std::borrow::Cow;
use std::collections::HashMap;

use record::{Call, MediaSpan};

use crate::TreeError;

/// The first key; vocabularies have a few hundred thousand ids.
const FIRST: u32 = 1 << 31;

/// A placeholder: which payload, its place within, its id.
type Placeholder = (u32, u32, u32);

/// The keys handed out so far.
#[derive(Debug, Default, Clone)]
pub(crate) struct MediaKeys {
    payloads: Vec<(String, Vec<u32>)>,
    numbers: HashMap<(String, Vec<u32>), u32>,
    placeholders: Vec<Placeholder>,
    keys: HashMap<Placeholder, u32>,
}

impl MediaKeys {
    /// The prompt of a call with keys in place of placeholders.
    pub(crate) fn keyed<'a>(&mut self, call: &'a Call) -> Result<Cow<'a, [u32]>, TreeError> {
        let spans = &call.continuation.media;
        if spans.is_empty() {
            return Ok(Cow::Borrowed(&call.prompt_ids));
        }
        let mut ids = call.prompt_ids.clone();
        let wrong = |found: String| TreeError::Media {
            call: call.id.index,
            found,
        };
        if let Some(id) = ids.iter().find(|id| **id >= FIRST) {
            return Err(wrong(format!("token {id}, expected ids below {FIRST}")));
        }
        let mut from = 0;
        for span in spans {
            let range = span.start as usize..span.start as usize + span.tokens as usize;
            if range.start < from || range.is_empty() || range.end > ids.len() {
                return Err(wrong(format!(
                    "tokens {range:?} in a prompt of {} tokens behind {from}",
                    ids.len()
                )));
            }
            from = range.end;
            let payload = self.payload(span);
            for (place, id) in (0..).zip(&mut ids[range]) {
                *id = self.key((payload, place, *id));
            }
        }
        Ok(Cow::Owned(ids))
    }

    fn payload(&mut self, span: &MediaSpan) -> u32 {
        let payload = (span.digest.clone(), span.size.clone());
        let next = self.payloads.len() as u32;
        let number = *self.numbers.entry(payload.clone()).or_insert(next);
        if number == next {
            self.payloads.push(payload);
        }
        number
    }

    fn key(&mut self, placeholder: Placeholder) -> u32 {
        let next = FIRST + self.placeholders.len() as u32;
        let key = *self.keys.entry(placeholder).or_insert(next);
        if key == next {
            self.placeholders.push(placeholder);
        }
        key
    }

    /// Puts placeholders back, and says where they were.
    pub(crate) fn restore(&self, tokens: &mut [u32]) -> Vec<MediaSpan> {
        let mut spans: Vec<MediaSpan> = Vec::new();
        // Payload and next place of the span that is open.
        let mut open: Option<(u32, u32)> = None;
        if self.placeholders.is_empty() {
            return spans;
        }
        for (at, token) in (0..).zip(tokens) {
            let known = token.checked_sub(FIRST);
            let known = known.and_then(|key| self.placeholders.get(key as usize));
            let Some(&(payload, place, id)) = known else {
                open = None;
                continue;
            };
            *token = id;
            match spans.last_mut() {
                Some(span) if open == Some((payload, place)) => span.tokens += 1,
                _ => {
                    let (digest, size) = self.payloads[payload as usize].clone();
                    spans.push(MediaSpan {
                        start: at,
                        tokens: 1,
                        digest,
                        size,
                    });
                }
            }
            open = Some((payload, place + 1));
        }
        spans
    }
}

//! Who quotes whom: which of many texts occur inside another one, in one pass over it.
//!
//! Texts are bytes of messages or tokens of outputs. All are found by the hash of their first
//! window, rolled over the text that may quote them, and then compared.

use std::collections::HashMap;

const BASE: u64 = 0x9e37_79b9_7f4a_7c15;

/// Texts that may be quoted, each with who said it.
#[derive(Debug)]
pub(crate) struct Quotes<T> {
    window: usize,
    /// Distinct texts with those who said them, in the order of addition.
    texts: Vec<(Vec<T>, Vec<usize>)>,
    by_text: HashMap<Vec<T>, usize>,
    by_head: HashMap<u64, Vec<usize>>,
    /// A bit for every head, by the hash's upper bits: nearly all windows of a text are none, and
    /// need not be looked up.
    heads: Vec<u64>,
}

/// Bits of [`Quotes::heads`]; 8 KiB, which stay in the nearest cache.
const HEAD_BITS: u32 = 16;

fn bit_of(hash: u64) -> (usize, u64) {
    let bit = hash >> (64 - HEAD_BITS);
    ((bit / 64) as usize, 1 << (bit % 64))
}

impl<T: Copy + Eq + std::hash::Hash + Into<u64>> Quotes<T> {
    /// Texts shorter than `window` are too common to prove anything and are never found.
    pub(crate) fn new(window: usize) -> Self {
        Self {
            window,
            texts: Vec::new(),
            by_text: HashMap::new(),
            by_head: HashMap::new(),
            heads: vec![0; 1 << (HEAD_BITS - 6)],
        }
    }

    /// Adds a text that `owner` said. Owners must be added in ascending order.
    pub(crate) fn add(&mut self, owner: usize, text: &[T]) {
        if text.len() < self.window {
            return;
        }
        if let Some(&known) = self.by_text.get(text) {
            let owners = &mut self.texts[known].1;
            if owners.last() != Some(&owner) {
                owners.push(owner);
            }
            return;
        }
        let number = self.texts.len();
        self.by_text.insert(text.to_vec(), number);
        let head = hash(&text[..self.window]);
        self.by_head.entry(head).or_default().push(number);
        let (word, bit) = bit_of(head);
        self.heads[word] |= bit;
        self.texts.push((text.to_vec(), vec![owner]));
    }

    /// The texts that `text` holds, by number, each once.
    pub(crate) fn numbers(&self, text: &[T]) -> Vec<usize> {
        let mut found = Vec::new();
        if self.texts.is_empty() {
            return found;
        }
        for (at, hash) in windows(text, self.window) {
            let (word, bit) = bit_of(hash);
            if self.heads[word] & bit == 0 {
                continue;
            }
            for &number in self.by_head.get(&hash).into_iter().flatten() {
                if text[at..].starts_with(&self.texts[number].0) && !found.contains(&number) {
                    found.push(number);
                }
            }
        }
        found
    }

    /// A text by its number, and those who said it.
    pub(crate) fn said(&self, number: usize) -> (&[T], &[usize]) {
        let (text, owners) = &self.texts[number];
        (text, owners)
    }

    /// The latest before `before` among those who said one of these texts and are accepted.
    pub(crate) fn latest_of(
        &self,
        numbers: &[usize],
        before: usize,
        accept: impl Fn(&[T], usize) -> bool,
    ) -> Option<usize> {
        let each = numbers.iter().filter_map(|&number| {
            let (text, owners) = self.said(number);
            let earlier = owners.partition_point(|&owner| owner < before);
            let mut earlier = owners[..earlier].iter().rev().copied();
            earlier.find(|&owner| accept(text, owner))
        });
        each.max()
    }

    /// The latest before `before` whose text is quoted and accepted.
    pub(crate) fn latest(
        &self,
        text: &[T],
        before: usize,
        accept: impl Fn(&[T], usize) -> bool,
    ) -> Option<usize> {
        self.latest_of(&self.numbers(text), before, accept)
    }
}

/// The hash of every window of a text, with its place; none when the text is shorter.
pub(crate) fn windows<T: Copy + Into<u64>>(
    text: &[T],
    window: usize,
) -> impl Iterator<Item = (usize, u64)> {
    let leaving = (1..window).fold(1_u64, |power, _| power.wrapping_mul(BASE));
    let mut rolling = text.get(..window).map_or(0, hash);
    let count = (text.len() + 1).saturating_sub(window);
    (0..count).map(move |at| {
        if at > 0 {
            let out: u64 = text[at - 1].into().wrapping_add(1);
            let new: u64 = text[at + window - 1].into().wrapping_add(1);
            rolling = rolling
                .wrapping_sub(out.wrapping_mul(leaving))
                .wrapping_mul(BASE)
                .wrapping_add(new);
        }
        (at, rolling)
    })
}

fn hash<T: Copy + Into<u64>>(window: &[T]) -> u64 {
    window.iter().fold(0, |hash, &item| {
        hash.wrapping_mul(BASE)
            .wrapping_add(item.into().wrapping_add(1))
    })
}

#[cfg(test)]
mod tests {
    use super::Quotes;

    #[test]
    fn every_occurrence_is_found_and_nothing_else() {
        let mut quotes: Quotes<u8> = Quotes::new(3);
        for (owner, text) in ["abc", "abcd", "xy", "zzz", "abc"].iter().enumerate() {
            quotes.add(owner, text.as_bytes());
        }
        let numbers = quotes.numbers(b"--abce-abcd");
        let each = numbers.into_iter().map(|number| quotes.said(number));
        let mut found: Vec<_> = each
            .map(|(text, owners)| (text.to_vec(), owners.to_vec()))
            .collect();
        found.sort();
        assert_eq!(
            found,
            [(b"abc".to_vec(), vec![0, 4]), (b"abcd".to_vec(), vec![1])]
        );
        let latest = |before| quotes.latest(b"..abcd", before, |_, _| true);
        assert_eq!(
            (latest(5), latest(4), latest(1), latest(0)),
            (Some(4), Some(1), Some(0), None)
        );
    }
}

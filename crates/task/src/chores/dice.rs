//! Seeded choices: invented names, numbers, phrasings. Every draw goes through `next_u64`, so
//! that tasks do not change when the `rand` crate changes how it samples ranges.

use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};
use sha2::{Digest, Sha256};

use crate::Split;

const CONSONANTS: &[u8; 14] = b"bdfgklmnprstvz";
const VOWELS: &[u8; 5] = b"aeiou";
const ENDINGS: &[u8; 5] = b"nrslk";

/// Words that the chores themselves use, or that a shell takes for a program, and that the
/// syllables could also make. A name is refused when it contains one or is contained in one.
const RESERVED: &[&str] = &[
    "code", "copy", "count", "data", "date", "done", "file", "folder", "line", "make", "more",
    "move", "name", "nano", "node", "note", "number", "order", "owner", "part", "print", "read",
    "remove", "rename", "repeat", "report", "root", "rule", "script", "start", "state", "table",
    "text", "time", "title", "token", "total", "user", "value", "return", "sudo", "kill", "sed",
    "tool", "none", "true", "false", "null", "self", "lines", "files", "same", "size", "sort",
    "limit", "level", "mode",
];

/// Which half a name or number belongs to: a quarter of all texts, by hash, is held out.
#[must_use]
pub fn split_of(text: &str) -> Split {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for byte in text.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    // The high bits are the well mixed ones.
    if (hash >> 40).is_multiple_of(4) {
        Split::HeldOut
    } else {
        Split::Train
    }
}

/// The seeded source of every choice in one task.
#[derive(Debug)]
pub(super) struct Dice {
    random: ChaCha8Rng,
    split: Split,
    used: Vec<String>,
}

impl Dice {
    /// Dice of one task: the same arguments give the same throws for ever.
    pub(super) fn new(seed: u64, split: Split, index: usize, family: &str) -> Self {
        let mut hash = Sha256::new();
        hash.update(b"chores 1");
        hash.update(seed.to_le_bytes());
        hash.update(split.name().as_bytes());
        hash.update((index as u64).to_le_bytes());
        hash.update(family.as_bytes());
        Self {
            random: ChaCha8Rng::from_seed(hash.finalize().into()),
            split,
            used: Vec::new(),
        }
    }

    /// The names and numbers drawn so far, in order.
    pub(super) fn used(&self) -> &[String] {
        &self.used
    }

    /// A number in `0..limit`. `limit` must not be 0.
    pub(super) fn below(&mut self, limit: usize) -> usize {
        // The bias of the remainder is 2^-50 for limits of this size.
        (self.random.next_u64() % limit as u64) as usize
    }

    /// True in half of the throws.
    pub(super) fn coin(&mut self) -> bool {
        self.below(2) == 0
    }

    /// One of the items. `items` must not be empty.
    pub(super) fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }

    /// Puts the items in random order.
    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.below(last + 1);
            items.swap(last, other);
        }
    }

    /// A new invented name of 4 to 8 letters that belongs to this split. Neither contained in
    /// nor containing any name drawn before, so that searching for one never finds another.
    pub(super) fn word(&mut self) -> String {
        loop {
            let syllables = self.pick(&[2, 2, 2, 3, 3]);
            let mut word = String::new();
            for _ in 0..syllables {
                word.push(char::from(self.pick(CONSONANTS)));
                word.push(char::from(self.pick(VOWELS)));
            }
            if self.coin() {
                word.push(char::from(self.pick(ENDINGS)));
            }
            let clashes = |other: &str| other.contains(&word) || word.contains(other);
            if split_of(&word) == self.split
                && !RESERVED.iter().any(|other| clashes(other))
                && !self.used.iter().any(|other| clashes(other))
            {
                self.used.push(word.clone());
                return word;
            }
        }
    }

    /// Several new names.
    pub(super) fn words<const N: usize>(&mut self) -> [String; N] {
        std::array::from_fn(|_| self.word())
    }

    /// A new number of two or three digits that belongs to this split, as text.
    pub(super) fn number(&mut self) -> String {
        loop {
            let number = (10 + self.below(990)).to_string();
            if split_of(&number) == self.split
                && !self
                    .used
                    .iter()
                    .any(|other| other.contains(&number) || number.contains(other.as_str()))
            {
                self.used.push(number.clone());
                return number;
            }
        }
    }
}

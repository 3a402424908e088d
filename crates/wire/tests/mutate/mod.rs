//! Random inputs made of good ones, for tests that look for crashes. Everything follows from a
//! seed, which every failure prints.
#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    reason = "shared by tests, each uses a part"
)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

/// SplitMix64: small, and good enough to choose mutations.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Below `count`, which is at least 1.
    pub fn below(&mut self, count: usize) -> usize {
        (self.next() % count as u64) as usize
    }

    pub fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }

    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }
}

/// How long a search goes on: `ESPALIER_FUZZ_SECONDS` for the long tests, else so many inputs.
pub enum Effort {
    Inputs(u64),
    Time(Duration),
}

impl Effort {
    pub fn long() -> Self {
        let seconds = std::env::var("ESPALIER_FUZZ_SECONDS").ok();
        Self::Time(Duration::from_secs(
            seconds.and_then(|text| text.parse().ok()).unwrap_or(60),
        ))
    }
}

/// Runs `check` on seed after seed. A failure names its seed, and `ESPALIER_FUZZ_SEED` runs that
/// one alone.
pub fn search(name: &str, effort: Effort, check: impl Fn(&mut Random)) {
    let given = std::env::var("ESPALIER_FUZZ_SEED").ok();
    if let Some(seed) = given.and_then(|text| text.parse().ok()) {
        return check(&mut Random::new(seed));
    }
    let (first, inputs, limit) = match effort {
        Effort::Inputs(inputs) => (0, inputs, None),
        Effort::Time(limit) => {
            let since = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
            (since, u64::MAX, Some(limit))
        }
    };
    let started = Instant::now();
    let mut done = 0;
    while done < inputs && limit.is_none_or(|limit| started.elapsed() < limit) {
        let seed = first.wrapping_add(done);
        let result = catch_unwind(AssertUnwindSafe(|| check(&mut Random::new(seed))));
        if result.is_err() {
            panic!("{name}: input {done} fails; again with ESPALIER_FUZZ_SEED={seed}");
        }
        done += 1;
    }
    println!(
        "{name}: {done} inputs in {:.1} s",
        started.elapsed().as_secs_f64()
    );
}

const TEXTS: [&str; 24] = [
    "",
    " ",
    "\n",
    "a",
    "user",
    "assistant",
    "system",
    "tool",
    "developer",
    "text",
    "function",
    "image_url",
    "tool_use",
    "tool_result",
    "thinking",
    "reasoning",
    "compaction",
    "null",
    "{}",
    "{\"a\": 1}",
    "\u{0}",
    "\u{202e}ü🦀\u{fffd}",
    "<tool_call>",
    "data:image/png;base64,AAAA",
];

/// A value of any kind.
pub fn any(random: &mut Random) -> Value {
    match random.below(12) {
        0 => Value::Null,
        1 => json!(random.chance(2)),
        2 => json!(random.next()),
        3 => json!(-1),
        4 => json!(1e308),
        5 => json!(random.next() as f64 / 1e9),
        6 => json!([]),
        7 => json!({}),
        8 => json!("x".repeat(random.below(3000))),
        9 => {
            // Deep, but below what a JSON reader allows.
            let mut deep = json!(1);
            for _ in 0..random.below(100) {
                deep = if random.chance(2) {
                    json!([deep])
                } else {
                    json!({"a": deep})
                };
            }
            deep
        }
        _ => json!(random.pick(&TEXTS)),
    }
}

fn nodes(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(nodes).sum(),
        Value::Object(object) => object.values().map(nodes).sum(),
        _ => 0,
    }
}

fn node(value: &mut Value, mut at: usize) -> Option<&mut Value> {
    if at == 0 {
        return Some(value);
    }
    at -= 1;
    let children: Vec<&mut Value> = match value {
        Value::Array(items) => items.iter_mut().collect(),
        Value::Object(object) => object.values_mut().collect(),
        _ => Vec::new(),
    };
    for child in children {
        let count = nodes(child);
        if at < count {
            return node(child, at);
        }
        at -= count;
    }
    None
}

/// Changes a few places of a document; `donor` gives parts of another one.
pub fn mutate(random: &mut Random, document: &mut Value, donor: &Value) {
    for _ in 0..=random.below(4) {
        let mut donor = donor.clone();
        let part = {
            let at = random.below(nodes(&donor));
            node(&mut donor, at)
                .map(|part| part.take())
                .unwrap_or_default()
        };
        let at = random.below(nodes(document));
        let Some(place) = node(document, at) else {
            continue;
        };
        match (random.below(8), &mut *place) {
            (0, Value::Object(object)) if !object.is_empty() => {
                let name = object
                    .keys()
                    .nth(random.below(object.len()))
                    .unwrap()
                    .clone();
                object.remove(&name);
            }
            (1, Value::Object(object)) if !object.is_empty() => {
                let name = object
                    .keys()
                    .nth(random.below(object.len()))
                    .unwrap()
                    .clone();
                object.insert(name, part);
            }
            (2, Value::Object(object)) => {
                object.insert((*random.pick(&TEXTS)).to_owned(), part);
            }
            (3, Value::Array(items)) if !items.is_empty() => {
                let item = items[random.below(items.len())].clone();
                let to = random.below(items.len() + 1);
                items.insert(to, item);
            }
            (4, Value::Array(items)) if !items.is_empty() => {
                items.remove(random.below(items.len()));
            }
            (5, Value::Array(items)) => items.push(part),
            (6, Value::String(text)) => *text = bytes_of(random, text),
            (7, value) => *value = json!([value.take()]),
            (kind, value) => *value = if kind % 2 == 0 { any(random) } else { part },
        }
    }
}

fn bytes_of(random: &mut Random, text: &str) -> String {
    let mut bytes = text.as_bytes().to_vec();
    mutate_bytes(random, &mut bytes, b"{\"a\": [1, null]} <|im_end|>");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Changes a few places of a text as a broken line would.
pub fn mutate_bytes(random: &mut Random, bytes: &mut Vec<u8>, donor: &[u8]) {
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len() + 1);
        let length = random.below(16).min(bytes.len() - at);
        match random.below(5) {
            0 => drop(bytes.drain(at..at + length)),
            1 => {
                let again = bytes[at..at + length].to_vec();
                bytes.splice(at..at, again);
            }
            2 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            3 => bytes.truncate(at),
            _ => {
                let from = random.below(donor.len() + 1);
                let to = (from + random.below(24)).min(donor.len());
                bytes.splice(at..at, donor[from..to].iter().copied());
            }
        }
    }
}

/// The same value with the keys of all its objects the other way round.
pub fn reversed(value: &Value) -> Value {
    match value {
        Value::Object(object) => {
            let turned = object.iter().rev();
            Value::Object(
                turned
                    .map(|(name, value)| (name.clone(), reversed(value)))
                    .collect::<Map<_, _>>(),
            )
        }
        Value::Array(items) => items.iter().map(reversed).collect(),
        other => other.clone(),
    }
}

//! The canonical form of a request, equal for retries of one call.
//!
//! Retries differ in their bytes (Codex writes an object in random key order), in fields that
//! do not reach the model (`stream` when a client falls back from a broken stream, a shrinking
//! `max_tokens`, session metadata, features of the provider that a client gives up after a
//! refusal) and in cache marks. None of these count.

use std::io;

use record::{Call, Dialect, ToolSpec};
use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

/// Top-level fields that do not count, in every dialect.
pub const VOLATILE: [&str; 19] = [
    "betas",
    "client_metadata",
    "context_management",
    "include",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "metadata",
    "output_config",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "stream",
    "stream_options",
    "thinking",
    "timeout",
    "user",
];

/// SHA-256, hexadecimal, over the dialect and the canonical JSON of `body`: keys sorted, the
/// top-level fields of [`VOLATILE`] and every `cache_control` mark left out.
#[must_use]
pub fn digest(dialect: Dialect, body: &Value) -> String {
    let mut hash = Hash(Sha256::new());
    hash.text(&format!("{dialect:?}\n"));
    write(body, true, &mut hash);
    hex::encode(hash.0.finalize())
}

/// SHA-256, hexadecimal, over tools as the model is told of them: in order, keys of schemas sorted.
#[must_use]
pub fn tools(tools: &[ToolSpec]) -> String {
    let mut hash = Hash(Sha256::new());
    for tool in tools {
        let words = [tool.name.as_str(), tool.description.as_str()];
        let parts = [Value::from(words.to_vec()), tool.parameters.clone()];
        write(&Value::from(parts.to_vec()), false, &mut hash);
    }
    hex::encode(hash.0.finalize())
}

/// [`tools`] of all calls: each set once, in order of appearance.
#[must_use]
pub fn tools_of_calls(calls: &[Call]) -> Vec<String> {
    let mut sets: Vec<&[ToolSpec]> = Vec::new();
    for call in calls {
        let set = call.conversation.tools.as_slice();
        if !sets.contains(&set) {
            sets.push(set);
        }
    }
    let mut digests: Vec<String> = Vec::new();
    for digest in sets.into_iter().map(tools) {
        if !digests.contains(&digest) {
            digests.push(digest);
        }
    }
    digests
}

/// Bodies have megabytes: nothing of them is put together before it is hashed.
struct Hash(Sha256);

impl Hash {
    fn text(&mut self, text: &str) {
        self.0.update(text.as_bytes());
    }

    /// A text or number as JSON.
    fn json(&mut self, value: &impl Serialize) {
        // Hashing cannot fail, and these values are JSON already.
        let _ = serde_json::to_writer(self, value);
    }
}

impl io::Write for Hash {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write(value: &Value, top: bool, out: &mut Hash) {
    match value {
        Value::Object(object) => {
            let mut entries: Vec<(&String, &Value)> = object
                .iter()
                .filter(|(name, _)| {
                    let volatile = top && VOLATILE.contains(&name.as_str());
                    let mark = !top && name.as_str() == "cache_control";
                    !volatile && !mark
                })
                .collect();
            entries.sort_unstable_by_key(|(name, _)| *name);
            out.text("{");
            for (name, value) in entries {
                out.json(name);
                out.text(":");
                write(value, false, out);
                out.text(",");
            }
            out.text("}");
        }
        Value::Array(items) => {
            out.text("[");
            for item in items {
                write(item, false, out);
                out.text(",");
            }
            out.text("]");
        }
        other => out.json(other),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn key_order_and_volatile_fields_do_not_count() {
        let first = json!({"model": "m", "max_tokens": 10, "stream": true, "user": "u",
            "messages": [{"role": "user", "content": "a", "cache_control": {"type": "ephemeral"}}]});
        let second = json!({"messages": [{"content": "a", "role": "user"}], "model": "m",
            "stream_options": {"include_usage": true}, "max_completion_tokens": 9,
            "client_metadata": {"b": 1, "a": 2}, "prompt_cache_key": "k", "metadata": {}});
        assert_eq!(
            digest(Dialect::Chat, &first),
            digest(Dialect::Chat, &second)
        );
    }

    #[test]
    fn tools_differ_by_what_the_model_is_told() {
        let tool = |name: &str, parameters| ToolSpec {
            name: name.into(),
            description: "does".into(),
            parameters,
        };
        let one = tools(&[tool("a", json!({"x": 1, "y": 2}))]);
        assert_eq!(one, tools(&[tool("a", json!({"y": 2, "x": 1}))]));
        let both = [tool("a", json!({})), tool("b", json!({}))];
        let turned = [both[1].clone(), both[0].clone()];
        let others = [
            tools(&[]),
            tools(&[tool("a", json!({"x": 1, "y": 3}))]),
            tools(&both),
            tools(&turned),
        ];
        for (at, other) in others.iter().enumerate() {
            assert_ne!(*other, one);
            assert!(!others[..at].contains(other), "{at}");
        }
    }

    #[test]
    fn everything_that_reaches_the_model_counts() {
        let base = json!({"model": "m", "messages": [{"role": "user", "content": "a"}]});
        let mut seen = vec![digest(Dialect::Chat, &base)];
        for other in [
            json!({"model": "m", "messages": [{"role": "user", "content": "b"}]}),
            json!({"model": "m", "messages": [{"role": "system", "content": "a"}]}),
            json!({"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": []}),
            json!({"model": "m", "messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "a"}]}),
            // A field called `stream` inside a message is not the volatile one.
            json!({"model": "m", "messages": [{"role": "user", "content": "a", "stream": true}]}),
        ] {
            let digest = digest(Dialect::Chat, &other);
            assert!(!seen.contains(&digest), "{other} has the digest of another");
            seen.push(digest);
        }
        assert_ne!(digest(Dialect::Responses, &base), seen[0]);
    }
}

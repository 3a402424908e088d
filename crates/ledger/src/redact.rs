//! What must not be written is removed before anything is encoded, so that it is in no page, log
//! or free page of the file.

use record::{Attempt, AttemptOutcome, Call, Message, Part, Rollout};
use regex::Regex;
use serde_json::Value;

use crate::LedgerError;

/// What stands where something was removed.
pub const REDACTED: &str = "[redacted]";

/// What to remove from calls and rollouts before they are written.
///
/// Token ids say the same as the text. So a call in which something was removed loses its ids and
/// log-probabilities too, and is not trained, unless `keep_tokens` says otherwise.
#[derive(Debug, Clone, Default)]
pub struct Redaction {
    patterns: Vec<Regex>,
    /// Paths into the request, split at `/`; `*` is any key or index.
    pointers: Vec<Vec<String>>,
    keep_tokens: bool,
}

impl Redaction {
    /// `patterns` are regular expressions: what they match in any text is replaced. `pointers` are
    /// JSON pointers into the request, with `*` for any key or index: what they lead to is
    /// replaced.
    ///
    /// # Errors
    /// [`LedgerError::Redaction`] names the pattern or pointer that is not one.
    pub fn new(
        patterns: &[&str],
        pointers: &[&str],
        keep_tokens: bool,
    ) -> Result<Self, LedgerError> {
        let wrong = |rule: &str, found: String| LedgerError::Redaction {
            rule: rule.to_owned(),
            found,
        };
        let pattern =
            |&text: &&str| Regex::new(text).map_err(|found| wrong(text, found.to_string()));
        let pointer = |&text: &&str| {
            let path = text.strip_prefix('/').ok_or_else(|| {
                wrong(
                    text,
                    "a pointer starts with `/`, e.g. `/metadata/user_id`".to_owned(),
                )
            })?;
            let part = |part: &str| part.replace("~1", "/").replace("~0", "~");
            Ok(path.split('/').map(part).collect())
        };
        Ok(Self {
            patterns: patterns.iter().map(pattern).collect::<Result<_, _>>()?,
            pointers: pointers.iter().map(pointer).collect::<Result<_, _>>()?,
            keep_tokens,
        })
    }

    /// Removes from a call; says whether anything was there.
    pub fn call(&self, call: &mut Call) -> bool {
        let mut removed = false;
        for pointer in &self.pointers {
            removed |= remove(&mut call.request, pointer);
        }
        removed |= self.value(&mut call.request);
        for message in call.conversation.messages.iter_mut().chain(&mut call.reply) {
            removed |= self.message(message);
        }
        for tool in &mut call.conversation.tools {
            removed |= self.text(&mut tool.description) | self.value(&mut tool.parameters);
        }
        for (_, value) in &mut call.headers {
            removed |= self.text(value);
        }
        removed |= self.text(&mut call.raw_text);
        for stop in &mut call.sampling.stop {
            removed |= self.text(stop);
        }
        self.attempts(&mut call.attempts);
        if removed && !self.keep_tokens {
            call.prompt_ids = Vec::new();
            call.generation = None;
        }
        removed
    }

    /// Removes from the words of an engine that failed.
    pub fn attempts(&self, attempts: &mut [Attempt]) {
        for attempt in attempts {
            if let AttemptOutcome::EngineFailed { reason } = &mut attempt.outcome {
                self.text(reason);
            }
        }
    }

    /// Removes from what a rollout holds of the harness's and verifier's output.
    pub fn rollout(&self, rollout: &mut Rollout) {
        self.text(&mut rollout.harness_tail);
        if let Some(verdict) = &mut rollout.verdict {
            self.text(&mut verdict.evidence);
        }
    }

    fn message(&self, message: &mut Message) -> bool {
        let mut removed = false;
        for part in &mut message.content {
            removed |= match part {
                Part::Text { text } => self.text(text),
                Part::Image { url } => self.text(url),
            };
        }
        if let Some(reasoning) = &mut message.reasoning {
            removed |= self.text(reasoning);
        }
        for call in &mut message.tool_calls {
            removed |= self.value(&mut call.arguments);
        }
        removed
    }

    fn value(&self, value: &mut Value) -> bool {
        match value {
            Value::String(text) => self.text(text),
            Value::Array(items) => items
                .iter_mut()
                .fold(false, |removed, item| self.value(item) | removed),
            Value::Object(map) => map
                .values_mut()
                .fold(false, |removed, item| self.value(item) | removed),
            Value::Null | Value::Bool(_) | Value::Number(_) => false,
        }
    }

    fn text(&self, text: &mut String) -> bool {
        let mut removed = false;
        for pattern in &self.patterns {
            if let std::borrow::Cow::Owned(new) =
                pattern.replace_all(text, regex::NoExpand(REDACTED))
            {
                *text = new;
                removed = true;
            }
        }
        removed
    }
}

fn remove(value: &mut Value, pointer: &[String]) -> bool {
    let Some((first, rest)) = pointer.split_first() else {
        *value = Value::String(REDACTED.to_owned());
        return true;
    };
    let any = |items: &mut dyn Iterator<Item = &mut Value>| {
        items.fold(false, |removed, item| remove(item, rest) | removed)
    };
    match value {
        Value::Object(map) if first == "*" => any(&mut map.values_mut()),
        Value::Object(map) => any(&mut map.get_mut(first).into_iter()),
        Value::Array(items) if first == "*" => any(&mut items.iter_mut()),
        Value::Array(items) => {
            let at = first.parse::<usize>().ok();
            any(&mut at.and_then(|at| items.get_mut(at)).into_iter())
        }
        _ => false,
    }
}

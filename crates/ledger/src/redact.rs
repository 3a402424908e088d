//! What must not be written is removed before anything is encoded, so that it is in no page, log
//! or free page of the file.

use std::collections::{BTreeMap, BTreeSet};

use record::{Attempt, AttemptOutcome, Call, Conversation, Disposition, Message, Part, Rollout};
use regex::Regex;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::LedgerError;

/// What stands where something was removed.
pub const REDACTED: &str = "[redacted]";

/// The label of a rollout that names its tenant.
pub const TENANT: &str = "tenant";

/// What to remove, as people write it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RedactionSettings {
    /// Regular expressions: what they match in any text is replaced.
    pub patterns: Vec<String>,
    /// JSON pointers into the request, with `*` for any key or index: what they lead to is
    /// replaced.
    pub pointers: Vec<String>,
    /// Whether a call in which something was removed keeps its tokens. They say the same as the
    /// text, so they go unless this says otherwise; then the call is not trained.
    pub keep_tokens: bool,
    /// More rules for rollouts whose label `tenant` has this value.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub tenants: BTreeMap<String, TenantSettings>,
    /// Tenants of whose calls no text and no token is kept, only sizes and outcomes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub opt_out: Vec<String>,
}

/// Rules of one tenant, on top of the common ones.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TenantSettings {
    /// As [`RedactionSettings::patterns`].
    pub patterns: Vec<String>,
    /// As [`RedactionSettings::pointers`].
    pub pointers: Vec<String>,
}

impl RedactionSettings {
    /// Whether nothing is removed from anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
            && self.pointers.is_empty()
            && self.tenants.is_empty()
            && self.opt_out.is_empty()
    }
}

/// The rules for every tenant, ready to be applied.
#[derive(Debug, Clone, Default)]
pub struct Redaction {
    common: Rules,
    tenants: BTreeMap<String, Rules>,
    opt_out: BTreeSet<String>,
}

impl Redaction {
    /// Reads the rules.
    ///
    /// # Errors
    /// [`LedgerError::Redaction`] names the pattern or pointer that is not one.
    pub fn new(settings: &RedactionSettings) -> Result<Self, LedgerError> {
        let common = Rules::new(&settings.patterns, &settings.pointers, settings.keep_tokens)?;
        let mut tenants = BTreeMap::new();
        for (name, own) in &settings.tenants {
            let patterns = [&settings.patterns[..], &own.patterns].concat();
            let pointers = [&settings.pointers[..], &own.pointers].concat();
            let rules = Rules::new(&patterns, &pointers, settings.keep_tokens)?;
            tenants.insert(name.clone(), rules);
        }
        Ok(Self {
            common,
            tenants,
            opt_out: settings.opt_out.iter().cloned().collect(),
        })
    }

    /// Whether it matters whose call it is.
    pub(crate) fn knows_tenants(&self) -> bool {
        !self.tenants.is_empty() || !self.opt_out.is_empty()
    }

    fn rules(&self, tenant: Option<&str>) -> &Rules {
        tenant
            .and_then(|tenant| self.tenants.get(tenant))
            .unwrap_or(&self.common)
    }

    fn is_out(&self, tenant: Option<&str>) -> bool {
        tenant.is_some_and(|tenant| self.opt_out.contains(tenant))
    }

    /// Removes from a call of this tenant; says whether anything was there.
    pub fn call(&self, call: &mut Call, tenant: Option<&str>) -> bool {
        let rules = self.rules(tenant);
        if !self.is_out(tenant) {
            return rules.call(call);
        }
        call.request = Value::from(REDACTED);
        call.headers = Vec::new();
        call.digest = String::new();
        call.conversation = Conversation::default();
        call.sampling.stop = Vec::new();
        call.raw_text = String::new();
        call.reply = None;
        call.prompt_ids = Vec::new();
        call.generation = None;
        self.attempts(&mut call.attempts, tenant);
        true
    }

    /// Removes from the words of an engine that failed.
    pub fn attempts(&self, attempts: &mut [Attempt], tenant: Option<&str>) {
        for attempt in attempts {
            if let AttemptOutcome::EngineFailed { reason } = &mut attempt.outcome {
                if self.is_out(tenant) {
                    REDACTED.clone_into(reason);
                } else {
                    self.rules(tenant).text(reason);
                }
            }
        }
    }

    /// Removes from what a rollout holds of the harness's and verifier's output, and of the words
    /// in which it is said what broke.
    pub fn rollout(&self, rollout: &mut Rollout) {
        let tenant = rollout.spec.labels.get(TENANT).cloned();
        let tenant = tenant.as_deref();
        let mut texts = vec![&mut rollout.harness_tail];
        texts.extend(
            rollout
                .verdict
                .as_mut()
                .map(|verdict| &mut verdict.evidence),
        );
        if let Some(
            Disposition::Truncate { reason }
            | Disposition::Mask { reason }
            | Disposition::Retry { reason, .. }
            | Disposition::Discard { reason, .. },
        ) = &mut rollout.disposition
        {
            texts.push(reason);
        }
        let (out, rules) = (self.is_out(tenant), self.rules(tenant));
        for text in texts {
            if out && !text.is_empty() {
                REDACTED.clone_into(text);
            } else {
                rules.text(text);
            }
        }
    }
}

/// What is removed for one tenant.
#[derive(Debug, Clone, Default)]
struct Rules {
    patterns: Vec<Regex>,
    /// Paths into the request, split at `/`; `*` is any key or index.
    pointers: Vec<Vec<String>>,
    keep_tokens: bool,
}

impl Rules {
    fn new(
        patterns: &[String],
        pointers: &[String],
        keep_tokens: bool,
    ) -> Result<Self, LedgerError> {
        let wrong = |rule: &str, found: String| LedgerError::Redaction {
            rule: rule.to_owned(),
            found,
        };
        let pattern =
            |text: &String| Regex::new(text).map_err(|found| wrong(text, found.to_string()));
        let pointer = |text: &String| {
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
    fn call(&self, call: &mut Call) -> bool {
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
        for attempt in &mut call.attempts {
            if let AttemptOutcome::EngineFailed { reason } = &mut attempt.outcome {
                self.text(reason);
            }
        }
        if removed && !self.keep_tokens {
            call.prompt_ids = Vec::new();
            call.generation = None;
        }
        removed
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

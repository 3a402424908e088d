//! What two conversations have in common, whatever the dialect and the client did to ids, key
//! order and white space.

use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use record::{Call, Message, Part, Role};
use serde_json::Value;

/// A conversation reduced to comparable keys.
#[derive(Debug, Clone)]
pub(crate) struct Digest {
    /// Leading system messages.
    pub(crate) system: u64,
    /// Tools, in order.
    pub(crate) tools: u64,
    pub(crate) tools_count: usize,
    /// How many leading system messages there are.
    head: usize,
    /// Keys of the leading system messages.
    head_keys: Vec<u64>,
    /// Messages after the leading system messages.
    pub(crate) messages: Vec<u64>,
    pub(crate) roles: Vec<Role>,
    /// Keys of the first 0, 1, 2 … of `messages`.
    pub(crate) prefixes: Vec<u64>,
    /// Our reply.
    pub(crate) reply: Option<u64>,
}

fn hash_value(value: &Value, hasher: &mut DefaultHasher) {
    match value {
        Value::Object(map) => {
            let mut keys: Vec<&String> = map.keys().collect();
            keys.sort();
            keys.len().hash(hasher);
            for key in keys {
                key.hash(hasher);
                hash_value(&map[key], hasher);
            }
        }
        Value::Array(items) => {
            items.len().hash(hasher);
            for item in items {
                hash_value(item, hasher);
            }
        }
        // Arguments that travel as text are the same arguments.
        Value::String(text) if text.trim_start().starts_with(['{', '[']) => {
            match serde_json::from_str::<Value>(text) {
                Ok(inner @ (Value::Object(_) | Value::Array(_))) => hash_value(&inner, hasher),
                _ => text.hash(hasher),
            }
        }
        Value::String(text) => text.hash(hasher),
        Value::Number(number) => number.to_string().hash(hasher),
        Value::Bool(flag) => flag.hash(hasher),
        Value::Null => 0_u8.hash(hasher),
    }
}

/// Role, text and tool calls. Ids are rewritten by clients and reasoning is echoed by some only,
/// so neither takes part.
pub(crate) fn message_key(message: &Message) -> u64 {
    let mut hasher = DefaultHasher::new();
    message.role.hash(&mut hasher);
    message.text_content().trim().hash(&mut hasher);
    for part in &message.content {
        if let Part::Image { url } = part {
            url.hash(&mut hasher);
        }
    }
    for call in &message.tool_calls {
        call.name.hash(&mut hasher);
        hash_value(&call.arguments, &mut hasher);
    }
    hasher.finish()
}

fn tools_key(call: &Call) -> u64 {
    let mut tools = DefaultHasher::new();
    for tool in &call.conversation.tools {
        tool.name.hash(&mut tools);
        tool.description.hash(&mut tools);
        hash_value(&tool.parameters, &mut tools);
    }
    tools.finish()
}

impl Digest {
    /// The keys of a call. `like` is an earlier call of the same conversation, if one is known:
    /// what is equal to it is compared, which is much cheaper than hashing all of a long history
    /// for every call of a rollout.
    pub(crate) fn of(call: &Call, like: Option<(&Call, &Self)>) -> Self {
        let messages = &call.conversation.messages;
        let known = like.map_or(0, |(other, _)| {
            messages
                .iter()
                .zip(&other.conversation.messages)
                .take_while(|(own, other)| own == other)
                .count()
        });
        let key = |at: usize| match like {
            Some((_, digest)) if at < known => match at.checked_sub(digest.head) {
                Some(at) => digest.messages[at],
                None => digest.head_keys[at],
            },
            _ => message_key(&messages[at]),
        };
        let head = messages
            .iter()
            .take_while(|message| message.role == Role::System)
            .count();
        let head_keys: Vec<u64> = (0..head).map(key).collect();
        let mut system = DefaultHasher::new();
        head_keys.iter().for_each(|key| key.hash(&mut system));
        let keys: Vec<u64> = (head..messages.len()).map(key).collect();
        let mut prefixes = Vec::with_capacity(keys.len() + 1);
        let mut prefix = 0_u64;
        prefixes.push(prefix);
        for key in &keys {
            let mut hasher = DefaultHasher::new();
            (prefix, key).hash(&mut hasher);
            prefix = hasher.finish();
            prefixes.push(prefix);
        }
        let same_tools =
            like.filter(|(other, _)| other.conversation.tools == call.conversation.tools);
        Self {
            system: system.finish(),
            tools: same_tools.map_or_else(|| tools_key(call), |(_, digest)| digest.tools),
            tools_count: call.conversation.tools.len(),
            head,
            head_keys,
            messages: keys,
            roles: messages[head..]
                .iter()
                .map(|message| message.role)
                .collect(),
            prefixes,
            reply: call.reply.as_ref().map(message_key),
        }
    }

    /// The first message after the system messages.
    pub(crate) fn first(&self) -> Option<u64> {
        self.messages.first().copied()
    }

    /// Messages that both begin with.
    pub(crate) fn common(&self, other: &Self) -> usize {
        let length = self.messages.len().min(other.messages.len());
        // Prefixes differ for good once they differ.
        let mut range = 0..length;
        while !range.is_empty() {
            let middle = range.start + range.len() / 2;
            if self.prefixes[middle + 1] == other.prefixes[middle + 1] {
                range.start = middle + 1;
            } else {
                range.end = middle;
            }
        }
        range.start
    }

    /// The call's messages with their keys.
    pub(crate) fn all<'a>(&'a self, call: &'a Call) -> impl Iterator<Item = (u64, &'a Message)> {
        let keys = self.head_keys.iter().chain(&self.messages).copied();
        keys.zip(&call.conversation.messages)
    }

    /// The same of its messages after its system messages and the first `after` of the others.
    pub(crate) fn rest<'a>(
        &'a self,
        call: &'a Call,
        after: usize,
    ) -> impl Iterator<Item = (u64, &'a Message)> {
        self.all(call).skip(self.head + after)
    }
}

/// Which earlier call shares most of a history.
#[derive(Debug, Default)]
pub(crate) struct Histories {
    latest: HashMap<(u32, u64), usize>,
}

impl Histories {
    /// Adds a call; calls must come in order of arrival.
    pub(crate) fn add(&mut self, at: usize, group: u32, digest: &Digest) {
        for &prefix in &digest.prefixes {
            self.latest.insert((group, prefix), at);
        }
    }

    /// The latest earlier call of the group that shares most messages, with their number; those
    /// that are not accepted are passed over.
    pub(crate) fn nearest(
        &self,
        group: u32,
        digest: &Digest,
        accept: impl Fn(usize) -> bool,
    ) -> Option<(usize, usize)> {
        (0..digest.prefixes.len()).rev().find_map(|length| {
            let at = *self.latest.get(&(group, digest.prefixes[length]))?;
            accept(at).then_some((at, length))
        })
    }
}

//! Kept branches as messages: for readers of OpenAI-style chats and for supervised training.
//!
//! A branch is the history of a call that no other kept call continues, and its reply. Where an
//! earlier kept call continues token by token into it, that call's turn is what *we* recorded,
//! not what the harness sent back: a harness may drop reasoning or rewrite ids.
//!
//! A turn is trained in one branch only (I3, by turn): the first one that holds it. Turns that
//! are not a kept call's own reply (history that came with the first request, replies that the
//! harness edited) are context.

use std::collections::{BTreeMap, BTreeSet};

use record::{Call, Message, Part, PolicyVersion, Role, ToolSpec};
use serde::Serialize;
use serde_json::{Value, json};

use crate::{Source, rows::Facts};

/// A message of a branch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Turn<'a> {
    /// What was said.
    pub message: &'a Message,
    /// The call that generated it, when this branch trains it.
    pub trained: Option<u32>,
}

/// A root-to-leaf path in messages.
#[derive(Debug, Clone, PartialEq)]
pub struct Branch<'a> {
    /// The call that it ends with.
    pub last: &'a Call,
    /// History and reply.
    pub turns: Vec<Turn<'a>>,
}

impl<'a> Branch<'a> {
    /// Tools that the model could call at its end.
    #[must_use]
    pub fn tools(&self) -> &'a [ToolSpec] {
        &self.last.conversation.tools
    }

    /// Calls whose replies it trains, in order.
    #[must_use]
    pub fn calls(&self) -> Vec<u32> {
        self.turns.iter().filter_map(|turn| turn.trained).collect()
    }
}

/// The kept calls of a rollout as branches, in the order of their last calls.
#[must_use]
pub fn branches<'a>(source: &Source<'a>) -> Vec<Branch<'a>> {
    let mut spoken: BTreeMap<u32, &'a Call> = BTreeMap::new();
    let mut ends = BTreeSet::new();
    // Delivered ones first: of replies with the same tokens at the same place one speaks.
    let mut kept: Vec<u32> = source.kept.calls.clone();
    kept.sort_by_key(|&call| {
        let delivered = source.tree.place(call).is_some_and(|place| place.delivered);
        (!delivered, call)
    });
    for index in kept {
        let (Some(place), Some(call)) = (source.tree.place(index), source.call(index)) else {
            continue;
        };
        let says = call.reply.is_some() && place.output_tokens > 0;
        if says && ends.insert((place.prompt_node, place.node)) {
            spoken.insert(index, call);
        }
    }
    let histories: BTreeMap<u32, Vec<u32>> = spoken
        .iter()
        .map(|(&index, call)| (index, continued(source, call, &spoken)))
        .collect();
    let inner: BTreeSet<u32> = histories.values().flatten().copied().collect();
    let mut owned = BTreeSet::new();
    let mut found = Vec::new();
    for (&index, &call) in spoken.iter().filter(|(index, _)| !inner.contains(*index)) {
        let mut turns: Vec<Turn<'a>> = call
            .conversation
            .messages
            .iter()
            .map(|message| Turn {
                message,
                trained: None,
            })
            .collect();
        for earlier in &histories[&index] {
            let Some((at, message)) = spoken
                .get(earlier)
                .and_then(|call| Some((call.conversation.messages.len(), call.reply.as_ref()?)))
            else {
                continue;
            };
            turns[at] = Turn {
                message,
                trained: owned.insert(*earlier).then_some(*earlier),
            };
        }
        turns.extend(call.reply.as_ref().map(|message| Turn {
            message,
            trained: owned.insert(index).then_some(index),
        }));
        found.push(Branch { last: call, turns });
    }
    found
}

/// The calls whose prompt and reply a call's prompt extends token by token, and whose reply is
/// where it belongs in the messages.
fn continued(source: &Source<'_>, call: &Call, spoken: &BTreeMap<u32, &Call>) -> Vec<u32> {
    let messages = &call.conversation.messages;
    let prompt = source
        .tree
        .place(call.id.index)
        .and_then(|place| place.prompt_node);
    let mut found: Vec<u32> = source
        .tree
        .path(prompt)
        .into_iter()
        .flat_map(|node| source.tree.nodes[node].outputs_end.iter().copied())
        .filter(|&earlier| {
            let at = spoken
                .get(&earlier)
                .map(|call| call.conversation.messages.len());
            let turn = at.and_then(|at| messages.get(at));
            earlier != call.id.index && turn.is_some_and(|turn| turn.role == Role::Assistant)
        })
        .collect();
    found.sort_unstable();
    found
}

/// Content of a message as OpenAI-style APIs have it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Content {
    /// Only text.
    Text(String),
    /// With images.
    Parts(Vec<Value>),
}

/// A message as OpenAI-style APIs have it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChatMessage<'a> {
    /// `system`, `user`, `assistant`, `tool`.
    pub role: &'static str,
    /// What was said; empty for a turn that only calls tools.
    pub content: Content,
    /// The model's reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<&'a str>,
    /// Tool calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ChatToolCall<'a>>,
    /// The tool call that this answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<&'a str>,
    /// Only in rows for supervised training: 1 where the policy generated the turn and this row
    /// trains it, else 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u8>,
}

/// A tool call as OpenAI-style APIs have it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChatToolCall<'a> {
    /// Its id.
    pub id: &'a str,
    /// Always `function`.
    pub r#type: &'static str,
    /// Name and arguments.
    pub function: ChatFunction<'a>,
}

/// What is called.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChatFunction<'a> {
    /// The tool.
    pub name: &'a str,
    /// Its arguments: as JSON text, as the API has them; in rows for supervised training as they
    /// are, since chat templates render them. What the model wrote where that is no JSON.
    pub arguments: Value,
}

/// One line: a branch of a rollout.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChatLine<'a> {
    /// History and reply.
    pub messages: Vec<ChatMessage<'a>>,
    /// Tools: their JSON schemas; as JSON text in Parquet, since every tool has a schema of its
    /// own.
    pub tools: Value,
    /// About the rollout.
    #[serde(flatten)]
    pub facts: Facts<'a>,
    /// What kind of call it ends with: `main`, `subagent` …
    pub class: &'static str,
    /// Number of the branch within the rollout.
    pub row: usize,
    /// Branches of the rollout.
    pub rows: usize,
    /// Calls whose replies are trained here.
    pub calls: Vec<u32>,
    /// Weights that generated those replies, each once.
    pub versions: Vec<PolicyVersion>,
}

impl ChatLine<'_> {
    /// The line as Parquet takes it: tools and arguments as JSON text, because each tool has a schema
    /// of its own.
    #[must_use]
    pub fn for_parquet(self) -> Self {
        let messages = self.messages.into_iter();
        Self {
            messages: messages.map(ChatMessage::with_text_arguments).collect(),
            tools: Value::String(self.tools.to_string()),
            ..self
        }
    }
}

/// The branches of a rollout as lines. With `weights` for supervised training: every message says
/// whether it is trained, and arguments are as they are.
#[must_use]
pub fn chat_lines<'a>(source: &Source<'a>, weights: bool) -> Vec<ChatLine<'a>> {
    let found = branches(source);
    let rows = found.len();
    let lines = found.into_iter().enumerate().map(|(row, branch)| {
        let calls = branch.calls();
        let place = source.tree.place(branch.last.id.index);
        ChatLine {
            messages: branch
                .turns
                .iter()
                .map(|turn| match weights {
                    true => ChatMessage {
                        weight: Some(u8::from(turn.trained.is_some())),
                        ..message(turn.message)
                    },
                    false => message(turn.message).with_text_arguments(),
                })
                .collect(),
            tools: branch.tools().iter().map(tool).collect(),
            facts: Facts::of(source),
            class: place.map_or("main", |place| place.class.name()),
            row,
            rows,
            versions: versions(source, &calls),
            calls,
        }
    });
    lines.collect()
}

/// Weights that generated the replies of calls, each once, ascending.
pub(crate) fn versions(source: &Source<'_>, calls: &[u32]) -> Vec<PolicyVersion> {
    let generations = calls
        .iter()
        .filter_map(|&call| source.call(call)?.generation.as_ref());
    let versions: BTreeSet<PolicyVersion> = generations
        .flat_map(|generation| generation.policy.iter().map(|span| span.version))
        .collect();
    versions.into_iter().collect()
}

/// A message in the shape of OpenAI-style APIs.
pub(crate) fn message(message: &Message) -> ChatMessage<'_> {
    let part = |part: &Part| match part {
        Part::Text { text } => json!({"type": "text", "text": text}),
        Part::Image { url } => json!({"type": "image_url", "image_url": {"url": url}}),
    };
    let has_image = message
        .content
        .iter()
        .any(|part| matches!(part, Part::Image { .. }));
    ChatMessage {
        role: match message.role {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        },
        content: match has_image {
            true => Content::Parts(message.content.iter().map(part).collect()),
            false => Content::Text(message.text_content()),
        },
        reasoning_content: message.reasoning.as_deref(),
        tool_calls: message
            .tool_calls
            .iter()
            .map(|call| ChatToolCall {
                id: &call.id,
                r#type: "function",
                function: ChatFunction {
                    name: &call.name,
                    arguments: call.arguments.clone(),
                },
            })
            .collect(),
        tool_call_id: message.tool_call_id.as_deref(),
        weight: None,
    }
}

impl ChatMessage<'_> {
    /// Arguments of tool calls as JSON text.
    pub(crate) fn with_text_arguments(mut self) -> Self {
        for call in &mut self.tool_calls {
            let arguments = &mut call.function.arguments;
            if !arguments.is_string() {
                *arguments = Value::String(arguments.to_string());
            }
        }
        self
    }
}

/// A tool in the shape of OpenAI-style APIs.
pub(crate) fn tool(tool: &ToolSpec) -> Value {
    json!({
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
        },
    })
}

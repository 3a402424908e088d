//! Raw text ⇄ reasoning, text and tool calls. One module per model family; [`hermes`] serves
//! Qwen, Hermes and the built-in policy.

pub mod hermes;

use record::{Conversation, Message, Role, ToolCall};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{CodecError, Inner};

/// How a model family writes reasoning and tool calls.
pub trait Grammar: Send + Sync + std::fmt::Debug {
    /// The family.
    fn name(&self) -> &'static str;

    /// Takes a reply apart. `text` has no end-of-turn token any more; `in_thought` tells that
    /// the prompt itself opened the reasoning.
    fn parse(&self, text: &str, in_thought: bool) -> Pieces;

    /// Writes a message, without an end-of-turn token. Used only when the template cannot tell.
    fn write(&self, message: &Message) -> String;

    /// Whether a generation prompt opens the reasoning.
    fn opens_thought(&self, generation_prompt: &str) -> bool;
}

/// A reply, taken apart.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Pieces {
    /// Reasoning, when there is any.
    pub reasoning: Option<String>,
    /// Text; what could not be parsed is in it.
    pub content: String,
    /// Name and arguments of each call.
    pub calls: Vec<(String, Value)>,
    /// Whether something looked like reasoning or a call but is not well-formed.
    pub failed: bool,
}

/// What a raw generation says.
#[derive(Debug, Clone, PartialEq)]
pub struct Parsed {
    /// The assistant message.
    pub message: Message,
    /// Whether a block was malformed and stayed text.
    pub failed: bool,
}

impl Parsed {
    /// Gives the tool calls ids that are unique in the rollout when `call` is the number of the
    /// model call: two calls may generate the same text. Nine letters and digits (as long as
    /// there are fewer than 100,000 calls): some templates accept nothing else.
    #[must_use]
    pub fn with_ids(mut self, call: u32) -> Self {
        for (position, tool_call) in self.message.tool_calls.iter_mut().enumerate() {
            tool_call.id = format!("c{call:05}p{position:02}");
        }
        self
    }
}

/// The grammar of a model, told by its template. All templates get [`hermes`] for now.
pub(crate) fn detect(_template: &str) -> Box<dyn Grammar> {
    Box::new(hermes::Hermes)
}

pub(crate) fn parse(inner: &Inner, raw: &str) -> Parsed {
    let text = inner
        .stop_texts
        .iter()
        .find_map(|stop| raw.strip_suffix(stop.as_str()))
        .unwrap_or(raw);
    let in_thought = inner.grammar.opens_thought(&inner.turn.generation_prompt);
    let pieces = inner.grammar.parse(text, in_thought);
    let mut message = Message::text(Role::Assistant, pieces.content);
    message.reasoning = pieces.reasoning;
    message.tool_calls = pieces
        .calls
        .into_iter()
        .enumerate()
        .map(|(position, (name, arguments))| ToolCall {
            id: derived_id(raw, position),
            name,
            arguments,
        })
        .collect();
    Parsed {
        message,
        failed: pieces.failed,
    }
}

/// Nine letters and digits: nothing else survives every harness and every template.
fn derived_id(raw: &str, position: usize) -> String {
    let hash = Sha256::new()
        .chain_update(raw.as_bytes())
        .chain_update(position.to_le_bytes())
        .finalize();
    format!("c{}", hex::encode(&hash[..4]))
}

pub(crate) fn speak(inner: &Inner, message: &Message) -> Result<String, CodecError> {
    let mut conversation = Conversation {
        messages: vec![Message::text(Role::User, "a")],
        tools: Vec::new(),
    };
    let prompt = inner.template.render(&conversation, true)?;
    conversation.messages.push(message.clone());
    let whole = inner.template.render(&conversation, false)?;
    let end = &inner.turn.end_text;
    if let Some(turn) = whole.strip_prefix(&prompt)
        && !end.is_empty()
        && let Some(at) = turn.rfind(end.as_str())
    {
        return Ok(turn[..at + end.len()].to_owned());
    }
    // The template shows a finished turn otherwise than it is generated.
    let end = Some(end.as_str()).filter(|end| !end.is_empty());
    let stop = end.or(inner.stop_texts.first().map(String::as_str));
    Ok(inner.grammar.write(message) + stop.unwrap_or_default())
}

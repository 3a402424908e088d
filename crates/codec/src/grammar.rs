//! Raw text ⇄ reasoning, text and tool calls, one grammar per model family:
//!
//! | grammar | families | calls |
//! |---|---|---|
//! | `hermes` | Hermes, Qwen, the built-in policy | `<tool_call>` with a JSON object |
//! | `qwen3-coder` | Qwen3-Coder | `<tool_call>` with `<function=…>` and `<parameter=…>` |
//! | `glm` | GLM-4.5 and later | `<tool_call>` with the name, `<arg_key>`, `<arg_value>` |
//! | `kimi` | Kimi K2 | `<\|tool_call_begin\|>` with `functions.NAME:N` and JSON |
//! | `minimax` | MiniMax-M2 | `<minimax:tool_call>` with `<invoke name="…">` |
//! | `deepseek` | DeepSeek V3, V3.1, R1 | `<｜tool▁call▁begin｜>` with name, separator, JSON |
//! | `mistral` | Mistral, Magistral, Devstral | `[TOOL_CALLS]`, a JSON list or name, `[ARGS]`, JSON |
//! | `llama3` | Llama 3.1 and later | the whole reply is JSON |
//! | `harmony` | gpt-oss | channels |
//!
//! These are ours and not those of a library: the one that is maintained for Rust parses
//! asynchronously, brings 135 packages into a crate that is to stay pure, and has no harmony. A
//! parse failure never loses text: what cannot be read stays content, and is counted.

mod blocks;
mod families;
mod harmony;
mod hermes;
#[cfg(test)]
pub(crate) mod tests;
mod whole;

use record::{Conversation, Message, Role, ToolCall, ToolSpec};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{CodecError, Inner};

/// How a model family writes reasoning and tool calls.
pub trait Grammar: Send + Sync + std::fmt::Debug {
    /// The family.
    fn name(&self) -> &'static str;

    /// Takes a reply apart. `text` has no end-of-turn token any more; `in_thought` tells that
    /// the prompt itself opened the reasoning; `tools` are those of the request: some families
    /// write arguments without their types.
    fn parse(&self, text: &str, in_thought: bool, tools: &[ToolSpec]) -> Pieces;

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

/// The grammar of a model, told by the marks that its template prints. The rarest marks are
/// looked for first; a template with none of them gets `hermes`.
pub(crate) fn detect(template: &str) -> Box<dyn Grammar> {
    let has = |mark: &str| template.contains(mark);
    if has("<|channel|>") {
        Box::new(harmony::Harmony)
    } else if has("<｜tool▁call") {
        Box::new(families::DEEPSEEK)
    } else if has("<|tool_calls_section_begin|>") {
        Box::new(families::KIMI)
    } else if has("<minimax:tool_call>") {
        Box::new(families::MINIMAX)
    } else if has("<arg_key>") {
        Box::new(families::GLM)
    } else if has("<function=") {
        Box::new(families::QWEN3_CODER)
    } else if has("[TOOL_CALLS]") {
        Box::new(whole::Mistral)
    } else if has("<|python_tag|>") || (has("<|start_header_id|>") && has("\"parameters\"")) {
        Box::new(whole::Llama3)
    } else {
        Box::new(hermes::HERMES)
    }
}

pub(crate) fn parse(inner: &Inner, raw: &str, tools: &[ToolSpec]) -> Parsed {
    let text = inner
        .stop_texts
        .iter()
        .find_map(|stop| raw.strip_suffix(stop.as_str()))
        .unwrap_or(raw);
    let in_thought = inner.grammar.opens_thought(&inner.turn.generation_prompt);
    let pieces = inner.grammar.parse(text, in_thought, tools);
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

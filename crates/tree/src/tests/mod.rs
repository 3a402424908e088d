//! Made-up rollouts and the tests over them.

mod algebra;
mod classes;
mod forks;
mod media;
mod packing;
mod rows;
mod selection;
mod world;

use record::{
    Attempt, AttemptOutcome, Call, CallId, Continuation, Conversation, Dialect, FinishReason,
    Generation, Message, PolicySpan, Role, RolloutId, Sampling, ToolCall, ToolSpec,
};
use serde_json::json;

/// A call with these tokens. Its log-probabilities tell who made them: -(call + offset / 1000).
pub(crate) fn call(index: u32, prompt: &[u32], output: Option<&[u32]>) -> Call {
    let generation = output.map(|output| {
        let logprobs: Vec<f32> = (0..output.len())
            .map(|offset| logprob(index, offset))
            .collect();
        Generation {
            token_ids: output.to_vec(),
            logprobs_sampled: logprobs.iter().map(|value| value - 0.5).collect(),
            logprobs_model: logprobs,
            policy: vec![PolicySpan {
                start: 0,
                version: u64::from(index),
            }],
            finish: FinishReason::Stop,
            cached_tokens: 0,
        }
    });
    let delivered = generation.is_some();
    Call {
        id: CallId {
            rollout: RolloutId::new("r").unwrap(),
            index,
        },
        dialect: Dialect::Chat,
        request: json!({}),
        headers: Vec::new(),
        digest: String::new(),
        conversation: Conversation::default(),
        prompt_ids: prompt.to_vec(),
        continuation: Continuation::default(),
        sampling: Sampling::default(),
        generation,
        raw_text: String::new(),
        reply: None,
        parse_failed: false,
        attempts: vec![attempt(delivered)],
    }
}

pub(crate) fn attempt(delivered: bool) -> Attempt {
    Attempt {
        started_ms: 0,
        finished_ms: 0,
        outcome: if delivered {
            AttemptOutcome::Delivered
        } else {
            AttemptOutcome::ClientGone
        },
        stream: false,
    }
}

pub(crate) fn logprob(call: u32, offset: usize) -> f32 {
    -(call as f32 + offset as f32 / 1000.0)
}

/// A toy codec: every message becomes a start token, its text as bytes and an end token, so that
/// equal histories have equal prefixes.
pub(crate) struct Talk {
    pub(crate) calls: Vec<Call>,
    /// Bytes of one token.
    chunk: usize,
}

pub(crate) const START: u32 = 1000;
pub(crate) const END: u32 = 1001;

pub(crate) fn said(message: &Message) -> Vec<u32> {
    encode(&spoken(message), 1)
}

/// One token for so many bytes; for one byte it is the byte.
fn encode(text: &str, chunk: usize) -> Vec<u32> {
    let token = |bytes: &[u8]| {
        let start = if bytes.len() > 1 { 1 << 31 } else { 0 };
        bytes.iter().fold(start, |token: u32, &byte| {
            token.wrapping_mul(131).wrapping_add(u32::from(byte))
        })
    };
    text.as_bytes().chunks(chunk).map(token).collect()
}

fn spoken(message: &Message) -> String {
    let mut text = message.text_content();
    if let Some(reasoning) = &message.reasoning {
        text = format!("<think>{reasoning}</think>{text}");
    }
    for call in &message.tool_calls {
        text += &format!("<call>{} {}</call>", call.name, call.arguments);
    }
    text
}

fn render(conversation: &Conversation, chunk: usize) -> Vec<u32> {
    let tools: String = conversation
        .tools
        .iter()
        .map(|tool| tool.name.as_str())
        .collect();
    let mut ids = encode(&tools, chunk);
    for message in &conversation.messages {
        ids.extend([START, 2000 + message.role as u32]);
        ids.extend(encode(&spoken(message), chunk));
        ids.push(END);
    }
    ids.extend([START, 2000 + Role::Assistant as u32]);
    ids
}

impl Talk {
    pub(crate) fn new() -> Self {
        Self::with_chunk(1)
    }

    /// Fewer tokens for the same texts.
    pub(crate) fn with_chunk(chunk: usize) -> Self {
        Self {
            calls: Vec::new(),
            chunk,
        }
    }

    /// Sends a conversation and records the reply; returns the call's number.
    pub(crate) fn send(&mut self, conversation: Conversation, reply: Message) -> u32 {
        let index = self.calls.len() as u32;
        let mut output = encode(&spoken(&reply), self.chunk);
        output.push(END);
        let prompt = render(&conversation, self.chunk);
        let mut call = call(index, &prompt, Some(&output));
        call.conversation = conversation;
        call.reply = Some(reply);
        self.calls.push(call);
        index
    }

    pub(crate) fn last(&mut self) -> &mut Call {
        self.calls.last_mut().unwrap()
    }
}

pub(crate) fn system(text: &str) -> Message {
    Message::text(Role::System, text)
}

pub(crate) fn user(text: &str) -> Message {
    Message::text(Role::User, text)
}

pub(crate) fn assistant(text: &str) -> Message {
    Message::text(Role::Assistant, text)
}

pub(crate) fn tool_result(text: &str) -> Message {
    Message::text(Role::Tool, text)
}

pub(crate) fn calls_tool(name: &str, argument: &str) -> Message {
    let mut message = Message::text(Role::Assistant, "");
    message.tool_calls.push(ToolCall {
        id: "id".to_owned(),
        name: name.to_owned(),
        arguments: json!({ "text": argument }),
    });
    message
}

pub(crate) fn with_tools(names: &[&str], messages: Vec<Message>) -> Conversation {
    Conversation {
        messages,
        tools: names
            .iter()
            .map(|name| ToolSpec {
                name: (*name).to_owned(),
                description: String::new(),
                parameters: json!({}),
            })
            .collect(),
    }
}

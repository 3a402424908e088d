//! A reply as a Messages body, and as an event stream that reassembles to it (I5).

use record::{FinishReason, Message};
use serde_json::{Value, json};

use crate::{
    Reply, opaque,
    request::arguments_object,
    sse::{deltas, frame},
};

/// The dialect's word for why the reply ended. A reply that calls tools says so even when it
/// was cut afterwards, or clients would not run the calls.
#[must_use]
pub fn stop_reason(message: &Message, finish: FinishReason) -> &'static str {
    match (message.tool_calls.is_empty(), finish) {
        (false, _) => "tool_use",
        (true, FinishReason::Stop) => "end_turn",
        (true, FinishReason::Length | FinishReason::Context) => "max_tokens",
    }
}

/// Thinking, text, then calls. A reply that says nothing has no blocks.
fn blocks(message: &Message) -> Vec<Value> {
    let mut blocks = Vec::new();
    if let Some(reasoning) = &message.reasoning {
        let signature = opaque::signature(reasoning);
        blocks.push(json!({"type": "thinking", "thinking": reasoning, "signature": signature}));
    }
    let text = message.text_content();
    if !text.is_empty() {
        blocks.push(json!({"type": "text", "text": text}));
    }
    for call in &message.tool_calls {
        blocks.push(json!({
            "type": "tool_use",
            "id": call.id,
            "name": call.name,
            "input": arguments_object(&call.arguments),
        }));
    }
    blocks
}

/// Prompt tokens from the cache are counted apart from the others, as the provider does; the sum
/// is the prompt.
fn usage(reply: &Reply, output: u32) -> Value {
    let cached = reply.usage.cached.min(reply.usage.prompt);
    json!({
        "input_tokens": reply.usage.prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    })
}

fn envelope(reply: &Reply, content: Vec<Value>, stop_reason: Option<&str>, output: u32) -> Value {
    json!({
        "id": reply.id,
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": null,
        "usage": usage(reply, output),
    })
}

/// The whole reply as one body.
#[must_use]
pub fn reply_body(reply: &Reply) -> Value {
    let stop = stop_reason(&reply.message, reply.finish);
    let content = blocks(&reply.message);
    envelope(reply, content, Some(stop), reply.usage.completion)
}

/// The whole reply as complete event frames: start, per block start, deltas and stop, then the
/// stop reason and the end.
#[must_use]
pub fn reply_events(reply: &Reply, chars_max: usize) -> Vec<String> {
    let mut frames = Vec::new();
    let mut emit = |name: &str, mut data: Value| {
        data["type"] = json!(name);
        frames.push(frame(Some(name), &data));
    };
    let start = envelope(reply, Vec::new(), None, 0);
    emit("message_start", json!({"type": "", "message": start}));
    for (index, block) in blocks(&reply.message).into_iter().enumerate() {
        let mut open = block.clone();
        let mut steps = Vec::new();
        let mut step = |kind: &str, field: &str, text: &str| {
            for delta in deltas(text, chars_max) {
                steps.push(json!({"type": kind, field: delta}));
            }
        };
        let words = |field: &str| block[field].as_str().unwrap_or_default().to_owned();
        match block["type"].as_str() {
            Some("thinking") => {
                open["thinking"] = json!("");
                open["signature"] = json!("");
                step("thinking_delta", "thinking", &words("thinking"));
                // A signature comes in one piece.
                steps.push(json!({"type": "signature_delta", "signature": words("signature")}));
            }
            Some("text") => {
                open["text"] = json!("");
                step("text_delta", "text", &words("text"));
            }
            _ => {
                open["input"] = json!({});
                step(
                    "input_json_delta",
                    "partial_json",
                    &block["input"].to_string(),
                );
            }
        }
        emit(
            "content_block_start",
            json!({"type": "", "index": index, "content_block": open}),
        );
        for delta in steps {
            emit(
                "content_block_delta",
                json!({"type": "", "index": index, "delta": delta}),
            );
        }
        emit("content_block_stop", json!({"type": "", "index": index}));
    }
    let stop = stop_reason(&reply.message, reply.finish);
    emit(
        "message_delta",
        json!({
            "type": "",
            "delta": {"stop_reason": stop, "stop_sequence": null},
            "usage": usage(reply, reply.usage.completion),
        }),
    );
    emit("message_stop", json!({"type": ""}));
    frames
}

//! A reply as a Chat Completions body, and as an event stream that reassembles to it (I5).

use record::{FinishReason, Message, ToolCall};
use serde_json::{Map, Value, json};

use crate::{Reply, sse::deltas};

/// The dialect's word for why the reply ended. A reply that calls tools says so even when it
/// was cut afterwards, or clients would not run the calls.
#[must_use]
pub fn finish_reason(message: &Message, finish: FinishReason) -> &'static str {
    match (message.tool_calls.is_empty(), finish) {
        (false, _) => "tool_calls",
        (true, FinishReason::Stop) => "stop",
        (true, FinishReason::Length | FinishReason::Context) => "length",
    }
}

/// Arguments as the wire wants them: JSON as text; text that was no JSON as it is.
fn arguments_text(call: &ToolCall) -> String {
    match &call.arguments {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

pub(super) fn call_value(call: &ToolCall) -> Map<String, Value> {
    let mut object = Map::new();
    object.insert("id".into(), json!(call.id));
    object.insert("type".into(), json!("function"));
    object.insert(
        "function".into(),
        json!({"name": call.name, "arguments": arguments_text(call)}),
    );
    object
}

/// The reply's text; `None` when it has none, which goes out as `null`.
fn text(message: &Message) -> Option<String> {
    Some(message.text_content()).filter(|text| !text.is_empty())
}

fn usage_value(reply: &Reply) -> Value {
    let usage = &reply.usage;
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt.saturating_add(usage.completion),
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    })
}

/// The whole reply as one body.
#[must_use]
pub fn reply_body(reply: &Reply) -> Value {
    let message = &reply.message;
    let mut out = Map::new();
    out.insert("role".into(), json!("assistant"));
    out.insert("content".into(), json!(text(message)));
    if let Some(reasoning) = &message.reasoning {
        out.insert("reasoning_content".into(), json!(reasoning));
    }
    if !message.tool_calls.is_empty() {
        let calls = message
            .tool_calls
            .iter()
            .map(call_value)
            .collect::<Vec<_>>();
        out.insert("tool_calls".into(), json!(calls));
    }
    json!({
        "id": reply.id,
        "object": "chat.completion",
        "created": reply.created_s,
        "model": reply.model,
        "choices": [{
            "index": 0,
            "message": out,
            "logprobs": null,
            "finish_reason": finish_reason(message, reply.finish),
        }],
        "usage": usage_value(reply),
    })
}

/// The whole reply as complete server-sent event frames: role, reasoning, text, one chunk per
/// tool call and delta, finish, usage when asked for, `[DONE]`. Each frame ends with an empty
/// line. Texts come in deltas of at most `chars_max` characters.
#[must_use]
pub fn reply_events(reply: &Reply, include_usage: bool, chars_max: usize) -> Vec<String> {
    let frame = |choices: Value, usage: Option<Value>| {
        let mut chunk = json!({
            "id": reply.id,
            "object": "chat.completion.chunk",
            "created": reply.created_s,
            "model": reply.model,
            "choices": choices,
        });
        // With usage asked for, every chunk carries the field and all but the last hold null.
        if include_usage {
            chunk["usage"] = usage.unwrap_or(Value::Null);
        }
        format!("data: {chunk}\n\n")
    };
    let delta = |delta: Value, finish: Option<&str>| {
        frame(
            json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}]),
            None,
        )
    };
    let message = &reply.message;
    let text = text(message);
    let first = text.as_ref().map(|_| "");
    let mut frames = vec![delta(json!({"role": "assistant", "content": first}), None)];
    for piece in deltas(message.reasoning.as_deref().unwrap_or_default(), chars_max) {
        frames.push(delta(json!({"reasoning_content": piece}), None));
    }
    for piece in deltas(text.as_deref().unwrap_or_default(), chars_max) {
        frames.push(delta(json!({"content": piece}), None));
    }
    for (index, call) in message.tool_calls.iter().enumerate() {
        let arguments = arguments_text(call);
        let mut pieces = deltas(&arguments, chars_max).into_iter();
        // The first delta of a call names it, the others carry only text.
        let mut value = Map::new();
        value.insert("index".into(), json!(index));
        value.extend(call_value(call));
        if let Some(function) = value.get_mut("function") {
            function["arguments"] = json!(pieces.next().unwrap_or_default());
        }
        frames.push(delta(json!({"tool_calls": [value]}), None));
        for piece in pieces {
            let value = json!({"index": index, "function": {"arguments": piece}});
            frames.push(delta(json!({"tool_calls": [value]}), None));
        }
    }
    frames.push(delta(json!({}), Some(finish_reason(message, reply.finish))));
    if include_usage {
        frames.push(frame(json!([]), Some(usage_value(reply))));
    }
    frames.push("data: [DONE]\n\n".to_owned());
    frames
}

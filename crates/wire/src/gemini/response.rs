//! A reply as a Gemini body, and as an event stream that reassembles to it (I5).

use record::{FinishReason, Message};
use serde_json::{Value, json};

use crate::{
    Form, Reply,
    request::arguments_object,
    sse::{deltas, frame},
};

/// The dialect's word for why the reply ended.
#[must_use]
pub fn finish_reason(message: &Message, finish: FinishReason) -> &'static str {
    match (message.tool_calls.is_empty(), finish) {
        (true, FinishReason::Length | FinishReason::Context) => "MAX_TOKENS",
        _ => "STOP",
    }
}

/// Thought, text, calls. A reply that says nothing has one empty text: clients repeat a call
/// whose answer has no parts.
fn parts(message: &Message, chars_max: usize) -> Vec<Value> {
    let mut parts = Vec::new();
    for delta in deltas(message.reasoning.as_deref().unwrap_or_default(), chars_max) {
        parts.push(json!({"text": delta, "thought": true}));
    }
    for delta in deltas(&message.text_content(), chars_max) {
        parts.push(json!({"text": delta}));
    }
    for call in &message.tool_calls {
        parts.push(json!({"functionCall": {
            "id": call.id, "name": call.name, "args": arguments_object(&call.arguments)}}));
    }
    if parts.is_empty() {
        parts.push(json!({"text": ""}));
    }
    parts
}

fn chunk(reply: &Reply, parts: Vec<Value>, finish: Option<&str>) -> Value {
    let usage = &reply.usage;
    let mut candidate = json!({"content": {"role": "model", "parts": parts}, "index": 0});
    if let Some(finish) = finish {
        candidate["finishReason"] = json!(finish);
    }
    json!({
        "candidates": [candidate],
        "usageMetadata": {
            "promptTokenCount": usage.prompt,
            "candidatesTokenCount": usage.completion,
            "totalTokenCount": usage.prompt.saturating_add(usage.completion),
            "cachedContentTokenCount": usage.cached,
        },
        "modelVersion": reply.model,
        "responseId": reply.id,
    })
}

/// The whole reply as one body.
#[must_use]
pub fn reply_body(reply: &Reply) -> Value {
    let finish = finish_reason(&reply.message, reply.finish);
    chunk(reply, parts(&reply.message, usize::MAX), Some(finish))
}

/// The whole reply as complete frames, one per part; the last one says why it ended.
#[must_use]
pub fn reply_events(reply: &Reply, form: &Form, chars_max: usize) -> Vec<String> {
    let finish = finish_reason(&reply.message, reply.finish);
    let parts = parts(&reply.message, chars_max);
    let last = parts.len() - 1;
    let chunks = parts.into_iter().enumerate().map(|(index, part)| {
        let finish = Some(finish).filter(|_| index == last);
        chunk(reply, vec![part], finish)
    });
    if form.json_list {
        // Without `alt=sse` a stream is one JSON list.
        let head = |index: usize| if index == 0 { "[" } else { ",\r\n" };
        let foot = |index: usize| if index == last { "]" } else { "" };
        chunks
            .enumerate()
            .map(|(index, chunk)| format!("{}{chunk}{}", head(index), foot(index)))
            .collect()
    } else {
        chunks.map(|chunk| frame(None, &chunk)).collect()
    }
}

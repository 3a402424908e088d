//! A reply as a Responses body, and as an event stream that reassembles to it (I5).

use record::{FinishReason, ToolCall};
use serde_json::{Value, json};

use crate::{
    Form, Reply, ToolForm, opaque,
    sse::{deltas, frame},
};

/// The part of the reply's id that its items' ids are made of.
fn stem(reply: &Reply) -> &str {
    reply.id.strip_prefix("resp_").unwrap_or(&reply.id)
}

fn call_item(call: &ToolCall, id: &str, form: &Form) -> Value {
    let text = match &call.arguments {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    match form.tools.get(&call.name) {
        Some(ToolForm::Custom) => {
            let input = match &call.arguments["input"] {
                Value::String(input) => input.clone(),
                _ => text,
            };
            json!({"type": "custom_tool_call", "id": format!("ctc_{id}"), "status": "completed",
                "call_id": call.id, "name": call.name, "input": input})
        }
        Some(ToolForm::Within { namespace, name }) => {
            json!({"type": "function_call", "id": format!("fc_{id}"), "status": "completed",
                "call_id": call.id, "name": name, "namespace": namespace, "arguments": text})
        }
        None => json!({"type": "function_call", "id": format!("fc_{id}"), "status": "completed",
            "call_id": call.id, "name": call.name, "arguments": text}),
    }
}

/// Reasoning, message, calls, in this order. A reply that says nothing has an empty message:
/// clients take a response without items for a broken one.
fn items(reply: &Reply, form: &Form) -> Vec<Value> {
    let stem = stem(reply);
    let message = &reply.message;
    if let Some(compaction) = &form.compaction {
        let mut items = compaction.kept.clone();
        items.push(json!({"type": "compaction", "id": format!("cmp_{stem}"),
            "encrypted_content": opaque::seal(&message.text_content())}));
        return items;
    }
    let mut items = Vec::new();
    if let Some(reasoning) = &message.reasoning {
        items.push(json!({
            "type": "reasoning",
            "id": format!("rs_{stem}"),
            "summary": [{"type": "summary_text", "text": reasoning}],
            "encrypted_content": opaque::seal(reasoning),
        }));
    }
    let text = message.text_content();
    if !text.is_empty() || (message.tool_calls.is_empty() && items.is_empty()) {
        items.push(json!({
            "type": "message",
            "id": format!("msg_{stem}"),
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}],
        }));
    }
    for (index, call) in message.tool_calls.iter().enumerate() {
        items.push(call_item(call, &format!("{stem}{index}"), form));
    }
    items
}

fn usage(reply: &Reply) -> Value {
    let usage = &reply.usage;
    json!({
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt.saturating_add(usage.completion),
    })
}

fn envelope(reply: &Reply, status: &str, output: Vec<Value>) -> Value {
    let usage = match status {
        "in_progress" => Value::Null,
        _ => usage(reply),
    };
    let incomplete = match status {
        "incomplete" => json!({"reason": "max_output_tokens"}),
        _ => Value::Null,
    };
    json!({
        "id": reply.id,
        "object": "response",
        "created_at": reply.created_s,
        "status": status,
        "error": null,
        "incomplete_details": incomplete,
        "instructions": null,
        "max_output_tokens": null,
        "metadata": {},
        "model": reply.model,
        "output": output,
        "parallel_tool_calls": true,
        "previous_response_id": null,
        "store": false,
        "temperature": null,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": null,
        "truncation": "disabled",
        "usage": usage,
    })
}

/// Whether it ended as it should. A reply that calls tools counts as complete even when it was
/// cut afterwards, or clients would not run the calls.
fn status(reply: &Reply) -> &'static str {
    match reply.finish {
        FinishReason::Length | FinishReason::Context if reply.message.tool_calls.is_empty() => {
            "incomplete"
        }
        _ => "completed",
    }
}

/// The whole reply as one body.
#[must_use]
pub fn reply_body(reply: &Reply, form: &Form) -> Value {
    if form
        .compaction
        .as_ref()
        .is_some_and(|compaction| compaction.route)
    {
        return json!({"id": reply.id, "object": "response.compaction",
            "created_at": reply.created_s, "output": items(reply, form), "usage": usage(reply)});
    }
    envelope(reply, status(reply), items(reply, form))
}

/// The frames of one response, numbered.
struct Frames(Vec<String>);

impl Frames {
    fn emit(&mut self, name: &str, mut rest: Value) {
        let mut data = json!({"type": name, "sequence_number": self.0.len()});
        if let (Some(data), Some(rest)) = (data.as_object_mut(), rest.as_object_mut()) {
            data.append(rest);
        }
        self.0.push(frame(Some(name), &data));
    }

    /// One item from added to done; `open` is the item before its text.
    fn item(&mut self, index: usize, item: &Value, chars_max: usize) {
        let id = &item["id"];
        let mut open = item.clone();
        if open.get("status").is_some() {
            open["status"] = json!("in_progress");
        }
        let place = |rest: Value| {
            let mut data = json!({"item_id": id, "output_index": index});
            for (name, value) in rest.as_object().into_iter().flatten() {
                data[name.as_str()] = value.clone();
            }
            data
        };
        let (list, part_name, text_name, index_name) = match item["type"].as_str() {
            Some("reasoning") => (
                "summary",
                "reasoning_summary_part",
                "reasoning_summary_text",
                "summary_index",
            ),
            Some("message") => ("content", "content_part", "output_text", "content_index"),
            Some("compaction") => {
                self.emit(
                    "response.output_item.added",
                    json!({"output_index": index, "item": open}),
                );
                return;
            }
            kind => {
                let (field, name) = match kind {
                    Some("custom_tool_call") => ("input", "custom_tool_call_input"),
                    _ => ("arguments", "function_call_arguments"),
                };
                let text = item[field].as_str().unwrap_or_default();
                open[field] = json!("");
                self.emit(
                    "response.output_item.added",
                    json!({"output_index": index, "item": open}),
                );
                for delta in deltas(text, chars_max) {
                    self.emit(
                        &format!("response.{name}.delta"),
                        place(json!({"delta": delta})),
                    );
                }
                self.emit(
                    &format!("response.{name}.done"),
                    place(json!({field: text})),
                );
                return;
            }
        };
        let part = &item[list][0];
        let text = part["text"].as_str().unwrap_or_default();
        let mut empty = part.clone();
        empty["text"] = json!("");
        open[list] = json!([]);
        self.emit(
            "response.output_item.added",
            json!({"output_index": index, "item": open}),
        );
        self.emit(
            &format!("response.{part_name}.added"),
            place(json!({index_name: 0, "part": empty})),
        );
        for delta in deltas(text, chars_max) {
            self.emit(
                &format!("response.{text_name}.delta"),
                place(json!({index_name: 0, "delta": delta})),
            );
        }
        self.emit(
            &format!("response.{text_name}.done"),
            place(json!({index_name: 0, "text": text})),
        );
        self.emit(
            &format!("response.{part_name}.done"),
            place(json!({index_name: 0, "part": part})),
        );
    }
}

/// The whole reply as complete event frames, in the provider's order.
#[must_use]
pub fn reply_events(reply: &Reply, form: &Form, chars_max: usize) -> Vec<String> {
    let mut frames = Frames(Vec::new());
    let begun = envelope(reply, "in_progress", Vec::new());
    frames.emit("response.created", json!({"response": begun}));
    frames.emit("response.in_progress", json!({"response": begun}));
    for (index, item) in items(reply, form).iter().enumerate() {
        frames.item(index, item, chars_max);
        frames.emit(
            "response.output_item.done",
            json!({"output_index": index, "item": item}),
        );
    }
    let whole = reply_body(reply, form);
    let name = match status(reply) {
        "incomplete" => "response.incomplete",
        _ => "response.completed",
    };
    frames.emit(name, json!({"response": whole}));
    frames.0
}

//! The request parsers of all dialects on inputs that nobody would send: they refuse or read, and
//! never break. What was read can be answered in every form.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    missing_docs,
    reason = "a test"
)]

mod mutate;

use mutate::{Effort, Random, mutate, mutate_bytes, reversed, search};
use record::{Dialect, FinishReason, Message, Role, ToolCall};
use serde_json::{Value, json};
use wire::{Reply, Target, Usage, dialect};

const DIALECTS: [Dialect; 4] = [
    Dialect::Chat,
    Dialect::Responses,
    Dialect::Messages,
    Dialect::Gemini,
];

/// Requests as real clients send them, with everything that the dialect has.
fn corpus(dialect: Dialect) -> Vec<Value> {
    let schema = json!({"type": "object", "properties": {"command": {"type": "string"}}});
    match dialect {
        Dialect::Chat => vec![
            json!({"model": "m", "stream": true, "stream_options": {"include_usage": true}, "max_tokens": 9,
                "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "seed": 7, "messages": [
                {"role": "system", "content": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]},
                {"role": "user", "content": [{"type": "text", "text": "u"}, {"type": "image_url", "image_url": {"url": "data:"}}]},
                {"role": "assistant", "content": null, "reasoning_content": "r", "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{\"command\": \"ls\"}"}}]},
                {"role": "tool", "tool_call_id": "c", "content": "done"}],
                "tools": [{"type": "function", "function": {"name": "bash", "description": "d", "parameters": schema}}]}),
        ],
        Dialect::Responses => vec![
            json!({"model": "m", "instructions": "i", "stream": true, "max_output_tokens": 9, "input": [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
                {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "data:"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}], "encrypted_content": wire::opaque::seal("r")},
                {"type": "function_call", "name": "bash", "namespace": "n", "arguments": "{}", "call_id": "c"},
                {"type": "custom_tool_call", "name": "patch", "input": "x", "call_id": "d"},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
                {"type": "compaction", "encrypted_content": wire::opaque::seal("s")},
                {"type": "compaction_trigger"}, {"type": "web_search_call"}],
                "tools": [{"type": "function", "name": "bash", "parameters": schema},
                    {"type": "custom", "name": "patch", "format": {"definition": "g"}},
                    {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "bash"}]}]}),
            json!({"previous_response_id": "resp_1", "input": "go"}),
        ],
        Dialect::Messages => vec![
            json!({"model": "m", "max_tokens": 9, "stream": true, "thinking": {"type": "enabled", "budget_tokens": 9},
                "system": [{"type": "text", "text": "x-anthropic-billing-header: a"}, {"type": "text", "text": "s"}],
                "messages": [
                {"role": "user", "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}]},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "x"},
                    {"type": "tool_use", "id": "c", "name": "bash", "input": {"command": "ls"}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "is_error": true,
                    "content": [{"type": "text", "text": "o"}]}, {"type": "text", "text": "b"}]},
                {"role": "system", "content": "reminder"}],
                "tools": [{"name": "bash", "description": "d", "input_schema": schema}]}),
        ],
        Dialect::Gemini => vec![
            json!({"systemInstruction": {"parts": [{"text": "s"}]}, "generationConfig": {"temperature": 1, "topK": 3,
                "maxOutputTokens": 9, "stopSequences": ["x"]}, "contents": [
                {"role": "user", "parts": [{"text": "u"}, {"inlineData": {"mimeType": "image/png", "data": "AA"}}]},
                {"role": "model", "parts": [{"text": "t", "thought": true}, {"functionCall": {"name": "bash", "args": {"command": "ls"}}}]},
                {"role": "user", "parts": [{"functionResponse": {"name": "bash", "response": {"output": "o"}}}]}],
                "tools": [{"functionDeclarations": [{"name": "bash", "parametersJsonSchema": schema}]}]}),
        ],
    }
}

fn check(dialect: Dialect, body: &Value, random: &mut Random) {
    let target = Target {
        model: "m".into(),
        stream: random.chance(2),
        json_list: random.chance(2),
        compact: random.chance(4),
    };
    // Key order is no part of what is asked.
    assert_eq!(
        wire::digest(dialect, body),
        wire::digest(dialect, &reversed(body))
    );
    let request = match dialect::parse(dialect, body, &target) {
        Ok(request) => request,
        Err(error) => {
            // A refusal is a sentence, however large the input was.
            assert!(error.to_string().len() < 2000, "{error}");
            return;
        }
    };
    let mut message = Message::text(Role::Assistant, "said");
    if random.chance(2) {
        message.reasoning = Some("thought".into());
    }
    for tool in request.conversation.tools.iter().take(3) {
        message.tool_calls.push(ToolCall {
            id: "c".into(),
            name: tool.name.clone(),
            arguments: mutate::any(random),
        });
    }
    let reply = Reply {
        id: "resp_1".into(),
        created_s: 1,
        model: request.model.clone(),
        message,
        finish: FinishReason::Stop,
        usage: Usage::default(),
    };
    assert!(dialect::reply_body(dialect, &reply, &request.form).is_object());
    let events = dialect::reply_events(dialect, &reply, &request.form, 1 + random.below(40));
    assert!(!events.is_empty());
    // What was read can be said to a text-only engine, and is read back.
    if !request.conversation.messages.is_empty() {
        let body = Value::Object(wire::chat::request_body(&request.conversation));
        wire::chat::parse(&body).unwrap();
    }
}

fn one(dialect: Dialect, random: &mut Random) {
    let corpus = corpus(dialect);
    let other = self::corpus(*random.pick(&DIALECTS));
    let mut body = random.pick(&corpus).clone();
    if random.chance(4) {
        // As bytes: most of it is no JSON any more, some of it is.
        let mut bytes = body.to_string().into_bytes();
        let donor = random.pick(&other).to_string();
        mutate_bytes(random, &mut bytes, donor.as_bytes());
        match serde_json::from_slice(&bytes) {
            Ok(read) => body = read,
            Err(_) => return,
        }
    } else {
        let donor = random.pick(&other).clone();
        mutate(random, &mut body, &donor);
    }
    check(dialect, &body, random);
}

fn run(effort: impl Fn() -> Effort) {
    for dialect in DIALECTS {
        search(&format!("{dialect:?}"), effort(), |random| {
            one(dialect, random)
        });
    }
}

#[test]
fn good_requests_are_read() {
    for dialect in DIALECTS {
        for body in corpus(dialect) {
            dialect::parse(dialect, &body, &Target::default()).unwrap();
        }
    }
}

#[test]
fn mutated_requests_break_nothing() {
    run(|| Effort::Inputs(4_000));
}

#[test]
#[ignore = "long: ESPALIER_FUZZ_SECONDS (60) for each of four dialects"]
fn mutated_requests_break_nothing_for_long() {
    run(Effort::long);
}

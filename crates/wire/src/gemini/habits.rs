//! What real harnesses do on this dialect, one test per habit.

use record::{FinishReason, Message, Role, ToolCall};
use serde_json::{Value, json};

use super::{error_body, error_event, parse, reply_body, reply_events};
use crate::{ErrorKind, Form, Reply, Target, Usage};

fn read(body: &Value) -> crate::Request {
    parse(body, &Target::default()).unwrap()
}

#[test]
fn a_request_as_gemini_cli_sends_it() {
    let body = json!({
        "systemInstruction": {"role": "user", "parts": [{"text": "rules"}]},
        "generationConfig": {"temperature": 1, "topP": 0.95, "topK": 64, "maxOutputTokens": 9,
            "stopSequences": ["x"], "seed": 3, "thinkingConfig": {"includeThoughts": true}},
        "tools": [{"googleSearch": {}}, {"functionDeclarations": [
            {"name": "f", "description": "d", "parametersJsonSchema": {"type": "object"}},
            {"name": "g", "parameters": {"type": "OBJECT", "properties": {"type": {"type": "STRING", "enum": ["A"]}}}}]}],
        "contents": [
            {"role": "user", "parts": [{"text": "go"}]},
            {"role": "model", "parts": [
                {"text": "hm", "thought": true},
                {"functionCall": {"name": "f", "args": {"b": 1, "a": 2}, "id": "f-1700000000-1"},
                    "thoughtSignature": "skip_thought_signature_validator"},
                {"functionCall": {"name": "f", "args": {}}}]},
            {"role": "user", "parts": [
                {"functionResponse": {"id": "f-1700000000-1", "name": "f", "response": {"output": "one\n"}}},
                {"functionResponse": {"name": "f", "response": {"output": "two", "exit": 1}}}]}]});
    let target = Target {
        model: "m".into(),
        stream: true,
        json_list: false,
        compact: false,
    };
    let request = parse(&body, &target).unwrap();
    assert!(request.stream && request.model == "m");
    assert_eq!(
        (request.sampling.top_k, request.sampling.tokens_max),
        (Some(64), Some(9))
    );
    assert_eq!(
        (request.sampling.seed, request.sampling.stop.len()),
        (Some(3), 1)
    );
    let list = &request.conversation.messages;
    let roles: Vec<_> = list.iter().map(|message| message.role).collect();
    assert_eq!(
        roles,
        [
            Role::System,
            Role::User,
            Role::Assistant,
            Role::Tool,
            Role::Tool
        ]
    );
    assert_eq!(list[2].tool_calls.len(), 2);
    assert_eq!(
        list[2].tool_calls[0].arguments.to_string(),
        r#"{"b":1,"a":2}"#
    );
    assert_eq!(list[3].text_content(), "one\n");
    assert_eq!(list[4].text_content(), r#"{"output":"two","exit":1}"#);
    // The provider's own schema is written in capitals; a property called `type` is none.
    assert_eq!(
        request.conversation.tools[1].parameters,
        json!({"type": "object", "properties":
        {"type": {"type": "string", "enum": ["A"]}}})
    );
}

#[test]
fn thoughts_that_are_dropped_and_signatures_that_are_added() {
    let turn = |parts: Value| {
        let body =
            json!({"contents": [{"parts": [{"text": "a"}]}, {"role": "model", "parts": parts}]});
        read(&body).conversation.messages.swap_remove(1)
    };
    let ours = turn(json!([{"text": "hm", "thought": true}, {"text": "Hi."}]));
    let echo = turn(json!([{"text": "Hi.", "thoughtSignature": "x"}, {"thoughtSignature": "x"}]));
    assert_eq!(ours.content, echo.content);
    assert_eq!(
        (ours.reasoning.as_deref(), echo.reasoning),
        (Some("hm"), None)
    );
}

#[test]
fn one_content_or_a_text_without_a_list() {
    for contents in [
        json!("a"),
        json!({"parts": {"text": "a"}}),
        json!([{"role": "user", "parts": [{"text": "a"}]}]),
    ] {
        let list = read(&json!({"contents": contents})).conversation.messages;
        assert_eq!(list, [Message::text(Role::User, "a")]);
    }
    let count = json!({"generateContentRequest": {"model": "m", "contents": "a"}});
    assert_eq!(read(&count).conversation.messages.len(), 1);
}

#[test]
fn refusals_name_the_field() {
    let text = |body: Value| parse(&body, &Target::default()).unwrap_err().to_string();
    insta::assert_snapshot!(text(json!({})), @"request field `contents`: expected at least one content, found null");
    insta::assert_snapshot!(text(json!({"contents": [{"role": "robot"}]})), @r#"request field `contents[0].role`: expected user, model or function, found {"role":"robot"}"#);
    insta::assert_snapshot!(text(json!({"contents": [{"parts": [{"executableCode": {}}]}]})), @r#"request field `contents[0].parts[0]`: a part with "executableCode" is not supported here; send text, images, function calls or function responses"#);
}

#[test]
fn a_body_and_a_stream_look_like_this() {
    let mut message = Message::text(Role::Assistant, "Hi.");
    message.tool_calls.push(ToolCall {
        id: "c".into(),
        name: "f".into(),
        arguments: json!({"z": 1, "a": 2}),
    });
    let mut reply = Reply {
        id: "r1".into(),
        created_s: 7,
        model: "m".into(),
        message,
        finish: FinishReason::Length,
        usage: Usage {
            prompt: 10,
            completion: 4,
            cached: 6,
        },
    };
    insta::assert_snapshot!(reply_body(&reply).to_string(), @r#"{"candidates":[{"content":{"role":"model","parts":[{"text":"Hi."},{"functionCall":{"id":"c","name":"f","args":{"z":1,"a":2}}}]},"index":0,"finishReason":"STOP"}],"usageMetadata":{"promptTokenCount":10,"candidatesTokenCount":4,"totalTokenCount":14,"cachedContentTokenCount":6},"modelVersion":"m","responseId":"r1"}"#);
    assert_eq!(reply_events(&reply, &Form::default(), usize::MAX).len(), 2);
    reply.message = Message::text(Role::Assistant, "");
    assert_eq!(
        reply_body(&reply)["candidates"][0]["finishReason"],
        "MAX_TOKENS"
    );
    // A reply that says nothing has a part all the same.
    assert_eq!(
        reply_body(&reply)["candidates"][0]["content"]["parts"],
        json!([{"text": ""}])
    );
}

#[test]
fn errors_have_the_providers_words() {
    let (status, body) = error_body(&ErrorKind::RateLimit { retry_after_s: 1 }, "why");
    assert_eq!(
        (status, body),
        (
            429,
            json!({"error": {"code": 429, "message": "why", "status": "RESOURCE_EXHAUSTED"}})
        )
    );
    let event = error_event(&ErrorKind::Overloaded, "why", &Form::default());
    assert_eq!(
        event,
        "data: {\"error\":{\"code\":503,\"message\":\"why\",\"status\":\"UNAVAILABLE\"}}\n\n"
    );
    let list = Form {
        json_list: true,
        ..Form::default()
    };
    assert!(error_event(&ErrorKind::Engine, "why", &list).starts_with("[{"));
}

//! What real harnesses do on this dialect, one test per habit.

use record::{FinishReason, Message, Role, ToolCall};
use serde_json::{Value, json};

use super::{error_body, error_event, parse, reply_body, reply_events};
use crate::{ErrorKind, Reply, Usage, digest, opaque};

fn messages(list: Value) -> Vec<Message> {
    let body = json!({"model": "m", "max_tokens": 9, "messages": list});
    parse(&body).unwrap().conversation.messages
}

#[test]
fn a_cache_mark_that_moves_changes_nothing() {
    // A one-block list while it carries the mark, a plain string afterwards.
    let mark = json!({"type": "ephemeral"});
    let first = json!([
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": mark}]}]);
    let later = json!([{"role": "user", "content": "a"}]);
    assert_eq!(messages(first.clone()), messages(later));
    let body = |list: &Value, mark: Value| {
        json!({"messages": list, "tools": [{"name": "f", "input_schema": {}, "cache_control": mark}],
            "system": [{"type": "text", "text": "s", "cache_control": mark}]})
    };
    let bare = json!([{"role": "user", "content": [{"type": "text", "text": "a"}]}]);
    let (marked, bare) = (
        body(&first, mark),
        json!({"messages": bare,
        "tools": [{"name": "f", "input_schema": {}}], "system": [{"type": "text", "text": "s"}]}),
    );
    assert_eq!(parse(&marked), parse(&bare));
    let of = |body| digest(record::Dialect::Messages, body);
    assert_eq!(of(&marked), of(&bare));
}

#[test]
fn the_billing_line_does_not_reach_the_model() {
    let body = |suffix: &str| {
        json!({"system": [
            {"type": "text", "text": format!("x-anthropic-billing-header: cc_version=2.1.332.{suffix}; cc_entrypoint=sdk-cli;")},
            {"type": "text", "text": "You are."}, {"type": "text", "text": "Rules."}],
            "messages": [{"role": "user", "content": "a"}]})
    };
    let (first, second) = (parse(&body("0a1")).unwrap(), parse(&body("f3c")).unwrap());
    assert_eq!(first, second);
    assert_eq!(first.conversation.messages[0].content.len(), 2);
    // Somebody who asks about the line may do so.
    let text = "x-anthropic-billing-header: what is it?";
    assert_eq!(
        messages(json!([{"role": "user", "content": text}]))[0].text_content(),
        text
    );
}

#[test]
fn a_system_message_in_the_midst_of_the_list_stays_there() {
    let list = messages(json!([
        {"role": "user", "content": "a"}, {"role": "system", "content": "b"},
        {"role": "system", "content": [{"type": "text", "text": "b", "cache_control": {}}]},
        {"role": "user", "content": "c"}]));
    let roles: Vec<_> = list.iter().map(|message| message.role).collect();
    assert_eq!(roles, [Role::User, Role::System, Role::System, Role::User]);
    assert_eq!(list[1], list[2]);
}

#[test]
fn thinking_comes_back_with_a_signature_or_an_empty_one_or_redacted() {
    for (block, reasoning) in [
        (
            json!({"type": "thinking", "thinking": "r", "signature": "x"}),
            Some("r"),
        ),
        (
            json!({"type": "thinking", "thinking": "r", "signature": ""}),
            Some("r"),
        ),
        (json!({"type": "thinking", "thinking": "r"}), Some("r")),
        (
            json!({"type": "thinking", "thinking": "", "signature": "x"}),
            None,
        ),
        (json!({"type": "redacted_thinking", "data": "x"}), None),
    ] {
        let list = messages(json!([{"role": "user", "content": "a"},
            {"role": "assistant", "content": [block, {"type": "text", "text": "t"}]}]));
        assert_eq!(list[1].reasoning.as_deref(), reasoning);
        assert_eq!(list[1].text_content(), "t");
    }
}

#[test]
fn results_of_parallel_calls_come_in_one_message_with_a_reminder_behind_them() {
    let list = messages(json!([{"role": "user", "content": "a"},
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"b": 1, "a": 2}},
            {"type": "tool_use", "id": "c2", "name": "f", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "one", "is_error": false},
            {"type": "tool_result", "tool_use_id": "c2", "content": [
                {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}}]},
            {"type": "text", "text": "<system-reminder>x</system-reminder>"}]}]));
    let said: Vec<_> = list
        .iter()
        .map(|message| {
            (
                message.role,
                message.text_content(),
                message.tool_call_id.as_deref(),
            )
        })
        .collect();
    assert_eq!(
        said,
        [
            (Role::User, "a".into(), None),
            (Role::Assistant, String::new(), None),
            (Role::Tool, "one".into(), Some("c1")),
            (Role::Tool, "two".into(), Some("c2")),
            (
                Role::User,
                "<system-reminder>x</system-reminder>".into(),
                None
            ),
        ]
    );
    assert_eq!(
        list[1].tool_calls[0].arguments.to_string(),
        r#"{"b":1,"a":2}"#
    );
}

#[test]
fn a_result_without_content_and_an_empty_assistant_turn() {
    let list = messages(json!([{"role": "user", "content": "a"},
        {"role": "assistant", "content": []}, {"role": "assistant", "content": ""},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}]));
    assert_eq!(list.len(), 2);
    assert!(list[1].role == Role::Tool && list[1].content.is_empty());
}

#[test]
fn unknown_fields_betas_and_provider_tools_are_ignored() {
    let body = json!({"model": "m", "max_tokens": 32000, "messages": [{"role": "user", "content": "a"}],
        "metadata": {"user_id": "{}"}, "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": []}, "output_config": {"effort": "high"}, "stream": true,
        "tool_choice": {"type": "auto"}, "container": {}, "service_tier": "auto",
        "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
            {"type": "custom", "name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": true,
                "eager_input_streaming": true}]});
    let request = parse(&body).unwrap();
    assert!(request.stream);
    assert_eq!(request.sampling.tokens_max, Some(32000));
    assert_eq!(request.conversation.tools.len(), 1);
    assert_eq!(request.conversation.tools[0].name, "f");
    // A client that drops a beta after a refusal repeats the same call.
    let mut fewer = body.clone();
    fewer
        .as_object_mut()
        .unwrap()
        .shift_remove("context_management");
    let of = |body| digest(record::Dialect::Messages, body);
    assert_eq!(of(&body), of(&fewer));
}

#[test]
fn sampling_wishes() {
    let body = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 5,
        "temperature": 1, "top_p": 0.5, "top_k": 3, "stop_sequences": ["x", ""]});
    let wishes = parse(&body).unwrap().sampling;
    assert_eq!(
        (wishes.tokens_max, wishes.temperature, wishes.top_p),
        (Some(5), Some(1.0), Some(0.5))
    );
    assert_eq!((wishes.top_k, wishes.stop), (Some(3), vec!["x".to_owned()]));
}

#[test]
fn refusals_name_the_field() {
    let text = |body: Value| parse(&body).unwrap_err().to_string();
    insta::assert_snapshot!(text(json!({})), @"request field `messages`: expected at least one message, found null");
    insta::assert_snapshot!(text(json!({"messages": [{"role": "tool"}]})), @r#"request field `messages[0].role`: expected user, assistant or system, found "tool""#);
    insta::assert_snapshot!(text(json!({"messages": [{"role": "user", "content": [{"type": "audio"}]}]})), @r#"request field `messages[0].content[0]`: content of type "audio" is not supported here; send text or images"#);
    insta::assert_snapshot!(text(json!({"messages": [{"role": "user", "content": 1}]})), @"request field `messages[0].content`: expected a string or content blocks, found 1");
    insta::assert_snapshot!(text(json!({"system": {}, "messages": [{"role": "user"}]})), @"request field `system`: expected a string or content blocks, found {}");
}

fn reply() -> Reply {
    let mut message = Message::text(Role::Assistant, "Hi.");
    message.reasoning = Some("hm".into());
    message.tool_calls.push(ToolCall {
        id: "c00000p00".into(),
        name: "f".into(),
        arguments: json!({"z": 1, "a": "ü"}),
    });
    Reply {
        id: "msg_1".into(),
        created_s: 7,
        model: "m".into(),
        message,
        finish: FinishReason::Stop,
        usage: Usage {
            prompt: 10,
            completion: 4,
            cached: 6,
        },
    }
}

#[test]
fn a_body_looks_like_this() {
    let body = reply_body(&reply()).to_string();
    let body = body.replace(&opaque::signature("hm"), "SIGNATURE");
    insta::assert_snapshot!(body, @r#"{"id":"msg_1","type":"message","role":"assistant","model":"m","content":[{"type":"thinking","thinking":"hm","signature":"SIGNATURE"},{"type":"text","text":"Hi."},{"type":"tool_use","id":"c00000p00","name":"f","input":{"z":1,"a":"ü"}}],"stop_reason":"tool_use","stop_sequence":null,"usage":{"input_tokens":4,"cache_creation_input_tokens":0,"cache_read_input_tokens":6,"output_tokens":4}}"#);
    let mut cut = reply();
    cut.message.tool_calls.clear();
    cut.finish = FinishReason::Length;
    assert_eq!(reply_body(&cut)["stop_reason"], "max_tokens");
    cut.finish = FinishReason::Stop;
    assert_eq!(reply_body(&cut)["stop_reason"], "end_turn");
}

#[test]
fn a_stream_begins_with_the_real_usage() {
    let events = reply_events(&reply(), usize::MAX);
    assert!(events[0].starts_with("event: message_start\ndata: {"));
    assert!(events[0].contains(
        r#""input_tokens":4,"cache_creation_input_tokens":0,"cache_read_input_tokens":6"#
    ));
    let names: Vec<_> = events
        .iter()
        .map(|event| event.lines().next().unwrap())
        .collect();
    assert_eq!(names.len(), 1 + 4 + 3 + 3 + 2);
    assert_eq!(
        &names[names.len() - 2..],
        ["event: message_delta", "event: message_stop"]
    );
}

#[test]
fn errors_have_the_providers_types_and_statuses() {
    for (kind, status, class) in [
        (ErrorKind::InvalidRequest, 400, "invalid_request_error"),
        (ErrorKind::TooLong, 400, "invalid_request_error"),
        (ErrorKind::Unauthorized, 401, "authentication_error"),
        (ErrorKind::NotFound, 404, "not_found_error"),
        (ErrorKind::Ended, 401, "authentication_error"),
        (ErrorKind::TooLarge, 413, "request_too_large"),
        (
            ErrorKind::RateLimit { retry_after_s: 1 },
            429,
            "rate_limit_error",
        ),
        (ErrorKind::Engine, 500, "api_error"),
        (ErrorKind::Overloaded, 529, "overloaded_error"),
    ] {
        let (found, body) = error_body(&kind, "why");
        assert_eq!(
            (found, body["error"]["type"].as_str()),
            (status, Some(class))
        );
        assert_eq!(
            (body["type"].as_str(), body["error"]["message"].as_str()),
            (Some("error"), Some("why"))
        );
    }
    assert_eq!(
        error_event(&ErrorKind::Overloaded, "later"),
        "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"later\"}}\n\n"
    );
}

//! What eleven real harnesses do on this dialect, one test per habit.

use record::{FinishReason, Message, Part, Role, ToolCall};
use serde_json::{Value, json};

use super::{error_body, error_event, finish_reason, parse, reply_body, reply_events};
use crate::{ErrorKind, Reply, Usage, WireError};

fn body(messages: Value) -> Value {
    json!({"model": "m", "messages": messages})
}

fn messages(messages: Value) -> Vec<Message> {
    parse(&body(messages)).unwrap().conversation.messages
}

/// The message before the last, when the last is a user's.
fn echoed(message: Value) -> Message {
    let list =
        json!([{"role": "user", "content": "go"}, message, {"role": "user", "content": "on"}]);
    messages(list).swap_remove(1)
}

#[test]
fn a_body_with_nothing_but_messages_is_enough() {
    let request = parse(&json!({"messages": [{"content": "hi", "role": "user"}]})).unwrap();
    assert_eq!((request.stream, request.form.include_usage), (false, false));
    assert_eq!(request.model, "");
    assert_eq!(request.sampling, Default::default());
}

#[test]
fn unknown_fields_are_ignored() {
    let request = json!({
        "model": "m", "store": false, "prompt_cache_key": "k", "parallel_tool_calls": true,
        "reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": false},
        "thinking": {"type": "enabled", "keep": "all"}, "tool_choice": "auto", "user": "u",
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}], "extra": 1}],
        "tools": [{"type": "function", "cache_control": {"type": "ephemeral"}, "function":
            {"name": "f", "description": "d", "strict": false, "parameters": {"type": "object"}}}],
    });
    let conversation = parse(&request).unwrap().conversation;
    assert_eq!(conversation.messages, [Message::text(Role::User, "hi")]);
    assert_eq!(conversation.tools[0].parameters, json!({"type": "object"}));
}

#[test]
fn null_and_absent_are_the_same_for_every_optional_field() {
    let request = json!({
        "model": null, "stream": null, "stream_options": null, "temperature": null, "top_p": null,
        "max_tokens": null, "max_completion_tokens": null, "stop": null, "seed": null, "n": null,
        "tools": null, "messages": [{"role": "user", "content": "a"}],
    });
    let bare = json!({"messages": [{"role": "user", "content": "a"}]});
    assert_eq!(parse(&request).unwrap(), parse(&bare).unwrap());
}

#[test]
fn no_text_is_null_or_empty_or_absent() {
    let call =
        json!([{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]);
    let turns = [
        json!({"role": "assistant", "content": null, "tool_calls": call}),
        json!({"role": "assistant", "content": "", "tool_calls": call}),
        json!({"role": "assistant", "content": [], "tool_calls": call}),
        json!({"role": "assistant", "content": [{"type": "text", "text": ""}], "tool_calls": call}),
        json!({"tool_calls": call, "role": "assistant"}),
    ];
    let first = echoed(turns[0].clone());
    assert!(first.content.is_empty() && first.tool_calls.len() == 1);
    for turn in turns {
        assert_eq!(echoed(turn), first);
    }
}

#[test]
fn text_survives_to_the_byte() {
    let text = "\n  two  spaces\t\r\nümläut 🌱 \u{2028} \"quoted\" \\ \n\n";
    assert_eq!(
        messages(json!([{"role": "user", "content": text}]))[0].text_content(),
        text
    );
    let blocks = json!([{"type": "text", "text": "a\n"}, "b", {"type": "text", "text": " c"}]);
    let message = &messages(json!([{"role": "user", "content": blocks}]))[0];
    assert_eq!(
        (message.content.len(), message.text_content()),
        (3, "a\nb c".into())
    );
}

#[test]
fn arguments_come_as_text_or_object_and_keep_their_key_order() {
    let arguments = |value: Value| {
        let message = echoed(json!({"role": "assistant", "tool_calls": [
            {"id": "i", "type": "function", "function": {"name": "f", "arguments": value}}]}));
        message.tool_calls[0].arguments.to_string()
    };
    assert_eq!(
        arguments(json!("{\"z\": 1, \"a\": {\"y\":2, \"b\":3}}")),
        r#"{"z":1,"a":{"y":2,"b":3}}"#
    );
    assert_eq!(arguments(json!({"z": 1, "a": 2})), r#"{"z":1,"a":2}"#);
    for nothing in [json!(""), json!("  "), json!("{}"), Value::Null] {
        assert_eq!(arguments(nothing), "{}");
    }
    // Not JSON, or no object: what the model wrote is kept.
    assert_eq!(arguments(json!("{\"a\": ")), r#""{\"a\": ""#);
    assert_eq!(arguments(json!("[1]")), r#""[1]""#);
}

#[test]
fn reasoning_comes_under_either_name_or_both_or_not_at_all() {
    for (turn, expected) in [
        (
            json!({"role": "assistant", "content": "a", "reasoning_content": "r"}),
            Some("r"),
        ),
        (
            json!({"role": "assistant", "content": "a", "reasoning": "r"}),
            Some("r"),
        ),
        (
            json!({"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r"}),
            Some("r"),
        ),
        (
            json!({"role": "assistant", "content": "a", "reasoning_content": ""}),
            None,
        ),
        (
            json!({"role": "assistant", "content": "a", "reasoning_content": null}),
            None,
        ),
        (json!({"role": "assistant", "content": "a"}), None),
        // Some provider's object under the same name: not ours to refuse.
        (
            json!({"role": "assistant", "content": "a", "reasoning": {"effort": "high"}}),
            None,
        ),
        (
            json!({"role": "assistant", "content": [
            {"type": "thinking", "thinking": "r", "signature": ""}, {"type": "text", "text": "a"}]}),
            Some("r"),
        ),
    ] {
        let message = echoed(turn.clone());
        assert_eq!(message.reasoning.as_deref(), expected, "{turn}");
        assert_eq!(message.text_content(), "a");
    }
}

#[test]
fn an_empty_assistant_turn_of_a_failed_call_is_dropped() {
    let list = json!([
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": null, "tool_calls": []},
        {"role": "user", "content": "a"},
    ]);
    assert_eq!(messages(list).len(), 2);
    // A cut reply's partial text, and an empty user turn, are history.
    let list = json!([{"role": "assistant", "content": "I wi"}, {"role": "user", "content": ""}]);
    assert_eq!(messages(list).len(), 2);
}

#[test]
fn developer_and_late_system_messages_are_system_where_they_stand() {
    let list = json!([
        {"role": "developer", "content": "a"}, {"role": "user", "content": "b"},
        {"role": "system", "content": "c"},
    ]);
    let roles: Vec<Role> = messages(list).iter().map(|message| message.role).collect();
    assert_eq!(roles, [Role::System, Role::User, Role::System]);
}

#[test]
fn tool_results_are_text_or_blocks_under_rewritten_ids() {
    let list = json!([
        {"role": "user", "content": "a"},
        {"role": "tool", "tool_call_id": "call1abc", "content": "x"},
        {"role": "tool", "tool_call_id": "1700000000-2", "content": [{"type": "text", "text": "y"}]},
        {"role": "function", "name": "f", "content": "z"},
    ]);
    let list = messages(list);
    let results: Vec<_> = list[1..]
        .iter()
        .map(|message| (message.tool_call_id.as_deref(), message.text_content()))
        .collect();
    assert_eq!(
        results,
        [
            (Some("call1abc"), "x".into()),
            (Some("1700000000-2"), "y".into()),
            (None, "z".into())
        ]
    );
}

#[test]
fn images_are_kept() {
    let list = json!([{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}},
        {"type": "input_image", "image_url": "http://x/y.png"}]}]);
    let urls = ["data:image/png;base64,AA", "http://x/y.png"];
    assert_eq!(
        messages(list)[0].content,
        urls.map(|url| Part::Image { url: url.into() })
    );
}

#[test]
fn old_style_functions_and_tools_without_parameters() {
    let request = json!({"messages": [{"role": "assistant", "content": null,
            "function_call": {"name": "f", "arguments": "{\"a\":1}"}}],
        "functions": [{"name": "f"}],
        "tools": [{"type": "web_search"}, {"type": "function", "function": {"name": "g", "description": null}}]});
    let conversation = parse(&request).unwrap().conversation;
    assert_eq!(
        conversation.messages[0].tool_calls[0].arguments,
        json!({"a": 1})
    );
    let names: Vec<&str> = conversation
        .tools
        .iter()
        .map(|tool| tool.name.as_str())
        .collect();
    assert_eq!(names, ["g", "f"]);
    assert_eq!(
        conversation.tools[0].parameters,
        json!({"type": "object", "properties": {}})
    );
}

#[test]
fn sampling_wishes_under_all_their_names() {
    let wishes = |mut extra: Value| {
        extra["messages"] = json!([{"role": "user", "content": "a"}]);
        parse(&extra).unwrap().sampling
    };
    assert_eq!(wishes(json!({"max_tokens": 5})).tokens_max, Some(5));
    assert_eq!(
        wishes(json!({"max_tokens": 5, "max_completion_tokens": 7})).tokens_max,
        Some(7)
    );
    assert_eq!(
        wishes(json!({"max_tokens": 32000.0})).tokens_max,
        Some(32000)
    );
    assert_eq!(
        wishes(json!({"max_tokens": 1e12})).tokens_max,
        Some(u32::MAX)
    );
    assert_eq!(wishes(json!({"stop": "a"})).stop, ["a"]);
    assert_eq!(wishes(json!({"stop": ["a", ""]})).stop, ["a"]);
    assert_eq!(
        wishes(json!({"temperature": 1, "top_p": 0.5})).temperature,
        Some(1.0)
    );
    assert_eq!(wishes(json!({"top_k": -1})).top_k, Some(0));
    assert_eq!(wishes(json!({"seed": -1})).seed, Some(u64::MAX));
}

#[test]
fn refusals_name_the_field() {
    let text = |request: Value| parse(&request).unwrap_err().to_string();
    insta::assert_snapshot!(text(json!([])), @"request field `(body)`: expected a JSON object, found []");
    insta::assert_snapshot!(text(json!({})), @"request field `messages`: expected at least one message, found null");
    insta::assert_snapshot!(text(body(json!([{"role": "robot"}]))), @r#"request field `messages[0].role`: expected system, developer, user, assistant or tool, found "robot""#);
    insta::assert_snapshot!(text(body(json!([{"role": "user", "content": 7}]))), @"request field `messages[0].content`: expected a string or content parts, found 7");
    insta::assert_snapshot!(text(body(json!([{"role": "user", "content": [{"type": "input_audio"}]}]))), @r#"request field `messages[0].content[0]`: content of type "input_audio" is not supported here; send text or images"#);
    insta::assert_snapshot!(text(json!({"messages": [{"role": "user"}], "n": 4})), @"request field `n`: 4 replies to one request is not supported here; send the request once per reply");
    insta::assert_snapshot!(text(json!({"messages": [{"role": "user"}], "stream": "yes"})), @r#"request field `stream`: expected true or false, found "yes""#);
    insta::assert_snapshot!(text(json!({"messages": [{"role": "user"}], "max_tokens": 0})), @"request field `max_tokens`: expected a whole number, found 0");
    let long = "x".repeat(500);
    assert!(text(json!({"messages": [{"role": "user"}], "temperature": long})).len() < 200);
    assert!(matches!(
        parse(&json!({"messages": 1})),
        Err(WireError::Field { .. })
    ));
}

fn reply(text: &str, calls: &[(&str, Value)]) -> Reply {
    let mut message = Message::text(Role::Assistant, text);
    message.tool_calls = calls
        .iter()
        .enumerate()
        .map(|(index, (name, arguments))| ToolCall {
            id: format!("call{index}"),
            name: (*name).into(),
            arguments: arguments.clone(),
        })
        .collect();
    Reply {
        id: "chatcmpl1".into(),
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
    let mut reply = reply("", &[("bash", json!({"command": "ls", "z": 1}))]);
    reply.message.reasoning = Some("I look.".into());
    insta::assert_snapshot!(reply_body(&reply).to_string(), @r#"{"id":"chatcmpl1","object":"chat.completion","created":7,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":null,"reasoning_content":"I look.","tool_calls":[{"id":"call0","type":"function","function":{"name":"bash","arguments":"{\"command\":\"ls\",\"z\":1}"}}]},"logprobs":null,"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":10,"completion_tokens":4,"total_tokens":14,"prompt_tokens_details":{"cached_tokens":6}}}"#);
}

#[test]
fn a_stream_looks_like_this() {
    let reply = reply("Hi.", &[("a", json!({})), ("b", json!("{\"x\": "))]);
    insta::assert_snapshot!(reply_events(&reply, true, usize::MAX).concat(), @r#"
    data: {"id":"chatcmpl1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}

    data: {"id":"chatcmpl1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,"delta":{"content":"Hi."},"logprobs":null,"finish_reason":null}],"usage":null}

    data: {"id":"chatcmpl1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"call0","type":"function","function":{"name":"a","arguments":"{}"}}]},"logprobs":null,"finish_reason":null}],"usage":null}

    data: {"id":"chatcmpl1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,"delta":{"tool_calls":[{"index":1,"id":"call1","type":"function","function":{"name":"b","arguments":"{\"x\": "}}]},"logprobs":null,"finish_reason":null}],"usage":null}

    data: {"id":"chatcmpl1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"tool_calls"}],"usage":null}

    data: {"id":"chatcmpl1","object":"chat.completion.chunk","created":7,"model":"m","choices":[],"usage":{"prompt_tokens":10,"completion_tokens":4,"total_tokens":14,"prompt_tokens_details":{"cached_tokens":6}}}

    data: [DONE]
    "#);
}

#[test]
fn usage_comes_only_when_asked_for() {
    let without = reply_events(&reply("a", &[]), false, usize::MAX).concat();
    assert!(!without.contains("usage"), "{without}");
}

#[test]
fn every_stream_ends_with_a_finish_reason_and_done() {
    for (reply, finish, expected) in [
        (reply("a", &[]), FinishReason::Stop, "stop"),
        (reply("", &[]), FinishReason::Length, "length"),
        (reply("a", &[]), FinishReason::Context, "length"),
        (
            reply("a", &[("f", json!({}))]),
            FinishReason::Stop,
            "tool_calls",
        ),
        (
            reply("a", &[("f", json!({}))]),
            FinishReason::Length,
            "tool_calls",
        ),
    ] {
        assert_eq!(finish_reason(&reply.message, finish), expected);
        let events = reply_events(&Reply { finish, ..reply }, false, usize::MAX);
        assert_eq!(events.last().map(String::as_str), Some("data: [DONE]\n\n"));
        let finished = format!("\"finish_reason\":\"{expected}\"");
        assert!(events[events.len() - 2].contains(&finished));
    }
}

#[test]
fn errors_are_shaped_as_the_provider_shapes_them() {
    let (status, body) = error_body(&ErrorKind::TooLong, "prompt of 9 tokens, 8 fit");
    insta::assert_snapshot!(format!("{status} {body}"), @r#"400 {"error":{"message":"prompt of 9 tokens, 8 fit","type":"invalid_request_error","param":"messages","code":"context_length_exceeded"}}"#);
    let (status, body) = error_body(&ErrorKind::Overloaded, "full");
    insta::assert_snapshot!(format!("{status} {body}"), @r#"503 {"error":{"message":"full","type":"server_error","param":null,"code":"overloaded"}}"#);
    let limit = ErrorKind::RateLimit { retry_after_s: 3 };
    assert_eq!(
        (error_body(&limit, "").0, limit.retry_after_s()),
        (429, Some(3))
    );
    let event = error_event(&ErrorKind::Engine, "two\nlines");
    insta::assert_snapshot!(event.trim_end(), @r#"data: {"error":{"message":"two\nlines","type":"server_error","param":null,"code":"engine_failed"}}"#);
    assert!(event.ends_with("}\n\n"));
}

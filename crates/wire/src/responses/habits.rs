//! What real harnesses do on this dialect, one test per habit.

use record::{Dialect, FinishReason, Message, Role, ToolCall};
use serde_json::{Value, json};

use super::{error_body, error_event, parse, parse_compact, reply_body, reply_events};
use crate::{ErrorKind, Form, Reply, ToolForm, Usage, digest, opaque};

fn messages(input: Value) -> Vec<Message> {
    parse(&json!({"input": input}))
        .unwrap()
        .conversation
        .messages
}

#[test]
fn a_request_as_codex_sends_it() {
    let body = json!({"model": "m", "stream": true, "store": false, "parallel_tool_calls": true,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "t", "tool_choice": "auto",
        "client_metadata": {"b": "1", "a": "2"}, "reasoning": {"effort": "medium", "summary": "auto"},
        "tools": [
            {"type": "function", "name": "exec_command", "description": "d", "strict": false,
                "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}},
            {"type": "custom", "name": "apply_patch", "description": "Edits.",
                "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}},
            {"type": "namespace", "name": "collab", "description": "n", "tools": [
                {"type": "function", "name": "spawn_agent", "parameters": {"type": "object"}},
                {"type": "function", "name": "exec_command", "parameters": {"type": "object"}}]},
            {"type": "web_search", "external_web_access": false}],
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "shown"}],
                "content": null, "encrypted_content": opaque::seal("thought\n")},
            {"type": "function_call", "name": "spawn_agent", "namespace": "collab",
                "arguments": "{\"message\": \"x\"}", "call_id": "c00000p00"},
            {"type": "function_call", "name": "exec_command", "namespace": "collab", "arguments": "{}", "call_id": "c00000p01"},
            {"type": "custom_tool_call", "status": "completed", "call_id": "c00000p02", "name": "apply_patch", "input": "*** Begin"},
            {"type": "function_call_output", "call_id": "c00000p00", "output": "one"},
            {"type": "function_call_output", "call_id": "c00000p01", "output": [{"type": "input_text", "text": "two"}]},
            {"type": "custom_tool_call_output", "call_id": "c00000p02", "output": "three"}]});
    let request = parse(&body).unwrap();
    let names: Vec<_> = request
        .conversation
        .tools
        .iter()
        .map(|tool| tool.name.as_str())
        .collect();
    assert_eq!(
        names,
        [
            "exec_command",
            "apply_patch",
            "spawn_agent",
            "collab__exec_command"
        ]
    );
    assert!(
        request.conversation.tools[1]
            .description
            .ends_with("start: x")
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
            Role::Tool,
            Role::Tool
        ]
    );
    // What was sealed comes before what was shown.
    assert_eq!(list[2].reasoning.as_deref(), Some("thought\n"));
    let calls: Vec<_> = list[2]
        .tool_calls
        .iter()
        .map(|call| call.name.as_str())
        .collect();
    assert_eq!(
        calls,
        ["spawn_agent", "collab__exec_command", "apply_patch"]
    );
    assert_eq!(
        list[2].tool_calls[2].arguments,
        json!({"input": "*** Begin"})
    );
    assert_eq!(list[4].text_content(), "two");
    // Another key order, and a repeat without a stream, are the same call.
    let mut again = body.clone();
    again["client_metadata"] = json!({"a": "9", "b": "1"});
    again["stream"] = json!(false);
    assert_eq!(
        digest(Dialect::Responses, &body),
        digest(Dialect::Responses, &again)
    );
    // The reply goes out in the form that each tool has on the wire.
    let mut message = Message::text(Role::Assistant, "");
    for (name, arguments) in [
        ("spawn_agent", json!({"message": "x"})),
        ("collab__exec_command", json!({})),
        ("apply_patch", json!({"input": "*** Begin"})),
        ("apply_patch", json!({"patch": 1})),
        ("exec_command", json!({"cmd": "ls"})),
    ] {
        message.tool_calls.push(ToolCall {
            id: "c".into(),
            name: name.into(),
            arguments,
        });
    }
    let output = reply_body(&reply(message), &request.form)["output"].clone();
    for (index, (kind, name, namespace, text)) in [
        (
            "function_call",
            "spawn_agent",
            Some("collab"),
            r#"{"message":"x"}"#,
        ),
        ("function_call", "exec_command", Some("collab"), "{}"),
        ("custom_tool_call", "apply_patch", None, "*** Begin"),
        ("custom_tool_call", "apply_patch", None, r#"{"patch":1}"#),
        ("function_call", "exec_command", None, r#"{"cmd":"ls"}"#),
    ]
    .into_iter()
    .enumerate()
    {
        let item = &output[index];
        let field = if kind == "function_call" {
            "arguments"
        } else {
            "input"
        };
        assert_eq!(
            (item["type"].as_str(), item["name"].as_str()),
            (Some(kind), Some(name))
        );
        assert_eq!(
            (item["namespace"].as_str(), item[field].as_str()),
            (namespace, Some(text))
        );
    }
}

#[test]
fn input_is_a_text_or_items_and_instructions_come_first() {
    let request = parse(&json!({"instructions": "rules", "input": "go"})).unwrap();
    let said: Vec<_> = request
        .conversation
        .messages
        .iter()
        .map(|m| (m.role, m.text_content()))
        .collect();
    assert_eq!(
        said,
        [(Role::System, "rules".into()), (Role::User, "go".into())]
    );
    // Items of the short form have no type.
    assert_eq!(
        messages(json!([{"role": "user", "content": "go"}])),
        [Message::text(Role::User, "go")]
    );
}

#[test]
fn turns_end_where_the_next_one_begins() {
    let call =
        |id: &str| json!({"type": "function_call", "name": "f", "arguments": "{}", "call_id": id});
    let text = |text: &str| json!({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]});
    let thought = |text: &str| json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]});
    let output = |id: &str| json!({"type": "function_call_output", "call_id": id, "output": "o"});
    let list = messages(json!([
        thought("r"),
        text("a"),
        call("1"),
        call("2"),
        output("1"),
        output("2"),
        thought("s"),
        call("3"),
        output("3"),
        text("b"),
        text("c"),
        thought("t"),
        text("d")
    ]));
    let turns: Vec<_> = list
        .iter()
        .filter(|message| message.role == Role::Assistant)
        .map(|m| (m.reasoning.as_deref(), m.text_content(), m.tool_calls.len()))
        .collect();
    assert_eq!(
        turns,
        [
            (Some("r"), "a".into(), 2),
            (Some("s"), String::new(), 1),
            (None, "b".into(), 0),
            (None, "c".into(), 0),
            (Some("t"), "d".into(), 0)
        ]
    );
}

#[test]
fn reasoning_of_another_origin_is_read_as_far_as_it_is_shown() {
    for (item, reasoning) in [
        (
            json!({"type": "reasoning", "summary": [], "encrypted_content": "ZW5jcnlwdGVk"}),
            None,
        ),
        (
            json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "ZW5jcnlwdGVk"}),
            Some("s"),
        ),
        (
            json!({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "c"}]}),
            Some("c"),
        ),
    ] {
        let list = messages(json!([item, {"role": "assistant", "content": "a"}]));
        assert_eq!(list.len(), 1);
        assert_eq!(list[0].reasoning.as_deref(), reasoning);
    }
}

#[test]
fn calls_that_only_a_provider_runs_are_passed_over() {
    let list =
        messages(json!([{"role": "user", "content": "a"}, {"type": "web_search_call", "id": "x"}]));
    assert_eq!(list.len(), 1);
}

#[test]
fn a_request_may_continue_an_earlier_response() {
    let request = parse(&json!({"previous_response_id": "resp_1", "input": []})).unwrap();
    assert_eq!(request.previous.as_deref(), Some("resp_1"));
    assert!(request.conversation.messages.is_empty());
}

#[test]
fn refusals_name_the_field() {
    let text = |body: Value| parse(&body).unwrap_err().to_string();
    insta::assert_snapshot!(text(json!({})), @"request field `input`: expected a string or items, found null");
    insta::assert_snapshot!(text(json!({"input": []})), @"request field `input`: expected at least one item, found null");
    insta::assert_snapshot!(text(json!({"input": [{"type": "dream"}]})), @r#"request field `input[0]`: an item of type "dream" is not supported here; send messages, reasoning, function or custom tool calls and their outputs"#);
    insta::assert_snapshot!(text(json!({"input": [{"role": "robot"}]})), @r#"request field `input[0].role`: expected system, developer, user or assistant, found "robot""#);
    insta::assert_snapshot!(text(json!({"input": [{"role": "user", "content": [{"type": "input_file"}]}]})), @r#"request field `input[0].content[0]`: content of type "input_file" is not supported here; send text or images"#);
}

fn reply(message: Message) -> Reply {
    Reply {
        id: "resp_1".into(),
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
fn events_come_in_the_providers_order() {
    let mut message = Message::text(Role::Assistant, "Hi.");
    message.reasoning = Some("hm".into());
    for name in ["f", "g"] {
        message.tool_calls.push(ToolCall {
            id: "c".into(),
            name: name.into(),
            arguments: json!({}),
        });
    }
    let form = Form {
        tools: [("g".to_owned(), ToolForm::Custom)].into(),
        ..Form::default()
    };
    let events = reply_events(&reply(message), &form, usize::MAX);
    let names: Vec<_> = events
        .iter()
        .map(|event| {
            event
                .lines()
                .next()
                .unwrap()
                .strip_prefix("event: response.")
                .unwrap()
        })
        .collect();
    assert_eq!(
        names,
        [
            "created",
            "in_progress",
            "output_item.added",
            "reasoning_summary_part.added",
            "reasoning_summary_text.delta",
            "reasoning_summary_text.done",
            "reasoning_summary_part.done",
            "output_item.done",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "output_item.added",
            "custom_tool_call_input.delta",
            "custom_tool_call_input.done",
            "output_item.done",
            "completed"
        ]
    );
}

#[test]
fn a_cut_reply_is_incomplete_unless_it_calls_tools() {
    let mut cut = reply(Message::text(Role::Assistant, "Hi"));
    cut.finish = FinishReason::Length;
    let body = reply_body(&cut, &Form::default());
    assert_eq!(
        (&body["status"], &body["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    cut.message.tool_calls.push(ToolCall {
        id: "c".into(),
        name: "f".into(),
        arguments: json!({}),
    });
    assert_eq!(reply_body(&cut, &Form::default())["status"], "completed");
    // A reply that says nothing still has an item.
    let empty = reply_body(&reply(Message::text(Role::Assistant, "")), &Form::default());
    assert_eq!(empty["output"].as_array().unwrap().len(), 1);
}

#[test]
fn errors_in_a_body_and_in_a_stream() {
    let (status, body) = error_body(&ErrorKind::TooLong, "long");
    assert_eq!(
        (status, &body["error"]["code"], &body["error"]["param"]),
        (400, &json!("context_length_exceeded"), &json!("input"))
    );
    // Codex gives up on an overload code, and repeats on a server error.
    for (kind, code) in [
        (ErrorKind::Overloaded, "server_error"),
        (ErrorKind::Engine, "server_error"),
        (ErrorKind::TooLong, "context_length_exceeded"),
        (
            ErrorKind::RateLimit { retry_after_s: 1 },
            "rate_limit_exceeded",
        ),
        (ErrorKind::InvalidRequest, "invalid_prompt"),
        (ErrorKind::Ended, "invalid_prompt"),
    ] {
        let event = error_event(&kind, "why");
        assert!(event.starts_with("event: response.failed\n"), "{event}");
        assert!(
            event.contains(&format!(r#""error":{{"code":"{code}","message":"why"}}"#)),
            "{event}"
        );
    }
}

/// As Codex compacts when it is told that the provider can: a path of its own, or an item at the
/// end of an ordinary request. What comes back takes the place of the history, and is sent again.
#[test]
fn a_conversation_is_compacted_and_goes_on_from_its_summary() {
    let input = json!([
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "gone"}]}]);
    let mut summary = reply(Message::text(Role::Assistant, "All done.\n"));
    summary.message.reasoning = Some("hm".into());

    let request = parse_compact(&json!({"model": "m", "input": input, "stream": true})).unwrap();
    let list = &request.conversation.messages;
    assert_eq!(list.len(), 4);
    assert_eq!(list[3].role, Role::User);
    assert!(
        list[3]
            .text_content()
            .contains("takes the place of this conversation")
    );
    assert!(!request.stream);
    let body = reply_body(&summary, &request.form);
    assert_eq!(body["object"], "response.compaction");
    let items: Vec<_> = body["output"].as_array().unwrap().clone();
    assert_eq!(items[0], input[1], "what the user said stays as it was");
    assert_eq!((items.len(), &items[1]["type"]), (2, &json!("compaction")));
    assert_eq!(body["usage"]["total_tokens"], 14);

    let mut triggered = input.as_array().unwrap().clone();
    triggered.push(json!({"type": "compaction_trigger"}));
    let request = parse(&json!({"input": triggered})).unwrap();
    assert_eq!(request.conversation.messages, *list);
    let events = reply_events(&summary, &request.form, usize::MAX);
    let names: Vec<_> = events
        .iter()
        .map(|event| event.lines().next().unwrap().rsplit('.').next().unwrap())
        .collect();
    assert_eq!(
        names,
        ["created", "in_progress", "added", "done", "completed"]
    );
    let item = &reply_body(&summary, &request.form)["output"][0];
    assert_eq!(item, &items[1]);

    let mut later = vec![input[0].clone()];
    later.extend(items);
    later.push(json!({"role": "user", "content": "more"}));
    later.push(json!({"type": "compaction", "encrypted_content": "of somebody else"}));
    let said: Vec<_> = messages(json!(later))
        .iter()
        .map(|message| (message.role, message.text_content()))
        .collect();
    assert_eq!(
        said,
        [
            (Role::System, "rules".into()),
            (Role::User, "go".into()),
            (
                Role::User,
                "Summary of the conversation so far:\n\nAll done.\n".into()
            ),
            (Role::User, "more".into())
        ]
    );
}

#[test]
fn only_the_newest_of_what_the_user_said_stays_beside_a_summary() {
    let long = "x".repeat(40 << 10);
    let user = |text: &str| json!({"role": "user", "content": text});
    let request =
        parse_compact(&json!({"input": [user(&long), user("small"), user(&long)]})).unwrap();
    let kept = request.form.compaction.unwrap().kept;
    assert_eq!(kept, [user("small"), user(&long)]);
    let request = parse_compact(&json!({"input": "go"})).unwrap();
    let kept = request.form.compaction.unwrap().kept;
    assert_eq!(kept[0]["content"][0]["text"], "go");
}

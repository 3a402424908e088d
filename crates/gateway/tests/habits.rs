//! What real harnesses do to the history between two calls, one test per habit: each leaves the
//! tree unforked, or forks it where it must. Every test runs three turns over a real socket.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "tests"
)]

mod support;

use engine::EngineError;
use record::Call;
use serde_json::{Map, Value, json};
use support::{World, client::Client};

/// Changes the whole next request; gets the number of the turn.
type Change = fn(&mut Value, usize);

fn schema() -> Value {
    json!({"type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}}})
}

async fn post(world: &World, path: &str, request: &Value) -> Value {
    let mut client = Client::tcp(world.address()).await;
    let answer = client
        .post(&format!("/r/habits-key{path}"), &[], request)
        .await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    answer.json()
}

async fn world() -> World {
    let world = World::new().await;
    let open = gateway::Open {
        key: Some("habits-key".into()),
        ..support::rollout("a")
    };
    world.gateway.open(open).unwrap();
    world
}

/// Every call continues the one before with all its tokens.
fn unforked(calls: &[Call]) {
    assert_eq!(calls.len(), 3);
    for pair in calls.windows(2) {
        let generated = &pair[0].generation.as_ref().unwrap().token_ids;
        let whole = [pair[0].prompt_ids.as_slice(), generated].concat();
        assert!(
            pair[1].prompt_ids.starts_with(&whole),
            "{} forks",
            pair[1].id
        );
        assert_eq!(pair[1].continuation.exact as usize, whole.len());
        assert_eq!(pair[1].continuation.echoes_foreign, 0);
    }
}

async fn chat(first_text: &str, echo: fn(&mut Map<String, Value>), change: Change) {
    let world = world().await;
    let mut request = json!({"model": "m", "tools": support::tools(), "messages": [
        {"role": "system", "content": "Rules."}, {"role": "user", "content": first_text}]});
    for turn in 0..3 {
        change(&mut request, turn);
        let reply = post(&world, "/v1/chat/completions", &request).await;
        let mut message = reply["choices"][0]["message"].as_object().unwrap().clone();
        echo(&mut message);
        let calls = message["tool_calls"].as_array().unwrap().clone();
        let list = request["messages"].as_array_mut().unwrap();
        list.push(Value::Object(message));
        for call in calls {
            list.push(json!({"role": "tool", "tool_call_id": call["id"], "content": "done"}));
        }
    }
    unforked(&world.quiet("a").await);
}

/// `as_list` says in which turns a text is a block with the cache mark.
async fn messages(first_text: &str, echo: fn(&mut Vec<Value>), change: Change) {
    let world = world().await;
    let mut request = json!({"model": "m", "max_tokens": 99,
        "system": [{"type": "text", "text": "You are."}, {"type": "text", "text": "Rules."}],
        "tools": [{"name": "bash", "description": "runs", "input_schema": schema()}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": first_text}]}]});
    for turn in 0..3 {
        change(&mut request, turn);
        let reply = post(&world, "/v1/messages?beta=true", &request).await;
        let mut blocks = reply["content"].as_array().unwrap().clone();
        echo(&mut blocks);
        let results: Vec<Value> = blocks
            .iter()
            .filter(|block| block["type"] == "tool_use")
            .map(|block| json!({"type": "tool_result", "tool_use_id": block["id"], "content": "done"}))
            .collect();
        let list = request["messages"].as_array_mut().unwrap();
        list.push(json!({"role": "assistant", "content": blocks}));
        list.push(json!({"role": "user", "content": results}));
    }
    unforked(&world.quiet("a").await);
}

async fn responses(first_text: &str, echo: fn(&mut Vec<Value>), change: Change) {
    let world = world().await;
    let mut request = json!({"model": "m", "store": false,
        "tools": [{"type": "function", "name": "bash", "description": "runs", "parameters": schema()}],
        "input": [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": first_text}]}]});
    for turn in 0..3 {
        change(&mut request, turn);
        let reply = post(&world, "/v1/responses", &request).await;
        let mut items = reply["output"].as_array().unwrap().clone();
        echo(&mut items);
        let outputs: Vec<Value> = items
            .iter()
            .filter(|item| item["type"] == "function_call")
            .map(|item| json!({"type": "function_call_output", "call_id": item["call_id"], "output": "done"}))
            .collect();
        let list = request["input"].as_array_mut().unwrap();
        list.extend(items);
        list.extend(outputs);
    }
    unforked(&world.quiet("a").await);
}

async fn gemini(first_text: &str, echo: fn(&mut Vec<Value>)) {
    let world = world().await;
    let mut request = json!({
        "systemInstruction": {"role": "user", "parts": [{"text": "Rules."}]},
        "tools": [{"functionDeclarations": [{"name": "bash", "description": "runs", "parametersJsonSchema": schema()}]}],
        "contents": [{"role": "user", "parts": [{"text": first_text}]}]});
    for _ in 0..3 {
        let reply = post(&world, "/v1beta/models/m:generateContent", &request).await;
        let mut parts = reply["candidates"][0]["content"]["parts"]
            .as_array()
            .unwrap()
            .clone();
        echo(&mut parts);
        let results: Vec<Value> = parts
            .iter()
            .filter_map(|part| part.get("functionCall"))
            .map(|call| json!({"functionResponse": {"id": call["id"], "name": "bash", "response": {"output": "done"}}}))
            .collect();
        let list = request["contents"].as_array_mut().unwrap();
        list.push(json!({"role": "model", "parts": parts}));
        list.push(json!({"role": "user", "parts": results}));
    }
    unforked(&world.quiet("a").await);
}

fn reversed(value: &Value) -> Value {
    let entries = value.as_object().unwrap().clone();
    Value::Object(entries.into_iter().rev().collect())
}

#[tokio::test]
async fn verbatim() {
    for text in [
        "go",
        "think",
        "think twice",
        "twice silently",
        "think twice silently",
    ] {
        chat(text, |_| {}, |_, _| {}).await;
        messages(text, |_| {}, |_, _| {}).await;
        responses(text, |_| {}, |_, _| {}).await;
        gemini(text, |_| {}).await;
    }
}

#[tokio::test]
async fn the_cache_mark_moves_and_blocks_become_strings() {
    fn mark(request: &mut Value, turn: usize) {
        for message in request["messages"].as_array_mut().unwrap() {
            for block in message["content"].as_array_mut().into_iter().flatten() {
                block.as_object_mut().unwrap().shift_remove("cache_control");
            }
        }
        if turn == 1 {
            request["messages"][0]["content"] = json!("go");
        }
        let last = request["messages"]
            .as_array_mut()
            .unwrap()
            .last_mut()
            .unwrap();
        if let Some(block) = last["content"]
            .as_array_mut()
            .and_then(|blocks| blocks.last_mut())
        {
            block["cache_control"] = json!({"type": "ephemeral"});
        }
        let tool = if turn.is_multiple_of(2) {
            json!({"type": "ephemeral"})
        } else {
            Value::Null
        };
        request["tools"][0]["cache_control"] = tool;
        request["system"][1]["cache_control"] =
            json!({"type": "ephemeral", "ttl": format!("{turn}h")});
    }
    messages("go", |_| {}, mark).await;
}

#[tokio::test]
async fn a_system_message_in_the_midst_of_the_list() {
    fn remind(request: &mut Value, turn: usize) {
        let list = request["messages"].as_array_mut().unwrap();
        // A block with the mark while it is the newest, a string afterwards.
        for message in list.iter_mut() {
            if message["role"] == "system" {
                message["content"] = json!("Mind the rules.");
            }
        }
        if turn == 1 {
            list.push(json!({"role": "system", "content": [{"type": "text",
                "text": "Mind the rules.", "cache_control": {"type": "ephemeral"}}]}));
        }
    }
    messages("go", |_| {}, remind).await;
}

#[tokio::test]
async fn a_reminder_behind_each_result_of_a_tool() {
    fn remind(request: &mut Value, turn: usize) {
        if turn > 0 {
            let last = request["messages"]
                .as_array_mut()
                .unwrap()
                .last_mut()
                .unwrap();
            last["content"]
                .as_array_mut()
                .unwrap()
                .push(json!({"type": "text",
                "text": format!("<budget>{turn} tokens used</budget>")}));
        }
    }
    messages("twice", |_| {}, remind).await;
}

#[tokio::test]
async fn the_billing_line_changes() {
    fn bill(request: &mut Value, turn: usize) {
        let line = json!({"type": "text", "text": format!("x-anthropic-billing-header: cc_version=2.1.{turn}; cc_entrypoint=cli;")});
        let system = request["system"].as_array_mut().unwrap();
        system.retain(|block| !block["text"].as_str().unwrap().starts_with("x-anthropic"));
        system.insert(0, line);
    }
    messages("go", |_| {}, bill).await;
}

#[tokio::test]
async fn the_limit_of_tokens_shrinks() {
    chat(
        "go",
        |_| {},
        |request, turn| request["max_tokens"] = json!(900 - 100 * turn),
    )
    .await;
}

#[tokio::test]
async fn metadata_in_any_order_and_the_retry_of_it() {
    fn metadata(request: &mut Value, turn: usize) {
        let pairs = json!({"a": "1", "b": turn, "c": "3"});
        request["client_metadata"] = if turn.is_multiple_of(2) {
            pairs
        } else {
            reversed(&pairs)
        };
    }
    responses("think", |_| {}, metadata).await;
    // The same call with other bytes is an attempt of it.
    let world = world().await;
    let mut request = json!({"model": "m", "input": "go", "client_metadata": {"a": 1, "b": 2}});
    let first = post(&world, "/v1/responses", &request).await;
    request = reversed(&request);
    request["client_metadata"] = json!({"b": 2, "a": 1});
    let second = post(&world, "/v1/responses", &request).await;
    assert_eq!(first, second);
    let calls = world.quiet("a").await;
    assert_eq!((calls.len(), calls[0].attempts.len()), (1, 2));
}

#[tokio::test]
async fn arguments_are_written_anew() {
    fn rewrite(message: &mut Map<String, Value>) {
        for call in message["tool_calls"].as_array_mut().unwrap() {
            let arguments = call["function"]["arguments"].as_str().unwrap();
            let value: Value = serde_json::from_str(arguments).unwrap();
            // A JavaScript client has one kind of number.
            let text = format!("{:#}", reversed(&value)).replace("1.0", "1");
            call["function"]["arguments"] = json!(text);
        }
    }
    chat("twice", rewrite, |_, _| {}).await;
}

#[tokio::test]
async fn inputs_come_back_in_the_order_of_the_schema() {
    fn reorder(blocks: &mut Vec<Value>) {
        for block in blocks {
            if block["type"] == "tool_use" {
                block["input"] = reversed(&block["input"]);
            }
        }
    }
    messages("think twice", reorder, |_, _| {}).await;
}

#[tokio::test]
async fn call_ids_are_rewritten() {
    chat(
        "twice",
        |message| {
            for (index, call) in message["tool_calls"]
                .as_array_mut()
                .unwrap()
                .iter_mut()
                .enumerate()
            {
                call["id"] = json!(format!("call{index}"));
            }
        },
        |_, _| {},
    )
    .await;
    gemini("twice", |parts| {
        for (index, part) in parts.iter_mut().enumerate() {
            if part.get("functionCall").is_some() {
                part["functionCall"]["id"] = json!(format!("bash-1700000000000-{index}"));
            }
        }
    })
    .await;
}

#[tokio::test]
async fn thoughts_are_dropped_and_a_sentinel_signature_is_put_in() {
    gemini("think twice", |parts| {
        parts.retain(|part| part["thought"] != true);
        let call = parts
            .iter_mut()
            .find(|part| part.get("functionCall").is_some());
        call.unwrap()["thoughtSignature"] = json!("skip_thought_signature_validator");
    })
    .await;
}

#[tokio::test]
async fn reasoning_comes_back_in_every_known_way_or_not() {
    for echo in [
        (|message| {
            let reasoning = message["reasoning_content"].clone();
            message.insert("reasoning".into(), reasoning);
        }) as fn(&mut Map<String, Value>),
        |message| {
            let reasoning = message.shift_remove("reasoning_content").unwrap();
            message.insert("reasoning".into(), reasoning);
        },
        |message| {
            message.shift_remove("reasoning_content");
        },
        |message| {
            message.insert("reasoning_content".into(), json!(""));
        },
    ] {
        chat("think", echo, |_, _| {}).await;
    }
    for echo in [
        (|blocks| blocks[0]["signature"] = json!("")) as fn(&mut Vec<Value>),
        |blocks| blocks[0]["thinking"] = json!(""),
        |blocks| {
            blocks.remove(0);
        },
    ] {
        messages("think", echo, |_, _| {}).await;
    }
    for echo in [
        // Codex keeps the opaque content; others only the summary; others nothing.
        (|items| items[0]["summary"] = json!([])) as fn(&mut Vec<Value>),
        |items| {
            items[0]
                .as_object_mut()
                .unwrap()
                .shift_remove("encrypted_content");
        },
        |items| {
            items.remove(0);
        },
        // Ids of items are dropped when nothing is stored.
        |items| {
            for item in items {
                item.as_object_mut().unwrap().shift_remove("id");
                item.as_object_mut().unwrap().shift_remove("status");
            }
        },
    ] {
        responses("think twice", echo, |_, _| {}).await;
    }
}

#[tokio::test]
async fn no_text_is_null_or_empty_or_absent_and_keys_come_in_any_order() {
    for echo in [
        (|message| {
            message.insert("content".into(), Value::Null);
        }) as fn(&mut Map<String, Value>),
        |message| {
            message.insert("content".into(), json!(""));
        },
        |message| {
            message.shift_remove("content");
        },
        |message| *message = message.clone().into_iter().rev().collect(),
    ] {
        chat("twice silently", echo, |_, _| {}).await;
    }
}

#[tokio::test]
async fn an_empty_assistant_turn_after_a_failed_call() {
    fn leave(request: &mut Value, turn: usize) {
        let list = request["messages"].as_array_mut().unwrap();
        if turn == 1 {
            list.push(json!({"role": "assistant", "content": ""}));
        }
    }
    chat("go", |_| {}, leave).await;
}

/// Partial text kept as an extra turn, or the user's message twice: the history was edited, so
/// the thread branches, and it does so at the last good call and not earlier.
#[tokio::test]
async fn a_history_edited_after_a_failed_call_branches_at_the_last_good_one() {
    for extra in [
        json!([{"role": "assistant", "content": "turn 1 on d"}]),
        json!([{"role": "assistant", "content": "turn 1 on d"}, {"role": "user", "content": "Go on where you stopped."}]),
        json!([{"role": "user", "content": "go"}]),
    ] {
        let world = world().await;
        let path = "/v1/chat/completions";
        let mut request =
            json!({"tools": support::tools(), "messages": [{"role": "user", "content": "go"}]});
        let reply = post(&world, path, &request).await;
        let list = request["messages"].as_array_mut().unwrap();
        list.push(reply["choices"][0]["message"].clone());
        list.push(json!({"role": "tool", "tool_call_id": "x", "content": "done"}));
        world.engine.fail_next(EngineError::Gone("cut".to_owned()));
        let mut client = Client::tcp(world.address()).await;
        let failed = client
            .post(&format!("/r/habits-key{path}"), &[], &request)
            .await;
        assert_eq!(failed.status(), 503);
        let mut edited = request.clone();
        edited["messages"]
            .as_array_mut()
            .unwrap()
            .extend(extra.as_array().unwrap().clone());
        post(&world, path, &edited).await;
        // The edit vanishes again: the thread goes on from the same call.
        request["messages"]
            .as_array_mut()
            .unwrap()
            .push(json!({"role": "user", "content": "more"}));
        post(&world, path, &request).await;
        let calls = world.quiet("a").await;
        let generated = &calls[0].generation.as_ref().unwrap().token_ids;
        let good = [calls[0].prompt_ids.as_slice(), generated].concat();
        for call in &calls[2..] {
            assert_eq!(call.continuation.parent, Some(0));
            assert!(call.prompt_ids.starts_with(&good));
        }
    }
}

//! I1 and I2 over random rollouts: whatever a harness does to the form of our replies, the next
//! prompt begins with the ids of the last prompt and of what was generated.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

use std::{path::PathBuf, sync::OnceLock};

use codec::{Codec, Memory, Prompt, Remembered};
use proptest::prelude::*;
use record::{Conversation, Message, Part, Role, ToolSpec};
use serde_json::{Map, Value, json};

fn codec() -> &'static Codec {
    static CODEC: OnceLock<Codec> = OnceLock::new();
    CODEC.get_or_init(|| {
        Codec::load(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../policy")).unwrap()
    })
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        3 => "[a-z ]{0,12}",
        1 => "\\PC{0,8}",
        1 => "[ \\n\\t\"\\\\{}<>/|é]{0,8}",
    ]
}

fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        text().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        (-100i32..100).prop_map(|n| json!(f64::from(n) / 4.0)),
        any::<bool>().prop_map(Value::from),
        Just(Value::Null),
    ];
    leaf.prop_recursive(2, 8, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::vec(("[a-z]{1,5}", inner), 0..3)
                .prop_map(|entries| Value::Object(entries.into_iter().collect())),
        ]
    })
}

fn arguments() -> impl Strategy<Value = Value> {
    prop::collection::vec(("[a-z]{1,6}", json_value()), 0..4)
        .prop_map(|entries| Value::Object(entries.into_iter().collect()))
}

/// What the policy generates: text, reasoning, calls, and whether it is cut.
#[derive(Debug, Clone)]
struct Turn {
    reasoning: Option<String>,
    text: String,
    calls: Vec<(String, Value)>,
    compact: bool,
    cut: Option<usize>,
    spelled: Vec<bool>,
    results: Vec<String>,
    question: Option<String>,
    echo: u8,
}

fn turn() -> impl Strategy<Value = Turn> {
    (
        prop::option::weighted(0.3, text()),
        text(),
        prop::collection::vec(("[a-z_]{1,8}", arguments()), 0..3),
        any::<bool>(),
        prop::option::weighted(0.1, 0usize..40),
        prop::collection::vec(any::<bool>(), 1..8),
        prop::collection::vec(text(), 3),
        prop::option::weighted(0.3, text()),
        any::<u8>(),
    )
        .prop_map(
            |(reasoning, text, calls, compact, cut, spelled, results, question, echo)| Turn {
                reasoning,
                text,
                calls,
                compact,
                cut,
                spelled,
                results,
                question,
                echo,
            },
        )
}

/// The raw text that a policy might write, with more or less white space.
fn raw(turn: &Turn) -> String {
    let mut out = String::new();
    if let Some(reasoning) = &turn.reasoning {
        out.push_str(&format!("<think>{reasoning}</think>"));
    }
    out.push_str(&turn.text);
    for (name, arguments) in &turn.calls {
        let call = json!({"name": name, "arguments": arguments});
        out.push_str(&if turn.compact {
            format!("<tool_call>{call}</tool_call>")
        } else {
            format!(
                "\n<tool_call>\n{}\n</tool_call>\n",
                serde_json::to_string_pretty(&call).unwrap()
            )
        });
    }
    out.push_str("<|im_end|>");
    match turn.cut {
        Some(at) => out.chars().take(at).collect(),
        None => out,
    }
}

/// Ids that decode to the text but are not the tokenizer's own: some tokens are spelled in bytes.
fn sampled(text: &str, spelled: &[bool]) -> Vec<u32> {
    let mut ids = Vec::new();
    for (index, id) in codec().encode(text).unwrap().into_iter().enumerate() {
        let piece = codec().decode(&[id]);
        // A special token has no other spelling, and a byte beyond ASCII is no text of its own.
        if spelled[index % spelled.len()] && id >= 9 && piece.is_ascii() {
            for byte in piece.bytes() {
                ids.push(byte_id(byte));
            }
        } else {
            ids.push(id);
        }
    }
    ids
}

/// The id of a byte, by the order of the vocabulary: 9 specials, then the bytes.
fn byte_id(byte: u8) -> u32 {
    9 + u32::from(byte)
}

fn reverse_keys(value: &Value) -> Value {
    match value {
        Value::Object(object) => {
            let entries: Vec<_> = object.iter().collect();
            let reversed: Map<String, Value> = entries
                .into_iter()
                .rev()
                .map(|(key, value)| (key.clone(), reverse_keys(value)))
                .collect();
            Value::Object(reversed)
        }
        Value::Array(items) => items.iter().map(reverse_keys).collect(),
        // A JavaScript client writes 2.0 as 2.
        Value::Number(number) => match number.as_f64() {
            Some(float) if float.fract() == 0.0 => json!(float as i64),
            _ => value.clone(),
        },
        other => other.clone(),
    }
}

/// The reply as some harness sends it back. Each bit is one habit.
fn echo(reply: &Message, habits: u8) -> Message {
    let mut echo = reply.clone();
    let has = |bit: u8| habits & (1 << bit) != 0;
    for (index, call) in echo.tool_calls.iter_mut().enumerate() {
        if has(0) {
            call.arguments = reverse_keys(&call.arguments);
        }
        if has(1) {
            call.id = format!("{}-{index}", 1_700_000_000);
        }
        if has(2) {
            call.arguments = Value::String(call.arguments.to_string());
        }
    }
    if has(3) {
        echo.reasoning = None;
    }
    if has(4) && echo.content.is_empty() {
        echo.content = vec![Part::Text {
            text: String::new(),
        }];
    }
    if has(5)
        && let [Part::Text { text }] = echo.content.as_slice()
    {
        let middle = text
            .char_indices()
            .nth(text.chars().count() / 2)
            .map_or(0, |(at, _)| at);
        let (a, b) = text.split_at(middle);
        echo.content = vec![Part::Text { text: a.into() }, Part::Text { text: b.into() }];
    }
    echo
}

fn start() -> Conversation {
    Conversation {
        messages: vec![
            Message::text(Role::System, "Work."),
            Message::text(Role::User, "Go."),
        ],
        tools: vec![ToolSpec {
            name: "bash".into(),
            description: "Run.".into(),
            parameters: json!({"type": "object"}),
        }],
    }
}

/// Plays one turn: prompt, generation, memory, echo, results. Returns what the engine had.
fn play(
    conversation: &mut Conversation,
    memory: &mut Memory,
    call: u32,
    turn: &Turn,
) -> (Prompt, Vec<u32>) {
    let prompt = codec().prompt(conversation, memory).unwrap();
    let ids = sampled(&raw(turn), &turn.spelled);
    let text = codec().decode(&ids);
    assert_eq!(
        text,
        raw(turn),
        "the other spelling decodes to the same text"
    );
    let parsed = codec().parse(&text).with_ids(call);
    let stored = memory.remember(call, &prompt, &ids, &text, &parsed.message);
    assert_eq!(stored, Remembered::Stored);
    conversation.messages.push(echo(&parsed.message, turn.echo));
    for (index, tool_call) in parsed.message.tool_calls.iter().enumerate() {
        let mut result = Message::text(
            Role::Tool,
            turn.results[index % turn.results.len()].as_str(),
        );
        result.tool_call_id = Some(tool_call.id.clone());
        conversation.messages.push(result);
    }
    if parsed.message.tool_calls.is_empty() || turn.question.is_some() {
        let question = turn.question.as_deref().unwrap_or("And?");
        conversation
            .messages
            .push(Message::text(Role::User, question));
    }
    (prompt, ids)
}

/// No file of old failures: the seed is printed with the failure.
fn config(cases: u32) -> ProptestConfig {
    let default = ProptestConfig::default();
    ProptestConfig {
        // `PROPTEST_CASES` asks for a longer run.
        cases: std::env::var_os("PROPTEST_CASES").map_or(cases, |_| default.cases),
        failure_persistence: None,
        ..default
    }
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn prompts_extend_what_the_engine_had(turns in prop::collection::vec(turn(), 1..6)) {
        let mut conversation = start();
        let mut memory = Memory::default();
        let mut had: Vec<u32> = Vec::new();
        for (call, turn) in turns.iter().enumerate() {
            let before = memory.bytes();
            let (prompt, generated) = play(&mut conversation, &mut memory, call as u32, turn);
            prop_assert!(prompt.ids.starts_with(&had), "call {call} does not extend its parent");
            prop_assert_eq!(prompt.continuation.exact as usize, had.len());
            prop_assert_eq!(prompt.continuation.encoded as usize, prompt.ids.len() - had.len());
            prop_assert_eq!(prompt.continuation.parent, (call as u32).checked_sub(1));
            prop_assert_eq!(prompt.continuation.echoes_matched as usize, call);
            prop_assert_eq!(prompt.continuation.echoes_foreign, 0);
            prop_assert_eq!(codec().decode(&prompt.ids), prompt.text.clone());
            had = [prompt.ids.as_slice(), generated.as_slice()].concat();
            // The memory holds the conversation once, not once per call.
            let added = memory.bytes() - before;
            let new = prompt.continuation.encoded as usize + generated.len();
            prop_assert!(added <= new * (size_of::<u32>() + 16) + 64, "{added} bytes for {new} tokens");
        }
    }

    /// Another message where ours was: from there on it is a fork, and said to be one.
    #[test]
    fn an_edited_turn_is_foreign(turns in prop::collection::vec(turn(), 2..5), which in 0usize..5, edit in "[a-z]{1,5}") {
        let mut conversation = start();
        let mut memory = Memory::default();
        let mut all = Vec::new();
        for (call, turn) in turns.iter().enumerate() {
            let (prompt, generated) = play(&mut conversation, &mut memory, call as u32, turn);
            all.push([prompt.ids, generated].concat());
        }
        let ours: Vec<usize> = (0..conversation.messages.len())
            .filter(|&index| conversation.messages[index].role == Role::Assistant)
            .collect();
        let which = which % ours.len();
        conversation.messages[ours[which]] = Message::text(Role::Assistant, format!("not ours {edit}"));
        let prompt = codec().prompt(&conversation, &memory).unwrap();
        prop_assert_eq!(prompt.continuation.echoes_foreign, 1);
        prop_assert_eq!(prompt.continuation.echoes_matched as usize, ours.len() - 1);
        prop_assert_eq!(prompt.continuation.parent, which.checked_sub(1).map(|call| call as u32));
        if which > 0 {
            prop_assert!(prompt.ids.starts_with(&all[which - 1]));
        }
        // What cannot be continued is still shown as it was generated.
        prop_assert_eq!(codec().decode(&prompt.ids), prompt.text);
    }
}

/// Claude Code's Edit comes back with `replace_all: false`, said or not.
#[test]
fn defaults_that_a_harness_fills_in_are_no_edit() {
    let mut conversation = start();
    conversation.tools[0].parameters = json!({"type": "object", "properties": {
        "all": {"type": "boolean", "default": false}, "path": {"type": "string"},
    }});
    let mut memory = Memory::default();
    let mut had = Vec::new();
    let written = [
        "{\"path\":\"a\"}",
        "{\"path\":\"a\",\"all\":false}",
        "{\"path\":\"a\"}",
        "{\"path\":\"a\",\"all\":true}",
    ];
    for (call, arguments) in (0..).zip(written) {
        let prompt = codec().prompt(&conversation, &memory).unwrap();
        assert_eq!(prompt.continuation.exact as usize, had.len(), "call {call}");
        assert!(prompt.ids.starts_with(&had), "call {call}");
        let raw = format!(
            "<tool_call>{{\"name\":\"bash\",\"arguments\":{arguments}}}</tool_call><|im_end|>"
        );
        let ids = codec().encode(&raw).unwrap();
        let reply = codec().parse(&raw).with_ids(call).message;
        let stored = memory.remember(call, &prompt, &ids, &raw, &reply);
        assert_eq!(stored, Remembered::Stored);
        let mut echo = reply;
        let all = arguments.contains("true");
        echo.tool_calls[0].arguments = json!({"all": all, "path": "a"});
        let mut result = Message::text(Role::Tool, "done");
        result.tool_call_id = Some(echo.tool_calls[0].id.clone());
        conversation.messages.extend([echo, result]);
        had = [prompt.ids.as_slice(), ids.as_slice()].concat();
    }
    let last = conversation.messages.len() - 2;
    for (all, exact) in [(true, true), (false, false)] {
        conversation.messages[last].tool_calls[0].arguments = json!({"all": all, "path": "a"});
        let prompt = codec().prompt(&conversation, &memory).unwrap();
        assert_eq!(prompt.ids.starts_with(&had), exact, "all = {all}");
    }
}

#[test]
fn equal_replies_with_other_raw_texts_are_told_apart_by_their_history() {
    let mut memory = Memory::default();
    let mut had = Vec::new();
    // Two threads of one rollout; the replies say the same but were written differently.
    for (call, (question, raw)) in [
        (
            "one",
            "<tool_call>{\"name\":\"ls\",\"arguments\":{}}</tool_call><|im_end|>",
        ),
        (
            "two",
            "<tool_call> {\"arguments\":{},\"name\":\"ls\"} </tool_call><|im_end|>",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let mut conversation = start();
        conversation.messages[1] = Message::text(Role::User, question);
        let prompt = codec().prompt(&conversation, &memory).unwrap();
        let ids = codec().encode(raw).unwrap();
        let reply = codec().parse(raw).message;
        memory.remember(call as u32, &prompt, &ids, raw, &reply);
        conversation.messages.push(reply);
        conversation.messages.push(Message::text(Role::Tool, "a"));
        had.push((conversation, [prompt.ids, ids].concat()));
    }
    for (call, (conversation, ids)) in had.into_iter().enumerate() {
        let prompt = codec().prompt(&conversation, &memory).unwrap();
        assert_eq!(prompt.continuation.parent, Some(call as u32));
        assert!(prompt.ids.starts_with(&ids));
    }
}

#[test]
fn retries_and_the_limit_have_named_outcomes() {
    let mut memory = Memory::default();
    let conversation = start();
    let prompt = codec().prompt(&conversation, &memory).unwrap();
    let reply = Message::text(Role::Assistant, "a");
    let store = |memory: &mut Memory, call| memory.remember(call, &prompt, &[10], "a", &reply);
    assert_eq!(store(&mut memory, 0), Remembered::Stored);
    assert_eq!(store(&mut memory, 0), Remembered::Already);
    for call in 1..codec::memory::CALLS_MAX as u32 {
        assert_eq!(store(&mut memory, call), Remembered::Stored);
    }
    assert_eq!(store(&mut memory, u32::MAX), Remembered::Full);
    assert_eq!(memory.len(), codec::memory::CALLS_MAX);
}

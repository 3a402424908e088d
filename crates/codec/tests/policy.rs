//! The built-in policy's tokenizer and template.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

use std::path::PathBuf;

use codec::{Codec, Mode};
use proptest::prelude::*;
use record::{Conversation, Message, Role, ToolCall, ToolSpec};
use serde_json::json;

#[path = "../examples/build_policy_tokenizer.rs"]
#[allow(unreachable_pub, missing_docs)]
mod build;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../policy")
}

fn codec() -> &'static Codec {
    static CODEC: std::sync::OnceLock<Codec> = std::sync::OnceLock::new();
    CODEC.get_or_init(|| Codec::load(&folder()).unwrap())
}

fn read(name: &str) -> String {
    std::fs::read_to_string(folder().join(name)).unwrap()
}

#[test]
fn the_files_are_what_the_program_writes() {
    let advice = "run: cargo run --release -p codec --example build_policy_tokenizer";
    let tokenizer = build::tokenizer(&read("words.txt")).unwrap();
    let same = |name: &str, value: &serde_json::Value| read(name) == build::printed(value).unwrap();
    assert!(same("tokenizer.json", &tokenizer), "{advice}");
    let config = build::config(&read("chat_template.jinja"));
    assert!(same("tokenizer_config.json", &config), "{advice}");
    let generation = build::generation_config();
    assert!(same("generation_config.json", &generation), "{advice}");
}

#[test]
fn it_continues_exactly_and_stops_at_both_ends() {
    assert_eq!(*codec().mode(), Mode::Exact);
    assert_eq!(codec().stop_ids(), [2, 0]);
    assert!(codec().check_model(codec().vocabulary()).is_ok());
    assert!(codec().check_model(codec().vocabulary() - 1).is_err());
}

/// The pieces of a text.
fn pieces(text: &str) -> Vec<String> {
    let ids = codec().encode(text).unwrap();
    ids.iter().map(|id| codec().decode(&[*id])).collect()
}

#[test]
fn words_are_whole_and_names_are_spelled() {
    assert_eq!(pieces("Rename the file"), ["Rename", " the", " file"]);
    assert_eq!(pieces(" zorb"), [" ", "z", "o", "r", "b"]);
    assert_eq!(
        pieces("files12/a_b.txt"),
        ["files", "1", "2", "/", "a", "_", "b", ".", "txt"]
    );
    // Listed words inside a name are not taken out of it: the name is one piece of the rule.
    assert_eq!(pieces("filelist").len(), 8);
    assert_eq!(
        pieces("{\"name\":\"bash\",\"arguments\":{\"command\":\"ls\"}}"),
        [
            "{\"",
            "name",
            "\":\"",
            "bash",
            "\",\"",
            "arguments",
            "\":{\"",
            "command",
            "\":\"",
            "ls",
            "\"}}"
        ]
    );
    assert_eq!(pieces("a\\nfile\\\"b"), ["a", "\\n", "file", "\\\"", "b"]);
}

#[test]
fn special_tokens_are_one_id_each() {
    for (id, special) in build::SPECIALS.iter().enumerate() {
        assert_eq!(codec().encode(special).unwrap(), [id as u32]);
        assert_eq!(codec().decode(&[id as u32]), *special);
    }
}

#[test]
fn a_conversation_reads_like_this() {
    let mut reply = Message::text(Role::Assistant, "I look.");
    reply.tool_calls = vec![ToolCall {
        id: "x".into(),
        name: "bash".into(),
        arguments: json!({"command": "ls -l \"a b\""}),
    }];
    let conversation = Conversation {
        messages: vec![
            Message::text(Role::System, "You are an agent."),
            Message::text(Role::User, "List files."),
            reply,
            Message::text(Role::Tool, "a b\nc"),
            Message::text(Role::Tool, "d"),
        ],
        tools: vec![ToolSpec {
            name: "bash".into(),
            description: "Run a command.".into(),
            parameters: json!({"type": "object", "properties": {"command": {"type": "string"}}}),
        }],
    };
    let prompt = codec().prompt(&conversation, &Default::default()).unwrap();
    insta::assert_snapshot!(prompt.text, @r###"
    <|im_start|>system
    You are an agent.
    Tools:
    {"name":"bash","description":"Run a command.","parameters":{"type":"object","properties":{"command":{"type":"string"}}}}<|im_end|>
    <|im_start|>user
    List files.<|im_end|>
    <|im_start|>assistant
    I look.
    <tool_call>
    {"name":"bash","arguments":{"command":"ls -l \"a b\""}}
    </tool_call><|im_end|>
    <|im_start|>user
    <tool_response>
    a b
    c
    </tool_response>
    <tool_response>
    d
    </tool_response><|im_end|>
    <|im_start|>assistant
    "###);
    assert_eq!(prompt.ids, codec().encode(&prompt.text).unwrap());
    assert_eq!(prompt.continuation.echoes_foreign, 1);
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
    #![proptest_config(config(400))]

    #[test]
    fn every_text_comes_back(text in prop_oneof![
        any::<String>(),
        "[ a-z_/.0-9\\\\\"'{}\\n\\t:,<|>-]{0,60}",
        "(<\\|im_end\\|>|<tool_call>|file| the|\\PC){0,20}",
    ]) {
        let ids = codec().encode(&text).unwrap();
        prop_assert_eq!(codec().decode(&ids), text);
    }

    /// Near-byte: a text has one encoding, so encoding what was decoded gives the same ids.
    #[test]
    fn encoding_is_stable(text in "[ a-z_/.0-9\\\\\"'{}\\n:,-]{0,60}") {
        let ids = codec().encode(&text).unwrap();
        prop_assert_eq!(codec().encode(&codec().decode(&ids)).unwrap(), ids);
    }
}

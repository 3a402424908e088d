//! Samples of every family in the form that it documents, and properties that hold for all.

use proptest::prelude::*;
use record::{Message, Role, ToolCall, ToolSpec};
use serde_json::{Value, json};

use super::{Grammar, Pieces, families, harmony::Harmony, hermes::HERMES, whole};

pub(crate) fn all() -> Vec<Box<dyn Grammar>> {
    vec![
        Box::new(HERMES),
        Box::new(families::QWEN3_CODER),
        Box::new(families::GLM),
        Box::new(families::KIMI),
        Box::new(families::MINIMAX),
        Box::new(families::DEEPSEEK),
        Box::new(whole::Mistral),
        Box::new(whole::Llama3),
        Box::new(Harmony),
    ]
}

fn tools() -> Vec<ToolSpec> {
    vec![ToolSpec {
        name: "f".into(),
        description: String::new(),
        parameters: json!({"type": "object", "properties": {
            "text": {"type": "string"}, "count": {"type": "integer"},
            "maybe": {"type": ["string", "null"]}, "list": {"type": "array"}}}),
    }]
}

fn calls(pieces: &Pieces) -> Vec<String> {
    let calls = pieces.calls.iter();
    calls
        .map(|(name, arguments)| format!("{name}{arguments}"))
        .collect()
}

#[track_caller]
fn reads(
    grammar: &dyn Grammar,
    text: &str,
    expected: &[&str],
    content: &str,
    reasoning: Option<&str>,
) {
    let pieces = grammar.parse(text, false, &tools());
    assert!(!pieces.failed, "{pieces:?}");
    assert_eq!(calls(&pieces), expected);
    assert_eq!(pieces.content, content);
    assert_eq!(pieces.reasoning.as_deref(), reasoning);
}

#[test]
fn qwen3_coder() {
    reads(
        &families::QWEN3_CODER,
        "Let me see.\n<tool_call>\n<function=f>\n<parameter=text>\n1\n</parameter>\n<parameter=count>\n3\n</parameter>\n<parameter=list>\n[\"a\"]\n</parameter>\n<parameter=maybe>\nnull\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        &[
            r#"f{"text":"1","count":3,"list":["a"],"maybe":null}"#,
            "g{}",
        ],
        "Let me see.",
        None,
    );
    // A file's content keeps its own line breaks and may hold any mark.
    reads(
        &families::QWEN3_CODER,
        "<tool_call><function=f><parameter=text>\n\n a</parameter>\n</tool_call>b\n\n</parameter></function></tool_call>",
        &[r#"f{"text":"\n a</parameter>\n</tool_call>b\n"}"#],
        "",
        None,
    );
}

#[test]
fn glm() {
    reads(
        &families::GLM,
        "\n<think>hm</think>\nI look.\n<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>2</arg_value>\n<arg_key>count</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>g</tool_call>",
        &[r#"f{"text":"2","count":2}"#, "g{}"],
        "I look.",
        Some("hm"),
    );
}

#[test]
fn kimi() {
    reads(
        &families::KIMI,
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"text\": \"a\"}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        &[r#"f{"text":"a"}"#, "g{}"],
        "I look.",
        None,
    );
}

#[test]
fn minimax() {
    reads(
        &families::MINIMAX,
        "<think>\nhm\n</think>\n\n<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"text\">true</parameter>\n<parameter name=\"count\">4</parameter>\n</invoke>\n<invoke name=\"g\">\n</invoke>\n</minimax:tool_call>",
        &[r#"f{"text":"true","count":4}"#, "g{}"],
        "",
        Some("hm"),
    );
}

#[test]
fn deepseek() {
    reads(
        &families::DEEPSEEK,
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"text\": \"a\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        &[r#"f{"text":"a"}"#, "g{}"],
        "I look.",
        None,
    );
    reads(
        &families::DEEPSEEK,
        "<think>hm</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"text\": \"```json\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        &[r#"f{"text":"```json"}"#],
        "",
        Some("hm"),
    );
}

#[test]
fn mistral() {
    let grammar = whole::Mistral;
    reads(
        &grammar,
        "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"text\": \"a\"}}, {\"name\": \"g\", \"arguments\": {}}]",
        &[r#"f{"text":"a"}"#, "g{}"],
        "",
        None,
    );
    reads(
        &grammar,
        "[THINK]hm[/THINK]I look.[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{\"text\": \"a\"}[TOOL_CALLS]g[ARGS]{}",
        &[r#"f{"text":"a"}"#, "g{}"],
        "I look.",
        Some("hm"),
    );
}

#[test]
fn llama3() {
    let grammar = whole::Llama3;
    for text in [
        "{\"name\": \"f\", \"parameters\": {\"text\": \"a\"}}",
        "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"text\": \"a\"}}",
        "\n{\"type\": \"function\", \"name\": \"f\", \"arguments\": {\"text\": \"a\"}}",
    ] {
        reads(&grammar, text, &[r#"f{"text":"a"}"#], "", None);
    }
    reads(
        &grammar,
        "{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {}}",
        &["f{}", "g{}"],
        "",
        None,
    );
    // JSON may be the answer.
    reads(
        &grammar,
        "{\"name\": \"f\"}",
        &[],
        "{\"name\": \"f\"}",
        None,
    );
}

#[test]
fn harmony() {
    reads(
        &Harmony,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"text\":\"a\"}<|call|>",
        &[r#"f{"text":"a"}"#],
        "I look.",
        Some("hm"),
    );
    reads(
        &Harmony,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|><|start|>assistant<|channel|>final<|message|> Hi.\n",
        &[],
        " Hi.\n",
        Some("a\nb"),
    );
    // The recipient may stand before the channel.
    reads(
        &Harmony,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}",
        &["g{}"],
        "",
        Some("hm"),
    );
}

#[test]
fn malformed_calls_stay_text() {
    for (grammar, text) in [
        (
            &families::QWEN3_CODER as &dyn Grammar,
            "<tool_call>\n<function=f>\n<parameter=text>\nx\n</tool_call>",
        ),
        (
            &families::QWEN3_CODER,
            "<tool_call>{\"name\": \"f\"}</tool_call>",
        ),
        (
            &families::GLM,
            "<tool_call>f<arg_key>text</arg_key></tool_call>",
        ),
        (&families::GLM, "<tool_call></tool_call>"),
        (
            &families::KIMI,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0{}<|tool_call_end|>",
        ),
        (
            &families::KIMI,
            "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"text\": <|tool_call_end|>",
        ),
        (
            &families::MINIMAX,
            "<minimax:tool_call><invoke name=\"f\"><parameter name=\"text\">x</invoke></minimax:tool_call>",
        ),
        (
            &families::DEEPSEEK,
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{<｜tool▁call▁end｜>",
        ),
        (
            &families::DEEPSEEK,
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}",
        ),
        (&whole::Mistral, "[TOOL_CALLS][{\"name\": \"f\""),
        (&whole::Mistral, "[TOOL_CALLS]f[ARGS]no"),
        (&whole::Llama3, "<|python_tag|>print(1)"),
        (
            &whole::Llama3,
            "{\"name\": \"f\", \"parameters\": {\"text\": ",
        ),
        (&Harmony, "just text"),
        (
            &Harmony,
            "<|channel|>commentary to=functions.f<|message|>{\"text\": ",
        ),
        (&Harmony, "<|channel|>other<|message|>x"),
    ] {
        let pieces = grammar.parse(text, false, &tools());
        assert!(
            pieces.failed && pieces.calls.is_empty(),
            "{text}: {pieces:?}"
        );
        assert_eq!(pieces.content, text, "{}", grammar.name());
    }
}

#[test]
fn a_family_is_told_by_its_template() {
    for (marks, name) in [
        ("<tool_call>{{ tool_call | tojson }}", "hermes"),
        ("nothing", "hermes"),
        ("<tool_call>\n<function=", "qwen3-coder"),
        ("<tool_call>{{ name }}<arg_key>", "glm"),
        ("<|tool_calls_section_begin|>", "kimi"),
        ("<minimax:tool_call>", "minimax"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("[TOOL_CALLS]", "mistral"),
        (
            "<|start_header_id|> {\"name\": x, \"parameters\": y}",
            "llama3",
        ),
        ("<|start|><|channel|>", "harmony"),
    ] {
        assert_eq!(super::detect(marks).name(), name);
    }
}

#[test]
fn a_prompt_that_opens_the_thought() {
    for grammar in all() {
        let opens = grammar.opens_thought("<|im_start|>assistant\n<think>\n");
        if opens {
            let pieces = grammar.parse("hm\n</think>\n\nHi.", true, &[]);
            assert_eq!(pieces.reasoning.as_deref(), Some("hm"));
            assert_eq!(pieces.content, "Hi.");
            assert!(!grammar.opens_thought("<think>\n\n</think>\n\n"));
        }
    }
}

fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        // Text that is no other JSON value, and that no trimming changes.
        "[a-z]([a-z \n{}<>/=\"]{0,8}[a-z])?".prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        Just(json!({"a": [1, null], "b": {"c": "x"}})),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// What a family writes it reads: text, reasoning, and up to four calls.
    #[test]
    fn what_is_written_is_read(
        text in "([a-z.]{1,10})?",
        reasoning in prop::option::of("[a-z.]{1,10}"),
        names in prop::collection::vec("[a-z]{1,8}", 0..5),
        arguments in prop::collection::vec(("[a-z_]{1,6}", value()), 0..4),
    ) {
        let words = ["true", "false", "null"];
        prop_assume!(!arguments.iter().any(|(_, value)| value.as_str().is_some_and(|text| words.contains(&text))));
        for grammar in all() {
            let mut message = Message::text(Role::Assistant, text.as_str());
            let whole = grammar.name() == "llama3";
            message.reasoning = reasoning.clone().filter(|_| !whole);
            message.tool_calls = names.iter().map(|name| ToolCall {
                id: String::new(), name: name.clone(), arguments: arguments.iter().cloned().collect(),
            }).collect();
            if whole && !names.is_empty() {
                message.content.clear();
            }
            let pieces = grammar.parse(&grammar.write(&message), false, &[]);
            prop_assert!(!pieces.failed, "{}: {:?}", grammar.name(), grammar.write(&message));
            prop_assert_eq!(&pieces.content, &message.text_content(), "{}", grammar.name());
            prop_assert_eq!(&pieces.reasoning, &message.reasoning, "{}", grammar.name());
            let calls: Vec<_> = message.tool_calls.into_iter().map(|call| (call.name, call.arguments)).collect();
            prop_assert_eq!(&pieces.calls, &calls, "{}", grammar.name());
        }
    }

    /// Any text is read without a panic, and text without a mark is kept to the byte.
    #[test]
    fn nothing_panics_and_plain_text_is_kept(
        text in "(<tool_call>|</tool_call>|<function=f>|</function>|<parameter=a>|</parameter>|<arg_key>|</arg_key>|<arg_value>|</arg_value>|<\\|tool_call_begin\\|>|<\\|tool_call_end\\|>|<minimax:tool_call>|</minimax:tool_call>|<invoke name=\"f\">|</invoke>|<｜tool▁call▁begin｜>|<｜tool▁sep｜>|<｜tool▁call▁end｜>|\\[TOOL_CALLS\\]|\\[ARGS\\]|<\\|channel\\|>|<\\|message\\|>|<\\|end\\|>|<\\|start\\|>|analysis|final| to=functions.f|<think>|</think>|\\{\"name\":\"f\"\\}|\\{\\}|\\PC|\n){0,24}",
        plain in "[a-zäö .\n]{0,40}",
        in_thought: bool,
    ) {
        for grammar in all() {
            let pieces = grammar.parse(&text, in_thought, &tools());
            if pieces.failed && pieces.calls.is_empty() && pieces.reasoning.is_none() && !in_thought && !text.contains("<think>") {
                prop_assert!(!pieces.content.is_empty(), "{}", grammar.name());
            }
            let pieces = grammar.parse(&plain, false, &tools());
            prop_assert_eq!(&pieces.content, &plain, "{}", grammar.name());
        }
    }
}

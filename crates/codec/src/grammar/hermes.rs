//! `<think>…</think>`, text, and any number of `<tool_call>` blocks that hold one JSON object with
//! `name` and `arguments`: Hermes, Qwen, the built-in policy.

use record::ToolSpec;
use serde_json::{Map, Value, json};

use super::blocks::{Calls, Marks, named};
use crate::python_json::{Style, dumps};

pub(super) const HERMES: Marks = Marks {
    name: "hermes",
    think: ("<think>", "</think>"),
    section: None,
    block: ("<tool_call>", "</tool_call>"),
    read,
    write,
};

fn read(inner: &str, _tools: &[ToolSpec]) -> Option<Calls> {
    named(inner, &["arguments"]).map(|call| vec![call])
}

fn write(name: &str, arguments: &Map<String, Value>, _position: usize) -> String {
    let block = json!({"name": name, "arguments": arguments});
    format!("\n{}\n", dumps(&block, &Style::new(None)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use record::Message;

    use super::*;
    use crate::grammar::{Grammar, Pieces};

    const CALL: &str = "<tool_call>";

    fn parse(text: &str) -> Pieces {
        HERMES.parse(text, false, &[])
    }

    const LS: &str = r#"<tool_call>{"name":"ls","arguments":{"z":1,"a":2}}</tool_call>"#;

    #[test]
    fn well_formed_replies() {
        let calls = |pieces: &Pieces| {
            let calls = pieces.calls.iter();
            calls
                .map(|(name, arguments)| format!("{name}{arguments}"))
                .collect::<Vec<_>>()
        };
        for (text, content, expected, reasoning) in [
            ("plain \n", "plain \n", vec![], None),
            (LS, "", vec![r#"ls{"z":1,"a":2}"#], None),
            (
                "<tool_call>\n {\"name\": \"ls\"} \n\n</tool_call>",
                "",
                vec!["ls{}"],
                None,
            ),
            (
                "<tool_call>{\"arguments\": null, \"name\": \"ls\"}</tool_call>",
                "",
                vec!["ls{}"],
                None,
            ),
            (
                "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\":1}\"}</tool_call>",
                "",
                vec![r#"f{"a":1}"#],
                None,
            ),
            ("<think>\nhm\n</think>\n\n a", " a", vec![], Some("hm")),
            ("<think></think>a", "a", vec![], None),
            ("a <think> b", "a <think> b", vec![], None),
        ] {
            let pieces = parse(text);
            assert!(!pieces.failed, "{text}");
            assert_eq!(pieces.content, content, "{text}");
            assert_eq!(calls(&pieces), expected, "{text}");
            assert_eq!(pieces.reasoning.as_deref(), reasoning, "{text}");
        }
        let three = parse(&format!(
            "<think>t</think> before\n{LS} between {LS}\n{LS} after "
        ));
        assert_eq!((three.calls.len(), three.failed), (3, false));
        assert_eq!(three.content, "before\nbetween\nafter");
    }

    #[test]
    fn malformed_blocks_stay_text() {
        for text in [
            "<tool_call>{'name': 'ls'}</tool_call>",
            "<tool_call>{\"arguments\": {}}</tool_call>",
            "<tool_call>{\"name\": \" \"}</tool_call>",
            "<tool_call>{\"name\": \"ls\", \"arguments\": [1]}</tool_call>",
            "<tool_call>{\"name\": \"ls\"} extra</tool_call>",
            "<tool_call>{\"name\": \"ls\"}",
            "I use <tool_call> now",
            "<tool_call></tool_call>",
        ] {
            let pieces = parse(text);
            assert!(pieces.failed && pieces.calls.is_empty(), "{text}");
            assert_eq!(pieces.content, text);
        }
        // A good call beside a bad one is still made.
        let pieces = parse(&format!("<tool_call>bad</tool_call>{LS}<tool_call>open"));
        assert!(pieces.failed);
        assert_eq!(pieces.calls.len(), 1);
        assert_eq!(
            pieces.content,
            "<tool_call>bad</tool_call>\n<tool_call>open"
        );
        // Opened twice: the inner one counts, the outer mark stays text.
        let pieces = parse(&format!("<tool_call>{LS}"));
        assert_eq!((pieces.calls.len(), pieces.failed), (1, true));
        assert_eq!(pieces.content, "<tool_call>");
        // A thought that never ends is no answer.
        let pieces = parse("<think>hm");
        assert_eq!(
            (pieces.reasoning.as_deref(), pieces.failed),
            (Some("hm"), true)
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn nothing_is_lost_and_nothing_panics(text in "(<tool_call>|</tool_call>|<think>|</think>|\\{\"name\":\"f\"\\}|\\PC|\n){0,24}", in_thought: bool) {
            let pieces = HERMES.parse(&text, in_thought, &[]);
            if pieces.calls.is_empty() && pieces.reasoning.is_none() && !text.contains("</think>") && !pieces.failed {
                prop_assert_eq!(pieces.content, text);
            } else if !pieces.failed {
                prop_assert!(!pieces.content.contains(CALL), "{}", pieces.content);
            }
        }

        #[test]
        fn what_is_written_is_read(text in "[a-z.]{0,10}", reasoning in prop::option::of("[a-z.]{1,10}"), names in prop::collection::vec("[a-z_]{1,8}", 0..4), argument in "(.|</tool_call>){0,10}") {
            let mut message = Message::text(record::Role::Assistant, text);
            message.reasoning = reasoning;
            message.tool_calls = names.iter().map(|name| record::ToolCall {
                id: String::new(), name: name.clone(), arguments: json!({"a": argument, "b": [1, {}]}),
            }).collect();
            let pieces = parse(&HERMES.write(&message));
            prop_assert_eq!(&pieces.content, &message.text_content());
            prop_assert_eq!(&pieces.reasoning, &message.reasoning);
            let calls: Vec<_> = message.tool_calls.into_iter().map(|call| (call.name, call.arguments)).collect();
            prop_assert_eq!(&pieces.calls, &calls);
            prop_assert!(!pieces.failed);
        }
    }
}

//! `<think>…</think>`, text, and any number of `<tool_call>` blocks that hold one JSON object with
//! `name` and `arguments`.
//!
//! White space around the JSON and around blocks does not matter. A block that is not closed, is
//! no JSON, or has no name, stays in the text as it was written, and the reply counts as failed.
//! Text before, between and after calls is content: trimmed and joined by line breaks. Without
//! calls the text is kept to the byte, but for the line breaks behind the reasoning.

use record::Message;
use serde_json::{Map, Value};

use super::{Grammar, Pieces};
use crate::python_json::{Style, dumps};

const THINK: &str = "<think>";
const THINK_END: &str = "</think>";
const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";

/// The grammar of Hermes and Qwen.
#[derive(Debug, Clone, Copy)]
pub struct Hermes;

/// A call from the inside of a block.
fn call(inner: &str) -> Option<(String, Value)> {
    let Ok(Value::Object(mut object)) = serde_json::from_str::<Value>(inner.trim()) else {
        return None;
    };
    let Some(Value::String(name)) = object.shift_remove("name") else {
        return None;
    };
    if name.trim().is_empty() {
        return None;
    }
    let arguments = match object.shift_remove("arguments") {
        None | Some(Value::Null) => Value::Object(Map::new()),
        Some(Value::Object(arguments)) => Value::Object(arguments),
        // Some models write the object as a string, as the wire does.
        Some(Value::String(text)) => match serde_json::from_str(&text) {
            Ok(Value::Object(arguments)) => Value::Object(arguments),
            _ => return None,
        },
        Some(_) => return None,
    };
    Some((name, arguments))
}

/// Splits reasoning off: the reasoning, the rest, and whether it was left open.
fn thought(text: &str, in_thought: bool) -> (Option<&str>, &str, bool) {
    let start = text.trim_start();
    let after = match (start.strip_prefix(THINK), in_thought) {
        (Some(after), _) => after,
        (None, true) => text,
        (None, false) => return (None, text, false),
    };
    match after.split_once(THINK_END) {
        Some((reasoning, rest)) => (Some(reasoning), rest.trim_start_matches('\n'), false),
        None => (Some(after), "", true),
    }
}

impl Grammar for Hermes {
    fn name(&self) -> &'static str {
        "hermes"
    }

    fn parse(&self, text: &str, in_thought: bool) -> Pieces {
        let (reasoning, body, open) = thought(text, in_thought);
        let mut pieces = Pieces {
            reasoning: reasoning
                .map(str::trim)
                .filter(|reasoning| !reasoning.is_empty())
                .map(str::to_owned),
            failed: open,
            ..Pieces::default()
        };
        // Runs of text between calls; a malformed block belongs to the run it stands in.
        let mut runs = Vec::new();
        let mut run_start = 0;
        let mut from = 0;
        while let Some(found) = body[from..].find(CALL) {
            let open = from + found;
            let inside = open + CALL.len();
            let Some(length) = body[inside..].find(CALL_END) else {
                pieces.failed = true;
                break;
            };
            let end = inside + length + CALL_END.len();
            match call(&body[inside..inside + length]) {
                Some(call) => {
                    pieces.calls.push(call);
                    runs.push(&body[run_start..open]);
                    run_start = end;
                    from = end;
                }
                None => {
                    pieces.failed = true;
                    // A block may have been opened twice: try again behind the first opening.
                    from = inside;
                }
            }
        }
        runs.push(&body[run_start..]);
        pieces.content = if pieces.calls.is_empty() {
            body.to_owned()
        } else {
            runs.iter()
                .map(|run| run.trim())
                .filter(|run| !run.is_empty())
                .collect::<Vec<_>>()
                .join("\n")
        };
        pieces
    }

    fn write(&self, message: &Message) -> String {
        let mut out = String::new();
        if let Some(reasoning) = &message.reasoning {
            out.push_str(&format!("{THINK}\n{reasoning}\n{THINK_END}\n\n"));
        }
        out.push_str(&message.text_content());
        for call in &message.tool_calls {
            if !out.is_empty() && !out.ends_with('\n') {
                out.push('\n');
            }
            let block = serde_json::json!({"name": call.name, "arguments": call.arguments});
            let json = dumps(&block, &Style::new(None));
            out.push_str(&format!("{CALL}\n{json}\n{CALL_END}"));
        }
        out
    }

    fn opens_thought(&self, generation_prompt: &str) -> bool {
        match generation_prompt.rfind(THINK) {
            Some(at) => !generation_prompt[at..].contains(THINK_END),
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn parse(text: &str) -> Pieces {
        Hermes.parse(text, false)
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
            let pieces = Hermes.parse(&text, in_thought);
            if pieces.calls.is_empty() && pieces.reasoning.is_none() && !text.contains("</think>") && !pieces.failed {
                prop_assert_eq!(pieces.content, text);
            } else if !pieces.failed {
                prop_assert!(!pieces.content.contains(CALL), "{}", pieces.content);
            }
        }

        #[test]
        fn what_is_written_is_read(text in "[a-z.]{0,10}", reasoning in prop::option::of("[a-z.]{1,10}"), names in prop::collection::vec("[a-z_]{1,8}", 0..4), argument in ".{0,10}") {
            let mut message = Message::text(record::Role::Assistant, text);
            message.reasoning = reasoning;
            message.tool_calls = names.iter().map(|name| record::ToolCall {
                id: String::new(), name: name.clone(), arguments: json!({"a": argument, "b": [1, {}]}),
            }).collect();
            let pieces = parse(&Hermes.write(&message));
            prop_assert_eq!(&pieces.content, &message.text_content());
            prop_assert_eq!(&pieces.reasoning, &message.reasoning);
            let calls: Vec<_> = message.tool_calls.into_iter().map(|call| (call.name, call.arguments)).collect();
            prop_assert_eq!(&pieces.calls, &calls);
            // An argument may hold the closing mark: then the block is malformed.
            prop_assert!(!pieces.failed);
        }
    }
}

//! The template engine, exact continuation and the output parsers on inputs that no model and no
//! harness would make: they refuse or read, and never break.

#[path = "../../wire/tests/mutate/mod.rs"]
mod mutate;

use std::path::PathBuf;

use mutate::{Effort, Random, any, mutate_bytes, search};
use record::{Conversation, Message, Role, ToolCall, ToolSpec};
use serde_json::{Value, json};

use crate::{Codec, Memory, Settings, grammar};

const TEMPLATE: &str = include_str!("../../../policy/chat_template.jinja");

/// Pieces of templates as models have them, to be put into each other.
const PIECES: &str = r#"{%- for m in messages %}{{ m.content }}{%- endfor %}{%- if tools %}{{ tools | tojson(indent=2) }}
{%- endif %}{% set ns = namespace(a=0) %}{% macro f(x) %}{{ x | trim }}{% endmacro %}{{ f("a") }}{{ raise_exception("no") }}
{{ strftime_now("%Y-%m-%d") }}{{ messages[0]['role'] }}{{ messages[::-1] }}{{ 'a'.split('b')[-1] }}{% break %}{% continue %}
{{ loop.index0 }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ (1, 2) | join(',') }}{{ x.y.z }}"#;

/// What models of all families say, well and badly.
const SAID: [&str; 14] = [
    "plain text",
    "<think>\nhm\n</think>\n\nHi.<tool_call>\n{\"name\": \"f\", \"arguments\": {\"text\": \"a\"}}\n</tool_call><|im_end|>",
    "<tool_call>\n<function=f>\n<parameter=text>\n1\n</parameter>\n<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"text\": \"a\"}<|tool_call_end|><|tool_calls_section_end|>",
    "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"text\">a</parameter>\n</invoke>\n</minimax:tool_call>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"text\": \"a\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"text\": \"a\"}, \"id\": \"123456789\"}]",
    "[TOOL_CALLS]f[ARGS]{\"text\": \"a\"}",
    "{\"name\": \"f\", \"parameters\": {\"text\": \"a\"}}<|eot_id|>",
    "<|python_tag|>{\"name\": \"f\", \"parameters\": {}}",
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"text\": \"a\"}<|call|>",
    "<|channel|>final<|message|>Hi.<|return|>",
    "{\"a\": [1, {\"b\": \"\\u00e9\\\"",
];

fn policy(template: &str) -> Result<Codec, crate::CodecError> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../policy");
    let tokenizer = std::fs::read(folder.join("tokenizer.json")).unwrap();
    let config = json!({"eos_token": "<|im_end|>", "chat_template": template});
    Codec::from_parts(&tokenizer, &config, Settings::default())
}

fn words(random: &mut Random) -> String {
    let mut bytes = random.pick(&SAID).as_bytes().to_vec();
    if random.chance(2) {
        mutate_bytes(random, &mut bytes, random.clone().pick(&SAID).as_bytes());
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn message(random: &mut Random) -> Message {
    let role = *random.pick(&[Role::System, Role::User, Role::Assistant, Role::Tool]);
    let mut message = Message::text(role, words(random));
    if role == Role::Assistant {
        message.reasoning = random.chance(2).then(|| words(random));
        for _ in 0..random.below(3) {
            message.tool_calls.push(ToolCall {
                id: words(random).chars().take(9).collect(),
                name: "f".into(),
                arguments: if random.chance(2) {
                    any(random)
                } else {
                    json!({"text": words(random)})
                },
            });
        }
    }
    message
}

fn tools() -> Vec<ToolSpec> {
    vec![ToolSpec {
        name: "f".into(),
        description: "d".into(),
        parameters: json!({"type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}}),
    }]
}

fn conversation(random: &mut Random) -> Conversation {
    let count = 1 + random.below(6);
    Conversation {
        messages: (0..count).map(|_| message(random)).collect(),
        tools: if random.chance(2) {
            tools()
        } else {
            Vec::new()
        },
    }
}

/// A whole rollout of nonsense: every prompt is what its ids say, and continues what it claims to.
fn talk(codec: &Codec, random: &mut Random) {
    let mut talk = conversation(random);
    let mut memory = Memory::default();
    let mut wholes: Vec<Vec<u32>> = Vec::new();
    for call in 0..4 {
        let Ok(prompt) = codec.prompt(&talk, &memory) else {
            return;
        };
        let continuation = &prompt.continuation;
        let exact = continuation.exact as usize;
        assert_eq!(exact + continuation.encoded as usize, prompt.ids.len());
        assert_eq!(codec.decode(&prompt.ids), prompt.text);
        match continuation.parent {
            Some(parent) => assert!(prompt.ids.starts_with(&wholes[parent as usize][..exact])),
            None => assert_eq!(exact, 0),
        }
        let said = words(random);
        let ids = codec.encode(&said).unwrap();
        let raw = codec.decode(&ids);
        let reply = codec.parse_with(&raw, &talk.tools).with_ids(call).message;
        memory.remember(call, &prompt, &ids, &raw, &reply);
        wholes.push([prompt.ids, ids].concat());
        talk.messages.push(reply);
        for _ in 0..random.below(3) {
            talk.messages.push(message(random));
        }
        if random.chance(8) {
            talk.messages.remove(0);
        }
    }
}

fn template(random: &mut Random) {
    let mut bytes = TEMPLATE.as_bytes().to_vec();
    mutate_bytes(random, &mut bytes, PIECES.as_bytes());
    let Ok(text) = String::from_utf8(bytes) else {
        return;
    };
    // Building renders a dozen conversations already, to check itself.
    if let Ok(codec) = policy(&text) {
        let talk = conversation(random);
        // What it renders may be nonsense; that it is told apart from a crash is the test.
        let _ = codec.prompt(&talk, &Memory::default());
    }
}

fn parse(random: &mut Random) {
    let mut bytes = random.pick(&SAID).as_bytes().to_vec();
    mutate_bytes(random, &mut bytes, random.clone().pick(&SAID).as_bytes());
    let raw = String::from_utf8_lossy(&bytes).into_owned();
    for grammar in grammar::tests::all() {
        for opened in [false, true] {
            let pieces = grammar.parse(&raw, opened, &tools());
            // A newline between two messages is all that may be added.
            assert!(
                pieces.content.len() <= raw.len() + raw.matches("<|").count(),
                "{}: {raw:?} became {:?}",
                grammar.name(),
                pieces.content
            );
            for (name, arguments) in &pieces.calls {
                assert!(!name.is_empty(), "{raw:?}");
                assert!(
                    matches!(arguments, Value::Object(_) | Value::String(_)),
                    "{arguments}"
                );
            }
        }
    }
}

fn run(effort: impl Fn(u64) -> Effort) {
    search("output parsers", effort(6_000), parse);
    search("template engine", effort(60), template);
    let codec = policy(TEMPLATE).unwrap();
    search("continuation", effort(600), |random| talk(&codec, random));
}

#[test]
fn mutated_texts_and_templates_break_nothing() {
    run(Effort::Inputs);
}

#[test]
#[ignore = "long: ESPALIER_FUZZ_SECONDS (60) for each of three"]
fn mutated_texts_and_templates_break_nothing_for_long() {
    run(|_| Effort::long());
}

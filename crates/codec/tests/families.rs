//! Templates in the manner of other model families, each with what makes it hard, over the
//! built-in tokenizer. All must continue exactly, or say that they do not.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

use std::path::PathBuf;

use codec::{Codec, CodecError, History, Memory, Mode, Settings};
use record::{Conversation, Message, Part, Role, ToolSpec};
use serde_json::json;

/// Thinks; shows no thoughts of earlier turns; closes an empty thought when told not to think.
const THINKER: &str = r#"
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set c = m.content.split('</think>')[-1].lstrip('\n') if '</think>' in m.content else m.content %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.last and m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- c }}
{%- for t in m.tool_calls %}{{- '\n<tool_call>\n' + (t.function | tojson) + '\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"#;

/// The prompt opens the thought.
const OPENER: &str = r#"
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + m.content.split('</think>')[-1] }}
{%- for t in m.tool_calls %}{{ '<tool_call>' + (t.function | tojson) + '</tool_call>' }}{% endfor %}{{ '<|im_end|>' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"#;

/// Counts roles, wants calls before results and ids of nine characters, has no generation prompt.
const COUNTER: &str = r#"
{%- set ns = namespace(i=0) %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}
{%- if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.i = ns.i + 1 %}
{%- endif %}
{%- if m.role == 'user' %}{{ '<|im_start|>' + m.content }}
{%- elif m.role == 'tool' %}{{ '<tool_response>' + m.content + '</tool_response>' }}
{%- elif m.tool_calls is defined %}{{ '<tool_call>[' }}
{%- for t in m.tool_calls %}
{%- if t.id | length != 9 %}{{ raise_exception('ids must have nine characters') }}{% endif %}
{{- (t.function | tojson)[:-1] + ', "id": "' + t.id + '"}' }}{{ ', ' if not loop.last }}
{%- endfor %}{{ ']<|im_end|>' }}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}
{%- endfor %}"#;

/// Trims, and shows calls instead of content.
const TRIMMER: &str = r#"
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '<think>\n\n' }}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call only') }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- '{"name": "' + f.name + '", "parameters": ' + (f.arguments | tojson) + '}' }}
{%- else %}{{ m.content | trim }}{% endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<think>\n\n' }}{% endif %}"#;

/// No end of turn: the header of the next turn stops the reply.
const HEADERS: &str = r#"
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"#;

/// Forgets what the model said.
const FORGETTER: &str = r#"
{%- for m in messages %}{% if m.role != 'assistant' %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"#;

fn load(template: &str, eos: &str, settings: Settings) -> Result<Codec, CodecError> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../policy");
    let tokenizer = std::fs::read(folder.join("tokenizer.json")).unwrap();
    let config = json!({"eos_token": {"content": eos}, "chat_template": template});
    Codec::from_parts(&tokenizer, &config, settings)
}

fn plain(template: &str, eos: &str) -> Codec {
    load(template, eos, Settings::default()).unwrap()
}

fn start() -> Conversation {
    Conversation {
        messages: vec![Message::text(Role::User, "Go.")],
        tools: vec![ToolSpec {
            name: "run".into(),
            description: "Run.".into(),
            parameters: json!({"type": "object"}),
        }],
    }
}

/// Plays raw replies one after the other; checks I2 at each; gives the last prompt's text.
fn play(codec: &Codec, raws: &[&str]) -> String {
    let mut conversation = start();
    let mut memory = Memory::default();
    let mut had = Vec::new();
    for (call, raw) in (0u32..).zip(raws) {
        let prompt = codec.prompt(&conversation, &memory).unwrap();
        assert!(prompt.ids.starts_with(&had), "call {call}: {}", prompt.text);
        assert_eq!(prompt.continuation.parent, call.checked_sub(1));
        let ids = codec.encode(raw).unwrap();
        let reply = codec.parse(raw).with_ids(call).message;
        memory.remember(call, &prompt, &ids, raw, &reply);
        had = [prompt.ids, ids].concat();
        let mut echo = reply.clone();
        echo.reasoning = None;
        conversation.messages.push(echo);
        conversation.messages.push(match reply.tool_calls.first() {
            Some(tool_call) => {
                let mut result = Message::text(Role::Tool, "ok");
                result.tool_call_id = Some(tool_call.id.clone());
                result
            }
            None => Message::text(Role::User, "On."),
        });
    }
    let prompt = codec.prompt(&conversation, &memory).unwrap();
    assert!(prompt.ids.starts_with(&had), "{}", prompt.text);
    prompt.text
}

#[test]
fn a_thinker_keeps_its_thoughts_as_generated() {
    let codec = plain(THINKER, "<|im_end|>");
    assert_eq!(*codec.mode(), Mode::Exact);
    let text = play(
        &codec,
        &[
            "<think>\nhm\n</think>\n\n<tool_call>\n{\"name\": \"run\"}\n</tool_call><|im_end|>",
            "<think>\nso\n</think>\n\nDone.<|im_end|>",
        ],
    );
    assert!(text.contains("hm") && text.contains("so"), "{text}");
}

#[test]
fn a_thinker_told_not_to_think_keeps_its_empty_thought() {
    let settings = Settings {
        enable_thinking: Some(false),
        ..Settings::default()
    };
    let codec = load(THINKER, "<|im_end|>", settings).unwrap();
    assert_eq!(*codec.mode(), Mode::Exact);
    let text = play(
        &codec,
        &[
            "Yes.<|im_end|>",
            "<tool_call>{\"name\":\"run\"}</tool_call><|im_end|>",
        ],
    );
    assert_eq!(text.matches("<think>\n\n</think>\n\n").count(), 3, "{text}");
}

#[test]
fn history_as_the_template_shows_it_is_a_fork_that_is_counted() {
    let settings = Settings {
        history: History::AsTemplate,
        ..Settings::default()
    };
    let codec = load(THINKER, "<|im_end|>", settings).unwrap();
    let mut conversation = start();
    let mut memory = Memory::default();
    let prompt = codec.prompt(&conversation, &memory).unwrap();
    let raw = "<think>\nhm\n</think>\n\nYes.<|im_end|>";
    let reply = codec.parse(raw).message;
    memory.remember(0, &prompt, &codec.encode(raw).unwrap(), raw, &reply);
    conversation.messages.push(reply);
    conversation.messages.push(Message::text(Role::User, "On."));
    let next = codec.prompt(&conversation, &memory).unwrap();
    assert!(!next.text.contains("hm"), "{}", next.text);
    assert_eq!(
        (next.continuation.parent, next.continuation.echoes_matched),
        (None, 1)
    );
}

#[test]
fn a_prompt_that_opens_the_thought() {
    let codec = plain(OPENER, "<|im_end|>");
    assert_eq!(*codec.mode(), Mode::Exact);
    let parsed = codec.parse("hm</think>Yes.<|im_end|>");
    assert_eq!(parsed.message.reasoning.as_deref(), Some("hm"));
    assert_eq!(
        (parsed.message.text_content().as_str(), parsed.failed),
        ("Yes.", false)
    );
    let text = play(
        &codec,
        &["hm</think>Yes.<|im_end|>", "so</think>\n\nNo.<|im_end|>"],
    );
    assert!(text.contains("<think>\nhm</think>Yes."), "{text}");
}

#[test]
fn a_template_that_counts_roles_gets_calls_for_calls() {
    let codec = plain(COUNTER, "<|im_end|>");
    assert_eq!(*codec.mode(), Mode::Exact);
    let call = "<tool_call>{\"name\": \"run\", \"arguments\": {\"a\": 1}}</tool_call><|im_end|>";
    play(
        &codec,
        &[call, call, "Done.<|im_end|>", call, call, "Done.<|im_end|>"],
    );
}

#[test]
fn a_template_that_trims_and_shows_calls_instead_of_content() {
    let codec = plain(TRIMMER, "<|im_end|>");
    assert_eq!(*codec.mode(), Mode::Exact);
    let call = "I look.\n<tool_call>{\"name\": \"run\"}</tool_call><tool_call>{\"name\": \"run\"}</tool_call><|im_end|>";
    let text = play(&codec, &["  spaces  <|im_end|>", call]);
    assert!(
        text.contains("  spaces  <|im_end|>") && text.contains(call),
        "{text}"
    );
}

#[test]
fn a_stop_token_that_is_the_next_header() {
    let codec = plain(HEADERS, "<|im_start|>");
    assert_eq!(*codec.mode(), Mode::Exact);
    let text = play(&codec, &["Yes.<|im_start|>", "No.<|im_start|>"]);
    assert_eq!(text.matches("<|im_start|>").count(), 6, "{text}");
}

#[test]
fn a_template_that_forgets_is_named() {
    let codec = plain(FORGETTER, "<|im_end|>");
    assert_eq!(codec.mode().name(), "re-encode");
    let Mode::ReEncode { reason } = codec.mode() else {
        panic!("exact");
    };
    assert!(reason.starts_with("plain text: "), "{reason}");
    let mut conversation = start();
    conversation
        .messages
        .push(Message::text(Role::Assistant, "a"));
    let prompt = codec.prompt(&conversation, &Memory::default()).unwrap();
    assert_eq!(prompt.text, "Go.<|im_end|>");
    assert_eq!(prompt.continuation.echoes_foreign, 1);
}

#[test]
fn errors_name_the_line_and_the_advice() {
    let text = |result: Result<Codec, CodecError>| result.unwrap_err().to_string();
    let broken = "{% for m in messages %}\n{{ m.content }}\n{% endif %}";
    insta::assert_snapshot!(
        text(load(broken, "<|im_end|>", Settings::default())),
        @"codec: chat template, line 3: syntax error: unknown statement endif"
    );
    insta::assert_snapshot!(
        text(load(HEADERS, "<|eot|>", Settings::default())),
        @r#"codec: the stop token "<|eot|>" named in tokenizer_config.json is not in the vocabulary; tokenizer.json and tokenizer_config.json come from different models"#
    );
    let folder = PathBuf::from("no/such/folder");
    insta::assert_snapshot!(
        text(Codec::load(&folder)),
        @"codec: no/such/folder/tokenizer.json is missing; expected a Hugging Face model folder: point the tokenizer setting at one that holds it"
    );
    let codec = plain(COUNTER, "<|im_end|>");
    let mut conversation = start();
    conversation.messages.push(Message::text(Role::User, "Go."));
    insta::assert_snapshot!(
        codec.prompt(&conversation, &Memory::default()).unwrap_err(),
        @"codec: chat template, line 5: roles must alternate"
    );
    conversation.messages[1].content = vec![Part::Image {
        url: "data:".into(),
    }];
    // Not refused: the image would stay in the history and be refused for ever.
    let codec = plain(HEADERS, "<|im_start|>");
    let shown = codec
        .prompt(&conversation, &Memory::default())
        .unwrap()
        .text;
    assert!(shown.contains(codec::template::IMAGE_NOTICE), "{shown}");
}

#[test]
fn the_dialect_of_templates() {
    let template = concat!(
        "{%- generation -%}{{ messages[0]['content'].upper() }}{%- endgeneration %}\n",
        "{{ true }} {{ none }} {{ [1, 'a', 2.0] }} {{ {'k': \"it's\"} }}\n",
        "{{ strftime_now('%d %b %Y') }}|{{ tools | tojson }}|{{ undefined_name }}|{{ eos_token }}\n",
        "{%- for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson(indent=2) }}{% endfor %}\n",
        "   {% set x = messages[::-1] %}\n",
        "{{ x | length }}{% if documents is none %}no documents{% endif %}{{ '<a&b>' | tojson }}\n",
        "{{ tools[0].function.name if tools else 'no tools' }}<|im_end|>",
    );
    let codec = plain(template, "<|im_end|>");
    let conversation = Conversation {
        messages: vec![Message::text(Role::User, "é")],
        tools: Vec::new(),
    };
    let prompt = codec.prompt(&conversation, &Memory::default()).unwrap();
    insta::assert_snapshot!(prompt.text, @r#"
    ÉTrue None [1, 'a', 2.0] {'k': "it's"}
    01 Jan 2026|null||<|im_end|>{
      "role": "user",
      "content": "é"
    }1no documents"<a&b>"
    no tools<|im_end|>
    "#);
}

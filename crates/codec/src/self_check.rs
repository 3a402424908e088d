//! The proof, at start-up, that continuation is exact for this model.

use record::{Conversation, Message, Role, ToolCall, ToolSpec};
use serde_json::{Value, json};

use crate::{Codec, CodecError, Memory};

/// How prompts are made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mode {
    /// Turns of ours keep the ids that were generated (I2).
    Exact,
    /// Every prompt is encoded anew, because the self-check failed. Prompts are right, but
    /// every call is its own branch.
    ReEncode {
        /// What the check expected and found.
        reason: String,
    },
}

impl Mode {
    /// The word used in tables and metrics.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::ReEncode { .. } => "re-encode",
        }
    }
}

/// One exchange: what was asked, what was generated, how the harness echoes it, what follows.
struct Exchange {
    name: &'static str,
    tools: Vec<ToolSpec>,
    asked: Vec<Message>,
    reply: Message,
    echo: Message,
    follows: Vec<Message>,
    cut: bool,
}

fn called(calls: &[(&str, Value)], text: &str) -> Message {
    let mut message = Message::text(Role::Assistant, text);
    message.tool_calls = calls
        .iter()
        .enumerate()
        .map(|(index, (name, arguments))| ToolCall {
            id: format!("call{index}abcd"),
            name: (*name).to_owned(),
            arguments: arguments.clone(),
        })
        .collect();
    message
}

fn result(id: &str, text: &str) -> Message {
    let mut message = Message::text(Role::Tool, text);
    message.tool_call_id = Some(id.to_owned());
    message
}

fn exchanges() -> Vec<Exchange> {
    let user = |text: &str| Message::text(Role::User, text);
    let said = |text: &str| Message::text(Role::Assistant, text);
    let tools = vec![ToolSpec {
        name: "run".into(),
        description: "Run a command.".into(),
        parameters: json!({"type": "object", "properties": {"command": {"type": "string"},
            "seconds": {"type": "integer"}}, "required": ["command"]}),
    }];
    vec![
        Exchange {
            name: "plain text",
            tools: Vec::new(),
            asked: vec![user("Say hello.")],
            reply: said("Hello, wörld."),
            echo: said("Hello, wörld."),
            follows: vec![user("Once more.")],
            cut: false,
        },
        Exchange {
            name: "a tool call, echoed with other key order",
            tools: tools.clone(),
            asked: vec![user("List files.")],
            reply: called(&[("run", json!({"command": "ls", "seconds": 3}))], ""),
            echo: called(&[("run", json!({"seconds": 3, "command": "ls"}))], ""),
            follows: vec![result("call0abcd", "a.txt\nb.txt")],
            cut: false,
        },
        Exchange {
            name: "text and a tool call, followed by result and question",
            tools,
            asked: vec![user("List files.")],
            reply: called(&[("run", json!({"command": "ls -l"}))], "I look."),
            echo: called(&[("run", json!({"command": "ls -l"}))], "I look."),
            follows: vec![result("call0abcd", "{\"a\": 1}")],
            cut: false,
        },
        Exchange {
            name: "a reply that was cut",
            tools: Vec::new(),
            asked: vec![user("Count.")],
            reply: said("one two thr"),
            echo: said("one two thr"),
            follows: vec![user("Go on.")],
            cut: true,
        },
    ]
}

/// Runs every exchange. The first one that is not exact decides.
pub(crate) fn run(codec: &Codec) -> Mode {
    for exchange in exchanges() {
        match check(codec, &exchange) {
            Ok(Ok(())) => {}
            Ok(Err(reason)) => {
                return Mode::ReEncode {
                    reason: format!("{}: {reason}", exchange.name),
                };
            }
            Err(error) => {
                return Mode::ReEncode {
                    reason: format!("{}: {error}", exchange.name),
                };
            }
        }
    }
    Mode::Exact
}

fn check(codec: &Codec, exchange: &Exchange) -> Result<Result<(), String>, CodecError> {
    let mut conversation = Conversation {
        messages: exchange.asked.clone(),
        tools: exchange.tools.clone(),
    };
    let inner = &codec.inner;
    let first =
        crate::continuation::prompt(inner, &Mode::Exact, &conversation, &Memory::default())?;
    let mut raw = codec.speak(&exchange.reply)?;
    if exchange.cut {
        for stop in &inner.stop_texts {
            raw = raw.strip_suffix(stop.as_str()).unwrap_or(&raw).to_owned();
        }
    }
    let generated = codec.encode(&raw)?;
    let mut memory = Memory::default();
    memory.remember(0, &first, &generated, &raw, &exchange.reply);
    conversation.messages.push(exchange.echo.clone());
    conversation
        .messages
        .extend(exchange.follows.iter().cloned());
    let second = crate::continuation::prompt(inner, &Mode::Exact, &conversation, &memory)?;
    if second.continuation.parent != Some(0) {
        return Ok(Err(
            "the next prompt's text does not begin with prompt and reply of the call before".into(),
        ));
    }
    let expected = [first.ids.as_slice(), generated.as_slice()].concat();
    if !second.ids.starts_with(&expected) {
        return Ok(Err(
            "the next prompt's ids do not begin with the call's".into()
        ));
    }
    if !exchange.cut && codec.encode(&second.text)? != second.ids {
        return Ok(Err(
            "encoding the rest alone gives other ids than encoding the whole".into(),
        ));
    }
    Ok(Ok(()))
}

//! The proof, at start-up, that continuation is exact for this model.

use record::{Conversation, Message, Role, ToolCall, ToolSpec};
use serde_json::{Value, json};

use crate::{CodecError, Inner, Memory, Prompt};

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

/// A short rollout.
struct Exchange {
    name: &'static str,
    tools: Vec<ToolSpec>,
    asked: Vec<Message>,
    steps: Vec<Step>,
}

/// What is generated, how the harness echoes it, what follows.
struct Step {
    reply: Message,
    echo: Message,
    follows: Vec<Message>,
    cut: bool,
}

fn step(reply: Message, follows: Message) -> Step {
    Step {
        echo: reply.clone(),
        reply,
        follows: vec![follows],
        cut: false,
    }
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
            steps: vec![
                step(said("Hello, wörld."), user("Once more.")),
                step(said("Hello.\n\nHello."), user("Thanks.")),
            ],
        },
        Exchange {
            name: "tool calls",
            tools,
            asked: vec![user("List files.")],
            steps: vec![
                Step {
                    // The harness writes the arguments in another order.
                    reply: called(&[("run", json!({"command": "ls", "seconds": 3}))], ""),
                    echo: called(&[("run", json!({"seconds": 3, "command": "ls"}))], ""),
                    follows: vec![result("call0abcd", "a.txt\nb.txt")],
                    cut: false,
                },
                step(
                    called(&[("run", json!({"command": "cat \"a\""}))], ""),
                    result("call0abcd", "{\"a\": 1}"),
                ),
                step(said("Two files."), user("Thanks.")),
            ],
        },
        Exchange {
            name: "a reply that was cut",
            tools: Vec::new(),
            asked: vec![user("Count.")],
            steps: vec![Step {
                cut: true,
                ..step(said("one two thr"), user("Go on."))
            }],
        },
    ]
}

/// Runs every exchange. The first one that is not exact decides.
pub(crate) fn run(inner: &Inner) -> Mode {
    for exchange in exchanges() {
        let reason = match check(inner, &exchange) {
            Ok(Ok(())) => continue,
            Ok(Err(reason)) => reason,
            Err(error) => error.to_string(),
        };
        return Mode::ReEncode {
            reason: format!("{}: {reason}", exchange.name),
        };
    }
    Mode::Exact
}

fn check(inner: &Inner, exchange: &Exchange) -> Result<Result<(), String>, CodecError> {
    let mut conversation = Conversation {
        messages: exchange.asked.clone(),
        tools: exchange.tools.clone(),
    };
    let mut memory = Memory::default();
    let mut prompt = exact(inner, &conversation, &memory)?;
    for (call, step) in (0u32..).zip(&exchange.steps) {
        let mut raw = crate::grammar::speak(inner, &step.reply)?;
        if step.cut {
            for stop in &inner.stop_texts {
                raw = raw.strip_suffix(stop.as_str()).unwrap_or(&raw).to_owned();
            }
        }
        let generated = inner.tokens.encode(&raw)?;
        memory.remember(call, &prompt, &generated, &raw, &step.reply);
        conversation.messages.push(step.echo.clone());
        conversation.messages.extend(step.follows.iter().cloned());
        let next = exact(inner, &conversation, &memory)?;
        let at = |what: &str| Ok(Err(format!("after reply {call}: {what}")));
        if next.continuation.parent != Some(call) {
            return at("the next prompt does not begin with the text of prompt and reply");
        }
        let expected = [prompt.ids.as_slice(), generated.as_slice()].concat();
        if !next.ids.starts_with(&expected) {
            return at("the next prompt does not begin with the ids of prompt and reply");
        }
        // Where prompt and reply meet, the engine may have other tokens than the whole text
        // would have; behind the reply it must not.
        let rest = &next.ids[next.continuation.exact as usize..];
        if !inner.tokens.encode(&next.text)?.ends_with(rest) {
            return at("encoding the rest alone gives other ids than the rest of the whole");
        }
        prompt = next;
    }
    Ok(Ok(()))
}

fn exact(
    inner: &Inner,
    conversation: &Conversation,
    memory: &Memory,
) -> Result<Prompt, CodecError> {
    crate::continuation::prompt(inner, &Mode::Exact, conversation, memory)
}

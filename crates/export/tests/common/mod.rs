//! A made-up rollout with everything that a harness does: tools, a retry, a sub-agent, a compaction,
//! a title, an image, arguments that are no JSON.
#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests"
)]

use std::collections::BTreeMap;

use record::{
    Attempt, AttemptOutcome, Call, CallId, Continuation, Conversation, Dialect, Disposition,
    FinishReason, Generation, GroupId, Lineage, Message, Part, PolicySpan, Role, Rollout,
    RolloutId, RolloutSpec, Sampling, StageSeconds, TaskId, ToolCall, ToolSpec, Verdict,
};
use serde_json::{Value, json};

pub const AT_MS: u64 = 1_790_000_000_000;

/// A toy codec: a token per eight bytes of text, so that equal histories have equal prefixes.
fn encode(text: &str) -> Vec<u32> {
    let token = |bytes: &[u8]| {
        bytes.iter().fold(7u32, |token, &byte| {
            token.wrapping_mul(131).wrapping_add(u32::from(byte))
        }) % 100_000
    };
    text.as_bytes().chunks(8).map(token).collect()
}

fn spoken(message: &Message) -> String {
    let mut text = message.text_content();
    if let Some(reasoning) = &message.reasoning {
        text = format!("<think>{reasoning}</think>{text}");
    }
    for call in &message.tool_calls {
        text += &format!("<call>{} {}</call>", call.name, call.arguments);
    }
    text
}

fn render(conversation: &Conversation) -> Vec<u32> {
    let tools: Vec<&str> = conversation
        .tools
        .iter()
        .map(|tool| tool.name.as_str())
        .collect();
    let mut ids = encode(&tools.join(" "));
    for message in &conversation.messages {
        ids.push(100_000 + message.role as u32);
        ids.extend(encode(&spoken(message)));
        ids.push(100_010);
    }
    ids.push(100_000 + Role::Assistant as u32);
    ids
}

pub struct Talk {
    pub calls: Vec<Call>,
}

impl Talk {
    pub fn send(&mut self, conversation: &Conversation, reply: &Message, delivered: bool) {
        let index = self.calls.len() as u32;
        let mut token_ids = encode(&spoken(reply));
        token_ids.push(100_010);
        let logprobs: Vec<f32> = (0..token_ids.len())
            .map(|at| -(index as f32) / 8.0 - at as f32 / 64.0 - 0.125)
            .collect();
        let started_ms = AT_MS + 1000 * u64::from(index);
        self.calls.push(Call {
            id: CallId {
                rollout: RolloutId::new("s0001-logs-react-k00").unwrap(),
                index,
            },
            dialect: Dialect::Chat,
            request: json!({"model": "policy"}),
            headers: Vec::new(),
            digest: String::new(),
            conversation: conversation.clone(),
            prompt_ids: render(conversation),
            continuation: Continuation::default(),
            sampling: Sampling::default(),
            generation: Some(Generation {
                token_ids,
                logprobs_sampled: logprobs.iter().map(|value| value - 0.25).collect(),
                logprobs_model: logprobs,
                policy: vec![PolicySpan {
                    start: 0,
                    version: 3 + u64::from(index) / 5,
                }],
                finish: FinishReason::Stop,
                cached_tokens: 2,
            }),
            raw_text: String::new(),
            reply: Some(reply.clone()),
            parse_failed: false,
            attempts: vec![Attempt {
                started_ms,
                finished_ms: started_ms + 250,
                outcome: match delivered {
                    true => AttemptOutcome::Delivered,
                    false => AttemptOutcome::ClientGone,
                },
                stream: false,
            }],
        });
    }
}

pub fn says(role: Role, text: &str) -> Message {
    Message::text(role, text)
}

pub fn calls_tool(text: &str, id: &str, name: &str, arguments: Value) -> Message {
    let mut message = Message::text(Role::Assistant, text);
    message.tool_calls.push(ToolCall {
        id: id.to_owned(),
        name: name.to_owned(),
        arguments,
    });
    message
}

pub fn answers(id: &str, text: &str) -> Message {
    let mut message = Message::text(Role::Tool, text);
    message.tool_call_id = Some(id.to_owned());
    message
}

fn tools(names: &[&str]) -> Vec<ToolSpec> {
    let tool = |name: &&str| ToolSpec {
        name: (*name).to_owned(),
        description: format!("Use {name}."),
        parameters: json!({"type": "object", "properties": {"command": {"type": "string"}}}),
    };
    names.iter().map(tool).collect()
}

const ERRAND: &str = "Count the lines of the file logs/a.txt and answer with the number only.";
const SUMMARY: &str =
    "Summary: the folder logs holds a.txt with 42 lines and b.txt, which is still to be counted.";

/// The calls of the rollout.
pub fn story() -> Vec<Call> {
    let mut talk = Talk { calls: Vec::new() };
    let system = says(Role::System, "You are a careful agent & you <count>.");
    let task = says(
        Role::User,
        "Count the lines of every log and report the sum.",
    );
    let mut main = Conversation {
        messages: vec![system.clone(), task.clone()],
        tools: tools(&["shell", "task", "read"]),
    };
    // 0: lost on the way; 1: the retry.
    let lost = calls_tool("", "call_lost", "shell", json!({"command": "ls -l logs"}));
    talk.send(&main, &lost, false);
    let mut first = calls_tool("I look.", "call_1", "shell", json!({"command": "ls logs"}));
    first.reasoning = Some("Which logs are there?".to_owned());
    talk.send(&main, &first, true);
    main.messages
        .extend([first, answers("call_1", "a.txt b.txt")]);
    // 2: asks for a sub-agent.
    let asks = calls_tool("", "call_2", "task", json!({"prompt": ERRAND}));
    talk.send(&main, &asks, true);
    // 3, 4: the sub-agent; its first tool call is no JSON.
    let mut sub = Conversation {
        messages: vec![
            says(Role::System, "You run errands."),
            says(Role::User, ERRAND),
        ],
        tools: tools(&["shell"]),
    };
    let broken = calls_tool("", "call_3", "shell", json!("wc -l logs/a.txt"));
    talk.send(&sub, &broken, true);
    sub.messages
        .extend([broken, answers("other-id", "42 logs/a.txt")]);
    talk.send(&sub, &says(Role::Assistant, "42"), true);
    // 5: the main conversation goes on, now with an image.
    main.messages.extend([asks, answers("call_2", "42")]);
    let mut picture = says(Role::User, "Here is what the folder looks like.");
    picture.content.push(Part::Image {
        url: "data:image/png;base64,iVBORw0KGgo=".to_owned(),
    });
    main.messages.push(picture);
    let so_far = says(Role::Assistant, "So far there are 42 lines.");
    talk.send(&main, &so_far, true);
    // 6: a compaction; 7, 8: what goes on after it.
    main.messages.extend([
        so_far,
        says(Role::User, "Summarise all of the above in one paragraph."),
    ]);
    talk.send(&main, &says(Role::Assistant, SUMMARY), true);
    let mut next = Conversation {
        messages: vec![
            system,
            says(
                Role::User,
                &format!("This is what happened before.\n{SUMMARY}\nGo on."),
            ),
        ],
        tools: main.tools.clone(),
    };
    let counts = calls_tool(
        "",
        "call_7",
        "shell",
        json!({"command": "wc -l logs/b.txt"}),
    );
    talk.send(&next, &counts, true);
    next.messages
        .extend([counts, answers("call_7", "7 logs/b.txt")]);
    talk.send(&next, &says(Role::Assistant, "There are 49 lines."), true);
    // 9: a title.
    let title = Conversation {
        messages: vec![
            says(Role::System, "Write a title of at most five words."),
            says(Role::User, "Count the lines of every log"),
        ],
        tools: Vec::new(),
    };
    talk.send(&title, &says(Role::Assistant, "Counting log lines"), true);
    talk.calls
}

/// The rollout as a ledger has it.
pub fn rollout(reward: Option<f64>) -> Rollout {
    Rollout {
        spec: RolloutSpec {
            id: RolloutId::new("s0001-logs-react-k00").unwrap(),
            task: TaskId::new("logs").unwrap(),
            group: GroupId::new("s0001-logs-react").unwrap(),
            harness: "react".to_owned(),
            labels: BTreeMap::from([("split".to_owned(), "train".to_owned())]),
            seed: 5,
        },
        lineage: Lineage {
            harness_version: "react 1".to_owned(),
            ..Lineage::default()
        },
        started_ms: AT_MS,
        finished_ms: Some(AT_MS + 20_000),
        harness_exit: Some(0),
        harness_tail: String::new(),
        calls: 10,
        seconds: StageSeconds::default(),
        verdict: reward.map(|reward| Verdict {
            reward,
            scores: BTreeMap::new(),
            evidence: String::new(),
            seconds: 0.5,
        }),
        disposition: Some(Disposition::Train),
    }
}

/// The same without the image.
pub fn story_without_image() -> Vec<Call> {
    let mut calls = story();
    let conversations = calls.iter_mut().map(|call| &mut call.conversation);
    for message in conversations.flat_map(|conversation| &mut conversation.messages) {
        message.content.truncate(1);
    }
    calls
}

//! Made-up records, each a pure function of its seed, so that a test and the process it kills
//! agree on what must be in the file.
#![allow(
    missing_docs,
    unreachable_pub,
    dead_code,
    clippy::unwrap_used,
    reason = "shared by tests and an example"
)]

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use record::{
    Attempt, AttemptOutcome, Call, CallId, Continuation, Conversation, Dialect, Disposition,
    FinishReason, Generation, Lineage, Message, PolicySpan, Role, Rollout, RolloutId, RolloutSpec,
    Sampling, StageSeconds, TaskId, ToolCall, Verdict,
};
use serde_json::json;

fn text(random: &mut ChaCha8Rng, chars_max: usize) -> String {
    let len = random.random_range(0..=chars_max);
    (0..len)
        .map(|_| match random.random_range(0..20) {
            0 => '\n',
            1 => 'ä',
            2 => '😀',
            3 => '"',
            _ => char::from(random.random_range(b' '..=b'~')),
        })
        .collect()
}

pub fn attempts(seed: u64) -> Vec<Attempt> {
    let mut random = ChaCha8Rng::seed_from_u64(seed ^ 0xa77e);
    (0..random.random_range(0..4))
        .map(|_| Attempt {
            started_ms: random.random_range(0..1 << 50),
            finished_ms: random.random_range(0..1 << 50),
            outcome: match random.random_range(0..4) {
                0 => AttemptOutcome::Delivered,
                1 => AttemptOutcome::ClientGone,
                2 => AttemptOutcome::EngineFailed {
                    reason: text(&mut random, 20),
                },
                _ => AttemptOutcome::TooLong {
                    prompt_tokens: random.random(),
                    context_tokens_max: random.random(),
                },
            },
            stream: random.random(),
        })
        .collect()
}

pub fn call(seed: u64, rollout: &str, index: u32) -> Call {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let ids = |random: &mut ChaCha8Rng, max: usize| -> Vec<u32> {
        let len = random.random_range(0..=max);
        (0..len).map(|_| random.random_range(0..200_000)).collect()
    };
    let prompt_ids = ids(&mut random, 400);
    let generation = random.random_bool(0.8).then(|| {
        let token_ids = ids(&mut random, 60);
        let len = if random.random() { token_ids.len() } else { 0 };
        let logprobs = |random: &mut ChaCha8Rng| -> Vec<f32> {
            (0..len).map(|_| -random.random::<f32>() * 20.0).collect()
        };
        Generation {
            logprobs_model: logprobs(&mut random),
            logprobs_sampled: logprobs(&mut random),
            policy: vec![PolicySpan {
                start: 0,
                version: random.random_range(0..9),
            }],
            finish: FinishReason::Length,
            cached_tokens: random.random(),
            token_ids,
        }
    });
    let words = text(&mut random, 300);
    Call {
        id: CallId {
            rollout: RolloutId::new(rollout).unwrap(),
            index,
        },
        dialect: Dialect::Chat,
        request: json!({"z": words, "a": [1, 2.5, random.random::<f64>(), null], "model": "m"}),
        headers: vec![("x-session".to_owned(), text(&mut random, 9))],
        digest: format!("{:064x}", random.random::<u128>()),
        conversation: Conversation {
            messages: vec![Message::text(Role::User, words.clone())],
            tools: Vec::new(),
        },
        prompt_ids,
        continuation: Continuation {
            parent: random.random::<bool>().then(|| random.random()),
            exact: random.random(),
            ..Continuation::default()
        },
        sampling: Sampling {
            temperature: random.random(),
            seed: random.random(),
            ..Sampling::default()
        },
        reply: generation.as_ref().map(|_| Message {
            tool_calls: vec![ToolCall {
                id: "c1".to_owned(),
                name: "bash".to_owned(),
                arguments: json!({"command": text(&mut random, 40), "b": 0.1}),
            }],
            ..Message::text(Role::Assistant, words)
        }),
        generation,
        raw_text: text(&mut random, 100),
        parse_failed: random.random(),
        attempts: attempts(seed),
    }
}

pub fn rollout(seed: u64, id: &str) -> Rollout {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    Rollout {
        spec: RolloutSpec {
            id: RolloutId::new(id).unwrap(),
            task: TaskId::new("task-1").unwrap(),
            group: record::GroupId::new("group-1").unwrap(),
            harness: "react".to_owned(),
            labels: [("step", 3), ("split", 2)]
                .into_iter()
                .filter_map(|(name, values)| {
                    let value = random.random_range(0..=values);
                    (value < values).then(|| (name.to_owned(), value.to_string()))
                })
                .collect(),
            seed: random.random(),
        },
        lineage: Lineage::default(),
        started_ms: random.random_range(0..5),
        finished_ms: None,
        harness_exit: Some(0),
        harness_tail: text(&mut random, 30),
        calls: 3,
        seconds: StageSeconds::default(),
        verdict: Some(Verdict {
            reward: random.random(),
            scores: [("files".to_owned(), random.random())].into(),
            evidence: text(&mut random, 30),
            seconds: 0.1 + 0.2,
        }),
        disposition: match random.random_range(0..3) {
            0 => None,
            1 => Some(Disposition::Train),
            _ => Some(Disposition::Mask {
                reason: "why".to_owned(),
            }),
        },
    }
}

/// A call of a rollout that grows as those of harnesses do: a long system prompt with tools, then
/// turn by turn a reply and a tool result, all of it in every request. Texts and tokens are as
/// varied as prose, so that a compressor finds in one turn little of another.
pub fn growing(seed: u64, rollout: &str, turns: u32) -> Vec<Call> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut words = |bytes: usize| -> String {
        let mut text = String::new();
        while text.len() < bytes {
            let letters = random.random_range(2..9);
            text.extend((0..letters).map(|_| char::from(random.random_range(b'a'..=b'z'))));
            text.push(' ');
        }
        text
    };
    // About 4 bytes per token.
    let encode = |text: &str| -> Vec<u32> {
        text.as_bytes()
            .chunks(4)
            .map(|bytes| {
                bytes.iter().fold(7, |hash: u32, byte| {
                    hash.wrapping_mul(31).wrapping_add(u32::from(*byte))
                }) % 150_000
            })
            .collect()
    };
    let system = words(60_000);
    let tools = words(40_000);
    let mut messages = vec![
        Message::text(Role::System, system.clone()),
        Message::text(Role::User, words(2_000)),
    ];
    let mut prompt_ids = encode(&format!("{system}{tools}"));
    let mut calls = Vec::new();
    for index in 0..turns {
        let said = words(800);
        let output = encode(&said);
        let conversation = Conversation {
            messages: messages.clone(),
            tools: vec![record::ToolSpec {
                name: "bash".to_owned(),
                description: tools.clone(),
                parameters: json!({}),
            }],
        };
        let mut next = call(seed + u64::from(index), rollout, index);
        next.request = json!({
            "model": "m",
            "messages": serde_json::to_value(&conversation.messages).unwrap(),
            "tools": serde_json::to_value(&conversation.tools).unwrap(),
        });
        next.conversation = conversation;
        next.prompt_ids = prompt_ids.clone();
        next.continuation.parent = index.checked_sub(1);
        next.generation = Some(Generation {
            logprobs_model: output.iter().map(|id| -(*id as f32) / 1e5).collect(),
            logprobs_sampled: output.iter().map(|id| -(*id as f32) / 1e5).collect(),
            token_ids: output.clone(),
            policy: vec![PolicySpan {
                start: 0,
                version: 0,
            }],
            finish: FinishReason::Stop,
            cached_tokens: 0,
        });
        next.raw_text = said.clone();
        next.reply = Some(Message::text(Role::Assistant, said.clone()));
        calls.push(next);
        let result = words(1_600);
        prompt_ids.extend(output);
        prompt_ids.extend(encode(&result));
        messages.push(Message::text(Role::Assistant, said));
        messages.push(Message::text(Role::Tool, result));
    }
    calls
}

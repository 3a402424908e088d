//! Captures of other gateways: JSON lines, one call per line.
//!
//! ```text
//! {"rollout": str, "call": int, "prompt_ids": [int], "output_ids": [int], "logprobs": [float],
//!  "finish": "stop" | "length" | "tool_calls", "at": seconds, "delivered"?: bool, "class"?: str}
//! ```
//!
//! `call` numbers the calls of a rollout in the order of arrival; lines may come in any order.
//! `logprobs` may be empty, `null` or hold `null`: then the call's tokens are context. `delivered`
//! is true unless said otherwise. `class` is `main`, `subagent`, `compaction` or `side`; without it
//! the tree finds out what tokens tell.

use std::collections::{BTreeMap, HashMap};
use std::io::BufRead;

use record::{
    Attempt, AttemptOutcome, Call, CallId, Continuation, Conversation, Dialect, FinishReason,
    Generation, PolicySpan, RolloutId, Sampling,
};
use serde::Deserialize;
use tree::CallClass;

/// Longest line: a context of ten million tokens and its output.
pub const LINE_BYTES_MAX: usize = 256 << 20;

/// Why captures were not read. None is worth trying again; nothing is guessed.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The file could not be read.
    #[error("line {line} could not be read: {source}")]
    Read {
        /// From 1.
        line: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// A line is too long.
    #[error("line {line} has more than {LINE_BYTES_MAX} bytes: one call per line is expected")]
    TooLong {
        /// From 1.
        line: usize,
    },
    /// A line is not a call.
    #[error(
        "line {line} is not a call: {found}; expected {{\"rollout\": str, \"call\": int, \"prompt_ids\": [int], \"output_ids\": [int], \"logprobs\": [float], \"finish\": \"stop\" | \"length\" | \"tool_calls\", \"at\": seconds, \"delivered\"?: bool, \"class\"?: str}}"
    )]
    Line {
        /// From 1.
        line: usize,
        /// What was found.
        found: String,
    },
    /// Log-probabilities do not fit the output.
    #[error(
        "line {line}: call {call} of rollout {rollout:?}: {output_tokens} output_ids, but {logprobs} logprobs; expected as many, or none (then nothing of the call is trained)"
    )]
    Logprobs {
        /// From 1.
        line: usize,
        /// The rollout.
        rollout: String,
        /// Its number.
        call: u32,
        /// Tokens.
        output_tokens: usize,
        /// Log-probabilities.
        logprobs: usize,
    },
    /// A call number occurs twice.
    #[error(
        "line {line}: call {call} of rollout {rollout:?} is on line {first} already; a retry needs a number of its own"
    )]
    Duplicate {
        /// From 1.
        line: usize,
        /// Where it was first.
        first: usize,
        /// The rollout.
        rollout: String,
        /// The number.
        call: u32,
    },
}

/// The calls of one rollout.
#[derive(Debug, Clone, PartialEq)]
pub struct Captured {
    /// Its name in the file; any text.
    pub rollout: String,
    /// The calls, in the order of the file, with the classes that were given.
    pub calls: Vec<(Call, Option<CallClass>)>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Finish {
    Stop,
    Length,
    ToolCalls,
}

#[derive(Deserialize)]
struct Line {
    rollout: String,
    call: u32,
    prompt_ids: Vec<u32>,
    output_ids: Vec<u32>,
    logprobs: Option<Vec<Option<f32>>>,
    finish: Finish,
    #[serde(default)]
    at: f64,
    delivered: Option<bool>,
    class: Option<CallClass>,
}

/// Reads captures; rollouts come in the order of their first lines. Blank lines are passed over.
///
/// # Errors
/// See [`CaptureError`].
pub fn read(mut source: impl BufRead) -> Result<Vec<Captured>, CaptureError> {
    let mut rollouts: Vec<Captured> = Vec::new();
    let mut by_name: HashMap<String, usize> = HashMap::new();
    let mut lines: BTreeMap<(usize, u32), usize> = BTreeMap::new();
    let mut bytes = Vec::new();
    for line in 1.. {
        bytes.clear();
        let limit = LINE_BYTES_MAX as u64 + 1;
        let mut limited = std::io::Read::take(&mut source, limit);
        let read = limited
            .read_until(b'\n', &mut bytes)
            .map_err(|source| CaptureError::Read { line, source })?;
        if read == 0 {
            break;
        }
        if bytes.len() > LINE_BYTES_MAX {
            return Err(CaptureError::TooLong { line });
        }
        if bytes.trim_ascii().is_empty() {
            continue;
        }
        let parsed: Line = serde_json::from_slice(&bytes).map_err(|found| CaptureError::Line {
            line,
            found: found.to_string(),
        })?;
        let number = *by_name.entry(parsed.rollout.clone()).or_insert_with(|| {
            rollouts.push(Captured {
                rollout: parsed.rollout.clone(),
                calls: Vec::new(),
            });
            rollouts.len() - 1
        });
        if let Some(&first) = lines.get(&(number, parsed.call)) {
            return Err(CaptureError::Duplicate {
                line,
                first,
                rollout: parsed.rollout,
                call: parsed.call,
            });
        }
        lines.insert((number, parsed.call), line);
        let class = parsed.class;
        let call = call_of(line, number, parsed)?;
        rollouts[number].calls.push((call, class));
    }
    Ok(rollouts)
}

fn call_of(line: usize, number: usize, parsed: Line) -> Result<Call, CaptureError> {
    let given = parsed.logprobs.unwrap_or_default();
    if !given.is_empty() && given.len() != parsed.output_ids.len() {
        return Err(CaptureError::Logprobs {
            line,
            rollout: parsed.rollout,
            call: parsed.call,
            output_tokens: parsed.output_ids.len(),
            logprobs: given.len(),
        });
    }
    // All or none: a call with a gap is context as a whole.
    let logprobs: Vec<f32> = given.into_iter().collect::<Option<_>>().unwrap_or_default();
    // Names of other gateways are any text; ours are not. The number stands for the name.
    let rollout = RolloutId::new(format!("r{number}")).map_err(|found| CaptureError::Line {
        line,
        found: found.to_string(),
    })?;
    let delivered = parsed.delivered.unwrap_or(true);
    let at_ms = (parsed.at.max(0.0) * 1000.0) as u64;
    Ok(Call {
        id: CallId {
            rollout,
            index: parsed.call,
        },
        dialect: Dialect::Chat,
        request: serde_json::Value::Null,
        headers: Vec::new(),
        digest: String::new(),
        conversation: Conversation::default(),
        prompt_ids: parsed.prompt_ids,
        continuation: Continuation::default(),
        sampling: Sampling::default(),
        generation: Some(Generation {
            token_ids: parsed.output_ids,
            logprobs_model: logprobs.clone(),
            logprobs_sampled: logprobs,
            policy: vec![PolicySpan {
                start: 0,
                version: 0,
            }],
            finish: match parsed.finish {
                Finish::Stop | Finish::ToolCalls => FinishReason::Stop,
                Finish::Length => FinishReason::Length,
            },
            cached_tokens: 0,
        }),
        raw_text: String::new(),
        reply: None,
        parse_failed: false,
        attempts: vec![Attempt {
            started_ms: at_ms,
            finished_ms: at_ms,
            outcome: match delivered {
                true => AttemptOutcome::Delivered,
                false => AttemptOutcome::ClientGone,
            },
            stream: false,
        }],
    })
}

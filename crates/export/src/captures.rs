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
//!
//! [`capture_lines`] writes a run's own calls in the same form.

use std::collections::{BTreeMap, HashMap};
use std::io::BufRead;

use record::{
    Attempt, AttemptOutcome, Call, CallId, Continuation, Conversation, Dialect, FinishReason,
    Generation, MediaSpan, PolicySpan, RolloutId, Sampling,
};
use serde::{Deserialize, Serialize};
use tree::CallClass;

use crate::{Source, rows::Facts};

/// Longest line: a context of ten million tokens and its output.
pub const LINE_BYTES_MAX: usize = 256 << 20;

const LINE: &str = "{\"rollout\": str, \"call\": int, \"prompt_ids\": [int], \"output_ids\": [int], \"logprobs\": [float], \"finish\": \"stop\" | \"length\" | \"tool_calls\", \"at\": seconds, \"delivered\"?: bool, \"class\"?: str}";

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
    #[error("line {line} is not a call: {field}{found}; expected {LINE}")]
    Line {
        /// From 1.
        line: usize,
        /// The field, as ``field `NAME`: ``; empty when the line as a whole is wrong.
        field: String,
        /// What was found, and what is expected there.
        found: String,
    },
    /// A log-probability is no number.
    #[error(
        "line {line}, field `logprobs[{at}]`: expected a finite number (or null: then nothing of the call is trained), found {found}"
    )]
    NotFinite {
        /// From 1.
        line: usize,
        /// Place in the list, from 0.
        at: usize,
        /// What was found.
        found: f32,
    },
    /// Log-probabilities do not fit the output.
    #[error(
        "line {line}, field `logprobs`: call {call} of rollout {rollout:?} has {output_tokens} output_ids, but {logprobs} logprobs; expected as many, or none (then nothing of the call is trained)"
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
        "line {line}, field `call`: call {call} of rollout {rollout:?} is on line {first} already; expected another number, a retry needs one of its own"
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
    #[serde(default)]
    media: Vec<MediaSpan>,
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
        let parsed = parse(line, &bytes)?;
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

/// Takes a line apart; an error names the field.
fn parse(line: usize, bytes: &[u8]) -> Result<Line, CaptureError> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let failed = |field: String, found: &serde_json::Error| {
        // The parser counts lines and columns of its own: every line is its first.
        let found = found.to_string();
        let (what, column) = found
            .split_once(" at line 1 column ")
            .unwrap_or((found.as_str(), ""));
        let field = match field.as_str() {
            "." => String::new(),
            field => format!("field `{field}`: "),
        };
        let found = match column {
            "" => what.to_owned(),
            column => format!("{what} (column {column})"),
        };
        CaptureError::Line { line, field, found }
    };
    let parsed: Line = serde_path_to_error::deserialize(&mut json)
        .map_err(|error| failed(error.path().to_string(), error.inner()))?;
    json.end().map_err(|error| failed(".".to_owned(), &error))?;
    Ok(parsed)
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
    for (at, logprob) in given.iter().enumerate() {
        // A number beyond the range of f32 is read as infinite.
        if let Some(found) = logprob.filter(|logprob| !logprob.is_finite()) {
            return Err(CaptureError::NotFinite { line, at, found });
        }
    }
    // All or none: a call with a gap is context as a whole.
    let logprobs: Vec<f32> = given.into_iter().collect::<Option<_>>().unwrap_or_default();
    // Names of other gateways are any text; ours are not. The number stands for the name.
    let rollout = RolloutId::new(format!("r{number}")).map_err(|found| CaptureError::Line {
        line,
        field: String::new(),
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
        continuation: Continuation {
            media: parsed.media,
            ..Continuation::default()
        },
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

/// A call of a run in the form that [`read`] takes. What is known of the rollout besides is
/// written too; readers pass over it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CaptureLine<'a> {
    /// Rollout, task, harness, group, reward.
    #[serde(flatten)]
    pub facts: Facts<'a>,
    /// Number of the call.
    pub call: u32,
    /// What the engine consumed.
    pub prompt_ids: &'a [u32],
    /// What it produced; empty when it failed.
    pub output_ids: &'a [u32],
    /// Of the distribution that was sampled from. Empty: unknown.
    pub logprobs: &'a [f32],
    /// `stop`, `length` or `tool_calls`.
    pub finish: &'static str,
    /// Seconds since the Unix epoch.
    pub at: f64,
    /// Whether the harness got the reply.
    pub delivered: bool,
    /// What kind of call it is, as the tree found.
    pub class: CallClass,
    /// Where the prompt holds something other than text.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub media: &'a [MediaSpan],
}

/// The calls of a rollout, whatever a rule keeps of them: the rule is applied when they are read.
#[must_use]
pub fn capture_lines<'a>(source: &Source<'a>) -> Vec<CaptureLine<'a>> {
    let facts = Facts {
        selection: None,
        advantage: None,
        ..Facts::of(source)
    };
    let line = |call: &'a Call| {
        let place = source.tree.place(call.id.index);
        let generation = call.generation.as_ref();
        let calls_tools = call
            .reply
            .as_ref()
            .is_some_and(|reply| !reply.tool_calls.is_empty());
        let finish = match generation.map(|generation| generation.finish) {
            Some(FinishReason::Length | FinishReason::Context) => "length",
            _ if calls_tools => "tool_calls",
            _ => "stop",
        };
        let started_ms = call.attempts.first().map_or(0, |first| first.started_ms);
        CaptureLine {
            facts,
            call: call.id.index,
            prompt_ids: &call.prompt_ids,
            output_ids: generation.map_or(&[], |generation| &generation.token_ids),
            logprobs: generation.map_or(&[], |generation| &generation.logprobs_sampled),
            finish,
            at: started_ms as f64 / 1000.0,
            delivered: call.delivered(),
            class: place.map_or(CallClass::Main, |place| place.class),
            media: &call.continuation.media,
        }
    };
    source.calls.iter().map(line).collect()
}

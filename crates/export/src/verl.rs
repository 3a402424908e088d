//! Rows for veRL, as Parquet.
//!
//! One line serves two readers of veRL 0.9. Its data set (`RLHFDataset`) takes `data_source`, `prompt`,
//! `ability`, `reward_model`, `extra_info`. Its agent loops hand the trainer an `AgentLoopOutput` per
//! sequence; the columns of that name are here: `prompt_ids`, `response_ids`, `response_mask`,
//! `response_logprobs`, `reward_score`, `num_turns`, `metrics`, `extra_fields`. `uid` is the group and
//! `session_id` the rollout within it, as in the trainer's key `{uid}_{session_id}_{row}`: its GRPO
//! takes one row per session, so a rollout has one vote whatever its rows.
//!
//! Its loss weighs rows, not rollouts: `extra_info.rollout_terms` is what to divide by instead.

use serde::Serialize;

use crate::{
    Source,
    chat::{ChatMessage, message, versions},
    rows::{Facts, columns},
};

/// One line.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VerlLine<'a> {
    /// Always `espalier`.
    pub data_source: &'static str,
    /// The messages of the first call that is trained in this row.
    pub prompt: Vec<ChatMessage<'a>>,
    /// Always `agent`.
    pub ability: &'static str,
    /// How it was scored.
    pub reward_model: VerlRewardModel<'a>,
    /// Everything else.
    pub extra_info: VerlExtra<'a>,
    /// The group.
    pub uid: &'a str,
    /// Number of the rollout within the group.
    pub session_id: usize,
    /// Tokens of the prompt.
    pub prompt_ids: &'a [u32],
    /// Tokens after it: generated ones and what came between.
    pub response_ids: &'a [u32],
    /// 1 where the token is trained in this row.
    pub response_mask: Vec<u8>,
    /// Under the distribution that was sampled from; 0 where the mask is 0.
    pub response_logprobs: Vec<f32>,
    /// The reward of the rollout.
    pub reward_score: Option<f64>,
    /// Messages of the row's last call, reply included.
    pub num_turns: usize,
    /// Seconds and counts.
    pub metrics: VerlMetrics,
    /// Policy versions, under the names of the trainer's staleness filter.
    pub extra_fields: VerlFields,
}

/// How it was scored.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct VerlRewardModel<'a> {
    /// Always `rule`: by the task's own verifier.
    pub style: &'static str,
    /// The task.
    pub ground_truth: &'a str,
}

/// About row and rollout.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct VerlExtra<'a> {
    /// Number of the row in the file.
    pub index: usize,
    /// Label `split` of the rollout.
    pub split: &'a str,
    /// About the rollout.
    #[serde(flatten)]
    pub facts: Facts<'a>,
    /// Number of the row within its rollout.
    pub row: usize,
    /// Rows of the rollout.
    pub rows: usize,
    /// Trained tokens of all rows of the rollout.
    pub rollout_terms: usize,
    /// Tokens that a limit cut off.
    pub tokens_cut: usize,
}

/// As the trainer's agent loops report.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct VerlMetrics {
    /// Seconds in which the harness ran.
    pub generate_sequences: f64,
    /// Tool calls of the row.
    pub tool_calls: f64,
    /// Seconds of the verifier.
    pub compute_score: f64,
}

/// Versions of the policy that generated the row's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct VerlFields {
    /// The oldest.
    pub min_global_steps: Option<u64>,
    /// The newest.
    pub max_global_steps: Option<u64>,
}

/// The rows of one rollout. `session` numbers the rollout within its group; `index` is the number
/// of its first row in the file.
#[must_use]
pub fn verl_lines<'a>(source: &'a Source<'a>, session: usize, index: usize) -> Vec<VerlLine<'a>> {
    let facts = Facts::of(source);
    let rollout = source.rollout;
    let labels = &rollout.spec.labels;
    let lines = source.rows.rows.iter().enumerate().map(|(number, row)| {
        let (response_mask, response_logprobs, ..) = columns(row);
        let conversation = |call: Option<&u32>| {
            let call = call.and_then(|&call| source.call(call));
            call.map(|call| call.conversation.messages.as_slice())
                .unwrap_or_default()
        };
        let calls = row.calls.iter().filter_map(|&call| source.call(call));
        let tool_calls: usize = calls
            .filter_map(|call| call.reply.as_ref())
            .map(|reply| reply.tool_calls.len())
            .sum();
        let versions = versions(source, &row.calls);
        VerlLine {
            data_source: "espalier",
            prompt: conversation(row.calls.first())
                .iter()
                .map(|turn| message(turn).with_text_arguments())
                .collect(),
            ability: "agent",
            reward_model: VerlRewardModel {
                style: "rule",
                ground_truth: rollout.spec.task.as_str(),
            },
            extra_info: VerlExtra {
                index: index + number,
                split: labels.get("split").map_or("", String::as_str),
                facts,
                row: number,
                rows: source.rows.rows.len(),
                rollout_terms: source.rows.terms(),
                tokens_cut: row.tokens_cut,
            },
            uid: rollout.spec.group.as_str(),
            session_id: session,
            prompt_ids: &row.tokens[..row.prompt_tokens],
            response_ids: &row.tokens[row.prompt_tokens..],
            response_mask,
            response_logprobs,
            reward_score: source.reward(),
            num_turns: conversation(row.calls.last()).len() + 1,
            metrics: VerlMetrics {
                generate_sequences: rollout.seconds.harness,
                tool_calls: tool_calls as f64,
                compute_score: rollout.seconds.verify,
            },
            extra_fields: VerlFields {
                min_global_steps: versions.first().copied(),
                max_global_steps: versions.last().copied(),
            },
        }
    });
    lines.collect()
}

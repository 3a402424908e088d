//! Training rows, for trainers that take sequences: JSON lines or Parquet, the same fields.
//!
//! One line per row: `tokens` = prompt + response; `prompt_tokens` of them are the prompt. `loss_mask`,
//! `logprobs` (sampled from), `logprobs_model` and `versions` have one entry per response token;
//! where the mask is 0 they mean nothing. The gradient of a rollout is the sum over its rows. For
//! a mean over the rollout divide by `rollout_terms`, never by the row's own count: a rollout has
//! one weight, whatever its number of rows.

use std::io::Write;

use serde::Serialize;
use tree::{Row, Rows, Target};

use crate::Source;

/// What rows say about their rollout; the same in each of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Facts<'a> {
    /// The rollout.
    pub rollout: &'a str,
    /// Whose rewards it is compared with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<&'a str>,
    /// The task.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task: Option<&'a str>,
    /// The harness.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub harness: Option<&'a str>,
    /// The rule by which tokens are trained or not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selection: Option<&'a str>,
    /// Its reward.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward: Option<f64>,
    /// Its advantage in its group: one vote per rollout.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advantage: Option<f64>,
}

impl<'a> Facts<'a> {
    /// What is known of a rollout of a run.
    #[must_use]
    pub fn of(source: &Source<'a>) -> Self {
        let spec = &source.rollout.spec;
        Self {
            rollout: spec.id.as_str(),
            group: Some(spec.group.as_str()),
            task: Some(spec.task.as_str()),
            harness: Some(&spec.harness),
            selection: Some(source.selection),
            reward: source.reward(),
            advantage: source.advantage,
        }
    }
}

/// One line.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RowLine<'a> {
    /// About the rollout.
    #[serde(flatten)]
    pub facts: Facts<'a>,
    /// Number of the row within its rollout.
    pub row: usize,
    /// Rows of the rollout.
    pub rows: usize,
    /// Trained tokens of all rows of the rollout.
    pub rollout_terms: usize,
    /// Prompt and response.
    pub tokens: &'a [u32],
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// 1 where the token is trained in this row.
    pub loss_mask: Vec<u8>,
    /// Under the distribution that was sampled from.
    pub logprobs: Vec<f32>,
    /// Under the model's own distribution.
    pub logprobs_model: Vec<f32>,
    /// Weights that drew the token.
    pub versions: Vec<u64>,
    /// Calls whose output is trained here.
    pub calls: &'a [u32],
    /// Tokens that a limit cut off.
    pub tokens_cut: usize,
}

/// Per response token: mask, log-probabilities sampled from and of the model, version.
pub(crate) type Columns = (Vec<u8>, Vec<f32>, Vec<f32>, Vec<u64>);

/// The targets of a row as columns.
pub(crate) fn columns(row: &Row) -> Columns {
    let mut columns = Columns::default();
    for target in &row.targets {
        let (mask, sampled, model, version) = match target {
            Some(Target::Sampled {
                logprob_model,
                logprob_sampled,
                version,
            }) => (1, *logprob_sampled, *logprob_model, *version),
            Some(Target::Supervised) => (1, 0.0, 0.0, 0),
            None => (0, 0.0, 0.0, 0),
        };
        columns.0.push(mask);
        columns.1.push(sampled);
        columns.2.push(model);
        columns.3.push(version);
    }
    columns
}

/// The rows of one rollout as lines.
#[must_use]
pub fn row_lines<'a>(rows: &'a Rows, facts: Facts<'a>) -> Vec<RowLine<'a>> {
    let rollout_terms = rows.terms();
    let lines = rows.rows.iter().enumerate().map(|(number, row)| {
        let (loss_mask, logprobs, logprobs_model, versions) = columns(row);
        RowLine {
            facts,
            row: number,
            rows: rows.rows.len(),
            rollout_terms,
            tokens: &row.tokens,
            prompt_tokens: row.prompt_tokens,
            loss_mask,
            logprobs,
            logprobs_model,
            versions,
            calls: &row.calls,
            tokens_cut: row.tokens_cut,
        }
    });
    lines.collect()
}

/// Writes anything as JSON lines.
///
/// # Errors
/// What the writer says.
pub fn write_lines<T: Serialize>(out: &mut impl Write, lines: &[T]) -> std::io::Result<()> {
    for line in lines {
        serde_json::to_writer(&mut *out, line)?;
        out.write_all(b"\n")?;
    }
    Ok(())
}

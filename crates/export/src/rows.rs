//! Training rows as JSON lines, for trainers that take sequences.
//!
//! One line per row: `tokens` = prompt + response; `prompt_tokens` of them are the prompt. `loss_mask`,
//! `logprobs` (sampled from), `logprobs_model` and `versions` have one entry per response token;
//! where the mask is 0 they mean nothing. The gradient of a rollout is the sum over its rows. For
//! a mean over the rollout divide by `rollout_terms`, never by the row's own count: a rollout has
//! one weight, whatever its number of rows.

use std::io::Write;

use serde::Serialize;
use tree::{Rows, Target};

/// One line.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RowLine<'a> {
    /// The rollout.
    pub rollout: &'a str,
    /// Whose rewards it is compared with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<&'a str>,
    /// Its reward: the same in every row of the rollout.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward: Option<f64>,
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

/// Writes the rows of one rollout, one per line.
///
/// # Errors
/// What the writer says.
pub fn write_rows(
    out: &mut impl Write,
    rollout: &str,
    group: Option<&str>,
    reward: Option<f64>,
    rows: &Rows,
) -> std::io::Result<()> {
    let rollout_terms = rows.terms();
    for (number, row) in rows.rows.iter().enumerate() {
        let sampled = |target: &Option<Target>| match target {
            Some(Target::Sampled {
                logprob_model,
                logprob_sampled,
                version,
            }) => (1, *logprob_sampled, *logprob_model, *version),
            Some(Target::Supervised) => (1, 0.0, 0.0, 0),
            None => (0, 0.0, 0.0, 0),
        };
        let line = RowLine {
            rollout,
            group,
            reward,
            row: number,
            rows: rows.rows.len(),
            rollout_terms,
            tokens: &row.tokens,
            prompt_tokens: row.prompt_tokens,
            loss_mask: row.targets.iter().map(|target| sampled(target).0).collect(),
            logprobs: row.targets.iter().map(|target| sampled(target).1).collect(),
            logprobs_model: row.targets.iter().map(|target| sampled(target).2).collect(),
            versions: row.targets.iter().map(|target| sampled(target).3).collect(),
            calls: &row.calls,
            tokens_cut: row.tokens_cut,
        };
        serde_json::to_writer(&mut *out, &line)?;
        out.write_all(b"\n")?;
    }
    Ok(())
}

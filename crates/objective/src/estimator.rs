//! Advantages of a batch of padded sequences, as papers and other trainers define them. Rewards
//! may sit on any token; `groups` names the group of each row.

use std::collections::BTreeMap;

use crate::Matrix;
use crate::group::{STD_EPSILON, Scale, mean_std};

/// What a rollout that is alone in its group gets. [`crate::group_advantages`] gives zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lone {
    /// Nothing: there is no baseline.
    Zero,
    /// Its reward, as if the baseline were 0 and the deviation 1.
    Reward,
}

fn members(groups: &[u64]) -> BTreeMap<u64, Vec<usize>> {
    let mut members: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (row, group) in groups.iter().enumerate() {
        members.entry(*group).or_default().push(row);
    }
    members
}

/// The row's score on every masked token.
fn spread(scores: &[f64], mask: &Matrix) -> Matrix {
    Matrix::build(mask.rows(), mask.columns(), |row, column| {
        scores[row] * mask.row(row)[column]
    })
}

/// Applies `baseline(scores of the group, rows of the group)` → new scores, group by group.
fn by_group(
    rewards: &Matrix,
    groups: &[u64],
    new_scores: impl Fn(&[f64], &[usize]) -> Vec<f64>,
) -> Vec<f64> {
    let scores = rewards.row_sums();
    let mut result = scores.clone();
    for rows in members(groups).values() {
        let own: Vec<f64> = rows.iter().map(|&row| scores[row]).collect();
        for (&row, score) in rows.iter().zip(new_scores(&own, rows)) {
            result[row] = score;
        }
    }
    result
}

/// Group mean and deviation (GRPO), or mean only (Dr.GRPO).
#[must_use]
pub fn grpo(rewards: &Matrix, mask: &Matrix, groups: &[u64], by: Scale, lone: Lone) -> Matrix {
    let scores = by_group(rewards, groups, |own, _| {
        let (mean, std) = match (own.len(), lone) {
            (1, Lone::Zero) => (own[0], 1.0),
            (1, Lone::Reward) => (0.0, 1.0),
            _ => mean_std(own),
        };
        let divisor = match by {
            Scale::Std => std + STD_EPSILON,
            Scale::None => 1.0,
        };
        own.iter().map(|score| (score - mean) / divisor).collect()
    });
    spread(&scores, mask)
}

/// Pass@k: only the best of each group gets an advantage, its lead over the second.
#[must_use]
pub fn grpo_pass_at_k(rewards: &Matrix, mask: &Matrix, groups: &[u64], by: Scale) -> Matrix {
    let scores = by_group(rewards, groups, |own, _| {
        let mut order: Vec<usize> = (0..own.len()).collect();
        order.sort_by(|&a, &b| own[b].total_cmp(&own[a]).then(a.cmp(&b)));
        let mut scores = vec![0.0; own.len()];
        if let [best, second, ..] = order[..] {
            let divisor = match by {
                Scale::Std => mean_std(own).1 + STD_EPSILON,
                Scale::None => 1.0,
            };
            scores[best] = (own[best] - own[second]) / divisor;
        }
        scores
    });
    spread(&scores, mask)
}

/// Leave one out (RLOO): reward minus the mean of the others.
#[must_use]
pub fn rloo(rewards: &Matrix, mask: &Matrix, groups: &[u64], lone: Lone) -> Matrix {
    let scores = by_group(rewards, groups, |own, _| {
        let count = own.len() as f64;
        if own.len() == 1 {
            return match lone {
                Lone::Zero => vec![0.0],
                Lone::Reward => own.to_vec(),
            };
        }
        let sum: f64 = own.iter().sum();
        own.iter()
            .map(|score| score - (sum - score) / (count - 1.0))
            .collect()
    });
    spread(&scores, mask)
}

/// Optimal reward baseline (OPO): the group's mean weighted by length. A lone rollout keeps its
/// reward.
#[must_use]
pub fn opo(rewards: &Matrix, mask: &Matrix, groups: &[u64]) -> Matrix {
    let lengths = mask.row_sums();
    let scores = by_group(rewards, groups, |own, rows| {
        let baseline = if own.len() == 1 {
            0.0
        } else {
            let weighted: f64 = own
                .iter()
                .zip(rows)
                .map(|(score, &row)| score * lengths[row])
                .sum();
            weighted / rows.iter().map(|&row| lengths[row]).sum::<f64>()
        };
        own.iter().map(|score| score - baseline).collect()
    });
    spread(&scores, mask)
}

/// Group policy gradient (GPG): mean-centred, scaled by batch size over the number of non-zero
/// rewards and divided by `norm`.
#[must_use]
pub fn gpg(rewards: &Matrix, mask: &Matrix, groups: &[u64], norm: f64) -> Matrix {
    let scores = rewards.row_sums();
    let nonzero = scores.iter().filter(|&&score| score != 0.0).count().max(1);
    let alpha = scores.len() as f64 / nonzero as f64;
    grpo(rewards, mask, groups, Scale::None, Lone::Reward).map(|value| alpha * value / norm)
}

/// Rewards still to come at each token, over the masked tokens, undiscounted.
fn rewards_to_go(rewards: &Matrix, mask: &Matrix) -> Matrix {
    let mut returns = rewards.zip(mask, |reward, mask| reward * mask);
    for row in 0..returns.rows() {
        let mut running = 0.0;
        for value in returns.row_mut(row).iter_mut().rev() {
            running += *value;
            *value = running;
        }
    }
    returns
}

/// ReMax: returns minus the reward of a greedy rollout. Gives advantages and returns.
#[must_use]
pub fn remax(rewards: &Matrix, mask: &Matrix, baselines: &[f64]) -> (Matrix, Matrix) {
    let returns = rewards_to_go(rewards, mask);
    let advantages = Matrix::build(mask.rows(), mask.columns(), |row, column| {
        returns.row(row)[column] - baselines[row] * mask.row(row)[column]
    });
    (advantages, returns)
}

/// REINFORCE++ with group baseline: mean-centred per group, then whitened over the batch.
#[must_use]
pub fn reinforce_plus_plus_baseline(rewards: &Matrix, mask: &Matrix, groups: &[u64]) -> Matrix {
    whitened(
        &grpo(rewards, mask, groups, Scale::None, Lone::Reward),
        mask,
    )
}

/// GRPO whitened over the batch: the single-reward case of GDPO.
#[must_use]
pub fn gdpo_single(rewards: &Matrix, mask: &Matrix, groups: &[u64]) -> Matrix {
    whitened(&grpo(rewards, mask, groups, Scale::Std, Lone::Reward), mask)
}

fn whitened(values: &Matrix, mask: &Matrix) -> Matrix {
    values
        .masked_whiten(mask, true)
        .zip(mask, |value, mask| value * mask)
}

/// REINFORCE++: discounted returns, whitened over the batch. Tokens outside the mask are skipped:
/// rewards pass over them without discount. Gives advantages and returns.
#[must_use]
pub fn reinforce_plus_plus(rewards: &Matrix, mask: &Matrix, gamma: f64) -> (Matrix, Matrix) {
    let mut returns = Matrix::filled(mask.rows(), mask.columns(), 0.0);
    for row in 0..mask.rows() {
        let mut running = 0.0;
        for column in (0..mask.columns()).rev() {
            if mask.row(row)[column] != 0.0 {
                running = rewards.row(row)[column] + gamma * running;
                returns.row_mut(row)[column] = running;
            }
        }
    }
    (whitened(&returns, mask), returns)
}

/// Generalised advantage estimation. Tokens outside the mask are skipped: value and advantage of
/// the next trained token are carried over them. With `gamma = lambda = 1` and one reward R at
/// the end the advantage before whitening is R − V, the same on every branch that shares the
/// token. Gives advantages *before whitening* and returns.
#[must_use]
pub fn gae(
    rewards: &Matrix,
    values: &Matrix,
    mask: &Matrix,
    gamma: f64,
    lambda: f64,
) -> (Matrix, Matrix) {
    let mut advantages = Matrix::filled(mask.rows(), mask.columns(), 0.0);
    for row in 0..mask.rows() {
        let (mut value_next, mut running) = (0.0, 0.0);
        for column in (0..mask.columns()).rev() {
            if mask.row(row)[column] != 0.0 {
                let value = values.row(row)[column];
                let delta = rewards.row(row)[column] + gamma * value_next - value;
                running = delta + gamma * lambda * running;
                value_next = value;
            }
            advantages.row_mut(row)[column] = running;
        }
    }
    let returns = advantages.zip(values, |advantage, value| advantage + value);
    (advantages, returns)
}

/// Inputs of [`optimal_token_baseline`].
#[derive(Debug, Clone, Copy)]
pub struct TokenBaselineInputs<'a> {
    /// Reward of each token.
    pub rewards: &'a Matrix,
    /// Trained tokens.
    pub mask: &'a Matrix,
    /// Group of each row.
    pub groups: &'a [u64],
    /// Log-probability of each token.
    pub old: &'a Matrix,
    /// Sum over the vocabulary of squared probabilities, at each token.
    pub squares: &'a Matrix,
    /// Rollout-correction weights.
    pub weights: Option<&'a Matrix>,
}

/// A baseline per token place (OTB): the group's returns weighted by the variance that each
/// path has gathered up to there. `by_turn` counts places over the masked tokens only, so that
/// tool output of different lengths does not shift them. Gives advantages and returns.
#[must_use]
pub fn optimal_token_baseline(inputs: &TokenBaselineInputs<'_>, by_turn: bool) -> (Matrix, Matrix) {
    let mask = inputs.mask;
    let returns = rewards_to_go(inputs.rewards, mask);
    let counts = mask.counts();
    // Row by row, the places of a sequence: (column, energy gathered so far).
    let places: Vec<Vec<(usize, f64)>> = (0..mask.rows())
        .map(|row| {
            let mut gathered = 0.0;
            let energies = (0..mask.columns()).filter_map(|column| {
                let trained = mask.row(row)[column] != 0.0;
                if trained {
                    let probability = inputs.old.row(row)[column].exp();
                    let weight = inputs
                        .weights
                        .map_or(1.0, |weights| weights.row(row)[column]);
                    gathered += (1.0 - 2.0 * probability + inputs.squares.row(row)[column])
                        * weight.powi(2);
                }
                (trained || !by_turn).then_some((column, gathered))
            });
            energies.collect()
        })
        .collect();
    let mut advantages = Matrix::filled(mask.rows(), mask.columns(), 0.0);
    for rows in members(inputs.groups).values() {
        let rows: Vec<usize> = rows
            .iter()
            .copied()
            .filter(|&row| !by_turn || counts[row] > 0)
            .collect();
        let mut lengths: Vec<usize> = rows.iter().map(|&row| counts[row]).collect();
        lengths.sort_unstable();
        let lone = rows.len() == 1;
        let second = lengths.len().checked_sub(2).map(|at| lengths[at]);
        for &row in &rows {
            // Beyond the second longest sequence the longest has nobody to compare with.
            let alone_from = second
                .filter(|&second| counts[row] > second && Some(&counts[row]) == lengths.last());
            for (at, &(column, _)) in places[row].iter().enumerate() {
                let trained = mask.row(row)[column] != 0.0;
                let baseline = if lone || alone_from.is_some_and(|from| at >= from) {
                    0.0
                } else {
                    let (mut weighted, mut total) = (0.0, 1e-8);
                    for &other in &rows {
                        if let Some(&(column, energy)) = places[other].get(at)
                            && mask.row(other)[column] != 0.0
                        {
                            weighted += returns.row(other)[column] * energy;
                            total += energy;
                        }
                    }
                    weighted / total
                };
                if trained {
                    advantages.row_mut(row)[column] = returns.row(row)[column] - baseline;
                }
            }
        }
    }
    (advantages, returns)
}

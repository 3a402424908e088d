//! The output projection with log-softmax and the value head, forward and backward in one pass
//! over at most 64 rows: no buffer of tokens × vocabulary is ever made, and rows without a target
//! cost nothing.

use crate::{
    device::On,
    forest::{
        Found, HeadTarget,
        ask::{Ask, Point, Slopes},
        block::Block,
    },
    kernel::{self, Mat},
};

const ROWS: usize = 64;

/// Where gradients go.
#[derive(Debug)]
pub(super) struct HeadGradients<'g> {
    /// Of all weights.
    pub(super) weights: &'g mut [f32],
    /// Of the value head.
    pub(super) values: &'g mut [f32],
}

/// Targets of one row and the slopes that the loss gave them.
struct RowSlopes {
    /// Token and slope by its log-probability.
    logprobs: Vec<(u32, f32)>,
    entropy: f32,
    value: f32,
}

impl Block<'_> {
    /// What is asked about the targets (sorted by row) into `found`. With a loss, adds the
    /// gradients of projection, value head and final norm and returns that of [`Block::last`].
    pub(super) fn head(
        &self,
        targets: &[HeadTarget],
        ask: &Ask<'_>,
        (temperature, on): (f32, On<'_>),
        gradients: &mut HeadGradients<'_>,
        found: &mut Vec<Found>,
    ) -> Option<Vec<f32>> {
        let (config, layout) = (&self.weights.config, &self.weights.layout);
        let (d, vocabulary) = (config.hidden_size, config.vocab_size);
        let projection = Mat::dense(self.weights.at(&layout.head), vocabulary, d);
        let norm_weight = self.weights.at(&layout.norm);
        let mut dlast = ask.loss.map(|_| vec![0.0; self.last.len()]);
        let mut groups: Vec<&[HeadTarget]> = targets.chunk_by(|a, b| a.row == b.row).collect();
        groups.sort_by_key(|group| group[0].row);
        for tile in groups.chunks(ROWS) {
            let rows = tile.len();
            let mut x = Vec::with_capacity(rows * d);
            for group in tile {
                x.extend_from_slice(&self.last[group[0].row * d..(group[0].row + 1) * d]);
            }
            let (mut hidden, mut inverse) = (vec![0.0; rows * d], vec![0.0; rows]);
            kernel::rms_norm(
                &mut hidden,
                &mut inverse,
                &x,
                norm_weight,
                config.rms_norm_eps,
            );
            let values: Vec<f32> = match ask.values {
                Some(head) => hidden.chunks_exact(d).map(|row| head.value(row)).collect(),
                None => vec![0.0; rows],
            };
            let scale = 1.0 / temperature;
            let mut logits = Vec::new();
            let hidden_mat = Mat::dense(&hidden, rows, d);
            if ask.policy {
                logits = vec![0.0; rows * vocabulary];
                on.matmul(&mut logits, 0.0, scale, hidden_mat, projection.t());
            }
            let mut dvalues = vec![0.0; rows];
            for (row, group) in tile.iter().enumerate() {
                let slopes = if ask.policy {
                    let line = &mut logits[row * vocabulary..(row + 1) * vocabulary];
                    distribution(line, group, values[row], ask, scale, found)
                } else {
                    targets_of(group, values[row], &[], 0.0, ask, found)
                };
                dvalues[row] = slopes.value;
            }
            let Some(dlast) = dlast.as_mut() else {
                continue;
            };
            let mut dhidden = vec![0.0; rows * d];
            if ask.policy {
                let dlogits = Mat::dense(&logits, rows, vocabulary);
                on.matmul(&mut dhidden, 0.0, 1.0, dlogits, projection);
                let dhead = &mut gradients.weights[layout.head.clone()];
                on.matmul(dhead, 1.0, 1.0, dlogits.t(), hidden_mat);
            }
            if let Some(head) = ask.values {
                let (dweight, dbias) = gradients.values.split_at_mut(d);
                for (row, dvalue) in dvalues.iter().enumerate() {
                    kernel::axpy(dweight, *dvalue, &hidden[row * d..(row + 1) * d]);
                    dbias[0] += dvalue;
                    kernel::axpy(
                        &mut dhidden[row * d..(row + 1) * d],
                        *dvalue,
                        &head.data[..d],
                    );
                }
            }
            let mut dx = vec![0.0; rows * d];
            let place = &mut gradients.weights[layout.norm.clone()];
            kernel::rms_norm_backward(&mut dx, true, place, &dhidden, &x, norm_weight, &inverse);
            for (row, group) in dx.chunks_exact(d).zip(tile) {
                dlast[group[0].row * d..(group[0].row + 1) * d].copy_from_slice(row);
            }
        }
        dlast
    }
}

/// Reports a row's targets and asks the loss about them. `logprobs` is empty without a policy.
fn targets_of(
    group: &[HeadTarget],
    value: f32,
    logprobs: &[f32],
    entropy: f32,
    ask: &Ask<'_>,
    found: &mut Vec<Found>,
) -> RowSlopes {
    let mut slopes = RowSlopes {
        logprobs: Vec::with_capacity(group.len()),
        entropy: 0.0,
        value: 0.0,
    };
    for (at, target) in group.iter().enumerate() {
        let point = Point {
            logprob: logprobs.get(at).copied().unwrap_or(0.0),
            entropy,
            value,
        };
        found.push(Found {
            segment: target.segment,
            index: target.index,
            point,
        });
        if let Some(loss) = ask.loss {
            let Slopes {
                logprob,
                entropy,
                value,
            } = loss(target.segment, target.index, point);
            slopes.logprobs.push((target.token, logprob));
            slopes.entropy += entropy;
            slopes.value += value;
        }
    }
    slopes
}

/// Log-softmax of one row of scaled logits, its targets, and with a loss the logits' gradients in
/// their place.
fn distribution(
    line: &mut [f32],
    group: &[HeadTarget],
    value: f32,
    ask: &Ask<'_>,
    scale: f32,
    found: &mut Vec<Found>,
) -> RowSlopes {
    let largest = kernel::max(line);
    let wanted: Vec<f32> = group
        .iter()
        .map(|target| line[target.token as usize] - largest)
        .collect();
    let (sum, weighted) = kernel::exp_shifted_weighted(line, largest);
    let log_sum = sum.ln();
    let entropy = log_sum - weighted / sum;
    let logprobs: Vec<f32> = wanted.iter().map(|shifted| shifted - log_sum).collect();
    let slopes = targets_of(group, value, &logprobs, entropy, ask, found);
    if ask.loss.is_some() {
        let total: f32 = slopes.logprobs.iter().map(|(_, slope)| slope).sum();
        let back = -total / sum * scale;
        if slopes.entropy == 0.0 {
            for value in line.iter_mut() {
                *value *= back;
            }
        } else {
            // dH/dz = −p (ln p + H); where p is 0 so is the product.
            let by_entropy = slopes.entropy * scale;
            for value in line.iter_mut() {
                let p = *value / sum;
                let surprise = if p > 0.0 { p * (p.ln() + entropy) } else { 0.0 };
                *value = *value * back - by_entropy * surprise;
            }
        }
        for &(token, slope) in &slopes.logprobs {
            line[token as usize] += slope * scale;
        }
    }
    slopes
}

//! The output projection with log-softmax, forward and backward in one pass over at most 64 rows:
//! no buffer of tokens × vocabulary is ever made, and rows without a target cost nothing.

use crate::{
    forest::{Found, HeadTarget, Loss, block::Block},
    kernel::{self, Mat, Threads, matmul},
};

const ROWS: usize = 64;

impl Block<'_> {
    /// Log-probabilities and entropies of the targets (sorted by row) into `found`. With a loss,
    /// adds the gradients of projection and final norm and returns that of [`Block::last`].
    pub(super) fn head(
        &self,
        targets: &[HeadTarget],
        loss: Option<&Loss<'_>>,
        temperature: f32,
        gradient: &mut [f32],
        found: &mut Vec<Found>,
    ) -> Option<Vec<f32>> {
        let (config, layout) = (&self.weights.config, &self.weights.layout);
        let (d, vocabulary) = (config.hidden_size, config.vocab_size);
        let projection = self.weights.at(&layout.head);
        let norm_weight = self.weights.at(&layout.norm);
        let mut dlast = loss.map(|_| vec![0.0; self.last.len()]);
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
            let mut logits = vec![0.0; rows * vocabulary];
            let (hidden_mat, scale) = (Mat::dense(&hidden, rows, d), 1.0 / temperature);
            let projection_mat = Mat::dense(projection, vocabulary, d);
            matmul(
                &mut logits,
                vocabulary,
                0.0,
                scale,
                hidden_mat,
                projection_mat.t(),
                Threads::One,
            );
            for (line, group) in logits.chunks_exact_mut(vocabulary).zip(tile) {
                let largest = kernel::max(line);
                let wanted: Vec<f32> = group
                    .iter()
                    .map(|target| line[target.token as usize] - largest)
                    .collect();
                // Σ e^s·s for the entropy needs the shifted logits before they are replaced.
                let mut weighted = 0.0_f32;
                for value in line.iter() {
                    let shifted = value - largest;
                    weighted = kernel::exp(shifted).mul_add(shifted, weighted);
                }
                let sum = kernel::exp_shifted(line, largest);
                let log_sum = sum.ln();
                let entropy = log_sum - weighted / sum;
                let mut total = 0.0;
                let mut own = Vec::with_capacity(group.len());
                for (target, shifted) in group.iter().zip(wanted) {
                    let logprob = shifted - log_sum;
                    found.push(Found {
                        segment: target.segment,
                        index: target.index,
                        logprob,
                        entropy,
                    });
                    if let Some(loss) = loss {
                        let dlogprob = loss(target.segment, target.index, logprob);
                        total += dlogprob;
                        own.push((target.token, dlogprob));
                    }
                }
                if loss.is_some() {
                    let back = -total / sum * scale;
                    for value in line.iter_mut() {
                        *value *= back;
                    }
                    for (token, dlogprob) in own {
                        line[token as usize] += dlogprob * scale;
                    }
                }
            }
            if let Some(dlast) = dlast.as_mut() {
                let dlogits = Mat::dense(&logits, rows, vocabulary);
                let mut dhidden = vec![0.0; rows * d];
                matmul(
                    &mut dhidden,
                    d,
                    0.0,
                    1.0,
                    dlogits,
                    projection_mat,
                    Threads::One,
                );
                matmul(
                    &mut gradient[layout.head.clone()],
                    d,
                    1.0,
                    1.0,
                    dlogits.t(),
                    hidden_mat,
                    Threads::One,
                );
                let mut dx = vec![0.0; rows * d];
                let place = &mut gradient[layout.norm.clone()];
                kernel::rms_norm_backward(
                    &mut dx,
                    true,
                    place,
                    &dhidden,
                    &x,
                    norm_weight,
                    &inverse,
                );
                for (row, group) in dx.chunks_exact(d).zip(tile) {
                    dlast[group[0].row * d..(group[0].row + 1) * d].copy_from_slice(row);
                }
            }
        }
        dlast
    }
}

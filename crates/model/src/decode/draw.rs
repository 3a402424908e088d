//! From logits to a token and its two log-probabilities.

use record::Sampling;

use crate::kernel;

/// A drawn token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drawn {
    /// The id.
    pub token: u32,
    /// Log-probability under the model's own distribution (temperature 1, no filter).
    pub logprob_model: f32,
    /// Log-probability under the distribution it was drawn from: temperature and filters applied,
    /// renormalised. 0 when greedy, which is a certainty.
    pub logprob_sampled: f32,
}

/// A uniform number in [0, 1) for the n-th draw of a seed: splitmix64 over both, so that a draw
/// needs no state and does not depend on what else is in the batch.
fn uniform(seed: u64, n: u64) -> f64 {
    let mut z = seed.wrapping_add(n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    (z >> 11) as f64 / (1_u64 << 53) as f64
}

/// Replaces every value by `exp(value - shift)` and returns the sum, in f64: a sum of 50,000 terms
/// in f32 is off by 1e-4, more than decoding and training may differ.
fn weigh(values: &mut [f32], shift: f32) -> f64 {
    let mut lanes = [0.0_f64; 16];
    let (chunks, rest) = values.as_chunks_mut::<16>();
    for chunk in chunks {
        for value in chunk.iter_mut() {
            *value = kernel::exp(*value - shift);
        }
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(*value);
        }
    }
    let mut sum = 0.0;
    for value in rest {
        *value = kernel::exp(*value - shift);
        sum += f64::from(*value);
    }
    lanes.iter().sum::<f64>() + sum
}

fn log_sum(logits: &[f32]) -> f32 {
    let largest = kernel::max(logits);
    largest + weigh(&mut logits.to_vec(), largest).ln() as f32
}

/// Draws one token. `logits` are the model's own; they may be overwritten.
pub(super) fn draw(logits: &mut [f32], sampling: &Sampling, n: u64) -> Drawn {
    if sampling.temperature <= 0.0 {
        let mut best = 0;
        for (id, logit) in logits.iter().enumerate() {
            if *logit > logits[best] {
                best = id;
            }
        }
        return Drawn {
            token: best as u32,
            logprob_model: logits[best] - log_sum(logits),
            logprob_sampled: 0.0,
        };
    }
    let inverse = 1.0 / sampling.temperature;
    if sampling.top_k == 0 && sampling.top_p >= 1.0 {
        return draw_any(logits, sampling, inverse, n);
    }
    let own_sum = log_sum(logits);
    // (id, scaled logit) of what may be drawn, by probability with ties to the smaller id.
    let mut order: Vec<(u32, f32)> = logits
        .iter()
        .enumerate()
        .map(|(i, l)| (i as u32, l * inverse))
        .collect();
    let largest = order.iter().fold(f32::NEG_INFINITY, |m, (_, l)| m.max(*l));
    order.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if sampling.top_k > 0 {
        order.truncate(sampling.top_k as usize);
    }
    if sampling.top_p < 1.0 {
        let total: f64 = order
            .iter()
            .map(|(_, l)| f64::from(kernel::exp(l - largest)))
            .sum();
        let mut reached = 0.0;
        let mut keep = 0;
        for (_, logit) in &order {
            keep += 1;
            reached += f64::from(kernel::exp(logit - largest));
            if reached >= f64::from(sampling.top_p) * total {
                break;
            }
        }
        order.truncate(keep);
    }
    let total: f64 = order
        .iter()
        .map(|(_, l)| f64::from(kernel::exp(l - largest)))
        .sum();
    let wanted = uniform(sampling.seed, n) * total;
    let mut reached = 0.0;
    let mut chosen = order[0];
    for candidate in &order {
        let weight = f64::from(kernel::exp(candidate.1 - largest));
        if weight > 0.0 {
            chosen = *candidate;
            reached += weight;
            if reached > wanted {
                break;
            }
        }
    }
    let (token, scaled) = chosen;
    Drawn {
        token,
        logprob_model: logits[token as usize] - own_sum,
        logprob_sampled: scaled - largest - total.ln() as f32,
    }
}

/// [`draw`] without filters, in the order of ids.
fn draw_any(logits: &[f32], sampling: &Sampling, inverse: f32, n: u64) -> Drawn {
    let mut weights: Vec<f32> = logits.iter().map(|logit| logit * inverse).collect();
    let largest = kernel::max(&weights);
    let total = weigh(&mut weights, largest);
    let wanted = uniform(sampling.seed, n) * total;
    let (mut reached, mut chosen) = (0.0, 0);
    for (id, weight) in weights.iter().enumerate() {
        if *weight > 0.0 {
            chosen = id;
            reached += f64::from(*weight);
            if reached > wanted {
                break;
            }
        }
    }
    let logprob_sampled = logits[chosen] * inverse - largest - total.ln() as f32;
    Drawn {
        token: chosen as u32,
        logprob_model: if inverse == 1.0 {
            logprob_sampled
        } else {
            logits[chosen] - log_sum(logits)
        },
        logprob_sampled,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frequencies(sampling: &Sampling, logits: &[f32]) -> Vec<f64> {
        let mut counts = vec![0.0; logits.len()];
        for n in 0..20_000 {
            counts[draw(&mut logits.to_vec(), sampling, n).token as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    #[test]
    fn draws_follow_the_reported_probabilities() {
        let logits = [0.5, -1.0, 2.0, 0.0, -3.0];
        for (temperature, top_k, top_p) in [
            (1.0, 0, 1.0),
            (0.7, 0, 1.0),
            (1.5, 3, 1.0),
            (1.0, 0, 0.8),
            (1.3, 4, 0.9),
        ] {
            let sampling = Sampling {
                temperature,
                top_k,
                top_p,
                seed: 11,
                ..Sampling::default()
            };
            let counts = frequencies(&sampling, &logits);
            for n in 0..50 {
                let drawn = draw(&mut logits.to_vec(), &sampling, n);
                let told = f64::from(drawn.logprob_sampled).exp();
                let seen = counts[drawn.token as usize];
                assert!(
                    (told - seen).abs() < 0.015,
                    "{sampling:?}: told {told}, seen {seen}"
                );
            }
        }
    }

    #[test]
    fn greedy_takes_the_first_of_the_best() {
        let sampling = Sampling {
            temperature: 0.0,
            ..Sampling::default()
        };
        let drawn = draw(&mut [0.0, 3.0, 3.0], &sampling, 0);
        assert_eq!((drawn.token, drawn.logprob_sampled), (1, 0.0));
        assert!((drawn.logprob_model - (-(2.0 + (-3.0_f32).exp()).ln())).abs() < 1e-6);
    }
}

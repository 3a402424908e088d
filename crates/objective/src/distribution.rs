//! From logits to log-probabilities and entropy, with gradients.

/// Logarithm of the sum of exponentials; minus infinity for no logits.
fn log_sum_exp(logits: &[f64]) -> f64 {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if largest == f64::NEG_INFINITY {
        return largest;
    }
    largest
        + logits
            .iter()
            .map(|logit| (logit - largest).exp())
            .sum::<f64>()
            .ln()
}

/// Log-probability of every token.
#[must_use]
pub fn log_softmax(logits: &[f64]) -> Vec<f64> {
    let total = log_sum_exp(logits);
    logits.iter().map(|logit| logit - total).collect()
}

/// Log-probability of `token` at a temperature, and its derivative by each logit. `None` when
/// there is no such token.
#[must_use]
pub fn logprob(logits: &[f64], token: usize, temperature: f64) -> Option<(f64, Vec<f64>)> {
    let scaled: Vec<f64> = logits.iter().map(|logit| logit / temperature).collect();
    let logs = log_softmax(&scaled);
    let value = *logs.get(token)?;
    let gradient = logs
        .iter()
        .enumerate()
        .map(|(at, log)| (f64::from(u8::from(at == token)) - log.exp()) / temperature)
        .collect();
    Some((value, gradient))
}

/// Entropy in nats, and its derivative by each logit.
#[must_use]
pub fn entropy(logits: &[f64]) -> (f64, Vec<f64>) {
    let logs = log_softmax(logits);
    let entropy: f64 = logs
        .iter()
        .map(|&log| {
            if log == f64::NEG_INFINITY {
                0.0
            } else {
                -log.exp() * log
            }
        })
        .sum();
    let gradient = logs
        .iter()
        .map(|&log| {
            if log == f64::NEG_INFINITY {
                0.0
            } else {
                -log.exp() * (log + entropy)
            }
        })
        .collect();
    (entropy, gradient)
}

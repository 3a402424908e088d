//! The clipped loss of a value head.

use crate::Matrix;

/// Loss of a value head.
#[derive(Debug, Clone, PartialEq)]
pub struct ValueResult {
    /// To be minimised.
    pub loss: f64,
    /// Derivative by each prediction.
    pub gradient: Matrix,
    /// Share of trained tokens where the clip holds.
    pub clipped: f64,
}

/// Half the squared error of one value, where the prediction may not gain by moving further than
/// `clip` from the old one: loss, derivative by the prediction, whether the clip holds.
#[must_use]
pub fn value_token(prediction: f64, old: f64, target: f64, clip: f64) -> (f64, f64, bool) {
    let bounded = prediction.clamp(old - clip, old + clip);
    let free = (prediction - target).powi(2);
    let held = (bounded - target).powi(2);
    if held > free {
        (0.5 * held, 0.0, true)
    } else {
        (0.5 * free, prediction - target, false)
    }
}

/// [`value_token`] over a batch; `weights` aggregate, see [`crate::weight_matrix`].
#[must_use]
pub fn value_loss(
    predictions: &Matrix,
    old: &Matrix,
    targets: &Matrix,
    weights: &Matrix,
    mask: &Matrix,
    clip: f64,
) -> ValueResult {
    let mut gradient = Matrix::filled(mask.rows(), mask.columns(), 0.0);
    let (mut loss, mut clipped, mut count) = (0.0, 0.0, 0.0);
    for row in 0..mask.rows() {
        for column in (0..mask.columns()).filter(|&column| mask.row(row)[column] != 0.0) {
            let (own, slope, held) = value_token(
                predictions.row(row)[column],
                old.row(row)[column],
                targets.row(row)[column],
                clip,
            );
            let weight = weights.row(row)[column];
            loss += weight * own;
            gradient.row_mut(row)[column] = weight * slope;
            clipped += f64::from(u8::from(held));
            count += 1.0;
        }
    }
    ValueResult {
        loss,
        gradient,
        clipped: clipped / f64::max(count, 1.0),
    }
}

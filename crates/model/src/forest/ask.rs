//! What is asked of a forest and what comes back, target by target.

use serde::{Deserialize, Serialize};

/// A linear value head on the final normed hidden state: how much reward is still to come, seen
/// from the row that predicts a token. It shares the trunk of the policy, or sits on a trunk of
/// its own when it is given other weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ValueHead {
    /// `hidden_size` weights, then the bias.
    pub data: Vec<f32>,
}

impl ValueHead {
    /// A head that says 0 everywhere, so that the first advantages are the rewards.
    #[must_use]
    pub fn zeros(hidden_size: usize) -> Self {
        Self {
            data: vec![0.0; hidden_size + 1],
        }
    }

    /// Value of a normed hidden state.
    pub(super) fn value(&self, hidden: &[f32]) -> f32 {
        let (weight, bias) = self.data.split_at(hidden.len());
        crate::kernel::dot(weight, hidden) + bias.first().copied().unwrap_or(0.0)
    }
}

/// What is known at a target.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Point {
    /// Log-probability of the token; 0 when only values were asked for.
    pub logprob: f32,
    /// Entropy of the distribution that it was drawn from, in nats.
    pub entropy: f32,
    /// Value of the state before the token; 0 without a head.
    pub value: f32,
}

/// Derivatives of the loss at a target.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Slopes {
    /// By the log-probability.
    pub logprob: f32,
    /// By the entropy.
    pub entropy: f32,
    /// By the value.
    pub value: f32,
}

/// The loss, as its derivatives: called once per target with the segment, the index into its
/// targets, and what is known there.
pub type Objective<'a> = dyn Fn(usize, usize, Point) -> Slopes + Sync + 'a;

/// What is wanted of a forest.
#[derive(Clone, Copy)]
pub struct Ask<'a> {
    /// With a loss, gradients are computed.
    pub loss: Option<&'a Objective<'a>>,
    /// With a head, values are computed.
    pub values: Option<&'a ValueHead>,
    /// Without the policy nothing is projected onto the vocabulary: a critic of its own.
    pub policy: bool,
}

impl std::fmt::Debug for Ask<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ask")
            .field("loss", &self.loss.is_some())
            .field("values", &self.values.is_some())
            .field("policy", &self.policy)
            .finish()
    }
}

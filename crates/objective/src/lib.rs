//! Advantages, rollout correction, policy losses, aggregation: plain reference maths over slices.
//! Pure: no clock, no randomness, no tensors. A learner's fused kernels are checked against it.
//!
//! | module | owns |
//! |---|---|
//! | `token` | the clipped loss and the truncated weight of one token (f32 in, f64 inside) |
//! | `group` | advantages of the rollouts of one group |
//! | `aggregate` | the weight of each token in the loss |
//! | `branches` | GAE and returns on the tree of a rollout's generated tokens |
//! | `estimator` | advantages of padded batches: GRPO, pass@k, RLOO, OPO, GPG, ReMax, REINFORCE++, GAE, token baselines |
//! | `policy` | policy losses of padded batches with gradients: PPO with dual clip, GSPO, CISPO, SAPO, GMPO, DRO, DPPO, KL-Cov |
//! | `correction` | importance weights, rejection, off-policy diagnostics |
//! | `distance`, `value`, `distribution` | KL estimators, value loss, entropy and log-probabilities |
//! | `trl` | TRL's GRPO loss with its conventions, for comparison |
//!
//! Invariants:
//! - **I3** A rollout has one vote in its group's baseline and one count of trained tokens in the
//!   loss; how many calls, branches or rows hold them cannot be expressed here, so it cannot
//!   matter.
//! - Log-ratios are clamped to ±[`LOG_RATIO_MAX`] before they are exponentiated; outside, the
//!   gradient is zero. No finite or infinite log-probability makes a weight above its cap.
//! - Importance weights are constants for the gradient and multiply the loss after clipping.
//! - Equal rewards give exact zeros and are reported ([`Advantages::zero_variance`]); so does a
//!   group of one.
//! - Every gradient agrees with finite differences, and every function with the reference values
//!   beside the workspace to 1e-5 relative (`cargo run --release -p objective --example vectors --
//!   DIR`).
//!
//! There are no limits: sizes are those of the arguments. Empty groups, rows and masks give zeros.

mod aggregate;
mod branches;
mod correction;
mod distance;
mod distribution;
mod estimator;
mod group;
mod matrix;
mod policy;
mod token;
mod trl;
mod value;

pub use aggregate::{Aggregation, Whole, token_weights, token_weights_within, weight_matrix};
pub use branches::{BranchError, Branches, tree_gae, tree_returns};
pub use correction::{
    Bounds, Correction, CorrectionError, Divergence, Gather, Level, Rejection, correction_weights,
    off_policy_metrics, rejection_mask,
};
pub use distance::{AdaptiveKl, KlEstimator, kl_token, rewards_with_kl};
pub use distribution::{entropy, log_softmax, logprob};
pub use estimator::{
    Lone, TokenBaselineInputs, gae, gdpo_single, gpg, grpo, grpo_pass_at_k, opo,
    optimal_token_baseline, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, rloo,
};
pub use group::{Advantages, STD_EPSILON, Scale, group_advantages, leave_one_out_advantages};
pub use matrix::{Matrix, RaggedRows};
pub use policy::{
    Metrics, PolicyInputs, PolicyLoss, PolicyResult, PolicyToken, covariance_choices,
    covariance_loss, policy_loss, policy_token,
};
pub use token::{Clip, LOG_RATIO_MAX, TokenLoss, clipped_token, truncated_weight};
pub use trl::{TrlInputs, TrlLoss, TrlSettings, trl_loss};
pub use value::{ValueResult, value_loss, value_token};

#[cfg(test)]
mod tests;

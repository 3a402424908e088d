//! Advantages on a tree of generated tokens: where a rollout forks, one token has several
//! successors.
//!
//! **The choice.** The advantage of a token is the mean, over the branches that pass through it,
//! of the advantage that ordinary GAE gives it on that branch alone. A branch ends at a generated
//! token with no generated token of the rollout below it, and there the terminal reward is paid.
//! Because GAE is linear in what follows, that mean obeys a recursion over children, each
//! weighted by its share of the branches, so every token is visited once:
//!
//! `A(t) = r(t) − V(t) + γ · Σ_c share(c) · (V(c) + λ · A(c))`
//!
//! Consequences, all tested: without forks it is GAE to the bit of rounding; with γ = λ = 1 and
//! only a terminal reward R the advantage is R − V(t) whatever the forks; a fork changes nothing
//! for the tokens below it; and each branch has one vote above a fork, so a side branch that was
//! cut short does not outweigh three long ones.

/// Why a tree of tokens is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BranchError {
    /// A token does not come after the one before it.
    #[error(
        "objective: token {token} names {before} as the token before it; expected a smaller index (parents first)"
    )]
    Order {
        /// The token.
        token: usize,
        /// What it names.
        before: usize,
    },
    /// Lists of different lengths.
    #[error("objective: {what} has {found} entries, expected one per token ({expected})")]
    Length {
        /// Which list.
        what: &'static str,
        /// Its length.
        found: usize,
        /// Number of tokens.
        expected: usize,
    },
}

/// Generated tokens of one rollout, parents first.
#[derive(Debug, Clone, Copy)]
pub struct Branches<'a> {
    /// For each token the generated token before it on its path; tokens of the context between
    /// two generated ones are skipped, as GAE over rows skips them.
    pub before: &'a [Option<usize>],
    /// Reward of each token (e.g. the price of leaving a reference policy), without the terminal
    /// one. Empty means none.
    pub rewards: &'a [f64],
    /// Paid at the last token of every branch.
    pub terminal: f64,
}

impl Branches<'_> {
    /// Branches through each token, and whether each token ends one.
    fn passing(&self) -> Result<(Vec<f64>, Vec<bool>), BranchError> {
        let tokens = self.before.len();
        if !self.rewards.is_empty() && self.rewards.len() != tokens {
            return Err(BranchError::Length {
                what: "rewards",
                found: self.rewards.len(),
                expected: tokens,
            });
        }
        let mut ends = vec![true; tokens];
        for (token, before) in self.before.iter().enumerate() {
            if let Some(before) = *before {
                if before >= token {
                    return Err(BranchError::Order { token, before });
                }
                ends[before] = false;
            }
        }
        let mut passing: Vec<f64> = ends.iter().map(|end| f64::from(u8::from(*end))).collect();
        for token in (0..tokens).rev() {
            if let Some(before) = self.before[token] {
                passing[before] += passing[token];
            }
        }
        Ok((passing, ends))
    }

    fn reward(&self, token: usize) -> f64 {
        self.rewards.get(token).copied().unwrap_or(0.0)
    }
}

/// Generalised advantage estimation over a tree, see the module. Gives advantages *before*
/// whitening and returns (advantage + value), one per token.
///
/// # Errors
/// [`BranchError`] when the lists do not fit together.
pub fn tree_gae(
    branches: &Branches<'_>,
    values: &[f64],
    gamma: f64,
    lambda: f64,
) -> Result<(Vec<f64>, Vec<f64>), BranchError> {
    let tokens = branches.before.len();
    if values.len() != tokens {
        return Err(BranchError::Length {
            what: "values",
            found: values.len(),
            expected: tokens,
        });
    }
    let (passing, ends) = branches.passing()?;
    let mut below = vec![0.0; tokens];
    let mut advantages = vec![0.0; tokens];
    for token in (0..tokens).rev() {
        let paid = branches.reward(token)
            + if ends[token] {
                branches.terminal
            } else {
                below[token]
            };
        advantages[token] = paid - values[token];
        if let Some(before) = branches.before[token] {
            let share = passing[token] / passing[before];
            below[before] += gamma * share * (values[token] + lambda * advantages[token]);
        }
    }
    let returns = advantages.iter().zip(values).map(|(a, v)| a + v).collect();
    Ok((advantages, returns))
}

/// What is still to come at each token, discounted: the mean over the branches through it. GAE
/// with λ = 1 and no value function.
///
/// # Errors
/// [`BranchError`] when the lists do not fit together.
pub fn tree_returns(branches: &Branches<'_>, gamma: f64) -> Result<Vec<f64>, BranchError> {
    let none = vec![0.0; branches.before.len()];
    tree_gae(branches, &none, gamma, 1.0).map(|(returns, _)| returns)
}

//! What the calls of a rollout come to: made once when it ends, so that a run of thousands is
//! looked at without reading their calls again. Pure.

use std::collections::{BTreeMap, HashSet};

use record::{Call, PolicyVersion};
use serde::{Deserialize, Serialize};
use tree::{Selection, Tree, select};

/// Characters of a piece of evidence that are kept.
const EVIDENCE_CHARACTERS_MAX: usize = 120;

/// Tokens of a rollout.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenCounts {
    /// Prompts and replies of all calls.
    pub captured: u64,
    /// Stored once in the tree.
    pub unique: u64,
    /// Drawn by the policy.
    pub generated: u64,
    /// Drawn, but context for want of log-probabilities (I4).
    pub without_logprobs: u64,
    /// Trainable tokens on the branches that the rule keeps.
    pub retained: u64,
    /// Trainable tokens that the rule drops, by reason.
    pub dropped: BTreeMap<String, u64>,
}

/// Forks of one cause.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkPrice {
    /// How many.
    pub forks: u64,
    /// Prompt tokens that had to be computed again.
    pub tokens_again: u64,
    /// The call of the most expensive one.
    pub dearest_call: u32,
    /// What that one alone cost.
    pub dearest_tokens: u64,
    /// What shows its cause.
    pub dearest_evidence: String,
}

/// How calls repeat and carry on each other.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallCounts {
    /// Calls.
    pub calls: u32,
    /// Tries of these calls.
    pub attempts: u32,
    /// Tries that brought nothing new: further ones of a call, and calls whose request is that of
    /// an earlier one.
    pub duplicates: u32,
    /// Calls that carry on an earlier one.
    pub continued: u32,
    /// Of these, the ones whose prompt is that call's prompt and reply, token by token (I2).
    pub exact: u32,
    /// Replies that could not be parsed.
    pub parse_failed: u32,
    /// By class.
    pub classes: BTreeMap<String, u32>,
}

/// What is known of the calls of a rollout.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The rule by which tokens are kept.
    pub selection: Selection,
    /// Calls.
    pub calls: CallCounts,
    /// Tokens.
    pub tokens: TokenCounts,
    /// Forks by cause.
    pub forks: BTreeMap<String, ForkPrice>,
    /// Leaves that the rule keeps.
    pub leaves: u64,
    /// Why nothing is kept, when the tree has too many leaves.
    pub over_branched: Option<String>,
    /// Why there is no tree.
    pub unreadable: Option<String>,
    /// Generated tokens by the weights that drew them.
    pub tokens_by_policy: BTreeMap<PolicyVersion, u64>,
    /// Seconds that the harness's calls took, all attempts together.
    pub calls_s: f64,
}

impl Summary {
    /// Looks at the calls of one rollout, by the rule of its run.
    #[must_use]
    pub fn of(calls: &[Call], selection: &Selection) -> Self {
        let mut summary = Self {
            selection: selection.clone(),
            ..Self::default()
        };
        summary.note_calls(calls);
        match Tree::build(calls) {
            Ok(tree) => summary.note_tree(&tree),
            Err(error) => summary.unreadable = Some(error.to_string()),
        }
        summary
    }

    fn note_calls(&mut self, calls: &[Call]) {
        let mut requests = HashSet::new();
        for call in calls {
            self.calls.calls += 1;
            let attempts = u32::try_from(call.attempts.len()).unwrap_or(u32::MAX);
            self.calls.attempts += attempts;
            let repeats = !call.digest.is_empty() && !requests.insert(call.digest.as_str());
            self.calls.duplicates += attempts.saturating_sub(1) + u32::from(repeats);
            self.calls.parse_failed += u32::from(call.parse_failed);
            let milliseconds: u64 = call
                .attempts
                .iter()
                .map(|attempt| attempt.finished_ms.saturating_sub(attempt.started_ms))
                .sum();
            self.calls_s += milliseconds as f64 / 1000.0;
            let Some(generation) = &call.generation else {
                continue;
            };
            let ends = generation.policy.iter().skip(1).map(|span| span.start);
            let end = u32::try_from(generation.token_ids.len()).unwrap_or(u32::MAX);
            for (span, end) in generation.policy.iter().zip(ends.chain([end])) {
                let tokens = end.saturating_sub(span.start);
                *self.tokens_by_policy.entry(span.version).or_default() += u64::from(tokens);
            }
        }
    }

    fn note_tree(&mut self, tree: &Tree) {
        let stats = tree.stats();
        self.tokens.captured = stats.tokens_logical as u64;
        self.tokens.unique = stats.tokens_unique as u64;
        self.tokens.generated = stats.tokens_generated as u64;
        self.tokens.without_logprobs = stats.tokens_without_logprobs as u64;
        for place in &tree.places {
            *self
                .calls
                .classes
                .entry(place.class.name().to_owned())
                .or_default() += 1;
            if let Some(previous) = place.previous {
                self.calls.continued += 1;
                self.calls.exact += u32::from(place.extends.is_some_and(|call| call >= previous));
            }
        }
        for fork in &tree.forks {
            let price = self.forks.entry(fork.cause.name().to_owned()).or_default();
            let again = fork.tokens_again as u64;
            if price.forks == 0 || again > price.dearest_tokens {
                price.dearest_call = fork.call;
                price.dearest_tokens = again;
                let evidence = fork.evidence.chars().take(EVIDENCE_CHARACTERS_MAX);
                price.dearest_evidence = evidence.collect();
            }
            price.forks += 1;
            price.tokens_again += again;
        }
        let kept = select(tree, &self.selection);
        self.leaves = kept.leaves as u64;
        self.tokens.retained = kept.tokens_trained as u64;
        self.over_branched = kept.discarded.map(|over| over.to_string());
        for dropped in kept.dropped.iter().filter(|node| node.tokens_trainable > 0) {
            *self
                .tokens
                .dropped
                .entry(dropped.reason.name())
                .or_default() += dropped.tokens_trainable as u64;
        }
    }

    /// Trainable tokens, kept or not.
    #[must_use]
    pub fn trainable(&self) -> u64 {
        self.tokens.retained + self.tokens.dropped.values().sum::<u64>()
    }
}

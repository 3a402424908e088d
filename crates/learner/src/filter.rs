//! Which captured rollouts supervised training learns from.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What a choice is made by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate<'a> {
    /// The task: rollouts of one task compete for places.
    pub task: &'a str,
    /// Final reward; one that is not finite is never chosen.
    pub reward: f64,
    /// Generated tokens.
    pub tokens: usize,
}

/// How rollouts are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Filter {
    /// Rollouts below this reward are left out.
    pub reward_min: f64,
    /// Of each task only the shortest rollout that passes.
    pub shortest_only: bool,
    /// At most so many rollouts per task, the best rewarded first, among equals the shortest;
    /// 0 means all.
    pub per_task_max: usize,
}

impl Default for Filter {
    fn default() -> Self {
        Self {
            reward_min: 0.5,
            shortest_only: false,
            per_task_max: 0,
        }
    }
}

/// Indexes of the chosen candidates, ascending. Depends on nothing but its arguments; ties go to
/// the earlier candidate.
#[must_use]
pub fn choose(candidates: &[Candidate<'_>], filter: &Filter) -> Vec<usize> {
    let mut by_task: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (index, candidate) in candidates.iter().enumerate() {
        if candidate.reward.is_finite() && candidate.reward >= filter.reward_min {
            by_task.entry(candidate.task).or_default().push(index);
        }
    }
    let limit = match (filter.shortest_only, filter.per_task_max) {
        (true, _) => 1,
        (false, 0) => usize::MAX,
        (false, most) => most,
    };
    let mut chosen = Vec::new();
    for mut own in by_task.into_values() {
        if filter.shortest_only {
            own.sort_by_key(|&index| candidates[index].tokens);
        } else {
            own.sort_by(|&a, &b| {
                let (a, b) = (&candidates[a], &candidates[b]);
                b.reward.total_cmp(&a.reward).then(a.tokens.cmp(&b.tokens))
            });
        }
        chosen.extend(own.into_iter().take(limit));
    }
    chosen.sort_unstable();
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chooses_by_reward_length_and_task() {
        let candidates: Vec<Candidate<'_>> = [
            ("a", 1.0, 30),
            ("a", 1.0, 20),
            ("a", 0.5, 10),
            ("b", 0.49, 5),
            ("b", f64::NAN, 5),
            ("c", 0.7, 8),
            ("a", 1.0, 20),
        ]
        .into_iter()
        .map(|(task, reward, tokens)| Candidate {
            task,
            reward,
            tokens,
        })
        .collect();
        let with = |filter: Filter| choose(&candidates, &filter);
        let default = Filter::default();
        assert_eq!(with(default), [0, 1, 2, 5, 6]);
        let two = Filter {
            per_task_max: 2,
            ..default
        };
        assert_eq!(with(two), [1, 5, 6]);
        let shortest = Filter {
            shortest_only: true,
            ..default
        };
        assert_eq!(with(shortest), [2, 5]);
        let strict = Filter {
            reward_min: 1.0,
            ..shortest
        };
        assert_eq!(with(strict), [1]);
        assert!(
            with(Filter {
                reward_min: 2.0,
                ..default
            })
            .is_empty()
        );
    }
}

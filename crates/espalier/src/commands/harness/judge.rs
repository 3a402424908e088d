//! From what was captured of one scenario to figures and verdicts. Pure.

use std::collections::BTreeMap;

use harness::{ExitMeaning, Habits};
use record::{AttemptOutcome, Call, Disposition, Rollout};
use serde::Serialize;
use tree::{CallClass, ForkCause, Tree};

/// Resets of a context in a task that fills it once. Some harnesses take two steps; more are a
/// window in which nobody can work.
const RESETS_MAX: usize = 2;

/// One thing that must hold.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Check {
    pub(crate) name: &'static str,
    pub(crate) ok: bool,
    /// What was found, and what was expected when that is not it.
    pub(crate) found: String,
}

/// What is counted in every scenario.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Figures {
    pub(crate) calls: usize,
    /// Tokens of the first prompt.
    pub(crate) prompt_tokens: usize,
    /// Calls by class.
    pub(crate) classes: BTreeMap<&'static str, usize>,
    /// Calls behind another one of their conversation, but for those after a compaction.
    pub(crate) turns: usize,
    /// Of these, the ones whose prompt extends prompt and reply of the one before exactly.
    pub(crate) exact: usize,
    pub(crate) forks: BTreeMap<&'static str, usize>,
    /// What shows each fork.
    pub(crate) evidence: Vec<String>,
    /// Calls that say the same as an earlier one and were not filed as its attempt.
    pub(crate) duplicates: usize,
    /// Attempts beyond the first of a call, and replies that the client did not read to the end.
    pub(crate) repeats: usize,
    pub(crate) parse_failed: usize,
    /// Windows that a conversation went through beyond its first.
    pub(crate) resets: usize,
    /// Turns behind the last of these, and the exact ones of them.
    pub(crate) turns_after_reset: usize,
    pub(crate) exact_after_reset: usize,
}

impl Figures {
    pub(crate) fn of(calls: &[Call]) -> Result<Self, String> {
        let tree = Tree::build(calls).map_err(|error| error.to_string())?;
        let mut figures = Self {
            calls: calls.len(),
            prompt_tokens: calls.first().map_or(0, |call| call.prompt_ids.len()),
            ..Self::default()
        };
        let by_index = |index: u32| calls.iter().find(|call| call.id.index == index);
        let mut threads: BTreeMap<u32, &Call> = BTreeMap::new();
        for place in &tree.places {
            *figures.classes.entry(place.class.name()).or_default() += 1;
            if place.opens == Some(ForkCause::Compaction) {
                figures.resets += 1;
                (figures.turns_after_reset, figures.exact_after_reset) = (0, 0);
            }
            let own = matches!(place.class, CallClass::Main | CallClass::Subagent);
            let Some(call) = by_index(place.call).filter(|_| own) else {
                continue;
            };
            // The turn before is the one that was answered before, and not the one that the tree
            // says is carried on: that is the one whose tokens come back, wherever it stands.
            let before = match call.generation {
                Some(_) => threads.insert(place.thread, call),
                None => threads.get(&place.thread).copied(),
            };
            let Some(before) = before.filter(|_| place.opens.is_none()) else {
                continue;
            };
            let exact = before.generation.as_ref().is_some_and(|generation| {
                call.prompt_ids
                    .strip_prefix(&before.prompt_ids[..])
                    .is_some_and(|rest| rest.starts_with(&generation.token_ids))
            });
            figures.turns += 1;
            figures.exact += usize::from(exact);
            figures.turns_after_reset += 1;
            figures.exact_after_reset += usize::from(exact);
        }
        for fork in &tree.forks {
            let side = |call| {
                tree.place(call)
                    .is_some_and(|place| place.class == CallClass::Side)
            };
            // A title or a memory note shares no more than a few tokens with the conversation, on
            // purpose.
            let cause = if side(fork.call) || side(fork.against) {
                CallClass::Side.name()
            } else {
                fork.cause.name()
            };
            *figures.forks.entry(cause).or_default() += 1;
            figures.evidence.push(format!(
                "call {} against {}: {}, {} ({} tokens shared, {} again)",
                fork.call,
                fork.against,
                fork.cause.name(),
                fork.evidence,
                fork.tokens_shared,
                fork.tokens_again
            ));
        }
        let mut digests: Vec<&str> = calls.iter().map(|call| call.digest.as_str()).collect();
        digests.sort_unstable();
        digests.dedup();
        let retries = figures.forks.get(ForkCause::Retry.name());
        figures.duplicates = (calls.len() - digests.len()).max(retries.copied().unwrap_or(0));
        for call in calls {
            let gone = call
                .attempts
                .iter()
                .filter(|attempt| attempt.outcome == AttemptOutcome::ClientGone);
            figures.repeats += (call.attempts.len().saturating_sub(1)).max(gone.count());
            figures.parse_failed += usize::from(call.parse_failed);
        }
        Ok(figures)
    }
}

/// What a scenario allows.
#[derive(Debug, Clone, Default)]
pub(crate) struct Expected {
    /// Calls that must have been captured at least.
    pub(crate) calls_min: usize,
    /// Causes for which paths may part, beside side calls, and how often at most.
    pub(crate) forks: Vec<(ForkCause, usize)>,
    /// Turns that may be inexact, because the harness said that it changes its history.
    pub(crate) inexact_max: usize,
    /// Faults that were planned: repeats are expected.
    pub(crate) faults: u32,
    pub(crate) subagent: bool,
    pub(crate) compaction: bool,
}

/// Everything that must hold of one rollout.
pub(crate) fn checks(
    rollout: &Rollout,
    figures: &Figures,
    habits: &Habits,
    network: &BTreeMap<String, u64>,
    faults_played: u32,
    expected: &Expected,
) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut check = |name, ok, found: String| checks.push(Check { name, ok, found });
    let reward = rollout.verdict.as_ref().map(|verdict| verdict.reward);
    check(
        "done",
        reward == Some(1.0),
        match (&rollout.verdict, &rollout.disposition) {
            (Some(verdict), _) if verdict.reward < 1.0 => {
                format!("the files are not as they must be: {:?}", verdict)
            }
            (Some(_), _) => "the files are as they must be".to_owned(),
            (None, disposition) => format!("no verdict: {disposition:?}"),
        },
    );
    check(
        "counts",
        rollout.disposition == Some(Disposition::Train),
        format!("{:?}", rollout.disposition),
    );
    check(
        "captured",
        figures.calls >= expected.calls_min,
        format!("{} calls, at least {}", figures.calls, expected.calls_min),
    );
    check(
        "exact",
        figures.exact > 0 && figures.exact + expected.inexact_max >= figures.turns,
        format!("{} of {} turns", figures.exact, figures.turns),
    );
    let strange: Vec<String> = figures
        .forks
        .iter()
        .filter(|(cause, _)| **cause != CallClass::Side.name())
        .filter(|(cause, count)| {
            let mut known = expected.forks.iter();
            !known.any(|(known, most)| known.name() == **cause && **count <= *most)
        })
        .map(|(cause, count)| format!("{cause} {count}"))
        .collect();
    check(
        "forks",
        strange.is_empty(),
        if strange.is_empty() {
            "none beyond what was played".to_owned()
        } else {
            format!("{}: {}", strange.join(", "), figures.evidence.join("; "))
        },
    );
    check(
        "duplicates",
        figures.duplicates == 0,
        figures.duplicates.to_string(),
    );
    check(
        "parsed",
        figures.parse_failed == 0,
        format!("{} replies not parsed", figures.parse_failed),
    );
    if expected.faults == 0 {
        check(
            "accepted",
            figures.repeats == 0,
            format!("{} replies asked for again or not read", figures.repeats),
        );
    } else {
        check(
            "faults",
            faults_played == expected.faults,
            format!("{faults_played} of {} faults played", expected.faults),
        );
    }
    check(
        "network",
        network.is_empty(),
        if network.is_empty() {
            "nothing but the gateway".to_owned()
        } else {
            format!("{network:?}")
        },
    );
    check(
        "exit",
        habits.exit_code == ExitMeaning::Unreliable || rollout.harness_exit == Some(0),
        format!("{:?}", rollout.harness_exit),
    );
    if expected.subagent {
        let calls = figures.classes.get(CallClass::Subagent.name());
        check(
            "subagent",
            calls.is_some_and(|calls| *calls > 0),
            format!("{} calls of a sub-agent", calls.unwrap_or(&0)),
        );
    }
    if expected.compaction {
        check(
            "compaction",
            (1..=RESETS_MAX).contains(&figures.resets),
            format!(
                "{} times the context was reset, at least once and at most {RESETS_MAX} times",
                figures.resets
            ),
        );
        check(
            "goes_on",
            figures.exact_after_reset > 0 && figures.exact_after_reset == figures.turns_after_reset,
            format!(
                "{} of {} turns behind the last reset are exact",
                figures.exact_after_reset, figures.turns_after_reset
            ),
        );
    }
    checks
}

#[cfg(test)]
mod tests {
    use record::{
        Attempt, CallId, Continuation, Conversation, Dialect, FinishReason, Generation, Message,
        Role, RolloutId, Sampling,
    };

    use super::*;

    /// A call whose history has `turns` assistant turns of one word each.
    fn call(index: u32, turns: usize, prompt_ids: Vec<u32>) -> Call {
        let mut messages = vec![Message::text(Role::User, "go")];
        for turn in 0..turns {
            messages.push(Message::text(Role::Assistant, format!("word {turn}")));
            messages.push(Message::text(Role::User, format!("more {turn}")));
        }
        Call {
            id: CallId {
                rollout: RolloutId::new("r").unwrap(),
                index,
            },
            dialect: Dialect::Chat,
            request: serde_json::Value::Null,
            headers: Vec::new(),
            digest: format!("{index}"),
            conversation: Conversation {
                messages,
                tools: Vec::new(),
            },
            prompt_ids,
            continuation: Continuation::default(),
            sampling: Sampling::default(),
            generation: Some(Generation {
                token_ids: vec![100 + index],
                logprobs_model: Vec::new(),
                logprobs_sampled: Vec::new(),
                policy: Vec::new(),
                finish: FinishReason::Stop,
                cached_tokens: 0,
            }),
            raw_text: String::new(),
            reply: Some(Message::text(Role::Assistant, format!("word {index}"))),
            parse_failed: false,
            attempts: vec![Attempt {
                started_ms: 0,
                finished_ms: 0,
                outcome: AttemptOutcome::Delivered,
                stream: true,
            }],
        }
    }

    #[test]
    fn a_turn_is_exact_when_it_extends_prompt_and_reply() {
        let calls = [
            call(0, 0, vec![1, 2]),
            call(1, 1, vec![1, 2, 100, 3]),
            // The reply of call 1 comes back as other tokens.
            call(2, 2, vec![1, 2, 100, 3, 7, 4]),
        ];
        let figures = Figures::of(&calls).unwrap();
        assert_eq!((figures.turns, figures.exact), (2, 1));
        assert_eq!(figures.forks.values().sum::<usize>(), 1);
        assert_eq!((figures.duplicates, figures.repeats), (0, 0));
    }

    /// The tree takes the next turn for one that carries on an earlier call, whose tokens it has.
    #[test]
    fn a_turn_whose_reply_was_changed_by_the_harness_is_not_exact() {
        let mut calls = [
            call(0, 0, vec![1, 2]),
            call(1, 1, vec![1, 2, 100, 3]),
            call(2, 2, vec![1, 2, 100, 3, 7, 7, 4]),
            call(3, 3, vec![1, 2, 100, 3, 7, 7, 4, 102, 5]),
        ];
        for call in &mut calls[2..] {
            let echo = &mut call.conversation.messages[3];
            *echo = Message::text(Role::Assistant, "word 1, said otherwise");
        }
        let figures = Figures::of(&calls).unwrap();
        assert_eq!((figures.turns, figures.exact), (3, 2));
    }

    #[test]
    fn the_same_request_twice_is_a_duplicate_and_a_second_attempt_a_repeat() {
        let mut calls = vec![call(0, 0, vec![1, 2]), call(1, 0, vec![1, 2])];
        calls[1].digest = calls[0].digest.clone();
        let again = calls[0].attempts[0].clone();
        calls[0].attempts.push(again);
        let figures = Figures::of(&calls).unwrap();
        assert_eq!((figures.duplicates, figures.repeats), (1, 1));
    }
}

//! What becomes of a rollout, as data: one row for each way in which it can end. The rules of
//! [`crate::classify`] find the row from the evidence, the runner does what the row says, and the
//! same rows are what `espalier inspect`, the metrics and docs/rollouts.md show.
//!
//! A row that names a fault never has a reward (I7); a row that names a budget always has one, of
//! the state that was left.

use std::{collections::BTreeMap, fmt};

use record::{Disposition, Fault};
use serde::{Deserialize, Serialize};

/// Whose doing an ending is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Blame {
    /// What the model did, or took too long to do.
    Policy,
    /// The harness, or its profile.
    Harness,
    /// Sandbox, machine, container engine, cluster.
    Sandbox,
    /// Whatever answers calls.
    Engine,
    /// The gateway or the ledger.
    Gateway,
    /// The task's verifier.
    Verifier,
    /// A judge.
    Judge,
    /// Whoever stopped the run.
    Run,
}

/// What training does with a rollout that ended so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Then {
    /// Reward and tokens count.
    Train,
    /// As `train`, of the state that was left when a budget was spent.
    Truncate,
    /// The reward counts in its group, no token is trained.
    Mask,
    /// Nothing counts.
    Discard,
}

/// Whether it is run again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Again {
    /// This is the result.
    Never,
    /// With a fresh sandbox, as often as [`crate::Settings::sandbox_retries`] says; the attempt is
    /// then recorded as `retry`.
    Retried,
    /// When the run is resumed.
    Resumed,
}

/// How a rollout ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// By itself.
    Finished,
    /// A budget of this name was spent.
    Budget(&'static str),
    /// A limit of the harness's own, which its profile names.
    OwnLimit,
    /// Something broke.
    Fault(Fault),
}

/// A way in which a rollout can end.
#[derive(Debug, Clone, Copy)]
pub struct Ending {
    /// How.
    pub cause: Cause,
    /// In words.
    pub what: &'static str,
    /// Whose doing it is.
    pub blame: Blame,
    /// What training does with it.
    pub then: Then,
    /// Whether it is run again.
    pub again: Again,
}

impl Blame {
    /// The word used in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Policy => "policy",
            Self::Harness => "harness",
            Self::Sandbox => "sandbox",
            Self::Engine => "engine",
            Self::Gateway => "gateway",
            Self::Verifier => "verifier",
            Self::Judge => "judge",
            Self::Run => "run",
        }
    }
}

impl Then {
    /// The word used in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Truncate => "truncate",
            Self::Mask => "mask",
            Self::Discard => "discard",
        }
    }
}

const fn budget(name: &'static str, what: &'static str) -> Ending {
    Ending {
        cause: Cause::Budget(name),
        what,
        blame: Blame::Policy,
        then: Then::Truncate,
        again: Again::Never,
    }
}

const fn broken(fault: Fault, what: &'static str, blame: Blame, again: Again) -> Ending {
    Ending {
        cause: Cause::Fault(fault),
        what,
        blame,
        then: Then::Discard,
        again,
    }
}

/// Name of the budget of [`crate::Stages::harness_s`] and its like.
pub const HARNESS_TIMEOUT: &str = "harness_timeout";
/// Name of the budget of calls.
pub const CALLS_LIMIT: &str = "calls_limit";
/// Name of the budget of generated tokens.
pub const TOKENS_LIMIT: &str = "tokens_limit";
/// Name of the budget of seconds at the gateway.
pub const SECONDS_LIMIT: &str = "seconds_limit";
/// Name of the budget of one prompt.
pub const CONTEXT_OVERFLOW: &str = "context_overflow";
/// Name of the end by a command of the policy's.
pub const HARNESS_KILLED: &str = "harness_killed";

/// Every way in which a rollout can end. When several things happened, the first boundary that
/// broke decides: sandbox, engine and gateway, harness, verifier; then budgets.
pub const ENDINGS: [Ending; 20] = [
    Ending {
        cause: Cause::Finished,
        what: "the harness ended by itself, with whatever exit code",
        blame: Blame::Policy,
        then: Then::Train,
        again: Again::Never,
    },
    budget(HARNESS_TIMEOUT, "the harness was ended at its time limit"),
    budget(CALLS_LIMIT, "a call was refused: `calls_max` was used up"),
    budget(
        TOKENS_LIMIT,
        "a call was refused: `generated_tokens_max` was used up",
    ),
    budget(
        SECONDS_LIMIT,
        "a call was refused or cut off: the gateway's `seconds_max` was over",
    ),
    budget(
        CONTEXT_OVERFLOW,
        "its last call did not fit into the model's context",
    ),
    Ending {
        cause: Cause::OwnLimit,
        what: "a limit of the harness's own, which its profile names by exit code",
        blame: Blame::Policy,
        then: Then::Truncate,
        again: Again::Never,
    },
    budget(
        HARNESS_KILLED,
        "a command in the sandbox ended the harness: a signal that programs send on purpose",
    ),
    broken(
        Fault::SandboxRefused,
        "the sandbox can never be made here: unsupported, no image, forbidden, quota, the task",
        Blame::Sandbox,
        Again::Never,
    ),
    broken(
        Fault::SandboxStart,
        "the sandbox was not ready in time, or not healthy",
        Blame::Sandbox,
        Again::Retried,
    ),
    broken(
        Fault::SandboxLost,
        "the sandbox ended or broke while in use: guest killed, container removed, node lost",
        Blame::Sandbox,
        Again::Never,
    ),
    broken(
        Fault::OutOfMemory,
        "the kernel killed the harness at the sandbox's memory limit",
        Blame::Sandbox,
        Again::Never,
    ),
    broken(
        Fault::HarnessCrashed,
        "the harness could not be started, crashed (a signal of its own), or was killed with SIGKILL",
        Blame::Harness,
        Again::Never,
    ),
    broken(
        Fault::NoCalls,
        "the harness made no model call",
        Blame::Harness,
        Again::Never,
    ),
    broken(
        Fault::EngineFailed,
        "a call got no answer from the engine, also not when it was repeated",
        Blame::Engine,
        Again::Never,
    ),
    broken(
        Fault::GatewayFailed,
        "gateway or ledger failed: restart, full disk",
        Blame::Gateway,
        Again::Never,
    ),
    broken(
        Fault::NotSettled,
        "calls were still in flight at the settling limit",
        Blame::Gateway,
        Again::Never,
    ),
    broken(
        Fault::VerifierFailed,
        "the verifier crashed, timed out, or gave no number",
        Blame::Verifier,
        Again::Never,
    ),
    broken(
        Fault::JudgeFailed,
        "a judge could not be asked, or did not answer in form",
        Blame::Judge,
        Again::Never,
    ),
    broken(
        Fault::Interrupted,
        "cancelled, or its orchestrator was killed",
        Blame::Run,
        Again::Resumed,
    ),
];

impl Ending {
    /// Its name: that of the fault or the budget.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self.cause {
            Cause::Finished => "finished",
            Cause::Budget(name) => name,
            Cause::OwnLimit => "own_limit",
            Cause::Fault(fault) => fault.name(),
        }
    }

    /// The row of a disposition, or of an attempt's.
    #[must_use]
    pub fn of(disposition: &Disposition) -> &'static Self {
        match disposition {
            Disposition::Train => row(Cause::Finished),
            Disposition::Truncate { reason } | Disposition::Mask { reason } => of_budget(reason),
            Disposition::Retry { fault, .. } | Disposition::Discard { fault, .. } => {
                of_fault(*fault)
            }
        }
    }

    /// The name under which a disposition is counted: the row's, and for limits that a profile
    /// names the profile's.
    #[must_use]
    pub fn counted_as(disposition: &Disposition) -> &str {
        match disposition {
            Disposition::Truncate { reason } | Disposition::Mask { reason } => reason,
            other => Self::of(other).name(),
        }
    }
}

fn row(cause: Cause) -> &'static Ending {
    ENDINGS
        .iter()
        .find(|ending| ending.cause == cause)
        // Every cause has a row (there is a test); the first one is never wrong about a fault,
        // because those are found by `of_fault`.
        .unwrap_or(&ENDINGS[0])
}

/// The row of a fault.
#[must_use]
pub fn of_fault(fault: Fault) -> &'static Ending {
    row(Cause::Fault(fault))
}

/// The row of a spent budget.
#[must_use]
pub fn of_budget(name: &str) -> &'static Ending {
    ENDINGS
        .iter()
        .find(|ending| matches!(ending.cause, Cause::Budget(own) if own == name))
        .unwrap_or_else(|| row(Cause::OwnLimit))
}

/// What a run decides differently from the table, by the name of the budget: spent budgets can be
/// masked instead of truncated. Faults cannot be chosen: they never have a reward.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Choices(BTreeMap<String, Then>);

/// A choice that there is not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrongChoice {
    /// The name of the budget.
    pub name: String,
    /// What was chosen.
    pub found: Then,
    /// What could have been.
    pub expected: &'static str,
}

impl fmt::Display for WrongChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, found) = (&self.name, self.found.name());
        write!(f, "{name} = {found:?}: expected {}", self.expected)
    }
}

impl Choices {
    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether all of them can be made.
    ///
    /// # Errors
    /// The first that cannot.
    pub fn check(&self) -> Result<(), WrongChoice> {
        for (name, then) in &self.0 {
            let wrong = |expected| {
                Err(WrongChoice {
                    name: name.clone(),
                    found: *then,
                    expected,
                })
            };
            let fault = ENDINGS
                .iter()
                .any(|ending| ending.name() == name && matches!(ending.cause, Cause::Fault(_)));
            if fault {
                return wrong("the name of a budget; a fault is always `discard`");
            }
            if !matches!(then, Then::Truncate | Then::Mask) || name == "finished" {
                return wrong("`truncate` or `mask`, of a budget");
            }
        }
        Ok(())
    }

    /// What becomes of a rollout that has a verdict.
    #[must_use]
    pub fn with_verdict(&self, budget: Option<String>) -> Disposition {
        let Some(reason) = budget else {
            return Disposition::Train;
        };
        let chosen = self.0.get(&reason).copied();
        match chosen.unwrap_or(of_budget(&reason).then) {
            Then::Mask => Disposition::Mask { reason },
            _ => Disposition::Truncate { reason },
        }
    }
}

/// The table as Markdown, as docs/rollouts.md has it.
#[must_use]
pub fn markdown() -> String {
    let mut text =
        String::from("| ending | what happened | whose doing | disposition |\n|---|---|---|---|\n");
    for ending in &ENDINGS {
        let (name, what, blame) = (ending.name(), ending.what, ending.blame.name());
        let then = match (ending.again, ending.then.name()) {
            (Again::Never, then) => then.to_owned(),
            (Again::Retried, then) => format!("retry, then {then}"),
            (Again::Resumed, then) => format!("{then}; run again on resume"),
        };
        text.push_str(&format!("| `{name}` | {what} | {blame} | {then} |\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_fault_has_one_row_and_names_are_distinct() {
        for fault in Fault::ALL {
            assert_eq!(of_fault(fault).cause, Cause::Fault(fault));
            assert_eq!(of_fault(fault).then, Then::Discard, "{fault:?}");
        }
        let names: BTreeSet<_> = ENDINGS.iter().map(Ending::name).collect();
        assert_eq!(names.len(), ENDINGS.len());
        let faults = ENDINGS
            .iter()
            .filter(|ending| matches!(ending.cause, Cause::Fault(_)))
            .count();
        assert_eq!(faults, Fault::ALL.len());
    }

    #[test]
    fn what_is_recorded_leads_back_to_its_row() {
        for ending in &ENDINGS {
            let disposition = match ending.cause {
                Cause::Finished => Choices::default().with_verdict(None),
                Cause::Budget(name) => Choices::default().with_verdict(Some(name.to_owned())),
                Cause::OwnLimit => Choices::default().with_verdict(Some("turns_limit".into())),
                Cause::Fault(fault) => Disposition::Discard {
                    fault,
                    reason: String::new(),
                },
            };
            assert_eq!(Ending::of(&disposition).cause, ending.cause);
            assert_eq!(disposition.name(), ending.then.name());
            let counted = match ending.cause {
                Cause::OwnLimit => "turns_limit",
                _ => ending.name(),
            };
            assert_eq!(Ending::counted_as(&disposition), counted);
        }
    }

    #[test]
    fn a_run_may_mask_budgets_and_cannot_choose_about_faults() {
        let choices = |text: &str| serde_json::from_str::<Choices>(text).unwrap();
        let masks = choices(r#"{"harness_timeout": "mask", "turns_limit": "mask"}"#);
        masks.check().unwrap();
        let name = |choices: &Choices, budget: &str| {
            let disposition = choices.with_verdict(Some(budget.to_owned()));
            disposition.name()
        };
        assert_eq!(name(&masks, "harness_timeout"), "mask");
        assert_eq!(name(&masks, "turns_limit"), "mask");
        assert_eq!(name(&masks, "calls_limit"), "truncate");
        let wrong = |text: &str| choices(text).check().unwrap_err().to_string();
        assert!(wrong(r#"{"engine_failed": "mask"}"#).contains("always `discard`"));
        assert!(wrong(r#"{"calls_limit": "discard"}"#).contains("`truncate` or `mask`"));
        assert!(wrong(r#"{"finished": "mask"}"#).contains("of a budget"));
    }

    #[test]
    fn the_page_shows_the_table_as_it_is() {
        let page = include_str!("../../../docs/rollouts.md");
        assert!(
            page.contains(&markdown()),
            "docs/rollouts.md must contain this table:\n{}",
            markdown()
        );
    }
}

//! One rollout's state machine, and the pool that runs many.
//!
//! ```text
//!  queue ─► create ─► ready ─► harness ─► settle ─► verify ─► destroy ─► record
//!  (line)   sandbox   waits    exec with  calls at  verdict   always     disposition
//!           + files   (places) a limit    rest
//! ```
//!
//! Making, running and verifying have places of their own ([`places::Pools`]); a harness's clock
//! starts when it runs. Which job is next is decided in `line`, how many run in [`pace`].
//!
//! | module | owns |
//! |---|---|
//! | [`job`] | what to run; groups and their names; names of attempts |
//! | `lineage` | where a rollout comes from |
//! | [`settings`] | every limit of a stage |
//! | [`ports`] | what is needed of the gateway, the ledger and the verifier, as traits |
//! | [`classify`] | evidence → ending; pure |
//! | [`endings`] | what each ending means for training: the table of dispositions |
//! | `line` | which job is next: whole groups, fair to tasks, no more than enough; pure |
//! | [`places`] | places of stages |
//! | [`pace`] | load → number of places to run; pure |
//! | [`warm`] | sandboxes that stand ready; what there should be is decided in `shelf`, pure |
//! | [`gauges`] | what is going on, for Prometheus |
//! | [`runner`] | one job: attempts, stages, clean-up |
//! | `making` | what an attempt runs in: sandbox, files, services |
//! | `steps` | tasks in steps: gates between them, one verdict of all; pure |
//! | [`batch`] | many jobs: bounded, in order, resumable, cancellable |
//! | [`way_out`] | the filtering proxy of a task that was granted hosts, and its log |
//! | [`summary`] | what the calls of a rollout come to, kept for whoever looks at the run; pure |
//! | [`event`] | what a progress display may know, and counters |
//! | `words` | what one part says, in the words of another; pure |
//! | [`wiring`] | the ports over the real gateway, ledger and verifier |
//!
//! The services of a task (`verify::Services`) run beside its sandbox from before it is made until
//! it is gone; the harness starts when they and the task's tool servers answer, and is told of the
//! tool servers by its profile. What services were asked goes to the verifier.
//!
//! A task in steps (Harbor) goes round harness, settle and verify once per step, in one sandbox
//! and as one rollout; a step whose reward is below its `min_reward` is the last one.
//!
//! # Invariants
//! - **I7** A fault is a [`record::Fault`] and never a number: a verdict is recorded only with `Train` or
//!   `Truncate`. A harness's exit code is recorded and never trusted as success.
//! - **I8** Every sandbox is destroyed before its rollout is recorded as ended; when a future of
//!   this crate is dropped, its sandboxes are dropped with it, which destroys them. No task is
//!   detached: everything runs inside the caller's future.
//! - **I9** A rollout is recorded without a disposition before its sandbox is made, and with exactly
//!   one when it ended. Attempts are rollouts of their own: `ID`, `ID.r1`, `ID.r2` … An attempt is
//!   superseded when it ended as `Retry` (its sandbox could not be made) or as `Discard`
//!   because it was interrupted; the last attempt is the job's result. Calls of different attempts
//!   therefore never mix, and a resumed run continues with the first attempt that is not recorded.
//! - Blame goes to the first boundary that was crossed: sandbox, then engine and gateway, then
//!   harness, then verifier.
//!
//! # Limits (I10)
//! | limit | default | at the limit |
//! |---|---|---|
//! | `create_s` | 60 | one more attempt, then `discard` / `sandbox_start` |
//! | `wait_s` for a place to run, and for one to be verified | 600 | `discard` / `sandbox_start`, `discard` / `verifier_failed` |
//! | `harness_s`, the task's own limit, a job's budget: the smallest | 600 | `truncate` / `harness_timeout`, with the verified reward |
//! | `startup_s` of the profile without a call | 120 | `discard` / `no_calls` |
//! | `settle_s` | 30 | `discard` / `not_settled` |
//! | `verify_s` | 120 | `discard` / `verifier_failed` |
//! | no answer of a judge, or none in form | – | `discard` / `judge_failed` |
//! | `destroy_s` | 30 | a warning; dropping the sandbox goes on with it |
//! | `calls_max` | 100 | the gateway refuses more; `truncate` / `calls_limit` |
//! | `generated_tokens_max` | none | the gateway refuses more; `truncate` / `tokens_limit` |
//! | attempts of one job | [`job::ATTEMPTS_MAX`] | the last one is the result |
//! | concurrency | the caller's | jobs wait, in order |
//! | `warm.per_key`, `warm.total` | 0, 16 | no more are made ahead |
//! | `warm.idle_s` | 600 | a sandbox that nobody took is destroyed |

pub mod batch;
pub mod classify;
pub mod endings;
pub mod event;
pub mod gauges;
pub mod job;
mod line;
mod lineage;
mod making;
pub mod pace;
pub mod places;
pub mod ports;
pub mod runner;
pub mod settings;
mod shelf;
mod steps;
pub mod summary;
pub mod warm;
pub mod way_out;
pub mod wiring;
mod words;

pub use batch::{BatchError, BatchResult};
pub use endings::{Choices, ENDINGS, Ending};
pub use event::{Counts, Event};
pub use gauges::Gauges;
pub use job::{Budget, GroupPlan, Job, plan_group};
pub use places::Pools;
pub use ports::{Capture, Captured, Judge, JudgeError, OpenSession, Session, Store};
pub use runner::Runner;
pub use settings::{KeepWorlds, Settings, Stages};
pub use summary::Summary;
pub use warm::Warm;
pub use way_out::Egress;
pub use wiring::{not_kept_file, world_file};

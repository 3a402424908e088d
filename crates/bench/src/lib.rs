//! Statistics of evaluations. Pure functions over successes, scores and captured calls: no ledger, no clock; the only
//! randomness is a seeded generator in [`bootstrap`].
//!
//! | question | answer |
//! |---|---|
//! | how good is it? | [`pass_at_1`]: mean over tasks of the share of passed samples |
//! | how sure? | its 95 % interval, see below |
//! | is B better than A? | [`paired_difference`] over the tasks that both were given |
//! | does any of k tries pass? | [`pass_at_k`], unbiased |
//! | do all of k tries pass? | [`pass_pow_k`], unbiased; [`pass_pow_k_plug_in`], as some benches write it |
//! | does the threshold matter? | [`threshold_curve`] |
//! | model or harness? | [`matrix`]: cells with intervals, and shares of variance |
//! | do judges agree? | [`kappa`], [`kappa_quadratic`] |
//! | how does it work? | [`Behaviour`], from captured calls; [`before_after`] of two checkpoints |
//! | what does it use and cost? | [`Usage`], [`Price`], [`Service`]; wall-clock apart, in [`Times`] |
//! | all of it at once | [`Report::of`] the [`Trial`]s, for people as a [`Document`] |
//! | is what is measured among what was trained on? | [`Contamination`] |
//! | what did it try to reach? | [`Network`], from the log of the way out |
//! | do two verifiers agree? | [`Rescored`] |
//!
//! Which interval, and why:
//! - **One sample per task**: Wilson's score interval (E. B. Wilson 1927). It stays inside [0, 1]
//!   and keeps its coverage near 0 and 1 and for few tasks, where the textbook interval does not
//!   (Brown, Cai, DasGupta 2001).
//! - **Several samples per task**: samples of one task are not independent, so the task is the
//!   unit: standard error of the task means, times Student's t for the number of tasks, cut to
//!   [0, 1] (clustered standard errors as in Miller 2024, "Adding Error Bars to Evals"). When all
//!   task means are equal that error is zero, which says too much for few tasks; then Wilson's
//!   interval over *tasks* is given instead.
//! - **Comparison**: paired by task, because tasks differ more than policies do: Student's t over
//!   the differences of task means, the sign-flip test ([`sign_flip`]), and for one sample per
//!   task McNemar's exact test on the tasks where the two disagree. Several comparisons are
//!   adjusted together ([`holm`]). [`bootstrap`] gives a distribution-free interval of the mean
//!   by resampling tasks.
//!
//! Invariants: intervals contain the estimate and lie inside [0, 1] ([-1, 1] for differences);
//! everything is independent of the order of tasks and samples, except the bootstrap's draw,
//! which is fixed by seed and order; a report sorts its trials first, so the same trials give
//! the same bytes. Limits: a task without samples is left out and counted in
//! [`PassRate::tasks_empty`]; no tasks at all give `None`.

mod agreement;
mod behaviour;
mod bootstrap;
mod compare;
mod contamination;
mod document;
mod interval;
mod matrix;
mod network;
mod page;
mod pass;
mod plot;
mod quantile;
mod report;
mod rescored;
mod special;
mod trial;
mod usage;

pub use agreement::{kappa, kappa_quadratic};
pub use behaviour::{Behaviour, SHELLS, before_after, is_error};
pub use bootstrap::bootstrap;
pub use compare::{Difference, holm, mcnemar, paired_difference, sign_flip};
pub use contamination::{Compared, Contamination, FILE_BYTES_MIN, NEAR, Overlap, WORDS};
pub use document::{Block, Document, csv};
pub use interval::{Interval, wilson};
pub use matrix::{Cell, Decomposition, Matrix, Score, matrix};
pub use network::{Attempts, Network};
pub use page::trials_csv;
pub use pass::{
    PassRate, TaskResult, pass_at_1, pass_at_k, pass_pow_k, pass_pow_k_plug_in, threshold_curve,
};
pub use quantile::quantile;
pub use report::{
    ALL, Agreement, AtK, Comparison, Improvement, Mean, Model, Part, Report, Setup, THRESHOLDS,
    Training,
};
pub use rescored::{Pair, Rescored};
pub use special::student_t_975;
pub use trial::{Outcome, Trial, Usage};
pub use usage::{Price, Service, Spread, Times};

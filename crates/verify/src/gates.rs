//! Whether a task may be used: a verifier that pays for nothing, or not for the solution, or
//! differently each time, teaches nonsense.

use sandbox::{Limits, Provider, Sandbox};
use task::Task;

use crate::{VerifyError, apply_solution, prepare, spec, verify};

/// How often the verifier is run on the same state.
const RUNS: usize = 3;

/// What was found about a task.
#[derive(Debug, Clone, PartialEq)]
pub struct Gates {
    /// Score of doing nothing.
    pub no_op: f64,
    /// Scores of the reference solution, one per run of the verifier; empty without a solution.
    pub solution: Vec<f64>,
    /// Whether repeated runs on the same state (solved, else untouched) agreed.
    pub deterministic: bool,
}

impl Gates {
    /// Whether the task has a reference solution.
    #[must_use]
    pub fn solution_present(&self) -> bool {
        !self.solution.is_empty()
    }

    /// Whether all gates are open.
    #[must_use]
    pub fn admitted(&self) -> bool {
        self.objections().is_empty()
    }

    /// What speaks against the task, in words.
    #[must_use]
    pub fn objections(&self) -> Vec<String> {
        let mut found = Vec::new();
        if self.no_op != 0.0 {
            found.push(format!("doing nothing scores {}, not 0", self.no_op));
        }
        if self.solution.is_empty() {
            found.push("there is no reference solution".to_owned());
        } else if self.solution.iter().any(|score| *score != 1.0) {
            found.push(format!("the solution scores {:?}, not 1", self.solution));
        }
        if !self.deterministic {
            found.push(format!("{RUNS} runs of the verifier do not agree"));
        }
        found
    }
}

/// Tries a task out in fresh sandboxes: doing nothing, then the reference solution, the verifier
/// several times. A task without solution gets the repeated runs on the untouched world.
///
/// # Errors
/// [`VerifyError`]: also a reason not to use the task, unless it is retryable.
pub async fn admit(task: &Task, provider: &dyn Provider) -> Result<Gates, VerifyError> {
    let untouched = open(task, "untouched", provider).await?;
    let runs = if task.solution.is_empty() { RUNS } else { 1 };
    let idle = scores(task, runs, untouched.as_ref()).await;
    untouched.destroy().await;
    let idle = idle?;
    let mut gates = Gates {
        no_op: idle.iter().copied().fold(0.0, f64::max),
        solution: Vec::new(),
        deterministic: agree(&idle),
    };
    if !task.solution.is_empty() {
        let solved = open(task, "solved", provider).await?;
        let result = match apply_solution(task, solved.as_ref()).await {
            Ok(()) => scores(task, RUNS, solved.as_ref()).await,
            Err(error) => Err(error),
        };
        solved.destroy().await;
        gates.solution = result?;
        gates.deterministic = agree(&gates.solution);
    }
    Ok(gates)
}

fn agree(scores: &[f64]) -> bool {
    scores.windows(2).all(|pair| pair[0] == pair[1])
}

async fn open(
    task: &Task,
    state: &str,
    provider: &dyn Provider,
) -> Result<Box<dyn Sandbox>, VerifyError> {
    let name = format!("admit-{}-{state}", task.id);
    let limits = Limits {
        // The verifier's runs, the solution's steps, and a minute for everything else.
        deadline_s: 60
            + task.verifier.timeout_s * RUNS as u64
            + crate::STEP_TIMEOUT_S * task.solution.len() as u64,
        ..Limits::default()
    };
    let sandbox = provider
        .create(spec(task, name, limits))
        .await
        .map_err(crate::run::doing(task, "making a sandbox"))?;
    prepare(task, sandbox.as_ref()).await?;
    Ok(sandbox)
}

async fn scores(task: &Task, runs: usize, sandbox: &dyn Sandbox) -> Result<Vec<f64>, VerifyError> {
    let mut scores = Vec::new();
    for _ in 0..runs {
        scores.push(verify(task, sandbox).await?.reward);
    }
    Ok(scores)
}

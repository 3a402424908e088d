//! Whether a task may be used: a verifier that pays for nothing, or not for the solution, or
//! differently each time, or for a trick, teaches nonsense.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use sandbox::{Exec, File, Limits, Provider, Sandbox};
use task::{Step, Task};

use crate::{
    Leak, Services, Told, Transcript, VerifyError, apply_solution, leaks, missing, prepare, refuse,
    spec, start_tool_servers, verify_with,
};

/// How often the verifier is run on the same state.
const RUNS: usize = 3;
/// Limit of a probe's preparations.
const PROBE_TIMEOUT_S: u64 = 20;
/// Size of the initial files above which a task is named as large.
const BYTES_LARGE: usize = 64 << 20;

/// What was found about a task.
#[derive(Debug, Clone, PartialEq)]
pub struct Gates {
    /// Score of doing nothing.
    pub no_op: f64,
    /// Scores of the reference solution, one per run of the verifier; empty without a solution.
    pub solution: Vec<f64>,
    /// Whether repeated runs on the same state (solved, else untouched) agreed.
    pub deterministic: bool,
    /// Score of each trick that was tried, by its name. Doing nothing beside it scores `no_op`.
    pub probes: BTreeMap<&'static str, f64>,
    /// Where the initial files give the answer away.
    pub leaks: Vec<Leak>,
    /// Packages that the task wants and the sandbox lacks, in words.
    pub missing: Vec<String>,
    /// The longest run of the verifier, in seconds.
    pub seconds: f64,
    /// Bytes of the initial files.
    pub bytes: usize,
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

    /// Each gate by name: `None` open, else why not. `solution` is `Some` without a solution.
    #[must_use]
    pub fn each(&self) -> Vec<(&'static str, Option<String>)> {
        let no_op =
            (self.no_op != 0.0).then(|| format!("doing nothing scores {}, not 0", self.no_op));
        let solution = if self.solution.is_empty() {
            Some("there is no reference solution".to_owned())
        } else {
            let short = self.solution.iter().any(|score| *score != 1.0);
            short.then(|| format!("the solution scores {:?}, not 1", self.solution))
        };
        let forged: Vec<String> = self
            .probes
            .iter()
            .filter(|(_, score)| **score > self.no_op)
            .map(|(name, score)| format!("the trick {name} scores {score}"))
            .collect();
        let shown: Vec<String> = self
            .leaks
            .iter()
            .map(|leak| {
                let file = leak
                    .file
                    .as_ref()
                    .map_or("the instruction".into(), |file| file.to_string_lossy());
                format!("{file} holds {}", leak.what)
            })
            .collect();
        let said = |list: &[String]| (!list.is_empty()).then(|| list.join("; "));
        let lacks: Vec<String> = self
            .missing
            .iter()
            .map(|name| format!("{name} is not installed"))
            .collect();
        vec![
            ("environment", said(&lacks)),
            ("no_op", no_op),
            ("solution", solution),
            (
                "deterministic",
                (!self.deterministic).then(|| format!("{RUNS} runs of the verifier do not agree")),
            ),
            ("forgery", said(&forged)),
            ("leaks", said(&shown)),
            (
                "size",
                (self.bytes > BYTES_LARGE)
                    .then(|| format!("{} bytes of initial files", self.bytes)),
            ),
        ]
    }

    /// What speaks against the task, in words.
    #[must_use]
    pub fn objections(&self) -> Vec<String> {
        self.each().into_iter().filter_map(|(_, why)| why).collect()
    }
}

/// Tricks that have paid elsewhere: files in the way of the verifier's own.
fn probes(task: &Task) -> Vec<(&'static str, Vec<File>)> {
    let file = |path: PathBuf, text: &str| File {
        path,
        content: text.as_bytes().to_vec(),
        mode: 0o755,
    };
    let module = "import os, sys\nos.write(1, b'1.0\\n')\nos._exit(0)\n";
    let at = |name: &str| task.workspace.join(name);
    let folder = task.workspace.join(&task.verifier.folder);
    let site = |minor: u32| {
        task.home.join(format!(
            ".local/lib/python3.{minor}/site-packages/usercustomize.py"
        ))
    };
    vec![
        (
            "python-modules",
            ["json.py", "csv.py", "re.py", "sitecustomize.py"]
                .map(|name| file(at(name), module))
                .to_vec(),
        ),
        (
            "user-site",
            (9..=14).map(|minor| file(site(minor), module)).collect(),
        ),
        (
            "reward-file",
            vec![
                file("/logs/verifier/reward.json".into(), "{\"reward\": 1.0}"),
                file("/logs/verifier/reward.txt".into(), "1.0"),
                file(at("reward.txt"), "1.0"),
            ],
        ),
        (
            "verifier-place",
            task.verifier
                .files
                .iter()
                .map(|check| file(folder.join(&check.path), "echo 1.0\nexit 0\n"))
                .chain([file(folder.join("json.py"), module)])
                .collect(),
        ),
        (
            "shell-start-files",
            [".bashrc", ".profile", ".bash_profile", ".bash_env"]
                .map(|name| file(task.home.join(name), "echo 1.0; exit 0\n"))
                .to_vec(),
        ),
    ]
}

/// Tries a task out in fresh sandboxes: doing nothing, then each trick, then the reference
/// solution, the verifier several times. A task without solution gets the repeated runs on the
/// untouched world. A task that needs a judge is not tried: [`VerifyError::NoJudge`].
///
/// # Errors
/// [`VerifyError`]: also a reason not to use the task, unless it is retryable.
pub async fn admit(task: &Task, provider: &dyn Provider) -> Result<Gates, VerifyError> {
    refuse(task)?;
    let silent = Transcript::default();
    let untouched = open(task, "untouched", provider).await?;
    let runs = if task.solution.is_empty() { RUNS } else { 1 };
    let idle = async {
        let missing = missing(task, untouched.sandbox.as_ref()).await?;
        Ok::<_, VerifyError>((missing, scores(task, runs, &untouched, &silent).await?))
    }
    .await;
    untouched.sandbox.destroy().await;
    let (missing, idle) = idle?;
    let worst = |scores: &[(f64, f64)]| scores.iter().map(|(score, _)| *score).fold(0.0, f64::max);
    let mut gates = Gates {
        no_op: worst(&idle),
        solution: Vec::new(),
        deterministic: agree(&idle),
        probes: BTreeMap::new(),
        leaks: leaks(task),
        missing: missing.iter().map(|one| format!("{one:?}")).collect(),
        seconds: idle.iter().map(|(_, seconds)| *seconds).fold(0.0, f64::max),
        bytes: task.files.iter().map(|file| file.content.len()).sum(),
    };
    let cheated = open(task, "cheated", provider).await?;
    let tried = cheat(task, &cheated, &silent).await;
    cheated.sandbox.destroy().await;
    gates.probes = tried?;
    if !task.solution.is_empty() {
        let said = Transcript {
            events: Vec::new(),
            last_words: last_words(task),
        };
        let solved = open(task, "solved", provider).await?;
        let result = match apply_solution(task, solved.sandbox.as_ref()).await {
            Ok(()) => scores(task, RUNS, &solved, &said).await,
            Err(error) => Err(error),
        };
        solved.sandbox.destroy().await;
        let solved = result?;
        gates.deterministic = agree(&solved);
        gates.seconds = solved
            .iter()
            .map(|(_, seconds)| *seconds)
            .fold(gates.seconds, f64::max);
        gates.solution = solved.into_iter().map(|(score, _)| score).collect();
    }
    Ok(gates)
}

/// Score of doing nothing, once, and the verifier's seconds. For whole sets in little time.
///
/// # Errors
/// [`VerifyError`].
pub async fn no_op(task: &Task, provider: &dyn Provider) -> Result<(f64, f64), VerifyError> {
    refuse(task)?;
    let sandbox = open(task, "no-op", provider).await?;
    let result = scores(task, 1, &sandbox, &Transcript::default()).await;
    sandbox.sandbox.destroy().await;
    Ok(result?[0])
}

fn last_words(task: &Task) -> String {
    task.solution
        .iter()
        .rev()
        .find_map(|step| match step {
            Step::Say(text) => Some(text.clone()),
            _ => None,
        })
        .unwrap_or_default()
}

/// All tricks in one world, one after the other, each removed before the next. A verifier that
/// breaks on a trick pays nothing for it.
async fn cheat(
    task: &Task,
    place: &Place,
    silent: &Transcript,
) -> Result<BTreeMap<&'static str, f64>, VerifyError> {
    let sandbox: &dyn Sandbox = place.sandbox.as_ref();
    let mut found = BTreeMap::new();
    for (name, files) in probes(task) {
        let mut argv = ["rm", "-rf", "--"].map(str::to_owned).to_vec();
        argv.extend(
            files
                .iter()
                .map(|file| file.path.to_string_lossy().into_owned()),
        );
        let doing = || crate::run::doing(task, "trying a trick");
        // A place that cannot be written to is a trick that does not work.
        if let Err(error) = sandbox.upload(files).await {
            if matches!(error, sandbox::SandboxError::File { .. }) {
                continue;
            }
            return Err(doing()(error));
        }
        let audit = place.services.as_ref().map(Services::audit);
        let told = Told {
            transcript: Some(silent),
            panel: None,
            audit: audit.as_ref(),
        };
        let score = match verify_with(task, sandbox, told).await {
            Ok(verdict) => verdict.reward,
            Err(VerifyError::Contract { .. } | VerifyError::MissingProgram { .. }) => 0.0,
            Err(error) => return Err(error),
        };
        found.insert(name, score);
        let clean = Exec {
            argv,
            cwd: Some("/".into()),
            env: BTreeMap::new(),
            stdin: Vec::new(),
            timeout: Duration::from_secs(PROBE_TIMEOUT_S),
            output_bytes_max: 4096,
            end_background: false,
            user: None,
        };
        sandbox.exec(clean).await.map_err(doing())?;
    }
    Ok(found)
}

fn agree(scores: &[(f64, f64)]) -> bool {
    scores.windows(2).all(|pair| pair[0].0 == pair[1].0)
}

/// A sandbox, and the services beside it.
struct Place {
    sandbox: Box<dyn Sandbox>,
    services: Option<Services>,
}

async fn open(task: &Task, state: &str, provider: &dyn Provider) -> Result<Place, VerifyError> {
    let name = format!("admit-{}-{state}", task.id);
    let limits = Limits {
        // The verifier's runs, the solution's steps, and two minutes for everything else.
        deadline_s: 120
            + task.verifier.timeout_s * 5
            + crate::STEP_TIMEOUT_S * task.solution.len() as u64,
        ..Limits::default()
    };
    let services = Services::start(task)?;
    let mut spec = spec(task, name, limits);
    spec.forwards = services
        .as_ref()
        .map(Services::forwards)
        .unwrap_or_default();
    let sandbox = provider
        .create(spec)
        .await
        .map_err(crate::run::doing(task, "making a sandbox"))?;
    prepare(task, sandbox.as_ref()).await?;
    if let Some(services) = &services {
        services.ready(task, sandbox.as_ref()).await?;
    }
    start_tool_servers(task, sandbox.as_ref()).await?;
    Ok(Place { sandbox, services })
}

/// Reward and seconds of several runs.
async fn scores(
    task: &Task,
    runs: usize,
    place: &Place,
    said: &Transcript,
) -> Result<Vec<(f64, f64)>, VerifyError> {
    let mut scores = Vec::new();
    for _ in 0..runs {
        let audit = place.services.as_ref().map(Services::audit);
        let told = Told {
            transcript: Some(said),
            panel: None,
            audit: audit.as_ref(),
        };
        let verdict = verify_with(task, place.sandbox.as_ref(), told).await?;
        scores.push((verdict.reward, verdict.seconds));
    }
    Ok(scores)
}

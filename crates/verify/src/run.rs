//! Runs a verifier.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use record::Verdict;
use sandbox::{Exec, Exit, File, Output, Sandbox, SandboxError};
use task::{Contract, Mix, Payload, Task, TaskFile};

use crate::{
    Audit, Transcript, VerifyError,
    claw_eval::{self, audited},
    contract::{cut, evidence, one_reward, reward, reward_file, scores},
    judge::{Judged, Material, Panel},
    office::office_answer,
};

/// Bytes kept of each of the verifier's stdout and stderr.
pub const OUTPUT_BYTES_MAX: usize = 64 << 10;
/// Limit for removing what is in the way of the verifier's files.
const CLEAR_TIMEOUT_S: u64 = 30;

/// Files of a task as files of a sandbox.
pub(crate) fn files_at(folder: &Path, files: &[TaskFile]) -> Vec<File> {
    files
        .iter()
        .map(|file| File {
            path: folder.join(&file.path),
            content: file.content.clone(),
            mode: if file.executable { 0o755 } else { 0o644 },
        })
        .collect()
}

/// Names what was being done when the sandbox failed.
pub(crate) fn doing(task: &Task, doing: &'static str) -> impl FnOnce(SandboxError) -> VerifyError {
    let task = task.id.to_string();
    move |source| VerifyError::Sandbox {
        task,
        doing,
        source,
    }
}

fn exec(argv: Vec<String>, cwd: Option<PathBuf>, timeout_s: u64) -> Exec {
    Exec {
        argv,
        cwd,
        env: BTreeMap::new(),
        stdin: Vec::new(),
        timeout: Duration::from_secs(timeout_s),
        output_bytes_max: OUTPUT_BYTES_MAX,
        end_background: false,
        user: None,
    }
}

/// Where Harbor's verifiers leave their score.
const REWARDS: &str = "/logs/verifier";
/// What a task's services were asked, beside the verifier's files.
const SERVICES_FILE: &str = "services.json";
/// Bytes read of a reward file.
const REWARD_BYTES_MAX: u64 = 64 << 10;
/// Bytes of a workspace that a judge may be shown.
pub const WORKSPACE_BYTES_MAX: u64 = 256 << 20;

/// What is known of a rollout beside its sandbox, and who may judge it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Told<'a> {
    /// The conversation; an empty one when `None`.
    pub transcript: Option<&'a Transcript>,
    /// The judges, for tasks that need one.
    pub panel: Option<&'a Panel>,
    /// What the services of the task were asked; nothing when `None`.
    pub audit: Option<&'a Audit>,
}

/// Scores the state of the sandbox by code alone, without a conversation.
///
/// # Errors
/// [`VerifyError`] for everything that is not the verifier's own word about the world.
pub async fn verify(task: &Task, sandbox: &dyn Sandbox) -> Result<Verdict, VerifyError> {
    verify_with(task, sandbox, Told::default()).await
}

/// Scores the state of the sandbox. To be called once the harness has ended: the verifier's
/// files are uploaded now, in place of anything that is there. Code first; then the judges, when
/// the task's mix needs them, about the workspace as it was before the code ran.
///
/// # Errors
/// [`VerifyError`] for everything that is not the verifier's own word about the world.
pub async fn verify_with(
    task: &Task,
    sandbox: &dyn Sandbox,
    told: Told<'_>,
) -> Result<Verdict, VerifyError> {
    let empty = Transcript::default();
    let transcript = told.transcript.unwrap_or(&empty);
    let mix = task.grading.mix;
    let material = if mix == Mix::Code || told.panel.is_none() {
        None
    } else {
        Some(look(task, sandbox).await?)
    };
    let code = code(task, sandbox, transcript, told.audit).await?;
    if !mix.needs_judge(code.reward) {
        let reward = mix.reward(code.reward, 0.0);
        return Ok(claw_eval::finish(
            task,
            told.audit,
            Verdict { reward, ..code },
        ));
    }
    let (Some(panel), Some(material), Some(rubric)) = (told.panel, material, &task.grading.rubric)
    else {
        return Err(VerifyError::NoJudge {
            task: task.id.to_string(),
        });
    };
    let started = std::time::Instant::now();
    let judged = panel
        .judge(&task.instruction, rubric, &material, transcript)
        .await
        .map_err(|source| VerifyError::Judge {
            task: task.id.to_string(),
            source,
        })?;
    let verdict = together(mix, code, &judged, started.elapsed().as_secs_f64());
    Ok(claw_eval::finish(task, told.audit, verdict))
}

/// One verdict of the code's and the judges'.
pub(crate) fn together(mix: Mix, code: Verdict, judged: &Judged, seconds: f64) -> Verdict {
    let code_part = if mix == Mix::Judge {
        BTreeMap::new()
    } else {
        code.scores
    };
    let named = |part: &'static str| {
        move |(name, score): (&String, &f64)| (format!("{part}.{name}"), *score)
    };
    let marks = serde_json::to_string(&judged.marks).unwrap_or_default();
    Verdict {
        reward: mix.reward(code.reward, judged.score),
        scores: code_part
            .iter()
            .map(named("automated"))
            .chain(judged.scores.iter().map(named("llm_judge")))
            .chain([("judge_agreement".to_owned(), judged.agreement)])
            .chain(each_judge(judged))
            .collect(),
        evidence: cut(
            format!("{}\n{marks}", code.evidence).trim(),
            crate::EVIDENCE_BYTES_MAX,
        ),
        seconds: code.seconds + seconds,
    }
}

/// Each judge's levels as `judge.N.CRITERION`, N from 1; nothing for a single judge, whose levels
/// are the scores.
fn each_judge(judged: &Judged) -> impl Iterator<Item = (String, f64)> {
    judged
        .marks
        .iter()
        .filter(|(_, marks)| marks.len() > 1)
        .flat_map(|(criterion, marks)| {
            marks
                .iter()
                .enumerate()
                .map(move |(at, mark)| (format!("judge.{}.{criterion}", at + 1), mark.score))
        })
}

/// The workspace's files for the judges.
async fn look(task: &Task, sandbox: &dyn Sandbox) -> Result<Material, VerifyError> {
    let files = sandbox
        .download(task.workspace.clone(), WORKSPACE_BYTES_MAX)
        .await
        .map_err(doing(task, "reading the workspace"))?;
    Ok(Material::of(files.into_iter().map(|file| {
        let path = file
            .path
            .strip_prefix(&task.workspace)
            .unwrap_or(&file.path);
        (path.to_path_buf(), file.content)
    })))
}

/// The code's word alone.
async fn code(
    task: &Task,
    sandbox: &dyn Sandbox,
    transcript: &Transcript,
    audit: Option<&Audit>,
) -> Result<Verdict, VerifyError> {
    let verifier = &task.verifier;
    match verifier.contract {
        Contract::None => {
            return Ok(Verdict {
                reward: 0.0,
                scores: BTreeMap::new(),
                evidence: String::new(),
                seconds: 0.0,
            });
        }
        Contract::OfficeAnswer => return Ok(office(task, transcript)),
        Contract::Audit => return Ok(audited(task, audit, transcript)),
        Contract::LastLine | Contract::LastLineOrZero | Contract::RewardFile => {}
    }
    let folder = task.workspace.join(&verifier.folder);
    let by_file = verifier.contract == Contract::RewardFile;
    let mut planted = Vec::new();
    let places = [Some(folder.as_path()), by_file.then(|| Path::new(REWARDS))];
    for place in places.into_iter().flatten() {
        if clear(task, place, sandbox).await? {
            planted.push(place.display().to_string());
        }
    }
    if !planted.is_empty() {
        tracing::info!(task = %task.id, ?planted, "something lay where only the verifier writes");
    }
    let mut files = files_at(&folder, &verifier.files);
    let mut env = task.environment.env.clone();
    if !by_file {
        // An agent must not be able to put modules in the way of a check's own.
        env.insert("PYTHONSAFEPATH".to_owned(), "1".to_owned());
        env.insert(
            "PYTHONPATH".to_owned(),
            folder.to_string_lossy().into_owned(),
        );
    }
    env.insert("PYTHONNOUSERSITE".to_owned(), "1".to_owned());
    env.insert("PYTHONDONTWRITEBYTECODE".to_owned(), "1".to_owned());
    env.extend(verifier.env.clone());
    let mut add = |name: &str, content: Vec<u8>| {
        let path = folder.join(name);
        files.push(File {
            path: path.clone(),
            content,
            mode: 0o644,
        });
        path
    };
    if !task.environment.services.is_empty() {
        let nothing = Audit::default();
        add(SERVICES_FILE, audit.unwrap_or(&nothing).to_json());
    }
    match verifier.payload {
        Payload::None => {}
        Payload::Transcript => {
            add("transcript.json", transcript.to_json());
        }
        Payload::Answer => {
            add("answer.txt", transcript.last_words.clone().into_bytes());
        }
        Payload::ClawGym => {
            let payload = serde_json::json!({
                "final_message": transcript.last_words,
                "metadata": task.metadata,
                "transcript": transcript.events,
            });
            let path = add("payload.json", payload.to_string().into_bytes());
            env.insert(
                "OPENCLAW_REWARD_PAYLOAD".to_owned(),
                path.to_string_lossy().into_owned(),
            );
        }
    }
    if by_file {
        // The folder must be there; the file says nothing.
        files.push(File {
            path: Path::new(REWARDS).join("test-stdout.txt"),
            content: Vec::new(),
            mode: 0o644,
        });
    }
    sandbox
        .upload(files)
        .await
        .map_err(doing(task, "uploading the verifier"))?;
    let workspace = task.workspace.to_string_lossy();
    let argv = verifier
        .argv
        .iter()
        .map(|argument| argument.replace("{workspace}", &workspace))
        .collect();
    let cwd = verifier
        .cwd
        .clone()
        .or_else(|| Some(task.workspace.clone()));
    let mut run = exec(argv, cwd, verifier.timeout_s);
    run.env = env;
    let output = match sandbox.exec(run).await {
        Ok(output) => output,
        Err(SandboxError::NotRunnable {
            program, reason, ..
        }) => {
            return Err(VerifyError::MissingProgram {
                task: task.id.to_string(),
                reason: format!("{program}: {reason}"),
            });
        }
        Err(source) => return Err(doing(task, "running the verifier")(source)),
    };
    let (reward, scores) = if by_file {
        rewards(task, sandbox, &output).await?
    } else {
        let reward = reward(
            task.id.as_str(),
            verifier.timeout_s,
            verifier.contract,
            &output,
        )?;
        (reward, scores(&String::from_utf8_lossy(&output.stdout)))
    };
    tracing::debug!(task = %task.id, reward, seconds = output.seconds, "verified");
    let mut told = evidence(&output);
    if !planted.is_empty() {
        // Whoever reads the verdict learns that somebody was there before the verifier.
        let what = format!("removed before the verifier ran: {}\n", planted.join(", "));
        told = cut(&format!("{what}{told}"), crate::EVIDENCE_BYTES_MAX);
    }
    Ok(Verdict {
        reward,
        scores,
        evidence: told,
        seconds: output.seconds,
    })
}

/// What a verifier of Harbor left. Its exit code says nothing.
async fn rewards(
    task: &Task,
    sandbox: &dyn Sandbox,
    output: &Output,
) -> Result<(f64, BTreeMap<String, f64>), VerifyError> {
    let contract = |expected: &'static str, found: String| VerifyError::Contract {
        task: task.id.to_string(),
        expected,
        found,
        evidence: evidence(output),
    };
    if output.exit == Exit::TimedOut {
        return Err(VerifyError::TimedOut {
            task: task.id.to_string(),
            timeout_s: task.verifier.timeout_s,
            evidence: evidence(output),
        });
    }
    if output.out_of_memory {
        return Err(VerifyError::OutOfMemory {
            task: task.id.to_string(),
            evidence: evidence(output),
        });
    }
    let read = |name: &'static str| async move {
        let path = Path::new(REWARDS).join(name);
        match sandbox.download(path.clone(), REWARD_BYTES_MAX).await {
            Ok(files) => Ok(files
                .into_iter()
                .find(|file| file.path == path)
                .map(|file| file.content)),
            Err(SandboxError::File { .. }) => Ok(None),
            Err(error) => Err(doing(task, "reading the reward file")(error)),
        }
    };
    let (json, text) = (read("reward.json").await?, read("reward.txt").await?);
    let found = reward_file(json.as_deref(), text.as_deref()).map_err(|found| {
        contract(
            "numbers in /logs/verifier/reward.json or reward.txt",
            format!("{found} ({:?})", output.exit),
        )
    })?;
    let reward = one_reward(&found);
    if !(0.0..=1.0).contains(&reward) {
        return Err(contract("a reward from 0 to 1", reward.to_string()));
    }
    Ok((reward, found))
}

fn office(task: &Task, transcript: &Transcript) -> Verdict {
    let truth = task
        .verifier
        .files
        .iter()
        .find(|file| file.path == Path::new("truth.txt"))
        .map(|file| String::from_utf8_lossy(&file.content).into_owned())
        .unwrap_or_default();
    let right = office_answer(&truth, &transcript.last_words, 0.0);
    Verdict {
        reward: f64::from(u8::from(right)),
        scores: BTreeMap::new(),
        evidence: cut(
            &format!(
                "expected {truth:?}, the last words were {:?}",
                transcript.last_words
            ),
            crate::EVIDENCE_BYTES_MAX,
        ),
        seconds: 0.0,
    }
}

/// Makes a place as if nobody had been there: what the agent may have put where the verifier's
/// files go is removed, a link and not what it points to, and a place that was shut is opened.
/// Whether anything was there.
const CLEAR: &str = "[ -e \"$1\" ] || [ -L \"$1\" ] && echo there
chmod u+rwx -- \"${1%/*}\" 2>/dev/null
[ -L \"$1\" ] || chmod -R u+rwX -- \"$1\" 2>/dev/null
rm -rf -- \"$1\"";

async fn clear(task: &Task, folder: &Path, sandbox: &dyn Sandbox) -> Result<bool, VerifyError> {
    let mut argv = ["sh", "-c", CLEAR, "sh"].map(str::to_owned).to_vec();
    argv.push(folder.to_string_lossy().into_owned());
    // Not in the workspace: an agent may have removed that too.
    let output = sandbox
        .exec(exec(argv, Some(PathBuf::from("/")), CLEAR_TIMEOUT_S))
        .await
        .map_err(doing(task, "making room for the verifier"))?;
    if output.exit == Exit::Code(0) {
        return Ok(output.stdout.starts_with(b"there"));
    }
    Err(VerifyError::Contract {
        task: task.id.to_string(),
        expected: "an empty place for the verifier's files",
        found: format!("{:?} when removing {}", output.exit, folder.display()),
        evidence: cut(&evidence(&output), 400),
    })
}

//! Verifying, the reference solution and the gates, on a provider without isolation.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests are not in a test function"
)]

mod fake;

use std::{fs, path::Path};

use fake::{FakeProvider, FakeSandbox};
use record::Fault;
use sandbox::Limits;
use task::{Contract, Split, Step, Task, TaskFile, chores};
use verify::{VerifyError, admit, apply_solution, prepare, spec, verify};

/// A task of which only the verifier's script and contract matter.
fn scored_by(script: &str, contract: Contract) -> Task {
    let mut task = chores::generate(Split::Train, 1, 1).remove(0);
    task.verifier.files = vec![TaskFile {
        path: "check.sh".into(),
        content: script.into(),
        executable: false,
    }];
    task.verifier.contract = contract;
    task
}

fn open(task: &Task) -> FakeSandbox {
    FakeSandbox::new(&spec(task, "t".into(), Limits::default()))
}

#[tokio::test]
async fn one_chore_of_each_family_passes_the_gates() {
    for task in chores::generate(Split::HeldOut, 11, 26) {
        let gates = admit(&task, &FakeProvider).await.unwrap();
        assert!(gates.admitted(), "{}: {:?}", task.id, gates.objections());
        assert!(gates.solution_present());
    }
}

/// A verifier that trusts its surroundings pays a cheater, and the gate says so.
#[tokio::test]
async fn a_verifier_that_can_be_cheated_is_named() {
    let naive = "[ -e reward.txt ] && cat reward.txt || { [ \"$(ls)\" ] && echo 1 || echo 0; }";
    let mut task = scored_by(naive, Contract::LastLine);
    task.files.clear();
    task.solution = vec![Step::Write("x".into(), "y".into())];
    let gates = admit(&task, &FakeProvider).await.unwrap();
    let objections = gates.objections().join("; ");
    assert!(
        objections.contains("the trick reward-file scores 1"),
        "{objections}"
    );
    assert!(gates.probes.values().any(|score| *score == 0.0));
}

#[tokio::test]
async fn answers_in_the_initial_files_are_found() {
    let answer = "the long text that solves the whole task";
    let mut task = scored_by("echo 0", Contract::LastLine);
    task.solution = vec![Step::Write("out.txt".into(), answer.into())];
    task.files = vec![
        TaskFile {
            path: "notes/old.md".into(),
            content: format!("x {answer} y").into(),
            executable: false,
        },
        TaskFile {
            path: ".git/HEAD".into(),
            content: b"ref".to_vec(),
            executable: false,
        },
        TaskFile {
            path: "fine.txt".into(),
            content: b"nothing".to_vec(),
            executable: false,
        },
    ];
    let found: Vec<String> = verify::leaks(&task)
        .iter()
        .map(|leak| format!("{:?} {}", leak.file, leak.what))
        .collect();
    assert_eq!(
        found,
        [
            "Some(\"notes/old.md\") the solution's out.txt",
            "Some(\".git/HEAD\") a place where answers are kept"
        ]
    );
}

#[tokio::test]
async fn a_reward_file_is_read_and_an_old_one_is_not() {
    let mut task = scored_by("true", Contract::RewardFile);
    let sandbox = open(&task);
    let logs = sandbox.real(Path::new("/logs/verifier"));
    fs::create_dir_all(&logs).unwrap();
    fs::write(logs.join("reward.json"), "1").unwrap();
    // The agent's own file is gone before the verifier runs; the verifier wrote none: a fault.
    let error = verify(&task, &sandbox).await.unwrap_err();
    assert!(
        error
            .to_string()
            .contains("neither reward.json nor reward.txt"),
        "{error}"
    );
    assert_eq!(error.fault(), Fault::VerifierFailed);
    let script = format!(
        "echo '{{\"reward\": 0.5, \"x\": 1}}' > {0}/reward.json; echo 1 > {0}/reward.txt; exit 3",
        logs.display()
    );
    task.verifier.files[0].content = script.into();
    let verdict = verify(&task, &sandbox).await.unwrap();
    assert_eq!((verdict.reward, verdict.scores["x"]), (0.5, 1.0));
}

#[tokio::test]
async fn what_cannot_be_run_is_refused_with_the_reason() {
    let mut task = scored_by("echo 1", Contract::LastLine);
    task.environment.refusals = vec!["it needs Windows".into(), "it needs the sun".into()];
    let error = admit(&task, &FakeProvider).await.unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("cannot be run here: it needs Windows; it needs the sun")
    );
}

#[tokio::test]
async fn a_verdict_carries_score_criteria_and_evidence() {
    let script = "echo '{\"a\": 1, \"b\": 0}'\necho why >&2\necho 0.5\n";
    let task = scored_by(script, Contract::LastLine);
    let verdict = verify(&task, &open(&task)).await.unwrap();
    assert_eq!(verdict.reward, 0.5);
    assert_eq!(verdict.scores["a"], 1.0);
    assert_eq!(verdict.evidence, "{\"a\": 1, \"b\": 0}\n0.5\nstderr:\nwhy");

    let task = scored_by("seq 9999\necho 1\n", Contract::LastLine);
    let verdict = verify(&task, &open(&task)).await.unwrap();
    assert_eq!(verdict.reward, 1.0);
    assert!(verdict.evidence.len() <= verify::EVIDENCE_BYTES_MAX);
    assert!(verdict.evidence.starts_with("1\n2\n") && verdict.evidence.ends_with("9999\n1"));
}

#[tokio::test]
async fn what_the_agent_left_at_the_verifiers_place_is_removed() {
    let task = scored_by(
        "[ -e .verify/extra ] && echo 1 || echo 0\n",
        Contract::LastLine,
    );
    // A folder with a file in it.
    let sandbox = open(&task);
    let place = sandbox.real(&task.workspace.join(".verify"));
    fs::create_dir(&place).unwrap();
    fs::write(place.join("extra"), "").unwrap();
    assert_eq!(verify(&task, &sandbox).await.unwrap().reward, 0.0);
    // A link to a folder: the folder itself must survive.
    let sandbox = open(&task);
    let other = sandbox.real(Path::new("/other"));
    fs::create_dir(&other).unwrap();
    fs::write(other.join("extra"), "").unwrap();
    std::os::unix::fs::symlink(&other, sandbox.real(&task.workspace.join(".verify"))).unwrap();
    assert_eq!(verify(&task, &sandbox).await.unwrap().reward, 0.0);
    assert_eq!(fs::read_dir(other).unwrap().count(), 1);
    // A plain file.
    let sandbox = open(&task);
    fs::write(sandbox.real(&task.workspace.join(".verify")), "").unwrap();
    assert_eq!(verify(&task, &sandbox).await.unwrap().reward, 0.0);
}

#[tokio::test]
async fn faults_are_not_scores() {
    let fault = async |mut task: Task, change: fn(&mut Task)| {
        change(&mut task);
        verify(&task, &open(&task)).await.unwrap_err()
    };
    let strict = |script| scored_by(script, Contract::LastLine);
    let lenient = |script| scored_by(script, Contract::LastLineOrZero);

    let error = fault(strict("echo 0.5; exit 3"), |_| ()).await;
    assert!(matches!(error, VerifyError::Contract { .. }) && !error.retryable());
    assert_eq!(error.fault(), Fault::VerifierFailed);
    let error = fault(lenient("exec no-such-program"), |_| ()).await;
    assert!(
        matches!(error, VerifyError::MissingProgram { .. }),
        "{error}"
    );
    let no_program = |task: &mut Task| task.verifier.argv[0] = "no-such-program".into();
    let error = fault(lenient("echo 1"), no_program).await;
    assert!(
        matches!(error, VerifyError::MissingProgram { .. }),
        "{error}"
    );
    let hurry = |task: &mut Task| task.verifier.timeout_s = 1;
    let error = fault(lenient("exec tail -f /dev/null"), hurry).await;
    assert!(matches!(error, VerifyError::TimedOut { .. }) && error.retryable());
    let text = fault(strict("echo maybe"), |_| ()).await.to_string();
    assert_eq!(
        text,
        "task chores-train-0000-folder: broken verifier: expected exit 0 and a number from 0 to 1 on the last line, found the last line \"maybe\"; output: maybe"
    );

    let task = lenient("echo 0.5; exit 3");
    assert_eq!(verify(&task, &open(&task)).await.unwrap().reward, 0.0);
}

#[tokio::test]
async fn arguments_may_name_the_workspace() {
    let mut task = scored_by(
        "cd \"$1\" && [ -e .verify/check.sh ] && echo 1\n",
        Contract::LastLine,
    );
    task.verifier.argv = vec![
        "sh".into(),
        "{workspace}/.verify/check.sh".into(),
        "{workspace}".into(),
    ];
    task.verifier.cwd = Some("/".into());
    assert_eq!(verify(&task, &open(&task)).await.unwrap().reward, 1.0);
}

#[tokio::test]
async fn a_failing_solution_is_named_with_its_step() {
    let mut task = chores::generate(Split::Train, 1, 1).remove(0);
    let mut failure = async |step: Step| {
        task.solution = vec![Step::Bash("true".into()), step];
        let sandbox = open(&task);
        prepare(&task, &sandbox).await.unwrap();
        match apply_solution(&task, &sandbox).await.unwrap_err() {
            VerifyError::Solution {
                step: 2, reason, ..
            } => reason,
            other => other.to_string(),
        }
    };
    assert_eq!(
        failure(Step::Bash("echo oh >&2; exit 4".into())).await,
        "\"echo oh >&2; exit 4\": Code(4): oh"
    );
    assert!(failure(Step::Read("none".into())).await.contains("none"));
    assert!(
        failure(Step::Edit("none".into(), "a".into(), "b".into()))
            .await
            .contains("none")
    );
    task.solution.clear();
    let error = apply_solution(&task, &open(&task)).await.unwrap_err();
    assert!(matches!(error, VerifyError::NoSolution { .. }));
}

/// Three kinds of bad task, none admitted.
#[tokio::test]
async fn the_gates_stop_bad_tasks() {
    let objections = async |script: &str| {
        let task = scored_by(script, Contract::LastLine);
        admit(&task, &FakeProvider)
            .await
            .unwrap()
            .objections()
            .join("; ")
    };
    assert_eq!(objections("echo 1").await, "doing nothing scores 1, not 0");
    assert_eq!(
        objections("echo 0").await,
        "the solution scores [0.0, 0.0, 0.0], not 1"
    );
    // The second run on the same state gives another score.
    let fickle =
        "[ -e ran ] && { echo 0; exit; }; [ \"$(ls)\" ] && { touch ran; echo 1; exit; }; echo 0";
    assert_eq!(
        objections(fickle).await,
        "the solution scores [1.0, 0.0, 0.0], not 1; 3 runs of the verifier do not agree; \
         the trick python-modules scores 1"
    );
    let mut task = scored_by("echo 0", Contract::LastLine);
    task.solution.clear();
    let gates = admit(&task, &FakeProvider).await.unwrap();
    assert_eq!((gates.no_op, gates.deterministic), (0.0, true));
    assert_eq!(gates.probes.len(), 5);
    assert_eq!(gates.objections(), ["there is no reference solution"]);
}

#[test]
fn a_kept_world_is_read_as_it_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.tar.zst");
    let long = format!("/workspace/{}/f.txt", "d".repeat(140));
    let file = |path: &str, mode: u32| sandbox::File {
        path: path.into(),
        content: path.as_bytes().repeat(3),
        mode,
    };
    let world = verify::World {
        files: vec![file("/logs/x", 0o644), file(&long, 0o755)],
        folders: vec!["/workspace/empty".into()],
        links: vec![("/workspace/link".into(), "../x y".into())],
        audit: None,
    };
    world.save(&path).unwrap();
    assert_eq!(verify::World::load(&path).unwrap(), world);
    fs::write(&path, b"nothing like it").unwrap();
    let error = verify::World::load(&path).unwrap_err().to_string();
    assert!(error.contains("w.tar.zst"), "{error}");
    let nowhere = folder.path().join("no/where");
    assert!(world.save(&nowhere).is_err());
}

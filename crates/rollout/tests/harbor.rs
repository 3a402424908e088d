//! Harbor's tasks beyond the plain one, on the local kind of sandbox: steps with gates, a verifier
//! of its own place, health checks, collect hooks, artifacts; and what is refused.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests"
)]

mod real;

use std::{collections::BTreeMap, fs, path::Path};

use engine::{EngineError, Hint, scripted::Script};
use real::{Loop, Teacher, installed, jobs, line};
use record::{Disposition, Fault, Message, Rollout};
use rollout::{KeepWorlds, world_file};
use task::{Step, Task};
use tokio_util::sync::CancellationToken;
use verify::World;

fn write(folder: &Path, files: &[(&str, &str)]) {
    for (name, text) in files {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

fn task(folder: &Path, files: &[(&str, &str)]) -> Task {
    write(folder, files);
    let mut tasks = task::load_dir(folder).unwrap();
    assert_eq!(tasks.len(), 1);
    tasks.remove(0)
}

/// Plays other steps for each instruction: the steps of a task are told by their words.
#[derive(Debug)]
struct ByInstruction(BTreeMap<String, Vec<Step>>);

impl Script for ByInstruction {
    fn reply(&self, hint: &Hint) -> Result<Message, EngineError> {
        let said: String = hint
            .conversation
            .messages
            .iter()
            .map(Message::text_content)
            .collect();
        let steps = self.0.iter().find(|(words, _)| said.contains(*words));
        let (_, steps) = steps.ok_or_else(|| EngineError::NoScript(said.clone()))?;
        task::teacher::next_message(steps, &hint.conversation)
            .map_err(|error| EngineError::NoScript(error.to_string()))
    }
}

async fn run(world: &Loop, task: &Task) -> Option<Rollout> {
    let installed = installed("react").await?;
    let job = jobs(std::slice::from_ref(task), &installed, 1).remove(0);
    let rollout = world.runner.run(&job, &CancellationToken::new()).await;
    println!("{}", line(&rollout));
    Some(rollout)
}

const DOCKERFILE: &str = "FROM debian:12\nWORKDIR /app\n";
const SCORE: &str = "mkdir -p /logs/verifier\n";

/// Three steps in one sandbox: each sees what the one before left; the third is never reached
/// when the second one's gate is shut.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_run_one_after_the_other_until_a_gate_is_shut() {
    let folder = tempfile::tempdir().unwrap();
    let files = [
        (
            "task.toml",
            "schema_version = \"1.4\"\nmulti_step_reward_strategy = \"mean\"\n[task]\nname = \"org/steps\"\n\
             [[steps]]\nname = \"one\"\nmin_reward = 1.0\n[[steps]]\nname = \"two\"\nmin_reward = { style = 0.5 }\n\
             [steps.healthcheck]\ncommand = \"test -e /app/seed.txt\"\ninterval_sec = 1\nretries = 2\n[[steps]]\nname = \"three\"\n",
        ),
        ("environment/Dockerfile", DOCKERFILE),
        (
            "tests/test.sh",
            "mkdir -p /logs/verifier; [ -s /app/one.txt ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n",
        ),
        ("steps/one/instruction.md", "write one.txt\n"),
        ("steps/two/instruction.md", "write two.txt\n"),
        (
            "steps/two/workdir/setup.sh",
            "echo planted > seed.txt; rm setup.sh\n",
        ),
        (
            "steps/two/tests/test.sh",
            "mkdir -p /logs/verifier; s=0; grep -q one /app/one.txt && grep -q planted /app/two.txt && s=0.5; \
             echo \"{\\\"reward\\\": $s, \\\"style\\\": $s}\" > /logs/verifier/reward.json\n",
        ),
        ("steps/three/instruction.md", "write three.txt\n"),
        (
            "steps/three/tests/test.sh",
            "mkdir -p /logs/verifier; echo 0 > /logs/verifier/reward.txt\n",
        ),
    ];
    let task = task(folder.path(), &files);
    assert_eq!(task.environment.refusals, [""; 0]);
    let play = |second: &str| {
        ByInstruction(BTreeMap::from([
            (
                "write one.txt".to_owned(),
                vec![
                    Step::Bash("echo one > one.txt".into()),
                    Step::Say("1".into()),
                ],
            ),
            (
                "write two.txt".to_owned(),
                vec![Step::Bash(second.into()), Step::Say("2".into())],
            ),
            ("write three.txt".to_owned(), vec![Step::Say("3".into())]),
        ]))
    };
    for (second, reward, calls) in [
        // Reached the third step, which pays nothing.
        ("cat seed.txt > two.txt", (1.0 + 0.5 + 0.0) / 3.0, 5),
        // Style 0 shuts the gate: the mean is over the two that ran.
        ("true", 0.5, 4),
    ] {
        let Some(world) = Loop::start(play(second)).await else {
            return;
        };
        let Some(rollout) = run(&world, &task).await else {
            return;
        };
        assert_eq!(rollout.disposition, Some(Disposition::Train));
        let verdict = rollout.verdict.as_ref().unwrap();
        assert!((verdict.reward - reward).abs() < 1e-12, "{verdict:?}");
        assert_eq!(verdict.scores["step.one"], 1.0);
        assert_eq!(rollout.calls, calls);
        world.close().await;
    }
}

/// The verifier's own place holds the artifacts and nothing else of the agent's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_verifier_apart_sees_artifacts_alone() {
    let folder = tempfile::tempdir().unwrap();
    let test = format!(
        "{SCORE}if [ \"$(cat /app/out/answer.txt)\" = 42 ] && [ ! -e /app/other.txt ] && [ \"$(cat /logs/artifacts/seen)\" = hook ]; \
         then echo 1; else ls -lR /app /logs >&2; echo 0; fi > /logs/verifier/reward.txt\n"
    );
    let files = [
        (
            "task.toml",
            "schema_version = \"1.4\"\nartifacts = [\"out\"]\n[task]\nname = \"org/apart\"\n[verifier]\nenvironment_mode = \"separate\"\n\
             [[verifier.collect]]\ncommand = \"mkdir -p /logs/artifacts; echo hook > /logs/artifacts/seen\"\n",
        ),
        ("instruction.md", "answer\n"),
        ("environment/Dockerfile", DOCKERFILE),
        ("tests/test.sh", &test),
    ];
    let task = task(folder.path(), &files);
    assert!(task.environment.verifier_apart);
    let steps = vec![
        Step::Bash("mkdir -p out; echo 42 > out/answer.txt; echo x > other.txt".into()),
        Step::Say("done".into()),
    ];
    let teacher = Teacher {
        steps: BTreeMap::from([(task.id.to_string(), steps)]),
    };
    let Some(mut world) = Loop::start(teacher).await else {
        return;
    };
    let kept = tempfile::tempdir().unwrap();
    let mut settings = (*world.runner.settings).clone();
    settings.keep_worlds = Some(KeepWorlds {
        folder: kept.path().to_owned(),
        bytes_max: 1 << 20,
    });
    // The verifier keeps its own settings: make the runner anew with them.
    world = world.with(settings);
    let Some(rollout) = run(&world, &task).await else {
        return;
    };
    let verdict = rollout.verdict.as_ref().unwrap();
    assert_eq!(verdict.reward, 1.0, "{}", verdict.evidence);
    // Workspace and artifacts are kept, after the hooks.
    let kept = World::load(&kept.path().join(world_file(&rollout.spec.id))).unwrap();
    let names: Vec<String> = kept
        .files
        .iter()
        .map(|file| file.path.display().to_string())
        .collect();
    assert_eq!(
        names,
        [
            "/app/other.txt",
            "/app/out/answer.txt",
            "/logs/artifacts/seen"
        ]
    );
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_world_that_is_not_healthy_is_a_fault_and_not_a_score() {
    let folder = tempfile::tempdir().unwrap();
    let test = format!("{SCORE}echo 0 > /logs/verifier/reward.txt\n");
    let files = [
        (
            "task.toml",
            "schema_version = \"1.4\"\n[task]\nname = \"org/sick\"\n[environment.healthcheck]\ncommand = \"echo no pulse; exit 3\"\ninterval_sec = 0.1\nretries = 2\n",
        ),
        ("instruction.md", "answer\n"),
        ("environment/Dockerfile", DOCKERFILE),
        ("tests/test.sh", &test),
    ];
    let task = task(folder.path(), &files);
    let Some(world) = Loop::start(Teacher::default()).await else {
        return;
    };
    let Some(rollout) = run(&world, &task).await else {
        return;
    };
    let Some(Disposition::Discard { fault, reason }) = &rollout.disposition else {
        panic!("{:?}", rollout.disposition);
    };
    assert_eq!(*fault, Fault::SandboxStart);
    assert!(
        reason.contains("no pulse") && reason.contains("Code(3)"),
        "{reason}"
    );
    world.close().await;
}

/// Whatever this kind of sandbox cannot give is said before anything runs, once and for good.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_supported_is_refused_with_the_reason() {
    let cases = [
        (
            "[[environment.mcp_servers]]\nname = \"mail\"\ntransport = \"sse\"\nurl = \"http://127.0.0.1:1/sse\"\n",
            "tool server `mail`",
        ),
        (
            "[environment]\nnetwork_mode = \"allowlist\"\nallowed_hosts = [\"pypi.org\"]\n",
            "it asks for pypi.org",
        ),
        (
            "[environment]\nnetwork_mode = \"public\"\n",
            "it asks for the internet",
        ),
        (
            "[agent]\nuser = \"nobody\"\n",
            "the harness is to run as nobody",
        ),
        (
            "[verifier]\nuser = 1000\n",
            "the verifier is to run as 1000",
        ),
        (
            "[environment]\nskills_dir = \"skills\"\n",
            "skills for the harness",
        ),
        (
            "[verifier.environment]\ndocker_image = \"tests:1\"\n",
            "the verifier's image tests:1",
        ),
        (
            "artifacts = [{ source = \"/x\", service = \"db\" }]\n",
            "an artifact lies in another container",
        ),
        (
            "[[verifier.collect]]\ncommand = \"x\"\nservice = \"db\"\n",
            "runs in the container db",
        ),
    ];
    let Some(world) = Loop::start(Teacher::default()).await else {
        return;
    };
    for (toml, expected) in cases {
        let folder = tempfile::tempdir().unwrap();
        let (top, tables) = if toml.starts_with('[') {
            ("", toml)
        } else {
            (toml, "")
        };
        let text = format!("schema_version = \"1.4\"\n{top}[task]\nname = \"org/odd\"\n{tables}");
        let test = format!("{SCORE}echo 1 > /logs/verifier/reward.txt\n");
        let files = [
            ("task.toml", text.as_str()),
            ("instruction.md", "answer\n"),
            ("environment/Dockerfile", DOCKERFILE),
            ("tests/test.sh", &test),
        ];
        let task = task(folder.path(), &files);
        let Some(rollout) = run(&world, &task).await else {
            return;
        };
        let Some(Disposition::Discard { fault, reason }) = &rollout.disposition else {
            panic!("{toml}: {:?}", rollout.disposition);
        };
        assert_eq!(*fault, Fault::SandboxRefused);
        assert!(reason.contains(expected), "{toml}: {reason}");
        assert_eq!((rollout.calls, &rollout.verdict), (0, &None));
    }
    world.close().await;
}

//! `espalier eval` and `espalier verify` as a person uses them: the same seeds give the same
//! bytes, a killed evaluation goes on, another verifier scores what was kept.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .unwrap()
}

struct World {
    folder: tempfile::TempDir,
}

impl World {
    /// A recipe over few chores, two scripted policies and one harness.
    fn new(more: &str) -> Self {
        let world = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        let policy = root().join("policy");
        world.write("few.toml", "seed = 5\ntrain = 1\nheld_out = 6\n");
        world.write(
            "recipe.toml",
            &format!(
                "seed = 3\n[policy]\nfolder = {policy:?}\n[tasks]\nheld_out = \"chores:few.toml\"\n\
                 [rollout]\nconcurrency = 3\nreply_tokens_max = 2048\n{more}"
            ),
        );
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_espalier"));
        command
            .args(arguments)
            .current_dir(self.folder.path())
            .stdin(Stdio::null());
        command
    }

    /// Standard output; what went wrong is a panic with standard error.
    fn run(&self, arguments: &[&str]) -> String {
        let output = self.command(arguments).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {stderr}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Every file below a folder.
    fn files(&self, folder: &str) -> BTreeMap<String, Vec<u8>> {
        let entries = fs::read_dir(self.path(folder)).unwrap();
        entries
            .map(|entry| {
                let path = entry.unwrap().path();
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                (name, fs::read(path).unwrap())
            })
            .collect()
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&fs::read(self.path(name)).unwrap()).unwrap()
    }
}

const MODELS: &str = "[[eval.models]]\nname = \"half\"\nengine = \"teacher:0.5\"\n\
    [[eval.models]]\nname = \"teacher\"\nengine = \"teacher\"\nprice = { prompt_mtok = 1.0 }\n";

/// Two files are the same or their names are told, not their bytes.
fn assert_same(one: &BTreeMap<String, Vec<u8>>, other: &BTreeMap<String, Vec<u8>>) {
    assert!(one.keys().eq(other.keys()), "{:?}", other.keys());
    let differ: Vec<&String> = one
        .keys()
        .filter(|name| one[*name] != other[*name])
        .collect();
    assert!(differ.is_empty(), "{differ:?} differ");
}

#[test]
fn the_same_seeds_give_the_same_report_and_another_verifier_may_look_again() {
    let world = World::new(&format!("[eval]\nsamples = 3\nrounds = 500\n{MODELS}"));
    let said = world.run(&["eval", "recipe.toml", "--out", "one"]);
    assert!(said.contains("half → teacher: +"), "{said}");
    let report = world.json("one/report/report.json");
    let teacher = &report["parts"][1];
    assert_eq!(teacher["model"], "teacher");
    assert_eq!(teacher["pass"]["mean"], 1.0, "{teacher}");
    assert_eq!(teacher["scored"], 18);
    assert!(teacher["service"]["cost_per_success"].as_f64().unwrap() > 0.0);
    let half = report["parts"][0]["pass"]["mean"].as_f64().unwrap();
    assert!(half > 0.1 && half < 0.9, "{half}");
    let at = &report["parts"][0]["at_k"];
    assert!(at[2]["pass_at_k"].as_f64() > at[0]["pass_at_k"].as_f64());

    world.run(&["eval", "recipe.toml", "--out", "two"]);
    assert_same(&world.files("one/report"), &world.files("two/report"));

    // The tasks' own verifier says the same of the kept workspaces.
    world.run(&["verify", "one", "--verifier", "own"]);
    let own = world.json("one/verdicts/own.json");
    assert_eq!(own["agreement"]["pairs"], 36, "{own}");
    assert_eq!(own["agreement"]["equal"], 1.0);
    assert_eq!(own["agreement"]["kappa_passed"], 1.0);
    // Another one, which pays for anything, agrees on what was worth 1 alone.
    world.run(&["tasks", "write", "chores:few.toml", "--out", "lenient"]);
    for split in ["train", "held-out"] {
        for task in fs::read_dir(world.path("lenient").join(split)).unwrap() {
            fs::write(task.unwrap().path().join("verify/check.sh"), "echo 1\n").unwrap();
        }
    }
    world.run(&["verify", "one", "--verifier", "lenient"]);
    let lenient = world.json("one/verdicts/lenient.json");
    assert_eq!(lenient["agreement"]["after_mean"], 1.0, "{lenient}");
    let passed = (18.0 + 18.0 * half).round() as u64;
    assert_eq!(
        lenient["agreement"]["table"],
        serde_json::json!([passed, 0, 36 - passed, 0])
    );
    assert_eq!(lenient["agreement"]["kappa_passed"], 0.0);
    let again = world
        .command(&["verify", "one", "--verifier", "lenient"])
        .output()
        .unwrap();
    assert_eq!(again.status.code(), Some(2), "verdicts are not overwritten");
}

#[test]
fn a_killed_evaluation_goes_on_to_the_same_report() {
    let world = World::new(&format!("[eval]\nsamples = 4\nrounds = 100\n{MODELS}"));
    world.run(&["eval", "recipe.toml", "--out", "straight"]);
    let mut child = world
        .command(&["eval", "recipe.toml", "--out", "killed"])
        .env("ESPALIER_LOG", "verify=debug")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Somewhere in the midst of it: when some verifiers have spoken.
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let verdicts = lines
        .map_while(Result::ok)
        .filter(|line| line.contains("verified"))
        .take(5)
        .count();
    assert_eq!(verdicts, 5);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!world.path("killed/report").exists());
    world.run(&["eval", "--resume", "killed"]);
    assert_same(
        &world.files("straight/report"),
        &world.files("killed/report"),
    );
}

/// A task with code and rubric, two scripted judges in the recipe, and a judge that fails.
#[test]
fn judges_of_a_recipe_are_mixed_in_and_a_silent_one_is_a_fault_of_its_own() {
    let task = "---\nid: greet\nname: Greet\ncategory: words\ngrading_type: hybrid\ntimeout_seconds: 60\n\
        grading_weights:\n  automated: 0.7\n  llm_judge: 0.3\n---\n\n## Prompt\n\nWrite hello into out.txt.\n\n\
        ## Expected Behavior\n\nA greeting.\n\n## Grading Criteria\n\n- [ ] it is there\n\n## Automated Checks\n\n\
        ```python\ndef grade(transcript, workspace_path):\n    from pathlib import Path\n    return {\"there\": 1.0 if Path(workspace_path, \"out.txt\").exists() else 0.0}\n```\n\n\
        ## LLM Judge Rubric\n\n### Criterion 1: Warmth (Weight: 100%)\n\n**Score 1.0**: warm\n**Score 0.0**: cold\n";
    let model = "[[eval.models]]\nname = \"clerk\"\nengine = \"scripted:replies.jsonl\"\n";
    let world = |judges: &str| {
        let world = World::new(&format!(
            "[eval]\nsamples = 2\nrounds = 50\n{model}[verify.judge]\npause_ms = 1\n{judges}"
        ));
        world.write("tasks/greet.md", task);
        world.write(
            "replies.jsonl",
            "{\"task\": \"*\", \"tool_calls\": [{\"name\": \"bash\", \"arguments\": {\"command\": \"env > out.txt; cat /proc/*/environ >> out.txt 2>/dev/null; cat out.txt\"}}]}\n\
             {\"task\": \"*\", \"content\": \"Done.\"}\n",
        );
        world
    };
    let two = world(
        "[[verify.judge.models]]\napi = \"scripted\"\ndefault = 0.5\n\
         [[verify.judge.models]]\napi = \"scripted\"\ndefault = 1.0\n",
    );
    two.run(&["eval", "recipe.toml", "--tasks", "tasks", "--out", "run"]);
    let report = two.json("run/report/report.json");
    let reward = report["parts"][0]["reward"]["mean"].as_f64().unwrap();
    assert!((reward - (0.7 + 0.3 * 0.75)).abs() < 1e-9, "{report}");
    assert_eq!(report["agreement"][0]["marks"], 2, "{report}");
    assert_eq!(report["agreement"][0]["equal"], 0.0);
    // The code's word alone, and the judges' alone, over the same end states.
    two.run(&["verify", "run", "--verifier", "code"]);
    assert_eq!(
        two.json("run/verdicts/code.json")["agreement"]["after_mean"],
        1.0
    );
    two.run(&["verify", "run", "--verifier", "judge"]);
    assert_eq!(
        two.json("run/verdicts/judge.json")["agreement"]["after_mean"],
        0.75
    );

    // A judge behind an address where nobody is, with a key that no sandbox may see.
    let silent = world(
        "attempts_max = 1\n[[verify.judge.models]]\napi = \"openai\"\nbase = \"http://127.0.0.1:9/v1\"\n\
         model = \"nobody\"\nkey_variable = \"JUDGE_KEY\"\ntimeout_s = 5\n",
    );
    let output = silent
        .command(&["eval", "recipe.toml", "--tasks", "tasks", "--out", "run"])
        .env("JUDGE_KEY", "sk-very-secret")
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let report = silent.json("run/report/report.json");
    assert_eq!(
        report["parts"][0]["missing"],
        serde_json::json!({"judge_failed": 2}),
        "{report}"
    );
    let overview = silent.run(&["inspect", "run", "--json"]);
    let overview: Value = serde_json::from_str(&overview).unwrap();
    assert_eq!(overview["faults"], serde_json::json!({"judge_failed": 2}));
    // What the harness saw is in the ledger: its environment, and those of all its processes.
    let ledger = ledger::Ledger::open_read_only(&silent.path("run")).unwrap();
    let mut seen = String::new();
    for rollout in ledger.rollouts(&[]).unwrap() {
        for call in ledger.calls(&rollout.spec.id).unwrap() {
            seen.push_str(&call.request.to_string());
        }
    }
    assert!(seen.contains("HOME="), "the environment was looked at");
    assert!(!seen.contains("sk-very-secret"));
    let recipe = fs::read_to_string(silent.path("run/run.toml")).unwrap();
    assert!(recipe.contains("JUDGE_KEY") && !recipe.contains("sk-very-secret"));
    let missing = silent
        .command(&["eval", "recipe.toml", "--tasks", "tasks", "--out", "other"])
        .env_remove("JUDGE_KEY")
        .output()
        .unwrap();
    assert_eq!(missing.status.code(), Some(2));
    assert!(!silent.path("other").exists());
}

/// A task with a service: which services were used, what rollouts tried to reach, and whether a set is
/// among another.
#[test]
fn services_network_and_contamination_are_in_the_report() {
    let model = "[[eval.models]]\nname = \"clerk\"\nengine = \"scripted:replies.jsonl\"\n";
    let world = World::new(&format!("[eval]\nsamples = 1\nrounds = 50\n{model}"));
    world.write(
        "tasks/mail/task.toml",
        "format = 1\nid = \"mail\"\nfamily = \"mail\"\n[verifier]\nargv = [\"sh\", \"-c\", \"grep -q ann .verify/services.json && echo 1 || echo 0\"]\n\
         [[services]]\nname = \"mail\"\nport = 9100\nrecords = \"messages\"\ndata = \"mail.json\"\n\
         [[services.routes]]\npath = \"/send\"\nact = \"note\"\ntakes = [\"to\"]\nlog = \"sent\"\n\
         [[services]]\nname = \"calendar\"\nport = 9101\nrecords = \"events\"\ndata = \"mail.json\"\n\
         [[services.routes]]\npath = \"/events\"\nact = \"list\"\n",
    );
    world.write("tasks/mail/mail.json", "[]");
    world.write("tasks/mail/instruction.md", "Write to ann.\n");
    world.write("tasks/mail/verify/nothing", "");
    world.write(
        "replies.jsonl",
        "{\"task\": \"*\", \"tool_calls\": [{\"name\": \"bash\", \"arguments\": {\"command\": \"/run/espalier/guest fetch POST http://127.0.0.1:9100/send '{\\\"to\\\": \\\"ann\\\"}'\"}}]}\n\
         {\"task\": \"*\", \"content\": \"Done.\"}\n",
    );
    world.run(&["eval", "recipe.toml", "--tasks", "tasks", "--out", "run"]);
    let part = world.json("run/report/report.json")["parts"][0].clone();
    assert_eq!(part["reward"]["mean"], 1.0, "{part}");
    assert_eq!(part["services_coverage"], 0.5, "{part}");
    assert!(!world.path("run/network.json").exists());
    // The log of a way out is read when there is one.
    world.write(
        "run/egress/one.jsonl",
        "{\"time_s\": 1.0, \"method\": \"CONNECT\", \"host\": \"example.org\", \"port\": 443, \"decision\": \"denied\", \"up_bytes\": 0, \"down_bytes\": 0, \"seconds\": 0.0}\n",
    );
    world.run(&["eval", "--resume", "run"]);
    let network = world.json("run/network.json");
    assert_eq!(
        network["hosts"]["example.org:443"]["denied"], 1,
        "{network}"
    );
    let checked = world.run(&[
        "tasks",
        "check",
        "tasks",
        "--parse-only",
        "--against",
        "tasks",
        "--json",
    ]);
    let summary: Value = serde_json::from_str(checked.lines().last().unwrap()).unwrap();
    let found = &summary["contamination"];
    assert_eq!(
        (&found["same_tasks"], &found["near"]),
        (&1.into(), &1.into()),
        "{summary}"
    );
}

/// Names the folder that keeps the two runs of the matrix; a temporary one otherwise.
const MATRIX_FOLDER: &str = "ESPALIER_MATRIX_OUT";

/// `recipes/eval-scripted.toml` as it is, twice. The runs `one` and `two` are left in the folder
/// that [`MATRIX_FOLDER`] names, and go on from there when the test was stopped. The stages have
/// limits that a machine with other work does not reach: what would be a fault of the machine is
/// not what is compared.
#[test]
#[ignore = "long: 2 x 1,536 rollouts, two thirds of them Node.js processes; half an hour to over an hour"]
fn the_matrix_of_three_harnesses_is_the_same_twice() {
    let world = World::new("");
    let folder = match std::env::var_os(MATRIX_FOLDER) {
        Some(folder) => PathBuf::from(folder),
        None => world.folder.path().to_path_buf(),
    };
    fs::create_dir_all(&folder).unwrap();
    let patient = folder.join("patient.toml");
    let recipe = fs::read_to_string(root().join("recipes/eval-scripted.toml")).unwrap();
    let stages = "[rollout.stages]\n";
    assert!(recipe.contains(stages));
    let recipe = recipe
        .replace(
            stages,
            "[rollout.stages]\ncreate_s = 600\nharness_s = 3600\nsettle_s = 300\nverify_s = 600\ndestroy_s = 300\n",
        )
        .replace("\"policy\"", &format!("{:?}", root().join("policy")));
    fs::write(&patient, recipe).unwrap();
    for name in ["one", "two"] {
        let out = folder.join(name);
        let mut command = Command::new(env!("CARGO_BIN_EXE_espalier"));
        if out.join("run.toml").exists() {
            command.args(["eval", "--resume"]).arg(&out);
        } else {
            command.arg("eval").arg(&patient).arg("--out").arg(&out);
        }
        let started = std::time::Instant::now();
        let output = command
            .current_dir(root())
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .unwrap();
        assert!(output.status.success(), "{}: {:?}", name, output.status);
        println!("{}", String::from_utf8_lossy(&output.stdout));
        println!(
            "run {name}: {:.0} s of this process, in {}",
            started.elapsed().as_secs_f64(),
            out.display()
        );
        println!("{}", fs::read_to_string(out.join("time.md")).unwrap());
    }
    let report: Value =
        serde_json::from_slice(&fs::read(folder.join("one/report/report.json")).unwrap()).unwrap();
    let (mut planned, mut scored) = (0, 0);
    println!(
        "| model | harness | attempts | scored | truncated | missing | pass@1 | calls | tool calls |\n|---|---|---|---|---|---|---|---|---|"
    );
    for part in report["parts"].as_array().unwrap() {
        let behaviour = &part["behaviour"];
        let tools: u64 = behaviour["tools"]
            .as_object()
            .unwrap()
            .values()
            .map(|count| count.as_u64().unwrap())
            .sum();
        println!(
            "| {} | {} | {} | {} | {} | {} | {} | {} | {tools} |",
            part["model"].as_str().unwrap(),
            part["harness"].as_str().unwrap(),
            part["planned"],
            part["scored"],
            part["truncated"],
            part["missing"],
            part["pass"]["mean"],
            behaviour["calls"],
        );
        if part["harness"] != "(all)" {
            planned += part["planned"].as_u64().unwrap();
            scored += part["scored"].as_u64().unwrap();
        }
    }
    assert_eq!((planned, scored), (1536, 1536), "{:#}", report["parts"]);
    let files = |run: &str| {
        let mut found = BTreeMap::new();
        for entry in fs::read_dir(folder.join(run).join("report")).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            found.insert(name, fs::read(&path).unwrap());
        }
        found
    };
    let (one, two) = (files("one"), files("two"));
    println!("{} files in each report", one.len());
    assert_same(&one, &two);
}

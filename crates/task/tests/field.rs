//! The formats of the field: real sets where they are at hand, small ones written here, and what
//! is said about broken ones.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests are not in a test function"
)]

mod support;

use std::path::{Path, PathBuf};

use support::{only, tree};

use task::{
    Contract, Format, McpTransport, Mix, Network, Payload, Requirement, Scale, Step, TaskError,
    load_dir, load_each,
};
use tempfile::TempDir;

fn shared(inner: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared/tasks")
        .join(inner);
    let folder = folder.canonicalize();
    if folder.is_err() {
        println!("skipped: the real tasks of {inner} are not there");
    }
    folder.ok()
}

fn complaint(folder: &TempDir, error: &TaskError) -> String {
    let base = folder.path().canonicalize().unwrap();
    error
        .to_string()
        .replace(&folder.path().display().to_string(), "")
        .replace(&base.display().to_string(), "")
}

/// What is said after a change of one file.
fn spoiled(files: &[(&str, &str)], file: &str, old: &str, new: &str) -> String {
    let texts: Vec<(&str, String)> = files
        .iter()
        .map(|(path, text)| {
            let text = if *path == file {
                text.replacen(old, new, 1)
            } else {
                (*text).to_owned()
            };
            (*path, text)
        })
        .collect();
    let texts: Vec<(&str, &str)> = texts
        .iter()
        .map(|(path, text)| (*path, text.as_str()))
        .collect();
    let folder = tree(&texts);
    let inner = folder.path().join("t");
    let place = if inner.is_dir() {
        inner
    } else {
        folder.path().join(file)
    };
    complaint(&folder, &load_dir(&place).unwrap_err())
}

#[test]
fn the_real_pinchbench_files_load() {
    let Some(folder) = shared("pinchbench") else {
        return;
    };
    let tasks = load_dir(&folder).unwrap();
    assert_eq!(tasks.len(), 11);
    assert!(tasks.iter().all(|task| task.format == Format::PinchBench));
    let of = |id: &str| tasks.iter().find(|task| task.id.as_str() == id).unwrap();
    assert_eq!(of("task_00_sanity").grading.mix, Mix::Code);
    assert_eq!(of("task_03_blog").grading.mix, Mix::Judge);
    assert_eq!(of("task_03_blog").verifier.contract, Contract::None);
    let hybrid = of("task_10_workflow");
    assert_eq!(
        hybrid.grading.mix,
        Mix::Weighted {
            code: 0.5,
            judge: 0.5
        }
    );
    let rubric = hybrid.grading.rubric.as_ref().unwrap();
    let weights: Vec<f64> = rubric
        .criteria
        .iter()
        .map(|criterion| criterion.weight)
        .collect();
    assert_eq!(weights, [0.3, 0.3, 0.25, 0.15]);
    assert_eq!(hybrid.files[0].path, Path::new("config.json"));
    assert_eq!(hybrid.verifier.payload, Payload::Transcript);
    assert!(hybrid.instruction.starts_with("Read config.json"));
    // Its spreadsheet is not in the sample: it loads, and says why it cannot be run.
    let sheet = of("task_18_spreadsheet_summary");
    assert_eq!(sheet.environment.refusals.len(), 2);
    assert!(!sheet.instruction.ends_with('-'));
    assert!(
        tasks
            .iter()
            .filter(|task| !task.environment.refusals.is_empty())
            .count()
            == 1
    );
}

#[test]
fn the_real_qwenclawbench_files_load_with_their_assets() {
    let Some(folder) = shared("qwenclawbench") else {
        return;
    };
    let tasks = load_dir(&folder).unwrap();
    assert_eq!(tasks.len(), 19);
    for task in &tasks {
        assert_eq!(
            task.environment.refusals,
            Vec::<String>::new(),
            "{}",
            task.id
        );
        if let Some(rubric) = &task.grading.rubric {
            let sum: f64 = rubric
                .criteria
                .iter()
                .map(|criterion| criterion.weight)
                .sum();
            assert!(
                (sum - 1.0).abs() < 0.021,
                "{}: weights add up to {sum}",
                task.id
            );
        }
    }
    let hybrid = tasks
        .iter()
        .find(|task| task.id.as_str().starts_with("task_00096"))
        .unwrap();
    assert_eq!(hybrid.format, Format::QwenClawBench);
    assert_eq!(
        hybrid.grading.mix,
        Mix::Gated {
            code: 0.6,
            judge: 0.4,
            code_min: 0.75
        }
    );
    assert_eq!(hybrid.files.len(), 6);
}

const PINCH: &[(&str, &str)] = &[(
    "task_a.md",
    "---\nid: task_a\nname: A\ncategory: basic\ngrading_type: automated\nworkspace_files:\n- path: in.txt\n  content: |\n    hello\n---\n\n## Prompt\n\nDo it.\n\n## Automated Checks\n\n```python\ndef grade(transcript, workspace_path):\n    return {\"a\": 1.0}\n```\n",
)];

#[test]
fn broken_markdown_tasks_are_named() {
    let say = |old, new| spoiled(PINCH, "task_a.md", old, new);
    insta::assert_snapshot!(say("category: basic\n", ""), @"/task_a.md: category: expected a text, found nothing; correct the file");
    insta::assert_snapshot!(say("automated", "vibes"), @r#"/task_a.md: grading_type: expected automated, llm_judge or hybrid, found "vibes"; correct the file"#);
    insta::assert_snapshot!(say("in.txt", "../in.txt"), @r#"/task_a.md: workspace_files[0].path: expected a path inside the workspace, found "../in.txt"; correct the file"#);
    insta::assert_snapshot!(say("def grade(", "def score("), @"/task_a.md: ## Automated Checks: expected a block ```python that defines grade(transcript, workspace_path), found none; correct the file");
    insta::assert_snapshot!(say("## Prompt", "## Prmpt"), @"/task_a.md: ## Prompt: expected a section with text, found nothing; correct the file");
    insta::assert_snapshot!(say("automated", "llm_judge"), @"/task_a.md: ## Grading Criteria: expected a section with text, found nothing; correct the file");
}

const HARBOR: &[(&str, &str)] = &[
    (
        "t/task.toml",
        "schema_version = \"1.4\"\nartifacts = [\"out.txt\", {source = \"/logs/x\"}]\n[task]\nname = \"org/hello-world\"\nkeywords = [\"k\"]\n[metadata]\ncategory = \"files\"\n[agent]\ntimeout_sec = 120.0\n[verifier]\ntimeout_sec = 60.0\nenv = {A = \"1\"}\n[[verifier.collect]]\ncommand = \"cp a b\"\n[environment]\nmemory_mb = 512\nnetwork_mode = \"no-network\"\n[environment.env]\nMODE = \"${MODE:-fast}\"\n[[environment.mcp_servers]]\nname = \"m\"\ntransport = \"stdio\"\ncommand = \"serve\"\nargs = [\"--x\"]\n[environment.healthcheck]\ncommand = \"true\"\n",
    ),
    ("t/instruction.md", "Write hello.\n"),
    (
        "t/environment/Dockerfile",
        "FROM ubuntu:24.04\nWORKDIR /srv/job\nCOPY seed.txt .\nRUN apt-get update && apt-get install -y jq\n",
    ),
    ("t/environment/seed.txt", "s"),
    ("t/tests/test.sh", "echo 1 > /logs/verifier/reward.txt\n"),
    ("t/solution/solve.sh", "echo hello > out.txt\n"),
];

#[test]
fn a_harbor_folder_loads_whole() {
    let folder = tree(HARBOR);
    let task = only(&folder.path().join("t"));
    assert_eq!(task.id.as_str(), "org-hello-world");
    assert_eq!(task.metadata["name"], "org/hello-world");
    assert_eq!(
        (task.format, task.family.as_str()),
        (Format::Harbor, "files")
    );
    assert_eq!(task.workspace, Path::new("/srv/job"));
    assert_eq!(task.files[0].path, Path::new("/srv/job/seed.txt"));
    assert_eq!(task.verifier.contract, Contract::RewardFile);
    assert_eq!(task.verifier.timeout_s, 60);
    assert_eq!(task.verifier.env["A"], "1");
    let place = &task.environment;
    assert_eq!(place.refusals, Vec::<String>::new());
    assert_eq!(place.network, Network::None);
    assert_eq!(place.env["MODE"], "fast");
    assert_eq!(place.requires, [Requirement::Apt("jq".into())]);
    assert_eq!(place.needs.memory_mb, Some(512));
    assert_eq!(place.needs.agent_timeout_s, Some(120.0));
    assert!(
        matches!(&place.mcp_servers[0].transport, McpTransport::Stdio { command, .. } if command == "serve")
    );
    assert_eq!(place.healthcheck.as_ref().unwrap().retries, 3);
    assert_eq!(place.artifacts, ["out.txt", "/logs/x"]);
    assert_eq!(place.collect[0].command, "cp a b");
    assert_eq!(place.collect[0].timeout_s, 60.0);
    assert_eq!(task.solution.len(), 2);
    assert_eq!(
        task.solution[1],
        Step::Bash("bash /solution/solve.sh".into())
    );
}

#[test]
fn older_harbor_folders_load_with_their_old_words() {
    let old = "version = \"1.0\"\n[environment]\nmemory = \"2G\"\nallow_internet = false\n";
    let mut files = HARBOR.to_vec();
    files[0].1 = old;
    let folder = tree(&files);
    let task = only(&folder.path().join("t"));
    assert_eq!(task.id.as_str(), "t");
    assert_eq!(task.environment.needs.memory_mb, Some(2048));
    assert_eq!(task.environment.network, Network::None);
}

#[test]
fn harbor_steps_keep_what_each_of_them_brings() {
    let mut files = HARBOR.to_vec();
    files[0].1 = "multi_step_reward_strategy = \"final\"\n[[steps]]\nname = \"one\"\nmin_reward = 0.5\n\
        [[steps]]\nname = \"two\"\nmin_reward = {tests = 1.0}\n[steps.agent]\ntimeout_sec = 9.0\n[steps.verifier]\ntimeout_sec = 5.0\n";
    files.push(("t/steps/one/instruction.md", "First.\n"));
    files.push(("t/steps/two/instruction.md", "Second.\n"));
    files.push(("t/steps/two/tests/test.sh", "two\n"));
    files.push(("t/steps/two/workdir/setup.sh", "true\n"));
    files.push(("t/steps/two/workdir/new.txt", "n"));
    files.push(("t/steps/two/solution/solve.sh", "true\n"));
    let folder = tree(&files);
    let task = only(&folder.path().join("t"));
    assert_eq!(task.instruction, "First.");
    assert_eq!(task.environment.strategy, task::Strategy::Final);
    assert_eq!(task.environment.refusals, [""; 0]);
    let stages = &task.environment.stages;
    assert_eq!(stages[0].min_reward["reward"], 0.5);
    assert_eq!(stages[1].min_reward["tests"], 1.0);

    // The first part is scored by the shared tests and has the task's files; the second brings
    // its own.
    let first = task.stage(0).unwrap();
    assert_eq!(first.files.len(), 1);
    assert_eq!(first.verifier.files, task.verifier.files);
    let second = task.stage(1).unwrap();
    assert_eq!(second.instruction, "Second.");
    assert_eq!(second.files.len(), 2);
    assert_eq!(second.environment.setup.as_deref(), Some("bash setup.sh"));
    assert_eq!(second.environment.needs.agent_timeout_s, Some(9.0));
    assert_eq!(second.verifier.files[0].content, b"two\n");
    assert_eq!(second.verifier.timeout_s, 5);
    assert_eq!(second.solution.len(), 2);
    assert_eq!(task.stage(2), None);

    // What a step brings is part of the digest.
    files.last_mut().unwrap().1 = "false\n";
    let folder = tree(&files);
    assert_ne!(only(&folder.path().join("t")).digest, task.digest);
}

#[test]
fn broken_harbor_folders_are_named() {
    let say = |old, new| spoiled(HARBOR, "t/task.toml", old, new);
    insta::assert_snapshot!(say("\"1.4\"", "\"9.0\""), @r#"/t/task.toml: schema_version: expected one of 1.0, 1.1, 1.2, 1.3, 1.4, found "9.0"; correct the file"#);
    insta::assert_snapshot!(say("no-network", "open"), @r#"/t/task.toml: environment.network_mode: expected public, no-network or allowlist, found "open"; correct the file"#);
    insta::assert_snapshot!(say("timeout_sec = 60.0", "timeout_sec = -1"), @"/t/task.toml: verifier.timeout_sec: expected seconds, above 0 and at most 86400, found -1.0; correct the file");
    insta::assert_snapshot!(say("\"stdio\"", "\"pigeon\""), @r#"/t/task.toml: environment.mcp_servers[0].transport: expected sse, streamable-http or stdio, found "pigeon"; correct the file"#);
    insta::assert_snapshot!(say("memory_mb = 512", "memory = \"much\""), @r#"/t/task.toml: environment.memory: expected a size such as 4G or 512M, found "much"; correct the file"#);
    insta::assert_snapshot!(say("command = \"true\"", "retries = 3"), @"/t/task.toml: environment.healthcheck.command: expected a text, found nothing; correct the file");
    let without: Vec<_> = HARBOR
        .iter()
        .copied()
        .filter(|(path, _)| *path != "t/tests/test.sh")
        .collect();
    insta::assert_snapshot!(spoiled(&without, "t/task.toml", "", ""), @"/t: the task has no verifier: expected tests/test.sh; add it, or take the task out of the set");
}

const TERMINAL: &[(&str, &str)] = &[
    (
        "t/task.yaml",
        "instruction: |-\n  Do a thing.\nauthor_name: x\ndifficulty: easy\ncategory: sys\ntags: [a]\nparser_name: pytest\nmax_agent_timeout_sec: 100\nmax_test_timeout_sec: 30\n",
    ),
    ("t/Dockerfile", "FROM python:3.12\nWORKDIR /app\n"),
    (
        "t/docker-compose.yaml",
        "services:\n  client:\n    build: .\n",
    ),
    ("t/run-tests.sh", "pytest /tests\n"),
    ("t/tests/test_outputs.py", "def test_a(): pass\n"),
    (
        "t/solution.yaml",
        "- command: echo 1 > a\n  min_timeout_sec: 1\n- command: ls\n",
    ),
];

#[test]
fn a_terminal_bench_1_folder_is_converted() {
    let folder = tree(TERMINAL);
    let task = only(&folder.path().join("t"));
    assert_eq!(task.format, Format::TerminalBench1);
    assert_eq!(task.instruction, "Do a thing.");
    assert_eq!(
        task.solution,
        [Step::Bash("echo 1 > a".into()), Step::Bash("ls".into())]
    );
    assert_eq!(task.environment.refusals, Vec::<String>::new());
    assert_eq!(task.verifier.timeout_s, 30);
    let names: Vec<_> = task
        .verifier
        .files
        .iter()
        .map(|file| file.path.display().to_string())
        .collect();
    assert_eq!(names, ["run-tests.sh", "test_outputs.py", "wrapper.sh"]);
    insta::assert_snapshot!(spoiled(TERMINAL, "t/task.yaml", "pytest", "junit"), @r#"/t/task.yaml: parser_name: expected pytest, found "junit"; correct the file"#);
    insta::assert_snapshot!(spoiled(TERMINAL, "t/task.yaml", "max_test_timeout_sec: 30", "max_test_timeout_sec: soon"), @r#"/t/task.yaml: max_test_timeout_sec: expected a finite number, found "soon"; correct the file"#);
    insta::assert_snapshot!(spoiled(TERMINAL, "t/task.yaml", "tags: [a]", "tags: [a"), @"/t/task.yaml:7: the file: expected YAML, found did not find expected ',' or ']' at line 7 column 12, while parsing a flow sequence at line 6 column 7; correct the file");
}

const CLAW_EVAL: &[(&str, &str)] = &[
    (
        "t/task.yaml",
        "task_id: T1_mail\ntask_name: Mail\nprompt:\n  text: Sort the mail.\n  language: en\nservices:\n- name: gmail\n  command: python mock_services/gmail/server.py\n  port: 9100\n  health_check: http://localhost:9100/gmail/messages\n  reset_endpoint: http://localhost:9100/gmail/reset\n  env: {GMAIL_FIXTURES: tasks/t/fixtures/gmail/inbox.json, ERROR_RATE: 0.5}\ntools:\n- name: send\n  description: Send a mail\n  input_schema: {type: object}\ntool_endpoints:\n- tool_name: send\n  url: http://localhost:9100/gmail/send\n  method: POST\nscoring_components:\n- name: drafts\n  weight: 0.4\n  check: {type: tool_called, tool_name: send, min_calls: 1}\n- name: tone\n  weight: 0.6\n  check: {type: llm_judge, description: polite}\nsafety_checks:\n- type: tool_not_called\n  tool_name: delete\nexpected_actions:\n- service: gmail\n  action_key: drafts\njudge_rubric: be fair\nreference_solution: send one\n",
    ),
    ("t/fixtures/gmail/inbox.json", "[{\"message_id\": \"m1\"}]"),
];

#[test]
fn a_claw_eval_folder_loads_with_services_and_weights() {
    let folder = tree(CLAW_EVAL);
    let task = only(&folder.path().join("t"));
    assert_eq!(
        (task.format, task.grading.pass_at),
        (Format::ClawEval, 0.75)
    );
    let service = &task.environment.services[0];
    assert_eq!((service.port, service.ready_timeout_s), (9100, 10));
    assert_eq!(service.health_check, "/gmail/messages");
    let mock = service.mock.as_ref().unwrap();
    assert_eq!((mock.lists["messages"].len(), mock.error_rate), (1, 0.5));
    let tool = &task.environment.tools[0];
    assert_eq!(
        (tool.name.as_str(), tool.port, tool.path.as_str()),
        ("send", 9100, "/gmail/send")
    );
    // What the audit tells is no business of a judge.
    assert_eq!(
        task.grading.mix,
        Mix::Weighted {
            code: 0.4,
            judge: 0.6
        }
    );
    let rules = task.grading.audit.unwrap();
    assert_eq!(rules.components.len(), 1);
    assert_eq!(rules.forbidden_tools, ["delete"]);
    assert_eq!(rules.actions, [("gmail".to_owned(), "drafts".to_owned())]);
    let rubric = task.grading.rubric.unwrap();
    assert_eq!(
        rubric.criteria[0].text,
        "type: llm_judge\ndescription: polite"
    );
    assert_eq!(rubric.expected, "be fair\nsend one");
    assert_eq!(task.environment.refusals, Vec::<String>::new());
    let say = |old, new| spoiled(CLAW_EVAL, "t/task.yaml", old, new);
    insta::assert_snapshot!(say("port: 9100", "port: 0"), @"/t/task.yaml: services[0].port: expected a whole number from 1 to 65535, found 0; correct the file");
    insta::assert_snapshot!(say("description: polite", "descrption: polite"), @r#"/t/task.yaml: scoring_components[1].check.descrption: expected no such key, found "an unknown key"; correct the file"#);
    insta::assert_snapshot!(say("weight: 0.4", "weight: heavy"), @r#"/t/task.yaml: scoring_components[0].weight: expected a finite number, found "heavy"; correct the file"#);
    insta::assert_snapshot!(say("localhost:9100/gmail/send", "localhost:9200/gmail/send"), @r#"/t/task.yaml: tool_endpoints.send.url: expected the address of a service of the task, found "http://localhost:9200/gmail/send"; correct the file"#);
}

#[test]
fn what_a_claw_eval_task_needs_and_has_not_is_said() {
    let folder = tree(CLAW_EVAL);
    let file = folder.path().join("t/task.yaml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(
        &file,
        text.replace("name: gmail", "name: ocr")
            .replace("type: tool_not_called", "type: no_leak"),
    )
    .unwrap();
    std::fs::write(folder.path().join("t/grader.py"), "").unwrap();
    let refusals = only(&folder.path().join("t")).environment.refusals;
    assert_eq!(
        refusals,
        [
            "the service ocr is a program of the bench, and is not among those made of data",
            "its safety check no_leak is one that only the bench's own grader makes",
            "its grader.py needs the bench's own package",
        ]
    );
    std::fs::remove_file(folder.path().join("t/fixtures/gmail/inbox.json")).unwrap();
    std::fs::write(&file, text).unwrap();
    let refusals = only(&folder.path().join("t")).environment.refusals;
    assert_eq!(
        refusals[0],
        "the records of the service gmail (GMAIL_FIXTURES) are not in the folder"
    );
}

const JOB: &[(&str, &str)] = &[
    (
        "law/t/RUBRICS.json",
        "{\"rubrics\": [{\"rubric\": \"cites\", \"criterion\": [\"a\", \"b\"], \"weight\": 3}, {\"rubric\": \"short\", \"criterion\": [\"c\"], \"weight\": 1}]}",
    ),
    ("law/t/task_card.md", "x"),
    ("law/t/task_folder/TASK_INSTRUCTIONS.txt", "Write a memo.\n"),
    ("law/t/task_folder/case.txt", "facts"),
];

#[test]
fn a_jobbench_set_loads_by_profession() {
    let folder = tree(JOB);
    let tasks = load_dir(folder.path()).unwrap();
    assert_eq!(tasks[0].id.as_str(), "law--t");
    let rubric = tasks[0].grading.rubric.clone().unwrap();
    assert_eq!(rubric.scale, Scale::Binary);
    assert!(rubric.one_by_one);
    assert_eq!(rubric.score(&[Some(1.0), Some(0.0)]), Some(0.75));
    let say = |old: &str, new: &str| {
        let files: Vec<(&str, String)> = JOB
            .iter()
            .map(|(path, text)| (*path, text.replacen(old, new, 1)))
            .collect();
        let files: Vec<(&str, &str)> = files
            .iter()
            .map(|(path, text)| (*path, text.as_str()))
            .collect();
        let folder = tree(&files);
        complaint(&folder, &load_dir(folder.path()).unwrap_err())
    };
    insta::assert_snapshot!(say("\"weight\": 3", "\"weight\": -3"), @"/law/t/RUBRICS.json: rubrics[0].weight: expected a finite number, not negative, found -3.0; correct the file");
    insta::assert_snapshot!(say("[\"c\"]", "[]"), @"/law/t/RUBRICS.json: rubrics[1].criterion: expected a list of texts, not empty, found []; correct the file");
}

#[test]
fn tables_load_row_by_row() {
    let folder = tree(&[
        (
            "atlas.csv",
            "TASK,PROMPT,ENABLED_TOOLS,GTFA_CLAIMS\nabc/1,\"Find, please\",\"[\"\"t1\"\", \"\"t2\"\"]\",\"[\"\"one\"\", \"\"two\"\"]\"\n",
        ),
        (
            "office.csv",
            "uid,question,answer,source_files,difficulty\nUID0001,How much?,543 million,,easy\n",
        ),
        (
            "swe.jsonl",
            "{\"instance_id\": \"a__b-1\", \"repo\": \"a/b\", \"base_commit\": \"0123456789abcdef\", \"problem_statement\": \"Fix it\", \"patch\": \"p\", \"test_patch\": \"tp\", \"FAIL_TO_PASS\": \"[\\\"t.py::a\\\"]\", \"PASS_TO_PASS\": []}\n",
        ),
        (
            "source.jsonl",
            "{\"prompt\": \"Do\", \"hook_code\": \"python3 reward/test.py $WORKSPACE\", \"hook_lang\": \"bash\", \"rule\": null, \"origin_template\": \"---\\nid: syn_1\\n---\", \"input_files\": [{\"file_path\": \"in/a.txt\", \"content\": \"x\"}, {\"file_path\": \"reward/test.py\", \"content\": \"print(1)\"}]}\n",
        ),
    ]);
    let of = |name: &str| only(&folder.path().join(name));
    let atlas = of("atlas.csv");
    assert_eq!(atlas.id.as_str(), "abc-1");
    assert_eq!(atlas.grading.rubric.unwrap().criteria[1].text, "two");
    let office = of("office.csv");
    assert_eq!(office.verifier.contract, Contract::OfficeAnswer);
    assert_eq!(office.solution, [Step::Say("543 million".into())]);
    let swe = of("swe.jsonl");
    assert_eq!(swe.environment.refusals.len(), 1);
    assert_eq!(swe.solution.len(), 2);
    let source = of("source.jsonl");
    assert_eq!(
        (source.format, source.id.as_str()),
        (Format::ClawGymSource, "syn_1")
    );
    let names: Vec<_> = source
        .verifier
        .files
        .iter()
        .map(|file| file.path.display().to_string())
        .collect();
    assert_eq!(names, ["check.py", "reward.sh"]);
    assert_eq!(source.files[0].path, Path::new("in/a.txt"));
}

#[test]
fn broken_rows_are_named_with_their_line() {
    let say = |name: &str, text: &str| {
        let folder = tree(&[(name, text)]);
        complaint(&folder, &load_dir(&folder.path().join(name)).unwrap_err())
    };
    insta::assert_snapshot!(say("a.csv", "uid,question,answer\nU1,q,a\nU2,q,\n"), @r#"/a.csv:3: answer: expected a text, found ""; correct the file"#);
    insta::assert_snapshot!(say("a.csv", "name,size\na,1\n"), @"/a.csv:1: columns: expected TASK, PROMPT, ENABLED_TOOLS, GTFA_CLAIMS (MCP-Atlas) or uid, question, answer (OfficeQA), found name, size; correct the file");
    insta::assert_snapshot!(say("a.csv", "TASK,PROMPT,ENABLED_TOOLS,GTFA_CLAIMS\na,p,[],claim\n"), @r#"/a.csv:2: GTFA_CLAIMS: expected a JSON list of texts, found "claim"; correct the file"#);
    insta::assert_snapshot!(say("a.jsonl", "{\"instance_id\": \"a\", \"repo\": \"r\", \"base_commit\": \"main\"}\n"), @r#"/a.jsonl:1: base_commit: expected a commit in hexadecimal, found "main"; correct the file"#);
    insta::assert_snapshot!(say("a.jsonl", "\n{\"x\": 1}\n"), @"/a.jsonl:2: the row: expected instance_id (SWE-bench) or prompt and hook_code (ClawGym source), found nothing; correct the file");
    insta::assert_snapshot!(say("a.jsonl", "{\"prompt\": \"a\", \"hook_code\": \"x\", \"rule\": {\"rules\": [{\"name\": \"n\", \"scores\": {\"0.3\": \"x\"}}]}}\n"), @r#"/a.jsonl:1: rule.rules[0].scores.0.3: expected a text for each of 0, 0.25, 0.5, 0.75, 1, found "x"; correct the file"#);
}

#[test]
fn a_set_with_one_bad_task_is_refused_whole_but_can_be_listed() {
    let folder = tree(&[
        PINCH[0],
        ("task_b.md", "---\nid: b\ngrading_type: automated\n---\n"),
    ]);
    assert!(load_dir(folder.path()).is_err());
    let each = load_each(folder.path()).unwrap();
    assert_eq!(
        each.iter()
            .map(|(_, task)| task.is_ok())
            .collect::<Vec<_>>(),
        [true, false]
    );
}

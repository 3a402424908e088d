//! The program as a person meets it: help, refusals, exit codes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod world;

use std::{fs, net::TcpListener};

use serde_json::{Value, json};
use world::{World, policy};

#[test]
fn help_names_every_command() {
    let answer = World::new().run(&["--help"]);
    assert_eq!(answer.code, Some(0));
    insta::assert_snapshot!(answer.stdout, @"
    Reinforcement learning of language models through real, unmodified agent harnesses

    Usage: espalier [OPTIONS] <COMMAND>

    Commands:
      train    Train a policy with reinforcement learning through a harness
      sft      Train a policy on rollouts of the scripted teacher, captured through the same harness
      rollout  Run rollouts and keep what was captured
      eval     Evaluate models through harnesses on held-out tasks, and write a report
      harness  Look at harness profiles, and prove one against a scripted engine
      verify   Score the rollouts of a run again, by another verifier. Nothing of them runs again
      serve    Serve an engine to any harness and capture every call
      inspect  Look into a run: what became of its rollouts, and the tree of one of them
      ledger   Check what a run captured, or make it smaller
      tree     Rebuild prefix trees from token captures that you already have
      export   Write a run's rollouts in a format that other programs read
      doctor   Say what works on this machine, and what to do about what does not
      tasks    Check tasks, or write the built-in ones to disk
      policy   Bring a policy into the form that recipes name: a Hugging Face folder
      help     Print this message or the help of the given subcommand(s)

    Options:
          --json     Print machine-readable JSON on stdout instead of text
      -h, --help     Print help
      -V, --version  Print version
    ");
}

#[test]
fn help_of_every_command_has_an_example() {
    let world = World::new();
    for command in [
        "train",
        "sft",
        "rollout",
        "eval",
        "verify",
        "serve",
        "inspect",
        "ledger verify",
        "ledger compact",
        "tree",
        "export",
        "doctor",
        "tasks check",
        "tasks write",
    ] {
        let mut arguments: Vec<&str> = command.split(' ').collect();
        arguments.push("--help");
        let answer = world.run(&arguments);
        let example = format!("Example: espalier {command} ");
        assert!(
            answer.stdout.contains(&example),
            "{command}:\n{}",
            answer.stdout
        );
    }
}

#[test]
fn tree_rebuilds_trees_from_captures() {
    let world = World::new();
    let line = |rollout: &str, call: u32, prompt: &str, output: &str| {
        let zeros = output
            .split(',')
            .map(|_| "-0.5")
            .collect::<Vec<_>>()
            .join(",");
        format!(
            "{{\"rollout\":\"{rollout}\",\"call\":{call},\"prompt_ids\":[{prompt}],\"output_ids\":[{output}],\"logprobs\":[{zeros}],\"finish\":\"stop\",\"at\":{call}}}\n"
        )
    };
    let lines = [
        line("b/2", 1, "1,2,20,3", "30,31"),
        line("a 1", 0, "1,2", "10,11,12"),
        line("b/2", 0, "1,2", "20"),
        line("a 1", 1, "1,2", "13"),
    ];
    world.write("captures.jsonl", &lines.concat());
    let answer = world.run(&["tree", "captures.jsonl", "--json", "--rows", "rows.jsonl"]);
    assert_eq!((answer.code, answer.stderr.as_str()), (Some(0), ""));
    insta::assert_snapshot!(answer.stdout, @r#"
    {"rollout":"b/2","calls":2,"nodes":2,"leaves":1,"unique_tokens":6,"generated_tokens":3,"kept_generated_tokens":3,"rows":1,"disposition":"train","forks":{}}
    {"rollout":"a 1","calls":2,"nodes":3,"leaves":2,"unique_tokens":6,"generated_tokens":4,"kept_generated_tokens":3,"rows":1,"disposition":"train","forks":{"retry":1}}
    "#);
    let rows = fs::read_to_string(world.path("rows.jsonl")).unwrap();
    assert_eq!(rows.lines().count(), 2);
    let answer = world.run(&["tree", "captures.jsonl", "--policy", "all"]);
    insta::assert_snapshot!(answer.stdout, @"
    rollout  calls  nodes  leaves  unique  generated  kept  rows  disposition  forks
    b/2          2      2       1       6          3     3     1  train
    a 1          2      3       2       6          4     4     2  train        retry 1
    ");
    assert_eq!(
        world
            .run(&["tree", "captures.jsonl", "--policy", "best"])
            .code,
        Some(2)
    );
    world.write("wrong.jsonl", &format!("{}{{}}\n", lines[0]));
    let refusal = world.refusal(&["tree", "wrong.jsonl"]);
    assert!(
        refusal.starts_with("exit 1\n") && refusal.contains("line 2 is not a call"),
        "{refusal}"
    );
}

#[test]
fn a_wrong_command_line_is_bad_usage() {
    let world = World::new();
    assert_eq!(world.run(&["trian"]).code, Some(2));
    assert_eq!(world.run(&["serve"]).code, Some(2));
}

#[test]
fn an_unknown_key_of_a_recipe_is_named_with_its_line() {
    let world = World::new();
    world.recipe("[train]\nsteps = 3\nstep_max = 4\n");
    let refusal = world.refusal(&["rollout", "recipe.toml"]);
    // All keys are listed; new ones are no news here.
    let (before, keys) = refusal.split_once("expected one of ").unwrap();
    let (keys, after) = keys.split_once('\n').unwrap();
    assert!(keys.contains("`steps`, `tasks_per_step`"), "{keys}");
    insta::assert_snapshot!(format!("{before}expected one of KEYS\n{after}"), @"
    exit 2
    error: recipe recipe.toml: TOML parse error at line 6, column 1
      |
    6 | step_max = 4
      | ^^^^^^^^
    unknown field `step_max`, expected one of KEYS
      hint: docs/recipes.md lists every key with its default
    ");
}

#[test]
fn a_wrong_type_in_a_recipe_is_named_with_its_line() {
    let world = World::new();
    world.recipe("[rollout]\nconcurrency = \"many\"\n");
    insta::assert_snapshot!(world.refusal(&["rollout", "recipe.toml"]), @r#"
    exit 2
    error: recipe recipe.toml: TOML parse error at line 5, column 15
      |
    5 | concurrency = "many"
      |               ^^^^^^
    invalid type: string "many", expected usize
      hint: docs/recipes.md lists every key with its default
    "#);
}

#[test]
fn a_value_out_of_range_is_named() {
    let world = World::new();
    world.recipe("[train]\nsamples = 1\n");
    insta::assert_snapshot!(world.refusal(&["rollout", "recipe.toml"]), @"
    exit 2
    error: recipe recipe.toml: train.samples: expected at least 2 (a group of one has no baseline), or 1 with [train.ppo], found 1
      hint: docs/recipes.md lists every key with its range
    ");
}

#[test]
fn a_recipe_that_is_not_there() {
    insta::assert_snapshot!(World::new().refusal(&["train", "nosuch.toml"]), @"
    exit 2
    error: recipe nosuch.toml: No such file or directory (os error 2)
      hint: recipes are TOML files, see recipes/
    ");
}

#[test]
fn a_policy_folder_that_is_not_there() {
    let world = World::new();
    world.write("recipe.toml", "[policy]\nfolder = \"nosuch\"\n");
    insta::assert_snapshot!(world.refusal(&["eval", "recipe.toml"]), @"
    exit 1
    error: policy nosuch: tokenizer and template
      cause: codec: nosuch/tokenizer.json is missing; expected a Hugging Face model folder: point the tokenizer setting at one that holds it
    ");
    assert!(
        !world.path("runs").exists(),
        "a run that cannot begin leaves no directory"
    );
}

#[test]
fn a_run_directory_is_never_overwritten() {
    let world = World::new();
    world.recipe("");
    fs::create_dir(world.path("mine")).unwrap();
    let arguments = [
        "rollout",
        "recipe.toml",
        "--teacher",
        "--tasks-max",
        "1",
        "--out",
        "mine",
    ];
    insta::assert_snapshot!(world.refusal(&arguments), @"
    exit 2
    error: run directory mine exists already
      hint: go on with --resume DIR, choose another --out DIR, or remove it
    ");
    assert_eq!(fs::read_dir(world.path("mine")).unwrap().count(), 0);
}

#[test]
fn a_harness_that_nobody_knows() {
    let world = World::new();
    world.recipe("");
    let arguments = [
        "rollout",
        "recipe.toml",
        "--teacher",
        "--tasks-max",
        "1",
        "--harness",
        "nosuch",
        "--out",
        "new",
    ];
    insta::assert_snapshot!(world.refusal(&arguments), @"
    exit 1
    error: harness nosuch
      cause: no harness profile `nosuch`: looked into the built-in profiles; known: claude-code, claude-code-bare, codex, gemini-cli, kimi-code, mini-swe-agent, openclaw, opencode, pi, qwen-code, react; add a file nosuch.toml (docs/harnesses.md shows one)
    ");
    assert!(
        !world.path("new").exists(),
        "nothing is in the way of the next try"
    );
}

#[test]
fn engines_that_do_not_exist() {
    let world = World::new();
    insta::assert_snapshot!(world.refusal(&["serve", "--engine", "tinker:http://127.0.0.1:8000"]), @r#"
    exit 2
    error: engine "tinker:http://127.0.0.1:8000": kind tinker does not exist yet
      hint: today there are embedded:DIR, vllm:URL, sglang:URL, openai:URL and scripted:FILE
    "#);
    insta::assert_snapshot!(world.refusal(&["serve", "--engine", "magic:wand"]), @r#"
    exit 2
    error: engine "magic:wand": unknown kind "magic"
      hint: today there are embedded:DIR, vllm:URL, sglang:URL, openai:URL and scripted:FILE
    "#);
    insta::assert_snapshot!(world.refusal(&["serve", "--engine", "scripted:replies.jsonl"]), @"
    exit 2
    error: a scripted engine has no tokenizer of its own
      hint: add --tokenizer DIR, a folder with tokenizer.json and chat template
    ");
}

#[test]
fn a_directory_without_a_ledger_cannot_be_inspected() {
    let world = World::new();
    let refusal = world.refusal(&["inspect", "nosuch"]);
    assert!(
        refusal.starts_with("exit 1\nerror: run nosuch\n  cause: "),
        "{refusal}"
    );
    assert!(refusal.contains("nosuch/ledger.sqlite"), "{refusal}");
}

#[test]
fn doctor_says_what_a_recipe_lacks() {
    let world = World::new();
    world.write(
        "recipe.toml",
        "harnesses = [\"nosuch\"]\n[policy]\nfolder = \"gone\"\n",
    );
    let answer = world.run(&["doctor", "recipe.toml", "--json"]);
    assert_eq!(answer.code, Some(1));
    let lines: Vec<Value> = serde_json::from_str(&answer.stdout).unwrap();
    let missing: Vec<&str> = lines
        .iter()
        .filter(|line| line["state"] == "missing")
        .map(|line| line["name"].as_str().unwrap())
        .collect();
    assert!(missing.contains(&"harness nosuch"), "{missing:?}");
    assert!(missing.contains(&"policy tokenizer"), "{missing:?}");
    for line in lines.iter().filter(|line| line["state"] != "ok") {
        assert_ne!(line["costs"], "", "{line}");
        assert_ne!(line["advice"], "", "{line}");
    }
}

#[test]
fn tasks_are_written_read_and_tried_out() {
    let world = World::new();
    world.write("few.toml", "seed = 5\ntrain = 2\nheld_out = 1\n");
    let answer = world.run(&["tasks", "write", "chores:few.toml", "--out", "mine"]);
    assert_eq!(
        (answer.code, answer.stdout.as_str()),
        (Some(0), "3 tasks are in mine\n"),
        "{}",
        answer.stderr
    );
    let again = world.refusal(&["tasks", "write", "chores:few.toml", "--out", "mine"]);
    assert!(
        again.starts_with("exit 2\nerror: mine exists already\n"),
        "{again}"
    );
    let answer = world.run(&["tasks", "check", "mine", "--json"]);
    assert_eq!(answer.code, Some(0), "{}", answer.stderr);
    let lines: Vec<Value> = answer
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 4, "{lines:?}");
    assert_eq!(lines[0]["format"], "own");
    assert_eq!(lines[0]["gates"]["forgery"], json!({"pass": true}));
    assert_eq!(lines[3]["counts"], json!({"admitted": 3}), "{lines:?}");

    // A verifier that pays for nothing.
    let task = fs::read_dir(world.path("mine/held-out"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap();
    fs::write(task.path().join("verify/check.sh"), "echo 1\n").unwrap();
    let refusal = world.run(&["tasks", "check", "mine"]);
    assert_eq!(refusal.code, Some(1));
    assert!(
        refusal.stdout.contains("doing nothing scores 1, not 0"),
        "{}",
        refusal.stdout
    );

    fs::remove_file(task.path().join("verify/check.sh")).unwrap();
    let refusal = world.run(&["tasks", "check", "mine", "--parse-only"]);
    assert_eq!(refusal.code, Some(1));
    assert!(
        refusal.stdout.contains("the task has no verifier"),
        "{}",
        refusal.stdout
    );
}

#[test]
fn a_port_in_use_is_named_and_leaves_nothing() {
    let world = World::new();
    world.write(
        "replies.jsonl",
        "{\"task\": \"*\", \"content\": \"Hello.\"}\n",
    );
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let policy = policy().display().to_string();
    let arguments = [
        "serve",
        "--engine",
        "scripted:replies.jsonl",
        "--tokenizer",
        &policy,
        "--listen",
        &address,
        "--admin",
        "127.0.0.1:0",
        "--run",
        "served",
    ];
    let refusal = world.refusal(&arguments).replace(&address, "ADDRESS");
    insta::assert_snapshot!(refusal, @"
    exit 1
    error: the gateway could not start
      cause: cannot listen on ADDRESS: the address is in use; stop the process that holds it, or choose another address
    ");
    assert!(!world.path("served").exists());
    drop(taken);
}

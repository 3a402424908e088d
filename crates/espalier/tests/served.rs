//! A served gateway, from the admin API to what is on the disk: captured, inspected, left out on
//! demand, verified, made smaller.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod world;

use std::fs;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use world::{World, policy, post, serve, serve_with};

#[test]
fn a_served_rollout_is_captured_and_can_be_inspected() {
    let world = World::new();
    let mut served = serve(&world);
    let text = |key: &str| served.hello[key].as_str().unwrap().to_owned();
    let (base, admin, token) = (text("base_url"), text("admin_url"), text("admin_token"));
    let (status, _) = post(&admin, "/v1/rollouts", "not the token", &json!({}));
    assert_eq!(status, 401);
    for id in ["closed", "open"] {
        let (status, opened) = post(
            &admin,
            "/v1/rollouts",
            &token,
            &json!({"id": id, "task": "greet"}),
        );
        assert_eq!(status, 200, "{opened}");
        let key = opened["key"].as_str().unwrap();
        let request = json!({"model": "m", "messages": [{"role": "user", "content": "Hi."}]});
        let path = format!("{}/v1/chat/completions", opened["path"].as_str().unwrap());
        let (status, reply) = post(&base, &path, key, &request);
        assert_eq!(status, 200, "{reply}");
        assert_eq!(reply["choices"][0]["message"]["content"], "Hello.");
    }
    let (status, closed) = post(
        &admin,
        "/v1/rollouts/closed/close",
        &token,
        &json!({"reward": 1.0}),
    );
    assert_eq!(status, 200, "{closed}");

    let process = Pid::from_child(&served.child);
    kill_process(process, Signal::INT).unwrap();
    assert_eq!(served.child.wait().unwrap().code(), Some(130));

    let answer = world.run(&["inspect", "served", "--json"]);
    let overview: Value = serde_json::from_str(&answer.stdout).unwrap();
    assert_eq!(
        overview["dispositions"],
        json!({"discard": 1, "train": 1}),
        "{overview}"
    );
    assert_eq!(overview["faults"], json!({"interrupted": 1}));
    assert_eq!(overview["calls"], 2);
    let answer = world.run(&["inspect", "served", "closed"]);
    assert_eq!(answer.code, Some(0), "{}", answer.stderr);
    for part in ["user       Hi.", "assistant  Hello.", "reward 1"] {
        assert!(
            answer.stdout.contains(part),
            "{part} is not in\n{}",
            answer.stdout
        );
    }
}

/// Every byte of a folder, compressed bodies of the ledger spelled out by reading it as well.
fn everything(world: &World, run: &str) -> String {
    let mut bytes = Vec::new();
    for entry in fs::read_dir(world.path(run)).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            bytes.extend(fs::read(path).unwrap());
        }
    }
    let mut text = String::from_utf8_lossy(&bytes).into_owned();
    let run = ledger::Ledger::open_read_only(&world.path(run)).unwrap();
    for rollout in run.rollouts(&[]).unwrap() {
        for call in run.calls(&rollout.spec.id).unwrap() {
            text.push_str(&serde_json::to_string(&call).unwrap());
            let ids = call.generation.iter().flat_map(|g| &g.token_ids);
            let ids: Vec<u32> = call.prompt_ids.iter().chain(ids).copied().collect();
            text.push_str(&codec::Codec::load(&policy()).unwrap().decode(&ids));
        }
        text.push_str(&serde_json::to_string(&rollout).unwrap());
    }
    text
}

#[test]
fn what_must_not_be_written_down_is_nowhere_in_the_run() {
    const KEY: &str = "sk-0123456789abcdef";
    const MAIL: &str = "ann@example.org";
    let rules = "patterns = ['sk-[0-9a-f]{16}']\npointers = ['/user']\nopt_out = ['silent']\n\
                 [tenants.acme]\npatterns = ['[a-z]+@example[.]org']\n";
    // Without rules all of it is found, so that the search is known to look in the right place.
    for rules in [None, Some(rules)] {
        let world = World::new();
        world.write(
            "replies.jsonl",
            &format!("{{\"task\": \"*\", \"content\": \"Your key is {KEY}.\"}}\n"),
        );
        let mut more = Vec::new();
        if let Some(rules) = rules {
            world.write("rules.toml", rules);
            more = vec!["--redact", "rules.toml"];
        }
        let mut served = serve_with(&world, &more);
        let text = |key: &str| served.hello[key].as_str().unwrap().to_owned();
        let (base, admin, token) = (text("base_url"), text("admin_url"), text("admin_token"));
        for tenant in ["other", "acme", "silent"] {
            let open = json!({"id": tenant, "task": "greet", "labels": {"tenant": tenant}});
            let (status, opened) = post(&admin, "/v1/rollouts", &token, &open);
            assert_eq!(status, 200, "{opened}");
            let key = opened["key"].as_str().unwrap();
            let said = format!("I am {MAIL} of {tenant}, my key is {KEY}, hush-{tenant}.");
            let request = json!({"model": "m", "user": format!("person-{tenant}"),
                "messages": [{"role": "user", "content": said}]});
            let path = format!("{}/v1/chat/completions", opened["path"].as_str().unwrap());
            let (status, reply) = post(&base, &path, key, &request);
            assert_eq!(status, 200, "{reply}");
            // The harness gets what the model said.
            let content = reply["choices"][0]["message"]["content"].as_str().unwrap();
            assert!(content.contains(KEY), "{content}");
        }
        let verdict = json!({"verdict": {"reward": 1.0, "seconds": 0.1,
            "evidence": format!("it printed {KEY}")}});
        let (status, closed) = post(&admin, "/v1/rollouts/acme/close", &token, &verdict);
        assert_eq!(status, 200, "{closed}");
        let running = everything(&world, "served");
        kill_process(Pid::from_child(&served.child), Signal::INT).unwrap();
        assert_eq!(served.child.wait().unwrap().code(), Some(130));
        for (when, found) in [
            ("running", running),
            ("after", everything(&world, "served")),
        ] {
            let told = |text: &str| found.contains(text);
            let open = rules.is_none();
            assert_eq!(told(KEY), open, "{when}");
            assert_eq!(told("person-other"), open, "{when}");
            assert_eq!(told("hush-silent"), open, "{when}");
            // Rules of one tenant are none of another's.
            assert!(told(&format!("{MAIL} of other")), "{when}");
            assert_eq!(told(&format!("{MAIL} of acme")), open, "{when}");
            assert!(told("hush-acme"), "{when}");
        }
    }
    let world = World::new();
    world.write("rules.toml", "patterns = ['(']\n");
    let refusal = world.refusal(&[
        "serve",
        "--engine",
        "scripted:replies.jsonl",
        "--tokenizer",
        &policy().display().to_string(),
        "--redact",
        "rules.toml",
    ]);
    insta::assert_snapshot!(refusal, @r#"
    exit 2
    error: --redact: redaction rule "(": regex parse error:
        (
        ^
    error: unclosed group; nothing was written
      hint: docs/ledger.md says how rules are written
    "#);
    world.recipe("[redact]\npointers = ['user']\n");
    insta::assert_snapshot!(world.refusal(&["rollout", "recipe.toml"]), @r#"
    exit 2
    error: recipe recipe.toml: redact: redaction rule "user": a pointer starts with `/`, e.g. `/metadata/user_id`; nothing was written
      hint: docs/ledger.md says how rules are written
    "#);
}

#[test]
fn a_ledger_is_verified_and_made_smaller() {
    let world = World::new();
    let mut served = serve(&world);
    let text = |key: &str| served.hello[key].as_str().unwrap().to_owned();
    let (base, admin, token) = (text("base_url"), text("admin_url"), text("admin_token"));
    let open = json!({"id": "r", "task": "greet"});
    let (_, opened) = post(&admin, "/v1/rollouts", &token, &open);
    let request = json!({"model": "m", "messages": [{"role": "user", "content": "Old words."}]});
    let path = format!("{}/v1/chat/completions", opened["path"].as_str().unwrap());
    let (status, _) = post(&base, &path, opened["key"].as_str().unwrap(), &request);
    assert_eq!(status, 200);
    let reward = json!({"reward": 1.0});
    assert_eq!(post(&admin, "/v1/rollouts/r/close", &token, &reward).0, 200);
    // Beside the process that writes: reading is free, changing is not.
    let answer = world.run(&["ledger", "verify", "served"]);
    assert_eq!(answer.stdout, "served: 1 rollouts, 1 calls, all intact\n");
    let refusal = world.refusal(&["ledger", "compact", "served"]);
    assert!(refusal.contains("process"), "{refusal}");
    kill_process(Pid::from_child(&served.child), Signal::INT).unwrap();
    assert_eq!(served.child.wait().unwrap().code(), Some(130));

    // It ended today: nothing is old enough.
    let thinned = |arguments: &[&str]| {
        let arguments = [&["ledger", "compact", "served", "--json"], arguments].concat();
        let answer = world.run(&arguments);
        let found: Value = serde_json::from_str(&answer.stdout).unwrap();
        found["thinned"].as_u64().unwrap()
    };
    assert_eq!(thinned(&["--raw-days", "1", "--text-days", "2"]), 0);
    assert!(everything(&world, "served").contains("Old words."));
    let before = world.run(&["inspect", "served", "--json"]).stdout;
    assert_eq!(thinned(&["--text-days", "0"]), 1);
    let call = |run: &ledger::Ledger| {
        let id = record::RolloutId::new("r").unwrap();
        run.calls(&id).unwrap().remove(0)
    };
    let run = ledger::Ledger::open_read_only(&world.path("served")).unwrap();
    let kept = call(&run);
    assert!(kept.conversation.messages.is_empty() && kept.request.is_null());
    assert!(!kept.prompt_ids.is_empty() && kept.generation.is_some());
    drop(run);
    // What is counted is what was captured.
    assert_eq!(world.run(&["inspect", "served", "--json"]).stdout, before);

    // A byte of the body on the disk.
    let file = world.path("served/ledger.sqlite");
    let mut bytes = fs::read(&file).unwrap();
    let frame = [0x28, 0xb5, 0x2f, 0xfd];
    let at = bytes.windows(4).position(|found| found == frame).unwrap();
    bytes[at + 12] ^= 1;
    fs::write(&file, bytes).unwrap();
    let answer = world.run(&["ledger", "verify", "served"]);
    assert_eq!(answer.code, Some(1));
    let said = format!("{}{}", answer.stdout, answer.stderr);
    assert!(
        said.contains("call r#0") && said.contains("1 records are damaged"),
        "{said}"
    );
}

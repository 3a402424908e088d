use serde_json::json;
use task::Task;

use super::*;

/// A task with three services made of data, as its own format says them.
fn task(error_rate: f64) -> Task {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write(
        "task.toml",
        &format!(
            "format = 1\nid = \"t\"\nfamily = \"f\"\n[verifier]\nargv = [\"true\"]\n{}",
            include_str!("services.toml").replace("RATE", &error_rate.to_string())
        ),
    );
    write("instruction.md", "x");
    write("verify/check.sh", "x");
    write(
        "mail.json",
        r#"{"messages": [
            {"id": "m1", "from": "ann", "subject": "Rent", "date": "2026-01-02T10:00:00Z", "tags": ["home", "money"]},
            {"id": "m2", "from": "bob", "subject": "Lunch", "date": "2026-01-10T10:00:00Z", "tags": ["food"]}
        ], "events": [
            {"id": "e1", "start": "2026-01-10T09:00:00Z"},
            {"id": "e2", "start": "2026-01-11T08:00:00Z"}
        ]}"#,
    );
    task::load_dir(folder.path()).unwrap().remove(0)
}

fn begun(error_rate: f64) -> State {
    let mut state = State::new(&task(error_rate));
    state.begin();
    state
}

fn ask(state: &mut State, path: &str, body: Value) -> (u16, Value) {
    state.ask(9100, "POST", path, &body)
}

#[test]
fn lists_are_filtered_sorted_and_cut() {
    let mut state = begun(0.0);
    let mut ids = |path: &str, body: Value, list: &str| -> Vec<String> {
        let (status, answer) = ask(&mut state, path, body);
        assert_eq!(status, 200, "{answer}");
        let records = answer[list].as_array().unwrap();
        assert_eq!(answer["total"], records.len());
        let id = |record: &Value| record["id"].as_str().unwrap().to_owned();
        records.iter().map(id).collect()
    };
    assert_eq!(ids("/mail/list", json!({}), "messages"), ["m1", "m2"]);
    assert_eq!(
        ids("/mail/list", json!({"from": "bob"}), "messages"),
        ["m2"]
    );
    assert_eq!(
        ids("/mail/list", json!({"from": "all"}), "messages"),
        ["m1", "m2"]
    );
    assert_eq!(
        ids("/mail/list", json!({"query": "Ren"}), "messages"),
        ["m1"]
    );
    assert_eq!(ids("/mail/list", json!({"tag": "mon"}), "messages"), ["m1"]);
    assert_eq!(ids("/mail/list", json!({"max": 1}), "messages"), ["m1"]);
    // A week up to the day after the newest one.
    assert_eq!(ids("/mail/recent", json!({}), "messages"), ["m2"]);
    assert_eq!(
        ids("/mail/recent", json!({"days": "30"}), "messages"),
        ["m1", "m2"]
    );
    assert_eq!(ids("/day", json!({"date": "2026-01-10"}), "events"), ["e1"]);
    assert_eq!(
        ids("/day", json!({"date": "2026-01-10", "days": 2}), "events"),
        ["e1", "e2"]
    );
    assert_eq!(ask(&mut state, "/day", json!({"date": "soon"})).0, 404);
    assert_eq!(ask(&mut state, "/day", json!({})).0, 422);
}

#[test]
fn records_are_added_changed_and_taken_away_and_all_of_it_is_logged() {
    let mut state = begun(0.0);
    let (_, added) = ask(
        &mut state,
        "/events/add",
        json!({"start": "2026-02-01T08:00:00Z"}),
    );
    assert_eq!(added["status"], "created");
    assert_eq!(added["event"]["id"], "ev_003");
    let (_, changed) = ask(
        &mut state,
        "/events/move",
        json!({"id": "e1", "start": "later", "id2": 1}),
    );
    assert_eq!(
        changed["record"],
        json!({"id": "e1", "start": "later", "moved": true})
    );
    assert_eq!(
        ask(&mut state, "/events/get", json!({"id": "e1"})).1["start"],
        "later"
    );
    assert_eq!(
        ask(&mut state, "/events/delete", json!({"id": "e2"})).0,
        200
    );
    assert_eq!(ask(&mut state, "/events/get", json!({"id": "e2"})).0, 404);
    assert_eq!(ask(&mut state, "/mail/send", json!({"to": "ann"})).0, 200);
    assert_eq!(ask(&mut state, "/mail/send", json!({})).0, 422);
    assert_eq!(ask(&mut state, "/none", json!({})).0, 404);
    assert_eq!(state.ask(9100, "GET", "/mail/send", &json!({})).0, 405);
    assert_eq!(state.ask(9101, "POST", "/mail/send", &json!({})).0, 404);
    let audit = state.audit();
    let mail = &audit.services["mail"];
    assert_eq!(mail.calls.len(), 9);
    assert_eq!(mail.logs["created"].len(), 1);
    assert_eq!(mail.logs["deleted"].len(), 1);
    assert_eq!(mail.logs["sent"], [json!({"to": "ann"})]);
    assert!(audit.has("mail", "sent") && !audit.has("mail", "nothing") && audit.used("mail"));
    assert_eq!(
        audit
            .dispatches()
            .iter()
            .filter(|(tool, _)| *tool == "send_mail")
            .count(),
        2
    );
    let again: Audit = serde_json::from_slice(&serde_json::to_vec(&audit).unwrap()).unwrap();
    assert_eq!(again, audit);
}

#[test]
fn before_the_log_begins_nothing_counts() {
    let mut state = State::new(&task(0.9));
    for _ in 0..5 {
        assert_eq!(ask(&mut state, "/events/add", json!({"start": "x"})).0, 200);
    }
    state.begin();
    assert_eq!(state.audit().services["mail"].calls.len(), 0);
    let records = state.services[&9100].lists["events"].len();
    assert_eq!(records, 2);
}

#[test]
fn failures_are_spread_evenly_and_are_the_same_each_time() {
    let statuses = || -> Vec<u16> {
        let mut state = begun(0.5);
        (0..6)
            .map(|_| ask(&mut state, "/mail/list", json!({})).0)
            .collect()
    };
    assert_eq!(statuses(), [200, 500, 200, 429, 200, 500]);
    assert_eq!(statuses(), statuses());
}

#[test]
fn a_rollout_that_asks_without_end_is_refused_and_counted() {
    let mut state = begun(0.0);
    for _ in 0..CALLS_MAX {
        ask(&mut state, "/mail/send", json!({}));
    }
    assert_eq!(ask(&mut state, "/mail/send", json!({"to": "x"})).0, 429);
    let audit = state.audit();
    assert_eq!(
        (audit.refused, audit.services["mail"].calls.len()),
        (1, CALLS_MAX)
    );
}

#[test]
fn routes_with_a_tool_are_tools() {
    let mut state = begun(0.0);
    let listed = state.tools();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0]["inputSchema"]["required"], json!(["to"]));
    let sent = state.call("send_mail", &json!({"to": "ann"})).unwrap();
    assert!(!sent.failed && sent.text.contains("ann"), "{sent:?}");
    assert!(state.call("send_mail", &json!({})).unwrap().failed);
    assert!(state.call("fly", &json!({})).is_none());
    assert!(state.audit().has("mail", "sent"));
}

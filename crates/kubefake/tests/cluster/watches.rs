//! Watches: nothing is lost, nothing comes twice, and every way to end.

use std::collections::BTreeMap;

use kubefake::WatchFault;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::support::{Client, config_map, control_plane};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

async fn revision(client: &Client) -> String {
    let list = client.get(MAPS).await.ok();
    list["metadata"]["resourceVersion"]
        .as_str()
        .unwrap()
        .to_owned()
}

fn event(kind: &str, name: &str) -> (String, String) {
    (kind.to_owned(), name.to_owned())
}

#[tokio::test]
async fn a_watch_tells_what_happens_to_what_it_chose() {
    let (fake, client) = control_plane(|_| {}).await;
    let mut map = config_map("a", "1");
    map["metadata"]["labels"] = json!({"x": "1"});
    client.post(MAPS, &map).await.ok();
    let mut all = client.watch(&format!("{MAPS}?watch=1")).await;
    let mut some = client
        .watch(&format!("{MAPS}?watch=1&labelSelector=x%3D1"))
        .await;
    assert_eq!(all.told().await, event("ADDED", "a"));
    assert_eq!(some.told().await, event("ADDED", "a"));
    client.post(MAPS, &config_map("b", "1")).await.ok();
    let path = format!("{MAPS}/a");
    // It leaves the choice, and comes back.
    for label in ["2", "1"] {
        let patch = json!({"metadata": {"labels": {"x": label}}});
        client.patch(&path, "merge-patch", &patch).await.ok();
    }
    client.delete(&path).await.ok();
    for expected in [
        event("ADDED", "b"),
        event("MODIFIED", "a"),
        event("MODIFIED", "a"),
        event("DELETED", "a"),
    ] {
        assert_eq!(all.told().await, expected);
    }
    for kind in ["DELETED", "ADDED", "DELETED"] {
        assert_eq!(some.told().await, event(kind, "a"));
    }
    fake.end().await;
}

#[tokio::test]
async fn a_watch_goes_on_where_it_was_left() {
    let (fake, client) = control_plane(|_| {}).await;
    let from = revision(&client).await;
    client.post(MAPS, &config_map("a", "1")).await.ok();
    let mut first = client
        .watch(&format!("{MAPS}?watch=1&resourceVersion={from}"))
        .await;
    let told = first.next().await.unwrap();
    assert_eq!(told["type"], "ADDED");
    let seen = told["object"]["metadata"]["resourceVersion"]
        .as_str()
        .unwrap()
        .to_owned();
    drop(first);
    client.post(MAPS, &config_map("b", "1")).await.ok();
    client.delete(&format!("{MAPS}/a")).await.ok();
    let mut second = client
        .watch(&format!(
            "{MAPS}?watch=1&resourceVersion={seen}&timeoutSeconds=1"
        ))
        .await;
    assert_eq!(second.told().await, event("ADDED", "b"));
    assert_eq!(second.told().await, event("DELETED", "a"));
    // Its time is up: an orderly end.
    assert_eq!(second.next().await, None);
    fake.end().await;
}

#[tokio::test]
async fn a_watch_that_asks_for_it_is_told_where_the_beginning_ends() {
    let (fake, client) = control_plane(|_| {}).await;
    client.post(MAPS, &config_map("a", "1")).await.ok();
    let path = format!("{MAPS}?watch=1&sendInitialEvents=true&allowWatchBookmarks=true");
    client.get(&path).await.refused(422, "Invalid");
    let path = format!("{path}&resourceVersionMatch=NotOlderThan&timeoutSeconds=1");
    let mut watcher = client.watch(&path).await;
    assert_eq!(watcher.told().await, event("ADDED", "a"));
    let mark = watcher.next().await.unwrap();
    assert_eq!(mark["type"], "BOOKMARK");
    let metadata = &mark["object"]["metadata"];
    assert_eq!(metadata["annotations"]["k8s.io/initial-events-end"], "true");
    assert_eq!(
        metadata["resourceVersion"],
        revision(&client).await.as_str()
    );
    // And once more before the end, so that the next watch need not begin anew.
    let last = watcher.next().await.unwrap();
    assert_eq!(last["type"], "BOOKMARK");
    assert!(last["object"]["metadata"]["annotations"].is_null());
    assert_eq!(watcher.next().await, None);
    fake.end().await;
}

#[tokio::test]
async fn bookmarks_move_on_though_nothing_that_was_chosen_happens() {
    let (fake, client) = control_plane(|_| {}).await;
    let from = revision(&client).await;
    let path = format!("{MAPS}?watch=1&resourceVersion={from}&fieldSelector=metadata.name%3Dnone");
    let mut with = client.watch(&format!("{path}&allowWatchBookmarks=1")).await;
    let mut without = client.watch(&path).await;
    client.post(MAPS, &config_map("a", "1")).await.ok();
    let now = revision(&client).await;
    assert_ne!(now, from);
    assert_eq!(fake.hit_watches(WatchFault::Bookmark), 2);
    let mark = with.next().await.unwrap();
    assert_eq!(mark["type"], "BOOKMARK");
    assert_eq!(mark["object"]["kind"], "ConfigMap");
    assert_eq!(mark["object"]["metadata"]["resourceVersion"], now.as_str());
    fake.hit_watches(WatchFault::End);
    assert_eq!(without.next().await, None);
    fake.end().await;
}

#[tokio::test]
async fn a_past_that_is_forgotten_is_gone() {
    let (fake, client) = control_plane(|_| {}).await;
    let from = revision(&client).await;
    client.post(MAPS, &config_map("a", "1")).await.ok();
    let mut open = client.watch(&format!("{MAPS}?watch=1")).await;
    assert_eq!(open.told().await, event("ADDED", "a"));
    fake.compact();
    let mut late = client
        .watch(&format!("{MAPS}?watch=1&resourceVersion={from}"))
        .await;
    let error = late.next().await.unwrap();
    assert_eq!(error["type"], "ERROR");
    assert_eq!(error["object"]["code"], 410);
    assert_eq!(error["object"]["reason"], "Expired");
    let message = error["object"]["message"].as_str().unwrap();
    assert!(
        message.starts_with(&format!("too old resource version: {from} (")),
        "{message}"
    );
    assert_eq!(late.next().await, None);
    // Who kept up is not concerned, until the fault says so.
    client.post(MAPS, &config_map("b", "1")).await.ok();
    assert_eq!(open.told().await, event("ADDED", "b"));
    assert_eq!(fake.hit_watches(WatchFault::Expire), 1);
    assert_eq!(open.next().await.unwrap()["object"]["code"], 410);
    fake.end().await;
}

/// A client that does all by the book: it lists, watches, and after each break goes on where it
/// was, or lists again after a 410. In the end it knows what the server knows.
#[tokio::test]
async fn a_client_that_is_cut_off_again_and_again_misses_nothing() {
    let seed = 11;
    println!("seed {seed}");
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let (fake, client) = control_plane(|_| {}).await;
    let mut known: BTreeMap<String, Value> = BTreeMap::new();
    let mut seen = revision(&client).await;
    let name_of = |object: &Value| object["metadata"]["name"].as_str().unwrap().to_owned();
    let mut ends = BTreeMap::new();
    for round in 0..40 {
        let path = format!("{MAPS}?watch=1&resourceVersion={seen}");
        let mut watcher = client.watch(&path).await;
        for step in 0..random.random_range(0..6) {
            let name = format!("m{}", random.random_range(0..5));
            let path = format!("{MAPS}/{name}");
            if random.random_bool(0.4) {
                client.delete(&path).await;
            } else if random.random_bool(0.5) {
                client
                    .post(MAPS, &config_map(&name, &format!("{round}.{step}")))
                    .await;
            } else {
                let patch = json!({"data": {"value": format!("{round}.{step}")}});
                client.patch(&path, "merge-patch", &patch).await;
            }
        }
        let fault = [WatchFault::Cut, WatchFault::End, WatchFault::Expire][round % 3];
        if random.random_bool(0.2) {
            // While nobody looks, the past goes.
            drop(watcher);
            client
                .post(MAPS, &config_map(&format!("x{round}"), "x"))
                .await;
            fake.compact();
            watcher = client.watch(&path).await;
        } else {
            // It may come before the last changes were told: the next watch tells them.
            fake.hit_watches(fault);
        }
        let end = loop {
            match watcher.try_next().await {
                Err(_) => break "cut",
                Ok(None) => break "end",
                Ok(Some(event)) if event["type"] == "ERROR" => {
                    assert_eq!(event["object"]["code"], 410);
                    let list = client.get(MAPS).await.ok();
                    seen = list["metadata"]["resourceVersion"]
                        .as_str()
                        .unwrap()
                        .to_owned();
                    let items = list["items"].as_array().unwrap();
                    known = items
                        .iter()
                        .map(|item| (name_of(item), item["data"].clone()))
                        .collect();
                    break "gone";
                }
                Ok(Some(event)) => {
                    let object = &event["object"];
                    let name = name_of(object);
                    let version = &object["metadata"]["resourceVersion"];
                    let version = version.as_str().unwrap().to_owned();
                    let number = |text: &str| text.parse::<u64>().unwrap();
                    assert!(number(&version) > number(&seen), "twice, seed {seed}");
                    seen = version;
                    let before = known.contains_key(&name);
                    match event["type"].as_str().unwrap() {
                        "ADDED" => assert!(!before, "{name} added twice, seed {seed}"),
                        "MODIFIED" | "DELETED" => assert!(before, "{name}, seed {seed}"),
                        other => panic!("{other}"),
                    }
                    if event["type"] == "DELETED" {
                        known.remove(&name);
                    } else {
                        known.insert(name, object["data"].clone());
                    }
                }
            }
        };
        *ends.entry(end).or_insert(0) += 1;
    }
    let path = format!("{MAPS}?watch=1&resourceVersion={seen}&timeoutSeconds=1");
    let mut watcher = client.watch(&path).await;
    while let Some(event) = watcher.next().await {
        let name = name_of(&event["object"]);
        if event["type"] == "DELETED" {
            known.remove(&name);
        } else {
            known.insert(name, event["object"]["data"].clone());
        }
    }
    let list = client.get(MAPS).await.ok();
    let items = list["items"].as_array().unwrap();
    let there: BTreeMap<String, Value> = items
        .iter()
        .map(|item| (name_of(item), item["data"].clone()))
        .collect();
    assert_eq!(known, there, "seed {seed}");
    for end in ["cut", "end", "gone"] {
        assert!(ends.contains_key(end), "no {end} in {ends:?}, seed {seed}");
    }
    fake.end().await;
}

//! Lists: what is chosen, pages of one moment, the past and its end.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::support::{config_map, control_plane};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

fn names(list: &Value) -> Vec<String> {
    let items = list["items"].as_array().unwrap();
    items
        .iter()
        .map(|item| item["metadata"]["name"].as_str().unwrap().to_owned())
        .collect()
}

#[tokio::test]
async fn lists_show_what_was_chosen() {
    let (fake, client) = control_plane(|_| {}).await;
    for (name, tier) in [("a", "1"), ("b", "2"), ("c", "1")] {
        let mut map = config_map(name, "x");
        map["metadata"]["labels"] = json!({"tier": tier});
        client.post(MAPS, &map).await.ok();
    }
    let list = async |query: &str| names(&client.get(&format!("{MAPS}?{query}")).await.ok());
    assert_eq!(list("").await, ["a", "b", "c"]);
    assert_eq!(list("labelSelector=tier%3D1").await, ["a", "c"]);
    assert_eq!(list("labelSelector=tier+in+(2,3)").await, ["b"]);
    assert_eq!(list("fieldSelector=metadata.name%3Db").await, ["b"]);
    let wrong = client
        .get(&format!("{MAPS}?fieldSelector=data.value%3Dx"))
        .await;
    wrong.refused(400, "BadRequest");
    let all = client.get("/api/v1/configmaps").await.ok();
    assert_eq!(names(&all).len(), 3);
    assert!(
        all["items"][0]["kind"].is_null(),
        "the list says what its items are"
    );
    client
        .delete(&format!("{MAPS}?labelSelector=tier%3D1"))
        .await
        .ok();
    assert_eq!(list("").await, ["b"]);
    fake.end().await;
}

#[tokio::test]
async fn pages_are_of_one_moment_until_it_is_forgotten() {
    let (fake, client) = control_plane(|_| {}).await;
    for at in 0..5 {
        client
            .post(MAPS, &config_map(&format!("m{at}"), "x"))
            .await
            .ok();
    }
    let first = client.get(&format!("{MAPS}?limit=2")).await.ok();
    assert_eq!(names(&first), ["m0", "m1"]);
    assert_eq!(first["metadata"]["remainingItemCount"], 3);
    // What happens between pages does not show.
    client.delete(&format!("{MAPS}/m3")).await.ok();
    client.post(MAPS, &config_map("m25", "x")).await.ok();
    let page = |list: &Value| {
        let token = list["metadata"]["continue"].as_str().unwrap().to_owned();
        format!("{MAPS}?limit=2&continue={token}")
    };
    let second_path = page(&first);
    let second = client.get(&second_path).await.ok();
    assert_eq!(names(&second), ["m2", "m3"]);
    assert_eq!(
        second["metadata"]["resourceVersion"],
        first["metadata"]["resourceVersion"]
    );
    let third = client.get(&page(&second)).await.ok();
    assert_eq!(names(&third), ["m4"]);
    assert!(third["metadata"]["continue"].is_null());
    let revision = first["metadata"]["resourceVersion"].as_str().unwrap();
    let exact = format!("{MAPS}?resourceVersion={revision}&resourceVersionMatch=Exact");
    assert_eq!(names(&client.get(&exact).await.ok()).len(), 5);
    fake.compact();
    client.get(&second_path).await.refused(410, "Expired");
    client.get(&exact).await.refused(410, "Expired");
    client
        .get(&format!("{MAPS}?continue=nonsense"))
        .await
        .refused(400, "BadRequest");
    fake.end().await;
}

/// Whoever reads the past page by page sees the state of one moment, whatever happens meanwhile.
#[tokio::test]
async fn any_history_reads_back_as_it_was() {
    let seed = 7;
    println!("seed {seed}");
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let (fake, client) = control_plane(|_| {}).await;
    let mut moments: Vec<(String, Value)> = Vec::new();
    for step in 0..60 {
        let name = format!("m{}", random.random_range(0..8));
        let path = format!("{MAPS}/{name}");
        match random.random_range(0..3) {
            0 => {
                client.delete(&path).await;
            }
            1 => {
                let patch = json!({"data": {"value": step.to_string()}});
                client.patch(&path, "merge-patch", &patch).await;
            }
            _ => {
                client
                    .post(MAPS, &config_map(&name, &step.to_string()))
                    .await;
            }
        }
        let list = client.get(MAPS).await.ok();
        let revision = list["metadata"]["resourceVersion"].as_str().unwrap();
        moments.push((revision.to_owned(), list["items"].clone()));
    }
    for (revision, items) in moments {
        let path = format!("{MAPS}?resourceVersion={revision}&resourceVersionMatch=Exact");
        let then = client.get(&path).await.ok();
        assert_eq!(then["items"], items, "at {revision}, seed {seed}");
    }
    fake.end().await;
}

//! Removes containers whose orchestrator is dead or whose time is over. Those that run end by
//! themselves; this is for those that were made and never started, and for engines that were down
//! when they should have removed one.

use std::{
    collections::HashMap,
    fs,
    time::{SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use http::{Method, StatusCode};
use serde::Deserialize;
use serde_json::json;

use super::engine::{Engine, quote};

/// The label that says whose a container is.
pub(super) const OWNER: &str = "espalier.owner";
/// The label that says until when it may live, in seconds since 1970.
pub(super) const DEADLINE: &str = "espalier.deadline";

/// A process of some machine: the boot, the namespace of its number, the number, and when it
/// began, because numbers come again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Owner {
    place: String,
    pid: u32,
    began: u64,
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}/{}", self.place, self.pid, self.began)
    }
}

/// Where process numbers mean something.
fn place() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{}/{}", boot.trim(), namespace.display())
}

fn began(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?
        .1
        .split_whitespace()
        .nth(19)?
        .parse()
        .ok()
}

impl Owner {
    /// This process.
    pub(super) fn own() -> Self {
        let pid = std::process::id();
        Self {
            place: place(),
            pid,
            began: began(pid).unwrap_or_default(),
        }
    }

    /// For names: unique on one machine.
    pub(super) fn short(&self) -> String {
        format!("{}-{}", self.pid, self.began)
    }

    fn parse(text: &str) -> Option<Self> {
        let (rest, began) = text.rsplit_once('/')?;
        let (place, pid) = rest.rsplit_once('/')?;
        Some(Self {
            place: place.to_owned(),
            pid: pid.parse().ok()?,
            began: began.parse().ok()?,
        })
    }

    /// Known to be dead; `false` also when it cannot be known from here.
    fn dead(&self) -> bool {
        self.place == place() && began(self.pid) != Some(self.began)
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Listed {
    id: String,
    #[serde(default)]
    labels: HashMap<String, String>,
}

fn over(labels: &HashMap<String, String>, now: u64) -> bool {
    let owner = labels.get(OWNER).and_then(|text| Owner::parse(text));
    let deadline = labels
        .get(DEADLINE)
        .and_then(|text| text.parse::<u64>().ok());
    owner.is_some_and(|owner| owner.dead()) || deadline.is_some_and(|deadline| now > deadline)
}

/// One round. When the list cannot be had nothing is touched.
pub(super) async fn sweep(engine: &Engine) {
    let filters = json!({"label": [OWNER]}).to_string();
    let path = format!("/containers/json?all=1&filters={}", quote(&filters));
    let listed: Vec<Listed> = match engine.json(Method::GET, &path, None).await {
        Ok(listed) => listed,
        Err(error) => {
            tracing::warn!(%error, "containers of dead orchestrators are not looked for");
            return;
        }
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |d| d.as_secs());
    for container in listed.iter().filter(|c| over(&c.labels, now)) {
        let path = format!("/containers/{}?force=1&v=1", container.id);
        match engine.call(Method::DELETE, &path, "", Bytes::new()).await {
            Ok(_) => tracing::info!(container = container.id, "removed: its owner is dead"),
            Err(error) if error.is(StatusCode::NOT_FOUND) || error.is(StatusCode::CONFLICT) => {}
            Err(error) => tracing::warn!(container = container.id, %error, "not removed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_known_to_be_over_is_removed() {
        let own = Owner::own();
        let labels = |owner: &str, deadline: &str| {
            HashMap::from([
                (OWNER.to_owned(), owner.to_owned()),
                (DEADLINE.to_owned(), deadline.to_owned()),
            ])
        };
        let text = own.to_string();
        assert_eq!(Owner::parse(&text), Some(own.clone()));
        assert!(!over(&labels(&text, "100"), 100), "we live");
        assert!(over(&labels(&text, "100"), 101), "its time is over");
        let mut before = own.clone();
        before.began -= 1;
        assert!(
            over(&labels(&before.to_string(), "100"), 1),
            "a number that came again"
        );
        before.place = "another-boot/pid:[1]".to_owned();
        assert!(
            !over(&labels(&before.to_string(), "100"), 1),
            "cannot be known from here"
        );
        assert!(!over(&labels("nonsense", "nonsense"), u64::MAX));
    }
}

//! Whether the container engine of a recipe is there, and its image.

use bytes::Bytes;
use http::{Method, StatusCode};
use serde_json::Value;

use super::{
    DockerConfig,
    engine::{Engine, quote},
};
use crate::Check;

/// Looks at an engine; changes nothing.
pub async fn docker_doctor(config: &DockerConfig) -> Vec<Check> {
    let check = |name: &str, ok: bool, found: String, costs: &str, advice: &str| Check {
        name: name.to_owned(),
        ok,
        found,
        costs: if ok { String::new() } else { costs.to_owned() },
        advice: if ok { String::new() } else { advice.to_owned() },
    };
    let host = config.host();
    let costs = "the docker kind of sandbox does not work";
    let start = "start dockerd or `podman system service`, and name its socket in DOCKER_HOST or in \
                 sandbox.host";
    let engine = match Engine::of(config, &host, tokio_util::task::TaskTracker::new()) {
        Ok(engine) => engine,
        Err(reason) => return vec![check("container engine", false, reason, costs, start)],
    };
    if let Err(error) = engine
        .call(Method::GET, "/_ping", "text/plain", Bytes::new())
        .await
    {
        let found = format!("{host}: {error}");
        return vec![check("container engine", false, found, costs, start)];
    }
    let version: Value = engine
        .json(Method::GET, "/version", None)
        .await
        .unwrap_or_default();
    let version = version["Version"].as_str().unwrap_or("unknown").to_owned();
    let found = format!("{host}, version {version}");
    let mut checks = vec![check("container engine", true, found, "", "")];
    let Some(image) = &config.image else {
        return checks;
    };
    let path = format!("/images/{}/json", quote(image));
    let known: Result<Value, _> = engine.json(Method::GET, &path, None).await;
    let costs = "no sandbox can be made";
    checks.push(match known {
        Ok(_) => check("container image", true, format!("{image} is there"), "", ""),
        Err(error) if error.is(StatusCode::NOT_FOUND) && config.pull => {
            let found = format!("{image} is not there, and is pulled at the first start");
            check("container image", true, found, "", "")
        }
        Err(error) if error.is(StatusCode::NOT_FOUND) => {
            let found = format!("{image} is not there, and sandbox.pull is false");
            check(
                "container image",
                false,
                found,
                costs,
                "pull, load or build it",
            )
        }
        Err(error) => {
            let advice = "the engine's log says more";
            check("container image", false, error.to_string(), costs, advice)
        }
    });
    checks
}

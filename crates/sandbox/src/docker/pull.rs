//! Images that the engine does not have.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use http::{Method, StatusCode};
use serde_json::Value;
use tokio::time::timeout;

use super::{
    DockerConfig,
    engine::{CallError, Engine, quote},
};
use crate::{RefusalCause, SandboxError};

/// Progress is logged this often.
const SAY_EVERY: Duration = Duration::from_secs(10);

/// Makes sure that the engine has an image: pulls it, with one line of log now and then, when it
/// has not and that is allowed. `sandbox` is whose creation waits for it.
pub(super) async fn ensure(
    engine: &Engine,
    config: &DockerConfig,
    sandbox: &str,
    image: &str,
) -> Result<(), SandboxError> {
    let path = format!("/images/{}/json", quote(image));
    match engine.json::<Value>(Method::GET, &path, None).await {
        Ok(_) => return Ok(()),
        Err(CallError::Status(StatusCode::NOT_FOUND, reason)) if !config.pull => {
            return Err(SandboxError::Refused {
                name: sandbox.to_owned(),
                cause: RefusalCause::Image,
                reason,
                hint: format!(
                    "pull, load or build {image} on the engine, or set sandbox.pull = true"
                ),
            });
        }
        Err(CallError::Status(StatusCode::NOT_FOUND, _)) => {}
        Err(error) => {
            return Err(SandboxError::Create {
                name: sandbox.to_owned(),
                reason: format!("looking for image {image}: {error}"),
            });
        }
    }
    let began = Instant::now();
    tracing::info!(image, "the engine does not have the image: it is pulled");
    let pulling = timeout(Duration::from_secs(config.pull_s), pull(engine, image));
    match pulling.await {
        Ok(Ok(())) => {
            let seconds = began.elapsed().as_secs();
            tracing::info!(image, seconds, "pulled");
            Ok(())
        }
        Ok(Err(reason)) => Err(failed(sandbox, image, reason)),
        Err(_) => Err(SandboxError::Create {
            name: sandbox.to_owned(),
            reason: format!(
                "image {image} was not pulled within {} s (sandbox.pull_s)",
                config.pull_s
            ),
        }),
    }
}

/// The name with a tag: without one an engine pulls all that there are.
fn tagged(image: &str) -> String {
    let last = image.rsplit('/').next().unwrap_or(image);
    if last.contains([':', '@']) {
        image.to_owned()
    } else {
        format!("{image}:latest")
    }
}

async fn pull(engine: &Engine, image: &str) -> Result<(), String> {
    let path = format!("/images/create?fromImage={}", quote(&tagged(image)));
    let mut layers = HashMap::new();
    let mut said = Instant::now();
    let mut wrong = None;
    let each = |line: Value| {
        if let Some(error) = line["error"].as_str() {
            wrong = Some(error.to_owned());
        }
        let detail = &line["progressDetail"];
        if let (Some(id), Some(current), Some(total)) = (
            line["id"].as_str(),
            detail["current"].as_u64(),
            detail["total"].as_u64(),
        ) {
            layers.insert(id.to_owned(), (current, total));
        }
        if said.elapsed() >= SAY_EVERY {
            said = Instant::now();
            let sum = |part: fn(&(u64, u64)) -> u64| layers.values().map(part).sum::<u64>() >> 20;
            let (pulled_mib, of_mib) = (sum(|layer| layer.0), sum(|layer| layer.1));
            tracing::info!(image, pulled_mib, of_mib, "pulling");
        }
    };
    engine
        .lines(Method::POST, &path, each)
        .await
        .map_err(|error| error.to_string())?;
    match wrong {
        None => Ok(()),
        Some(error) => Err(error),
    }
}

/// What kind of no it was: engines tell by their words only.
fn failed(sandbox: &str, image: &str, reason: String) -> SandboxError {
    let text = reason.to_ascii_lowercase();
    let says = |words: &[&str]| words.iter().any(|word| text.contains(word));
    let refusal = if says(&["toomanyrequests", "too many requests", "rate limit"]) {
        Some((
            RefusalCause::Quota,
            "wait, or log the engine in to its registry",
        ))
    } else if says(&["denied", "unauthorized", "authentication required"]) {
        Some((
            RefusalCause::Forbidden,
            "correct the name, or pull it by hand as somebody who may",
        ))
    } else if says(&[
        "not found",
        "manifest unknown",
        "no such",
        "invalid reference",
    ]) {
        Some((RefusalCause::Image, "correct the name or the tag"))
    } else {
        None
    };
    let name = sandbox.to_owned();
    let reason = format!("pulling image {image}: {reason}");
    match refusal {
        Some((cause, hint)) => SandboxError::Refused {
            name,
            cause,
            reason,
            hint: hint.to_owned(),
        },
        None => SandboxError::Create { name, reason },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_without_a_tag_is_the_latest() {
        for (image, expected) in [
            ("debian", "debian:latest"),
            ("debian:12", "debian:12"),
            (
                "registry:5000/team/debian",
                "registry:5000/team/debian:latest",
            ),
            ("debian@sha256:00", "debian@sha256:00"),
        ] {
            assert_eq!(tagged(image), expected);
        }
    }

    #[test]
    fn words_of_engines_tell_what_helps() {
        let cause = |reason: &str| match failed("s", "i", reason.to_owned()) {
            SandboxError::Refused { cause, .. } => Some(cause),
            _ => None,
        };
        let unknown = "manifest for i:1 not found: manifest unknown";
        assert_eq!(cause(unknown), Some(RefusalCause::Image));
        let denied = "pull access denied for i, repository does not exist or may require login";
        assert_eq!(cause(denied), Some(RefusalCause::Forbidden));
        let rate = "toomanyrequests: You have reached your pull rate limit";
        assert_eq!(cause(rate), Some(RefusalCause::Quota));
        assert_eq!(
            cause("dial tcp: connection refused"),
            None,
            "may work next time"
        );
    }
}

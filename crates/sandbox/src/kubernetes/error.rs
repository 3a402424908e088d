//! Calls of the cluster's API: their deadline, their second try, and what their failure means.

use std::{future::Future, time::Duration};

use tokio::time::{sleep, timeout};

use crate::{RefusalCause, SandboxError};

/// For one call.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a call that may succeed next time is made.
const TRIES: u32 = 6;
const FIRST_DELAY: Duration = Duration::from_millis(200);
/// The longest that a server's "later" is believed.
const DELAY_MAX: Duration = Duration::from_secs(10);

/// Why a call failed.
#[derive(Debug)]
pub(super) enum CallError {
    /// The server said no.
    Status(Box<kube::core::Status>),
    /// No answer.
    Transport(String),
}

impl std::fmt::Display for CallError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Status(status) => write!(f, "{} ({})", status.message, status.code),
            Self::Transport(reason) => write!(f, "the cluster cannot be reached: {reason}"),
        }
    }
}

impl From<kube::Error> for CallError {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self::Status(status),
            other => Self::Transport(chain(&other)),
        }
    }
}

/// An error with its causes on one line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.ends_with(&more) {
            text.push_str(&format!(": {more}"));
        }
        cause = error.source();
    }
    text
}

impl CallError {
    pub(super) fn code(&self) -> Option<u16> {
        match self {
            Self::Status(status) => Some(status.code),
            Self::Transport(_) => None,
        }
    }

    pub(super) fn is_not_found(&self) -> bool {
        self.code() == Some(404)
    }

    pub(super) fn is_already_there(&self) -> bool {
        matches!(self, Self::Status(status) if status.is_already_exists())
    }

    /// How long to wait before the same may succeed; `None`: never.
    fn delay(&self, tried: u32) -> Option<Duration> {
        let backoff = FIRST_DELAY * 2_u32.pow(tried.min(6));
        match self {
            Self::Transport(_) => Some(backoff),
            Self::Status(status) => {
                // Quotas are counted with optimistic locks: two at once, and one is told this.
                let quota = status.code == 409 && status.message.contains("resourcequotas");
                let later = matches!(status.code, 429 | 500 | 502 | 503 | 504);
                let asked = status.details.as_ref().map_or(0, |d| d.retry_after_seconds);
                let asked = Duration::from_secs(u64::from(asked)).min(DELAY_MAX);
                (quota || later).then_some(backoff.max(asked))
            }
        }
    }

    /// What a failed creation means for whoever asked for a sandbox.
    pub(super) fn refusal(self, name: &str) -> SandboxError {
        let name = name.to_owned();
        let (cause, hint) = match &self {
            Self::Status(status) => match status.code {
                403 if status.message.contains("exceeded quota") => (
                    RefusalCause::Quota,
                    "run fewer at a time, ask for less, or raise the namespace's quota",
                ),
                403 if status.message.contains("PodSecurity") => (
                    RefusalCause::Forbidden,
                    "set `restricted = true`, or label the namespace for the level baseline",
                ),
                401 => (
                    RefusalCause::Forbidden,
                    "the cluster does not know these credentials: log in again",
                ),
                403 => (
                    RefusalCause::Forbidden,
                    "apply recipes/kubernetes/rbac.yaml, or ask whoever runs the cluster",
                ),
                404 => (
                    RefusalCause::Invalid,
                    "apply recipes/kubernetes/namespace.yaml, or name another namespace",
                ),
                400 | 422 => (
                    RefusalCause::Invalid,
                    "correct limits, labels and pool of the recipe",
                ),
                _ => return self.create(name),
            },
            Self::Transport(_) => return self.create(name),
        };
        SandboxError::Refused {
            name,
            cause,
            reason: self.to_string(),
            hint: hint.to_owned(),
        }
    }

    fn create(&self, name: String) -> SandboxError {
        SandboxError::Create {
            name,
            reason: self.to_string(),
        }
    }
}

/// One call, once.
pub(super) async fn once<T>(
    what: &str,
    call: impl Future<Output = kube::Result<T>>,
) -> Result<T, CallError> {
    match timeout(CALL_TIMEOUT, call).await {
        Ok(result) => Ok(result?),
        Err(_) => Err(CallError::Transport(format!(
            "{what}: no answer within {CALL_TIMEOUT:?}"
        ))),
    }
}

/// One call, again while that may help. It must not matter whether it is made twice.
pub(super) async fn patiently<T, F>(what: &str, mut call: impl FnMut() -> F) -> Result<T, CallError>
where
    F: Future<Output = kube::Result<T>>,
{
    let mut tried = 0;
    loop {
        let error = match once(what, call()).await {
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        tried += 1;
        match error.delay(tried).filter(|_| tried < TRIES) {
            Some(delay) => sleep(delay).await,
            None => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(code: u16, message: &str) -> CallError {
        let status = kube::core::Status::failure(message, "").with_code(code);
        CallError::Status(status.boxed())
    }

    #[test]
    fn a_refusal_has_its_cause() {
        let cases = [
            (
                403,
                "pods \"x\" is forbidden: exceeded quota: sandboxes, requested: pods=1",
                Some(RefusalCause::Quota),
            ),
            (
                403,
                "pods \"x\" is forbidden: violates PodSecurity \"restricted:latest\"",
                Some(RefusalCause::Forbidden),
            ),
            (
                403,
                "pods is forbidden: User \"u\" cannot create resource \"pods\"",
                Some(RefusalCause::Forbidden),
            ),
            (401, "Unauthorized", Some(RefusalCause::Forbidden)),
            (
                404,
                "namespaces \"no\" not found",
                Some(RefusalCause::Invalid),
            ),
            (
                422,
                "Pod \"x\" is invalid: spec.containers[0].image: Required value",
                Some(RefusalCause::Invalid),
            ),
            (500, "etcdserver: request timed out", None),
            (429, "too many requests", None),
        ];
        for (code, message, wanted) in cases {
            match (status(code, message).refusal("s"), wanted) {
                (
                    SandboxError::Refused {
                        cause,
                        reason,
                        hint,
                        ..
                    },
                    Some(wanted),
                ) => {
                    assert_eq!(cause, wanted, "{message}");
                    assert!(reason.contains(message) && !hint.is_empty());
                }
                (SandboxError::Create { reason, .. }, None) => assert!(reason.contains(message)),
                (other, _) => panic!("{message}: {other:?}"),
            }
        }
    }

    #[test]
    fn only_what_may_pass_is_tried_again() {
        let again = |error: CallError| error.delay(1).is_some();
        assert!(again(status(429, "")) && again(status(503, "")));
        assert!(again(CallError::Transport(String::new())));
        let quota = "Operation cannot be fulfilled on resourcequotas \"q\"";
        assert!(again(status(409, quota)));
        assert!(!again(status(409, "already exists")));
        assert!(!again(status(403, "")) && !again(status(422, "")));
        let mut busy = kube::core::Status::failure("", "TooManyRequests").with_code(429);
        busy.details = serde_json::from_value(serde_json::json!({"retryAfterSeconds": 3})).unwrap();
        let delay = CallError::Status(busy.boxed()).delay(1);
        assert_eq!(
            delay,
            Some(Duration::from_secs(3)),
            "the server's word counts"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_is_made_again_until_it_succeeds() {
        let mut calls = 0;
        let result = patiently("test", || {
            calls += 1;
            let ok = calls == 3;
            async move {
                match ok {
                    true => Ok(7),
                    false => Err(kube::Error::Api(
                        kube::core::Status::failure("later", "")
                            .with_code(503)
                            .boxed(),
                    )),
                }
            }
        })
        .await;
        assert_eq!((result.unwrap(), calls), (7, 3));
    }
}

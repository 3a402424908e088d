//! What the status of a pod means for us. Pure.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};

use crate::RefusalCause;

/// The init container, which waits for the guest.
pub(super) const INIT: &str = "guest";
/// The container that is the sandbox.
pub(super) const MAIN: &str = "sandbox";

/// What is seen of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Sight {
    /// Nothing to do but wait; the text says for what.
    Waiting(String),
    /// No node has room. An autoscaler may make one, so this is not the last word at once.
    Unschedulable(String),
    /// The init container waits for the guest.
    Init,
    /// The guest runs.
    Running,
    /// It will never run.
    Refused(RefusalCause, String),
    /// It ran, or could not go on, and is over: infrastructure.
    Ended(String),
}

/// Reads a pod's status.
pub(super) fn look(pod: &Pod) -> Sight {
    if pod.metadata.deletion_timestamp.is_some() {
        return Sight::Ended("it is being deleted".to_owned());
    }
    let Some(status) = &pod.status else {
        return Sight::Waiting("it has no status yet".to_owned());
    };
    let phase = status.phase.as_deref().unwrap_or_default();
    let say = |what: &Option<String>, message: &Option<String>| {
        [what.as_deref(), message.as_deref()]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
            .join(": ")
    };
    let statuses = || {
        let init = status.init_container_statuses.iter().flatten();
        init.chain(status.container_statuses.iter().flatten())
    };
    if phase == "Failed" || phase == "Succeeded" || phase == "Unknown" {
        let own = say(&status.reason, &status.message);
        if !own.is_empty() {
            return Sight::Ended(own);
        }
        let ended = statuses().find_map(termination);
        return Sight::Ended(ended.unwrap_or_else(|| format!("its phase is {phase}")));
    }
    // Named before it is carried out: preemption, drain, a node that is taken away.
    let conditions = || status.conditions.iter().flatten();
    if let Some(condition) = conditions().find(|c| c.type_ == "DisruptionTarget" && c.status == "True") {
        return Sight::Ended(say(&condition.reason, &condition.message));
    }
    for container in statuses() {
        if let Some(sight) = hopeless(container) {
            return sight;
        }
    }
    let unscheduled = conditions().find(|c| {
        c.type_ == "PodScheduled"
            && c.status == "False"
            && c.reason.as_deref() == Some("Unschedulable")
    });
    if let Some(condition) = unscheduled {
        return Sight::Unschedulable(say(&None, &condition.message));
    }
    let runs = |name: &str| {
        statuses()
            .any(|c| c.name == name && c.state.as_ref().is_some_and(|s| s.running.is_some()))
    };
    if runs(MAIN) {
        return Sight::Running;
    }
    if runs(INIT) {
        return Sight::Init;
    }
    // A first process that ended on its own is not started again, and the phase will follow.
    let ended = status.container_statuses.iter().flatten().find_map(termination);
    if let Some(ended) = ended {
        return Sight::Ended(ended);
    }
    let waiting = statuses().find_map(|c| {
        let waiting = c.state.as_ref()?.waiting.as_ref()?;
        Some(say(&waiting.reason, &waiting.message))
    });
    Sight::Waiting(waiting.unwrap_or_else(|| format!("its phase is {phase}")))
}

/// How a container ended.
fn termination(container: &ContainerStatus) -> Option<String> {
    let ended = container.state.as_ref()?.terminated.as_ref()?;
    if ended.exit_code == 0 && container.name == INIT {
        return None;
    }
    let reason = ended.reason.as_deref().unwrap_or("it ended");
    Some(match ended.exit_code {
        40 => "its deadline passed".to_owned(),
        42 => "it heard nothing from the orchestrator for too long".to_owned(),
        code => format!("container {}: {reason} (exit code {code})", container.name),
    })
}

/// Waiting reasons that no waiting helps against.
fn hopeless(container: &ContainerStatus) -> Option<Sight> {
    let waiting = container.state.as_ref()?.waiting.as_ref()?;
    let reason = waiting.reason.as_deref()?;
    let cause = match reason {
        "ErrImageNeverPull" | "ErrImagePull" | "ImagePullBackOff" | "InvalidImageName"
        | "ErrImageInspect" | "RegistryUnavailable" | "ImageInspectError" => RefusalCause::Image,
        "CreateContainerConfigError" | "CreateContainerError" | "RunContainerError" => {
            RefusalCause::Invalid
        }
        _ => return None,
    };
    let message = waiting.message.as_deref().unwrap_or_default();
    Some(Sight::Refused(
        cause,
        format!("container {}: {reason}: {message}", container.name),
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn of(status: Value) -> Sight {
        look(&serde_json::from_value(json!({"metadata": {"name": "p"}, "status": status})).unwrap())
    }

    fn container(name: &str, state: Value) -> Value {
        json!({"name": name, "image": "i", "imageID": "", "ready": false, "restartCount": 0, "state": state})
    }

    #[test]
    fn a_pod_on_its_way() {
        assert_eq!(of(json!({})), Sight::Waiting("its phase is ".into()));
        let waiting = container(INIT, json!({"waiting": {"reason": "PodInitializing"}}));
        let status = json!({"phase": "Pending", "initContainerStatuses": [waiting]});
        assert_eq!(of(status), Sight::Waiting("PodInitializing".into()));
        let init = container(INIT, json!({"running": {}}));
        let status = json!({"phase": "Pending", "initContainerStatuses": [init]});
        assert_eq!(of(status), Sight::Init);
        let init = container(INIT, json!({"terminated": {"exitCode": 0, "reason": "Completed"}}));
        let main = container(MAIN, json!({"running": {}}));
        let status = json!({"phase": "Running", "initContainerStatuses": [init], "containerStatuses": [main]});
        assert_eq!(of(status), Sight::Running);
    }

    #[test]
    fn what_will_never_run_is_known_at_once() {
        for (reason, cause) in [
            ("ErrImageNeverPull", RefusalCause::Image),
            ("ImagePullBackOff", RefusalCause::Image),
            ("InvalidImageName", RefusalCause::Image),
            ("CreateContainerConfigError", RefusalCause::Invalid),
        ] {
            let waiting = container(INIT, json!({"waiting": {"reason": reason, "message": "why"}}));
            let status = json!({"phase": "Pending", "initContainerStatuses": [waiting]});
            let expected = format!("container guest: {reason}: why");
            assert_eq!(of(status), Sight::Refused(cause, expected));
        }
        let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"});
        let status = json!({"phase": "Pending", "conditions": [condition]});
        assert_eq!(of(status), Sight::Unschedulable("0/1 nodes".into()));
    }

    #[test]
    fn every_end_is_infrastructure_and_has_its_reason() {
        let ended = |status| match of(status) {
            Sight::Ended(reason) => reason,
            other => panic!("{other:?}"),
        };
        assert_eq!(
            ended(json!({"phase": "Failed", "reason": "Evicted", "message": "low on memory"})),
            "Evicted: low on memory"
        );
        assert_eq!(ended(json!({"phase": "Unknown", "reason": "NodeLost"})), "NodeLost");
        let main = container(MAIN, json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}));
        assert_eq!(
            ended(json!({"phase": "Failed", "containerStatuses": [main]})),
            "container sandbox: OOMKilled (exit code 137)"
        );
        let main = container(MAIN, json!({"terminated": {"exitCode": 40, "reason": "Error"}}));
        assert_eq!(
            ended(json!({"phase": "Running", "containerStatuses": [main]})),
            "its deadline passed"
        );
        let condition = json!({"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"});
        assert_eq!(ended(json!({"phase": "Running", "conditions": [condition]})), "PreemptionByScheduler");
        let gone = json!({"metadata": {"name": "p", "deletionTimestamp": "2026-01-01T00:00:00Z"}});
        let gone = look(&serde_json::from_value(gone).unwrap());
        assert_eq!(gone, Sight::Ended("it is being deleted".into()));
    }
}

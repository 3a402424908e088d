//! What a pod's status says, as a pure function: waiting for something, running, or ended, and
//! what of that will not get better by itself.

use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, Pod, PodStatus};

use super::manifest::CONTAINER;
use crate::RefusalCause;

/// What is known of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Seen {
    /// Nothing yet.
    Nothing,
    /// It does not run yet.
    Waiting(Waiting),
    /// The guest runs.
    Running {
        /// The image, by digest where the node says it.
        image: String,
    },
    /// It does not run any more, or never will.
    Ended(Ended),
}

/// A pod that does not run yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Waiting {
    /// What it waits for.
    pub(super) why: String,
    /// Set when that will probably not come.
    pub(super) trouble: Option<Trouble>,
}

/// Something that somebody has to change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Trouble {
    pub(super) cause: RefusalCause,
    pub(super) patience: Patience,
    pub(super) hint: &'static str,
}

/// How long to wait for it to pass all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Patience {
    None,
    Pull,
    Scheduling,
}

/// A pod that ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ended {
    /// Why, in words.
    pub(super) reason: String,
    /// The exit code of the sandbox's container, when that ran.
    pub(super) code: Option<i32>,
    /// Whether the node said that nothing of it runs any more.
    pub(super) certain: bool,
    /// Set when another try would end alike.
    pub(super) trouble: Option<Trouble>,
}

const IMAGE_HINT: &str = "correct the image's name, push it, or name a secret for its registry in \
                          `pull_secrets`";
const SCHEDULING_HINT: &str = "ask for less, add nodes, or correct node_selector and tolerations; \
                               where nodes are made on demand raise `unschedulable_s`";
const CONFIG_HINT: &str = "correct the recipe: the node cannot make a container of it";
const INSTALL_HINT: &str = "the image must have /bin/sh, cat and chmod, and its workspace must be \
                            readable; see docs/kubernetes.md";

/// Looks at a pod.
pub(super) fn look(pod: &Pod) -> Seen {
    let empty = PodStatus::default();
    let status = pod.status.as_ref().unwrap_or(&empty);
    let phase = status.phase.as_deref().unwrap_or("Pending");
    let install = status.init_container_statuses.iter().flatten().next();
    let main = status.container_statuses.iter().flatten();
    let main = main.clone().find(|c| c.name == CONTAINER);
    let leaving = pod.metadata.deletion_timestamp.is_some();

    if let Some(ended) = failed_install(install, phase) {
        return Seen::Ended(ended);
    }
    let terminated = main.and_then(|c| c.state.as_ref()?.terminated.as_ref());
    if terminated.is_some() || matches!(phase, "Failed" | "Succeeded") {
        let code = terminated.map(|t| t.exit_code);
        let why = disruption(status)
            .or_else(|| pod_reason(status))
            .or_else(|| {
                let t = terminated?;
                Some(words(
                    t.exit_code,
                    t.reason.as_deref(),
                    t.message.as_deref(),
                ))
            });
        return Seen::Ended(Ended {
            reason: why.unwrap_or_else(|| "its pod ended and the cluster does not say why".into()),
            code,
            certain: true,
            trouble: None,
        });
    }
    if leaving {
        let why = disruption(status).or_else(|| pod_reason(status));
        return Seen::Ended(Ended {
            reason: why.unwrap_or_else(|| "somebody deletes its pod".into()),
            code: None,
            certain: false,
            trouble: None,
        });
    }
    if let Some(running) = main.filter(|c| c.state.as_ref().is_some_and(|s| s.running.is_some())) {
        let image = match running.image_id.is_empty() {
            true => running.image.clone(),
            false => running.image_id.clone(),
        };
        return Seen::Running { image };
    }
    Seen::Waiting(waiting(status, install, main))
}

fn failed_install(install: Option<&ContainerStatus>, phase: &str) -> Option<Ended> {
    let terminated = install?.state.as_ref()?.terminated.as_ref()?;
    if terminated.exit_code == 0 {
        return None;
    }
    let reason = terminated.reason.as_deref().unwrap_or_default();
    let message = terminated.message.as_deref().unwrap_or_default().trim();
    let trouble = Trouble {
        cause: match reason {
            "OOMKilled" => RefusalCause::Invalid,
            _ => RefusalCause::Image,
        },
        patience: Patience::None,
        hint: INSTALL_HINT,
    };
    Some(Ended {
        reason: format!(
            "the guest could not be put beside the image (exit code {}, {reason}): {message}",
            terminated.exit_code
        ),
        code: None,
        certain: phase == "Failed",
        // A signal comes from outside: eviction, the end of a node.
        trouble: (reason == "OOMKilled" || terminated.exit_code <= 128).then_some(trouble),
    })
}

/// Why the cluster ended a pod that did nothing wrong.
fn disruption(status: &PodStatus) -> Option<String> {
    let condition = status.conditions.iter().flatten();
    let condition = condition
        .clone()
        .find(|c| c.type_ == "DisruptionTarget" && c.status == "True")?;
    let words = match condition.reason.as_deref().unwrap_or_default() {
        "PreemptionByScheduler" => "it was preempted by a pod of higher priority",
        "EvictionByEvictionAPI" => "it was evicted: somebody drains its node",
        "DeletionByTaintManager" => "its node was lost or is not to be used any more",
        "DeletionByPodGC" => "its node is gone",
        "TerminationByKubelet" => "its node ended it, to save itself or to shut down",
        other => return Some(format!("it was disrupted ({other})")),
    };
    Some(with(words, condition.message.as_deref()))
}

fn pod_reason(status: &PodStatus) -> Option<String> {
    let words = match status.reason.as_deref()? {
        "Evicted" => "it was evicted by its node".to_owned(),
        "DeadlineExceeded" => "its deadline passed (activeDeadlineSeconds)".to_owned(),
        "NodeLost" => "its node was lost".to_owned(),
        "NodeShutdown" | "Terminated" => "its node shut down".to_owned(),
        "Preempting" => "it was preempted by its node".to_owned(),
        // OutOfcpu, OutOfmemory, NodeAffinity, UnexpectedAdmissionError, …
        other => format!("its node did not take it ({other})"),
    };
    Some(with(&words, status.message.as_deref()))
}

fn with(words: &str, message: Option<&str>) -> String {
    match message.map(str::trim).filter(|m| !m.is_empty()) {
        Some(message) => format!("{words}: {message}"),
        None => words.to_owned(),
    }
}

/// How the guest, or the container around it, ended.
fn words(code: i32, reason: Option<&str>, message: Option<&str>) -> String {
    match (code, reason.unwrap_or_default()) {
        (_, "OOMKilled") => "its memory limit was reached and the node killed all of it \
                             (OOMKilled); where the node's agent has singleProcessOOMKill only \
                             the process that grew would have died"
            .to_owned(),
        (40, _) => "its deadline passed".to_owned(),
        (42, _) => "it heard nothing from the orchestrator for too long".to_owned(),
        (0, _) => "its control stream closed".to_owned(),
        (137, _) => "its container was killed from outside (exit code 137)".to_owned(),
        (128, "StartError" | "ContainerCannotRun") => with("it could not be started", message),
        (code, _) => with(&format!("its container ended with code {code}"), message),
    }
}

fn waiting(
    status: &PodStatus,
    install: Option<&ContainerStatus>,
    main: Option<&ContainerStatus>,
) -> Waiting {
    let states = [install, main].into_iter().flatten();
    for state in states.filter_map(|c| c.state.as_ref()) {
        if let Some(waiting) = waiting_state(state) {
            return waiting;
        }
    }
    let conditions = status.conditions.iter().flatten();
    let scheduled = conditions
        .clone()
        .find(|c| c.type_ == "PodScheduled" && c.status == "False");
    if let Some(condition) = scheduled {
        let reason = condition.reason.as_deref().unwrap_or_default();
        let message = condition.message.as_deref();
        let trouble = Trouble {
            cause: RefusalCause::Unschedulable,
            patience: Patience::Scheduling,
            hint: SCHEDULING_HINT,
        };
        return Waiting {
            why: with(reason, message),
            trouble: (reason == "Unschedulable").then_some(trouble),
        };
    }
    Waiting {
        why: status
            .reason
            .clone()
            .unwrap_or_else(|| "its turn".to_owned()),
        trouble: None,
    }
}

/// `None`: this container waits for nothing that is worth a word.
fn waiting_state(state: &ContainerState) -> Option<Waiting> {
    let waiting = state.waiting.as_ref()?;
    let reason = waiting.reason.as_deref().unwrap_or_default();
    let message = waiting.message.as_deref();
    let (cause, patience, hint) = match reason {
        "ErrImageNeverPull" | "InvalidImageName" => {
            (RefusalCause::Image, Patience::None, IMAGE_HINT)
        }
        "ErrImagePull"
        | "ImagePullBackOff"
        | "ImageInspectError"
        | "RegistryUnavailable"
        | "SignatureValidationFailed" => {
            let patience = match is_final(message.unwrap_or_default()) {
                true => Patience::None,
                false => Patience::Pull,
            };
            (RefusalCause::Image, patience, IMAGE_HINT)
        }
        "CreateContainerConfigError" => (RefusalCause::Invalid, Patience::None, CONFIG_HINT),
        "CreateContainerError"
        | "RunContainerError"
        | "PreCreateHookError"
        | "PreStartHookError" => (RefusalCause::Invalid, Patience::Pull, CONFIG_HINT),
        "PodInitializing" => return None,
        _ => {
            return Some(Waiting {
                why: with(reason, message),
                trouble: None,
            });
        }
    };
    Some(Waiting {
        why: with(reason, message),
        trouble: Some(Trouble {
            cause,
            patience,
            hint,
        }),
    })
}

/// Whether a registry's answer will be the same next time.
fn is_final(message: &str) -> bool {
    const FINAL: [&str; 9] = [
        "not found",
        "manifest unknown",
        "name unknown",
        "repository does not exist",
        "pull access denied",
        "unauthorized",
        "denied",
        "no match for platform",
        "invalid reference format",
    ];
    let message = message.to_lowercase();
    FINAL.iter().any(|words| message.contains(words))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn seen(status: Value) -> Seen {
        let pod = json!({"metadata": {"name": "p"}, "status": status});
        look(&serde_json::from_value(pod).unwrap())
    }

    fn container(name: &str, state: Value) -> Value {
        json!([{
            "name": name, "state": state, "image": "debian:12", "ready": false,
            "imageID": "docker.io/library/debian@sha256:12", "restartCount": 0,
        }])
    }

    fn trouble(seen: Seen) -> (RefusalCause, Patience) {
        let trouble = match seen {
            Seen::Waiting(waiting) => waiting.trouble,
            Seen::Ended(ended) => ended.trouble,
            other => panic!("{other:?}"),
        };
        let trouble = trouble.expect("trouble");
        (trouble.cause, trouble.patience)
    }

    fn waits(reason: &str, message: &str) -> Seen {
        let state = json!({"waiting": {"reason": reason, "message": message}});
        seen(json!({
            "phase": "Pending",
            "initContainerStatuses": container("install", state),
            "containerStatuses": container("sandbox", json!({"waiting": {"reason": "PodInitializing"}})),
        }))
    }

    #[test]
    fn what_will_not_get_better_is_known_early() {
        let cases = [
            ("ErrImageNeverPull", "", RefusalCause::Image, Patience::None),
            ("InvalidImageName", "", RefusalCause::Image, Patience::None),
            (
                "ErrImagePull",
                "failed to resolve reference \"docker.io/library/no:1\": not found",
                RefusalCause::Image,
                Patience::None,
            ),
            (
                "ErrImagePull",
                "pull access denied, repository does not exist or may require authorization",
                RefusalCause::Image,
                Patience::None,
            ),
            (
                "ErrImagePull",
                "dial tcp 10.0.0.1:443: i/o timeout",
                RefusalCause::Image,
                Patience::Pull,
            ),
            (
                "ImagePullBackOff",
                "Back-off pulling image \"no:1\"",
                RefusalCause::Image,
                Patience::Pull,
            ),
            (
                "CreateContainerConfigError",
                "secret \"x\" missing",
                RefusalCause::Invalid,
                Patience::None,
            ),
            (
                "CreateContainerError",
                "context deadline exceeded",
                RefusalCause::Invalid,
                Patience::Pull,
            ),
        ];
        for (reason, message, cause, patience) in cases {
            let state = waits(reason, message);
            let Seen::Waiting(waiting) = &state else {
                panic!("{state:?}");
            };
            assert!(waiting.why.contains(reason), "{waiting:?}");
            assert!(waiting.why.contains(message), "{waiting:?}");
            assert_eq!(trouble(state), (cause, patience), "{reason}: {message}");
        }
        let state = seen(json!({"phase": "Pending", "conditions": [{
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 Insufficient cpu.",
        }]}));
        assert_eq!(
            trouble(state),
            (RefusalCause::Unschedulable, Patience::Scheduling)
        );
    }

    #[test]
    fn what_only_takes_time_is_no_trouble() {
        for state in [
            seen(json!({})),
            seen(json!({"phase": "Pending"})),
            waits("ContainerCreating", ""),
            waits("PodInitializing", ""),
            seen(json!({"phase": "Pending", "conditions": [{
                "type": "PodScheduled", "status": "False", "reason": "SchedulingGated",
            }]})),
        ] {
            assert!(
                matches!(&state, Seen::Waiting(w) if w.trouble.is_none()),
                "{state:?}"
            );
        }
    }

    #[test]
    fn a_running_pod_names_its_image_by_digest() {
        let running = seen(json!({
            "phase": "Running",
            "initContainerStatuses": container("install", json!({"terminated": {"exitCode": 0}})),
            "containerStatuses": container("sandbox", json!({"running": {}})),
        }));
        let image = "docker.io/library/debian@sha256:12".to_owned();
        assert_eq!(running, Seen::Running { image });
    }

    #[test]
    fn an_image_without_a_shell_is_refused_with_the_words_of_the_node() {
        let state = seen(json!({
            "phase": "Failed",
            "initContainerStatuses": container("install", json!({"terminated": {
                "exitCode": 128, "reason": "StartError",
                "message": "exec: \"/bin/sh\": stat /bin/sh: no such file or directory",
            }})),
        }));
        let Seen::Ended(ended) = &state else {
            panic!("{state:?}");
        };
        assert!(ended.reason.contains("no such file"), "{ended:?}");
        assert_eq!(trouble(state), (RefusalCause::Image, Patience::None));
    }

    #[test]
    fn every_end_has_its_reason() {
        let ends = |status: Value| match seen(status) {
            Seen::Ended(ended) => {
                assert_eq!(ended.trouble, None, "infrastructure: {ended:?}");
                ended.reason
            }
            other => panic!("{other:?}"),
        };
        let exit = |code: i32, reason: &str| {
            let state = json!({"terminated": {"exitCode": code, "reason": reason}});
            json!({"phase": "Failed", "containerStatuses": container("sandbox", state)})
        };
        let cases = [
            (exit(40, "Error"), "deadline"),
            (exit(42, "Error"), "heard nothing"),
            (exit(137, "OOMKilled"), "OOMKilled"),
            (exit(137, "Error"), "from outside"),
            (exit(3, "Error"), "code 3"),
            (
                json!({"phase": "Failed", "reason": "Evicted",
                    "message": "The node was low on resource: memory."}),
                "low on resource",
            ),
            (
                json!({"phase": "Failed", "reason": "DeadlineExceeded"}),
                "deadline",
            ),
            (json!({"phase": "Failed", "reason": "OutOfcpu"}), "OutOfcpu"),
            (
                json!({"phase": "Failed", "conditions": [{
                "type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager",
                "message": "Taint manager: deleting due to NoExecute taint"}]}),
                "node was lost",
            ),
        ];
        for (status, words) in cases {
            let reason = ends(status);
            assert!(reason.contains(words), "{words}: {reason}");
        }
        let leaving = json!({
            "metadata": {"name": "p", "deletionTimestamp": "2026-01-01T00:00:00Z"},
            "status": {"phase": "Running", "containerStatuses": container("sandbox", json!({"running": {}}))},
        });
        let Seen::Ended(ended) = look(&serde_json::from_value(leaving).unwrap()) else {
            panic!("it is being deleted");
        };
        assert!(!ended.certain, "its processes may still run");
    }

    #[test]
    fn an_eviction_while_the_guest_is_put_there_is_not_the_images_fault() {
        let state = seen(json!({
            "phase": "Failed",
            "initContainerStatuses": container("install", json!({"terminated": {"exitCode": 137, "reason": "Error"}})),
        }));
        assert!(matches!(state, Seen::Ended(ended) if ended.trouble.is_none()));
    }
}

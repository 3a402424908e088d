//! What is sent, as a whole: a change of it is a change that somebody has to look at.

use std::path::Path;

use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{ConfigMap, Pod},
    networking::v1::NetworkPolicy,
};
use serde_json::Value;

use super::super::{manifest, *};
use crate::{Limits, Mount, RefusalCause};

fn run() -> Run {
    Run {
        id: "4f1c".to_owned(),
        lease_uid: "11111111-2222-3333-4444-555555555555".to_owned(),
    }
}

fn spec() -> Spec {
    Spec {
        name: "fix $(the) tests/3".to_owned(),
        limits: Limits {
            memory_bytes: 512 << 20,
            pids: 64,
            cpu_cores: 1.5,
            disk_bytes: 64 << 20,
            deadline_s: 600,
        },
        gateway_socket: Some("/run/gateway.sock".into()),
        ..Spec::default()
    }
}

fn pod(config: &KubernetesConfig, spec: &Spec, role: Role) -> Result<Value, SandboxError> {
    let run = run();
    manifest::pod(&PodPlan {
        config,
        run: &run,
        spec,
        image: "registry.example/task:7",
        name: "espalier-4f1c-3",
        role,
        parts: 2,
    })
}

/// The text of a manifest, of which the cluster's own types know every field.
fn text<T: serde::de::DeserializeOwned + serde::Serialize>(value: &Value) -> String {
    let typed: T = serde_json::from_value(value.clone()).unwrap();
    let again = serde_json::to_value(&typed).unwrap();
    let sorted = |value: &Value| {
        let mut value = value.clone();
        value.sort_all_objects();
        value
    };
    assert_eq!(
        sorted(&again),
        sorted(value),
        "a field that no cluster knows"
    );
    serde_json::to_string_pretty(value).unwrap()
}

#[test]
fn a_plain_pod() {
    let pod = pod(&KubernetesConfig::default(), &spec(), Role::Sandbox).unwrap();
    insta::assert_snapshot!(text::<Pod>(&pod));
}

#[test]
fn a_pod_with_every_setting() {
    let config = KubernetesConfig {
        pull: PullPolicy::Never,
        pull_secrets: vec!["registry".to_owned()],
        volumes: vec![SharedFolder {
            source: "/var/cache/bundles".into(),
            claim: "bundles".to_owned(),
            sub_path: "v1".to_owned(),
        }],
        cpu_request_millis: Some(250),
        memory_request_bytes: Some(128 << 20),
        node_selector: [("pool".to_owned(), "rollouts".to_owned())].into(),
        tolerations: vec![
            Toleration {
                key: "rollouts".to_owned(),
                value: Some("only".to_owned()),
                effect: Some("NoSchedule".to_owned()),
            },
            Toleration::default(),
        ],
        runtime_class: Some("gvisor".to_owned()),
        priority_class: Some("low".to_owned()),
        service_account: Some("sandbox".to_owned()),
        labels: [("team".to_owned(), "rl".to_owned())].into(),
        annotations: [("owner".to_owned(), "me".to_owned())].into(),
        restricted: true,
        user_namespace: true,
        ..KubernetesConfig::default()
    };
    let mut spec = spec();
    spec.mounts = vec![Mount {
        source: "/var/cache/bundles/pi-0.1".into(),
        target: "/opt/pi".into(),
    }];
    let pod = pod(&config, &spec, Role::Sandbox).unwrap();
    insta::assert_snapshot!(text::<Pod>(&pod));
}

#[test]
fn a_sandbox_of_the_controller_wraps_the_same_pod() {
    let config = KubernetesConfig {
        agent_sandbox: Some("v1alpha1".to_owned()),
        ..KubernetesConfig::default()
    };
    let (run, spec) = (run(), spec());
    let plan = PodPlan {
        config: &config,
        run: &run,
        spec: &spec,
        image: "debian:12",
        name: "espalier-4f1c-3",
        role: Role::Sandbox,
        parts: 2,
    };
    let plain = manifest::pod(&plan).unwrap();
    let object = manifest::object(&plan, "2026-01-01T00:00:00Z").unwrap();
    assert_eq!(object["apiVersion"], "agents.x-k8s.io/v1alpha1");
    assert_eq!(object["kind"], "Sandbox");
    let template = &object["spec"]["podTemplate"];
    assert_eq!(template["spec"], plain["spec"]);
    assert_eq!(template["metadata"]["labels"], plain["metadata"]["labels"]);
    assert_eq!(
        object["metadata"]["ownerReferences"],
        plain["metadata"]["ownerReferences"]
    );
    assert_eq!(object["spec"]["shutdownTime"], "2026-01-01T00:00:00Z");
}

#[test]
fn lease_policy_and_pieces() {
    let lease = manifest::lease("4f1c", "host/7", "2026-01-01T00:00:00.000000Z", 60);
    let policy = manifest::network_policy(&run());
    let part = manifest::guest_part(&run(), 1, "Z3Vlc3Q=");
    let all = [
        text::<Lease>(&lease),
        text::<NetworkPolicy>(&policy),
        text::<ConfigMap>(&part),
    ];
    insta::assert_snapshot!(all.join("\n---\n"));
}

#[test]
fn the_policy_covers_the_probe_as_a_sandbox_and_not_the_control() {
    let policy = manifest::network_policy(&run());
    let selector = policy["spec"]["podSelector"]["matchLabels"]
        .as_object()
        .unwrap();
    let covered = |role: Role| {
        let pod = pod(&KubernetesConfig::default(), &spec(), role).unwrap();
        let labels = &pod["metadata"]["labels"];
        selector.iter().all(|(key, value)| labels[key] == *value)
    };
    assert!(covered(Role::Sandbox));
    assert!(covered(Role::Probe("192.0.2.1:80".to_owned())));
    assert!(!covered(Role::Control("192.0.2.1:80".to_owned())));
    assert!(policy["spec"].get("egress").is_none(), "no way out at all");
}

#[test]
fn a_folder_of_this_machine_is_refused_with_advice() {
    let mut spec = spec();
    spec.mounts = vec![Mount {
        source: Path::new("/home/me/bundle").into(),
        target: "/opt/bundle".into(),
    }];
    let error = pod(&KubernetesConfig::default(), &spec, Role::Sandbox).unwrap_err();
    let SandboxError::Refused { cause, hint, .. } = &error else {
        panic!("{error:?}");
    };
    assert_eq!(*cause, RefusalCause::Invalid);
    assert!(hint.contains("[[sandbox.volumes]]"), "{hint}");
}

#[test]
fn requests_are_never_above_limits() {
    let config = KubernetesConfig {
        cpu_request_millis: Some(9_000),
        memory_request_bytes: Some(1 << 40),
        ..KubernetesConfig::default()
    };
    let pod = pod(&config, &spec(), Role::Sandbox).unwrap();
    let resources = &pod["spec"]["containers"][0]["resources"];
    assert_eq!(resources["requests"], resources["limits"]);
    assert_eq!(resources["limits"]["cpu"], "1500m");
}

#[test]
fn what_the_cluster_would_replace_arrives_as_it_is() {
    let mut spec = spec();
    spec.workspace = "/work$(HOME)$$".into();
    let pod = pod(&KubernetesConfig::default(), &spec, Role::Sandbox).unwrap();
    for container in ["initContainers", "containers"] {
        let command = &pod["spec"][container][0]["command"];
        let last = command
            .as_array()
            .unwrap()
            .last()
            .unwrap()
            .as_str()
            .unwrap();
        assert!(last.contains("/work$$(HOME)$$$$"), "{last}");
    }
}

//! Whether a cluster can be used: asks it, and has it check a pod without making one.

use k8s_openapi::api::{authorization::v1::SelfSubjectAccessReview, core::v1::Pod};
use kube::{Api, Client, api::PostParams};
use serde_json::json;

use super::{
    config::KubernetesConfig,
    connect::connect,
    error::once,
    manifest::{self, PodPlan, Role, Run},
    run::parse,
};
use crate::{
    Spec,
    doctor::{Check, bad, good},
};

const COSTS: &str = "the kubernetes kind of sandbox does not work";
const RBAC: &str = "kubectl apply -k recipes/kubernetes, or ask whoever runs the cluster";

/// What we do there: group, resource, subresource, verbs.
const NEEDED: [(&str, &str, &str, &[&str]); 5] = [
    ("", "pods", "", &["create", "list", "watch", "delete"]),
    ("", "pods", "exec", &["get", "create"]),
    ("", "configmaps", "", &["create"]),
    (
        "coordination.k8s.io",
        "leases",
        "",
        &["create", "get", "list", "update", "delete"],
    ),
    ("networking.k8s.io", "networkpolicies", "", &["create"]),
];

/// Looks at the cluster of a recipe. Changes nothing there.
pub(crate) async fn doctor(config: &KubernetesConfig) -> Vec<Check> {
    let (client, namespace) = match connect(config).await {
        Ok(found) => found,
        Err(error) => {
            let advice = "name a kubeconfig and a context that work";
            return vec![bad("kubernetes cluster", error.to_string(), COSTS, advice)];
        }
    };
    let version = match once("asking for the version", client.apiserver_version()).await {
        Ok(version) => version,
        Err(error) => {
            let advice = "is it up, and is the way there open?";
            return vec![bad("kubernetes cluster", error.to_string(), COSTS, advice)];
        }
    };
    let found = format!("{}, namespace {namespace}", version.git_version);
    let mut checks = vec![good("kubernetes cluster", found)];
    checks.push(permissions(&client, &namespace, config).await);
    checks.push(dry_run(&client, &namespace, config).await);
    let policy = "kubernetes egress";
    checks.push(match config.network_policy {
        true => good(
            policy,
            "a NetworkPolicy is made; a probe tries it before the first sandbox",
        ),
        false => bad(
            policy,
            "network_policy = false",
            "sandboxes reach what any pod of the namespace reaches",
            "leave network_policy out",
        ),
    });
    checks
}

async fn permissions(client: &Client, namespace: &str, config: &KubernetesConfig) -> Check {
    let name = "kubernetes permissions";
    let api: Api<SelfSubjectAccessReview> = Api::all(client.clone());
    let mut lacks = Vec::new();
    let mut needed = NEEDED.to_vec();
    if config.agent_sandbox.is_some() {
        needed.push(("agents.x-k8s.io", "sandboxes", "", &["create", "delete"]));
    }
    for (group, resource, subresource, verbs) in needed {
        if resource == "networkpolicies" && !config.network_policy {
            continue;
        }
        for verb in verbs {
            let review = json!({"spec": {"resourceAttributes": {
                "namespace": namespace, "verb": verb, "group": group,
                "resource": resource, "subresource": subresource,
            }}});
            let parameters = PostParams::default();
            let answer = match parse::<SelfSubjectAccessReview>(review) {
                Ok(review) => {
                    once("asking for a permission", api.create(&parameters, &review)).await
                }
                Err(error) => Err(error),
            };
            match answer {
                Ok(review) if review.status.as_ref().is_some_and(|s| s.allowed) => {}
                Ok(_) => lacks.push(match subresource {
                    "" => format!("{verb} {resource}"),
                    sub => format!("{verb} {resource}/{sub}"),
                }),
                Err(error) => return bad(name, error.to_string(), COSTS, RBAC),
            }
        }
    }
    match lacks.is_empty() {
        true => good(name, "all that is needed"),
        false => bad(
            name,
            format!("not allowed: {}", lacks.join(", ")),
            COSTS,
            RBAC,
        ),
    }
}

async fn dry_run(client: &Client, namespace: &str, config: &KubernetesConfig) -> Check {
    let name = "kubernetes pod";
    let Some(image) = &config.image else {
        return good(name, "not tried: the recipe names no image of its own");
    };
    let spec = Spec::default();
    let run = Run {
        id: "doctor".to_owned(),
        lease_uid: "00000000-0000-0000-0000-000000000000".to_owned(),
    };
    let plan = PodPlan {
        config,
        run: &run,
        spec: &spec,
        image,
        name: "espalier-doctor",
        role: Role::Sandbox,
        parts: 1,
    };
    let pod = match manifest::pod(&plan) {
        Ok(pod) => pod,
        Err(error) => return bad(name, error.to_string(), COSTS, "correct the recipe"),
    };
    let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let parameters = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let tried = match parse::<Pod>(pod) {
        Ok(pod) => once("trying a pod", api.create(&parameters, &pod)).await,
        Err(error) => Err(error),
    };
    match tried {
        Ok(_) => good(name, "the cluster would take one (default limits)"),
        Err(error) => {
            let found = error.to_string();
            let advice = match error.refusal(name) {
                crate::SandboxError::Refused { hint, .. } => hint,
                _ => "try again".to_owned(),
            };
            bad(name, found, COSTS, &advice)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use k8s_openapi::api::{
        core::v1::{Namespace, ResourceQuota},
        networking::v1::NetworkPolicy,
        rbac::v1::Role,
    };
    use serde::{Deserialize, de::DeserializeOwned};
    use serde_json::Value;

    use super::*;

    /// The documents of a file in recipes/kubernetes, by kind.
    fn documents(name: &str) -> Vec<(String, Value)> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/kubernetes");
        let text = fs::read_to_string(folder.join(name)).unwrap();
        serde_yaml_ng::Deserializer::from_str(&text)
            .map(|document| Value::deserialize(document).unwrap())
            .map(|value| (value["kind"].as_str().unwrap().to_owned(), value))
            .collect()
    }

    fn one<T: DeserializeOwned>(name: &str, kind: &str) -> T {
        let found = documents(name).into_iter().find(|(k, _)| k == kind);
        serde_json::from_value(found.unwrap().1).unwrap()
    }

    #[test]
    fn the_role_of_the_guide_allows_what_we_do_and_nothing_dangerous() {
        let role: Role = one("rbac.yaml", "Role");
        let rules = role.rules.unwrap();
        let allowed = |group: &str, resource: &str, verb: &str| {
            rules.iter().any(|rule| {
                let has = |list: &Option<Vec<String>>, what: &str| {
                    list.iter().flatten().any(|item| item == what)
                };
                has(&rule.api_groups, group)
                    && has(&rule.resources, resource)
                    && rule.verbs.iter().any(|v| v == verb)
            })
        };
        for (group, resource, subresource, verbs) in NEEDED {
            let resource = match subresource {
                "" => resource.to_owned(),
                sub => format!("{resource}/{sub}"),
            };
            for verb in verbs {
                assert!(allowed(group, &resource, verb), "{verb} {resource}");
            }
        }
        for rule in &rules {
            let resources = rule.resources.iter().flatten();
            let verbs = rule.verbs.iter();
            assert!(
                resources.clone().all(|r| r != "*" && r != "secrets"),
                "{rule:?}"
            );
            assert!(verbs.clone().all(|v| v != "*"), "{rule:?}");
        }
    }

    #[test]
    fn the_manifests_of_the_guide_are_what_they_say() {
        let policy: NetworkPolicy = one("network-policy.yaml", "NetworkPolicy");
        let spec = policy.spec.unwrap();
        assert_eq!(spec.policy_types.unwrap(), ["Ingress", "Egress"]);
        assert!(spec.egress.is_none() && spec.ingress.is_none());
        let labels = spec.pod_selector.unwrap().match_labels.unwrap();
        assert_eq!(
            labels[manifest::ROLE],
            "sandbox",
            "the probe's counterpart is left out"
        );
        let quota: ResourceQuota = one("quota.yaml", "ResourceQuota");
        assert!(quota.spec.unwrap().hard.unwrap().contains_key("pods"));
        let namespace: Namespace = one("namespace.yaml", "Namespace");
        assert_eq!(namespace.metadata.name.as_deref(), Some("espalier"));
        let (_, kustomization) = documents("kustomization.yaml").remove(0);
        for file in kustomization["resources"].as_array().unwrap() {
            assert!(!documents(file.as_str().unwrap()).is_empty(), "{file}");
        }
    }
}

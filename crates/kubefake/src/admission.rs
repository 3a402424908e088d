//! Who may be created where: namespaces, names that must exist, pod security, quotas.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::{
    error::ApiError,
    quantity,
    resources::Resource,
    store::{Key, Store},
    validate::{list, text},
};

/// Whether a namespaced object may be created in its namespace.
pub(crate) fn namespace(
    store: &Store,
    resource: &Resource,
    namespace: &str,
    name: &str,
    namespaces: &Resource,
) -> Result<(), ApiError> {
    let key = Key::new("namespaces", "", namespace);
    let Some(found) = store.get(&key) else {
        return Err(ApiError::not_found(namespaces, namespace));
    };
    if found["metadata"]["deletionTimestamp"].is_null() {
        return Ok(());
    }
    let why = format!(
        "unable to create new content in namespace {namespace} because it is being terminated"
    );
    let mut error = ApiError::forbidden(resource, name, &why);
    error.details["causes"] = json!([{
        "reason": "NamespaceTerminating",
        "message": format!("namespace {namespace} is being terminated"),
        "field": "metadata.namespace",
    }]);
    Err(error)
}

/// Whether a pod may be created.
pub(crate) fn pod(
    store: &Store,
    resource: &Resource,
    namespace: &str,
    pod: &mut Value,
) -> Result<(), ApiError> {
    let name = text(&pod["metadata"]["name"]).to_owned();
    let refuse = |why: &str| Err(ApiError::forbidden(resource, &name, why));
    let account = text(&pod["spec"]["serviceAccountName"]).to_owned();
    if store
        .get(&Key::new("serviceaccounts", namespace, &account))
        .is_none()
    {
        return refuse(&format!(
            "error looking up service account {namespace}/{account}: serviceaccount \
             \"{account}\" not found"
        ));
    }
    let class = text(&pod["spec"]["runtimeClassName"]).to_owned();
    let key = Key::new("runtimeclasses.node.k8s.io", "", &class);
    if !class.is_empty() && store.get(&key).is_none() {
        return refuse(&format!("pod rejected: RuntimeClass \"{class}\" not found"));
    }
    let class = text(&pod["spec"]["priorityClassName"]).to_owned();
    if !class.is_empty() {
        let key = Key::new("priorityclasses.scheduling.k8s.io", "", &class);
        match store.get(&key) {
            Some(found) => pod["spec"]["priority"] = found["value"].clone(),
            None => return refuse(&format!("no PriorityClass with name {class} was found")),
        }
    }
    let labels = store
        .get(&Key::new("namespaces", "", namespace))
        .map(|n| n["metadata"]["labels"].clone())
        .unwrap_or_default();
    let level = text(&labels["pod-security.kubernetes.io/enforce"]);
    let broken = match level {
        "restricted" => violations(&pod["spec"], true),
        "baseline" => violations(&pod["spec"], false),
        _ => Vec::new(),
    };
    if !broken.is_empty() {
        return refuse(&format!(
            "violates PodSecurity \"{level}:latest\": {}",
            broken.join(", ")
        ));
    }
    quotas(store, resource, namespace, pod)
}

fn containers(spec: &Value) -> impl Iterator<Item = &Value> + Clone {
    list(&spec["initContainers"]).chain(list(&spec["containers"]))
}

/// What the Pod Security Standards find wrong.
fn violations(spec: &Value, restricted: bool) -> Vec<String> {
    let mut broken = Vec::new();
    let offenders = |test: &dyn Fn(&Value) -> bool| -> Option<String> {
        let names: Vec<String> = containers(spec)
            .filter(|c| test(c))
            .map(|c| format!("{}", c["name"]))
            .collect();
        match names.len() {
            0 => None,
            1 => Some(format!("container {}", names.join(", "))),
            _ => Some(format!("containers {}", names.join(", "))),
        }
    };
    if spec["hostNetwork"] == true {
        broken.push("host namespaces (hostNetwork=true)".to_owned());
    }
    for volume in list(&spec["volumes"]).filter(|v| !v["hostPath"].is_null()) {
        broken.push(format!("hostPath volumes (volume {})", volume["name"]));
    }
    if let Some(who) = offenders(&|c| c["securityContext"]["privileged"] == true) {
        broken.push(format!(
            "privileged ({who} must not set securityContext.privileged=true)"
        ));
    }
    if !restricted {
        return broken;
    }
    if let Some(who) = offenders(&|c| c["securityContext"]["allowPrivilegeEscalation"] != false) {
        broken.push(format!(
            "allowPrivilegeEscalation != false ({who} must set \
             securityContext.allowPrivilegeEscalation=false)"
        ));
    }
    let keeps =
        |c: &Value| !list(&c["securityContext"]["capabilities"]["drop"]).any(|d| d == "ALL");
    if let Some(who) = offenders(&keeps) {
        broken.push(format!(
            "unrestricted capabilities ({who} must set \
             securityContext.capabilities.drop=[\"ALL\"])"
        ));
    }
    let of_pod = &spec["securityContext"];
    let own = |c: &Value, key: &str| match &c["securityContext"][key] {
        Value::Null => of_pod[key].clone(),
        own => own.clone(),
    };
    if let Some(who) = offenders(&|c| own(c, "runAsNonRoot") != true) {
        broken.push(format!(
            "runAsNonRoot != true (pod or {who} must set securityContext.runAsNonRoot=true)"
        ));
    }
    if let Some(who) = offenders(&|c| own(c, "runAsUser") == 0) {
        broken.push(format!("runAsUser=0 ({who} must not set runAsUser=0)"));
    }
    let unconfined = |c: &Value| {
        let profile = own(c, "seccompProfile");
        !["RuntimeDefault", "Localhost"].contains(&text(&profile["type"]))
    };
    if let Some(who) = offenders(&unconfined) {
        broken.push(format!(
            "seccompProfile (pod or {who} must set securityContext.seccompProfile.type to \
             \"RuntimeDefault\" or \"Localhost\")"
        ));
    }
    broken
}

/// What one pod counts, by the names that quotas use, in thousandths.
pub(crate) fn charges(pod: &Value) -> BTreeMap<String, i128> {
    let mut found = BTreeMap::from([("pods".to_owned(), 1000), ("count/pods".to_owned(), 1000)]);
    let spec = &pod["spec"];
    for (kind, short) in [("requests", true), ("limits", false)] {
        for name in ["cpu", "memory", "ephemeral-storage"] {
            let of = |c: &Value| quantity::of(&c["resources"][kind][name]);
            let running: Vec<i128> = list(&spec["containers"]).filter_map(of).collect();
            let first = list(&spec["initContainers"]).filter_map(of).max();
            if running.is_empty() && first.is_none() {
                continue;
            }
            let amount = running.iter().sum::<i128>().max(first.unwrap_or(0));
            found.insert(format!("{kind}.{name}"), amount);
            if short {
                found.insert(name.to_owned(), amount);
            }
        }
    }
    found
}

fn is_terminal(pod: &Value) -> bool {
    ["Succeeded", "Failed"].contains(&text(&pod["status"]["phase"]))
}

/// What a namespace uses of the names in a quota.
pub(crate) fn used(store: &Store, namespace: &str, hard: &Value) -> BTreeMap<String, i128> {
    let mut sums: BTreeMap<String, i128> = hard
        .as_object()
        .into_iter()
        .flatten()
        .map(|(name, _)| (name.clone(), 0))
        .collect();
    for (_, pod) in store.list("pods", Some(namespace)) {
        for (name, amount) in charges(pod) {
            // Pods that are over cost nothing but their entry.
            if (!is_terminal(pod) || name == "count/pods")
                && let Some(sum) = sums.get_mut(&name)
            {
                *sum += amount;
            }
        }
    }
    for (name, sum) in &mut sums {
        let plural = name.strip_prefix("count/").unwrap_or(name);
        if !plural.contains("pods") {
            let count = store.list(plural, Some(namespace)).count();
            *sum += i128::try_from(count).unwrap_or(0) * 1000;
        }
    }
    sums
}

fn quotas(
    store: &Store,
    resource: &Resource,
    namespace: &str,
    pod: &Value,
) -> Result<(), ApiError> {
    let name = text(&pod["metadata"]["name"]);
    let wanted = charges(pod);
    for (key, quota) in store.list("resourcequotas", Some(namespace)) {
        let hard = &quota["spec"]["hard"];
        let limits = hard.as_object().into_iter().flatten();
        let limits: BTreeMap<&str, i128> = limits
            .filter_map(|(name, value)| Some((name.as_str(), quantity::of(value)?)))
            .collect();
        for constrained in ["cpu", "memory", "ephemeral-storage"] {
            for (kind, limited) in [
                ("requests", format!("requests.{constrained}")),
                ("requests", constrained.to_owned()),
                ("limits", format!("limits.{constrained}")),
            ] {
                let silent: Vec<&str> = containers(&pod["spec"])
                    .filter(|c| c["resources"][kind][constrained].is_null())
                    .map(|c| text(&c["name"]))
                    .collect();
                if limits.contains_key(limited.as_str()) && !silent.is_empty() {
                    let why = format!(
                        "failed quota: {}: must specify {limited} for: {}",
                        key.name,
                        silent.join(",")
                    );
                    return Err(ApiError::forbidden(resource, name, &why));
                }
            }
        }
        let used = used(store, namespace, hard);
        let over: Vec<&str> = limits
            .iter()
            .filter(|(name, limit)| {
                let more = wanted.get(**name).copied().unwrap_or(0);
                more > 0 && used.get(**name).copied().unwrap_or(0) + more > **limit
            })
            .map(|(name, _)| *name)
            .collect();
        if !over.is_empty() {
            let show = |amounts: &dyn Fn(&str) -> i128| {
                let shown = over
                    .iter()
                    .map(|name| format!("{name}={}", quantity::show(amounts(name))));
                shown.collect::<Vec<_>>().join(",")
            };
            let get = |map: &BTreeMap<String, i128>, n: &str| map.get(n).copied().unwrap_or(0);
            let why = format!(
                "exceeded quota: {}, requested: {}, used: {}, limited: {}",
                key.name,
                show(&|n| get(&wanted, n)),
                show(&|n| get(&used, n)),
                show(&|n| limits.get(n).copied().unwrap_or(0)),
            );
            return Err(ApiError::forbidden(resource, name, &why));
        }
    }
    Ok(())
}

//! What the real server fills in and what it does not accept.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::{
    error::{ApiError, Cause},
    quantity,
    resources::Resource,
};

const SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric \
    characters, '-' or '.', and must start and end with an alphanumeric character (e.g. \
    'example.com', regex used for validation is \
    '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
const LABEL: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters \
    or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', \
    regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";
const LABEL_VALUE: &str = "a valid label must be an empty string or consist of alphanumeric \
    characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. \
    'MyValue',  or 'my_value',  or '12345', regex used for validation is \
    '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')";
const LABEL_NAME: &str = "name part must consist of alphanumeric characters, '-', '_' or '.', and \
    must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or \
    '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";

/// Of all values of a ConfigMap or Secret.
const DATA_BYTES_MAX: usize = 1 << 20;

pub(crate) fn list<'a>(value: &'a Value) -> impl Iterator<Item = &'a Value> + Clone + 'a {
    value.as_array().map_or(&[][..], Vec::as_slice).iter()
}

/// A list within a value; indexing would leave a null where there is none.
fn list_mut<'a>(value: &'a mut Value, key: &str) -> impl Iterator<Item = &'a mut Value> + 'a {
    let list = value.get_mut(key).and_then(Value::as_array_mut);
    list.into_iter().flatten()
}

pub(crate) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn ends_alphanumeric(text: &str) -> bool {
    let good = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    good(text.chars().next()) && good(text.chars().last())
}

fn is_label(text: &str) -> bool {
    let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    text.len() <= 63 && ends_alphanumeric(text) && text.chars().all(good)
}

fn is_subdomain(text: &str) -> bool {
    let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    text.len() <= 253
        && text
            .split('.')
            .all(|part| ends_alphanumeric(part) && part.chars().all(good))
}

fn is_label_value(text: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    text.is_empty() || (text.len() <= 63 && ends_alphanumeric(text) && text.chars().all(good))
}

/// Name, labels, owners: the same for all kinds.
pub(crate) fn metadata(resource: &Resource, object: &Value) -> Vec<Cause> {
    let mut causes = Vec::new();
    let name = &object["metadata"]["name"];
    let label_only = resource.is("namespaces");
    match (text(name), label_only) {
        ("", _) => causes.push(Cause::required(
            "metadata.name",
            "name or generateName is required",
        )),
        (name_text, true) if !is_label(name_text) => {
            causes.push(Cause::invalid("metadata.name", name, LABEL));
        }
        (name_text, false) if !is_subdomain(name_text) => {
            causes.push(Cause::invalid("metadata.name", name, SUBDOMAIN));
        }
        _ => {}
    }
    for (key, value) in object["metadata"]["labels"]
        .as_object()
        .into_iter()
        .flatten()
    {
        let last = key.rsplit('/').next().unwrap_or_default();
        if last.is_empty() || !is_label_value(last) {
            causes.push(Cause::invalid("metadata.labels", &json!(key), LABEL_NAME));
        }
        if text(value).len() > 63 {
            let detail = "must be no more than 63 characters";
            causes.push(Cause::invalid("metadata.labels", value, detail));
        } else if !is_label_value(text(value)) {
            causes.push(Cause::invalid("metadata.labels", value, LABEL_VALUE));
        }
    }
    for (at, owner) in list(&object["metadata"]["ownerReferences"]).enumerate() {
        for key in ["apiVersion", "kind", "name", "uid"] {
            if text(&owner[key]).is_empty() {
                let field = format!("metadata.ownerReferences[{at}].{key}");
                let detail = format!("{key} must not be empty");
                causes.push(Cause::invalid(field, &json!(""), &detail));
            }
        }
    }
    causes
}

/// What else a kind demands when it is written.
pub(crate) fn object(resource: &Resource, object: &Value) -> Vec<Cause> {
    match resource.plural.as_ref() {
        "pods" => pod(object),
        "configmaps" | "secrets" => {
            let mut causes = Vec::new();
            let data = object["data"].as_object().into_iter().flatten();
            let binary = object["binaryData"].as_object().into_iter().flatten();
            let encoded = resource.is("secrets");
            let bytes: usize = data
                .clone()
                .map(|(_, v)| (text(v).len(), encoded))
                .chain(binary.clone().map(|(_, v)| (text(v).len(), true)))
                .map(|(length, encoded)| if encoded { length / 4 * 3 } else { length })
                .sum();
            if bytes > DATA_BYTES_MAX {
                causes.push(Cause {
                    reason: "FieldValueTooLong",
                    message: format!("Too long: may not be more than {DATA_BYTES_MAX} bytes"),
                    field: if encoded { "data" } else { "" }.to_owned(),
                });
            }
            for (key, _) in data.chain(binary) {
                let good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
                if key.is_empty() || !key.chars().all(good) {
                    let detail = "a valid config key must consist of alphanumeric characters, \
                                  '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',  or \
                                  'key-name', regex used for validation is '[-._a-zA-Z0-9]+')";
                    causes.push(Cause::invalid(format!("data[{key}]"), &json!(key), detail));
                }
            }
            causes
        }
        "leases" => {
            let seconds = &object["spec"]["leaseDurationSeconds"];
            match seconds.as_i64() {
                Some(n) if n <= 0 => vec![Cause::invalid(
                    "spec.leaseDurationSeconds",
                    seconds,
                    "must be greater than 0",
                )],
                _ => Vec::new(),
            }
        }
        _ => Vec::new(),
    }
}

fn pod(pod: &Value) -> Vec<Cause> {
    let spec = &pod["spec"];
    let mut causes = Vec::new();
    let mut volumes = BTreeSet::new();
    for (at, volume) in list(&spec["volumes"]).enumerate() {
        let field = format!("spec.volumes[{at}]");
        let name = text(&volume["name"]);
        if name.is_empty() {
            causes.push(Cause::required(format!("{field}.name"), ""));
        } else if !is_label(name) {
            let field = format!("{field}.name");
            causes.push(Cause::invalid(field, &volume["name"], LABEL));
        } else if !volumes.insert(name) {
            let field = format!("{field}.name");
            causes.push(Cause::duplicate(field, &volume["name"]));
        }
        let sources = volume.as_object().map_or(0, |v| v.len()).saturating_sub(1);
        match sources {
            0 => causes.push(Cause::required(field, "must specify a volume type")),
            1 => {}
            _ => causes.push(Cause::forbidden(
                field,
                "may not specify more than 1 volume type",
            )),
        }
    }
    if list(&spec["containers"]).next().is_none() {
        causes.push(Cause::required("spec.containers", ""));
    }
    let mut names = BTreeSet::new();
    for kind in ["initContainers", "containers"] {
        for (at, c) in list(&spec[kind]).enumerate() {
            let field = format!("spec.{kind}[{at}]");
            container(c, &field, &volumes, &mut names, &mut causes);
        }
    }
    let policy = &spec["restartPolicy"];
    let known = ["Always", "OnFailure", "Never"];
    if !known.contains(&text(policy)) {
        causes.push(Cause::unsupported("spec.restartPolicy", policy, &known));
    }
    let deadline = &spec["activeDeadlineSeconds"];
    if deadline
        .as_i64()
        .is_some_and(|s| !(1..=i64::from(i32::MAX)).contains(&s))
    {
        let detail = "must be between 1 and 2147483647, inclusive";
        causes.push(Cause::invalid(
            "spec.activeDeadlineSeconds",
            deadline,
            detail,
        ));
    }
    let grace = &spec["terminationGracePeriodSeconds"];
    if grace.as_i64().is_some_and(|s| s < 0) {
        let detail = "must be greater than or equal to 0";
        let field = "spec.terminationGracePeriodSeconds";
        causes.push(Cause::invalid(field, grace, detail));
    }
    causes
}

fn container<'a>(
    container: &'a Value,
    field: &str,
    volumes: &BTreeSet<&str>,
    names: &mut BTreeSet<&'a str>,
    causes: &mut Vec<Cause>,
) {
    let name = text(&container["name"]);
    let name_field = format!("{field}.name");
    if name.is_empty() {
        causes.push(Cause::required(name_field, ""));
    } else if !is_label(name) {
        causes.push(Cause::invalid(name_field, &container["name"], LABEL));
    } else if !names.insert(name) {
        causes.push(Cause::duplicate(name_field, &container["name"]));
    }
    let image = text(&container["image"]);
    if image.is_empty() {
        causes.push(Cause::required(format!("{field}.image"), ""));
    } else if image.trim() != image {
        let detail = "must not have leading or trailing whitespace";
        let field = format!("{field}.image");
        causes.push(Cause::invalid(field, &container["image"], detail));
    }
    let policy = &container["imagePullPolicy"];
    let known = ["Always", "IfNotPresent", "Never"];
    if !policy.is_null() && !known.contains(&text(policy)) {
        let field = format!("{field}.imagePullPolicy");
        causes.push(Cause::unsupported(field, policy, &known));
    }
    for (at, env) in list(&container["env"]).enumerate() {
        let field = format!("{field}.env[{at}].name");
        let name = text(&env["name"]);
        if name.is_empty() {
            causes.push(Cause::required(field, ""));
        } else if name.contains('=') || !name.chars().all(|c| (' '..='~').contains(&c)) {
            let detail = "a valid environment variable name must consist only of printable ASCII \
                          characters other than '='";
            causes.push(Cause::invalid(field, &env["name"], detail));
        }
    }
    let mut paths = BTreeSet::new();
    for (at, mount) in list(&container["volumeMounts"]).enumerate() {
        let field = format!("{field}.volumeMounts[{at}]");
        if !volumes.contains(text(&mount["name"])) {
            causes.push(Cause::not_found(format!("{field}.name"), &mount["name"]));
        }
        let path = text(&mount["mountPath"]);
        if path.is_empty() {
            causes.push(Cause::required(format!("{field}.mountPath"), ""));
        } else if !paths.insert(path) {
            let field = format!("{field}.mountPath");
            causes.push(Cause::invalid(field, &mount["mountPath"], "must be unique"));
        }
        let inner = text(&mount["subPath"]);
        if inner.starts_with('/') || inner.split('/').any(|part| part == "..") {
            let detail = "must not contain '..' and must be a relative path";
            let field = format!("{field}.subPath");
            causes.push(Cause::invalid(field, &mount["subPath"], detail));
        }
    }
    for (at, port) in list(&container["ports"]).enumerate() {
        if !port["containerPort"]
            .as_i64()
            .is_some_and(|p| (1..=65_535).contains(&p))
        {
            let field = format!("{field}.ports[{at}].containerPort");
            let detail = "must be between 1 and 65535, inclusive";
            causes.push(Cause::invalid(field, &port["containerPort"], detail));
        }
    }
    let resources = &container["resources"];
    for kind in ["limits", "requests"] {
        for (name, value) in resources[kind].as_object().into_iter().flatten() {
            let field = format!("{field}.resources.{kind}[{name}]");
            match quantity::of(value) {
                None => {
                    let detail = "quantities must match the regular expression \
                                  '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'";
                    causes.push(Cause::invalid(field, value, detail));
                }
                Some(amount) if amount < 0 => {
                    let detail = "must be greater than or equal to 0";
                    causes.push(Cause::invalid(field, value, detail));
                }
                Some(amount) if kind == "requests" => {
                    let limit = &resources["limits"][name];
                    if quantity::of(limit).is_some_and(|limit| amount > limit) {
                        let limit = text(limit);
                        let detail =
                            format!("must be less than or equal to {name} limit of {limit}");
                        causes.push(Cause::invalid(field, value, &detail));
                    }
                }
                Some(_) => {}
            }
        }
    }
}

/// What real nodes do and this one does not. Better a clear no than a pod that behaves otherwise.
pub(crate) fn not_faked(pod: &Value) -> Option<ApiError> {
    const SOURCES: [&str; 9] = [
        "projected",
        "emptyDir",
        "persistentVolumeClaim",
        "configMap",
        "secret",
        "downwardAPI",
        "hostPath",
        "image",
        "name",
    ];
    let spec = &pod["spec"];
    for key in ["hostPID", "hostIPC", "shareProcessNamespace"] {
        if spec[key] == true {
            return Some(ApiError::not_faked(&format!("spec.{key}")));
        }
    }
    if spec["hostUsers"] == false {
        return Some(ApiError::not_faked("spec.hostUsers false"));
    }
    if list(&spec["ephemeralContainers"]).next().is_some() {
        return Some(ApiError::not_faked("spec.ephemeralContainers"));
    }
    for volume in list(&spec["volumes"]) {
        for part in list(&volume["projected"]["sources"]) {
            if !part["serviceAccountToken"].is_null() || !part["clusterTrustBundle"].is_null() {
                return Some(ApiError::not_faked("tokens in projected volumes"));
            }
        }
        for source in volume.as_object().into_iter().flatten().map(|(key, _)| key) {
            if !SOURCES.contains(&source.as_str()) {
                return Some(ApiError::not_faked(&format!("volumes of kind {source}")));
            }
        }
    }
    let containers = list(&spec["initContainers"]).chain(list(&spec["containers"]));
    for container in containers {
        for key in [
            "livenessProbe",
            "readinessProbe",
            "startupProbe",
            "lifecycle",
            "restartPolicy",
            "volumeDevices",
        ] {
            if !container[key].is_null() {
                return Some(ApiError::not_faked(&format!("{key} of a container")));
            }
        }
    }
    None
}

fn default(value: &mut Value, key: &str, fill: Value) {
    if value[key].is_null() {
        value[key] = fill;
    }
}

/// Fills in what the real server fills in.
pub(crate) fn defaults(resource: &Resource, object: &mut Value) {
    match resource.plural.as_ref() {
        "pods" => pod_defaults(object),
        "secrets" => default(object, "type", json!("Opaque")),
        "namespaces" => {
            default(object, "spec", json!({"finalizers": ["kubernetes"]}));
            default(object, "status", json!({"phase": "Active"}));
            let name = object["metadata"]["name"].clone();
            object["metadata"]["labels"]["kubernetes.io/metadata.name"] = name;
        }
        "networkpolicies" => {
            let spec = &mut object["spec"];
            if spec["policyTypes"].is_null() {
                let mut types = vec!["Ingress"];
                if !spec["egress"].is_null() {
                    types.push("Egress");
                }
                spec["policyTypes"] = json!(types);
            }
        }
        _ => {}
    }
}

fn pod_defaults(pod: &mut Value) {
    let spec = &mut pod["spec"];
    for (key, fill) in [
        ("restartPolicy", json!("Always")),
        ("terminationGracePeriodSeconds", json!(30)),
        ("dnsPolicy", json!("ClusterFirst")),
        ("schedulerName", json!("default-scheduler")),
        ("securityContext", json!({})),
        ("enableServiceLinks", json!(true)),
        ("serviceAccountName", json!("default")),
        ("priority", json!(0)),
        ("preemptionPolicy", json!("PreemptLowerPriority")),
    ] {
        default(spec, key, fill);
    }
    let account = spec["serviceAccountName"].clone();
    default(spec, "serviceAccount", account);
    for kind in ["initContainers", "containers"] {
        for container in list_mut(spec, kind) {
            let image = text(&container["image"]);
            let latest = image.ends_with(":latest")
                || !(image.contains('@') || image.rsplit('/').next().unwrap_or("").contains(':'));
            let policy = if latest { "Always" } else { "IfNotPresent" };
            for (key, fill) in [
                ("imagePullPolicy", json!(policy)),
                ("resources", json!({})),
                ("terminationMessagePath", json!("/dev/termination-log")),
                ("terminationMessagePolicy", json!("File")),
            ] {
                default(container, key, fill);
            }
            if let Some(limits) = container["resources"]["limits"].as_object().cloned() {
                for (name, limit) in limits {
                    default(&mut container["resources"]["requests"], &name, limit);
                }
            }
        }
    }
    for volume in list_mut(spec, "volumes") {
        for source in ["configMap", "secret", "downwardAPI"] {
            if volume[source].is_object() {
                default(&mut volume[source], "defaultMode", json!(0o644));
            }
        }
    }
    let quality = quality(spec);
    pod["status"] = json!({"phase": "Pending", "qosClass": quality});
}

fn quality(spec: &Value) -> &'static str {
    let mut any = false;
    let mut guaranteed = true;
    for container in list(&spec["initContainers"]).chain(list(&spec["containers"])) {
        let resources = &container["resources"];
        for name in ["cpu", "memory"] {
            let (request, limit) = (&resources["requests"][name], &resources["limits"][name]);
            any |= !request.is_null() || !limit.is_null();
            guaranteed &= !limit.is_null() && quantity::of(request) == quantity::of(limit);
        }
    }
    match (any, guaranteed) {
        (false, _) => "BestEffort",
        (true, true) => "Guaranteed",
        (true, false) => "Burstable",
    }
}

/// What may not change in an update.
pub(crate) fn update(resource: &Resource, old: &Value, new: &Value) -> Vec<Cause> {
    match resource.plural.as_ref() {
        "pods" => {
            let rest = |pod: &Value| {
                let mut spec = pod["spec"].clone();
                for key in [
                    "activeDeadlineSeconds",
                    "terminationGracePeriodSeconds",
                    "tolerations",
                ] {
                    spec[key] = Value::Null;
                }
                for kind in ["initContainers", "containers"] {
                    for container in list_mut(&mut spec, kind) {
                        container["image"] = Value::Null;
                    }
                }
                spec
            };
            if rest(old) == rest(new) {
                return Vec::new();
            }
            vec![Cause::forbidden(
                "spec",
                "pod updates may not change fields other than \
                 `spec.containers[*].image`,`spec.initContainers[*].image`,\
                 `spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing \
                 tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it \
                 was previously negative)",
            )]
        }
        "configmaps" | "secrets" if old["immutable"] == true => {
            let changed = ["data", "binaryData", "immutable"]
                .into_iter()
                .find(|key| old[*key] != new[*key]);
            changed
                .map(|key| Cause::forbidden(key, "field is immutable when `immutable` is set"))
                .into_iter()
                .collect()
        }
        _ => Vec::new(),
    }
}

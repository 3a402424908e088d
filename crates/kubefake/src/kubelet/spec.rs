//! What a container is to be, for `runc`: from the pod and what it refers to.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use base64::Engine;
use serde_json::{Value, json};

use super::images::Image;
use crate::{
    quantity,
    store::{Key, Store},
    validate::{list, text},
};

/// What containers have when a pod takes nothing away.
const CAPABILITIES: [&str; 14] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FSETID",
    "FOWNER",
    "MKNOD",
    "NET_RAW",
    "SETGID",
    "SETUID",
    "SETFCAP",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "KILL",
    "AUDIT_WRITE",
];
const MASKED: [&str; 9] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
];
const READ_ONLY: [&str; 5] = [
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];

/// Why a container cannot be made: the waiting reason and the message.
pub(crate) type Unmade = (&'static str, String);

fn config_error(message: impl Into<String>) -> Unmade {
    ("CreateContainerConfigError", message.into())
}

/// A value of a ConfigMap or a Secret.
fn value_of(
    store: &Store,
    resource: &str,
    namespace: &str,
    name: &str,
    key: &str,
) -> Result<Vec<u8>, String> {
    let kind = resource.trim_end_matches('s');
    let object = store
        .get(&Key::new(resource, namespace, name))
        .ok_or_else(|| format!("{kind} \"{name}\" not found"))?;
    entries(object, resource)
        .remove(key)
        .ok_or_else(|| format!("couldn't find key {key} in {kind} {namespace}/{name}"))
}

/// All values of a ConfigMap or a Secret.
pub(crate) fn entries(object: &Value, resource: &str) -> BTreeMap<String, Vec<u8>> {
    let decode = |value: &Value| {
        let decoder = base64::engine::general_purpose::STANDARD;
        decoder.decode(text(value)).unwrap_or_default()
    };
    let mut found = BTreeMap::new();
    for (key, value) in object["data"].as_object().into_iter().flatten() {
        let bytes = if resource == "secrets" {
            decode(value)
        } else {
            text(value).as_bytes().to_vec()
        };
        found.insert(key.clone(), bytes);
    }
    for (key, value) in object["binaryData"].as_object().into_iter().flatten() {
        found.insert(key.clone(), decode(value));
    }
    found
}

/// A field of the pod that containers may ask for.
pub(crate) fn field(pod: &Value, path: &str) -> Option<String> {
    if let Some((map, key)) = path.strip_suffix("']").and_then(|p| p.split_once("['")) {
        let last = map.rsplit('.').next()?;
        return Some(text(&pod["metadata"][last][key]).to_owned());
    }
    let lines = |map: &Value| {
        let entries = map.as_object().into_iter().flatten();
        let lines: Vec<String> = entries.map(|(k, v)| format!("{k}={:?}", text(v))).collect();
        lines.join("\n")
    };
    Some(match path {
        "metadata.labels" => lines(&pod["metadata"]["labels"]),
        "metadata.annotations" => lines(&pod["metadata"]["annotations"]),
        "metadata.name"
        | "metadata.namespace"
        | "metadata.uid"
        | "spec.nodeName"
        | "spec.serviceAccountName"
        | "status.hostIP"
        | "status.podIP" => {
            let found = path.split('.').fold(pod, |value, key| &value[key]);
            text(found).to_owned()
        }
        _ => return None,
    })
}

/// `$(NAME)` of known names; `$$` is `$`.
pub(crate) fn expand(text: &str, known: &BTreeMap<String, String>) -> String {
    let mut result = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        result.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            result.push('$');
            rest = after;
        } else if let Some((name, after)) = rest.strip_prefix('(').and_then(|r| r.split_once(')')) {
            match known.get(name) {
                Some(value) => result.push_str(value),
                None => result.push_str(&format!("$({name})")),
            }
            rest = after;
        } else {
            result.push('$');
        }
    }
    result.push_str(rest);
    result
}

/// The environment of a container, in order.
pub(crate) fn environment(
    store: &Store,
    pod: &Value,
    container: &Value,
    image: &Image,
) -> Result<Vec<(String, String)>, Unmade> {
    let namespace = text(&pod["metadata"]["namespace"]);
    let mut order: Vec<String> = Vec::new();
    let mut known: BTreeMap<String, String> = BTreeMap::new();
    let mut set = |known: &mut BTreeMap<String, String>, key: &str, value: String| {
        if known.insert(key.to_owned(), value).is_none() {
            order.push(key.to_owned());
        }
    };
    let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned();
    for entry in std::iter::once(&path).chain(&image.env) {
        let (key, value) = entry.split_once('=').unwrap_or((entry, ""));
        set(&mut known, key, value.to_owned());
    }
    let hostname = hostname(pod);
    for (key, value) in [
        ("HOSTNAME", hostname.as_str()),
        ("KUBERNETES_SERVICE_HOST", super::node::SERVICE_ADDRESS),
        ("KUBERNETES_SERVICE_PORT", "443"),
        ("KUBERNETES_SERVICE_PORT_HTTPS", "443"),
    ] {
        set(&mut known, key, value.to_owned());
    }
    for from in list(&container["envFrom"]) {
        let prefix = text(&from["prefix"]);
        for (source, resource) in [("configMapRef", "configmaps"), ("secretRef", "secrets")] {
            let reference = &from[source];
            if reference.is_null() {
                continue;
            }
            let name = text(&reference["name"]);
            match store.get(&Key::new(resource, namespace, name)) {
                Some(object) => {
                    for (key, value) in entries(object, resource) {
                        let value = String::from_utf8_lossy(&value).into_owned();
                        set(&mut known, &format!("{prefix}{key}"), value);
                    }
                }
                None if reference["optional"] == true => {}
                None => {
                    let kind = resource.trim_end_matches('s');
                    return Err(config_error(format!("{kind} \"{name}\" not found")));
                }
            }
        }
    }
    for entry in list(&container["env"]) {
        let key = text(&entry["name"]);
        let from = &entry["valueFrom"];
        if from.is_null() {
            let value = expand(text(&entry["value"]), &known);
            set(&mut known, key, value);
            continue;
        }
        if let Some(path) = from["fieldRef"]["fieldPath"].as_str() {
            let value = field(pod, path)
                .ok_or_else(|| config_error(format!("unsupported fieldPath: {path}")))?;
            set(&mut known, key, value);
        } else if let Some(what) = from["resourceFieldRef"]["resource"].as_str() {
            let (kind, name) = what.split_once('.').unwrap_or(("limits", what));
            let amount = quantity::of(&container["resources"][kind][name]).unwrap_or(0);
            // Rounded up to whole units, as with the divisor 1.
            set(&mut known, key, ((amount + 999) / 1000).to_string());
        } else {
            for (source, resource) in [
                ("configMapKeyRef", "configmaps"),
                ("secretKeyRef", "secrets"),
            ] {
                let reference = &from[source];
                if reference.is_null() {
                    continue;
                }
                let (name, wanted) = (text(&reference["name"]), text(&reference["key"]));
                match value_of(store, resource, namespace, name, wanted) {
                    Ok(value) => {
                        set(
                            &mut known,
                            key,
                            String::from_utf8_lossy(&value).into_owned(),
                        );
                    }
                    Err(_) if reference["optional"] == true => {}
                    Err(message) => return Err(config_error(message)),
                }
            }
        }
    }
    let value = |key: String| {
        let value = known.get(&key).cloned().unwrap_or_default();
        (key, value)
    };
    Ok(order.into_iter().map(value).collect())
}

pub(crate) fn hostname(pod: &Value) -> String {
    let own = pod["spec"]["hostname"].as_str();
    let name = own.unwrap_or(text(&pod["metadata"]["name"]));
    name.chars().take(63).collect()
}

/// A container as `runc` wants it described.
#[derive(Debug, Clone)]
pub(crate) struct Process {
    /// The `process` of the configuration; another `args` makes it that of an exec.
    pub(crate) value: Value,
}

/// Who runs what, with which rights.
pub(crate) fn process(
    pod: &Value,
    container: &Value,
    image: &Image,
    env: &[(String, String)],
) -> Result<Process, Unmade> {
    let name = text(&container["name"]);
    let (of_pod, own) = (
        &pod["spec"]["securityContext"],
        &container["securityContext"],
    );
    let either = |key: &str| {
        if own[key].is_null() {
            &of_pod[key]
        } else {
            &own[key]
        }
    };
    let user = either("runAsUser").as_u64();
    if either("runAsNonRoot") == true {
        let metadata = &pod["metadata"];
        let who = format!(
            "(pod: \"{}_{}({})\", container: {name})",
            text(&metadata["name"]),
            text(&metadata["namespace"]),
            text(&metadata["uid"])
        );
        if user == Some(0) {
            return Err(config_error(format!(
                "container's runAsUser breaks non-root policy {who}"
            )));
        }
        if user.is_none() && image.user == 0 {
            return Err(config_error(format!(
                "container has runAsNonRoot and image will run as root {who}"
            )));
        }
    }
    let user = user.unwrap_or(u64::from(image.user));
    let group = either("runAsGroup").as_u64().unwrap_or(0);
    let mut groups: Vec<u64> = list(&of_pod["supplementalGroups"])
        .filter_map(Value::as_u64)
        .collect();
    groups.extend(of_pod["fsGroup"].as_u64());
    let known: BTreeMap<String, String> = env.iter().cloned().collect();
    let words =
        |value: &Value| -> Vec<String> { list(value).map(|w| expand(text(w), &known)).collect() };
    let (command, arguments) = (words(&container["command"]), words(&container["args"]));
    let (mut args, rest) = match (command.is_empty(), arguments.is_empty()) {
        (false, _) => (command, arguments),
        (true, false) => (image.entrypoint.clone(), arguments),
        (true, true) => (image.entrypoint.clone(), image.command.clone()),
    };
    args.extend(rest);
    if args.is_empty() {
        let message = "failed to generate container spec: no command specified".to_owned();
        return Err(("CreateContainerError", message));
    }
    let folder = container["workingDir"]
        .as_str()
        .unwrap_or(&image.working_dir);
    let folder = if folder.is_empty() { "/" } else { folder };
    let privileged = own["privileged"] == true;
    let capabilities = capabilities(&own["capabilities"], privileged);
    let env: Vec<String> = env.iter().map(|(k, v)| format!("{k}={v}")).collect();
    let value = json!({
        "terminal": false,
        "user": {"uid": user, "gid": group, "additionalGids": groups},
        "args": args,
        "env": env,
        "cwd": folder,
        "capabilities": {
            "bounding": capabilities, "effective": capabilities, "permitted": capabilities,
        },
        "noNewPrivileges": own["allowPrivilegeEscalation"] == false,
    });
    Ok(Process { value })
}

fn capabilities(wanted: &Value, privileged: bool) -> Vec<String> {
    let plain = |value: &Value| text(value).trim_start_matches("CAP_").to_owned();
    let dropped: Vec<String> = list(&wanted["drop"]).map(plain).collect();
    let added: Vec<String> = list(&wanted["add"]).map(plain).collect();
    let all = |list: &[String]| list.iter().any(|c| c == "ALL");
    let mut kept: Vec<String> = if all(&dropped) && !all(&added) {
        Vec::new()
    } else {
        CAPABILITIES.map(str::to_owned).to_vec()
    };
    if privileged || all(&added) {
        kept.extend(["SYS_ADMIN", "SYS_PTRACE", "NET_ADMIN"].map(str::to_owned));
    }
    kept.retain(|c| !dropped.contains(c));
    for capability in added {
        if capability != "ALL" && !kept.contains(&capability) {
            kept.push(capability);
        }
    }
    kept.into_iter().map(|c| format!("CAP_{c}")).collect()
}

/// Where the parts of a container are.
#[derive(Debug)]
pub(crate) struct Places<'a> {
    pub(crate) root: &'a Path,
    /// Host path, path inside, read-only.
    pub(crate) binds: Vec<(PathBuf, String, bool)>,
    pub(crate) group: String,
    pub(crate) pause: u32,
    pub(crate) pids_max: u32,
}

/// The whole configuration.
pub(crate) fn config(container: &Value, process: &Process, places: &Places<'_>) -> Value {
    let mut mounts = vec![
        json!({"destination": "/proc", "type": "proc", "source": "proc",
            "options": ["nosuid", "noexec", "nodev"]}),
        json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs",
            "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]}),
        json!({"destination": "/dev/pts", "type": "devpts", "source": "devpts",
            "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]}),
        json!({"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue",
            "options": ["nosuid", "noexec", "nodev"]}),
        json!({"destination": "/sys", "type": "sysfs", "source": "sysfs",
            "options": ["nosuid", "noexec", "nodev", "ro"]}),
        // The container's own groups, read-only, as nodes show them: they say who was killed.
        json!({"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup",
            "options": ["nosuid", "noexec", "nodev", "relatime", "ro"]}),
        json!({"destination": "/dev/shm", "type": "tmpfs", "source": "shm",
            "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]}),
    ];
    mounts.retain(|m| {
        !places
            .binds
            .iter()
            .any(|(_, inside, _)| m["destination"] == *inside)
    });
    let mut binds = places.binds.clone();
    // A folder before what is mounted within it.
    binds.sort_by_key(|(_, inside, _)| inside.matches('/').count());
    for (source, inside, read_only) in &binds {
        let access = if *read_only { "ro" } else { "rw" };
        mounts.push(
            json!({"destination": inside, "type": "bind", "source": source,
            "options": ["rbind", "rprivate", access]}),
        );
    }
    let within = |kind: &str, name: &str| json!({"type": kind, "path": format!("/proc/{}/ns/{name}", places.pause)});
    let limits = &container["resources"]["limits"];
    let mut resources = json!({"pids": {"limit": places.pids_max}, "devices": [
        {"allow": false, "access": "rwm"}]});
    if let Some(memory) = quantity::of(&limits["memory"]) {
        // No swap beyond it.
        let bytes = i64::try_from(memory / 1000).unwrap_or(i64::MAX);
        resources["memory"] = json!({"limit": bytes, "swap": bytes});
    }
    let mut cpu = json!({});
    if let Some(limit) = quantity::of(&limits["cpu"]) {
        let quota = i64::try_from(limit * 100).unwrap_or(i64::MAX).max(1000);
        cpu["quota"] = json!(quota);
        cpu["period"] = json!(100_000);
    }
    if let Some(request) = quantity::of(&container["resources"]["requests"]["cpu"]) {
        cpu["shares"] = json!((request * 1024 / 1000).max(2));
    }
    resources["cpu"] = cpu;
    let unmasked = container["securityContext"]["procMount"] == "Unmasked"
        || container["securityContext"]["privileged"] == true;
    let (masked, read_only) = if unmasked {
        (json!([]), json!([]))
    } else {
        (json!(MASKED), json!(READ_ONLY))
    };
    json!({
        "ociVersion": "1.0.2",
        "process": process.value,
        "root": {
            "path": places.root,
            "readonly": container["securityContext"]["readOnlyRootFilesystem"] == true,
        },
        "mounts": mounts,
        "linux": {
            "cgroupsPath": format!("/{}", places.group),
            "resources": resources,
            "maskedPaths": masked,
            "readonlyPaths": read_only,
            "namespaces": [
                {"type": "pid"}, {"type": "mount"},
                within("network", "net"), within("ipc", "ipc"), within("uts", "uts"),
            ],
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_commands_are_expanded_as_the_cluster_does() {
        let known = BTreeMap::from([("A".to_owned(), "1".to_owned())]);
        for (text, expected) in [
            ("$(A)", "1"),
            ("x$(A)y$(B)", "x1y$(B)"),
            ("$$(A)", "$(A)"),
            ("$A $", "$A $"),
            ("$(A", "$(A"),
        ] {
            assert_eq!(expand(text, &known), expected, "{text}");
        }
    }

    #[test]
    fn capabilities_are_taken_before_they_are_given() {
        let given = |wanted: Value| capabilities(&wanted, false);
        assert_eq!(given(json!(null)).len(), CAPABILITIES.len());
        assert!(given(json!({"drop": ["ALL"]})).is_empty());
        let some = given(json!({"drop": ["ALL"], "add": ["CHOWN", "CAP_KILL"]}));
        assert_eq!(some, ["CAP_CHOWN", "CAP_KILL"]);
    }

    #[test]
    fn fields_of_the_pod_are_found() {
        let pod = json!({"metadata": {"name": "p", "labels": {"a/b": "c"}}});
        assert_eq!(field(&pod, "metadata.name").as_deref(), Some("p"));
        assert_eq!(field(&pod, "metadata.labels['a/b']").as_deref(), Some("c"));
        assert_eq!(field(&pod, "metadata.labels").as_deref(), Some("a/b=\"c\""));
        assert_eq!(field(&pod, "spec.nope"), None);
    }
}

//! The kinds that are served, and the documents that say so: discovery and OpenAPI.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

/// A kind of object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resource {
    /// API group; empty for the core.
    pub group: Cow<'static, str>,
    /// Version, e.g. `v1`.
    pub version: Cow<'static, str>,
    /// As in paths, e.g. `pods`.
    pub plural: Cow<'static, str>,
    /// As in objects, e.g. `Pod`.
    pub kind: Cow<'static, str>,
    /// Whether objects live in a namespace.
    pub namespaced: bool,
    /// Short names for `kubectl`.
    pub short: Vec<Cow<'static, str>>,
}

/// Requests that are answered and leave no object.
pub(crate) const REVIEWS: [(&str, &str, &str); 2] = [
    (
        "authorization.k8s.io",
        "selfsubjectaccessreviews",
        "SelfSubjectAccessReview",
    ),
    (
        "authentication.k8s.io",
        "selfsubjectreviews",
        "SelfSubjectReview",
    ),
];

/// Group, plural, kind, namespaced, short name.
const BUILT_IN: [(&str, &str, &str, bool, &str); 13] = [
    ("", "configmaps", "ConfigMap", true, "cm"),
    ("", "events", "Event", true, "ev"),
    ("", "namespaces", "Namespace", false, "ns"),
    ("", "nodes", "Node", false, "no"),
    ("", "pods", "Pod", true, "po"),
    ("", "resourcequotas", "ResourceQuota", true, "quota"),
    ("", "secrets", "Secret", true, ""),
    ("", "serviceaccounts", "ServiceAccount", true, "sa"),
    ("coordination.k8s.io", "leases", "Lease", true, ""),
    (
        "networking.k8s.io",
        "networkpolicies",
        "NetworkPolicy",
        true,
        "netpol",
    ),
    ("node.k8s.io", "runtimeclasses", "RuntimeClass", false, ""),
    (
        "scheduling.k8s.io",
        "priorityclasses",
        "PriorityClass",
        false,
        "pc",
    ),
    (
        "storage.k8s.io",
        "storageclasses",
        "StorageClass",
        false,
        "sc",
    ),
];

impl Resource {
    /// As messages name it, e.g. `leases.coordination.k8s.io`.
    pub(crate) fn qualified(&self) -> String {
        if self.group.is_empty() {
            self.plural.to_string()
        } else {
            format!("{}.{}", self.plural, self.group)
        }
    }

    /// As objects name group and version.
    pub(crate) fn api_version(&self) -> String {
        group_version(&self.group, &self.version)
    }

    pub(crate) fn is(&self, plural: &str) -> bool {
        self.plural == plural
    }

    fn has_status(&self) -> bool {
        ["pods", "nodes", "namespaces", "resourcequotas"].contains(&self.plural.as_ref())
            || self.is_custom()
    }

    fn is_custom(&self) -> bool {
        !BUILT_IN
            .iter()
            .any(|(group, plural, ..)| *group == self.group && *plural == self.plural)
    }

    fn subresources(&self) -> Vec<&'static str> {
        let mut found = Vec::new();
        if self.has_status() {
            found.push("status");
        }
        if self.is("pods") {
            found.extend(["attach", "eviction", "exec", "log"]);
        }
        found
    }

    pub(crate) fn has(&self, subresource: &str) -> bool {
        self.subresources().contains(&subresource)
    }
}

fn group_version(group: &str, version: &str) -> String {
    if group.is_empty() {
        version.to_owned()
    } else {
        format!("{group}/{version}")
    }
}

/// All kinds: those of the real server that are here, then the custom ones.
pub(crate) fn all(custom: &[Resource]) -> Vec<Resource> {
    let built_in = BUILT_IN
        .iter()
        .map(|(group, plural, kind, namespaced, short)| Resource {
            group: (*group).into(),
            version: "v1".into(),
            plural: (*plural).into(),
            kind: (*kind).into(),
            namespaced: *namespaced,
            short: [*short]
                .into_iter()
                .filter(|s| !s.is_empty())
                .map(Cow::from)
                .collect(),
        });
    built_in.chain(custom.iter().cloned()).collect()
}

pub(crate) fn find(
    group: &str,
    version: &str,
    plural: &str,
    custom: &[Resource],
) -> Option<Resource> {
    all(custom)
        .into_iter()
        .find(|r| r.group == group && r.version == version && r.plural == plural)
}

/// Group and version of everything, in order, each once.
fn versions(custom: &[Resource]) -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = Vec::new();
    let reviews = REVIEWS
        .iter()
        .map(|(group, ..)| ((*group).to_owned(), "v1".to_owned()));
    let listed = all(custom)
        .into_iter()
        .map(|r| (r.group.into_owned(), r.version.into_owned()));
    for version in listed.chain(reviews) {
        if !found.contains(&version) {
            found.push(version);
        }
    }
    found
}

/// `/version`: what the measured cluster said.
pub(crate) fn version() -> Value {
    json!({
        "major": "1", "minor": "36", "gitVersion": "v1.36.2+kubefake",
        "emulationMajor": "1", "emulationMinor": "36",
        "minCompatibilityMajor": "1", "minCompatibilityMinor": "35",
        "gitCommit": "", "gitTreeState": "clean", "buildDate": "2026-01-01T00:00:00Z",
        "goVersion": "none", "compiler": "rustc", "platform": "linux/amd64",
    })
}

/// `/api`.
pub(crate) fn core_versions() -> Value {
    json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})
}

/// `/apis`.
pub(crate) fn groups(custom: &[Resource]) -> Value {
    let groups: Vec<Value> = versions(custom)
        .into_iter()
        .filter(|(group, _)| !group.is_empty())
        .map(|(group, version)| {
            let entry = json!({"groupVersion": format!("{group}/{version}"), "version": version});
            json!({"name": group, "versions": [entry], "preferredVersion": entry})
        })
        .collect();
    json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
}

/// `/api/v1`, `/apis/GROUP/VERSION`.
pub(crate) fn resource_list(group: &str, version: &str, custom: &[Resource]) -> Option<Value> {
    const VERBS: [&str; 8] = [
        "create",
        "delete",
        "deletecollection",
        "get",
        "list",
        "patch",
        "update",
        "watch",
    ];
    let mut list = Vec::new();
    for r in all(custom) {
        if r.group != group || r.version != version {
            continue;
        }
        let singular = r.kind.to_lowercase();
        list.push(json!({
            "name": r.plural, "singularName": singular, "namespaced": r.namespaced,
            "kind": r.kind, "verbs": VERBS, "shortNames": r.short,
        }));
        for sub in r.subresources() {
            let (kind, verbs): (&str, &[&str]) = match sub {
                "exec" => ("PodExecOptions", &["create", "get"]),
                "attach" => ("PodAttachOptions", &["create", "get"]),
                "eviction" => ("Eviction", &["create"]),
                "log" => (r.kind.as_ref(), &["get"]),
                _ => (r.kind.as_ref(), &["get", "patch", "update"]),
            };
            list.push(json!({
                "name": format!("{}/{sub}", r.plural), "singularName": "",
                "namespaced": r.namespaced, "kind": kind, "verbs": verbs,
            }));
        }
    }
    for (review_group, plural, kind) in REVIEWS {
        if review_group == group && version == "v1" {
            list.push(json!({
                "name": plural, "singularName": kind.to_lowercase(), "namespaced": false,
                "kind": kind, "verbs": ["create"],
            }));
        }
    }
    (!list.is_empty()).then(|| {
        json!({
            "kind": "APIResourceList", "apiVersion": "v1",
            "groupVersion": group_version(group, version), "resources": list,
        })
    })
}

fn openapi_path(group: &str, version: &str) -> String {
    if group.is_empty() {
        format!("api/{version}")
    } else {
        format!("apis/{group}/{version}")
    }
}

/// `/openapi/v3`: where the documents are.
pub(crate) fn openapi_index(custom: &[Resource]) -> Value {
    let paths: Map<String, Value> = versions(custom)
        .into_iter()
        .map(|(group, version)| {
            let path = openapi_path(&group, &version);
            let url = format!("/openapi/v3/{path}?hash=1");
            (path, json!({"serverRelativeURL": url}))
        })
        .collect();
    json!({"paths": paths})
}

/// `/openapi/v3/…`: paths without schemas. It tells `kubectl` that fields are validated here.
pub(crate) fn openapi(group: &str, version: &str, custom: &[Resource]) -> Option<Value> {
    let validation = json!({
        "name": "fieldValidation", "in": "query", "schema": {"type": "string", "uniqueItems": true},
    });
    let mut paths = Map::new();
    for r in all(custom) {
        if r.group != group || r.version != version {
            continue;
        }
        let operation = |action: &str| {
            json!({
                "x-kubernetes-action": action,
                "x-kubernetes-group-version-kind":
                    {"group": r.group, "version": r.version, "kind": r.kind},
                "parameters": [validation],
                "responses": {"200": {"description": "OK"}},
            })
        };
        let within = if r.namespaced {
            "namespaces/{namespace}/"
        } else {
            ""
        };
        let path = format!("/{}/{within}{}", openapi_path(group, version), r.plural);
        paths.insert(path.clone(), json!({"post": operation("post")}));
        paths.insert(
            format!("{path}/{{name}}"),
            json!({"put": operation("put"), "patch": operation("patch")}),
        );
    }
    let known = versions(custom).contains(&(group.to_owned(), version.to_owned()));
    known.then(|| {
        json!({
            "openapi": "3.0.0",
            "info": {"title": "Kubernetes", "version": "v1.36.2"},
            "paths": paths,
            "components": {"schemas": {}},
        })
    })
}

//! Who asks, and what they may.

use http::HeaderMap;
use serde_json::{Value, json};

use crate::{Settings, error::ApiError, request::Target, resources::Resource};

/// Somebody with a bearer token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// As messages name them.
    pub name: String,
    /// Their token.
    pub token: String,
    /// What they may do.
    pub rules: Vec<Rule>,
}

/// Something that is allowed. `*` stands for everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, `deletecollection`.
    pub verbs: Vec<String>,
    /// As `pods`, `pods/exec`, `leases`.
    pub resources: Vec<String>,
    /// Only in this namespace; `None`: everywhere.
    pub namespace: Option<String>,
}

impl Rule {
    /// Everything, everywhere.
    #[must_use]
    pub fn everything() -> Self {
        Self {
            verbs: vec!["*".to_owned()],
            resources: vec!["*".to_owned()],
            namespace: None,
        }
    }

    fn allows(&self, verb: &str, resource: &str, namespace: &str) -> bool {
        let has = |list: &[String], word: &str| list.iter().any(|w| w == "*" || w == word);
        let here = self.namespace.as_ref().is_none_or(|n| n == namespace);
        here && has(&self.verbs, verb) && has(&self.resources, resource)
    }
}

impl User {
    pub(crate) fn may(&self, verb: &str, resource: &str, namespace: &str) -> bool {
        self.rules
            .iter()
            .any(|rule| rule.allows(verb, resource, namespace))
    }
}

/// Who sent these headers.
pub(crate) fn authenticate<'a>(
    settings: &'a Settings,
    headers: &HeaderMap,
) -> Result<&'a User, ApiError> {
    let token = headers
        .get(http::header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.strip_prefix("Bearer "))
        .map(str::trim);
    settings
        .users
        .iter()
        .find(|user| Some(user.token.as_str()) == token)
        .ok_or_else(ApiError::unauthorized)
}

pub(crate) fn authorize(user: &User, target: &Target, verb: &str) -> Result<(), ApiError> {
    let resource = target.rule_name();
    // A namespace itself is ruled by its own name, as the real server has it.
    let namespace = match (target.resource.is("namespaces"), &target.name) {
        (true, Some(name)) => name,
        _ => &target.namespace,
    };
    if user.may(verb, &resource, namespace) {
        return Ok(());
    }
    let scope = if namespace.is_empty() {
        "at the cluster scope".to_owned()
    } else {
        format!("in the namespace \"{namespace}\"")
    };
    let why = format!(
        "User \"{}\" cannot {verb} resource \"{resource}\" in API group \"{}\" {scope}",
        user.name, target.resource.group
    );
    let name = target.name.as_deref().unwrap_or_default();
    Err(ApiError::forbidden(&target.resource, name, &why))
}

/// Answers `kubectl auth can-i` and `kubectl auth whoami`.
pub(crate) fn review(plural: &str, user: &User, mut body: Value) -> Value {
    if plural == "selfsubjectreviews" {
        body["status"] =
            json!({"userInfo": {"username": user.name, "groups": ["system:authenticated"]}});
        return body;
    }
    let asked = &body["spec"]["resourceAttributes"];
    let get = |key: &str| asked[key].as_str().unwrap_or_default();
    let resource = match get("subresource") {
        "" => get("resource").to_owned(),
        sub => format!("{}/{sub}", get("resource")),
    };
    let allowed = if asked.is_null() {
        true
    } else {
        user.may(get("verb"), &resource, get("namespace"))
    };
    body["status"] = json!({"allowed": allowed});
    if !allowed {
        body["status"]["reason"] = json!(format!("no rule of {} allows it", user.name));
    }
    body
}

/// The kind of a review, if a path names one.
pub(crate) fn review_kind(group: &str, plural: &str) -> Option<Resource> {
    let found = crate::resources::REVIEWS
        .iter()
        .find(|(g, p, _)| *g == group && *p == plural)?;
    Some(Resource {
        group: found.0.into(),
        version: "v1".into(),
        plural: found.1.into(),
        kind: found.2.into(),
        namespaced: false,
        short: Vec::new(),
    })
}

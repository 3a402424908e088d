//! What a request is about: its path, its query, its verb.

use http::Method;

use crate::{core::Core, resources::Resource};

/// An object, a collection, or a part of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) resource: Resource,
    /// Empty: the whole cluster.
    pub(crate) namespace: String,
    pub(crate) name: Option<String>,
    pub(crate) subresource: Option<String>,
}

/// The words of the path, when it is one of objects: group, version, the rest.
pub(crate) fn split(path: &str) -> Option<(&str, &str, Vec<&str>)> {
    let mut parts = path.trim_matches('/').split('/');
    let group = match parts.next()? {
        "api" => "",
        "apis" => parts.next()?,
        _ => return None,
    };
    Some((group, parts.next()?, parts.collect()))
}

impl Target {
    pub(crate) fn parse(core: &Core, path: &str) -> Option<Self> {
        let (group, version, rest) = split(path)?;
        let (namespace, rest) = match rest.as_slice() {
            ["namespaces", _, "status" | "finalize"] | ["namespaces"] | ["namespaces", _] => {
                ("", rest.as_slice())
            }
            ["namespaces", namespace, rest @ ..] => (*namespace, rest),
            rest => ("", rest),
        };
        let (plural, name, subresource) = match rest {
            [plural] => (*plural, None, None),
            [plural, name] => (*plural, Some(*name), None),
            [plural, name, sub] => (*plural, Some(*name), Some(*sub)),
            _ => return None,
        };
        let resource = core.resource(group, version, plural)?;
        let misplaced = (!resource.namespaced && !namespace.is_empty())
            || (resource.namespaced && namespace.is_empty() && name.is_some());
        let unknown = subresource.is_some_and(|sub| !resource.has(sub));
        (!misplaced && !unknown).then(|| Self {
            resource,
            namespace: namespace.to_owned(),
            name: name.map(str::to_owned),
            subresource: subresource.map(str::to_owned),
        })
    }

    /// As rules name it, e.g. `pods/exec`.
    pub(crate) fn rule_name(&self) -> String {
        match &self.subresource {
            Some(sub) => format!("{}/{sub}", self.resource.plural),
            None => self.resource.plural.to_string(),
        }
    }

    pub(crate) fn verb(&self, method: &Method, query: &Query) -> &'static str {
        let watch = query.flag("watch");
        match (method.as_str(), self.name.is_some()) {
            // Streams into a pod are as good as changes of it.
            _ if matches!(self.subresource.as_deref(), Some("exec" | "attach")) => "create",
            ("GET" | "HEAD", _) if watch => "watch",
            ("GET" | "HEAD", true) => "get",
            ("GET" | "HEAD", false) => "list",
            ("POST", _) => "create",
            ("PUT", _) => "update",
            ("PATCH", _) => "patch",
            ("DELETE", true) => "delete",
            ("DELETE", false) => "deletecollection",
            _ => "unknown",
        }
    }
}

/// A query string.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Query(Vec<(String, String)>);

impl Query {
    pub(crate) fn parse(text: &str) -> Self {
        let pairs = form_urlencoded::parse(text.as_bytes());
        Self(pairs.into_owned().collect())
    }

    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        let found = self.0.iter().find(|(k, _)| k == key);
        found.map(|(_, v)| v.as_str()).filter(|v| !v.is_empty())
    }

    pub(crate) fn all(&self, key: &str) -> Vec<String> {
        let found = self.0.iter().filter(|(k, _)| k == key);
        found.map(|(_, v)| v.clone()).collect()
    }

    pub(crate) fn flag(&self, key: &str) -> bool {
        self.0
            .iter()
            .any(|(k, v)| k == key && matches!(v.as_str(), "true" | "1" | "True" | ""))
    }

    pub(crate) fn number(&self, key: &str) -> Option<u64> {
        self.get(key)?.parse().ok()
    }
}

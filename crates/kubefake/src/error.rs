//! What an API server answers when it says no: `Status` objects, in the words of the real one.

use http::StatusCode;
use serde_json::{Map, Value, json};

use crate::resources::Resource;

/// A refusal, ready to be sent.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    /// HTTP status.
    pub code: StatusCode,
    /// Machine-readable reason, e.g. `NotFound`; empty: no `Status` but plain text.
    pub reason: &'static str,
    /// For people.
    pub message: String,
    /// `details` of the `Status`.
    pub details: Box<Value>,
    /// Seconds after which to try again.
    pub retry_after_s: Option<u64>,
}

/// Why a field was not accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cause {
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    pub(crate) field: String,
}

impl Cause {
    pub(crate) fn required(field: impl Into<String>, detail: &str) -> Self {
        let message = if detail.is_empty() {
            "Required value".to_owned()
        } else {
            format!("Required value: {detail}")
        };
        Self {
            reason: "FieldValueRequired",
            message,
            field: field.into(),
        }
    }

    pub(crate) fn invalid(field: impl Into<String>, value: &Value, detail: &str) -> Self {
        Self {
            reason: "FieldValueInvalid",
            message: format!("Invalid value: {value}: {detail}"),
            field: field.into(),
        }
    }

    pub(crate) fn unsupported(field: impl Into<String>, value: &Value, known: &[&str]) -> Self {
        let known: Vec<String> = known.iter().map(|word| format!("{word:?}")).collect();
        Self {
            reason: "FieldValueNotSupported",
            message: format!(
                "Unsupported value: {value}: supported values: {}",
                known.join(", ")
            ),
            field: field.into(),
        }
    }

    pub(crate) fn not_found(field: impl Into<String>, value: &Value) -> Self {
        Self {
            reason: "FieldValueNotFound",
            message: format!("Not found: {value}"),
            field: field.into(),
        }
    }

    pub(crate) fn duplicate(field: impl Into<String>, value: &Value) -> Self {
        Self {
            reason: "FieldValueDuplicate",
            message: format!("Duplicate value: {value}"),
            field: field.into(),
        }
    }

    pub(crate) fn forbidden(field: impl Into<String>, detail: &str) -> Self {
        Self {
            reason: "FieldValueForbidden",
            message: format!("Forbidden: {detail}"),
            field: field.into(),
        }
    }
}

impl ApiError {
    pub(crate) fn new(code: StatusCode, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            reason,
            message: message.into(),
            details: Box::new(Value::Null),
            retry_after_s: None,
        }
    }

    fn about(mut self, resource: &Resource, name: &str) -> Self {
        let mut details = Map::new();
        if !name.is_empty() {
            details.insert("name".to_owned(), json!(name));
        }
        if !resource.group.is_empty() {
            details.insert("group".to_owned(), json!(resource.group));
        }
        details.insert("kind".to_owned(), json!(resource.plural));
        *self.details = Value::Object(details);
        self
    }

    pub(crate) fn not_found(resource: &Resource, name: &str) -> Self {
        let message = format!("{} \"{name}\" not found", resource.qualified());
        Self::new(StatusCode::NOT_FOUND, "NotFound", message).about(resource, name)
    }

    /// A path or a kind that is not served.
    pub(crate) fn unknown_resource() -> Self {
        let message = "the server could not find the requested resource";
        let mut error = Self::new(StatusCode::NOT_FOUND, "NotFound", message);
        *error.details = json!({});
        error
    }

    pub(crate) fn already_exists(resource: &Resource, name: &str) -> Self {
        let message = format!("{} \"{name}\" already exists", resource.qualified());
        Self::new(StatusCode::CONFLICT, "AlreadyExists", message).about(resource, name)
    }

    pub(crate) fn conflict(resource: &Resource, name: &str, why: &str) -> Self {
        let message = format!(
            "Operation cannot be fulfilled on {} \"{name}\": {why}",
            resource.qualified()
        );
        Self::new(StatusCode::CONFLICT, "Conflict", message).about(resource, name)
    }

    pub(crate) fn modified(resource: &Resource, name: &str) -> Self {
        let why = "the object has been modified; please apply your changes to the latest version \
                   and try again";
        Self::conflict(resource, name, why)
    }

    pub(crate) fn forbidden(resource: &Resource, name: &str, why: &str) -> Self {
        let message = if name.is_empty() {
            format!("{} is forbidden: {why}", resource.qualified())
        } else {
            format!("{} \"{name}\" is forbidden: {why}", resource.qualified())
        };
        Self::new(StatusCode::FORBIDDEN, "Forbidden", message).about(resource, name)
    }

    pub(crate) fn invalid(resource: &Resource, name: &str, causes: &[Cause]) -> Self {
        let shown: Vec<String> = causes
            .iter()
            .map(|cause| format!("{}: {}", cause.field, cause.message))
            .collect();
        let shown = match shown.as_slice() {
            [one] => one.clone(),
            many => format!("[{}]", many.join(", ")),
        };
        let kind = if resource.group.is_empty() {
            resource.kind.to_string()
        } else {
            format!("{}.{}", resource.kind, resource.group)
        };
        let message = format!("{kind} \"{name}\" is invalid: {shown}");
        let mut error =
            Self::new(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message).about(resource, name);
        error.details["kind"] = json!(resource.kind);
        error.details["causes"] = causes
            .iter()
            .map(|c| json!({"reason": c.reason, "message": c.message, "field": c.field}))
            .collect();
        error
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequest", message)
    }

    /// Something real that this fake does not do, and says so.
    pub(crate) fn not_faked(what: &str) -> Self {
        Self::bad_request(format!("kubefake does not do this: {what}"))
    }

    pub(crate) fn unsupported_media(found: &str, accepted: &[&str]) -> Self {
        let message = format!(
            "the body of the request was in an unknown format - accepted media types include: {} \
             (found {found:?})",
            accepted.join(", ")
        );
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "UnsupportedMediaType",
            message,
        )
    }

    pub(crate) fn method_not_allowed() -> Self {
        let message = "the server does not allow this method on the requested resource";
        let mut error = Self::new(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", message);
        *error.details = json!({});
        error
    }

    pub(crate) fn unauthorized() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "Unauthorized", "Unauthorized")
    }

    pub(crate) fn expired(message: impl Into<String>) -> Self {
        Self::new(StatusCode::GONE, "Expired", message)
    }

    pub(crate) fn too_old(asked: u64, oldest: u64) -> Self {
        Self::expired(format!("too old resource version: {asked} ({oldest})"))
    }

    pub(crate) fn internal(what: impl Into<String>) -> Self {
        let what = what.into();
        let message = format!("Internal error occurred: {what}");
        let mut error = Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", message);
        *error.details = json!({"causes": [{"message": what}]});
        error
    }

    /// What priority and fairness says, which is no `Status`.
    pub(crate) fn too_many(retry_after_s: u64) -> Self {
        let message = "Too many requests, please try again later.\n";
        let mut error = Self::new(StatusCode::TOO_MANY_REQUESTS, "", message);
        error.retry_after_s = Some(retry_after_s);
        error
    }

    /// The `Status` object.
    pub(crate) fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
        });
        if !self.reason.is_empty() {
            status["reason"] = json!(self.reason);
        }
        if !self.details.is_null() {
            status["details"] = Value::clone(&self.details);
        }
        status["code"] = json!(self.code.as_u16());
        status
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::find;

    #[test]
    fn refusals_have_the_words_of_the_real_server() {
        let pods = find("", "v1", "pods", &[]).unwrap();
        let error = ApiError::not_found(&pods, "a").status();
        assert_eq!(error["message"], "pods \"a\" not found");
        assert_eq!(error["details"], json!({"name": "a", "kind": "pods"}));
        let leases = find("coordination.k8s.io", "v1", "leases", &[]).unwrap();
        let error = ApiError::already_exists(&leases, "l").status();
        assert_eq!(
            error["message"],
            "leases.coordination.k8s.io \"l\" already exists"
        );
        let causes = [
            Cause::required("spec.containers", ""),
            Cause::invalid("metadata.name", &json!("A"), "no"),
        ];
        let error = ApiError::invalid(&pods, "A", &causes).status();
        assert_eq!(error["code"], 422);
        assert_eq!(
            error["message"],
            "Pod \"A\" is invalid: [spec.containers: Required value, metadata.name: Invalid value: \"A\": no]"
        );
        assert_eq!(error["details"]["causes"][0]["field"], "spec.containers");
    }
}

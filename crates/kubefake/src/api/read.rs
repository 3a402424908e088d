//! Get and list.

use std::sync::Arc;

use base64::Engine;
use serde_json::{Value, json};

use crate::{
    core::Core,
    error::ApiError,
    request::{Query, Target},
    selector::Selector,
    store::{Key, TooOld},
};

const TOKENS: base64::engine::GeneralPurpose = base64::engine::general_purpose::URL_SAFE_NO_PAD;

impl Core {
    pub(crate) fn get(&self, target: &Target, key: &Key) -> Result<Arc<Value>, ApiError> {
        self.store()
            .get(key)
            .cloned()
            .ok_or_else(|| ApiError::not_found(&target.resource, &key.name))
    }

    pub(crate) fn list(&self, target: &Target, query: &Query) -> Result<Value, ApiError> {
        let resource = &target.resource;
        let selector = Selector::parse(
            query.get("labelSelector"),
            query.get("fieldSelector"),
            resource,
        )?;
        let store = self.store();
        let now = store.revision();
        let (revision, after) = match query.get("continue") {
            Some(token) => {
                let (revision, after) = read_token(token).ok_or_else(|| {
                    ApiError::bad_request(format!("continue key is not valid: {token}"))
                })?;
                (revision, Some(after))
            }
            None => {
                let asked = asked_revision(query)?;
                if asked > now {
                    let message = format!("Too large resource version: {asked}, current: {now}");
                    let code = http::StatusCode::GATEWAY_TIMEOUT;
                    return Err(ApiError::new(code, "Timeout", message));
                }
                let exact = query.get("resourceVersionMatch") == Some("Exact");
                (if exact { asked } else { now }, None)
            }
        };
        let qualified = resource.qualified();
        let namespace = Some(target.namespace.as_str()).filter(|n| !n.is_empty());
        let all = match store.at(revision, &qualified, namespace) {
            Ok(all) => all,
            Err(TooOld { .. }) if after.is_some() => {
                return Err(ApiError::expired(
                    "The provided continue parameter is too old to display a consistent list \
                     result. You can start a new list without the continue parameter, or use the \
                     continue token in this response to retrieve the remainder of the results. \
                     Continuing with the provided token results in an inconsistent list - objects \
                     that were created, modified, or deleted between the time the first chunk was \
                     returned and now may show up in the list.",
                ));
            }
            Err(TooOld { oldest }) => return Err(ApiError::too_old(revision, oldest)),
        };
        drop(store);
        let limit = query.number("limit").filter(|l| *l > 0);
        let limit = limit.map_or(usize::MAX, |l| usize::try_from(l).unwrap_or(usize::MAX));
        let mut rest = all
            .iter()
            .filter(|(key, _)| {
                let place = (key.namespace.as_str(), key.name.as_str());
                after
                    .as_ref()
                    .is_none_or(|(namespace, name)| place > (namespace.as_str(), name.as_str()))
            })
            .filter(|(_, object)| selector.matches(object));
        let custom = self.settings.custom.contains(resource);
        let mut items = Vec::new();
        let mut last = None;
        for (key, object) in rest.by_ref().take(limit) {
            let mut item = (**object).clone();
            if let (Some(map), false) = (item.as_object_mut(), custom) {
                // As the real server has it: the list says what its items are.
                map.remove("kind");
                map.remove("apiVersion");
            }
            items.push(item);
            last = Some(key);
        }
        let left = rest.count();
        let mut metadata = json!({"resourceVersion": revision.to_string()});
        if let (Some(key), true) = (last, left > 0) {
            metadata["continue"] = json!(token(revision, key));
            if query.get("labelSelector").is_none() && query.get("fieldSelector").is_none() {
                metadata["remainingItemCount"] = json!(left);
            }
        }
        Ok(json!({
            "kind": format!("{}List", resource.kind),
            "apiVersion": resource.api_version(),
            "metadata": metadata,
            "items": items,
        }))
    }

    /// The objects that a collection has and a query chooses.
    pub(crate) fn chosen(&self, target: &Target, query: &Query) -> Result<Vec<Key>, ApiError> {
        let selector = Selector::parse(
            query.get("labelSelector"),
            query.get("fieldSelector"),
            &target.resource,
        )?;
        let qualified = target.resource.qualified();
        let namespace = Some(target.namespace.as_str()).filter(|n| !n.is_empty());
        let store = self.store();
        let chosen = store
            .list(&qualified, namespace)
            .filter(|(_, object)| selector.matches(object));
        Ok(chosen.map(|(key, _)| key.clone()).collect())
    }
}

/// The resource version of a query; 0 when it names none.
pub(crate) fn asked_revision(query: &Query) -> Result<u64, ApiError> {
    match query.get("resourceVersion") {
        None => Ok(0),
        Some(text) => text.parse().map_err(|_| {
            ApiError::bad_request(format!(
                "Invalid value: \"{text}\": strconv.ParseUint: parsing \"{text}\": invalid syntax"
            ))
        }),
    }
}

fn token(revision: u64, last: &Key) -> String {
    let token = json!({"v": "meta.k8s.io/v1", "rv": revision,
        "start": [last.namespace, last.name]});
    TOKENS.encode(token.to_string())
}

fn read_token(token: &str) -> Option<(u64, (String, String))> {
    let bytes = TOKENS.decode(token).ok()?;
    let token: Value = serde_json::from_slice(&bytes).ok()?;
    let part = |at: usize| token["start"][at].as_str().map(str::to_owned);
    Some((token["rv"].as_u64()?, (part(0)?, part(1)?)))
}

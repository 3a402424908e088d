//! What a request wants and who sends it, from its path and headers alone.

use http::{HeaderMap, Method, Uri, header};

/// What a request wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Route {
    /// `POST …/chat/completions`.
    Chat,
    /// `GET …/models`.
    Models,
    /// `GET …/models/NAME`.
    Model(String),
    /// Anything else.
    Unknown,
}

/// Looks at the last segments only: harnesses put whatever they like before them, and append
/// queries.
pub(crate) fn route(method: &Method, uri: &Uri) -> Route {
    let mut last = uri.path().rsplit('/').filter(|segment| !segment.is_empty());
    let end = last.next();
    let before = last.next();
    let reads = method == Method::GET || method == Method::HEAD;
    match (before, end) {
        (Some("chat"), Some("completions")) if method == Method::POST => Route::Chat,
        (_, Some("models")) if reads => Route::Models,
        (Some("models"), Some(name)) if reads => Route::Model(name.to_owned()),
        _ => Route::Unknown,
    }
}

/// The key of a request: from the path prefix `/r/<key>/` and from every header that carries an
/// API key. All that are there must be equal.
///
/// # Errors
/// A sentence for the client.
pub(crate) fn key<'a>(uri: &'a Uri, headers: &'a HeaderMap) -> Result<&'a str, &'static str> {
    let mut segments = uri.path().trim_start_matches('/').splitn(3, '/');
    let in_path = match (segments.next(), segments.next()) {
        (Some("r"), Some(key)) if !key.is_empty() => Some(key),
        _ => None,
    };
    let bearer = headers
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| {
            let (scheme, token) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
        });
    let named = |name: &str| {
        headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .map(str::trim)
    };
    let mut keys = [in_path, bearer, named("x-api-key"), named("x-goog-api-key")]
        .into_iter()
        .flatten()
        .filter(|key| !key.is_empty());
    let Some(key) = keys.next() else {
        return Err(
            "no rollout key: send it as API key, or as the path prefix /r/<key>/ of the base URL",
        );
    };
    if keys.all(|other| other == key) {
        Ok(key)
    } else {
        Err("two different rollout keys in one request: use the same as API key and in the path")
    }
}

const KEPT_MAX: usize = 32;
const KEPT_BYTES_MAX: usize = 512;
const KEPT_NAMES: [&str; 11] = [
    "anthropic-beta",
    "anthropic-version",
    "openai-beta",
    "originator",
    "session-id",
    "session_id",
    "thread-id",
    "user-agent",
    "x-openai-subagent",
    "x-parent-session-id",
    "x-session-id",
];
const KEPT_PREFIXES: [&str; 3] = ["x-stainless-", "x-claude-code-", "x-codex-"];

/// Headers worth keeping in the record: who speaks, sessions, threads, retry marks. A list of what
/// is kept, not of what is dropped, so that no credential slips through.
pub(crate) fn kept_headers(headers: &HeaderMap) -> Vec<(String, String)> {
    headers
        .iter()
        .filter(|(name, value)| {
            let name = name.as_str();
            (KEPT_NAMES.contains(&name)
                || KEPT_PREFIXES.iter().any(|prefix| name.starts_with(prefix)))
                && value.len() <= KEPT_BYTES_MAX
        })
        .filter_map(|(name, value)| {
            Some((name.as_str().to_owned(), value.to_str().ok()?.to_owned()))
        })
        .take(KEPT_MAX)
        .collect()
}

/// Whether the client itself says that it retries.
pub(crate) fn says_retry(headers: &HeaderMap) -> bool {
    headers
        .get("x-stainless-retry-count")
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.trim().parse::<u32>().ok())
        .is_some_and(|count| count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uri(text: &str) -> Uri {
        text.parse().unwrap()
    }

    #[test]
    fn the_last_segments_decide() {
        for path in [
            "/chat/completions",
            "/v1/chat/completions",
            "/r/abc/openai/v1/chat/completions?beta=true",
            "//v1//chat/completions/",
        ] {
            assert_eq!(route(&Method::POST, &uri(path)), Route::Chat, "{path}");
        }
        assert_eq!(
            route(&Method::GET, &uri("/v1/chat/completions")),
            Route::Unknown
        );
        assert_eq!(route(&Method::GET, &uri("/r/k/v1/models")), Route::Models);
        assert_eq!(
            route(&Method::HEAD, &uri("/models/m-1")),
            Route::Model("m-1".to_owned())
        );
        assert_eq!(
            route(&Method::POST, &uri("/v1/completions")),
            Route::Unknown
        );
        assert_eq!(route(&Method::HEAD, &uri("/")), Route::Unknown);
    }

    #[test]
    fn all_keys_must_agree() {
        let headers = |pairs: &[(&'static str, &'static str)]| {
            pairs
                .iter()
                .map(|(name, value)| {
                    (
                        header::HeaderName::from_static(name),
                        header::HeaderValue::from_static(value),
                    )
                })
                .collect::<HeaderMap>()
        };
        let path = uri("/r/k1/v1/chat/completions");
        let bare = uri("/v1/chat/completions");
        assert_eq!(key(&path, &headers(&[])), Ok("k1"));
        for pair in [
            ("authorization", "bearer k1"),
            ("x-api-key", "k1"),
            ("x-goog-api-key", "k1"),
        ] {
            assert_eq!(key(&bare, &headers(&[pair])), Ok("k1"));
            assert_eq!(key(&path, &headers(&[pair])), Ok("k1"));
        }
        assert_eq!(
            key(&path, &headers(&[("authorization", "Bearer ")])),
            Ok("k1")
        );
        assert!(key(&bare, &headers(&[])).is_err());
        assert!(key(&path, &headers(&[("x-api-key", "k2")])).is_err());
        assert!(
            key(
                &bare,
                &headers(&[("x-api-key", "k2"), ("authorization", "Bearer k1")])
            )
            .is_err()
        );
    }

    #[test]
    fn credentials_are_not_kept() {
        let headers: HeaderMap = [
            ("authorization", "Bearer secret"),
            ("x-api-key", "secret"),
            ("cookie", "secret"),
            ("x-stainless-retry-count", "2"),
            ("session-id", "s"),
        ]
        .into_iter()
        .map(|(name, value)| {
            (
                header::HeaderName::from_static(name),
                header::HeaderValue::from_static(value),
            )
        })
        .collect();
        let kept = kept_headers(&headers);
        assert_eq!(kept.len(), 2);
        assert!(kept.iter().all(|(_, value)| value != "secret"));
        assert!(says_retry(&headers));
    }
}

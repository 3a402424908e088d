//! What a request wants and who sends it, from its path and headers alone.

use http::{HeaderMap, Method, Uri, header};
use record::Dialect;
use wire::Target;

/// What a request wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Route {
    /// A reply of the model.
    Call(Dialect, Target),
    /// The number of tokens that a call's prompt would have.
    Count(Dialect, Target),
    /// The list of models.
    Models(Dialect),
    /// One model.
    Model(Dialect, String),
    /// A WebSocket in place of a request: refused with the status on which clients fall back to
    /// HTTP.
    Upgrade(Dialect),
    /// Is somebody there?
    Probe,
    /// Anything else, and the dialect that the client most likely speaks.
    Unknown(Dialect),
}

/// Looks at the last segments only: harnesses put whatever they like before them, and append
/// queries.
pub(crate) fn route(method: &Method, uri: &Uri, headers: &HeaderMap) -> Route {
    let mut last = uri.path().rsplit('/').filter(|segment| !segment.is_empty());
    let end = last.next().unwrap_or_default();
    let before = last.next().unwrap_or_default();
    let spoken = spoken(uri, headers);
    if *method == Method::POST {
        return match (before, end) {
            ("chat", "completions") => Route::Call(Dialect::Chat, Target::default()),
            ("messages", "count_tokens") => Route::Count(Dialect::Messages, Target::default()),
            ("responses", "input_tokens") => Route::Count(Dialect::Responses, Target::default()),
            ("responses", "compact") => Route::Call(
                Dialect::Responses,
                Target {
                    compact: true,
                    ..Target::default()
                },
            ),
            (_, "messages") => Route::Call(Dialect::Messages, Target::default()),
            (_, "responses") => Route::Call(Dialect::Responses, Target::default()),
            (_, end) => gemini(end, uri).unwrap_or(Route::Unknown(spoken)),
        };
    }
    if *method != Method::GET && *method != Method::HEAD {
        return Route::Unknown(spoken);
    }
    let upgrades = headers
        .get(header::UPGRADE)
        .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"websocket"));
    match (before, end) {
        _ if upgrades => Route::Upgrade(spoken),
        (_, "models") => Route::Models(spoken),
        ("models", name) => Route::Model(spoken, name.to_owned()),
        ("api", "hello") | (_, "" | "health" | "healthz") => Route::Probe,
        // The base URL itself, with the key in it.
        ("r", _) => Route::Probe,
        // Whoever asks for no content wants to know whether somebody is there.
        _ if *method == Method::HEAD => Route::Probe,
        _ => Route::Unknown(spoken),
    }
}

/// `MODEL:METHOD`.
fn gemini(segment: &str, uri: &Uri) -> Option<Route> {
    let (model, method) = segment.split_once(':')?;
    let stream = method == "streamGenerateContent";
    let server_sent = uri
        .query()
        .is_some_and(|query| query.split('&').any(|pair| pair == "alt=sse"));
    let target = Target {
        model: model.to_owned(),
        stream,
        json_list: stream && !server_sent,
        compact: false,
    };
    match method {
        "generateContent" | "streamGenerateContent" => Some(Route::Call(Dialect::Gemini, target)),
        "countTokens" => Some(Route::Count(Dialect::Gemini, target)),
        _ => None,
    }
}

/// The dialect of a client, where the path alone does not tell.
fn spoken(uri: &Uri, headers: &HeaderMap) -> Dialect {
    let has = |wanted: &str| uri.path().split('/').any(|segment| segment == wanted);
    if headers.contains_key("anthropic-version") || has("messages") {
        Dialect::Messages
    } else if headers.contains_key("x-goog-api-key") || has("v1beta") {
        Dialect::Gemini
    } else if has("responses") {
        Dialect::Responses
    } else {
        Dialect::Chat
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
const KEPT_NAMES: [&str; 16] = [
    "anthropic-beta",
    "anthropic-version",
    "openai-beta",
    "originator",
    "session-id",
    "session_id",
    "thread-id",
    "traceparent",
    "user-agent",
    "x-app",
    "x-client-request-id",
    "x-goog-api-client",
    "x-openai-subagent",
    "x-parent-session-id",
    "x-session-affinity",
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
        let none = HeaderMap::new();
        let post = |path: &str| route(&Method::POST, &uri(path), &none);
        let get = |path: &str| route(&Method::GET, &uri(path), &none);
        for (end, expected) in [
            (
                "chat/completions",
                Route::Call(Dialect::Chat, Target::default()),
            ),
            (
                "responses",
                Route::Call(Dialect::Responses, Target::default()),
            ),
            (
                "messages",
                Route::Call(Dialect::Messages, Target::default()),
            ),
            (
                "responses/compact",
                Route::Call(
                    Dialect::Responses,
                    Target {
                        compact: true,
                        ..Target::default()
                    },
                ),
            ),
            (
                "messages/count_tokens",
                Route::Count(Dialect::Messages, Target::default()),
            ),
            (
                "responses/input_tokens",
                Route::Count(Dialect::Responses, Target::default()),
            ),
        ] {
            for path in [
                format!("/{end}"),
                format!("/v1/{end}"),
                format!("/r/abc/proxy/v1/{end}?beta=true"),
                format!("//v1//{end}/"),
            ] {
                assert_eq!(post(&path), expected, "{path}");
            }
        }
        assert_eq!(get("/v1/chat/completions"), Route::Unknown(Dialect::Chat));
        assert_eq!(get("/r/k/v1/models"), Route::Models(Dialect::Chat));
        assert_eq!(
            get("/v1beta/models?pageSize=9"),
            Route::Models(Dialect::Gemini)
        );
        assert_eq!(
            route(&Method::HEAD, &uri("/models/m-1"), &none),
            Route::Model(Dialect::Chat, "m-1".to_owned())
        );
        assert_eq!(post("/v1/completions"), Route::Unknown(Dialect::Chat));
        for path in [
            "/",
            "/r/k",
            "/r/k/",
            "/api/hello",
            "/r/k/api/hello",
            "/healthz",
        ] {
            assert_eq!(get(path), Route::Probe, "{path}");
        }
        assert_eq!(route(&Method::HEAD, &uri("/anything"), &none), Route::Probe);
    }

    #[test]
    fn gemini_has_model_and_stream_in_the_path() {
        let post = |path: &str| route(&Method::POST, &uri(path), &HeaderMap::new());
        let target = |stream, json_list| Target {
            model: "m-1".to_owned(),
            stream,
            json_list,
            compact: false,
        };
        for (end, expected) in [
            (
                "generateContent",
                Route::Call(Dialect::Gemini, target(false, false)),
            ),
            (
                "streamGenerateContent?alt=sse",
                Route::Call(Dialect::Gemini, target(true, false)),
            ),
            (
                "streamGenerateContent?key=k",
                Route::Call(Dialect::Gemini, target(true, true)),
            ),
            (
                "countTokens",
                Route::Count(Dialect::Gemini, target(false, false)),
            ),
            ("embedContent", Route::Unknown(Dialect::Gemini)),
        ] {
            assert_eq!(
                post(&format!("/r/k/v1beta/models/m-1:{end}")),
                expected,
                "{end}"
            );
        }
    }

    #[test]
    fn a_websocket_is_told_from_a_request() {
        let headers = HeaderMap::from_iter([(
            header::UPGRADE,
            header::HeaderValue::from_static("WebSocket"),
        )]);
        assert_eq!(
            route(&Method::GET, &uri("/v1/responses"), &headers),
            Route::Upgrade(Dialect::Responses)
        );
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

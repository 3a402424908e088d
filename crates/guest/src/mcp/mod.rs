//! The Model Context Protocol by hand: as much of it as servers and users of tools need.
//!
//! [`answer`] is the server's side without any transport, so that tests and the host's services
//! use the same one; `serve` puts it on standard input and output or on HTTP; `client` is the
//! user's side, for `react` and for the check that servers are ready; `tools` are our own tools.
//! Why it is not `rmcp`: docs/decisions, the page on tool servers.
//!
//! Of the protocol: `initialize`, `ping`, `tools/list`, `tools/call`, notifications (taken and
//! ignored), batches. No resources, prompts, sampling, progress, or requests to the client.

pub(crate) mod client;
mod serve;
mod tools;

use serde_json::{Value, json};

pub use client::{check, fetch};
pub use serve::run;

/// Versions of the protocol that are spoken, the newest last.
pub const VERSIONS: [&str; 4] = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"];

const PARSE_ERROR: i64 = -32700;
const INVALID_REQUEST: i64 = -32600;
const NO_SUCH_METHOD: i64 = -32601;
const INVALID_PARAMS: i64 = -32602;

/// What a tool gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Called {
    /// For the model.
    pub text: String,
    /// Whether it is to be told as an error.
    pub failed: bool,
}

/// Tools that can be listed and called.
pub trait Toolbox {
    /// Each with `name`, `description` and `inputSchema`.
    fn tools(&self) -> Vec<Value>;
    /// Calls one; `None` when there is none of that name.
    fn call(&mut self, name: &str, arguments: &Value) -> Option<Called>;
}

/// The answer to one message of a client, or to a batch of them; `None` when none is due.
pub fn answer(server: &str, toolbox: &mut dyn Toolbox, message: &[u8]) -> Option<Value> {
    match serde_json::from_slice::<Value>(message) {
        Err(error) => Some(failure(
            &Value::Null,
            PARSE_ERROR,
            &format!("not JSON: {error}"),
        )),
        Ok(Value::Array(messages)) if !messages.is_empty() => {
            let answers: Vec<Value> = messages
                .iter()
                .filter_map(|message| one(server, toolbox, message))
                .collect();
            (!answers.is_empty()).then_some(Value::Array(answers))
        }
        Ok(message) => one(server, toolbox, &message),
    }
}

fn failure(id: &Value, code: i64, message: &str) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}})
}

fn one(server: &str, toolbox: &mut dyn Toolbox, message: &Value) -> Option<Value> {
    let id = message.get("id").cloned().unwrap_or_default();
    let method = message.get("method").and_then(Value::as_str);
    if message.get("jsonrpc").and_then(Value::as_str) != Some("2.0") {
        return Some(failure(
            &id,
            INVALID_REQUEST,
            "expected a message of JSON-RPC 2.0",
        ));
    }
    let Some(method) = method else {
        // An answer to a request of ours, of which there are none, or nonsense.
        let is_answer = message.get("result").is_some() || message.get("error").is_some();
        return (!is_answer).then(|| failure(&id, INVALID_REQUEST, "expected a method"));
    };
    // A notification.
    message.get("id")?;
    let params = message.get("params").cloned().unwrap_or_default();
    let result = match method {
        "initialize" => {
            let wanted = params.get("protocolVersion").and_then(Value::as_str);
            let version = VERSIONS.into_iter().find(|known| Some(*known) == wanted);
            json!({
                "protocolVersion": version.unwrap_or(VERSIONS[VERSIONS.len() - 1]),
                "capabilities": {"tools": {"listChanged": false}},
                "serverInfo": {"name": server, "version": env!("CARGO_PKG_VERSION")},
            })
        }
        "ping" => json!({}),
        "tools/list" => json!({"tools": toolbox.tools()}),
        "tools/call" => {
            let Some(name) = params.get("name").and_then(Value::as_str) else {
                return Some(failure(&id, INVALID_PARAMS, "expected the name of a tool"));
            };
            let arguments = match params.get("arguments") {
                None | Some(Value::Null) => json!({}),
                Some(arguments @ Value::Object(_)) => arguments.clone(),
                Some(_) => {
                    let text = "expected an object of arguments";
                    return Some(failure(&id, INVALID_PARAMS, text));
                }
            };
            let Some(called) = toolbox.call(name, &arguments) else {
                let text = format!("there is no tool {name:?}");
                return Some(failure(&id, INVALID_PARAMS, &text));
            };
            json!({
                "content": [{"type": "text", "text": called.text}],
                "isError": called.failed,
            })
        }
        other => {
            let text = format!("there is no method {other:?}");
            return Some(failure(&id, NO_SUCH_METHOD, &text));
        }
    };
    Some(json!({"jsonrpc": "2.0", "id": id, "result": result}))
}

#[cfg(test)]
mod tests;

//! Our own small harness: Chat Completions and four tools, for a model that works in the current
//! folder. Small prompts on purpose (the system message and the tools are under 1,300 bytes), so
//! that a small policy can learn in it.
//!
//! Each turn: ask the model; run the tool calls of its reply in order; add the reply exactly as
//! it came, and the results; ask again. It ends when a reply has no tool calls (exit 0), after
//! `--turns-max` turns (3), when the server stays out of reach or broken after 3 tries (4), or
//! when it refuses the request (5). Bad usage is 2, a tool server that does not answer 6.
//!
//! The variable `SERVERS_VARIABLE` names a file of tool servers, whose tools then come after the
//! four as `mcp__SERVER__TOOL`.

mod reply;
pub(crate) mod tools;

use std::{
    io::{self, Write},
    process::ExitCode,
    time::Duration,
};

use serde_json::{Value, json};

use crate::{
    http::{Endpoint, HttpError},
    mcp::client::Servers,
};

const USAGE: &str = "usage: guest react --base-url URL --api-key KEY --model NAME [--turns-max N] \
[--timeout-s N] [--stream] TASK\n\
URL is the API's root, e.g. http://127.0.0.1:8080/v1; only plain HTTP to an IP address or localhost.";

const SYSTEM: &str = "You work in the current folder with the tools. \
Do the task, then reply with one short sentence.";

/// Names the file of tool servers, in the form that `mcp::client` reads.
const SERVERS_VARIABLE: &str = "ESPALIER_MCP_CONFIG";
/// Most bytes of the result of a server's tool.
const SERVER_RESULT_BYTES_MAX: usize = 8000;

const TRIES: u32 = 3;
const RETRY_WAIT: Duration = Duration::from_millis(250);

/// How a run ended, as exit codes.
const DONE: u8 = 0;
const BAD_USAGE: u8 = 2;
const TURNS_OVER: u8 = 3;
const SERVER_DOWN: u8 = 4;
const REFUSED: u8 = 5;
const NO_TOOL_SERVER: u8 = 6;

#[derive(Debug, PartialEq, Eq)]
struct Options {
    base_url: String,
    api_key: String,
    model: String,
    turns_max: u32,
    timeout: Duration,
    stream: bool,
    task: String,
}

impl Options {
    fn parse(arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let (mut base_url, mut api_key, mut model, mut task) = (None, None, None, None);
        let (mut turns_max, mut timeout_s, mut stream) = (12, 600, false);
        let mut arguments = arguments.peekable();
        while let Some(argument) = arguments.next() {
            let mut value = || {
                arguments
                    .next()
                    .ok_or_else(|| format!("{argument}: a value is missing"))
            };
            let number = |text: String| {
                text.parse::<u32>()
                    .map_err(|_| format!("{argument} {text}: a number is expected"))
            };
            match argument.as_str() {
                "--base-url" => base_url = Some(value()?),
                "--api-key" => api_key = Some(value()?),
                "--model" => model = Some(value()?),
                "--turns-max" => turns_max = number(value()?)?,
                "--timeout-s" => timeout_s = number(value()?)?,
                "--stream" => stream = true,
                "--" => task = Some(value()?),
                _ if argument.starts_with("--") => return Err(format!("unknown: {argument}")),
                _ if task.is_none() => task = Some(argument),
                _ => return Err(format!("more than one task: {argument:?}")),
            }
        }
        let need = |value: Option<String>, name: &str| value.ok_or(format!("{name} is missing"));
        Ok(Self {
            base_url: need(base_url, "--base-url")?,
            api_key: need(api_key, "--api-key")?,
            model: need(model, "--model")?,
            turns_max,
            timeout: Duration::from_secs(u64::from(timeout_s)),
            stream,
            task: need(task, "TASK")?,
        })
    }
}

fn say(text: &str) {
    let _ = writeln!(io::stderr(), "react: {text}");
}

/// Runs the harness.
#[must_use]
pub fn run(arguments: impl Iterator<Item = String>) -> ExitCode {
    let options = match Options::parse(arguments) {
        Ok(options) => options,
        Err(reason) => {
            say(&format!("{reason}\n{USAGE}"));
            return ExitCode::from(BAD_USAGE);
        }
    };
    let endpoint = match Endpoint::parse(&options.base_url, "/chat/completions") {
        Ok(endpoint) => endpoint,
        Err(reason) => {
            say(&reason);
            return ExitCode::from(BAD_USAGE);
        }
    };
    let servers = match std::env::var_os(SERVERS_VARIABLE) {
        None => Servers::default(),
        Some(file) => match Servers::connect(file.as_ref()) {
            Ok(servers) => servers,
            Err(reason) => {
                say(&reason);
                return ExitCode::from(NO_TOOL_SERVER);
            }
        },
    };
    ExitCode::from(work(&options, &endpoint, servers))
}

fn work(options: &Options, endpoint: &Endpoint, mut servers: Servers) -> u8 {
    let mut offered = tools::schemas();
    if let Value::Array(offered) = &mut offered {
        offered.extend(servers.schemas());
    }
    let mut messages = vec![
        json!({"role": "system", "content": SYSTEM}),
        json!({"role": "user", "content": options.task}),
    ];
    for _ in 0..options.turns_max {
        let message = match ask(options, endpoint, &messages, &offered) {
            Ok(message) => message,
            Err(code) => return code,
        };
        let calls = reply::tool_calls(&message);
        let text = message
            .get("content")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned();
        messages.push(reply::echo(message));
        if calls.is_empty() {
            let _ = writeln!(io::stdout(), "{text}");
            return DONE;
        }
        for call in calls {
            let result = match servers.call(&call.name, &call.arguments) {
                Some(result) => tools::shorten(&result, SERVER_RESULT_BYTES_MAX),
                None => tools::run(&call.name, &call.arguments),
            };
            messages.push(json!({"role": "tool", "tool_call_id": call.id, "content": result}));
        }
    }
    say(&format!("{} turns are over", options.turns_max));
    TURNS_OVER
}

/// One model call; the assistant's message, or the exit code.
fn ask(
    options: &Options,
    endpoint: &Endpoint,
    messages: &[Value],
    offered: &Value,
) -> Result<Value, u8> {
    let mut request = json!({
        "model": options.model,
        "messages": messages,
        "tools": offered,
    });
    if options.stream {
        request["stream"] = Value::Bool(true);
    }
    let body = request.to_string();
    for attempt in 0..TRIES {
        if attempt > 0 {
            std::thread::sleep(RETRY_WAIT * attempt);
        }
        let failure = match endpoint.post(&options.api_key, body.as_bytes(), options.timeout) {
            Ok(response) if response.status == 200 => {
                match reply::message(&response.body, options.stream) {
                    Ok(message) => return Ok(message),
                    Err(reason) => reason,
                }
            }
            Ok(response) => {
                let text = String::from_utf8_lossy(&response.body);
                let text: String = text.chars().take(500).collect();
                let failure = format!("status {}: {text}", response.status);
                if response.status < 500 && response.status != 429 {
                    say(&failure);
                    return Err(REFUSED);
                }
                failure
            }
            Err(HttpError(reason)) => reason,
        };
        say(&format!("try {} of {TRIES}: {failure}", attempt + 1));
    }
    Err(SERVER_DOWN)
}

#[cfg(test)]
mod tests;

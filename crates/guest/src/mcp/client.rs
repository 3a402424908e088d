//! The user's side of tool servers, for `react` and for the check that servers are ready.
//!
//! Servers are named by a file in the form that many harnesses take:
//! `{"mcpServers": {"NAME": {"command": …, "args": […], "env": {…}} or {"type": "http", "url": …, "headers": {…}}}}`.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, BufRead, BufReader, Read, Write},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Deserialize;
use serde_json::{Value, json};

use super::VERSIONS;
use crate::http::{Endpoint, HttpError, Response, header};

/// For a server to say that it is there.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// For a tool.
const CALL_TIMEOUT: Duration = Duration::from_secs(600);
/// The largest message taken.
const MESSAGE_BYTES_MAX: u64 = 16 << 20;
const TOOLS_MAX: usize = 1000;
const PAGES_MAX: usize = 100;

#[derive(Debug, Deserialize)]
struct File {
    #[serde(rename = "mcpServers")]
    servers: BTreeMap<String, Server>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Server {
    command: String,
    args: Vec<String>,
    env: BTreeMap<String, String>,
    url: String,
    headers: BTreeMap<String, String>,
}

#[derive(Debug)]
enum Way {
    Stdio {
        child: Child,
        stdin: ChildStdin,
        stdout: BufReader<ChildStdout>,
    },
    Http {
        endpoint: Endpoint,
        headers: Vec<(String, String)>,
    },
}

impl Drop for Way {
    fn drop(&mut self) {
        if let Self::Stdio { child, .. } = self {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[derive(Debug)]
struct Connection {
    name: String,
    way: Way,
    next_id: u64,
    tools: Vec<Value>,
}

/// Tools of several servers, each under `mcp__SERVER__TOOL`.
#[derive(Debug, Default)]
pub(crate) struct Servers {
    connections: Vec<Connection>,
}

impl Servers {
    /// Connects to every server of a file and asks for its tools.
    pub(crate) fn connect(file: &Path) -> Result<Self, String> {
        let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
        let text = fs::read_to_string(file).map_err(|error| failed(&error))?;
        let file: File = serde_json::from_str(&text).map_err(|error| failed(&error))?;
        let mut connections = Vec::new();
        for (name, server) in file.servers {
            let connection = Connection::open(&name, &server)
                .map_err(|reason| format!("tool server {name}: {reason}"))?;
            connections.push(connection);
        }
        Ok(Self { connections })
    }

    /// The tools in the form of Chat Completions.
    pub(crate) fn schemas(&self) -> Vec<Value> {
        let of = |one: &Connection| -> Vec<Value> {
            let tools = one.tools.iter().map(|tool| {
                let text = |key: &str| tool.get(key).and_then(Value::as_str).unwrap_or_default();
                json!({"type": "function", "function": {
                    "name": format!("mcp__{}__{}", one.name, text("name")),
                    "description": text("description"),
                    "parameters": tool.get("inputSchema").cloned().unwrap_or_else(|| json!({"type": "object"})),
                }})
            });
            tools.collect()
        };
        self.connections.iter().flat_map(of).collect()
    }

    /// Calls a tool; `None` when it is not one of a server.
    pub(crate) fn call(&mut self, name: &str, arguments: &str) -> Option<String> {
        let name = name.strip_prefix("mcp__")?;
        let (connection, tool) = self.connections.iter_mut().find_map(|one| {
            let tool = name.strip_prefix(one.name.as_str())?.strip_prefix("__")?;
            let known = |known: &Value| known.get("name").and_then(Value::as_str) == Some(tool);
            one.tools.iter().any(known).then_some((one, tool))
        })?;
        let arguments: Value = match serde_json::from_str(arguments) {
            Ok(arguments) => arguments,
            Err(error) => return Some(format!("error: bad arguments: {error}")),
        };
        let params = json!({"name": tool, "arguments": arguments});
        Some(match connection.ask("tools/call", &params, CALL_TIMEOUT) {
            Ok(result) => told(&result),
            Err(reason) => format!("error: {reason}"),
        })
    }
}

/// The text of a tool's result.
fn told(result: &Value) -> String {
    let parts = result.get("content").and_then(Value::as_array);
    let parts = parts.map(Vec::as_slice).unwrap_or_default();
    let texts: Vec<String> = parts
        .iter()
        .map(|part| match part.get("text").and_then(Value::as_str) {
            Some(text) => text.to_owned(),
            None => {
                let kind = part.get("type").and_then(Value::as_str);
                format!("[{}]", kind.unwrap_or("something"))
            }
        })
        .collect();
    let text = texts.join("\n");
    match result.get("isError").and_then(Value::as_bool) {
        Some(true) if !text.starts_with("error") => format!("error: {text}"),
        _ => text,
    }
}

impl Connection {
    fn open(name: &str, server: &Server) -> Result<Self, String> {
        let way = if server.url.is_empty() {
            let mut child = Command::new(&server.command)
                .args(&server.args)
                .envs(&server.env)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::inherit())
                .spawn()
                .map_err(|error| format!("{}: {error}", server.command))?;
            let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
                return Err("it has no standard input and output".to_owned());
            };
            Way::Stdio {
                child,
                stdin,
                stdout: BufReader::new(stdout),
            }
        } else {
            let mut headers: Vec<_> = server.headers.clone().into_iter().collect();
            headers.push((
                "Accept".to_owned(),
                "application/json, text/event-stream".to_owned(),
            ));
            Way::Http {
                endpoint: Endpoint::parse(&server.url, "")?,
                headers,
            }
        };
        let mut connection = Self {
            name: name.to_owned(),
            way,
            next_id: 1,
            tools: Vec::new(),
        };
        let params = json!({
            "protocolVersion": VERSIONS[VERSIONS.len() - 1],
            "capabilities": {},
            "clientInfo": {"name": "espalier", "version": env!("CARGO_PKG_VERSION")},
        });
        let hello = connection.ask("initialize", &params, START_TIMEOUT)?;
        if let (Way::Http { headers, .. }, Some(version)) = (
            &mut connection.way,
            hello.get("protocolVersion").and_then(Value::as_str),
        ) {
            headers.push(("MCP-Protocol-Version".to_owned(), version.to_owned()));
        }
        let note = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        connection.send(&note, None, START_TIMEOUT)?;
        let mut params = json!({});
        for _ in 0..PAGES_MAX {
            let page = connection.ask("tools/list", &params, START_TIMEOUT)?;
            let Some(tools) = page.get("tools").and_then(Value::as_array) else {
                return Err(format!("expected a list of tools, found {page}"));
            };
            connection.tools.extend(tools.iter().cloned());
            if connection.tools.len() > TOOLS_MAX {
                return Err(format!("it has more than {TOOLS_MAX} tools"));
            }
            match page.get("nextCursor").filter(|cursor| !cursor.is_null()) {
                Some(cursor) => params = json!({"cursor": cursor}),
                None => return Ok(connection),
            }
        }
        Err(format!("its list of tools has more than {PAGES_MAX} pages"))
    }

    fn ask(&mut self, method: &str, params: &Value, timeout: Duration) -> Result<Value, String> {
        let id = self.next_id;
        self.next_id += 1;
        let request = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
        let answer = self
            .send(&request, Some(id), timeout)?
            .ok_or_else(|| format!("no answer to {method}"))?;
        if let Some(error) = answer.get("error") {
            return Err(format!("{method}: {error}"));
        }
        Ok(answer.get("result").cloned().unwrap_or_default())
    }

    /// Sends a message, and waits for the answer with that id.
    fn send(
        &mut self,
        message: &Value,
        id: Option<u64>,
        timeout: Duration,
    ) -> Result<Option<Value>, String> {
        match &mut self.way {
            Way::Stdio { stdin, stdout, .. } => {
                let say = |error: io::Error| format!("writing to it: {error}");
                writeln!(stdin, "{message}").map_err(say)?;
                stdin.flush().map_err(say)?;
                let Some(id) = id else { return Ok(None) };
                let until = Instant::now() + timeout;
                loop {
                    let line = read_line(stdout, until)?;
                    let found: Value = serde_json::from_slice(&line)
                        .map_err(|error| format!("its line is not JSON: {error}"))?;
                    if is_answer(&found, id) {
                        return Ok(Some(found));
                    }
                }
            }
            Way::Http { endpoint, headers } => {
                let sent: Vec<(&str, &str)> = headers
                    .iter()
                    .map(|(name, value)| (name.as_str(), value.as_str()))
                    .collect();
                let body = message.to_string();
                let response = endpoint
                    .send("POST", &sent, body.as_bytes(), timeout)
                    .map_err(|HttpError(reason)| reason)?;
                if response.status >= 400 {
                    let text = String::from_utf8_lossy(&response.body);
                    let text: String = text.chars().take(300).collect();
                    return Err(format!("status {}: {text}", response.status));
                }
                let session = header(&response.headers, "mcp-session-id").map(str::to_owned);
                let known = |(name, _): &(String, String)| name == "Mcp-Session-Id";
                if let Some(session) = session.filter(|_| !headers.iter().any(known)) {
                    headers.push(("Mcp-Session-Id".to_owned(), session));
                }
                match id {
                    None => Ok(None),
                    Some(id) => messages(&response)
                        .into_iter()
                        .find(|found| is_answer(found, id))
                        .map(Some)
                        .ok_or_else(|| "its response holds no answer".to_owned()),
                }
            }
        }
    }
}

fn is_answer(message: &Value, id: u64) -> bool {
    message.get("method").is_none() && message.get("id").and_then(Value::as_u64) == Some(id)
}

/// The messages of a response: one of JSON, or those of an event stream.
fn messages(response: &Response) -> Vec<Value> {
    let is_stream = header(&response.headers, "content-type")
        .is_some_and(|kind| kind.starts_with("text/event-stream"));
    if !is_stream {
        return serde_json::from_slice(&response.body).into_iter().collect();
    }
    let text = String::from_utf8_lossy(&response.body);
    let text = text.replace("\r\n", "\n");
    let events = text.split("\n\n").map(|event| {
        let data = event.lines().filter_map(|line| line.strip_prefix("data:"));
        data.map(|line| line.strip_prefix(' ').unwrap_or(line))
            .collect::<Vec<_>>()
            .join("\n")
    });
    events
        .filter_map(|data| serde_json::from_str(&data).ok())
        .collect()
}

/// A line of a child, until then at the latest.
fn read_line(from: &mut BufReader<ChildStdout>, until: Instant) -> Result<Vec<u8>, String> {
    let mut line = Vec::new();
    loop {
        if from.buffer().is_empty() {
            let rest = until.saturating_duration_since(Instant::now());
            let mut fds = [PollFd::new(from.get_ref(), PollFlags::IN)];
            match poll(&mut fds, Timespec::try_from(rest).ok().as_ref()) {
                Ok(0) => return Err("it did not answer in time".to_owned()),
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(format!("waiting for it: {error}")),
            }
        }
        let buffer = from
            .fill_buf()
            .map_err(|error| format!("reading from it: {error}"))?;
        if buffer.is_empty() {
            return Err("it ended".to_owned());
        }
        let end = buffer.iter().position(|byte| *byte == b'\n');
        let taken = end.map_or(buffer.len(), |at| at + 1);
        line.extend_from_slice(&buffer[..taken]);
        from.consume(taken);
        if line.len() as u64 > MESSAGE_BYTES_MAX {
            return Err(format!("its message is over {MESSAGE_BYTES_MAX} bytes"));
        }
        if end.is_some() && !line.trim_ascii().is_empty() {
            return Ok(line);
        }
        if end.is_some() {
            line.clear();
        }
    }
}

/// `guest tools FILE`: connects to every server of a file and prints the names of their tools;
/// exit 1 when one does not answer.
#[must_use]
pub fn check(mut arguments: impl Iterator<Item = String>) -> ExitCode {
    let Some(file) = arguments.next() else {
        let _ = writeln!(io::stderr(), "usage: guest tools FILE");
        return ExitCode::from(2);
    };
    match Servers::connect(Path::new(&file)) {
        Ok(servers) => {
            for schema in servers.schemas() {
                let name = schema.pointer("/function/name").and_then(Value::as_str);
                let _ = writeln!(io::stdout(), "{}", name.unwrap_or_default());
            }
            ExitCode::SUCCESS
        }
        Err(reason) => {
            let _ = writeln!(io::stderr(), "{reason}");
            ExitCode::FAILURE
        }
    }
}

/// `guest fetch METHOD URL [BODY]`: one request; prints the body. Exit 0, or 22 from status 400
/// on, or 7 without an answer. A body of `-` is standard input.
#[must_use]
pub fn fetch(mut arguments: impl Iterator<Item = String>) -> ExitCode {
    const TIMEOUT: Duration = Duration::from_secs(30);
    let say = |text: &str| {
        let _ = writeln!(io::stderr(), "fetch: {text}");
    };
    let (Some(method), Some(url)) = (arguments.next(), arguments.next()) else {
        say("usage: guest fetch METHOD URL [BODY]");
        return ExitCode::from(2);
    };
    let mut body = arguments.next().unwrap_or_default().into_bytes();
    if body == b"-" {
        body.clear();
        let read = io::stdin().take(MESSAGE_BYTES_MAX).read_to_end(&mut body);
        if let Err(error) = read {
            say(&format!("standard input: {error}"));
            return ExitCode::from(2);
        }
    }
    let endpoint = match Endpoint::parse(&url, "") {
        Ok(endpoint) => endpoint,
        Err(reason) => {
            say(&reason);
            return ExitCode::from(2);
        }
    };
    match endpoint.send(&method, &[("Accept", "*/*")], &body, TIMEOUT) {
        Ok(response) => {
            let _ = io::stdout().write_all(&response.body);
            if response.status >= 400 {
                say(&format!("status {}", response.status));
                return ExitCode::from(22);
            }
            ExitCode::SUCCESS
        }
        Err(HttpError(reason)) => {
            say(&reason);
            ExitCode::from(7)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_become_text_and_errors_say_so() {
        let text = |value: Value| told(&value);
        assert_eq!(
            text(json!({"content": [{"type": "text", "text": "a"}, {"type": "image"}]})),
            "a\n[image]"
        );
        assert_eq!(
            text(json!({"content": [{"type": "text", "text": "no"}], "isError": true})),
            "error: no"
        );
        assert_eq!(text(json!({})), "");
    }

    #[test]
    fn messages_come_as_json_or_as_events() {
        let response = |kind: &str, body: &str| Response {
            status: 200,
            headers: vec![("content-type".to_owned(), kind.to_owned())],
            body: body.as_bytes().to_vec(),
        };
        let plain = response("application/json", "{\"id\": 1, \"result\": {}}");
        assert!(is_answer(&messages(&plain)[0], 1));
        let stream = response(
            "text/event-stream; charset=utf-8",
            "event: message\r\ndata: {\"method\": \"x\", \"id\": 1}\r\n\r\nevent: message\r\ndata: {\"id\": 1,\r\ndata: \"result\": {}}\r\n\r\n",
        );
        let found = messages(&stream);
        assert_eq!(found.len(), 2);
        assert!(!is_answer(&found[0], 1) && is_answer(&found[1], 1));
    }
}

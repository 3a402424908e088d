//! `mcp-servers.json` beside a table of MCP-Atlas: how its tool servers are started here, in the
//! form that many harnesses take. The bench's own table says only which tools a task may use.
//!
//! ```json
//! {"mcpServers": {"filesystem": {"command": "mcp-server-filesystem", "args": ["/workspace"]},
//!                 "clock": {"type": "http", "url": "http://127.0.0.1:9300/mcp", "start": "clock-server 9300"}}}
//! ```
//! A tool is of the server whose name it begins with: `filesystem_read_file`, `filesystem__read_file`.

use std::{collections::BTreeMap, path::Path};

use serde_json::Value;

use crate::{McpServer, McpTransport, TaskError, fields::Fields};

/// The file's name.
pub(crate) const FILE: &str = "mcp-servers.json";

/// The servers of the file beside a table; `None` without that file.
pub(crate) fn beside(table: &Path) -> Result<Option<BTreeMap<String, McpServer>>, TaskError> {
    let file = table.with_file_name(FILE);
    if !file.is_file() {
        return Ok(None);
    }
    let mut top = Fields::json_file(&file)?;
    let Some(listed) = top.object("mcpServers")? else {
        return Err(top.wrong("mcpServers", "an object of servers by name", &Value::Null));
    };
    let mut servers = BTreeMap::new();
    for (name, value) in listed.rest() {
        let mut one = Fields::of(value, &file, None)?;
        let kind = one.text_or("type", "stdio")?;
        let transport = match kind.as_str() {
            "stdio" => McpTransport::Stdio {
                command: one.text("command")?,
                args: one.texts("args")?,
            },
            "http" | "streamable-http" => McpTransport::StreamableHttp {
                url: one.text("url")?,
            },
            "sse" => McpTransport::Sse {
                url: one.text("url")?,
            },
            other => return Err(one.wrong("type", "stdio, http or sse", &other.into())),
        };
        let server = McpServer {
            name: name.clone(),
            transport,
            env: one.environment("env")?,
            headers: one.environment("headers")?,
            start: one.maybe_text("start")?,
        };
        one.refuse_rest()?;
        servers.insert(name, server);
    }
    Ok(Some(servers))
}

/// The servers that tools need, and the tools that no server has.
pub(crate) fn needed(
    tools: &[String],
    servers: &BTreeMap<String, McpServer>,
) -> (Vec<McpServer>, Vec<String>) {
    let (mut found, mut missing) = (BTreeMap::new(), Vec::new());
    for tool in tools {
        let of = servers
            .iter()
            .filter(|(name, _)| {
                let rest = tool.strip_prefix(name.as_str());
                rest.is_some_and(|rest| rest.starts_with(['_', '-', '.', '/']))
            })
            .max_by_key(|(name, _)| name.len());
        match of {
            Some((name, server)) => {
                found.insert(name.clone(), server.clone());
            }
            None => missing.push(tool.clone()),
        }
    }
    (found.into_values().collect(), missing)
}

//! What one part of the program says, in the words of another. Pure.

use sandbox::Output;

use crate::classify;

/// Bytes of the harness's output that the record keeps.
const TAIL_BYTES: usize = 2048;

/// A tool server in the words of a profile.
pub(crate) fn told(server: task::McpServer) -> harness::ToolServer {
    let (kind, command, args, url) = match server.transport {
        task::McpTransport::Stdio { command, args } => ("stdio", command, args, String::new()),
        task::McpTransport::StreamableHttp { url } => ("http", String::new(), Vec::new(), url),
        task::McpTransport::Sse { url } => ("sse", String::new(), Vec::new(), url),
    };
    harness::ToolServer {
        name: server.name,
        kind: kind.to_owned(),
        command,
        args,
        url,
        env: server.env,
        headers: server.headers,
    }
}

/// The end of what a harness printed, without its key.
pub(crate) fn tail(output: &Output, key: &str) -> String {
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    let half = TAIL_BYTES / 2;
    let mut text = classify::last_bytes(
        stdout.trim_end(),
        half.max(TAIL_BYTES.saturating_sub(stderr.len())),
    )
    .to_owned();
    let errors = classify::last_bytes(stderr.trim_end(), half);
    if !errors.is_empty() {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(errors);
    }
    if key.is_empty() {
        text
    } else {
        text.replace(key, "<key>")
    }
}

//! The four tools.

use std::{
    fs::{self, File},
    io::{Read, Seek, SeekFrom},
    os::unix::process::{CommandExt, ExitStatusExt},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{MemfdFlags, memfd_create},
    process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open},
};
use serde::Deserialize;
use serde_json::{Value, json};

/// Most bytes of a result; more is cut out of its middle.
const RESULT_BYTES_MAX: usize = 2000;
/// Most bytes read of any file or output.
const READ_BYTES_MAX: u64 = 16 << 20;
const BASH_TIMEOUT: Duration = Duration::from_secs(30);

/// The tools as the model sees them.
pub(super) fn schemas() -> Value {
    let tool = |name: &str, description: &str, parameters: &[&str]| {
        let properties: serde_json::Map<_, _> = parameters
            .iter()
            .map(|p| ((*p).to_owned(), json!({"type": "string"})))
            .collect();
        json!({"type": "function", "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": parameters},
        }})
    };
    json!([
        tool("bash", "Run a command", &["command"]),
        tool("read", "Read a file", &["path"]),
        tool("write", "Write a file", &["path", "content"]),
        tool(
            "edit",
            "Replace the only place of old in a file",
            &["path", "old", "new"]
        ),
    ])
}

#[derive(Deserialize)]
struct Bash {
    command: String,
}

#[derive(Deserialize)]
struct ReadFile {
    path: String,
}

#[derive(Deserialize)]
struct WriteFile {
    path: String,
    content: String,
}

#[derive(Deserialize)]
struct Edit {
    path: String,
    old: String,
    new: String,
}

/// Runs a tool; what goes wrong is told to the model.
pub(super) fn run(name: &str, arguments: &str) -> String {
    fn parse<T: for<'a> Deserialize<'a>>(arguments: &str) -> Result<T, String> {
        serde_json::from_str(arguments).map_err(|e| format!("error: bad arguments: {e}"))
    }
    let result = match name {
        "bash" => parse::<Bash>(arguments).map(|a| bash(&a.command, BASH_TIMEOUT)),
        "read" => parse::<ReadFile>(arguments).and_then(|a| read(Path::new(&a.path))),
        "write" => {
            parse::<WriteFile>(arguments).and_then(|a| write(Path::new(&a.path), &a.content))
        }
        "edit" => parse::<Edit>(arguments).and_then(|a| edit(Path::new(&a.path), &a.old, &a.new)),
        _ => Err(format!(
            "error: unknown tool {name:?}; the tools are bash, read, write, edit"
        )),
    };
    shorten(&result.unwrap_or_else(|error| error), RESULT_BYTES_MAX)
}

/// At most so many bytes, without the last line end; `ok` instead of nothing.
pub(crate) fn shorten(text: &str, bytes_max: usize) -> String {
    let text = text.strip_suffix('\n').unwrap_or(text);
    if text.is_empty() {
        return "ok".to_owned();
    }
    if text.len() <= bytes_max {
        return text.to_owned();
    }
    let mark = "\n[...]\n";
    let half = bytes_max.saturating_sub(mark.len()) / 2;
    let (head, tail) = (
        text.floor_char_boundary(half),
        text.ceil_char_boundary(text.len() - half),
    );
    let (head, tail) = (
        text.get(..head).unwrap_or_default(),
        text.get(tail..).unwrap_or_default(),
    );
    format!("{head}{mark}{tail}")
}

fn say(path: &Path) -> impl Fn(std::io::Error) -> String {
    move |error| format!("error: {}: {error}", path.display())
}

pub(crate) fn read(path: &Path) -> Result<String, String> {
    if !fs::metadata(path).map_err(say(path))?.is_file() {
        return Err(format!("error: {}: not a file", path.display()));
    }
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(say(path))?;
    file.take(READ_BYTES_MAX)
        .read_to_end(&mut bytes)
        .map_err(say(path))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

pub(crate) fn write(path: &Path, content: &str) -> Result<String, String> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(say(path))?;
    }
    fs::write(path, content).map_err(say(path))?;
    Ok("ok".to_owned())
}

pub(crate) fn edit(path: &Path, old: &str, new: &str) -> Result<String, String> {
    let text = fs::read_to_string(path).map_err(say(path))?;
    match text.matches(old).count() {
        _ if old.is_empty() => Err("error: old is empty".to_owned()),
        1 => write(path, &text.replacen(old, new, 1)),
        0 => Err(format!("error: {}: old was not found", path.display())),
        count => Err(format!(
            "error: {}: old was found {count} times, not once",
            path.display()
        )),
    }
}

pub(crate) fn bash(command: &str, timeout: Duration) -> String {
    match run_bash(command, timeout) {
        Ok(text) => text,
        Err(error) => format!("error: bash: {error}"),
    }
}

/// Output goes to a file in memory, not through a pipe: nothing to drain, no wait for
/// background processes that hold it open.
fn run_bash(command: &str, timeout: Duration) -> std::io::Result<String> {
    let mut output = File::from(memfd_create("output", MemfdFlags::CLOEXEC)?);
    let mut child = Command::new("bash")
        .args(["-c", command])
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output.try_clone()?)
        .process_group(0)
        .spawn()?;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let until = Instant::now() + timeout;
    let mut last_line = None;
    if let Some(pid) = pid {
        let descriptor = pidfd_open(pid, PidfdFlags::empty())?;
        let mut fds = [PollFd::new(&descriptor, PollFlags::IN)];
        loop {
            let rest = until.saturating_duration_since(Instant::now());
            match poll(&mut fds, Timespec::try_from(rest).ok().as_ref()) {
                Ok(0) => {
                    let _ = kill_process_group(pid, Signal::KILL);
                    last_line = Some(format!("killed after {} s", timeout.as_secs()));
                    break;
                }
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    let status = child.wait()?;
    if last_line.is_none() && !status.success() {
        last_line = Some(match status.code() {
            Some(code) => format!("exit code {code}"),
            None => format!("exit code {}", 128 + status.signal().unwrap_or(0)),
        });
    }
    let mut bytes = Vec::new();
    output.seek(SeekFrom::Start(0))?;
    output.take(READ_BYTES_MAX).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let text = text.strip_suffix('\n').unwrap_or(&text);
    Ok(match last_line {
        None => text.to_owned(),
        Some(line) if text.is_empty() => line,
        // Short enough to survive the cut of a long output.
        Some(line) => format!("{text}\n{line}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_are_small() {
        let text = schemas().to_string();
        assert!(text.len() < 900, "{} bytes: {text}", text.len());
    }

    #[test]
    fn bash_tells_output_and_end() {
        let bash = |command: &str| run("bash", &json!({"command": command}).to_string());
        assert_eq!(bash("echo out; echo err >&2"), "out\nerr");
        assert_eq!(bash("true"), "ok");
        assert_eq!(bash("echo x; exit 3"), "x\nexit code 3");
        assert_eq!(bash("kill -9 $$"), "exit code 137");
        assert_eq!(bash("cat"), "ok");
        assert_eq!(bash("sleep 100 & echo started"), "started");
        let long = bash("seq 1 10000; false");
        assert!(long.len() <= RESULT_BYTES_MAX, "{}", long.len());
        assert!(
            long.starts_with("1\n2\n") && long.ends_with("10000\nexit code 1"),
            "{long}"
        );
        assert_eq!(
            super::bash("echo a; sleep 100", Duration::from_secs(0))
                .lines()
                .last(),
            Some("killed after 0 s")
        );
    }

    #[test]
    fn cuts_fall_between_characters() {
        for width in RESULT_BYTES_MAX - 3..RESULT_BYTES_MAX + 9 {
            let text = "é".repeat(width);
            assert!(shorten(&text, RESULT_BYTES_MAX).len() <= RESULT_BYTES_MAX);
        }
    }

    #[test]
    fn files_are_read_written_and_edited() {
        let folder = std::env::temp_dir().join(format!("tools-{}", std::process::id()));
        let path = folder.join("a/b.txt");
        let with = |name: &str, more: Value| {
            let mut arguments = json!({"path": path});
            arguments
                .as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            run(name, &arguments.to_string())
        };
        assert!(with("read", json!({})).starts_with("error: "));
        assert_eq!(with("write", json!({"content": "one two two\n"})), "ok");
        assert_eq!(with("read", json!({})), "one two two");
        assert_eq!(with("edit", json!({"old": "one", "new": "1"})), "ok");
        assert!(with("edit", json!({"old": "two", "new": "2"})).contains("2 times"));
        assert!(with("edit", json!({"old": "six", "new": "6"})).contains("not found"));
        assert!(with("edit", json!({"old": "", "new": "6"})).contains("empty"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "1 two two\n");
        assert!(run("read", &json!({"path": folder}).to_string()).contains("not a file"));
        assert!(run("read", "{\"path\": 3}").contains("bad arguments"));
        assert!(run("write", "{\"path\": \"x\"}").contains("content"));
        assert!(run("fly", "{}").contains("unknown tool"));
        fs::remove_dir_all(&folder).unwrap();
    }
}

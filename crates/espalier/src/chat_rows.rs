//! Conversations from elsewhere as training data: one JSON object per line,
//! `{"messages": [...], "tools"?: [...], "reward"?: 0..1, "task"?: "name"}`, messages and tools as in
//! OpenAI's chat API. An assistant message with `"weight": 0` is context.
//!
//! Every assistant turn is said again as the policy would generate it, behind the prompt that the
//! gateway would have made of the turns before. Where the template drops something of an earlier
//! turn (reasoning, most often), that prompt does not extend the sequence so far: a new tree begins,
//! in which the earlier turns are context. So each turn is learned once, in the context in which a
//! harness would ask for it.

use std::{io::BufRead, path::Path};

use codec::{Codec, Memory};
use record::{Conversation, Role};
use serde::Deserialize;
use serde_json::{Value, json};
use tree::TrainTree;

use crate::error::CliError;

/// Longest line.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// A line of the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    messages: Vec<Value>,
    #[serde(default)]
    tools: Vec<Value>,
    #[serde(default = "full")]
    reward: f64,
    task: Option<String>,
}

fn full() -> f64 {
    1.0
}

/// A conversation, ready to be learned.
pub(crate) struct Row {
    /// Name of its task; the line's number when it names none.
    pub(crate) task: String,
    pub(crate) reward: f64,
    /// One tree per stretch of turns in which each prompt extends the one before.
    pub(crate) trees: Vec<TrainTree>,
}

/// Reads a file of conversations. Blank lines are passed over.
pub(crate) fn read(path: &Path, codec: &Codec) -> Result<Vec<Row>, CliError> {
    let opened = std::fs::File::open(path);
    let file = opened.map_err(|error| CliError::failed(path.display().to_string(), error))?;
    let mut source = std::io::BufReader::new(file);
    let mut rows = Vec::new();
    for number in 1_usize.. {
        let wrong = |found: String| {
            CliError::usage(
                format!("{}: line {number}: {found}", path.display()),
                "expected {\"messages\": [...], \"tools\"?: [...], \"reward\"?: number, \"task\"?: \"name\"}, messages as in OpenAI's chat API",
            )
        };
        let mut bytes = Vec::new();
        let mut limited = std::io::Read::take(&mut source, LINE_BYTES_MAX + 1);
        let count = limited
            .read_until(b'\n', &mut bytes)
            .map_err(|error| wrong(error.to_string()))?;
        if count == 0 {
            break;
        }
        if bytes.len() as u64 > LINE_BYTES_MAX {
            return Err(wrong(format!("longer than {LINE_BYTES_MAX} bytes")));
        }
        if bytes.trim_ascii().is_empty() {
            continue;
        }
        let line: Line =
            serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
        rows.push(row(line, number, codec).map_err(wrong)?);
    }
    Ok(rows)
}

fn row(line: Line, number: usize, codec: &Codec) -> Result<Row, String> {
    if !line.reward.is_finite() {
        return Err(format!("reward: expected a number, found {}", line.reward));
    }
    let assistant = |message: &&Value| message["role"] == "assistant";
    let learned: Vec<bool> = line
        .messages
        .iter()
        .filter(assistant)
        .map(|message| message["weight"].as_f64() != Some(0.0))
        .collect();
    let mut body = json!({"model": "", "messages": line.messages});
    if !line.tools.is_empty() {
        body["tools"] = Value::Array(line.tools);
    }
    let request = wire::chat::parse(&body).map_err(|error| error.to_string())?;
    let trees = trees(&request.conversation, &learned, codec)?;
    if trees.is_empty() {
        return Err("messages: expected an assistant message to learn, found none".into());
    }
    Ok(Row {
        task: line.task.unwrap_or_else(|| format!("line {number}")),
        reward: line.reward,
        trees,
    })
}

fn trees(whole: &Conversation, learned: &[bool], codec: &Codec) -> Result<Vec<TrainTree>, String> {
    let mut memory = Memory::default();
    let mut sequences: Vec<(Vec<u32>, Vec<bool>)> = Vec::new();
    let turns = whole.messages.iter().enumerate();
    let turns = turns.filter(|(_, message)| message.role == Role::Assistant);
    for ((call, (place, message)), &learn) in (0..).zip(turns).zip(learned) {
        let before = Conversation {
            messages: whole.messages[..place].to_vec(),
            tools: whole.tools.clone(),
        };
        let told = |error: codec::CodecError| format!("messages[{place}]: {error}");
        let prompt = codec.prompt(&before, &memory).map_err(told)?;
        let text = codec.speak(message).map_err(told)?;
        let reply = codec.encode(&text).map_err(told)?;
        memory.remember(call, &prompt, &reply, &text, message);
        let extends = sequences
            .last()
            .is_some_and(|(ids, _)| prompt.ids.starts_with(ids));
        if !extends {
            sequences.push((Vec::new(), Vec::new()));
        }
        if let Some((ids, mask)) = sequences.last_mut() {
            ids.extend_from_slice(&prompt.ids[ids.len()..]);
            mask.resize(ids.len(), false);
            ids.extend_from_slice(&reply);
            mask.resize(ids.len(), learn);
        }
    }
    sequences
        .iter()
        .filter(|(_, mask)| mask.contains(&true))
        .map(|(ids, mask)| TrainTree::supervised(ids, mask).map_err(|error| error.to_string()))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn codec() -> Codec {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../policy");
        Codec::load(Path::new(folder)).unwrap()
    }

    fn written(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    /// What is learned of a tree, as text.
    fn spoken(codec: &Codec, tree: &TrainTree) -> String {
        let node = &tree.nodes()[0];
        let learned = node.tokens.iter().zip(&node.targets);
        let ids: Vec<u32> = learned
            .filter_map(|(id, target)| target.map(|_| *id))
            .collect();
        codec.decode(&ids)
    }

    const ROW: &str = r#"{"messages": [
        {"role": "user", "content": "list"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "a", "type": "function", "function": {"name": "shell", "arguments": "{\"command\": \"ls\"}"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "secret.txt"},
        {"role": "assistant", "content": "one file"},
        {"role": "user", "content": "thanks"},
        {"role": "assistant", "content": "bye", "weight": 0}],
        "reward": 0.5, "task": "listing"}"#;

    #[test]
    fn only_the_policys_turns_are_learned_and_each_once() {
        let codec = codec();
        let file = written(&format!("\n{}\n", ROW.replace('\n', " ")));
        let rows = read(file.path(), &codec).unwrap();
        assert_eq!(rows.len(), 1);
        assert_eq!((rows[0].task.as_str(), rows[0].reward), ("listing", 0.5));
        let all: String = rows[0]
            .trees
            .iter()
            .map(|tree| spoken(&codec, tree))
            .collect();
        assert_eq!(all.matches("shell").count(), 1, "{all}");
        assert_eq!(all.matches("one file").count(), 1, "{all}");
        assert!(!all.contains("secret") && !all.contains("thanks") && !all.contains("bye"));
    }

    #[test]
    fn a_line_that_is_wrong_is_named() {
        let codec = codec();
        for (text, found) in [
            ("{\"messages\": []}", "messages"),
            (
                "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}",
                "assistant",
            ),
            ("{\"messages\": 1}", "invalid type"),
            ("{\"messages\": [], \"rewards\": 1}", "rewards"),
        ] {
            let file = written(&format!("{}\n{text}\n", ROW.replace('\n', " ")));
            let error = read(file.path(), &codec).err().unwrap().to_string();
            assert!(error.contains("line 2") && error.contains(found), "{error}");
        }
    }
}

//! The teacher plays one chore of each family through different harnesses' tools, for real, and
//! the verifier pays.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests are not in a test function"
)]

mod runner;

use std::{fs, path::Path};

use record::{Conversation, Message, Role, ToolSpec};
use runner::{put, score, shell};
use serde_json::{Value, json};
use task::{
    Split, Task, chores,
    teacher::{next_message, reference},
};

fn tool(name: &str, parameters: &[&str]) -> ToolSpec {
    let properties: serde_json::Map<String, Value> = parameters
        .iter()
        .map(|name| ((*name).to_owned(), json!({"type": "string"})))
        .collect();
    ToolSpec {
        name: name.to_owned(),
        description: String::new(),
        parameters: json!({"type": "object", "properties": properties, "required": parameters}),
    }
}

fn harnesses() -> Vec<Vec<ToolSpec>> {
    let mut listed = tool("edit", &["path"]);
    listed.parameters["properties"]["edits"] = json!({"type": "array", "items": {"type": "object", "properties": {"oldText": {"type": "string"}, "newText": {"type": "string"}}}});
    vec![
        vec![
            tool("bash", &["command"]),
            tool("read", &["path"]),
            tool("write", &["path", "content"]),
            tool("edit", &["path", "old", "new"]),
        ],
        vec![
            tool("read", &["path"]),
            tool("bash", &["command"]),
            listed,
            tool("write", &["path", "content"]),
        ],
        vec![tool("bash", &["command"])],
    ]
}

/// What a harness would do with a tool call.
fn obey(folder: &Path, name: &str, arguments: &Value) -> String {
    let text = |key: &str| arguments[key].as_str().unwrap();
    let replace = |old: &str, new: &str| {
        let path = folder.join(text("path"));
        let content = fs::read_to_string(&path).unwrap();
        assert_eq!(content.matches(old).count(), 1, "{old:?} in {content:?}");
        fs::write(path, content.replacen(old, new, 1)).unwrap();
        String::new()
    };
    match name {
        "bash" => shell(folder, text("command")),
        "read" => fs::read_to_string(folder.join(text("path"))).unwrap(),
        "write" => {
            fs::write(folder.join(text("path")), text("content")).unwrap();
            String::new()
        }
        "edit" => match arguments["edits"].get(0) {
            Some(edit) => replace(
                edit["oldText"].as_str().unwrap(),
                edit["newText"].as_str().unwrap(),
            ),
            None => replace(text("old"), text("new")),
        },
        other => panic!("there is no tool {other}"),
    }
}

fn play(task: &Task, tools: Vec<ToolSpec>) -> (String, usize) {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), &task.files);
    let steps = reference(task).unwrap();
    let mut conversation = Conversation {
        messages: vec![Message::text(Role::User, &task.instruction)],
        tools,
    };
    for turn in 0..10 {
        let message = next_message(&steps, &conversation).unwrap();
        let Some(call) = message.tool_calls.first() else {
            assert_eq!(message.text_content(), "Done.");
            return (score(folder.path(), task), turn);
        };
        let result = obey(folder.path(), &call.name, &call.arguments);
        conversation.messages.push(message.clone());
        conversation
            .messages
            .push(Message::text(Role::Tool, result));
    }
    panic!("{}: no end", task.id);
}

#[test]
fn the_teacher_solves_every_family_with_every_set_of_tools() {
    for task in chores::generate(Split::Train, 21, 52) {
        for tools in harnesses() {
            let expected = ("1".to_owned(), task.solution.len() - 1);
            assert_eq!(play(&task, tools), expected, "{}", task.id);
        }
    }
}

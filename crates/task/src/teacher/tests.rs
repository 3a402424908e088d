use std::process::Command;

use record::{Conversation, Message, Role, ToolCall, ToolSpec};
use serde_json::{Value, json};

use super::*;

fn tool(name: &str, properties: Value, required: &[&str]) -> ToolSpec {
    ToolSpec {
        name: name.to_owned(),
        description: String::new(),
        parameters: json!({"type": "object", "properties": properties, "required": required}),
    }
}

fn text() -> Value {
    json!({"type": "string"})
}

fn react() -> Vec<ToolSpec> {
    vec![
        tool("bash", json!({"command": text()}), &["command"]),
        tool("read", json!({"path": text()}), &["path"]),
        tool(
            "write",
            json!({"path": text(), "content": text()}),
            &["path", "content"],
        ),
        tool(
            "edit",
            json!({"path": text(), "old": text(), "new": text()}),
            &["path", "old", "new"],
        ),
    ]
}

/// Tools with lists of edits.
fn listed() -> Vec<ToolSpec> {
    let either =
        json!({"type": "string", "description": "Path of the file (relative or absolute)"});
    let edits = json!({"type": "array", "items": {"type": "object", "properties": {"oldText": text(), "newText": text()}}});
    vec![
        tool(
            "read",
            json!({"path": either, "offset": {"type": "number"}}),
            &["path"],
        ),
        tool(
            "bash",
            json!({"command": text(), "timeout": {"type": "number"}}),
            &["command"],
        ),
        tool(
            "edit",
            json!({"path": either, "edits": edits}),
            &["path", "edits"],
        ),
        tool(
            "write",
            json!({"path": either, "content": text()}),
            &["path", "content"],
        ),
    ]
}

/// Capital names, absolute paths only, a required description.
fn absolute() -> Vec<ToolSpec> {
    let path = json!({"type": "string", "description": "The absolute path of the file"});
    vec![
        tool(
            "Bash",
            json!({"command": text(), "description": text()}),
            &["command", "description"],
        ),
        tool(
            "Edit",
            json!({"file_path": path, "old_string": text(), "new_string": text()}),
            &["file_path"],
        ),
        tool("Read", json!({"file_path": path}), &["file_path"]),
    ]
}

fn steps() -> Vec<Step> {
    vec![
        Step::Bash("ls".into()),
        Step::Read("a.txt".into()),
        Step::Write("b/c.txt".into(), "it's\n".into()),
        Step::Edit("a.txt".into(), "x/y".into(), "z&".into()),
        Step::Say("Done.".into()),
    ]
}

/// Lets the teacher play to the end; every reply as one line.
fn play(tools: Vec<ToolSpec>) -> String {
    let mut conversation = Conversation {
        messages: vec![Message::text(Role::User, "do it")],
        tools,
    };
    let mut lines = Vec::new();
    loop {
        let message = next_message(&steps(), &conversation).unwrap();
        let [call] = message.tool_calls.as_slice() else {
            lines.push(message.text_content());
            return lines.join("\n");
        };
        lines.push(format!("{} {}", call.name, call.arguments));
        conversation.messages.push(message);
        conversation.messages.push(Message::text(Role::Tool, "ok"));
    }
}

#[test]
fn each_harness_is_spoken_to_in_its_own_grammar() {
    insta::assert_snapshot!(play(react()), @r#"
bash {"command":"ls"}
read {"path":"a.txt"}
write {"path":"b/c.txt","content":"it's\n"}
edit {"path":"a.txt","old":"x/y","new":"z&"}
Done.
"#);
    insta::assert_snapshot!(play(listed()), @r#"
bash {"command":"ls"}
read {"path":"a.txt"}
write {"path":"b/c.txt","content":"it's\n"}
edit {"path":"a.txt","edits":[{"oldText":"x/y","newText":"z&"}]}
Done.
"#);
    insta::assert_snapshot!(play(absolute()), @r#"
Bash {"command":"ls","description":"chore"}
Bash {"command":"cat a.txt","description":"chore"}
Bash {"command":"mkdir -p b && printf '%s\\n' 'it'\\''s' > b/c.txt","description":"chore"}
Bash {"command":"sed -i '0,/x\\/y/s/x\\/y/z\\&/' a.txt","description":"chore"}
Done.
"#);
    let argv = json!({"type": "array", "items": text()});
    insta::assert_snapshot!(play(vec![tool("shell", json!({"command": argv}), &["command"])]), @r#"
shell {"command":["bash","-lc","ls"]}
shell {"command":["bash","-lc","cat a.txt"]}
shell {"command":["bash","-lc","mkdir -p b && printf '%s\\n' 'it'\\''s' > b/c.txt"]}
shell {"command":["bash","-lc","sed -i '0,/x\\/y/s/x\\/y/z\\&/' a.txt"]}
Done.
"#);
}

/// Schemas say in many words that a path must be absolute.
#[test]
fn relative_paths_go_only_where_they_are_welcome() {
    let offers = |description: &str| {
        let path = json!({"type": "string", "description": description});
        vec![
            tool("read", json!({"path": path}), &["path"]),
            tool("bash", json!({"command": text()}), &["command"]),
        ]
    };
    for (description, name) in [
        ("Path to the file", "read"),
        (
            "Relative paths resolve against the working directory; others must be absolute",
            "read",
        ),
        ("The absolute path of the file", "bash"),
        ("The absolute path (must be absolute, not relative)", "bash"),
        (
            "The absolute path. Relative paths are not supported.",
            "bash",
        ),
    ] {
        let conversation = Conversation {
            messages: Vec::new(),
            tools: offers(description),
        };
        let steps = [Step::Read("a.txt".into())];
        let message = next_message(&steps, &conversation).unwrap();
        assert_eq!(message.tool_calls[0].name, name, "{description}");
    }
}

#[test]
fn a_run_that_ends_with_a_command_is_ended_with_it() {
    let call = next_message(
        &steps(),
        &Conversation {
            messages: Vec::new(),
            tools: react(),
        },
    );
    let done = Conversation {
        messages: vec![call.unwrap(); 4],
        tools: react(),
    };
    let last = next_message_ending(&steps(), Some("echo SUBMIT"), &done).unwrap();
    assert_eq!(
        last.tool_calls[0].arguments.to_string(),
        r#"{"command":"echo SUBMIT"}"#
    );
    let last = next_message_ending(&steps(), None, &done).unwrap();
    assert_eq!(
        (last.text_content().as_str(), last.tool_calls.len()),
        ("Done.", 0)
    );
}

#[test]
fn a_side_call_without_tools_is_answered_in_words() {
    let title = Conversation {
        messages: vec![Message::text(Role::User, "Write a title.")],
        tools: Vec::new(),
    };
    assert_eq!(
        next_message(&steps(), &title).unwrap().text_content(),
        "Done."
    );
}

#[test]
fn several_steps_make_one_turn_with_ids_of_their_own() {
    let conversation = Conversation {
        messages: Vec::new(),
        tools: react(),
    };
    let message = turn(&steps()[..3], 4, &conversation).unwrap();
    let calls: Vec<_> = message
        .tool_calls
        .iter()
        .map(|call| (call.id.as_str(), call.name.as_str()))
        .collect();
    assert_eq!(
        calls,
        [
            ("call_4", "bash"),
            ("call_4_1", "read"),
            ("call_4_2", "write")
        ]
    );
    assert!(matches!(
        turn(&steps(), 0, &conversation),
        Err(TeacherError::NoTool {
            wanted: "say something",
            ..
        })
    ));
}

#[test]
fn the_same_request_gets_the_same_reply() {
    let mut conversation = Conversation {
        messages: Vec::new(),
        tools: react(),
    };
    let first = next_message(&steps(), &conversation).unwrap();
    assert_eq!(first, next_message(&steps(), &conversation).unwrap());
    // Harnesses rewrite ids and may say something between the calls.
    conversation.messages.push(Message {
        tool_calls: vec![ToolCall {
            id: "rewritten".into(),
            ..first.tool_calls[0].clone()
        }],
        ..first
    });
    conversation.messages.push(Message::text(Role::Tool, "ok"));
    conversation
        .messages
        .push(Message::text(Role::Assistant, "words"));
    let second = next_message(&steps(), &conversation).unwrap();
    assert_eq!(second.tool_calls[0].name, "read");
}

#[test]
fn after_the_last_step_the_last_words_are_repeated() {
    let call = Message {
        tool_calls: vec![ToolCall {
            id: "a".into(),
            name: "bash".into(),
            arguments: json!({}),
        }],
        ..Message::text(Role::Assistant, "")
    };
    let conversation = Conversation {
        messages: vec![call; 9],
        tools: react(),
    };
    let message = next_message(&steps(), &conversation).unwrap();
    assert_eq!(message, Message::text(Role::Assistant, "Done."));
}

#[test]
fn without_a_fitting_tool_the_error_names_step_and_tools() {
    let conversation = Conversation {
        messages: Vec::new(),
        tools: vec![tool("search", json!({"query": text()}), &["query"])],
    };
    insta::assert_snapshot!(next_message(&steps(), &conversation).unwrap_err(), @r#"step 1 of the solution is to run a command: expected a shell tool with a parameter like `command`, or a tool for that; the harness offers [search]; enable one of them in the harness profile"#);
}

/// Runs shell forms of file steps for real and compares with what the step means.
#[test]
fn shell_forms_do_what_the_file_tools_would_do() {
    let contents = [
        "plain\n",
        "",
        "two\nlines\n",
        "it's 100% \\n \"q\" $x\n",
        "no newline",
    ];
    let swaps = [
        ("a", "b"),
        ("a.c", "x"),
        ("[a]*^$", "&\\1/"),
        ("it's", "'"),
        ("one\ntwo", "three\n"),
        ("$x", "`y`"),
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("in").join("it's.txt");
    let run = |command: &str| {
        let output = Command::new("bash").args(["-c", command]).output().unwrap();
        assert!(output.status.success(), "{command}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    for content in contents {
        run(&shell::write(&path, content));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
        assert_eq!(run(&shell::read(&path)), content);
    }
    for (old, new) in swaps {
        let content = format!("abc axc\n- {old} - {old}\n{old}\n");
        std::fs::write(&path, &content).unwrap();
        run(&shell::edit(&path, old, new));
        assert_eq!(
            std::fs::read_to_string(&path).unwrap(),
            content.replacen(old, new, 1),
            "{old:?} → {new:?}"
        );
    }
}

use super::*;
use crate::mcp::{serve::stdio, tools::Tools};

fn ask(tools: &mut Tools, method: &str, params: Value) -> Value {
    let message = json!({"jsonrpc": "2.0", "id": 7, "method": method, "params": params});
    answer("t", tools, message.to_string().as_bytes()).unwrap()
}

fn call(tools: &mut Tools, name: &str, arguments: Value) -> (String, bool) {
    let answer = ask(
        tools,
        "tools/call",
        json!({"name": name, "arguments": arguments}),
    );
    let result = &answer["result"];
    (
        result["content"][0]["text"].as_str().unwrap().to_owned(),
        result["isError"].as_bool().unwrap(),
    )
}

#[test]
fn versions_are_agreed_on() {
    let mut tools = Tools::default();
    let mut version = |wanted: &str| {
        ask(&mut tools, "initialize", json!({"protocolVersion": wanted}))["result"]
            ["protocolVersion"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    for known in VERSIONS {
        assert_eq!(version(known), known);
    }
    assert_eq!(version("2099-01-01"), VERSIONS[3]);
}

#[test]
fn nonsense_is_told_by_code() {
    let mut tools = Tools::default();
    let mut code = |text: &str| {
        answer("t", &mut tools, text.as_bytes()).map(|answer| answer["error"]["code"].clone())
    };
    let is = |code: i64| Some(Value::from(code));
    assert_eq!(code("{"), is(-32700));
    assert_eq!(code("[]"), is(-32600));
    assert_eq!(code("3"), is(-32600));
    assert_eq!(
        code(r#"{"jsonrpc": "1.0", "id": 1, "method": "ping"}"#),
        is(-32600)
    );
    assert_eq!(code(r#"{"jsonrpc": "2.0", "id": 1}"#), is(-32600));
    assert_eq!(
        code(r#"{"jsonrpc": "2.0", "id": 1, "method": "fly"}"#),
        is(-32601)
    );
    assert_eq!(
        code(r#"{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "fly"}}"#),
        is(-32602)
    );
    assert_eq!(
        code(
            r#"{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "shell", "arguments": 3}}"#
        ),
        is(-32602)
    );
    // Notifications and answers want none.
    assert_eq!(
        code(r#"{"jsonrpc": "2.0", "method": "notifications/initialized"}"#),
        None
    );
    assert_eq!(code(r#"{"jsonrpc": "2.0", "id": 1, "result": {}}"#), None);
    let batch =
        r#"[{"jsonrpc": "2.0", "method": "x"}, {"jsonrpc": "2.0", "id": "a", "method": "ping"}]"#;
    let answers = answer("t", &mut tools, batch.as_bytes()).unwrap();
    assert_eq!(
        answers,
        json!([{"jsonrpc": "2.0", "id": "a", "result": {}}])
    );
}

#[test]
fn every_tool_is_listed_and_works() {
    let mut tools = Tools::default();
    let listed = ask(&mut tools, "tools/list", json!({}));
    let names: Vec<&str> = listed["result"]["tools"]
        .as_array()
        .unwrap()
        .iter()
        .map(|tool| tool["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        [
            "read_file",
            "write_file",
            "edit_file",
            "list_files",
            "search_files",
            "shell",
            "todo_read",
            "todo_write"
        ]
    );
    let folder = std::env::temp_dir().join(format!("mcp-tools-{}", std::process::id()));
    let at = |name: &str| folder.join(name).display().to_string();
    let mut run = |name: &str, arguments: Value| call(&mut tools, name, arguments);
    let fine = |text: &str| (text.to_owned(), false);
    let content = "one\ntwo Three\nfour\n";
    assert_eq!(
        run(
            "write_file",
            json!({"path": at("a/b.txt"), "content": content})
        ),
        fine("ok")
    );
    assert_eq!(
        run(
            "read_file",
            json!({"path": at("a/b.txt"), "first_line": 2, "lines": 1})
        ),
        fine("two Three")
    );
    assert_eq!(
        run(
            "edit_file",
            json!({"path": at("a/b.txt"), "old": "one", "new": "1"})
        ),
        fine("ok")
    );
    assert_eq!(run("list_files", json!({"path": at("")})), fine("a/"));
    assert_eq!(
        run(
            "search_files",
            json!({"path": at(""), "text": "three", "ignore_case": true})
        ),
        fine(&format!("{}:2: two Three", at("a/b.txt")))
    );
    assert_eq!(
        run("search_files", json!({"path": at(""), "text": "three"})),
        fine("not found")
    );
    assert_eq!(
        run(
            "search_files",
            json!({"path": at(""), "text": "1", "name": ".md"})
        ),
        fine("not found")
    );
    assert_eq!(
        run("shell", json!({"command": "echo x; exit 3"})),
        fine("x\nexit code 3")
    );
    assert!(run("read_file", json!({"path": at("none")})).1);
    assert!(run("read_file", json!({})).1);
    assert_eq!(run("todo_read", json!({})), fine("nothing to do"));
    let items = json!({"items": [{"text": "look", "status": "done"}, {"text": "leap"}]});
    assert_eq!(run("todo_write", items), fine("[x] look\n[ ] leap"));
    assert_eq!(run("todo_read", json!({})), fine("[x] look\n[ ] leap"));
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_line_is_a_message() {
    let input = "{\"jsonrpc\": \"2.0\", \"id\": 1, \"method\": \"ping\"}\n\n{\"jsonrpc\": \"2.0\", \"method\": \"notifications/initialized\"}\n{\"jsonrpc\": \"2.0\", \"id\": 2, \"method\": \"ping\"}";
    let mut output = Vec::new();
    stdio(&mut Tools::default(), &mut input.as_bytes(), &mut output).unwrap();
    assert_eq!(
        String::from_utf8(output).unwrap(),
        "{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\n{\"jsonrpc\":\"2.0\",\"id\":2,\"result\":{}}\n"
    );
}

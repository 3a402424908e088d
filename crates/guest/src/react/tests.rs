//! The loop against a scripted server.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    thread,
};

use serde_json::{Value, json};

use super::*;

/// Answers each connection with the next response, then gives the requests it saw.
fn serve(responses: Vec<(u16, String)>) -> (String, thread::JoinHandle<Vec<Value>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let server = thread::spawn(move || {
        let mut requests = Vec::new();
        for (status, body) in responses {
            let (mut stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let mut length = 0;
            loop {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                if line == "\r\n" {
                    break;
                }
                if let Some(value) = line.strip_prefix("Content-Length: ") {
                    length = value.trim().parse().unwrap();
                }
            }
            let mut request = vec![0; length];
            reader.read_exact(&mut request).unwrap();
            requests.push(serde_json::from_slice(&request).unwrap());
            let head = format!(
                "HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n",
                body.len()
            );
            stream.write_all(head.as_bytes()).unwrap();
            stream.write_all(body.as_bytes()).unwrap();
        }
        requests
    });
    (url, server)
}

fn options(url: &str, more: &[&str]) -> Options {
    let arguments = ["--base-url", url, "--api-key", "k", "--model", "m"];
    Options::parse(arguments.iter().chain(more).map(|s| (*s).to_owned())).unwrap()
}

fn go(options: &Options) -> u8 {
    work(
        options,
        &Endpoint::parse(&options.base_url, "/chat/completions").unwrap(),
        Servers::default(),
    )
}

fn reply(message: &Value) -> String {
    json!({"choices": [{"message": message, "finish_reason": "stop"}]}).to_string()
}

fn calls(commands: &[(&str, Value)]) -> Value {
    let calls: Vec<Value> = commands
        .iter()
        .enumerate()
        .map(|(i, (name, arguments))| {
            json!({"id": format!("c{i}"), "type": "function",
                "function": {"name": name, "arguments": arguments.to_string()}})
        })
        .collect();
    json!({"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": calls})
}

#[test]
fn a_task_takes_turns_until_a_reply_without_calls() {
    let first = calls(&[("bash", json!({"command": "echo 7"})), ("nope", json!({}))]);
    let last = json!({"role": "assistant", "content": "Done."});
    let (url, server) = serve(vec![(200, reply(&first)), (200, reply(&last))]);
    assert_eq!(go(&options(&url, &["count things"])), DONE);
    let requests = server.join().unwrap();
    assert_eq!(requests[0]["messages"].as_array().unwrap().len(), 2);
    assert_eq!(requests[0]["messages"][1]["content"], "count things");
    assert!(requests[0].get("stream").is_none());
    let messages = requests[1]["messages"].as_array().unwrap();
    assert_eq!(messages[2], first, "the reply goes back exactly as it came");
    assert_eq!(
        messages[3],
        json!({"role": "tool", "tool_call_id": "c0", "content": "7"})
    );
    assert!(
        messages[4]["content"]
            .as_str()
            .unwrap()
            .contains("unknown tool")
    );
    assert_eq!(messages.len(), 5);
}

#[test]
fn the_system_message_is_short() {
    assert!(SYSTEM.split_whitespace().count() <= 60);
    assert!(SYSTEM.len() + tools::schemas().to_string().len() < 1300);
}

#[test]
fn streams_are_asked_for_and_joined() {
    let body = "data: {\"choices\":[{\"delta\":{\"content\":\"Do\"}}]}\n\n\
        data: {\"choices\":[{\"delta\":{\"content\":\"ne\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
    let (url, server) = serve(vec![(200, body.to_owned())]);
    assert_eq!(go(&options(&url, &["--stream", "x"])), DONE);
    assert_eq!(server.join().unwrap()[0]["stream"], true);
}

#[test]
fn every_end_has_its_code() {
    let call = reply(&calls(&[("bash", json!({"command": "true"}))]));
    let (url, _server) = serve(vec![(200, call.clone()), (200, call)]);
    assert_eq!(go(&options(&url, &["--turns-max", "2", "x"])), TURNS_OVER);

    let done = reply(&json!({"content": "ok"}));
    let (url, server) = serve(vec![
        (500, "{}".to_owned()),
        (429, "{}".to_owned()),
        (200, done),
    ]);
    assert_eq!(go(&options(&url, &["x"])), DONE);
    assert_eq!(server.join().unwrap().len(), 3);

    let (url, server) = serve(vec![(401, "{\"error\": 1}".to_owned())]);
    assert_eq!(go(&options(&url, &["x"])), REFUSED);
    assert_eq!(server.join().unwrap().len(), 1);

    let closed = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    assert_eq!(
        go(&options(&format!("http://{closed}/v1"), &["x"])),
        SERVER_DOWN
    );
}

#[test]
fn bad_usage_is_named() {
    let parse =
        |arguments: &[&str]| Options::parse(arguments.iter().map(|s| (*s).to_owned())).unwrap_err();
    assert!(parse(&["x"]).contains("--base-url"));
    assert!(parse(&["--model"]).contains("a value"));
    assert!(parse(&["--turns-max", "many"]).contains("a number"));
    assert!(parse(&["--fly", "x"]).contains("--fly"));
    assert!(parse(&["a", "b"]).contains("more than one"));
}

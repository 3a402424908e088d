//! The whole way of a harness: our `react` in a sandbox, through the forwarder, to a gateway.

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
};

use sandbox::{Exit, GUEST_PATH, Provider};

use crate::support::{command, provider, say, spec};

/// Reads one request; answers it.
fn answer(stream: UnixStream, body: &str) -> String {
    let mut reader = BufReader::new(stream);
    let (mut head, mut length) = (String::new(), 0);
    while !head.ends_with("\r\n\r\n") {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if let Some(value) = line.strip_prefix("Content-Length: ") {
            length = value.trim().parse().unwrap();
        }
        head += &line;
    }
    let mut request = vec![0; length];
    reader.read_exact(&mut request).unwrap();
    let response = format!(
        "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    reader.get_mut().write_all(response.as_bytes()).unwrap();
    head + &String::from_utf8(request).unwrap()
}

const CALL: &str = r#"{"choices":[{"message":{"role":"assistant","content":null,"tool_calls":[
{"id":"1","type":"function","function":{"name":"bash","arguments":"{\"command\":\"pwd; echo made > file\"}"}}]}}]}"#;
const DONE: &str = r#"{"choices":[{"message":{"role":"assistant","content":"It is made."}}]}"#;

#[tokio::test]
async fn a_task_is_done_through_the_gateway() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("gateway.sock");
    let gateway = UnixListener::bind(&socket).unwrap();
    let server = std::thread::spawn(move || {
        [CALL, DONE].map(|body| answer(gateway.accept().unwrap().0, body))
    });
    let mut connected = spec("react");
    connected.gateway_socket = Some(socket);
    connected.gateway_port = 8080;
    let sandbox = provider().await.create(connected).await.unwrap();
    let argv = [
        GUEST_PATH,
        "react",
        "--base-url",
        "http://127.0.0.1:8080/r/key/v1",
        "--api-key",
        "key",
        "--model",
        "policy",
        "--",
        "make the file",
    ];
    let output = sandbox.exec(command(&argv)).await.unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.exit, Exit::Code(0), "{errors}");
    assert_eq!(output.stdout, b"It is made.\n");
    assert_eq!(say(&*sandbox, "cat file").await, "made");
    let [first, second] = server.join().unwrap();
    assert!(
        first.starts_with("POST /r/key/v1/chat/completions HTTP/1.1\r\n"),
        "{first}"
    );
    assert!(first.contains("Authorization: Bearer key\r\n") && first.contains("make the file"));
    assert!(second.contains(r#""content":"/workspace""#), "{second}");
}

//! Ways out that a task was given: forwarded ports, and the proxy with its list and its log.

use std::{
    io::{Read, Write},
    net::TcpListener,
};

use sandbox::{Allowed, Decision, EgressProxy, EgressRecord, Exit, GUEST_PATH, Provider, Sandbox};

use crate::support::{command, provider, spec};

/// A server on this machine that says what it heard.
fn server() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                let count = stream.read(&mut buffer).unwrap_or(0);
                let heard = String::from_utf8_lossy(&buffer[..count]).replace("\r\n", "|");
                let body = format!("heard {heard}");
                let _ = write!(
                    stream,
                    "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
                    body.len()
                );
            });
        }
    });
    port
}

async fn ask(sandbox: &dyn Sandbox, request: &str) -> String {
    let mut exec = command(&[GUEST_PATH, "reach", "tcp", "127.0.0.1:3128", "8000"]);
    exec.stdin = request.as_bytes().to_vec();
    let output = sandbox.exec(exec).await.unwrap();
    assert_eq!(output.exit, Exit::Code(0), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proxy_lets_through_what_the_list_names_and_writes_down_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, log) = (
        folder.path().join("egress.sock"),
        folder.path().join("egress.jsonl"),
    );
    let port = server();
    let allowed = Allowed {
        hosts: vec![format!("127.0.0.1:{port}"), "*.invalid".to_owned()],
        private_addresses: true,
    };
    let proxy = EgressProxy::start(&socket, allowed, &log).unwrap();
    let provider = provider().await;
    let mut with = spec("egress");
    with.forwards = vec![(3128, proxy.socket().to_owned())];
    let sandbox = provider.create(with).await.unwrap();

    // A request with a full address: sent on, with the host that was checked and no proxy headers.
    let heard = ask(&*sandbox, &format!(
        "GET http://127.0.0.1:{port}/path?x=1 HTTP/1.1\r\nHost: elsewhere.example\r\nProxy-Authorization: secret\r\nConnection: close\r\n\r\n"
    )).await;
    assert!(
        heard.starts_with("HTTP/1.1 200") && heard.contains("heard GET /path?x=1 HTTP/1.1|"),
        "{heard}"
    );
    assert!(
        heard
            .to_lowercase()
            .contains(&format!("host: 127.0.0.1:{port}|")),
        "{heard}"
    );
    assert!(
        !heard.contains("secret") && !heard.contains("elsewhere"),
        "{heard}"
    );
    // A tunnel.
    let heard = ask(
        &*sandbox,
        &format!("CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: x\r\n\r\nhello"),
    )
    .await;
    assert!(
        heard.starts_with("HTTP/1.1 200") && heard.ends_with("heard hello"),
        "{heard}"
    );
    // What is not on the list, does not resolve, or is no request to a proxy.
    for (request, status) in [
        ("CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n", "403"),
        ("CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: x\r\n\r\n", "403"),
        (
            "GET http://169.254.169.254/latest/meta-data HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            "403",
        ),
        (
            "CONNECT name.invalid:443 HTTP/1.1\r\nHost: x\r\n\r\n",
            "502",
        ),
        (
            "GET /etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            "400",
        ),
    ] {
        let heard = ask(&*sandbox, request).await;
        assert!(
            heard.starts_with(&format!("HTTP/1.1 {status}")),
            "{request}: {heard}"
        );
    }
    sandbox.destroy().await;
    proxy.close().await;
    assert!(!socket.exists());

    let records: Vec<EgressRecord> = std::fs::read_to_string(&log)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let seen: Vec<_> = records
        .iter()
        .map(|r| (r.method.as_str(), r.host.as_str(), r.port, r.decision))
        .collect();
    // A tunnel is written down at its end, which may be after the next request.
    let mut expected = vec![
        ("GET", "127.0.0.1", port, Decision::Allowed),
        ("CONNECT", "127.0.0.1", port, Decision::Allowed),
        ("CONNECT", "example.org", 443, Decision::Denied),
        ("CONNECT", "127.0.0.1", 22, Decision::Denied),
        ("GET", "169.254.169.254", 80, Decision::Denied),
        ("CONNECT", "name.invalid", 443, Decision::Failed),
    ];
    let mut sorted = seen.clone();
    let key = |r: &(&str, &str, u16, Decision)| format!("{r:?}");
    sorted.sort_by_key(key);
    expected.sort_by_key(key);
    assert_eq!(sorted, expected);
    let tunnel = records
        .iter()
        .find(|r| r.method == "CONNECT" && r.decision == Decision::Allowed)
        .unwrap();
    assert_eq!(tunnel.up_bytes, 5, "{tunnel:?}");
    assert!(tunnel.down_bytes > 5, "{tunnel:?}");
}

#[tokio::test]
async fn a_name_on_the_list_cannot_be_pointed_at_this_machine() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, log) = (
        folder.path().join("egress.sock"),
        folder.path().join("egress.jsonl"),
    );
    let port = server();
    let allowed = Allowed {
        hosts: vec![format!("localhost:{port}")],
        private_addresses: false,
    };
    let proxy = EgressProxy::start(&socket, allowed, &log).unwrap();
    let provider = provider().await;
    let mut with = spec("rebinding");
    with.forwards = vec![(3128, proxy.socket().to_owned())];
    let sandbox = provider.create(with).await.unwrap();
    let heard = ask(
        &*sandbox,
        &format!("CONNECT localhost:{port} HTTP/1.1\r\nHost: x\r\n\r\n"),
    )
    .await;
    assert!(
        heard.starts_with("HTTP/1.1 403") && heard.contains("public internet"),
        "{heard}"
    );
}

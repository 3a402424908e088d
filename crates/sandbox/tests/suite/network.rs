//! The only way out is the gateway.

use std::{
    io::{Read, Write},
    net::TcpListener,
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
};

use sandbox::{Exit, GUEST_PATH, Output, Sandbox, SandboxError, Spec};

use super::{World, cases, command, run, say};

/// A gateway whose every connection is served by a function.
struct Gateway {
    _folder: tempfile::TempDir,
    socket: PathBuf,
}

impl Gateway {
    fn start(serve: fn(UnixStream)) -> Self {
        let (folder, _) = super::private_folder();
        let socket = folder.path().join("gateway.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || serve(stream));
            }
        });
        Self {
            _folder: folder,
            socket,
        }
    }

    fn spec(&self, world: &World) -> Spec {
        let mut spec = world.spec();
        spec.gateway_socket = Some(self.socket.clone());
        spec.gateway_port = 8080;
        spec
    }
}

/// Sends back what comes.
fn echo(mut stream: UnixStream) {
    let mut reader = stream.try_clone().unwrap();
    let _ = std::io::copy(&mut reader, &mut stream);
    let _ = stream.shutdown(std::net::Shutdown::Write);
}

/// Reads all, then answers how much it was.
fn measure(mut stream: UnixStream) {
    let mut all = Vec::new();
    if stream.read_to_end(&mut all).is_ok() {
        let _ = write!(stream, "{}", all.len());
    }
}

/// Says a lot, whatever it hears.
fn flood(mut stream: UnixStream) {
    let _ = stream.write_all(&vec![b'z'; 3 << 20]);
}

async fn reach(sandbox: &dyn Sandbox, protocol: &str, address: &str, stdin: &[u8]) -> Output {
    let mut exec = command(&[GUEST_PATH, "reach", protocol, address, "3000"]);
    exec.stdin = stdin.to_vec();
    exec.output_bytes_max = 8 << 20;
    sandbox.exec(exec).await.expect("the guest runs")
}

cases! {
    async fn the_gateway_answers(world) {
        let gateway = Gateway::start(echo);
        let sandbox = world.make(gateway.spec(world)).await;
        for text in [&b"ping"[..], b"", b"again"] {
            let output = reach(&*sandbox, "tcp", "127.0.0.1:8080", text).await;
            assert_eq!((output.exit, output.stdout.as_slice()), (Exit::Code(0), text), "{output:?}");
        }
    }

    async fn large_bodies_both_ways(world) {
        let gateway = Gateway::start(echo);
        let sandbox = world.make(gateway.spec(world)).await;
        let body: Vec<u8> = (0..3_000_000_u32).map(|i| (i * 31 % 253) as u8).collect();
        let output = reach(&*sandbox, "tcp", "127.0.0.1:8080", &body).await;
        assert!(output.stdout == body, "{} bytes, {:?}", output.stdout.len(), output.exit);
    }

    async fn an_end_of_sending_is_passed_on(world) {
        let gateway = Gateway::start(measure);
        let sandbox = world.make(gateway.spec(world)).await;
        let output = reach(&*sandbox, "tcp", "127.0.0.1:8080", &[7; 100_000]).await;
        assert_eq!(String::from_utf8_lossy(&output.stdout), "100000");
    }

    async fn one_that_does_not_read_holds_up_nobody(world) {
        let gateway = Gateway::start(flood);
        let sandbox = world.make(gateway.spec(world)).await;
        // It is connected, and stopped: what comes for it waits.
        let script = format!(
            "{GUEST_PATH} reach tcp 127.0.0.1:8080 30000 < /dev/null > /dev/null & p=$!; kill -STOP $p; \
             {GUEST_PATH} reach tcp 127.0.0.1:8080 30000 < /dev/null | wc -c | tr -d ' '; kill -9 $p"
        );
        assert_eq!(say(&*sandbox, &script).await, (3 << 20).to_string());
    }

    async fn twenty_connections_at_once(world) {
        let gateway = Gateway::start(echo);
        let sandbox = world.make(gateway.spec(world)).await;
        let script = format!(
            "i=0; while [ $i -lt 20 ]; do printf pong | {GUEST_PATH} reach tcp 127.0.0.1:8080 20000 & i=$((i+1)); done; wait"
        );
        assert_eq!(say(&*sandbox, &script).await, "pong".repeat(20));
    }

    async fn a_gateway_that_is_gone_closes_the_connection(world) {
        let gateway = Gateway::start(echo);
        let sandbox = world.make(gateway.spec(world)).await;
        std::fs::remove_file(&gateway.socket).unwrap();
        if world.mounts {
            // Where the socket itself was put into the sandbox it lives on; that is fine too.
            let _ = reach(&*sandbox, "tcp", "127.0.0.1:8080", b"x").await;
        }
        assert_eq!(say(&*sandbox, "echo alive").await, "alive");
    }

    async fn forwarded_ports_lead_to_their_own_sockets(world) {
        let (gateway, other) = (Gateway::start(echo), Gateway::start(measure));
        let mut spec = gateway.spec(world);
        spec.forwards = vec![(9001, other.socket.clone())];
        let sandbox = world.make(spec.clone()).await;
        let output = reach(&*sandbox, "tcp", "127.0.0.1:8080", b"four").await;
        assert_eq!(output.stdout, b"four");
        let output = reach(&*sandbox, "tcp", "127.0.0.1:9001", b"four").await;
        assert_eq!(output.stdout, b"4");
        spec.forwards.push((8080, other.socket.clone()));
        let result = world.try_make(spec).await;
        assert!(matches!(result, Err(SandboxError::Refused { .. })), "a port twice: {result:?}");
    }

    async fn without_a_gateway_there_is_no_port(world) {
        let sandbox = world.sandbox().await;
        let output = reach(&*sandbox, "tcp", "127.0.0.1:8080", b"x").await;
        assert_ne!(output.exit, Exit::Code(0));
        assert!(String::from_utf8_lossy(&output.stderr).contains("refused"), "{output:?}");
    }

    async fn ports_of_the_host_cannot_be_reached(world) {
        let host = TcpListener::bind("0.0.0.0:0").unwrap();
        let port = host.local_addr().unwrap().port();
        let gateway = Gateway::start(echo);
        let sandbox = world.make(gateway.spec(world)).await;
        let output = reach(&*sandbox, "tcp", &format!("127.0.0.1:{port}"), b"x").await;
        assert!(String::from_utf8_lossy(&output.stderr).contains("refused"), "{output:?}");
    }

    async fn nothing_else_can_be_reached(world) {
        let sandbox = world.sandbox().await;
        for (protocol, address) in [
            ("tcp", "192.0.2.1:80"), ("tcp", "1.1.1.1:443"), ("tcp", "169.254.169.254:80"),
            ("udp", "1.1.1.1:53"), ("udp", "127.0.0.53:53"), ("tcp", "[2001:db8::1]:80"),
        ] {
            let output = reach(&*sandbox, protocol, address, b"x").await;
            assert_ne!(output.exit, Exit::Code(0), "{protocol} {address}");
        }
    }

    async fn there_is_no_interface_but_loopback(world) {
        if world.no_interface {
            let sandbox = world.sandbox().await;
            let names = say(&*sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '").await;
            let others: Vec<_> = names.lines().filter(|n| *n != "lo").collect();
            // Kernels with tunnels built in have their (dead) devices everywhere.
            assert!(others.iter().all(|n| n.contains("tunl") || n.contains("gre") || n.contains("sit") || n.contains("vti") || n.contains("erspan")), "{names}");
        }
    }

    async fn names_cannot_be_resolved(world) {
        let sandbox = world.sandbox().await;
        let output = run(&*sandbox, "getent hosts example.com || nslookup example.com 127.0.0.1").await;
        assert_ne!(output.exit, Exit::Code(0), "{output:?}");
    }
}

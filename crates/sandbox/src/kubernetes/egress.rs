//! Whether the network policy holds. A policy that no plugin enforces is accepted by the API
//! server all the same, so the only proof is a try from inside.

use std::{collections::BTreeMap, time::Duration};

use guest::protocol::GUEST_PATH;

use crate::{Exec, Exit, Sandbox, SandboxError};

/// Always tried: two resolvers of the internet, cloud metadata, the usual address of the API
/// server and of the cluster's own resolver.
const HOSTS: [(&str, &str); 5] = [
    ("tcp", "1.1.1.1:443"),
    ("udp", "8.8.8.8:53"),
    ("tcp", "169.254.169.254:80"),
    ("tcp", "10.96.0.1:443"),
    ("udp", "10.96.0.10:53"),
];
/// For each try.
const TRY_MS: u64 = 2000;
/// A question for the address of example.com: resolvers answer nothing else.
const QUESTION: &[u8] = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x07example\x03com\x00\x00\x01\x00\x01";

/// What a sandbox can reach that it should not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Egress {
    /// Nothing of what was tried.
    Blocked,
    /// These answered: the policy is absent or not enforced.
    Open(Vec<String>),
}

pub(super) async fn probe(
    sandbox: &dyn Sandbox,
    hosts: &[String],
) -> Result<Egress, SandboxError> {
    let mut open = Vec::new();
    let more = hosts.iter().map(|host| ("tcp", host.as_str()));
    for (protocol, host) in HOSTS.into_iter().chain(more) {
        let exec = Exec {
            argv: [GUEST_PATH, "reach", protocol, host, &TRY_MS.to_string()]
                .map(str::to_owned)
                .to_vec(),
            cwd: None,
            env: BTreeMap::new(),
            stdin: QUESTION.to_vec(),
            timeout: Duration::from_millis(4 * TRY_MS),
            output_bytes_max: 1 << 10,
            end_background: true,
        };
        let output = sandbox.exec(exec).await?;
        // A server that accepts and then says nothing was reached as well.
        let reached = output.exit == Exit::Code(0)
            || String::from_utf8_lossy(&output.stderr).contains("reset by peer");
        if reached {
            open.push(format!("{protocol} {host}"));
        }
    }
    Ok(if open.is_empty() {
        Egress::Blocked
    } else {
        Egress::Open(open)
    })
}

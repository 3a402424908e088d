//! `guest mcp`: our tools on standard input and output, or on HTTP.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    process::ExitCode,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use super::{Toolbox, VERSIONS, answer, tools::Tools};
use crate::http::{HttpError, header, read_request, write_response};

const USAGE: &str = "usage: guest mcp [--http PORT]\n\
Tools for files, shell, search and a list of things to do, in the current folder: by the Model \
Context Protocol on standard input and output, or as streamable HTTP at http://127.0.0.1:PORT/mcp.";
const NAME: &str = "espalier-tools";
/// The largest message taken.
const MESSAGE_BYTES_MAX: u64 = 16 << 20;
/// Connections at a time; more are closed.
const CONNECTIONS_MAX: usize = 32;
/// For a request to come in, and for a response to be taken.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(30);
/// Where HTTP serves.
const PATH: &str = "/mcp";

/// Serves until standard input ends, or for good.
#[must_use]
pub fn run(mut arguments: impl Iterator<Item = String>) -> ExitCode {
    let served = match (arguments.next().as_deref(), arguments.next()) {
        (None, _) => stdio(&mut Tools::default(), &mut io::stdin().lock(), io::stdout()),
        (Some("--http"), Some(port)) => match port.parse() {
            Ok(port) => http(port),
            Err(_) => Err(io::Error::other(format!(
                "--http {port}: a port is expected"
            ))),
        },
        _ => Err(io::Error::other(USAGE)),
    };
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "mcp: {error}");
            ExitCode::from(2)
        }
    }
}

/// One message per line.
pub(super) fn stdio(
    toolbox: &mut dyn Toolbox,
    from: &mut impl BufRead,
    mut to: impl Write,
) -> io::Result<()> {
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = from
            .by_ref()
            .take(MESSAGE_BYTES_MAX)
            .read_until(b'\n', &mut line)?;
        if read == 0 {
            return Ok(());
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        if read as u64 == MESSAGE_BYTES_MAX {
            let text = format!("a message of more than {MESSAGE_BYTES_MAX} bytes");
            return Err(io::Error::other(text));
        }
        if let Some(answer) = answer(NAME, toolbox, &line) {
            writeln!(to, "{answer}")?;
            to.flush()?;
        }
    }
}

fn http(port: u16) -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
    let tools = Mutex::new(Tools::default());
    let open = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for stream in listener.incoming() {
            let Ok(stream) = stream else { continue };
            if open.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS_MAX {
                open.fetch_sub(1, Ordering::Relaxed);
                let _ = writeln!(
                    io::stderr(),
                    "mcp: a connection beyond {CONNECTIONS_MAX} was closed"
                );
                continue;
            }
            let (tools, open) = (&tools, &open);
            scope.spawn(move || {
                if let Err(HttpError(reason)) = connection(tools, &stream) {
                    let _ = writeln!(io::stderr(), "mcp: {reason}");
                }
                open.fetch_sub(1, Ordering::Relaxed);
            });
        }
    });
    Ok(())
}

fn connection(tools: &Mutex<Tools>, stream: &TcpStream) -> Result<(), HttpError> {
    stream.set_read_timeout(Some(CONNECTION_TIMEOUT))?;
    stream.set_write_timeout(Some(CONNECTION_TIMEOUT))?;
    let request = read_request(&mut BufReader::new(stream))?;
    let mut to = stream;
    let mut say = |status: u16, text: &str| {
        write_response(
            &mut to,
            status,
            &[("Content-Type", "text/plain")],
            text.as_bytes(),
        )
    };
    // A page of a browser may not use us, whatever name it finds us under.
    let foreign = header(&request.headers, "origin").is_some_and(|origin| {
        !["http://127.0.0.1", "http://localhost"].iter().any(|ours| {
            let rest = origin.strip_prefix(ours);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
        })
    });
    let version = header(&request.headers, "mcp-protocol-version");
    if foreign {
        say(403, "this origin may not use it\n")?;
    } else if request.path.split('?').next() != Some(PATH) {
        say(404, "the tools are at /mcp\n")?;
    } else if request.method != "POST" {
        // No stream of the server's own, and no session to end.
        say(405, "POST is expected\n")?;
    } else if version.is_some_and(|version| !VERSIONS.contains(&version)) {
        say(400, &format!("the versions are {}\n", VERSIONS.join(", ")))?;
    } else {
        let answer = {
            let mut tools = tools.lock().unwrap_or_else(PoisonError::into_inner);
            answer(NAME, &mut *tools, &request.body)
        };
        let json = [("Content-Type", "application/json")];
        match answer {
            Some(answer) => write_response(&mut to, 200, &json, answer.to_string().as_bytes())?,
            None => write_response(&mut to, 202, &[], b"")?,
        }
    }
    Ok(())
}

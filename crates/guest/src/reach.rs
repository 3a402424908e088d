//! `guest reach tcp|udp ADDRESS TIMEOUT_MS`: tries to get out of the sandbox. What comes on
//! standard input is sent, what comes back is printed. With it a start-up probe finds out whether
//! a network policy holds, in any image.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream, UdpSocket},
    process::ExitCode,
    time::Duration,
};

const USAGE: &str = "usage: guest reach tcp|udp ADDRESS:PORT TIMEOUT_MS";

/// Tries; the exit code says whether anything was reached.
pub fn run(arguments: impl Iterator<Item = String>) -> ExitCode {
    match reach(&arguments.collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    }
}

fn reach(arguments: &[String]) -> io::Result<()> {
    let [protocol, address, timeout] = arguments else {
        return Err(io::Error::other(USAGE));
    };
    // Addresses, not names: a static program cannot resolve those.
    let address: SocketAddr = address.parse().map_err(io::Error::other)?;
    let timeout = timeout.parse().map_err(io::Error::other)?;
    let timeout = Duration::from_millis(timeout);
    let mut sent = Vec::new();
    io::stdin().read_to_end(&mut sent)?;
    match protocol.as_str() {
        "tcp" => {
            let stream = TcpStream::connect_timeout(&address, timeout)?;
            stream.set_read_timeout(Some(timeout))?;
            stream.set_write_timeout(Some(timeout))?;
            let mut writer = stream.try_clone()?;
            // Both directions at once: an echo would otherwise fill both pipes.
            let writing = std::thread::spawn(move || -> io::Result<()> {
                writer.write_all(&sent)?;
                writer.shutdown(Shutdown::Write)
            });
            io::copy(&mut &stream, &mut io::stdout())?;
            writing
                .join()
                .unwrap_or_else(|_| Err(io::Error::other("the writing thread ended")))
        }
        "udp" => {
            let socket = UdpSocket::bind(("0.0.0.0", 0))?;
            socket.set_read_timeout(Some(timeout))?;
            socket.send_to(&sent, address)?;
            let mut buffer = [0; 4096];
            let (count, _) = socket.recv_from(&mut buffer)?;
            io::stdout().write_all(buffer.get(..count).unwrap_or_default())
        }
        _ => Err(io::Error::other(USAGE)),
    }
}

//! `guest warden | init | relay | install | pack | unpack | list | reach | probe | react | mcp | tools |
//! fetch …`: see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    match arguments.next().as_deref() {
        Some("warden") => guest::warden::run(),
        Some("init") => guest::container::run(arguments),
        Some("install") => guest::install::run(arguments),
        Some("reach") => guest::reach::run(arguments),
        Some("relay") => guest::container::relay(arguments),
        Some(command @ ("pack" | "unpack" | "list")) => guest::archive::run(command, arguments),
        Some("probe") => guest::probe::run(),
        Some("mcp") => guest::mcp::run(arguments),
        Some("tools") => guest::mcp::check(arguments),
        Some("fetch") => guest::mcp::fetch(arguments),
        Some("react") => guest::react::run(arguments),
        _ => {
            use std::io::Write;
            let _ = writeln!(
                std::io::stderr(),
                "usage: guest warden | init | relay | install | pack | unpack | list | reach | probe | react | mcp | tools | fetch"
            );
            ExitCode::from(2)
        }
    }
}

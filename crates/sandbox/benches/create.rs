//! What a sandbox costs: `cargo bench -p sandbox --bench create [-- N]`.
//!
//! Prints, for N sandboxes one after the other, then for N alive at the same time: wall-clock
//! milliseconds and CPU milliseconds per create + destroy. CPU is that of this process, of the
//! warden and of the sandboxes (all of them children of children, whose time the kernel adds up
//! when they are reaped; the warden's is read from /proc). The kernel's own deferred work, such
//! as taking network namespaces down, belongs to no process and is shown as the difference in
//! /proc/stat, which counts the whole machine and only means something on an idle one.

use std::{
    io::Write,
    time::{Duration, Instant},
};

use sandbox::{Exec, LocalConfig, LocalProvider, Provider, SandboxError, Spec};

fn spec(number: usize) -> Spec {
    Spec {
        name: format!("bench-{number}"),
        limits: sandbox::Limits::default(),
        ..Spec::default()
    }
}

/// CPU milliseconds of a process and its reaped children.
fn cpu_ms(pid: &str) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks: u64 = fields
        .split_whitespace()
        .skip(11)
        .take(4)
        .filter_map(|f| f.parse::<u64>().ok())
        .sum();
    ticks as f64 * 10.0
}

/// Busy CPU milliseconds of the machine.
fn machine_ms() -> f64 {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let numbers = stat
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1);
    let ticks: Vec<u64> = numbers.filter_map(|n| n.parse().ok()).collect();
    let busy: u64 = ticks
        .iter()
        .enumerate()
        .filter(|(i, _)| ![3, 4].contains(i))
        .map(|(_, t)| t)
        .sum();
    busy as f64 * 10.0
}

fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

struct Meter {
    warden: String,
    wall: Instant,
    cpu: f64,
    machine: f64,
}

impl Meter {
    fn start(warden: String) -> Self {
        let cpu = cpu_ms("self") + cpu_ms(&warden);
        Self {
            warden,
            wall: Instant::now(),
            cpu,
            machine: machine_ms(),
        }
    }

    fn stop(&self, what: &str, count: usize) {
        let each = |ms: f64| ms / count as f64;
        let cpu = cpu_ms("self") + cpu_ms(&self.warden) - self.cpu;
        say(&format!(
            "{what}: {:.2} ms wall, {:.2} ms CPU each ({:.2} ms of the whole machine), {count} times",
            each(self.wall.elapsed().as_secs_f64() * 1e3),
            each(cpu),
            each(machine_ms() - self.machine),
        ));
    }
}

fn meminfo_kib(key: &str) -> f64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text
        .lines()
        .find(|line| line.starts_with(key))
        .unwrap_or_default();
    line.split_whitespace()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .unwrap_or(0.0)
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), SandboxError> {
    let count = std::env::args()
        .skip(1)
        .find_map(|a| a.parse().ok())
        .unwrap_or(200);
    let provider = LocalProvider::start(LocalConfig::default()).await?;
    let warden = provider
        .warden_process_id()
        .map(|pid| pid.to_string())
        .unwrap_or_default();
    say(&format!("{:?}", provider.capabilities()));

    let mut walls = Vec::new();
    let meter = Meter::start(warden.clone());
    for number in 0..count {
        let begun = Instant::now();
        let sandbox = provider.create(spec(number)).await?;
        sandbox.destroy().await;
        walls.push(begun.elapsed());
    }
    meter.stop("create + destroy, one at a time", count);
    walls.sort();
    let at = |share: usize| {
        walls
            .get(walls.len() * share / 100)
            .copied()
            .unwrap_or_default()
    };
    say(&format!(
        "  fastest {:?}, median {:?}, 95 % {:?}",
        at(0),
        at(50),
        at(95)
    ));

    let free = meminfo_kib("MemAvailable");
    let meter = Meter::start(warden.clone());
    let mut all = Vec::new();
    for number in 0..count {
        all.push(provider.create(spec(number)).await?);
    }
    meter.stop("create, all kept", count);
    say(&format!(
        "  {:.0} KiB of available memory each",
        (free - meminfo_kib("MemAvailable")) / count as f64
    ));
    if let Some(sandbox) = all.first() {
        let exec = || Exec {
            argv: vec!["true".to_owned()],
            cwd: None,
            env: [].into(),
            stdin: Vec::new(),
            timeout: Duration::from_secs(10),
            output_bytes_max: 1 << 10,
            end_background: false,
            user: None,
        };
        let meter = Meter::start(warden.clone());
        for _ in 0..count {
            sandbox.exec(exec()).await?;
        }
        // Its processes are reaped inside, so their CPU is only in the machine's column.
        meter.stop("exec of `true`", count);
    }
    let meter = Meter::start(warden);
    let ends = all.into_iter().map(|sandbox| sandbox.destroy());
    futures::future::join_all(ends).await;
    meter.stop("destroy, all at once", count);
    provider.close().await;
    Ok(())
}

//! Progress for a person: a bar on a terminal, plain lines elsewhere, nothing with `--json`.

use std::{
    io::IsTerminal,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rollout::Event;

/// Plain lines come at most this often.
const PLAIN_EVERY: Duration = Duration::from_secs(10);

/// Where progress goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Bar,
    Plain,
    Silent,
}

/// The display of a command.
#[derive(Debug)]
pub(crate) struct Display {
    mode: Mode,
}

impl Display {
    pub(crate) fn new(json: bool) -> Self {
        let mode = match (json, std::io::stderr().is_terminal()) {
            (true, _) => Mode::Silent,
            (false, true) => Mode::Bar,
            (false, false) => Mode::Plain,
        };
        Self { mode }
    }

    /// A line on stdout that stays. Not printed with `--json`.
    #[expect(
        clippy::print_stdout,
        reason = "this is where the command line speaks to a person"
    )]
    pub(crate) fn line(&self, text: &str) {
        if self.mode != Mode::Silent {
            println!("{text}");
        }
    }

    /// The one JSON document of a command.
    #[expect(
        clippy::print_stdout,
        reason = "this is where the command line speaks to a machine"
    )]
    pub(crate) fn json(&self, value: &serde_json::Value) {
        if self.mode == Mode::Silent {
            println!("{value}");
        }
    }

    /// Progress of `total` rollouts.
    pub(crate) fn rollouts(&self, title: &str, total: usize) -> Rollouts {
        self.steps(title, total as u64, "rollouts")
    }

    /// Progress of `total` things.
    pub(crate) fn steps(&self, title: &str, total: u64, unit: &str) -> Rollouts {
        let bar = ProgressBar::with_draw_target(
            Some(total),
            if self.mode == Mode::Bar {
                ProgressDrawTarget::stderr()
            } else {
                ProgressDrawTarget::hidden()
            },
        );
        let template = "{prefix:20} {bar:30} {pos}/{len} {msg} {per_sec} eta {eta}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_prefix(title.to_owned());
        Rollouts {
            mode: self.mode,
            bar,
            title: title.to_owned(),
            unit: unit.to_owned(),
            started: Instant::now(),
            last_line: Mutex::new(Instant::now()),
            passed: AtomicU64::new(0),
            scored: AtomicU64::new(0),
            lost: AtomicU64::new(0),
        }
    }
}

/// Progress of one batch.
#[derive(Debug)]
pub(crate) struct Rollouts {
    mode: Mode,
    bar: ProgressBar,
    title: String,
    unit: String,
    started: Instant,
    last_line: Mutex<Instant>,
    passed: AtomicU64,
    scored: AtomicU64,
    lost: AtomicU64,
}

impl Rollouts {
    /// Takes an event of the runner.
    pub(crate) fn event(&self, event: &Event) {
        let Event::Finished {
            reward, superseded, ..
        } = event
        else {
            return;
        };
        if *superseded {
            return;
        }
        match reward {
            Some(reward) => {
                self.scored.fetch_add(1, Relaxed);
                self.passed.fetch_add(u64::from(*reward >= 1.0), Relaxed);
            }
            None => {
                self.lost.fetch_add(1, Relaxed);
            }
        }
        let (passed, scored, lost) = (
            self.passed.load(Relaxed),
            self.scored.load(Relaxed),
            self.lost.load(Relaxed),
        );
        let rate = if scored == 0 {
            0.0
        } else {
            100.0 * passed as f64 / scored as f64
        };
        let lost = if lost == 0 {
            String::new()
        } else {
            format!(" lost {lost}")
        };
        self.advance(&format!("pass {rate:.0}%{lost}"));
    }

    /// One more is done.
    pub(crate) fn advance(&self, message: &str) {
        self.bar.set_message(message.to_owned());
        self.bar.inc(1);
        if self.mode != Mode::Plain {
            return;
        }
        let mut last = self
            .last_line
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if last.elapsed() >= PLAIN_EVERY {
            *last = Instant::now();
            self.plain(message);
        }
    }

    #[expect(
        clippy::print_stderr,
        reason = "this is where the command line speaks to a person"
    )]
    fn plain(&self, message: &str) {
        let (done, total) = (self.bar.position(), self.bar.length().unwrap_or(0));
        let per_s = done as f64 / self.started.elapsed().as_secs_f64().max(1e-9);
        let eta = (total.saturating_sub(done)) as f64 / per_s.max(1e-9);
        eprintln!(
            "{}: {done}/{total} {} {message}, {per_s:.1}/s, eta {eta:.0}s",
            self.title, self.unit
        );
    }

    /// Everything is done.
    pub(crate) fn done(&self) {
        self.bar.finish_and_clear();
    }
}

/// Seconds as a person reads them.
pub(crate) fn seconds(seconds: f64) -> String {
    if seconds < 60.0 {
        format!("{seconds:.1}s")
    } else {
        format!("{}m{:02}s", seconds as u64 / 60, seconds as u64 % 60)
    }
}

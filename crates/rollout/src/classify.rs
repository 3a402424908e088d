//! Evidence → disposition. Pure: every rule of I7 is in this file.

use harness::Habits;
use record::{Disposition, Fault};
use sandbox::{Exit, SandboxError};

use crate::ports::{Captured, JudgeError};

/// What broke, and in words.
pub type Broken = (Fault, String);

/// Bytes of the harness's last words that a reason may carry.
const HINT_BYTES: usize = 600;

/// How the harness stage ended.
#[derive(Debug)]
pub enum HarnessEnd {
    /// The process ended, or was ended at its limit.
    Exit {
        /// How.
        exit: Exit,
        /// Whether the kernel killed something for lack of memory.
        out_of_memory: bool,
    },
    /// No call had arrived within the start-up limit, and the process was ended.
    Silent {
        /// The limit.
        startup_s: u64,
    },
    /// It could not be run, or its sandbox went away.
    Failed(SandboxError),
    /// The sandbox did not answer long after the process's limit.
    Hung {
        /// How long was waited.
        seconds: u64,
    },
}

/// Whether a rollout is worth verifying, from how its harness ended and what was captured.
/// `Ok` names the spent budget, if any.
///
/// # Errors
/// What broke: there will be no reward.
pub fn after_harness(
    end: &HarnessEnd,
    captured: &Result<Captured, String>,
    habits: &Habits,
    tail: &str,
) -> Result<Option<String>, Broken> {
    // 1. The sandbox: everything else may be a consequence.
    match end {
        HarnessEnd::Failed(error @ SandboxError::NotRunnable { .. }) => {
            return Err((Fault::HarnessCrashed, error.to_string()));
        }
        HarnessEnd::Failed(error) => return Err((Fault::SandboxLost, error.to_string())),
        HarnessEnd::Hung { seconds } => {
            return Err((
                Fault::SandboxLost,
                format!("the sandbox did not answer for {seconds} s"),
            ));
        }
        HarnessEnd::Exit { .. } | HarnessEnd::Silent { .. } => {}
    }
    // 2. Gateway and engine: a harness may crash because it got no reply.
    let captured = match captured {
        Ok(captured) => captured,
        Err(reason) => return Err((Fault::GatewayFailed, reason.clone())),
    };
    if let Some(broken) = &captured.fault {
        return Err(broken.clone());
    }
    // 3. The harness.
    if let HarnessEnd::Exit {
        exit: Exit::Signal(signal),
        out_of_memory,
    } = end
    {
        let memory = if *out_of_memory {
            ": the sandbox ran out of memory (raise limits.memory_bytes)"
        } else {
            ""
        };
        return Err((
            Fault::HarnessCrashed,
            format!("killed by signal {signal}, which was not ours{memory}"),
        ));
    }
    if !captured.settled {
        return Err((
            Fault::NotSettled,
            format!(
                "calls still in flight at the settling limit: {}",
                captured.in_flight
            ),
        ));
    }
    if captured.calls == 0 && captured.refused == 0 {
        return Err((Fault::NoCalls, no_calls(end, tail)));
    }
    // 4. Budgets.
    Ok(match end {
        _ if captured.refused > 0 => Some("calls_limit".to_owned()),
        HarnessEnd::Exit {
            exit: Exit::TimedOut,
            ..
        } => Some("harness_timeout".to_owned()),
        _ if captured.too_long => Some("context_overflow".to_owned()),
        HarnessEnd::Exit {
            exit: Exit::Code(code),
            ..
        } => habits.truncates(*code).map(str::to_owned),
        _ => None,
    })
}

fn no_calls(end: &HarnessEnd, tail: &str) -> String {
    let how = match end {
        HarnessEnd::Silent { startup_s } => {
            format!("no model call within {startup_s} s (limits.startup_s of the profile)")
        }
        HarnessEnd::Exit {
            exit: Exit::TimedOut,
            ..
        } => "no model call until the harness's limit".to_owned(),
        HarnessEnd::Exit {
            exit: Exit::Code(code),
            ..
        } => format!("the harness ended with exit code {code} and made no model call"),
        _ => "the harness made no model call".to_owned(),
    };
    let tail = tail.trim();
    if tail.is_empty() {
        format!("{how}; it printed nothing: check base URL and key in its profile")
    } else {
        format!(
            "{how}; check base URL and key in its profile; it printed: {}",
            last_bytes(tail, HINT_BYTES)
        )
    }
}

/// What broke when there is no verdict.
#[must_use]
pub fn no_verdict(error: JudgeError) -> Broken {
    match error {
        JudgeError::SandboxLost(reason) => (
            Fault::SandboxLost,
            format!("while the verifier ran: {reason}"),
        ),
        JudgeError::Failed(reason) => (Fault::VerifierFailed, reason),
        JudgeError::NoAnswer(reason) => (Fault::JudgeFailed, reason),
    }
}

/// The disposition of a rollout that has a verdict.
#[must_use]
pub fn with_verdict(budget: Option<String>) -> Disposition {
    match budget {
        None => Disposition::Train,
        Some(reason) => Disposition::Truncate { reason },
    }
}

/// The last characters of a text that fit into so many bytes.
#[must_use]
pub fn last_bytes(text: &str, bytes_max: usize) -> &str {
    let mut start = text.len().saturating_sub(bytes_max);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(calls: u32) -> Captured {
        Captured {
            calls,
            settled: true,
            ..Captured::default()
        }
    }

    fn exit(exit: Exit) -> HarnessEnd {
        HarnessEnd::Exit {
            exit,
            out_of_memory: false,
        }
    }

    fn judge(end: &HarnessEnd, captured: Captured) -> Result<Option<String>, Fault> {
        let mut habits = Habits::default();
        habits
            .exit_truncates
            .insert("3".into(), "turns_limit".into());
        after_harness(end, &Ok(captured), &habits, "").map_err(|(fault, _)| fault)
    }

    fn budget(name: &str) -> Result<Option<String>, Fault> {
        Ok(Some(name.to_owned()))
    }

    #[test]
    fn an_exit_code_is_never_a_fault_nor_a_success() {
        for code in [0, 1, 2, 127, 137] {
            assert_eq!(judge(&exit(Exit::Code(code)), calls(1)), Ok(None));
            assert_eq!(
                judge(&exit(Exit::Code(code)), calls(0)),
                Err(Fault::NoCalls)
            );
        }
    }

    #[test]
    fn spent_budgets_are_named() {
        let code = |code| exit(Exit::Code(code));
        assert_eq!(judge(&code(3), calls(2)), budget("turns_limit"));
        assert_eq!(
            judge(&exit(Exit::TimedOut), calls(2)),
            budget("harness_timeout")
        );
        let mut captured = calls(2);
        captured.too_long = true;
        assert_eq!(
            judge(&code(0), captured.clone()),
            budget("context_overflow")
        );
        captured.refused = 1;
        assert_eq!(judge(&code(0), captured), budget("calls_limit"));
    }

    #[test]
    fn the_first_boundary_that_broke_is_blamed() {
        let mut all = calls(0);
        all.settled = false;
        all.fault = Some((Fault::EngineFailed, "gone".into()));
        let gone = HarnessEnd::Failed(SandboxError::Gone {
            name: "s".into(),
            reason: "r".into(),
        });
        assert_eq!(judge(&gone, all.clone()), Err(Fault::SandboxLost));
        let signal = exit(Exit::Signal(9));
        assert_eq!(judge(&signal, all.clone()), Err(Fault::EngineFailed));
        all.fault = None;
        assert_eq!(judge(&signal, all.clone()), Err(Fault::HarnessCrashed));
        assert_eq!(
            judge(&exit(Exit::Code(0)), all.clone()),
            Err(Fault::NotSettled)
        );
        all.settled = true;
        assert_eq!(judge(&exit(Exit::Code(0)), all), Err(Fault::NoCalls));
    }

    #[test]
    fn a_judge_that_is_silent_is_not_a_verifier_that_broke() {
        let fault = |error| no_verdict(error).0;
        assert_eq!(
            fault(JudgeError::NoAnswer("429".into())),
            Fault::JudgeFailed
        );
        assert_eq!(
            fault(JudgeError::Failed("exit 1".into())),
            Fault::VerifierFailed
        );
        assert_eq!(
            fault(JudgeError::SandboxLost("gone".into())),
            Fault::SandboxLost
        );
    }

    #[test]
    fn a_rollout_without_calls_says_what_the_harness_printed() {
        let end = exit(Exit::Code(1));
        let habits = Habits::default();
        let tail = format!("{}é: connection refused", "x".repeat(2000));
        let (_, reason) = after_harness(&end, &Ok(calls(0)), &habits, &tail).unwrap_err();
        assert!(reason.starts_with("the harness ended with exit code 1 and made no model call"));
        assert!(
            reason.ends_with("é: connection refused") && reason.len() < 800,
            "{reason}"
        );
        let (_, reason) = after_harness(&end, &Ok(calls(0)), &habits, " \n").unwrap_err();
        assert!(
            reason.contains("it printed nothing: check base URL and key"),
            "{reason}"
        );
    }
}

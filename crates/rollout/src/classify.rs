//! Evidence → ending. Pure: every rule of I7 is in this file; what an ending means for training is
//! the table in [`crate::endings`].

use harness::Habits;
use record::Fault;
use sandbox::{Exit, SandboxError};

use crate::{
    endings,
    ports::{Captured, JudgeError},
};

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
    let mut killed = false;
    if let HarnessEnd::Exit {
        exit: Exit::Signal(signal),
        out_of_memory,
    } = end
    {
        if *out_of_memory && *signal == SIGKILL {
            let reason = "the harness was killed because the sandbox ran out of memory \
                          (raise limits.memory_bytes)";
            return Err((Fault::OutOfMemory, reason.to_owned()));
        }
        if captured.calls == 0 || !SENT_ON_PURPOSE.contains(signal) {
            let reason = format!("killed by signal {signal}, which was not ours");
            return Err((Fault::HarnessCrashed, reason));
        }
        killed = true;
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
    let limit = limit_at_the_gateway(captured);
    if captured.calls == 0 && limit.is_none() {
        return Err((Fault::NoCalls, no_calls(end, tail)));
    }
    // 4. Budgets.
    let budget = match end {
        _ if limit.is_some() => limit,
        _ if killed => Some(endings::HARNESS_KILLED),
        HarnessEnd::Exit {
            exit: Exit::TimedOut,
            ..
        } => Some(endings::HARNESS_TIMEOUT),
        _ if captured.too_long => Some(endings::CONTEXT_OVERFLOW),
        HarnessEnd::Exit {
            exit: Exit::Code(code),
            ..
        } => habits.truncates(*code),
        _ => None,
    };
    Ok(budget.map(str::to_owned))
}

/// The kernel's, ours, and that of whoever leaves no choice.
const SIGKILL: i32 = 9;

/// HUP, INT, QUIT, USR1, USR2, TERM: a harness that ends by one of these was told to, and nobody
/// outside of the sandbox tells it (we kill with SIGKILL only). So a command of the policy's did
/// (`pkill node`), and what it left counts. Other signals are crashes, and SIGKILL may be anybody's.
const SENT_ON_PURPOSE: [i32; 6] = [1, 2, 3, 10, 12, 15];

/// The budget for whose sake the gateway refused calls.
fn limit_at_the_gateway(captured: &Captured) -> Option<&'static str> {
    [
        (captured.refused > 0, endings::CALLS_LIMIT),
        (captured.tokens_spent, endings::TOKENS_LIMIT),
        (captured.seconds_spent, endings::SECONDS_LIMIT),
    ]
    .into_iter()
    .find_map(|(hit, name)| hit.then_some(name))
}

/// What kind of no a sandbox met that could not be made.
#[must_use]
pub fn not_made(error: &SandboxError) -> Fault {
    match error {
        SandboxError::Unsupported { .. } | SandboxError::Refused { .. } => Fault::SandboxRefused,
        _ => Fault::SandboxStart,
    }
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
        captured.seconds_spent = true;
        assert_eq!(judge(&code(0), captured.clone()), budget("seconds_limit"));
        captured.tokens_spent = true;
        assert_eq!(judge(&code(0), captured.clone()), budget("tokens_limit"));
        captured.refused = 1;
        assert_eq!(judge(&code(0), captured), budget("calls_limit"));
        // Refused before it had made a call: a budget of nothing, and no bypassed gateway.
        let nothing = Captured {
            tokens_spent: true,
            ..calls(0)
        };
        assert_eq!(judge(&code(1), nothing), budget("tokens_limit"));
    }

    #[test]
    fn who_killed_the_harness_decides() {
        let signal = |signal, out_of_memory| HarnessEnd::Exit {
            exit: Exit::Signal(signal),
            out_of_memory,
        };
        for crash in [4, 6, 8, 9, 11] {
            let end = signal(crash, false);
            assert_eq!(judge(&end, calls(2)), Err(Fault::HarnessCrashed), "{crash}");
        }
        for told in SENT_ON_PURPOSE {
            let end = signal(told, false);
            assert_eq!(judge(&end, calls(2)), budget("harness_killed"), "{told}");
            // Without a call it was not the policy.
            assert_eq!(judge(&end, calls(0)), Err(Fault::HarnessCrashed), "{told}");
        }
        assert_eq!(judge(&signal(9, true), calls(2)), Err(Fault::OutOfMemory));
        // Something else in the sandbox ran out of memory.
        assert_eq!(judge(&signal(15, true), calls(2)), budget("harness_killed"));
    }

    #[test]
    fn a_no_for_good_is_told_from_bad_luck() {
        let refused = SandboxError::Refused {
            name: "s".into(),
            cause: sandbox::RefusalCause::Image,
            reason: "no such image".into(),
            hint: "pull it".into(),
        };
        assert_eq!(not_made(&refused), Fault::SandboxRefused);
        let create = SandboxError::Create {
            name: "s".into(),
            reason: "no pids left".into(),
        };
        assert_eq!(not_made(&create), Fault::SandboxStart);
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

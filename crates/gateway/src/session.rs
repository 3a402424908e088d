//! One rollout at the gateway: its calls, their attempts, the retry rule, settling. All state is
//! behind one lock that is never held across a wait.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use codec::Memory;
use record::{Attempt, AttemptOutcome, CallId, Fault, RolloutSpec, Sampling};
use serde::Serialize;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::refusal::{Cause, Refusal};
use crate::responses::Responses;

/// What is known of a rollout.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Status {
    /// Calls, retries not counted again.
    pub calls: u32,
    /// Attempts of these calls.
    pub attempts: u32,
    /// Calls that are being worked on or delivered.
    pub in_flight: u32,
    /// Attempts that joined a call in flight.
    pub joined: u32,
    /// Attempts that got an answer once more.
    pub replayed: u32,
    /// Attempts after a failed one of the same call.
    pub asked_again: u32,
    /// Requests refused, for whatever cause.
    pub refused: u32,
    /// Times that the engine failed.
    pub engine_failures: u32,
    /// Attempts whose client went away before the whole reply was out.
    pub client_gone: u32,
    /// Generations that could not be parsed.
    pub parse_failed: u32,
    /// Prompts that did not fit.
    pub too_long: u32,
    /// Whether a call was refused because of `calls_max`.
    pub calls_max_hit: bool,
    /// The fault of the latest call that failed by our doing and was not answered in a later
    /// attempt. `None` when every call got its answer in the end.
    pub last_fault: Option<Fault>,
    /// Whether the record is complete.
    pub settled: bool,
    /// Whether the rollout was closed.
    pub closed: bool,
}

/// How a call ended: a reply, or why there is none.
pub(crate) type Outcome = Result<Arc<wire::Reply>, Arc<Refusal>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// Settled, or at the settling limit: new calls are refused, those in flight go on.
    Shut,
    Closed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Running,
    Done,
    Failed,
}

#[derive(Debug)]
struct AttemptState {
    attempt: Attempt,
    decided: bool,
}

#[derive(Debug)]
struct CallState {
    attempts: Vec<AttemptState>,
    stage: Stage,
    outcome: watch::Receiver<Option<Outcome>>,
    /// Attempts without a durable outcome, plus one while the engine is at work.
    open: u32,
    /// Whether the ledger has it.
    saved: bool,
    fault: Option<Fault>,
    /// Unmarked replays after delivery.
    replays: u32,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    calls: Vec<CallState>,
    last_by_digest: HashMap<String, u32>,
    counters: Status,
}

/// One rollout.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) spec: Arc<RolloutSpec>,
    pub(crate) sampling: Sampling,
    pub(crate) sampling_fixed: bool,
    pub(crate) started_ms: u64,
    calls_max: u32,
    replays_max: u32,
    /// What the codec continues from.
    pub(crate) memory: Mutex<Memory>,
    /// What later requests may continue by naming it.
    pub(crate) responses: Responses,
    /// Orders the writes of this rollout to the ledger, so that an older list of attempts never
    /// overwrites a newer one.
    /// Holds whether calls of an earlier, interrupted run under the same id are out of the ledger.
    pub(crate) writing: tokio::sync::Mutex<bool>,
    /// Ends the work of this rollout.
    pub(crate) cancel: CancellationToken,
    state: Mutex<State>,
    /// Counts arrivals and ends; settling watches it.
    version: watch::Sender<u64>,
}

/// What an attempt is to do.
#[derive(Debug)]
pub(crate) struct Admission {
    pub(crate) index: u32,
    pub(crate) attempt: usize,
    pub(crate) kind: AdmissionKind,
    /// Where the outcome will be.
    pub(crate) outcome: watch::Receiver<Option<Outcome>>,
}

/// How an attempt relates to its call.
#[derive(Debug)]
pub(crate) enum AdmissionKind {
    /// First of its call: do the work and tell.
    New(watch::Sender<Option<Outcome>>),
    /// The call failed before: do the work again.
    AskAgain(watch::Sender<Option<Outcome>>),
    /// Somebody is at work.
    Joined,
    /// The answer is there.
    Replayed,
}

/// What is known of a request before it is admitted.
#[derive(Debug)]
pub(crate) struct Arrival<'a> {
    pub(crate) digest: &'a str,
    pub(crate) says_retry: bool,
    pub(crate) stream: bool,
    pub(crate) now_ms: u64,
}

impl Session {
    pub(crate) fn new(
        open: crate::Open,
        replays_max: u32,
        started_ms: u64,
        cancel: CancellationToken,
    ) -> Self {
        Self {
            spec: Arc::new(open.spec),
            sampling: open.sampling,
            sampling_fixed: open.sampling_fixed,
            started_ms,
            calls_max: open.calls_max,
            replays_max,
            memory: Mutex::default(),
            responses: Responses::default(),
            writing: tokio::sync::Mutex::default(),
            cancel,
            state: Mutex::new(State {
                phase: Phase::Open,
                calls: Vec::new(),
                last_by_digest: HashMap::new(),
                counters: Status::default(),
            }),
            version: watch::Sender::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.version.send_modify(|version| *version += 1);
    }

    pub(crate) fn call_id(&self, index: u32) -> CallId {
        CallId {
            rollout: self.spec.id.clone(),
            index,
        }
    }

    /// Files a request as an attempt, by the rule in the crate's header.
    pub(crate) fn admit(&self, arrival: &Arrival<'_>) -> Result<Admission, Refusal> {
        let mut state = self.lock();
        if state.phase != Phase::Open {
            return Err(self.refuse_late());
        }
        let earlier = state.last_by_digest.get(arrival.digest).copied();
        let last = state.calls.len().checked_sub(1);
        let mut found = None;
        if let Some(index) = earlier {
            let at = index as usize;
            let call = &mut state.calls[at];
            // The worker is gone without a word only when it was abandoned or had a defect.
            if call.stage == Stage::Running && call.outcome.has_changed().is_err() {
                call.stage = Stage::Failed;
            }
            let delivered = call
                .attempts
                .iter()
                .any(|state| state.attempt.outcome == AttemptOutcome::Delivered);
            match call.stage {
                Stage::Running => found = Some((index, AdmissionKind::Joined)),
                Stage::Failed => {
                    let (sender, receiver) = watch::channel(None);
                    call.outcome = receiver;
                    call.stage = Stage::Running;
                    found = Some((index, AdmissionKind::AskAgain(sender)));
                }
                Stage::Done if !delivered || arrival.says_retry => {
                    found = Some((index, AdmissionKind::Replayed));
                }
                Stage::Done if last == Some(at) && call.replays < self.replays_max => {
                    call.replays += 1;
                    found = Some((index, AdmissionKind::Replayed));
                }
                Stage::Done => {}
            }
        }
        let (index, kind) = match found {
            Some(found) => found,
            None => {
                let index = u32::try_from(state.calls.len()).unwrap_or(u32::MAX);
                if index >= self.calls_max {
                    state.counters.calls_max_hit = true;
                    return Err(Refusal::new(
                        Cause::CallsMax,
                        format!("this rollout has used all of its {} calls", self.calls_max),
                    ));
                }
                let (sender, receiver) = watch::channel(None);
                state.calls.push(CallState {
                    attempts: Vec::new(),
                    stage: Stage::Running,
                    outcome: receiver,
                    open: 0,
                    saved: false,
                    fault: None,
                    replays: 0,
                });
                state
                    .last_by_digest
                    .insert(arrival.digest.to_owned(), index);
                state.counters.calls += 1;
                (index, AdmissionKind::New(sender))
            }
        };
        state.counters.attempts += 1;
        match kind {
            AdmissionKind::New(_) => {}
            AdmissionKind::AskAgain(_) => state.counters.asked_again += 1,
            AdmissionKind::Joined => state.counters.joined += 1,
            AdmissionKind::Replayed => state.counters.replayed += 1,
        }
        let working = matches!(kind, AdmissionKind::New(_) | AdmissionKind::AskAgain(_));
        let call = &mut state.calls[index as usize];
        call.attempts.push(AttemptState {
            attempt: Attempt {
                started_ms: arrival.now_ms,
                finished_ms: arrival.now_ms,
                // Until the last byte has left: what is true if we are killed now.
                outcome: AttemptOutcome::ClientGone,
                stream: arrival.stream,
            },
            decided: false,
        });
        let admission = Admission {
            index,
            attempt: call.attempts.len() - 1,
            outcome: call.outcome.clone(),
            kind,
        };
        let was_open = call.open > 0;
        call.open += 1 + u32::from(working);
        if !was_open {
            state.counters.in_flight += 1;
        }
        drop(state);
        self.changed();
        Ok(admission)
    }

    fn refuse_late(&self) -> Refusal {
        Refusal::new(
            Cause::Settled,
            format!(
                "rollout {} has ended: its record is complete and takes no further calls",
                self.spec.id
            ),
        )
    }

    /// The refusal for work that was cut off.
    pub(crate) fn refuse_abandoned(&self) -> Refusal {
        if self.lock().phase == Phase::Closed {
            self.refuse_late()
        } else {
            Refusal::new(Cause::ShuttingDown, "the gateway is going down")
        }
    }

    pub(crate) fn count_refused(&self) {
        self.lock().counters.refused += 1;
    }

    /// Sets the outcome of one attempt, unless it has one. Says whether it was set.
    pub(crate) fn decide(
        &self,
        index: u32,
        attempt: usize,
        outcome: AttemptOutcome,
        now_ms: u64,
    ) -> bool {
        let mut state = self.lock();
        let gone = outcome == AttemptOutcome::ClientGone;
        let Some(found) = state
            .calls
            .get_mut(index as usize)
            .and_then(|call| call.attempts.get_mut(attempt))
        else {
            return false;
        };
        if found.decided {
            return false;
        }
        found.decided = true;
        found.attempt.outcome = outcome;
        found.attempt.finished_ms = now_ms;
        if gone {
            state.counters.client_gone += 1;
        }
        true
    }

    /// The work on a call has failed: every attempt that waits for it ends so.
    pub(crate) fn fail(
        &self,
        index: u32,
        outcome: Option<&AttemptOutcome>,
        fault: Option<Fault>,
        now_ms: u64,
    ) {
        let mut state = self.lock();
        match outcome {
            Some(AttemptOutcome::TooLong { .. }) => state.counters.too_long += 1,
            Some(AttemptOutcome::EngineFailed { .. }) if fault == Some(Fault::EngineFailed) => {
                state.counters.engine_failures += 1;
            }
            _ => {}
        }
        let Some(call) = state.calls.get_mut(index as usize) else {
            return;
        };
        call.stage = Stage::Failed;
        call.fault = fault;
        for found in call.attempts.iter_mut().filter(|found| !found.decided) {
            found.decided = true;
            if let Some(outcome) = outcome {
                found.attempt.outcome = outcome.clone();
                found.attempt.finished_ms = now_ms;
            }
        }
    }

    /// The work on a call has succeeded.
    pub(crate) fn done(&self, index: u32, parse_failed: bool) {
        let mut state = self.lock();
        state.counters.parse_failed += u32::from(parse_failed);
        if let Some(call) = state.calls.get_mut(index as usize) {
            call.stage = Stage::Done;
            call.fault = None;
        }
    }

    pub(crate) fn attempts(&self, index: u32) -> Vec<Attempt> {
        self.lock()
            .calls
            .get(index as usize)
            .map(|call| {
                call.attempts
                    .iter()
                    .map(|state| state.attempt.clone())
                    .collect()
            })
            .unwrap_or_default()
    }

    pub(crate) fn mark_saved(&self, index: u32) {
        if let Some(call) = self.lock().calls.get_mut(index as usize) {
            call.saved = true;
        }
    }

    pub(crate) fn is_saved(&self, index: u32) -> bool {
        self.lock()
            .calls
            .get(index as usize)
            .is_some_and(|call| call.saved)
    }

    /// One attempt, or the work on a call, has come to its end in the ledger too.
    pub(crate) fn release(&self, index: u32) {
        let mut state = self.lock();
        let Some(call) = state.calls.get_mut(index as usize) else {
            return;
        };
        call.open = call.open.saturating_sub(1);
        if call.open == 0 {
            state.counters.in_flight = state.counters.in_flight.saturating_sub(1);
        }
        drop(state);
        self.changed();
    }

    pub(crate) fn status(&self) -> Status {
        Self::status_of(&self.lock())
    }

    fn status_of(state: &State) -> Status {
        Status {
            last_fault: state.calls.iter().rev().find_map(|call| call.fault),
            closed: state.phase == Phase::Closed,
            ..state.counters.clone()
        }
    }

    /// See [`crate::Gateway::settle`].
    pub(crate) async fn settle(&self, quiet: Duration, limit: Duration) -> Status {
        let deadline = Instant::now() + limit;
        let mut version = self.version.subscribe();
        loop {
            let seen = *version.borrow_and_update();
            let in_flight = self.lock().counters.in_flight;
            // With calls in flight only a change can help, without one only silence.
            let until = if in_flight == 0 {
                deadline.min(Instant::now() + quiet)
            } else {
                deadline
            };
            let silent = tokio::time::timeout_at(until, version.changed())
                .await
                .is_err();
            if !silent {
                continue;
            }
            let mut state = self.lock();
            let still = state.counters.in_flight == 0 && *self.version.borrow() == seen;
            let late = Instant::now() >= deadline;
            if !still && !late {
                continue;
            }
            if state.phase == Phase::Open {
                state.phase = Phase::Shut;
            }
            state.counters.settled |= still;
            return Self::status_of(&state);
        }
    }

    /// Ends it: no call comes in, the work in flight is cut.
    pub(crate) fn close(&self) -> Status {
        let status = {
            let mut state = self.lock();
            state.phase = Phase::Closed;
            Self::status_of(&state)
        };
        self.cancel.cancel();
        self.changed();
        status
    }
}

//! One rollout at the gateway: its calls, their attempts, the retry rule, settling. All state is
//! behind one lock that is never held across a wait.

mod waiting;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use codec::Memory;
use record::{Attempt, AttemptOutcome, CallId, Conversation, Fault, RolloutSpec, Sampling};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::edits::{self, Edits};
use crate::refusal::{Cause, Refusal};
use crate::responses::Responses;
use crate::status::Status;

/// Calls whose reply may be lost and whose request may come back edited.
const RECENT_MAX: usize = 8;

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
    /// Orders the writes of this call to the ledger, so that an older list of attempts never
    /// overwrites a newer one. Calls do not wait for each other: the ledger saves many at once.
    writing: Arc<tokio::sync::Mutex<()>>,
    fault: Option<Fault>,
    /// Unmarked replays after delivery.
    replays: u32,
}

impl CallState {
    fn delivered(&self) -> bool {
        self.attempts
            .iter()
            .any(|state| state.attempt.outcome == AttemptOutcome::Delivered)
    }
}

#[derive(Debug)]
struct State {
    phase: Phase,
    calls: Vec<CallState>,
    last_by_digest: HashMap<String, u32>,
    /// The newest calls and what they asked, oldest first.
    recent: VecDeque<Recent>,
    edits: Edits,
    counters: Status,
}

/// A call whose request may come back edited.
#[derive(Debug)]
struct Recent {
    index: u32,
    conversation: Arc<Conversation>,
    asked: Asked,
}

/// What a request asks for beside its conversation. A retry asks for the same; another sample on
/// purpose may not.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Asked {
    pub(crate) model: String,
    pub(crate) sampling: wire::SamplingWishes,
}

impl Asked {
    pub(crate) fn of(request: &wire::Request) -> Self {
        Self {
            model: request.model.clone(),
            sampling: wire::SamplingWishes {
                // Some clients lower it from try to try.
                tokens_max: None,
                ..request.sampling.clone()
            },
        }
    }
}

/// One rollout.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) spec: Arc<RolloutSpec>,
    pub(crate) sampling: Sampling,
    pub(crate) sampling_fixed: bool,
    pub(crate) started_ms: u64,
    calls_max: u32,
    generated_tokens_max: Option<u64>,
    /// When the rollout's time is over.
    deadline: Option<Instant>,
    replays_max: u32,
    /// What the codec continues from.
    pub(crate) memory: RwLock<Memory>,
    /// What later requests may continue by naming it.
    pub(crate) responses: Responses,
    /// Set once calls of an earlier, interrupted run under the same id are out of the ledger.
    pub(crate) forgotten: tokio::sync::OnceCell<()>,
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
    /// Whether the client had edited the history after it lost a reply.
    pub(crate) edited: bool,
    /// What the call asks: the request without what the client edited into it.
    pub(crate) conversation: Arc<Conversation>,
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
    pub(crate) conversation: &'a Arc<Conversation>,
    pub(crate) asked: &'a Asked,
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
            generated_tokens_max: open.generated_tokens_max,
            // A limit that no clock reaches is none.
            deadline: open
                .seconds_max
                .and_then(|seconds| Instant::now().checked_add(Duration::from_secs(seconds))),
            replays_max,
            memory: RwLock::default(),
            responses: Responses::default(),
            forgotten: tokio::sync::OnceCell::new(),
            cancel,
            state: Mutex::new(State {
                phase: Phase::Open,
                calls: Vec::new(),
                last_by_digest: HashMap::new(),
                recent: VecDeque::new(),
                edits: Edits::default(),
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

    /// Takes out of a history what the client edited into it after it had lost a reply.
    pub(crate) fn undo_edits(&self, conversation: &mut Conversation) {
        self.lock().edits.undo(conversation);
    }

    /// Tokens that may still be generated.
    pub(crate) fn tokens_left(&self) -> u32 {
        match self.generated_tokens_max {
            None => u32::MAX,
            Some(max) => {
                let used = self.lock().counters.generated_tokens;
                u32::try_from(max.saturating_sub(used)).unwrap_or(u32::MAX)
            }
        }
    }

    /// Time that a generation may still take.
    pub(crate) fn time_left(&self) -> Option<Duration> {
        let deadline = self.deadline?;
        Some(deadline.saturating_duration_since(Instant::now()))
    }

    /// The refusal of work that would exceed a budget.
    pub(crate) fn refuse_late_time(&self) -> Refusal {
        self.lock().counters.seconds_max_hit = true;
        Refusal::new(
            Cause::SecondsMax,
            "this rollout's time is over (`seconds_max`)",
        )
    }

    fn check_budgets(&self, state: &mut State) -> Result<(), Refusal> {
        if self.time_left().is_some_and(|left| left.is_zero()) {
            state.counters.seconds_max_hit = true;
            return Err(Refusal::new(
                Cause::SecondsMax,
                "this rollout's time is over (`seconds_max`)",
            ));
        }
        if let Some(max) = self.generated_tokens_max
            && state.counters.generated_tokens >= max
        {
            state.counters.tokens_max_hit = true;
            return Err(Refusal::new(
                Cause::TokensMax,
                format!("this rollout has generated all of its {max} tokens"),
            ));
        }
        Ok(())
    }

    /// The newest call whose reply was lost and of whose request this one is an edited copy.
    fn edited(&self, state: &State, arrival: &Arrival<'_>) -> Option<(u32, Arc<Conversation>)> {
        let last = state.calls.len().checked_sub(1);
        state.recent.iter().rev().find_map(|recent| {
            let call = state.calls.get(recent.index as usize)?;
            if recent.asked != *arrival.asked {
                return None;
            }
            let edit = edits::edit(&recent.conversation, arrival.conversation)?;
            let partial = matches!(edit, edits::Edit::Partial(_));
            // The kernel may have taken a reply that broke off behind it. A part of it, shown to us
            // before anything else is asked, says so.
            let broke_off =
                partial && last == Some(recent.index as usize) && call.replays < self.replays_max;
            if call.delivered() && !broke_off {
                return None;
            }
            let fits = match &*call.outcome.borrow() {
                Some(Ok(reply)) => edit.fits(&reply.message),
                // No client has a part of a reply that is not there.
                _ => !partial,
            };
            fits.then(|| (recent.index, Arc::clone(&recent.conversation)))
        })
    }

    /// Files a request as an attempt, by the rule in the crate's header.
    pub(crate) fn admit(&self, arrival: &Arrival<'_>) -> Result<Admission, Refusal> {
        let mut state = self.lock();
        if state.phase != Phase::Open {
            return Err(self.refuse_late());
        }
        let mut conversation = Arc::clone(arrival.conversation);
        let mut edited = false;
        let mut earlier = state.last_by_digest.get(arrival.digest).copied();
        if earlier.is_none()
            && let Some((index, original)) = self.edited(&state, arrival)
        {
            state.edits.learn(&conversation, &original);
            state
                .last_by_digest
                .insert(arrival.digest.to_owned(), index);
            state.counters.edited += 1;
            edited = true;
            conversation = original;
            earlier = Some(index);
        }
        let last = state.calls.len().checked_sub(1);
        let mut found = None;
        if let Some(index) = earlier {
            let at = index as usize;
            let call = &mut state.calls[at];
            // The worker is gone without a word only when it was abandoned or had a defect.
            if call.stage == Stage::Running && call.outcome.has_changed().is_err() {
                call.stage = Stage::Failed;
            }
            let delivered = call.delivered();
            match call.stage {
                Stage::Running => found = Some((index, AdmissionKind::Joined)),
                Stage::Failed => {
                    self.check_budgets(&mut state)?;
                    let call = &mut state.calls[at];
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
                self.check_budgets(&mut state)?;
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
                    writing: Arc::default(),
                    fault: None,
                    replays: 0,
                });
                state
                    .last_by_digest
                    .insert(arrival.digest.to_owned(), index);
                state.counters.calls += 1;
                if state.recent.len() >= RECENT_MAX {
                    state.recent.pop_front();
                }
                state.recent.push_back(Recent {
                    index,
                    conversation: Arc::clone(&conversation),
                    asked: arrival.asked.clone(),
                });
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
            edited,
            conversation,
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
    pub(crate) fn done(&self, index: u32, parse_failed: bool, tokens: usize) {
        let mut state = self.lock();
        state.counters.parse_failed += u32::from(parse_failed);
        state.counters.generated_tokens += tokens as u64;
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

    /// See [`CallState`]; a lock of nobody's for a call that there is not.
    pub(crate) fn writing(&self, index: u32) -> Arc<tokio::sync::Mutex<()>> {
        self.lock()
            .calls
            .get(index as usize)
            .map(|call| Arc::clone(&call.writing))
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

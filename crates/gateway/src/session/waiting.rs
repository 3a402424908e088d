//! Waiting for a rollout to become quiet, and for a call to be wanted by nobody.

use std::time::Duration;

use tokio::time::Instant;

use super::{Phase, Session};
use crate::status::Status;

impl Session {
    /// Comes back once no client has waited for a call for `grace`.
    pub(crate) async fn abandoned(&self, index: u32, grace: Duration) {
        let mut version = self.version.subscribe();
        let mut alone_since = None;
        loop {
            version.borrow_and_update();
            let waited_for = self
                .lock()
                .calls
                .get(index as usize)
                .is_some_and(|call| call.attempts.iter().any(|state| !state.decided));
            let until = match (waited_for, alone_since) {
                (true, _) => {
                    alone_since = None;
                    None
                }
                (false, Some(since)) => Some(since + grace),
                (false, None) => {
                    let now = Instant::now();
                    alone_since = Some(now);
                    Some(now + grace)
                }
            };
            let changed = match until {
                None => Ok(version.changed().await),
                Some(until) => tokio::time::timeout_at(until, version.changed()).await,
            };
            if changed.is_err() {
                self.lock().counters.abandoned += 1;
                return;
            }
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
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use record::{AttemptOutcome, Conversation, GroupId, RolloutId, RolloutSpec, TaskId};
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::session::{Admission, Arrival, Asked};

    fn session() -> Session {
        let spec = RolloutSpec {
            id: RolloutId::new("r").unwrap(),
            task: TaskId::new("t").unwrap(),
            group: GroupId::new("g").unwrap(),
            harness: "h".to_owned(),
            labels: std::collections::BTreeMap::new(),
            seed: 0,
        };
        Session::new(crate::Open::new(spec), 2, 0, CancellationToken::new())
    }

    /// A request of its own per digest.
    fn arrive(session: &Session, digest: &str) -> Admission {
        session
            .admit(&Arrival {
                digest,
                conversation: &Arc::new(Conversation::default()),
                asked: &Asked::of(&wire::Request {
                    model: digest.to_owned(),
                    ..wire::Request::default()
                }),
                says_retry: false,
                stream: false,
                now_ms: 0,
            })
            .unwrap()
    }

    fn gone(session: &Session, admission: &Admission) {
        session.decide(
            admission.index,
            admission.attempt,
            AttemptOutcome::ClientGone,
            0,
        );
        session.release(admission.index);
    }

    const GRACE: Duration = Duration::from_secs(120);

    /// Time is virtual here.
    #[tokio::test(start_paused = true)]
    async fn a_call_is_abandoned_when_nobody_waited_for_the_whole_grace() {
        let session = session();
        let began = Instant::now();
        let first = arrive(&session, "a");
        let other = arrive(&session, "b");
        let abandoned = session.abandoned(first.index, GRACE);
        tokio::pin!(abandoned);
        let pass = async |seconds: u64| tokio::time::sleep(Duration::from_secs(seconds)).await;
        // As long as somebody waits, nothing happens.
        tokio::select! {
            () = &mut abandoned => panic!("somebody waits"),
            () = pass(10_000) => {}
        }
        gone(&session, &first);
        tokio::select! {
            () = &mut abandoned => panic!("the grace is not over"),
            () = pass(100) => {}
        }
        // Whoever comes back in time is joined to it, and the grace begins anew when it goes.
        let again = arrive(&session, "a");
        assert_eq!((again.index, again.attempt), (first.index, 1));
        tokio::select! {
            () = &mut abandoned => panic!("somebody waits again"),
            () = pass(1000) => {}
        }
        gone(&session, &again);
        // What happens to other calls does not prolong it.
        tokio::select! {
            () = &mut abandoned => panic!("the grace is not over"),
            () = pass(100) => {}
        }
        gone(&session, &other);
        abandoned.await;
        let waited = began.elapsed().as_secs();
        assert_eq!(waited, 10_000 + 100 + 1000 + GRACE.as_secs());
        assert_eq!(session.status().abandoned, 1);
    }
}

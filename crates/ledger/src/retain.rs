//! Old rollouts become smaller: texts go, tokens stay.

use std::sync::atomic::Ordering;

use record::{Call, Conversation, RolloutId};
use serde_json::{Value, json};

use crate::encode::encode;
use crate::recent::Recents;
use crate::row::Place;
use crate::source::Source;
use crate::{Ledger, LedgerError, writer};

/// What stays of the calls of a rollout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Keep {
    /// Everything but the bodies and headers as they came: the neutral form of the conversation
    /// says the same to people and to the tree.
    Conversation,
    /// Tokens, log-probabilities and outcomes: enough to train. The tree knows classes and fork
    /// causes only as far as tokens tell.
    Tokens,
}

impl Keep {
    fn name(self) -> &'static str {
        match self {
            Self::Conversation => "conversation",
            Self::Tokens => "tokens",
        }
    }

    fn apply(self, call: &mut Call) {
        call.request = Value::Null;
        call.headers = Vec::new();
        if self == Self::Tokens {
            call.conversation = Conversation::default();
            call.raw_text = String::new();
            call.reply = None;
        }
    }
}

impl Ledger {
    /// Drops what `keep` does not name from the calls of all rollouts that ended before
    /// `before_ms` (milliseconds since the Unix epoch; there is no clock in here). Returns how many
    /// rollouts were changed. The file does not shrink before [`Ledger::vacuum`], but its free pages
    /// are used again.
    ///
    /// # Errors
    /// As [`Ledger::put_call`] and [`Ledger::calls`]; rollouts before that one are done.
    pub async fn retain(&self, before_ms: u64, keep: Keep) -> Result<usize, LedgerError> {
        let mut changed = 0;
        for rollout in self.rollouts(&[])? {
            let id = rollout.spec.id;
            let note = format!("retain:{id}");
            let done = self.note(&note)?;
            let done = |keep: Keep| done == Some(json!(keep.name()));
            if rollout.finished_ms.is_none_or(|ended| ended >= before_ms)
                || done(keep)
                || done(Keep::Tokens)
            {
                continue;
            }
            self.thin(&id, keep).await?;
            self.put_note(&note, json!(keep.name())).await?;
            changed += 1;
        }
        Ok(changed)
    }

    /// Writes the file anew without its free pages, so that it becomes smaller and what was dropped
    /// is gone from the disk. Readers go on meanwhile; writers wait.
    ///
    /// # Errors
    /// As [`Ledger::put_call`]. [`LedgerError::DiskFull`] when there is no room for the second copy:
    /// then everything is as it was.
    pub async fn vacuum(&self) -> Result<(), LedgerError> {
        self.put(writer::Change::Vacuum).await
    }

    /// Writes the calls of a rollout anew, in one transaction.
    async fn thin(&self, id: &RolloutId, keep: Keep) -> Result<(), LedgerError> {
        let mut rows = Vec::new();
        let recents = Recents::default();
        for mut call in self.calls(id)? {
            keep.apply(&mut call);
            let (id, said) = (call.id.clone(), call.continuation.parent);
            let attempts = std::mem::take(&mut call.attempts);
            let place = Place {
                id: &id,
                number: self.inner.last_body.fetch_add(1, Ordering::Relaxed) + 1,
                attempts: &attempts,
            };
            let known = recents.of(&id.rollout);
            let (row, recent) = encode(&known, said, &place, Source::of(call)?)?;
            recents.add(&id.rollout, recent);
            rows.push(row);
        }
        self.inner.recents.forget(id);
        self.put(writer::Change::Rewrite(id.clone(), rows)).await
    }
}

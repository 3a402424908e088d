//! Conversations that a later request of the Responses dialect continues by naming them
//! (`previous_response_id`), without sending them again.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use record::{Conversation, Message};

/// Conversations kept per rollout; then the oldest is forgotten. Clients name the newest one.
const KEPT_MAX: usize = 32;

/// The newest conversations of one rollout, each with its reply.
#[derive(Debug, Default)]
pub(crate) struct Responses(Mutex<VecDeque<(String, Vec<Message>)>>);

impl Responses {
    /// Keeps what was said up to and with a reply. Instructions are not carried on: the next
    /// request brings its own.
    pub(crate) fn keep(
        &self,
        id: &str,
        conversation: &Conversation,
        instructed: bool,
        reply: &Message,
    ) {
        let mut messages = conversation.messages[usize::from(instructed)..].to_vec();
        messages.push(reply.clone());
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= KEPT_MAX {
            kept.pop_front();
        }
        kept.push_back((id.to_owned(), messages));
    }

    /// Puts a kept conversation before `conversation`, behind its instructions.
    pub(crate) fn prepend(
        &self,
        id: &str,
        conversation: &mut Conversation,
        instructed: bool,
    ) -> Result<(), String> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((_, messages)) = kept.iter().rev().find(|(kept, _)| kept == id) else {
            return Err(format!(
                "Previous response with id '{id}' not found: the newest {KEPT_MAX} of a rollout are kept, unless they were asked for with `store: false`; send the whole input instead"
            ));
        };
        let at = usize::from(instructed);
        conversation
            .messages
            .splice(at..at, messages.iter().cloned());
        Ok(())
    }
}

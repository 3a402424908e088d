//! A call as the writer holds it: what the next one is compared with.

use record::{Call, Conversation};
use serde_json::Value;

use crate::LedgerError;
use crate::body::common;
use crate::piece::{TextChange, of_conversation, of_value};
use crate::row::{call_name, rest_of, unstorable};

/// A parent must have at least this share of a call, one in so many bytes, to be worth the tie.
const SHARE_MIN: usize = 4;

/// A call without its id and attempts.
#[derive(Debug)]
pub(crate) struct Source {
    request: Value,
    conversation: Conversation,
    pub(crate) prompt: Vec<u32>,
    pub(crate) output: Vec<u32>,
    /// JSON of all that is small.
    pub(crate) rest: Vec<u8>,
    pub(crate) logprobs_model: Vec<f32>,
    pub(crate) logprobs_sampled: Vec<f32>,
    /// Bytes of the pieces of the request and of the conversation; known once it was compared.
    lengths: [Vec<usize>; 2],
}

/// What is new in a call against another, or against nothing.
#[derive(Debug)]
pub(crate) struct Difference {
    pub(crate) request: TextChange,
    pub(crate) conversation: TextChange,
    /// Tokens of the prompt that the other's prompt and output begin with.
    pub(crate) prompt: usize,
}

impl Source {
    /// Takes a call apart; nothing of it is copied.
    pub(crate) fn of(call: Call) -> Result<Self, LedgerError> {
        let rest = rest_of(&call)?;
        let mut source = Self {
            request: call.request,
            conversation: call.conversation,
            prompt: call.prompt_ids,
            output: Vec::new(),
            rest,
            logprobs_model: Vec::new(),
            logprobs_sampled: Vec::new(),
            lengths: Default::default(),
        };
        if let Some(generation) = call.generation {
            source.output = generation.token_ids;
            source.logprobs_model = generation.logprobs_model;
            source.logprobs_sampled = generation.logprobs_sampled;
        }
        Ok(source)
    }

    /// Tokens of the prompt that the other call's prompt and output begin with.
    pub(crate) fn tokens_shared(&self, base: &Self) -> usize {
        let shared = common(&self.prompt, &base.prompt);
        if shared < base.prompt.len() {
            return shared;
        }
        shared + common(&self.prompt[shared..], &base.output)
    }

    /// Compares with a call whose own comparison is done.
    pub(crate) fn against(&self, base: Option<&Self>) -> serde_json::Result<Difference> {
        let (request, conversation) =
            (of_value(&self.request), of_conversation(&self.conversation));
        let Some(base) = base else {
            return Ok(Difference {
                request: TextChange::between(&[], &[], &request)?,
                conversation: TextChange::between(&[], &[], &conversation)?,
                prompt: 0,
            });
        };
        let [request_lengths, conversation_lengths] = &base.lengths;
        let base_conversation = of_conversation(&base.conversation);
        Ok(Difference {
            request: TextChange::between(&of_value(&base.request), request_lengths, &request)?,
            conversation: TextChange::between(
                &base_conversation,
                conversation_lengths,
                &conversation,
            )?,
            prompt: self.tokens_shared(base),
        })
    }

    /// [`Source::against`], with an error that names the call.
    pub(crate) fn difference(
        &self,
        id: &record::CallId,
        base: Option<&Self>,
    ) -> Result<Difference, LedgerError> {
        self.against(base)
            .map_err(|found| unstorable(call_name(id), found))
    }

    /// Notes the lengths that the comparison found, for calls that are compared with this one.
    pub(crate) fn compared(mut self, difference: Difference) -> Self {
        self.lengths = [difference.request.lengths, difference.conversation.lengths];
        self
    }

    /// Drops what no comparison needs.
    pub(crate) fn strip(&mut self) {
        self.rest = Vec::new();
        self.logprobs_model = Vec::new();
        self.logprobs_sampled = Vec::new();
    }

    /// About how many bytes it holds: JSON values take about twice their text.
    pub(crate) fn bytes(&self) -> usize {
        let text: usize = self.lengths.iter().flatten().sum();
        2 * text + 4 * (self.prompt.len() + self.output.len())
    }
}

impl Difference {
    /// Whether the other call has enough of this one.
    pub(crate) fn worth_it(&self, own: &Source) -> bool {
        let text: usize = self.conversation.lengths.iter().sum();
        let whole = 4 * own.prompt.len() + text;
        let shared = 4 * self.prompt + self.conversation.change.head;
        shared * SHARE_MIN >= whole && whole > 0
    }

    /// Whether the call only adds to `base`: then whatever shares something with `base` shares as
    /// much with the call.
    pub(crate) fn appends(&self, base: &Source) -> bool {
        self.request.base.is_empty()
            && self.conversation.base.is_empty()
            && self.prompt >= base.prompt.len()
    }
}

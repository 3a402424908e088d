//! Histories that a client edited after it lost a reply.
//!
//! When a reply breaks off, some clients do not send the same request again but an edited one:
//! the partial text as an assistant turn behind it, perhaps with an order to go on, the user's
//! message twice, or an empty assistant turn. Such a request is an attempt of the call whose
//! reply was lost, not a new call, and the model is shown the history without the edit: with it
//! the thread would fork at every broken connection. The body as it came is in the record.

use codec::echo::same_meaning;
use record::{Conversation, Message, Part, Role};

/// How a request differs from an earlier one whose reply was lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Edit {
    /// Not at all: what differs does not reach the model.
    None,
    /// The user's last message stands there twice.
    Doubled,
    /// This text, the beginning of the lost reply, stands behind it as an assistant turn.
    Partial(String),
}

/// Whether two messages say the same.
fn same(one: &Message, other: &Message) -> bool {
    fn images(message: &Message) -> impl Iterator<Item = &String> {
        message.content.iter().filter_map(|part| match part {
            Part::Image { url } => Some(url),
            Part::Text { .. } => None,
        })
    }
    one.role == other.role && images(one).eq(images(other)) && same_meaning(one, other)
}

/// Compared from the end, which is where two requests of a rollout differ.
fn begins(list: &[Message], beginning: &[Message]) -> bool {
    let head = list.get(..beginning.len());
    head.is_some_and(|head| {
        let mut pairs = head.iter().zip(beginning).rev();
        pairs.all(|(one, other)| same(one, other))
    })
}

/// How `request` was made of `earlier`; `None` when it is another request.
pub(crate) fn edit(earlier: &Conversation, request: &Conversation) -> Option<Edit> {
    let (before, now) = (&earlier.messages, &request.messages);
    if now.len() < before.len() || now.len() > before.len() + 2 {
        return None;
    }
    let found = match &now[before.len()..] {
        [] => Edit::None,
        [user] if user.role == Role::User && before.last().is_some_and(|last| same(last, user)) => {
            Edit::Doubled
        }
        [partial, rest @ ..]
            if partial.role == Role::Assistant
                && partial.tool_calls.is_empty()
                && rest.iter().all(|message| message.role == Role::User) =>
        {
            Edit::Partial(partial.text_content().trim().to_owned()).filled()?
        }
        _ => return None,
    };
    (begins(now, before) && earlier.tools == request.tools).then_some(found)
}

impl Edit {
    fn filled(self) -> Option<Self> {
        match &self {
            Self::Partial(text) if text.is_empty() => None,
            _ => Some(self),
        }
    }

    /// Whether the lost reply may be what the client has a part of.
    pub(crate) fn fits(&self, reply: &Message) -> bool {
        match self {
            // With the whole of it the conversation goes on: the client may have it before we know.
            Self::Partial(text) => {
                let whole = reply.text_content();
                let rest = whole.trim().strip_prefix(text.as_str());
                rest.is_some_and(|rest| !rest.is_empty() || !reply.tool_calls.is_empty())
            }
            Self::None | Self::Doubled => true,
        }
    }
}

/// Edits of one rollout that may stay in its history; then the oldest is forgotten, and a history
/// that has it is a fork.
const KEPT_MAX: usize = 32;

/// Edited histories, and what they were before.
#[derive(Debug, Default)]
pub(crate) struct Edits(Vec<(Vec<Message>, Vec<Message>)>);

impl Edits {
    pub(crate) fn learn(&mut self, edited: &Conversation, original: &Conversation) {
        if edited.messages == original.messages {
            return;
        }
        if self.0.len() >= KEPT_MAX {
            self.0.remove(0);
        }
        self.0
            .push((edited.messages.clone(), original.messages.clone()));
    }

    /// Takes what was edited out of a history again.
    pub(crate) fn undo(&self, conversation: &mut Conversation) {
        // The newest first: its original has no edit of an older one in it.
        let found = self
            .0
            .iter()
            .rev()
            .find(|(edited, _)| begins(&conversation.messages, edited));
        if let Some((edited, original)) = found {
            conversation
                .messages
                .splice(..edited.len(), original.iter().cloned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn talk(turns: &[(Role, &str)]) -> Conversation {
        Conversation {
            messages: turns
                .iter()
                .map(|(role, text)| Message::text(*role, *text))
                .collect(),
            tools: Vec::new(),
        }
    }

    #[test]
    fn what_clients_do_to_a_history_is_told_from_a_new_request() {
        use Role::{Assistant, Tool, User};
        let before = [(User, "go"), (Assistant, "on it"), (User, "more")];
        let earlier = talk(&before);
        let with = |rest: &[(Role, &str)]| edit(&earlier, &talk(&[&before[..], rest].concat()));
        assert_eq!(with(&[]), Some(Edit::None));
        assert_eq!(with(&[(User, "more")]), Some(Edit::Doubled));
        let partial = Some(Edit::Partial("Hel".to_owned()));
        assert_eq!(with(&[(Assistant, "Hel")]), partial);
        assert_eq!(with(&[(Assistant, "Hel\n"), (User, "go on")]), partial);
        for other in [
            &[(User, "again")][..],
            &[(Tool, "more")],
            &[(Assistant, " ")],
            &[(Assistant, "Hel"), (Tool, "x")],
            &[(Assistant, "Hel"), (User, "a"), (User, "b")],
        ] {
            assert_eq!(with(other), None, "{other:?}");
        }
        assert_eq!(edit(&earlier, &talk(&before[..2])), None);
        let mut other_tools = earlier.clone();
        other_tools.tools.push(record::ToolSpec {
            name: "f".to_owned(),
            description: String::new(),
            parameters: serde_json::Value::Null,
        });
        assert_eq!(edit(&earlier, &other_tools), None);
        let reply = Message::text(Assistant, "Hello");
        assert!(partial.as_ref().is_some_and(|edit| edit.fits(&reply)));
        for other in ["Hey", "Hello", "Hello!"] {
            assert!(!Edit::Partial(other.to_owned()).fits(&reply), "{other}");
        }
    }

    #[test]
    fn an_edit_that_stays_is_taken_out_of_later_histories() {
        use Role::{Assistant, User};
        let original = talk(&[(User, "go")]);
        let edited = talk(&[(User, "go"), (User, "go")]);
        let mut edits = Edits::default();
        edits.learn(&edited, &original);
        let mut later = talk(&[(User, "go"), (User, "go"), (Assistant, "yes"), (User, "b")]);
        edits.undo(&mut later);
        assert_eq!(
            later,
            talk(&[(User, "go"), (Assistant, "yes"), (User, "b")])
        );
        let mut other = talk(&[(User, "go"), (User, "stop")]);
        edits.undo(&mut other);
        assert_eq!(other.messages.len(), 2);
        for number in 0..2 * KEPT_MAX {
            edits.learn(&talk(&[(User, &number.to_string())]), &original);
        }
        assert_eq!(edits.0.len(), KEPT_MAX);
    }
}

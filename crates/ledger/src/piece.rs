//! JSON in pieces, so that a history is compared with an earlier one without being written out.
//!
//! Every request repeats the whole conversation. Writing 300 kB of JSON to find that 290 kB of it
//! are as before took most of a put's time; comparing the values themselves takes a tenth of it.
//! A piece is an element of an array that the document holds, or one of the marks between them.
//! Pieces that are the same have the same text, whose length is known from the earlier call.

use record::{Conversation, Message, Part, ToolCall, ToolSpec};
use serde_json::Value;

use crate::body::{Change, common, common_end};

/// What a piece holds.
#[derive(Debug, Clone, Copy)]
enum Item<'a> {
    Value(&'a Value),
    Message(&'a Message),
    Tool(&'a ToolSpec),
    Mark(&'static str),
}

/// A part of a JSON text. All pieces of a document in a row are its text.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece<'a> {
    comma: bool,
    key: Option<&'a str>,
    item: Item<'a>,
}

impl<'a> Piece<'a> {
    fn mark(mark: &'static str) -> Self {
        Self {
            comma: false,
            key: None,
            item: Item::Mark(mark),
        }
    }

    fn write(self, out: &mut Vec<u8>) -> serde_json::Result<()> {
        if self.comma {
            out.push(b',');
        }
        if let Some(key) = self.key {
            serde_json::to_writer(&mut *out, key)?;
            out.push(b':');
        }
        match self.item {
            Item::Value(value) => serde_json::to_writer(out, value),
            Item::Message(message) => serde_json::to_writer(out, message),
            Item::Tool(tool) => serde_json::to_writer(out, tool),
            Item::Mark(mark) => {
                out.extend_from_slice(mark.as_bytes());
                Ok(())
            }
        }
    }

    fn same(self, other: Self) -> bool {
        self.comma == other.comma
            && self.key == other.key
            && match (self.item, other.item) {
                (Item::Value(a), Item::Value(b)) => same(a, b),
                (Item::Message(a), Item::Message(b)) => same_message(a, b),
                (Item::Tool(a), Item::Tool(b)) => same_tool(a, b),
                (Item::Mark(a), Item::Mark(b)) => a == b,
                _ => false,
            }
    }

    fn array<T>(
        out: &mut Vec<Self>,
        comma: bool,
        key: &'a str,
        items: &'a [T],
        item: fn(&'a T) -> Item<'a>,
    ) {
        out.push(Self {
            comma,
            key: Some(key),
            item: Item::Mark("["),
        });
        out.extend(items.iter().enumerate().map(|(at, value)| Self {
            comma: at > 0,
            key: None,
            item: item(value),
        }));
        out.push(Self::mark("]"));
    }
}

/// Whether two values have the same text. `==` would not tell apart objects of another key order,
/// nor 0.0 and -0.0.
fn same(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::Null, Value::Null) => true,
        (Value::Bool(a), Value::Bool(b)) => a == b,
        (Value::String(a), Value::String(b)) => a == b,
        (Value::Number(a), Value::Number(b)) => {
            let bits = |number: &serde_json::Number| number.as_f64().map(f64::to_bits);
            a == b && (!a.is_f64() || bits(a) == bits(b))
        }
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len()
                && a.iter()
                    .zip(b)
                    .all(|((key_a, a), (key_b, b))| key_a == key_b && same(a, b))
        }
        _ => false,
    }
}

// Field by field, so that a new field cannot be forgotten here.
fn same_message(left: &Message, right: &Message) -> bool {
    let Message {
        role,
        content,
        reasoning,
        tool_calls,
        tool_call_id,
    } = left;
    let same_part = |a: &Part, b: &Part| match (a, b) {
        (Part::Text { text: a }, Part::Text { text: b }) => a == b,
        (Part::Image { url: a }, Part::Image { url: b }) => a == b,
        _ => false,
    };
    *role == right.role
        && *reasoning == right.reasoning
        && *tool_call_id == right.tool_call_id
        && content.len() == right.content.len()
        && content
            .iter()
            .zip(&right.content)
            .all(|(a, b)| same_part(a, b))
        && tool_calls.len() == right.tool_calls.len()
        && tool_calls
            .iter()
            .zip(&right.tool_calls)
            .all(|(a, b)| same_tool_call(a, b))
}

fn same_tool_call(left: &ToolCall, right: &ToolCall) -> bool {
    let ToolCall {
        id,
        name,
        arguments,
    } = left;
    *id == right.id && *name == right.name && same(arguments, &right.arguments)
}

fn same_tool(left: &ToolSpec, right: &ToolSpec) -> bool {
    let ToolSpec {
        name,
        description,
        parameters,
    } = left;
    *name == right.name && *description == right.description && same(parameters, &right.parameters)
}

/// A request in pieces: arrays that the document holds at its top are cut into their elements.
pub(crate) fn of_value(value: &Value) -> Vec<Piece<'_>> {
    let whole = |comma, key, value| Piece {
        comma,
        key,
        item: Item::Value(value),
    };
    let Value::Object(members) = value else {
        return vec![whole(false, None, value)];
    };
    let mut pieces = vec![Piece::mark("{")];
    for (at, (key, value)) in members.iter().enumerate() {
        match value {
            Value::Array(items) => Piece::array(&mut pieces, at > 0, key, items, Item::Value),
            value => pieces.push(whole(at > 0, Some(key), value)),
        }
    }
    pieces.push(Piece::mark("}"));
    pieces
}

/// A conversation in pieces.
pub(crate) fn of_conversation(conversation: &Conversation) -> Vec<Piece<'_>> {
    let Conversation { messages, tools } = conversation;
    let mut pieces = vec![Piece::mark("{")];
    Piece::array(&mut pieces, false, "messages", messages, Item::Message);
    if !tools.is_empty() {
        Piece::array(&mut pieces, true, "tools", tools, Item::Tool);
    }
    pieces.push(Piece::mark("}"));
    pieces
}

/// Where a JSON text differs from an earlier one.
#[derive(Debug, Default)]
pub(crate) struct TextChange {
    pub(crate) change: Change,
    /// What the own text has there.
    pub(crate) own: Vec<u8>,
    /// What the earlier text has there.
    pub(crate) base: Vec<u8>,
    /// Bytes of each of the own pieces.
    pub(crate) lengths: Vec<usize>,
}

impl TextChange {
    /// Compares; `base_lengths` are those of the earlier text's pieces.
    pub(crate) fn between(
        base: &[Piece<'_>],
        base_lengths: &[usize],
        own: &[Piece<'_>],
    ) -> serde_json::Result<Self> {
        let same = |(a, b): &(&Piece<'_>, &Piece<'_>)| a.same(**b);
        let head = base.iter().zip(own).take_while(same).count();
        let (base_left, own_left) = (&base[head..], &own[head..]);
        let tail = base_left
            .iter()
            .rev()
            .zip(own_left.iter().rev())
            .take_while(same)
            .count();
        let (head_lengths, tail_lengths) =
            (&base_lengths[..head], &base_lengths[base.len() - tail..]);
        let mut lengths = head_lengths.to_vec();
        let mut middle = Vec::new();
        for piece in &own_left[..own_left.len() - tail] {
            let start = middle.len();
            piece.write(&mut middle)?;
            lengths.push(middle.len() - start);
        }
        lengths.extend(tail_lengths);
        let mut base_middle = Vec::new();
        for piece in &base_left[..base_left.len() - tail] {
            piece.write(&mut base_middle)?;
        }
        // A long message of which one word is another.
        let more_head = common(&base_middle, &middle);
        let more_tail = common_end(&base_middle[more_head..], &middle[more_head..]);
        for bytes in [&mut middle, &mut base_middle] {
            bytes.truncate(bytes.len() - more_tail);
            bytes.drain(..more_head);
        }
        Ok(Self {
            change: Change {
                head: head_lengths.iter().sum::<usize>() + more_head,
                tail: tail_lengths.iter().sum::<usize>() + more_tail,
            },
            own: middle,
            base: base_middle,
            lengths,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use record::Role;
    use serde_json::json;

    use super::*;

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            (-3_i64..3).prop_map(Value::from),
            prop::sample::select(vec![0.0, -0.0, 1.5]).prop_map(Value::from),
            "[a\"\u{e9}\n]{0,5}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec(("[a-c]", inner), 0..4)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    fn text(pieces: &[Piece<'_>]) -> Vec<u8> {
        let mut out = Vec::new();
        for piece in pieces {
            piece.write(&mut out).unwrap();
        }
        out
    }

    fn conversation() -> impl Strategy<Value = Conversation> {
        let message = (0_usize..4, "[ab]{0,3}", value()).prop_map(|(role, text, arguments)| {
            let role = [Role::System, Role::User, Role::Assistant, Role::Tool][role];
            let mut message = Message::text(role, text.clone());
            if role == Role::Assistant {
                message.tool_calls = vec![ToolCall {
                    id: text.clone(),
                    name: text,
                    arguments,
                }];
            }
            message
        });
        let tool = ("[ab]", value()).prop_map(|(name, parameters)| ToolSpec {
            description: name.clone(),
            name,
            parameters,
        });
        (
            prop::collection::vec(message, 0..6),
            prop::collection::vec(tool, 0..3),
        )
            .prop_map(|(messages, tools)| Conversation { messages, tools })
    }

    fn check(base: &[Piece<'_>], own: &[Piece<'_>]) {
        let base_lengths = TextChange::between(&[], &[], base).unwrap().lengths;
        let found = TextChange::between(base, &base_lengths, own).unwrap();
        let (base_text, own_text) = (text(base), text(own));
        assert_eq!(found.change.apply(&base_text, &found.own), Ok(own_text));
        assert_eq!(found.change.middle(&base_text), Some(&found.base[..]));
        let alone = TextChange::between(&[], &[], own).unwrap();
        assert_eq!(found.lengths, alone.lengths);
    }

    proptest! {
        #[test]
        fn pieces_spell_the_document(value in value(), conversation in conversation()) {
            prop_assert_eq!(text(&of_value(&value)), serde_json::to_vec(&value).unwrap());
            prop_assert_eq!(
                text(&of_conversation(&conversation)),
                serde_json::to_vec(&conversation).unwrap()
            );
        }

        #[test]
        fn same_values_are_those_with_the_same_text(a in value(), b in value()) {
            let texts = [&a, &b].map(|value| serde_json::to_vec(value).unwrap());
            prop_assert_eq!(same(&a, &b), texts[0] == texts[1]);
        }

        #[test]
        fn a_change_makes_the_own_text_of_the_earlier_one(
            base in (value(), conversation()),
            own in (value(), conversation()),
            keep in 0_usize..6,
        ) {
            check(&of_value(&base.0), &of_value(&own.0));
            // A history that goes on from a part of the earlier one.
            let mut history = base.1.clone();
            history.messages.truncate(keep);
            history.messages.extend(own.1.messages.clone());
            for next in [&own.1, &history] {
                check(&of_conversation(&base.1), &of_conversation(next));
            }
        }
    }

    #[test]
    fn key_order_and_signs_of_zero_are_differences() {
        let pairs = [
            (r#"{"a":1,"b":2}"#, r#"{"b":2,"a":1}"#),
            ("0.0", "-0.0"),
            ("1", "1.0"),
        ];
        for (left, right) in pairs {
            let [left, right]: [Value; 2] =
                [left, right].map(|text| serde_json::from_str(text).unwrap());
            assert!(!same(&left, &right), "{left} {right}");
        }
        assert!(same(&json!({"a": [1, 0.5]}), &json!({"a": [1, 0.5]})));
    }
}

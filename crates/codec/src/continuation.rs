//! The prompt of the next call, in the ids of the earlier ones. The method is in the header of
//! the crate.

use std::{borrow::Cow, iter};

use record::{Continuation, Conversation, Message, Part, Role, ToolSpec};
use serde_json::Value;

use crate::{
    CodecError, History, Inner, Memory, Mode,
    echo::without_defaults,
    memory::{CANDIDATES_MAX, Echoed},
    template::{Frame, calling, saying},
};

/// A prompt, ready for the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// What the engine is to consume.
    pub ids: Vec<u32>,
    /// The same as text.
    pub text: String,
    /// How the ids came about.
    pub continuation: Continuation,
    /// Generated tokens of earlier calls that the request echoed in other words (arguments written
    /// anew, reasoning dropped), and that stand in the prompt as they were generated.
    pub repaired: u32,
}

/// A rendered conversation in which turns of ours are open: each may be any of a few texts.
#[derive(Debug)]
pub(crate) struct Pattern {
    segments: Vec<Segment>,
}

#[derive(Debug)]
enum Segment {
    /// Text of the template.
    Fixed(String),
    /// A turn of ours: the texts that it may be, newest first.
    Open(Vec<String>),
}

/// A place in a pattern, with the texts chosen on the way there.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    segment: usize,
    byte: usize,
    /// For every open segment up to here, in order: which of its texts.
    chosen: Vec<usize>,
}

impl Pattern {
    pub(crate) fn start(&self) -> Place {
        Place {
            segment: 0,
            byte: 0,
            chosen: Vec::new(),
        }
    }

    /// Every place that is reached by reading `text` from `place`; none when the pattern says
    /// something else.
    pub(crate) fn advance(&self, place: &Place, text: &str) -> Vec<Place> {
        let mut reached = Vec::new();
        let mut open = vec![(place.clone(), text)];
        while let Some((mut place, mut text)) = open.pop() {
            loop {
                if text.is_empty() {
                    reached.push(place);
                    break;
                }
                let here = match self.segments.get(place.segment) {
                    None => break,
                    Some(Segment::Fixed(fixed)) => fixed,
                    Some(Segment::Open(texts)) => {
                        if place.byte == 0 && !self.has_chosen(&place) {
                            // One branch per text; almost always one text fits.
                            for choice in 0..texts.len().min(CANDIDATES_MAX) {
                                let mut branch = place.clone();
                                branch.chosen.push(choice);
                                open.push((branch, text));
                            }
                            break;
                        }
                        match place.chosen.last().and_then(|&choice| texts.get(choice)) {
                            Some(chosen) => chosen,
                            None => break,
                        }
                    }
                };
                let rest = &here[place.byte..];
                if !ends_alike(rest, text) {
                    break;
                }
                if let Some(behind) = text.strip_prefix(rest) {
                    text = behind;
                    place.segment += 1;
                    place.byte = 0;
                } else if rest.starts_with(text) {
                    place.byte += text.len();
                    text = "";
                } else {
                    break;
                }
            }
        }
        reached
    }

    /// Whether `place` is in a turn of ours or right behind one.
    pub(crate) fn in_turn_of_ours(&self, place: &Place) -> bool {
        let open = |index: usize| matches!(self.segments.get(index), Some(Segment::Open(_)));
        open(place.segment) || (place.byte == 0 && place.segment > 0 && open(place.segment - 1))
    }

    /// Whether the open segment at `place` has its text chosen.
    fn has_chosen(&self, place: &Place) -> bool {
        let open = self.segments[..=place.segment]
            .iter()
            .filter(|segment| matches!(segment, Segment::Open(_)))
            .count();
        place.chosen.len() >= open
    }

    /// The whole text: chosen texts up to `place`, the newest behind it.
    fn text(&self, place: Option<&Place>) -> String {
        let mut chosen = place.map_or(&[][..], |place| &place.chosen).iter();
        let mut out = String::new();
        for segment in &self.segments {
            match segment {
                Segment::Fixed(text) => out.push_str(text),
                Segment::Open(texts) => {
                    let choice = chosen.next().copied().unwrap_or(0);
                    out.push_str(texts.get(choice).map_or("", String::as_str));
                }
            }
        }
        out
    }
}

/// A word that occurs nowhere in the conversation, to stand for turns of ours.
fn placeholder(conversation: &Conversation) -> String {
    (0u32..)
        .map(|number| format!("zq{number}turn"))
        .find(|word| !mentions(conversation, word))
        .unwrap_or_default()
}

/// Whether the word occurs in anything that a template may print.
fn mentions(conversation: &Conversation, word: &str) -> bool {
    fn in_value(value: &Value, word: &str) -> bool {
        match value {
            Value::String(text) => text.contains(word),
            Value::Array(items) => items.iter().any(|item| in_value(item, word)),
            Value::Object(object) => object
                .iter()
                .any(|(name, value)| name.contains(word) || in_value(value, word)),
            _ => false,
        }
    }
    let in_message = |message: &Message| {
        let in_part = |part: &Part| match part {
            Part::Text { text } => text.contains(word),
            Part::Image { .. } => false,
        };
        let reasoning = message.reasoning.as_ref();
        let answers = message.tool_call_id.as_ref();
        message.content.iter().any(in_part)
            || reasoning.is_some_and(|text| text.contains(word))
            || answers.is_some_and(|text| text.contains(word))
            || message.tool_calls.iter().any(|call| {
                call.name.contains(word)
                    || call.id.contains(word)
                    || in_value(&call.arguments, word)
            })
    };
    let in_tool = |tool: &ToolSpec| {
        tool.name.contains(word)
            || tool.description.contains(word)
            || in_value(&tool.parameters, word)
    };
    conversation.messages.iter().any(in_message) || conversation.tools.iter().any(in_tool)
}

/// The longest end of `text` that is a beginning of `other`, in bytes.
fn overlap(text: &str, other: &str) -> usize {
    (0..=other.len().min(text.len()))
        .rev()
        .find(|&length| other.is_char_boundary(length) && text.ends_with(&other[..length]))
        .unwrap_or(0)
}

/// Whether two texts agree at the end of the shorter one. Texts of one rollout have a long
/// beginning in common, so that those that differ are told apart here.
fn ends_alike(one: &str, other: &str) -> bool {
    const LOOKED_AT: usize = 64;
    let end = one.len().min(other.len());
    let start = end.saturating_sub(LOOKED_AT);
    one.as_bytes()[start..end] == other.as_bytes()[start..end]
}

/// What stands for a turn of ours in a rendered conversation.
struct Echo<'a> {
    word: String,
    frame: &'a Frame,
    raw_texts: Vec<&'a str>,
}

/// Cuts the rendered text at the placeholders. `None` when one is missing, out of order or
/// framed otherwise than probed: the template does not print turns as we expect.
fn pattern(inner: &Inner, rendered: &str, echoes: &[Echo<'_>]) -> Option<Pattern> {
    // Each stands there once: counted over all of them, or long histories would be read once per
    // turn.
    if let Some(first) = echoes.first() {
        let common = first.word.strip_suffix("0end").unwrap_or(&first.word);
        if rendered.matches(common).count() != echoes.len() {
            return None;
        }
    }
    let mut segments = Vec::with_capacity(2 * echoes.len() + 1);
    let mut rest = rendered;
    let turn = &inner.turn;
    for echo in echoes {
        let (before, after) = rest.split_once(echo.word.as_str())?;
        let before = before.strip_suffix(echo.frame.opening.as_str())?;
        let header = overlap(before, &turn.generation_prompt);
        let mut fixed = before[..before.len() - header].to_owned();
        if header > 0 {
            fixed.push_str(&turn.generation_prompt);
        }
        segments.push(Segment::Fixed(fixed));
        let tail = echo.frame.tail.as_str();
        let behind_tail = after.strip_prefix(tail).filter(|_| !tail.is_empty());
        let is_call = *echo.frame != turn.said;
        if is_call && behind_tail.is_none() {
            return None;
        }
        // A cut reply has no end of turn of its own, and gets the template's.
        let end = if is_call { &turn.end_text } else { tail };
        let texts = echo
            .raw_texts
            .iter()
            .map(|raw| {
                let stop = inner
                    .stop_texts
                    .iter()
                    .find(|stop| raw.ends_with(stop.as_str()));
                match (stop, behind_tail) {
                    (Some(_), Some(_)) => (*raw).to_owned(),
                    (None, Some(_)) => format!("{raw}{end}"),
                    // The stop token is at the same time the header of the next turn.
                    (Some(stop), None) if after.starts_with(stop.as_str()) => {
                        raw[..raw.len() - stop.len()].to_owned()
                    }
                    (_, None) => (*raw).to_owned(),
                }
            })
            .collect();
        segments.push(Segment::Open(texts));
        rest = behind_tail.unwrap_or(after);
    }
    segments.push(Segment::Fixed(rest.to_owned()));
    Some(Pattern { segments })
}

/// See [`crate::Codec::prompt`].
pub(crate) fn prompt(
    inner: &Inner,
    mode: &Mode,
    conversation: &Conversation,
    memory: &Memory,
) -> Result<Prompt, CodecError> {
    if *mode == Mode::Exact
        && let Some(prompt) = exact(inner, conversation, memory)?
    {
        return Ok(prompt);
    }
    let text = inner.template.render(conversation, true)?;
    let ids = inner.tokens.encode(&text)?;
    let foreign = assistants(conversation).count() as u32;
    Ok(Prompt {
        continuation: Continuation {
            encoded: ids.len() as u32,
            echoes_foreign: foreign,
            ..Continuation::default()
        },
        ids,
        text,
        repaired: 0,
    })
}

fn assistants(conversation: &Conversation) -> impl Iterator<Item = &Message> {
    conversation
        .messages
        .iter()
        .filter(|message| message.role == Role::Assistant)
}

/// The prompt with turns of ours as generated; `None` when the template does not print them.
fn exact(
    inner: &Inner,
    conversation: &Conversation,
    memory: &Memory,
) -> Result<Option<Prompt>, CodecError> {
    let word = placeholder(conversation);
    let mut shown: Vec<Cow<'_, Message>> =
        conversation.messages.iter().map(Cow::Borrowed).collect();
    let mut echoes = Vec::new();
    let (mut matched, mut repaired) = (0, 0);
    for message in &mut shown {
        if message.role != Role::Assistant {
            continue;
        }
        let plain = without_defaults(message, &conversation.tools);
        let forms: Vec<&Message> = iter::once(&**message).chain(&plain).collect();
        let Some(Echoed {
            raw_texts,
            reworded_tokens,
        }) = memory.echoed(&forms)
        else {
            continue;
        };
        matched += 1;
        repaired += reworded_tokens;
        if inner.settings.history == History::AsTemplate
            && let Some(newest) = raw_texts.first()
        {
            let reasoning = crate::grammar::parse(inner, newest, &[]).message.reasoning;
            if reasoning.is_some() {
                message.to_mut().reasoning = reasoning;
                continue;
            }
        }
        let word = format!("{word}{}end", echoes.len());
        let frame = match &inner.turn.called {
            Some(frame) if inner.calls_stay_calls && !message.tool_calls.is_empty() => {
                *message = Cow::Owned(calling(&word));
                frame
            }
            _ => {
                *message = Cow::Owned(saying(&word));
                &inner.turn.said
            }
        };
        echoes.push(Echo {
            word,
            frame,
            raw_texts,
        });
    }
    let mut turns = shown.iter().map(|message| &**message);
    let rendered = match inner
        .template
        .render_turns(&mut turns, &conversation.tools, true)
    {
        Ok(rendered) => rendered,
        // The template needs the calls. As it came it may still be accepted.
        Err(CodecError::Template { .. }) if !echoes.is_empty() => return Ok(None),
        Err(other) => return Err(other),
    };
    let Some(pattern) = pattern(inner, &rendered, &echoes) else {
        return Ok(None);
    };
    let found = memory.longest(&pattern, &inner.stop_texts);
    let text = pattern.text(found.as_ref().map(|found| &found.place));
    let (parent, mut ids, from) = match found {
        Some(found) => (Some(found.call), found.ids, found.text_bytes),
        None => (None, Vec::new(), 0),
    };
    let exact = ids.len();
    // Recorded texts end where the pattern was matched, so this is a character boundary.
    let rest = text.get(from..).unwrap_or_default();
    ids.extend(inner.tokens.encode(rest)?);
    let foreign = assistants(conversation).count() as u32 - matched;
    Ok(Some(Prompt {
        continuation: Continuation {
            parent,
            exact: exact as u32,
            encoded: (ids.len() - exact) as u32,
            echoes_matched: matched,
            echoes_foreign: foreign,
            media: Vec::new(),
        },
        ids,
        text,
        repaired,
    }))
}

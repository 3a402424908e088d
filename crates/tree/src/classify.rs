//! What kind of call each call is, which conversation it belongs to, and which call it carries
//! on. No harness is known by name: only prefixes, tools, and who quotes whom.

use std::collections::HashMap;

use record::{Call, Message, Role};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::digest::Digest;
use crate::tree::Place;

/// A text shorter than this (bytes) is too common to prove that one call quotes another.
const QUOTE_BYTES_MIN: usize = 24;

/// A call with at most this many tools is auxiliary when the main conversation has at least
/// twice as many plus one.
const SIDE_TOOLS_MAX: usize = 2;

/// Headers with which clients mark sub-agents.
const SUBAGENT_HEADERS: [&str; 3] = [
    "x-claude-code-agent-id",
    "x-openai-subagent",
    "x-parent-session-id",
];

/// What kind of call a call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallClass {
    /// The conversation that does the task.
    Main,
    /// A conversation that the main one started.
    Subagent,
    /// Writes the summary that replaces a history.
    Compaction,
    /// Title, memory, topic check: nothing continues it.
    Side,
}

impl CallClass {
    /// The word used in tables and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::Subagent => "subagent",
            Self::Compaction => "compaction",
            Self::Side => "side",
        }
    }
}

/// Calls with the same system messages, tools and first message.
struct Family {
    /// Places of its calls, in order of arrival.
    calls: Vec<usize>,
}

fn text_of(message: &Message) -> String {
    message.text_content().trim().to_owned()
}

/// The messages of a conversation's opening that could quote somebody: everything but what the
/// model said, unless `replies` too.
fn quotes(call: &Call, quoted: &str, replies: bool) -> bool {
    quoted.len() >= QUOTE_BYTES_MIN
        && call.conversation.messages.iter().any(|message| {
            (replies || message.role != Role::Assistant) && message.text_content().contains(quoted)
        })
}

fn string_leaves<'a>(value: &'a Value, leaves: &mut Vec<&'a str>) {
    match value {
        Value::String(text) => leaves.push(text),
        Value::Array(items) => items.iter().for_each(|item| string_leaves(item, leaves)),
        Value::Object(map) => map.values().for_each(|item| string_leaves(item, leaves)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Whether a tool call of `parent` holds what `child` was asked: a quarter of the child's first
/// message at least.
fn spawned(parent: &Call, child: &Call) -> bool {
    let Some(first) = first_message(child).map(text_of) else {
        return false;
    };
    parent.reply.iter().any(|reply| {
        reply.tool_calls.iter().any(|tool_call| {
            let mut leaves = Vec::new();
            string_leaves(&tool_call.arguments, &mut leaves);
            leaves.iter().any(|leaf| {
                let leaf = leaf.trim();
                leaf.len() >= QUOTE_BYTES_MIN
                    && leaf.len() * 4 >= first.len()
                    && first.contains(leaf)
            })
        })
    })
}

fn first_message(call: &Call) -> Option<&Message> {
    call.conversation
        .messages
        .iter()
        .find(|message| message.role != Role::System)
}

fn families(digests: &[Digest]) -> Vec<Family> {
    let mut by_key: HashMap<(u64, u64, Option<u64>), usize> = HashMap::new();
    let mut families: Vec<Family> = Vec::new();
    for (at, digest) in digests.iter().enumerate() {
        let key = (digest.system, digest.tools, digest.first());
        let family = *by_key.entry(key).or_insert_with(|| {
            families.push(Family { calls: Vec::new() });
            families.len() - 1
        });
        families[family].calls.push(at);
    }
    families
}

/// The conversation that does the task: the earliest with tools; when no call has tools, the
/// earliest that goes on after its first reply.
fn main_family(families: &[Family], digests: &[Digest]) -> usize {
    let with_tools = families
        .iter()
        .position(|family| digests[family.calls[0]].tools_count > 0);
    let goes_on = || {
        families.iter().position(|family| {
            let length = |&at: &usize| digests[at].messages.len();
            family.calls.iter().map(length).max() > family.calls.first().map(length)
        })
    };
    with_tools.or_else(goes_on).unwrap_or(0)
}

struct Decision {
    class: CallClass,
    evidence: String,
    /// Starts a new segment of the main conversation.
    resets: bool,
}

/// What a family other than the main one is.
fn decide(
    calls: &[&Call],
    digests: &[Digest],
    main: &Family,
    segment_firsts: &[Option<u64>],
    family: &Family,
) -> Decision {
    let opener = family.calls[0];
    let (own, of_main) = (&digests[opener], &digests[main.calls[0]]);
    let aux = |class, evidence: String| Decision {
        class,
        evidence,
        resets: false,
    };
    let header = |at: usize| {
        calls[at].headers.iter().find_map(|(name, _)| {
            SUBAGENT_HEADERS
                .into_iter()
                .find(|known| name.eq_ignore_ascii_case(known))
        })
    };
    if let Some(name) = header(opener)
        && header(main.calls[0]).is_none()
    {
        return aux(CallClass::Subagent, format!("header {name}"));
    }
    if own.tools_count == 0 && of_main.tools_count > 0 {
        return aux(
            CallClass::Side,
            format!("no tools, main has {}", of_main.tools_count),
        );
    }
    // What the same conversation opened with before, or the same prompt and tools around a
    // summary: the main conversation under a new heading.
    if segment_firsts.contains(&own.first()) {
        return Decision {
            class: CallClass::Main,
            evidence: "first message of the main conversation, other system or tools".to_owned(),
            resets: false,
        };
    }
    let earlier = || calls[..opener].iter().copied();
    let carries_on = earlier().find(|call| {
        call.reply
            .as_ref()
            .is_some_and(|reply| quotes(calls[opener], &text_of(reply), true))
    });
    let same_heading = own.system == of_main.system && own.tools == of_main.tools;
    let same_tools = own.tools == of_main.tools && own.tools_count > 0;
    if let (true, Some(quoted)) = (same_heading || same_tools, carries_on) {
        return Decision {
            class: CallClass::Main,
            evidence: format!("new history quotes the reply of call {}", quoted.id.index),
            resets: true,
        };
    }
    if let Some(parent) = earlier().find(|call| spawned(call, calls[opener])) {
        return aux(
            CallClass::Subagent,
            format!(
                "first message is in a tool call of call {}",
                parent.id.index
            ),
        );
    }
    if same_heading {
        return Decision {
            class: CallClass::Main,
            evidence: "same system and tools, new first message".to_owned(),
            resets: true,
        };
    }
    if own.tools_count <= SIDE_TOOLS_MAX && of_main.tools_count > 2 * own.tools_count {
        return aux(
            CallClass::Side,
            format!(
                "{} tools, main has {}",
                own.tools_count, of_main.tools_count
            ),
        );
    }
    let differs = match (own.system == of_main.system, own.tools == of_main.tools) {
        (false, false) => "system and tools",
        (false, true) => "system",
        _ => "tools",
    };
    aux(
        CallClass::Subagent,
        format!("other {differs} and first message than main"),
    )
}

/// Fills in class, thread, segment and previous of every place.
pub(crate) fn classify(calls: &[&Call], places: &mut [Place]) {
    if calls.is_empty() {
        return;
    }
    let digests: Vec<Digest> = calls.iter().map(|call| Digest::of(call)).collect();
    let families = families(&digests);
    let main = main_family(&families, &digests);
    let mut segment = 0;
    let mut segment_firsts = vec![digests[families[main].calls[0]].first()];
    let mut segment_of_first: HashMap<Option<u64>, u32> = HashMap::from([(segment_firsts[0], 0)]);
    let mut openers: Vec<usize> = Vec::new();
    for (number, family) in families.iter().enumerate() {
        let decision = if number == main {
            Decision {
                class: CallClass::Main,
                evidence: String::new(),
                resets: false,
            }
        } else {
            decide(calls, &digests, &families[main], &segment_firsts, family)
        };
        let first = digests[family.calls[0]].first();
        if decision.resets {
            segment += 1;
            segment_firsts.push(first);
            segment_of_first.insert(first, segment);
            openers.push(family.calls[0]);
        }
        let own_segment = match decision.class {
            CallClass::Main => segment_of_first.get(&first).copied().unwrap_or(segment),
            _ => segment,
        };
        for &at in &family.calls {
            places[at].class = decision.class;
            places[at].class_evidence.clone_from(&decision.evidence);
            places[at].thread = if decision.class == CallClass::Main {
                0
            } else {
                number as u32 + 1
            };
            places[at].segment = own_segment;
        }
    }
    mark_compactions(calls, &openers, places);
    link(calls, &digests, places);
}

/// A call whose reply is quoted where a new segment opens wrote the summary.
fn mark_compactions(calls: &[&Call], openers: &[usize], places: &mut [Place]) {
    for at in 0..calls.len() {
        let Some(reply) = &calls[at].reply else {
            continue;
        };
        let side = places[at].class == CallClass::Side;
        if !(side || places[at].class == CallClass::Main) || !reply.tool_calls.is_empty() {
            continue;
        }
        let text = text_of(reply);
        let quoting = openers
            .iter()
            .find(|&&opener| opener > at && quotes(calls[opener], &text, side));
        if let Some(&opener) = quoting {
            places[at].class = CallClass::Compaction;
            places[at].class_evidence = format!(
                "reply opens the new history of call {}",
                calls[opener].id.index
            );
        }
    }
}

/// Which call each call carries on.
fn link(calls: &[&Call], digests: &[Digest], places: &mut [Place]) {
    // Replies by conversation: (thread, segment, reply) to places, in order of arrival.
    let mut replies: HashMap<(u32, u32, u64), Vec<usize>> = HashMap::new();
    for at in 0..calls.len() {
        let extended = places[at].extends.and_then(|extended| {
            calls[..at]
                .iter()
                .position(|call| call.id.index == extended)
        });
        let depth = |earlier: usize| digests[earlier].messages.len();
        // An edited history may still extend an early call token by token, and yet carry on a
        // later one.
        let previous = match (extended, echoed(at, digests, places, &replies)) {
            (Some(extended), Some(echoed)) if depth(echoed) > depth(extended) => Some(echoed),
            (Some(extended), _) => Some(extended),
            (None, Some(echoed)) => Some(echoed),
            (None, None) => rewritten(at, digests, places),
        };
        places[at].previous = previous.map(|found| calls[found].id.index);
        if let Some(reply) = digests[at].reply {
            let key = (places[at].thread, places[at].segment, reply);
            replies.entry(key).or_default().push(at);
        }
    }
}

/// The last turn of the history that is a reply of ours; of equal replies the one that was said
/// at that place, then a delivered one, then the latest.
fn echoed(
    at: usize,
    digests: &[Digest],
    places: &[Place],
    replies: &HashMap<(u32, u32, u64), Vec<usize>>,
) -> Option<usize> {
    let own = &digests[at];
    (0..own.messages.len()).rev().find_map(|turn| {
        if own.roles[turn] != Role::Assistant {
            return None;
        }
        let key = (places[at].thread, places[at].segment, own.messages[turn]);
        replies.get(&key)?.iter().copied().min_by_key(|&earlier| {
            (
                digests[earlier].messages.len().abs_diff(turn),
                !places[earlier].delivered,
                std::cmp::Reverse(earlier),
            )
        })
    })
}

/// The longest earlier history that this one starts with and answers with a turn of the model,
/// though not in our words.
fn rewritten(at: usize, digests: &[Digest], places: &[Place]) -> Option<usize> {
    let own = &digests[at];
    (0..at)
        .filter(|&earlier| {
            let before = &digests[earlier].messages;
            (places[earlier].thread, places[earlier].segment)
                == (places[at].thread, places[at].segment)
                && !before.is_empty()
                && places[earlier].generated
                && own.roles.get(before.len()) == Some(&Role::Assistant)
                && own.messages.starts_with(before)
        })
        .max_by_key(|&earlier| {
            (
                digests[earlier].messages.len(),
                places[earlier].delivered,
                earlier,
            )
        })
}

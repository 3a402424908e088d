//! What kind of call each call is, which conversation it belongs to, and which call it carries
//! on. No harness is known by name: only prefixes, tools, and who quotes whom.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use record::{Call, Message, Role};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::digest::{Digest, Histories};
use crate::fork::ForkCause;
use crate::link::Links;
use crate::quote::Quotes;
use crate::tree::{Place, Tree};
use crate::unspoken;

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

fn string_leaves<'a>(value: &'a Value, leaves: &mut Vec<&'a str>) {
    match value {
        Value::String(text) => leaves.push(text),
        Value::Array(items) => items.iter().for_each(|item| string_leaves(item, leaves)),
        Value::Object(map) => map.values().for_each(|item| string_leaves(item, leaves)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// What earlier calls said, ready to be found in what later calls were sent.
struct Said {
    /// Texts of replies, by place.
    replies: Quotes<u8>,
    /// Which replies a message quotes, by its key: a long system message comes with every call
    /// and is searched once.
    quoted: RefCell<HashMap<u64, Rc<[usize]>>>,
    /// Texts in the arguments of tool calls, by place.
    arguments: Quotes<u8>,
}

impl Said {
    fn new(calls: &[&Call]) -> Self {
        let mut said = Self {
            replies: Quotes::new(QUOTE_BYTES_MIN),
            quoted: RefCell::default(),
            arguments: Quotes::new(QUOTE_BYTES_MIN),
        };
        for (at, call) in calls.iter().enumerate() {
            let Some(reply) = &call.reply else { continue };
            said.replies.add(at, text_of(reply).as_bytes());
            let mut leaves = Vec::new();
            for tool_call in &reply.tool_calls {
                string_leaves(&tool_call.arguments, &mut leaves);
            }
            for leaf in leaves {
                said.arguments.add(at, leaf.trim().as_bytes());
            }
        }
        said
    }

    /// The replies that a message quotes, by their numbers in `replies`.
    fn quoted_by(&self, key: u64, message: &Message) -> Rc<[usize]> {
        let mut known = self.quoted.borrow_mut();
        let found = known.entry(key).or_insert_with(|| {
            let text = message.text_content();
            self.replies.numbers(text.as_bytes()).into()
        });
        Rc::clone(found)
    }

    /// The latest call before `before` whose whole reply one of the messages quotes.
    fn quoted<'a>(
        &self,
        messages: impl Iterator<Item = (u64, &'a Message)>,
        before: usize,
        accept: impl Fn(&Message, usize) -> bool,
    ) -> Option<usize> {
        let latest = |(key, message): (u64, &Message)| {
            let numbers = self.quoted_by(key, message);
            self.replies
                .latest_of(&numbers, before, |_, owner| accept(message, owner))
        };
        messages.filter_map(latest).max()
    }

    /// The latest call before `at` with a tool call that holds what the call `at` was asked: a
    /// quarter of its first message at least.
    fn spawner(&self, calls: &[&Call], at: usize) -> Option<usize> {
        let first = text_of(first_message(calls[at])?);
        self.arguments.latest(first.as_bytes(), at, |leaf, _| {
            leaf.len() * 4 >= first.len()
        })
    }
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

/// What a family is.
struct Decision {
    class: CallClass,
    evidence: String,
    /// Why it starts a new segment of the main conversation, if it does.
    opens: Option<ForkCause>,
    /// Place of the call that asked for it.
    spawned_by: Option<usize>,
}

impl Decision {
    fn new(class: CallClass, evidence: impl Into<String>) -> Self {
        Self {
            class,
            evidence: evidence.into(),
            opens: None,
            spawned_by: None,
        }
    }

    fn opening(cause: ForkCause, evidence: impl Into<String>) -> Self {
        Self {
            opens: Some(cause),
            ..Self::new(CallClass::Main, evidence)
        }
    }
}

/// The header by which a client marks a sub-agent.
fn subagent_header(call: &Call) -> Option<&'static str> {
    call.headers.iter().find_map(|(name, _)| {
        SUBAGENT_HEADERS
            .into_iter()
            .find(|known| name.eq_ignore_ascii_case(known))
    })
}

/// What a family other than the main one is.
fn decide(
    calls: &[&Call],
    digests: &[Digest],
    said: &Said,
    (main, opener): (usize, usize),
    segment_firsts: &HashSet<Option<u64>>,
) -> Decision {
    let (own, of_main) = (&digests[opener], &digests[main]);
    let spawner = said.spawner(calls, opener);
    let subagent = |evidence: String| Decision {
        spawned_by: spawner,
        ..Decision::new(CallClass::Subagent, evidence)
    };
    if let Some(name) = subagent_header(calls[opener])
        && subagent_header(calls[main]).is_none()
    {
        return subagent(format!("header {name}"));
    }
    if own.tools_count == 0 && of_main.tools_count > 0 {
        let evidence = format!("no tools, main has {}", of_main.tools_count);
        return Decision::new(CallClass::Side, evidence);
    }
    // What the same conversation opened with before, or the same prompt and tools around a
    // summary: the main conversation under a new heading.
    if segment_firsts.contains(&own.first()) {
        let evidence = "first message of the main conversation, other system or tools";
        return Decision::new(CallClass::Main, evidence);
    }
    let same_heading = own.system == of_main.system && own.tools == of_main.tools;
    let same_tools = own.tools == of_main.tools && own.tools_count > 0;
    if (same_heading || same_tools)
        && let Some(quoted) = said.quoted(own.all(calls[opener]), opener, |_, _| true)
    {
        return Decision::opening(
            ForkCause::Compaction,
            format!(
                "new history quotes the reply of call {}",
                calls[quoted].id.index
            ),
        );
    }
    if let Some(parent) = spawner {
        return subagent(format!(
            "first message is in a tool call of call {}",
            calls[parent].id.index
        ));
    }
    if same_heading {
        return Decision::opening(
            ForkCause::HistoryEdited,
            "same system and tools, new first message",
        );
    }
    if own.tools_count <= SIDE_TOOLS_MAX && of_main.tools_count > 2 * own.tools_count {
        let evidence = format!(
            "{} tools, main has {}",
            own.tools_count, of_main.tools_count
        );
        return Decision::new(CallClass::Side, evidence);
    }
    let differs = match (own.system == of_main.system, own.tools == of_main.tools) {
        (false, false) => "system and tools",
        (false, true) => "system",
        _ => "tools",
    };
    subagent(format!("other {differs} and first message than main"))
}

/// The keys of all calls. A call is compared with the call that it extends, else with the one
/// before it.
fn digests(calls: &[&Call], places: &[Place]) -> Vec<Digest> {
    let mut digests: Vec<Digest> = Vec::with_capacity(calls.len());
    for (at, call) in calls.iter().enumerate() {
        let extended = places[at].extends.and_then(|index| position(places, index));
        let like = extended.or(at.checked_sub(1)).filter(|&like| like < at);
        let like = like.map(|like| (calls[like], &digests[like]));
        digests.push(Digest::of(call, like));
    }
    digests
}

/// Place of a call by its arrival number.
pub(crate) fn position(places: &[Place], call: u32) -> Option<usize> {
    places.binary_search_by_key(&call, |place| place.call).ok()
}

/// Fills in class, thread, segment and previous of every place; returns what was compared.
pub(crate) fn classify(
    calls: &[&Call],
    given: &[Option<CallClass>],
    tree: &mut Tree,
) -> Vec<Digest> {
    let digests = digests(calls, &tree.places);
    if calls.is_empty() {
        return digests;
    }
    let silent = |call: &&Call| call.conversation.messages.is_empty();
    if calls.iter().all(silent) {
        unspoken::classify(calls, given, tree);
        return digests;
    }
    let places = &mut tree.places;
    let families = families(&digests);
    let main = main_family(&families, &digests);
    let main_opener = families[main].calls[0];
    let said = Said::new(calls);
    let mut openers: Vec<usize> = Vec::new();
    let mut segment_firsts = HashSet::from([digests[main_opener].first()]);
    // Families come in the order of their first calls: what one is depends on what came before.
    for (number, family) in families.iter().enumerate() {
        let opener = family.calls[0];
        let decision = if number == main {
            Decision::new(CallClass::Main, "")
        } else {
            decide(
                calls,
                &digests,
                &said,
                (main_opener, opener),
                &segment_firsts,
            )
        };
        if decision.opens.is_some() {
            segment_firsts.insert(digests[opener].first());
            openers.push(opener);
        }
        let spawned_by = decision.spawned_by.map(|parent| calls[parent].id.index);
        for &at in &family.calls {
            let place = &mut places[at];
            place.class = decision.class;
            place.class_evidence.clone_from(&decision.evidence);
            place.thread = match decision.class {
                CallClass::Main => 0,
                _ => number as u32 + 1,
            };
            place.spawned_by = spawned_by;
        }
        places[opener].opens = decision.opens;
    }
    shortened(calls, &digests, &said, places, &mut openers);
    mark_compactions(calls, &digests, &said, &openers, places);
    for (place, class) in places.iter_mut().zip(given) {
        if let Some(class) = *class {
            place.class = class;
            "given".clone_into(&mut place.class_evidence);
        }
    }
    Links::new(calls, &digests).fill(places);
    digests
}

/// Marks calls of the main conversation that keep its first message, but lost a part of the
/// history and quote a reply instead: a summary replaced what is missing.
fn shortened(
    calls: &[&Call],
    digests: &[Digest],
    said: &Said,
    places: &mut [Place],
    openers: &mut Vec<usize>,
) {
    let mut histories = Histories::default();
    let mut last: Option<usize> = None;
    for at in 0..calls.len() {
        if places[at].class != CallClass::Main {
            continue;
        }
        let own = &digests[at];
        if let Some(last) = last
            && places[at].opens.is_none()
            && own.messages.len() < digests[last].messages.len()
            && let Some((_, common)) = histories.nearest(0, own, |_| true)
            && 0 < common
            && common < own.messages.len()
        {
            let rest = own.rest(calls[at], common);
            let quoted = said.quoted(rest, at, |message, owner| {
                let asks = calls[owner]
                    .reply
                    .as_ref()
                    .is_some_and(|reply| reply.tool_calls.is_empty());
                // A turn of the model that was said is an echo, not a quotation.
                asks && (message.role != Role::Assistant || places[owner].class != CallClass::Main)
            });
            if let Some(quoted) = quoted {
                places[at].opens = Some(ForkCause::Compaction);
                places[at].class_evidence = format!(
                    "shortened history quotes the reply of call {}",
                    calls[quoted].id.index
                );
                openers.push(at);
            }
        }
        histories.add(at, 0, own);
        last = Some(at);
    }
}

/// A call whose reply is quoted where a new segment opens wrote the summary.
fn mark_compactions(
    calls: &[&Call],
    digests: &[Digest],
    said: &Said,
    openers: &[usize],
    places: &mut [Place],
) {
    for &opener in openers {
        let mut wrote: Vec<usize> = Vec::new();
        for (key, message) in digests[opener].all(calls[opener]) {
            for &number in said.quoted_by(key, message).iter() {
                let (_, owners) = said.replies.said(number);
                wrote.extend(owners.iter().filter(|&&owner| {
                    let side = places[owner].class == CallClass::Side;
                    let asks = calls[owner]
                        .reply
                        .as_ref()
                        .is_some_and(|reply| reply.tool_calls.is_empty());
                    let main =
                        places[owner].class == CallClass::Main && message.role != Role::Assistant;
                    owner < opener && asks && (side || main)
                }));
            }
        }
        for owner in wrote {
            if places[owner].class != CallClass::Compaction {
                places[owner].class = CallClass::Compaction;
                places[owner].class_evidence = format!(
                    "reply opens the new history of call {}",
                    calls[opener].id.index
                );
            }
        }
    }
}

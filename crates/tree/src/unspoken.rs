//! Calls of which only tokens are known: captures of other gateways. What the messages would show
//! is read from the tokens themselves, and from the classes that came with the calls.
//!
//! A prompt carries on the call whose prompt and output it extends. Otherwise it carries on the
//! latest call whose output comes back in it ("comes back": the beginning or the end of the output
//! in at least [`WINDOW`] tokens, or the prompt leaves it after its first token). When the output
//! of one call comes back, but nothing of what that call had carried on, it was a summary, and a
//! new segment opens. A prompt that holds a part of an earlier output, while that output is carried on
//! elsewhere, is that of a sub-agent.

use std::collections::{HashMap, HashSet};

use record::Call;

use crate::builder::output_of;
use crate::classify::{CallClass, position};
use crate::fork::ForkCause;
use crate::quote::{Quotes, windows};
use crate::tree::{Place, Tree};

/// Tokens that must come back in a row, so that it is no accident.
const WINDOW: usize = 12;

/// Outputs by their beginnings and ends, to be found in later prompts.
struct Outputs {
    edges: Quotes<u32>,
}

impl Outputs {
    fn add(&mut self, at: usize, output: &[u32]) {
        // The last token ends the turn; a template may write another one in its place.
        let said = &output[..output.len().saturating_sub(1)];
        if said.len() >= WINDOW {
            self.edges.add(at, &said[..WINDOW]);
            self.edges.add(at, &said[said.len() - WINDOW..]);
        }
    }

    /// Calls whose output comes back in `tokens`, sorted.
    fn back_in(&self, tokens: &[u32], before: usize) -> Vec<usize> {
        let mut back = Vec::new();
        for number in self.edges.numbers(tokens) {
            let (_, owners) = self.edges.said(number);
            // Of equal outputs the latest stands for all.
            let earlier = owners.partition_point(|&owner| owner < before);
            back.extend(owners[..earlier].last());
        }
        back.sort_unstable();
        back.dedup();
        back
    }
}

/// Fills in class, thread, segment and previous of every place.
pub(crate) fn classify(calls: &[&Call], given: &[Option<CallClass>], tree: &mut Tree) {
    let mut walk = Walk {
        outputs: Outputs {
            edges: Quotes::new(WINDOW),
        },
        prompts: HashMap::new(),
        threads: 1,
        segments: 1,
        compaction: None,
        parts: Parts::default(),
        extended: tree
            .places
            .iter()
            .filter_map(|place| place.extends)
            .collect(),
        continued: vec![false; calls.len()],
    };
    for at in 0..calls.len() {
        // What carries on a sub-agent is one.
        let inherited = exact(at, tree).map(|previous| tree.places[previous].class);
        let class = given[at].unwrap_or(match inherited {
            Some(CallClass::Subagent) => CallClass::Subagent,
            _ => CallClass::Main,
        });
        tree.places[at].class = class;
        if given[at].is_some() {
            "given".clone_into(&mut tree.places[at].class_evidence);
        }
        if class == CallClass::Main {
            walk.main(at, calls, given, tree);
        } else {
            walk.auxiliary(at, tree);
        }
        if let Some(previous) = tree.places[at].previous
            && let Some(previous) = position(&tree.places, previous)
        {
            walk.continued[previous] = true;
        }
        if let (true, Some(node)) = (tree.places[at].generated, tree.places[at].prompt_node) {
            let best = walk.prompts.entry(node).or_insert(at);
            if tree.places[at].delivered >= tree.places[*best].delivered {
                *best = at;
            }
        }
        walk.outputs.add(at, output_of(calls[at]));
    }
}

struct Walk {
    outputs: Outputs,
    /// The best call by the node where its prompt ends.
    prompts: HashMap<usize, usize>,
    threads: u32,
    segments: u32,
    /// A call that was given as a compaction and that no new segment follows yet.
    compaction: Option<usize>,
    parts: Parts,
    /// Calls that some call extends token by token.
    extended: HashSet<u32>,
    /// Calls that a later one carries on.
    continued: Vec<bool>,
}

/// Every window of the outputs so far, filled in when it is first asked for.
#[derive(Default)]
struct Parts {
    windows: HashMap<u64, (usize, usize)>,
    calls: usize,
}

impl Parts {
    /// The latest call before `before` of whose output `tokens` hold a part.
    fn source(&mut self, tokens: &[u32], before: usize, calls: &[&Call]) -> Option<usize> {
        let new = calls.iter().enumerate().take(before).skip(self.calls);
        for (at, call) in new {
            let found = windows(output_of(call), WINDOW);
            self.windows
                .extend(found.map(|(from, hash)| (hash, (at, from))));
        }
        self.calls = self.calls.max(before);
        windows(tokens, WINDOW)
            .filter_map(|(at, hash)| {
                let &(owner, from) = self.windows.get(&hash)?;
                let same = output_of(calls[owner])[from..].starts_with(&tokens[at..at + WINDOW]);
                (owner < before && same).then_some(owner)
            })
            .max()
    }
}

impl Walk {
    fn auxiliary(&mut self, at: usize, tree: &mut Tree) {
        let previous = exact(at, tree);
        let carried = previous.filter(|&previous| tree.places[previous].class != CallClass::Main);
        let place_of = |found: usize| (tree.places[found].thread, tree.places[found].segment);
        let (thread, segment) = carried.map_or((self.threads, self.segments - 1), place_of);
        self.threads += u32::from(carried.is_none());
        if tree.places[at].class == CallClass::Compaction {
            self.compaction = Some(at);
        }
        let previous = previous.map(|previous| tree.places[previous].call);
        let place = &mut tree.places[at];
        place.previous = previous;
        (place.thread, place.segment) = (thread, segment);
        if place.class == CallClass::Subagent {
            place.spawned_by = previous.filter(|_| carried.is_none());
        }
    }

    fn main(&mut self, at: usize, calls: &[&Call], given: &[Option<CallClass>], tree: &mut Tree) {
        // Until shown otherwise a call stands beside the last one.
        let beside = tree.places[..at]
            .iter()
            .rfind(|place| place.class == CallClass::Main)
            .map_or(0, |place| place.segment);
        tree.places[at].segment = beside;
        if let Some(previous) = exact(at, tree) {
            self.carry_on(at, previous, tree);
            return;
        }
        if let Some(like) = self.same_prompt(at, tree) {
            // A retry carries on what the first try did.
            tree.places[at].segment = tree.places[like].segment;
            tree.places[at].previous = tree.places[like].previous;
            return;
        }
        if let Some(previous) = self.drifted(at, calls, tree) {
            self.carry_on(at, previous, tree);
            return;
        }
        let first = !tree.places[..at]
            .iter()
            .any(|place| place.class == CallClass::Main);
        if first {
            return;
        }
        if let Some(summary) = self.compaction.take() {
            let evidence = format!(
                "first after the compaction of call {}",
                tree.places[summary].call
            );
            self.open(at, ForkCause::Compaction, evidence, tree);
            return;
        }
        let own =
            tree.places[at].prompt_tokens - shared(at, tree).min(tree.places[at].prompt_tokens);
        let prompt = &calls[at].prompt_ids;
        let back = self.outputs.back_in(&prompt[prompt.len() - own..], at);
        let own = &prompt[prompt.len() - own..];
        // A part of a reply that is carried on elsewhere is what a sub-agent was asked.
        let asked_by = match back.last() {
            Some(&last) if holds(own, output_of(calls[last])) => None,
            Some(&last) => Some(last),
            None => self.parts.source(own, at, calls),
        };
        let asked_by = asked_by.map(|asked_by| tree.places[asked_by].call);
        if let Some(spawner) = asked_by.filter(|call| self.extended.contains(call)) {
            let place = &mut tree.places[at];
            place.class = CallClass::Subagent;
            place.class_evidence =
                format!("its prompt holds a part of the reply of call {spawner}");
            place.spawned_by = Some(spawner);
            place.thread = self.threads;
            self.threads += 1;
            return;
        }
        let Some(&last) = back.last() else {
            if shared(at, tree) == 0 {
                let evidence = "shares no token with an earlier call".to_owned();
                self.open(at, ForkCause::Unknown, evidence, tree);
            }
            return;
        };
        let before = tree.places[last]
            .previous
            .and_then(|previous| position(&tree.places, previous));
        let kept = before.is_none_or(|before| {
            back.contains(&before) || is_above(tree, tree.places[before].node, at)
        });
        // A summary makes a history shorter.
        let shorter = tree.places[at].prompt_tokens < tree.places[last].prompt_tokens;
        if !kept && shorter && (!self.continued[last] || shared(at, tree) == 0) {
            let evidence = format!(
                "new history quotes the reply of call {}",
                tree.places[last].call
            );
            if given[last].is_none() && !self.continued[last] {
                tree.places[last].class = CallClass::Compaction;
                tree.places[last].class_evidence = format!(
                    "reply opens the new history of call {}",
                    tree.places[at].call
                );
            }
            self.open(at, ForkCause::Compaction, evidence, tree);
        } else {
            self.carry_on(at, last, tree);
        }
    }

    fn open(&mut self, at: usize, cause: ForkCause, evidence: String, tree: &mut Tree) {
        let place = &mut tree.places[at];
        place.segment = self.segments;
        place.opens = Some(cause);
        place.class_evidence = evidence;
        self.segments += 1;
    }

    fn carry_on(&self, at: usize, previous: usize, tree: &mut Tree) {
        let (call, segment) = (tree.places[previous].call, tree.places[previous].segment);
        tree.places[at].previous = Some(call);
        tree.places[at].segment = segment;
    }

    /// An earlier call of the main conversation with the same prompt.
    fn same_prompt(&self, at: usize, tree: &Tree) -> Option<usize> {
        let node = tree.places[at].prompt_node?;
        let found = *self.prompts.get(&node)?;
        (tree.places[found].class == CallClass::Main).then_some(found)
    }

    /// The call with the longest prompt that this one begins with and whose output comes back,
    /// though in other tokens.
    fn drifted(&self, at: usize, calls: &[&Call], tree: &Tree) -> Option<usize> {
        let mut node = tree.nodes[tree.places[at].prompt_node?].parent;
        let shared = shared(at, tree);
        while let Some(above) = node {
            if let Some(&found) = self.prompts.get(&above)
                && tree.places[found].class == CallClass::Main
            {
                let own = &calls[at].prompt_ids[tree.places[found].prompt_tokens..];
                let inside = shared > tree.places[found].prompt_tokens
                    && is_above(tree, shared_node(at, tree), found);
                if inside || comes_back(output_of(calls[found]), own) {
                    return Some(found);
                }
            }
            node = tree.nodes[above].parent;
        }
        None
    }
}

/// Whether tokens hold a whole output, but for the token that ended the turn.
fn holds(tokens: &[u32], output: &[u32]) -> bool {
    let said = &output[..output.len().saturating_sub(1)];
    let Some((_, wanted)) = windows(said, said.len().max(1)).next() else {
        return true;
    };
    windows(tokens, said.len()).any(|(at, hash)| hash == wanted && tokens[at..].starts_with(said))
}

/// Whether the end of an output occurs where its echo would be.
fn comes_back(output: &[u32], own: &[u32]) -> bool {
    const SHORT: usize = 3;
    let said = &output[..output.len().saturating_sub(1)];
    let window = said.len().min(WINDOW);
    if window < SHORT {
        return false;
    }
    let near = &own[..own.len().min(said.len() + WINDOW)];
    let end = &said[said.len() - window..];
    near.windows(window).any(|part| part == end)
}

/// The call that `at` extends token by token.
fn exact(at: usize, tree: &Tree) -> Option<usize> {
    position(&tree.places, tree.places[at].extends?)
}

/// The last node of a call's path that an earlier call made.
fn shared_node(at: usize, tree: &Tree) -> Option<usize> {
    let mut node = tree.places[at].node;
    while let Some(own) = node
        && tree.nodes[own].first_call == tree.places[at].call
    {
        node = tree.nodes[own].parent;
    }
    node
}

/// Tokens that a call shares with earlier ones.
fn shared(at: usize, tree: &Tree) -> usize {
    shared_node(at, tree).map_or(0, |node| {
        tree.nodes[node].depth + tree.nodes[node].tokens.len()
    })
}

/// Whether `node` is on the path of a call.
fn is_above(tree: &Tree, node: Option<usize>, at: usize) -> bool {
    match (node, tree.places[at].node) {
        (Some(node), Some(end)) => node <= end && end < tree.nodes[node].subtree_end,
        (None, _) => true,
        (Some(_), None) => false,
    }
}

/// Why a call leaves the path of another one, as far as tokens tell.
pub(crate) fn cause(place: &Place, other: &Place, tokens_shared: usize) -> (ForkCause, String) {
    let (call, at) = (other.call, tokens_shared);
    if place.previous == Some(call) {
        return if at >= other.prompt_tokens {
            (
                ForkCause::ParseDrift,
                format!("the reply of call {call} comes back in other tokens"),
            )
        } else {
            (
                ForkCause::HistoryEdited,
                format!(
                    "the reply of call {call} comes back, what was before it differs from token {at} on"
                ),
            )
        };
    }
    if at >= place.prompt_tokens && place.prompt_tokens < other.prompt_tokens {
        return (
            ForkCause::HistoryEdited,
            format!(
                "rolled back to {} tokens of call {call}",
                place.prompt_tokens
            ),
        );
    }
    if place.previous.is_some() && place.previous == other.previous {
        return (
            ForkCause::HistoryEdited,
            format!("carries on the same call as call {call}, with other tokens"),
        );
    }
    (
        ForkCause::Unknown,
        "only tokens are known, and they do not tell".to_owned(),
    )
}

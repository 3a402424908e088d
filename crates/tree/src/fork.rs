//! Why two calls diverge, with evidence, and what it cost in tokens (I2).

use std::collections::HashMap;

use record::{Call, Role};
use serde::{Deserialize, Serialize};

use crate::classify::{CallClass, position};
use crate::digest::{Digest, Histories};
use crate::tree::{Place, Tree};
use crate::unspoken;

/// Why a call's tokens leave the path of an earlier call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ForkCause {
    /// The same request again.
    Retry,
    /// A summary replaced the history, or is being written.
    Compaction,
    /// The harness changed, dropped or rolled back earlier messages.
    HistoryEdited,
    /// The tools are others.
    ToolsChanged,
    /// The system message is another.
    SystemChanged,
    /// A conversation that another one started.
    Subagent,
    /// Same messages, but the chat template renders them differently later.
    TemplateDrift,
    /// Our reply came back in the same words but does not encode to the tokens that were drawn.
    ParseDrift,
    /// None of the above could be shown.
    Unknown,
}

impl ForkCause {
    /// The word used in tables and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Retry => "retry",
            Self::Compaction => "compaction",
            Self::HistoryEdited => "history_edited",
            Self::ToolsChanged => "tools_changed",
            Self::SystemChanged => "system_changed",
            Self::Subagent => "subagent",
            Self::TemplateDrift => "template_drift",
            Self::ParseDrift => "parse_drift",
            Self::Unknown => "unknown",
        }
    }
}

/// Longest end of a prompt that asks for a reply: the header of a turn of the model's.
const ASKING_TOKENS_MAX: usize = 16;

/// One divergence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fork {
    /// The later call.
    pub call: u32,
    /// The earlier call that it is compared with.
    pub against: u32,
    /// Where it leaves: the last shared node, `None` when nothing is shared.
    pub node: Option<usize>,
    /// Tokens shared with earlier calls.
    pub tokens_shared: usize,
    /// Its price: prompt tokens after the divergence, which had to be computed again.
    pub tokens_again: usize,
    /// Why.
    pub cause: ForkCause,
    /// What shows it.
    pub evidence: String,
}

/// Finds and explains every divergence, in order of arrival. Time is linear in the nodes of the
/// tree and the messages of the calls.
pub(crate) fn explain(calls: &[&Call], digests: &[Digest], tree: &Tree) -> Vec<Fork> {
    let mut finder = Finder {
        calls,
        digests,
        tree,
        same_digest: HashMap::new(),
        same_prompt: HashMap::new(),
        histories: Histories::default(),
    };
    let mut forks = Vec::new();
    for at in 0..calls.len() {
        forks.extend(finder.fork_of(at));
        finder.add(at);
    }
    forks
}

/// Whether the call's path goes on below `node` (any path does below `None`).
fn goes_below(tree: &Tree, place: &Place, node: Option<usize>) -> bool {
    match (place.node, node) {
        (Some(end), Some(node)) => end > node && end < tree.nodes[node].subtree_end,
        (Some(_), None) => true,
        (None, _) => false,
    }
}

/// [`Histories`] over all threads, beside those of each.
const ANY_THREAD: u32 = u32::MAX;

/// The calls before the one that is looked at.
struct Finder<'a> {
    calls: &'a [&'a Call],
    digests: &'a [Digest],
    tree: &'a Tree,
    /// First call with a digest of the request.
    same_digest: HashMap<&'a str, usize>,
    /// First call whose prompt ends with a node: the same node means the same prompt.
    same_prompt: HashMap<usize, usize>,
    histories: Histories,
}

impl<'a> Finder<'a> {
    fn add(&mut self, at: usize) {
        let place = &self.tree.places[at];
        let digest: &'a str = &self.calls[at].digest;
        if !digest.is_empty() {
            self.same_digest.entry(digest).or_insert(at);
        }
        if let Some(node) = place.prompt_node {
            self.same_prompt.entry(node).or_insert(at);
        }
        self.histories.add(at, place.thread, &self.digests[at]);
        self.histories.add(at, ANY_THREAD, &self.digests[at]);
    }

    fn same_request(&self, at: usize) -> Option<usize> {
        let by_digest = self.same_digest.get(self.calls[at].digest.as_str());
        let by_prompt = self.tree.places[at]
            .prompt_node
            .and_then(|node| self.same_prompt.get(&node));
        by_digest.into_iter().chain(by_prompt).copied().min()
    }

    fn fork_of(&self, at: usize) -> Option<Fork> {
        let (tree, place) = (self.tree, &self.tree.places[at]);
        // Upwards over what is the call's own.
        let end = place.node?;
        let mut node = Some(end);
        while let Some(own) = node
            && tree.nodes[own].first_call == place.call
        {
            node = tree.nodes[own].parent;
        }
        let tokens_shared = node.map_or(0, |node| {
            tree.nodes[node].depth + tree.nodes[node].tokens.len()
        });
        // Siblings are sorted by their first call, and the first child follows its parent.
        let first_child = node.map_or(0, |node| node + 1);
        let rivalled = first_child
            < node.map_or(tree.nodes.len(), |node| tree.nodes[node].subtree_end)
            && tree.nodes[first_child].first_call < place.call;
        let same_request = self.same_request(at);
        // Without a rival the call only goes on where earlier ones ended; that is no fork, unless
        // it says the very same again.
        let again = node == Some(end) && same_request.is_some();
        if !rivalled && !again {
            return None;
        }
        let rival = |earlier: usize| goes_below(tree, &tree.places[earlier], node);
        let previous = place
            .previous
            .and_then(|previous| position(&tree.places, previous));
        let nearest = |thread: u32| {
            let found = self.histories.nearest(thread, &self.digests[at], rival);
            found.map(|(found, _)| found)
        };
        let against = same_request
            .or_else(|| previous.filter(|&previous| rival(previous)))
            .or_else(|| nearest(place.thread))
            .or_else(|| nearest(ANY_THREAD))
            .or_else(|| position(&tree.places, tree.nodes.get(first_child)?.first_call))?;
        let (cause, evidence) = if let Some(earlier) = same_request {
            (
                ForkCause::Retry,
                format!("same request as call {}", self.calls[earlier].id.index),
            )
        } else {
            cause(at, against, tokens_shared, self.calls, self.digests, tree)
        };
        Some(Fork {
            call: place.call,
            against: self.calls[against].id.index,
            node,
            tokens_shared,
            tokens_again: place.prompt_tokens.saturating_sub(tokens_shared),
            cause,
            evidence,
        })
    }
}

fn role_name(role: Role) -> &'static str {
    match role {
        Role::System => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
        Role::Tool => "tool",
    }
}

fn cause(
    at: usize,
    against: usize,
    tokens_shared: usize,
    calls: &[&Call],
    digests: &[Digest],
    tree: &Tree,
) -> (ForkCause, String) {
    let (place, other) = (&tree.places[at], &tree.places[against]);
    let (own, before) = (&digests[at], &digests[against]);
    if place.thread != other.thread || place.class != other.class {
        match place.class {
            CallClass::Subagent => return (ForkCause::Subagent, place.class_evidence.clone()),
            CallClass::Compaction => return (ForkCause::Compaction, place.class_evidence.clone()),
            CallClass::Main | CallClass::Side => {}
        }
    }
    if let Some(cause) = place.opens {
        return (cause, place.class_evidence.clone());
    }
    if own.system != before.system {
        return (
            ForkCause::SystemChanged,
            format!("system message differs from call {}", other.call),
        );
    }
    if own.tools != before.tools {
        return (
            ForkCause::ToolsChanged,
            format!(
                "{} tools, call {} had {}",
                own.tools_count, other.call, before.tools_count
            ),
        );
    }
    if own.messages.is_empty() && before.messages.is_empty() {
        return unspoken::cause(place, other, tokens_shared);
    }
    let same = own.common(before);
    if same < before.messages.len() {
        let evidence = match own.messages.get(same) {
            Some(_) => format!(
                "message {same} ({}) differs from call {}",
                role_name(own.roles[same]),
                other.call
            ),
            None => format!("rolled back to {same} messages of call {}", other.call),
        };
        return (ForkCause::HistoryEdited, evidence);
    }
    let asking = other.prompt_tokens.saturating_sub(tokens_shared);
    if own
        .roles
        .get(same)
        .is_some_and(|role| *role != Role::Assistant)
        && asking <= ASKING_TOKENS_MAX
    {
        return (
            ForkCause::HistoryEdited,
            format!(
                "the history of call {} goes on without its reply",
                other.call
            ),
        );
    }
    // The whole earlier request comes back. Either its rendering moved, or its reply did.
    if tokens_shared < other.prompt_tokens {
        return (
            ForkCause::TemplateDrift,
            format!(
                "the messages of call {} are rendered differently from token {tokens_shared} on",
                other.call
            ),
        );
    }
    match (own.messages.get(same), before.reply) {
        (Some(echo), Some(reply)) if *echo == reply => {
            let reply = calls[against].reply.as_ref();
            let had_reasoning = reply.is_some_and(|reply| reply.reasoning.is_some());
            if calls[against].parse_failed || !had_reasoning {
                let evidence = if calls[against].parse_failed {
                    format!("the reply of call {} could not be parsed", other.call)
                } else {
                    format!("the reply of call {} encodes to other tokens", other.call)
                };
                (ForkCause::ParseDrift, evidence)
            } else {
                (
                    ForkCause::TemplateDrift,
                    format!("the reasoning of call {} is not rendered again", other.call),
                )
            }
        }
        (Some(_), Some(_)) => (
            ForkCause::HistoryEdited,
            format!("the reply of call {} came back changed", other.call),
        ),
        (Some(_), None) if before.roles.len() < own.roles.len() => (
            ForkCause::Unknown,
            format!("call {} has no reply to compare with", other.call),
        ),
        (None, _) => (
            ForkCause::Retry,
            format!("same messages as call {}", other.call),
        ),
        (Some(_), None) => (ForkCause::Unknown, String::new()),
    }
}

//! Why two calls diverge, with evidence, and what it cost in tokens (I2).

use record::{Call, Role};
use serde::{Deserialize, Serialize};

use crate::classify::CallClass;
use crate::digest::Digest;
use crate::tree::{Place, Tree};

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

/// Finds and explains every divergence, in order of arrival.
pub(crate) fn explain(calls: &[&Call], tree: &Tree) -> Vec<Fork> {
    let digests: Vec<Digest> = calls.iter().map(|call| Digest::of(call)).collect();
    (0..calls.len())
        .filter_map(|at| fork_of(at, calls, &digests, tree))
        .collect()
}

/// Whether the call's path goes on below `node` (any path does below `None`).
fn goes_below(tree: &Tree, place: &Place, node: Option<usize>) -> bool {
    match (place.node, node) {
        (Some(end), Some(node)) => end > node && end < tree.nodes[node].subtree_end,
        (Some(_), None) => true,
        (None, _) => false,
    }
}

fn fork_of(at: usize, calls: &[&Call], digests: &[Digest], tree: &Tree) -> Option<Fork> {
    let place = &tree.places[at];
    let path = tree.path(place.node);
    let shared = path
        .iter()
        .take_while(|&&node| tree.nodes[node].first_call < place.call)
        .count();
    let node = shared.checked_sub(1).map(|last| path[last]);
    let tokens_shared = node.map_or(0, |node| {
        tree.nodes[node].depth + tree.nodes[node].tokens.len()
    });
    let same_request = (0..at).find(|&earlier| {
        (!calls[at].digest.is_empty() && calls[at].digest == calls[earlier].digest)
            || (calls[at].prompt_ids == calls[earlier].prompt_ids
                && !calls[at].prompt_ids.is_empty())
    });
    let rivals: Vec<usize> = (0..at)
        .filter(|&earlier| goes_below(tree, &tree.places[earlier], node))
        .collect();
    // Without a rival the call only goes on where earlier ones ended; that is no fork, unless it
    // says the very same again.
    let whole = shared == path.len() && !path.is_empty();
    if rivals.is_empty() && !(whole && same_request.is_some()) {
        return None;
    }
    let previous = place.previous.and_then(|previous| {
        calls[..at]
            .iter()
            .position(|call| call.id.index == previous)
    });
    let against = same_request
        .or_else(|| previous.filter(|previous| rivals.contains(previous)))
        .or_else(|| closest(at, &rivals, digests, tree, place))?;
    let (cause, evidence) = if let Some(earlier) = same_request {
        (
            ForkCause::Retry,
            format!("same request as call {}", calls[earlier].id.index),
        )
    } else {
        cause(at, against, tokens_shared, calls, digests, tree)
    };
    Some(Fork {
        call: place.call,
        against: calls[against].id.index,
        node,
        tokens_shared,
        tokens_again: place.prompt_tokens.saturating_sub(tokens_shared),
        cause,
        evidence,
    })
}

fn common(left: &Digest, right: &Digest) -> usize {
    left.messages
        .iter()
        .zip(&right.messages)
        .take_while(|(a, b)| a == b)
        .count()
}

/// Of the earlier calls that went on elsewhere: same conversation first, then most messages in
/// common, then the latest.
fn closest(
    at: usize,
    rivals: &[usize],
    digests: &[Digest],
    tree: &Tree,
    place: &Place,
) -> Option<usize> {
    rivals.iter().copied().max_by_key(|&earlier| {
        (
            tree.places[earlier].thread == place.thread,
            common(&digests[earlier], &digests[at]),
            earlier,
        )
    })
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
    if place.class == CallClass::Main && place.segment > other.segment {
        let written = place.class_evidence.starts_with("new history");
        let cause = if written {
            ForkCause::Compaction
        } else {
            ForkCause::HistoryEdited
        };
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
        return (ForkCause::Unknown, "no conversation recorded".to_owned());
    }
    let same = common(own, before);
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

//! From the radix tree to nodes in preorder, with their owners.

use record::{Call, Generation, PolicySpan};

use crate::classify::CallClass;
use crate::media::MediaKeys;
use crate::radix::Radix;
use crate::tree::{Node, Origin, Place};

/// Who generated the tokens of a radix node, as found so far.
#[derive(Default, Clone)]
struct Claims {
    /// The earliest call that passes, by place in the sorted calls.
    first: Option<usize>,
    /// Calls that generated the node and the offset in their output.
    generators: Vec<(usize, usize)>,
}

/// Weights that drew the tokens of a range, counted from its start.
fn policy_within(generation: &Generation, range: &std::ops::Range<usize>) -> Vec<PolicySpan> {
    let spans = &generation.policy;
    let after = spans.partition_point(|span| span.start as usize <= range.start);
    let first = match after.checked_sub(1) {
        Some(span) => spans[span].version,
        None => spans.first().map_or(0, |span| span.version),
    };
    let mut within = vec![PolicySpan {
        start: 0,
        version: first,
    }];
    for span in &spans[after..] {
        if (span.start as usize) < range.end {
            within.push(PolicySpan {
                start: span.start - range.start as u32,
                version: span.version,
            });
        }
    }
    within
}

fn origin(calls: &[&Call], claims: &Claims, tokens: usize) -> Origin {
    // Of those who generated these tokens the earliest delivered one owns them.
    let owner = claims
        .generators
        .iter()
        .min_by_key(|&&(call, _)| (!calls[call].delivered(), call));
    let Some((&(owner, offset), generation)) =
        owner.and_then(|found| Some((found, calls[found.0].generation.as_ref()?)))
    else {
        return Origin::Context;
    };
    let range = offset..offset + tokens;
    let part = |values: &[f32]| {
        values
            .get(range.clone())
            .map_or(Vec::new(), <[f32]>::to_vec)
    };
    Origin::Generated {
        call: calls[owner].id.index,
        offset: offset as u32,
        logprobs_model: part(&generation.logprobs_model),
        logprobs_sampled: part(&generation.logprobs_sampled),
        policy: policy_within(generation, &range),
        calls: claims
            .generators
            .iter()
            .map(|&(call, _)| calls[call].id.index)
            .collect(),
    }
}

/// Preorder nodes and one [`Place`] per call, not yet classified.
pub(crate) fn lay_out(
    mut radix: Radix,
    media: &MediaKeys,
    calls: &[&Call],
    ends: &[(Option<u32>, Option<u32>)],
) -> (Vec<Node>, Vec<Place>) {
    let mut claims = vec![Claims::default(); radix.nodes.len()];
    for (at, (call, &(prompt_end, end))) in calls.iter().zip(ends).enumerate() {
        let output = call
            .generation
            .as_ref()
            .map_or(0, |generation| generation.token_ids.len());
        let mut offset = output;
        for node in radix.upwards(end, output) {
            offset -= radix.nodes[node as usize].tokens.len();
            claims[node as usize].generators.push((at, offset));
            claims[node as usize].first.get_or_insert(at);
        }
        // A node above was reached by an earlier call if and only if all before it were.
        let mut above = prompt_end;
        while let Some(node) = above
            && claims[node as usize].first.is_none()
        {
            claims[node as usize].first = Some(at);
            above = radix.nodes[node as usize].parent;
        }
    }
    let first = |node: u32| claims[node as usize].first.unwrap_or(usize::MAX);
    let by_first_call = |children: &[u32]| {
        let mut sorted = children.to_vec();
        sorted.sort_by_key(|&child| std::cmp::Reverse(first(child)));
        sorted
    };
    let mut nodes: Vec<Node> = Vec::with_capacity(radix.nodes.len());
    let mut index_of = vec![usize::MAX; radix.nodes.len()];
    let mut stack = by_first_call(&radix.roots);
    while let Some(at) = stack.pop() {
        let source = &mut radix.nodes[at as usize];
        let mut tokens = std::mem::take(&mut source.tokens);
        let spans = media.restore(&mut tokens);
        let parent = source.parent.map(|parent| index_of[parent as usize]);
        let depth = parent.map_or(0, |parent| {
            let parent: &Node = &nodes[parent];
            parent.depth + parent.tokens.len()
        });
        index_of[at as usize] = nodes.len();
        nodes.push(Node {
            parent,
            depth,
            origin: origin(calls, &claims[at as usize], tokens.len()),
            tokens,
            media: spans,
            first_call: calls.get(first(at)).map_or(0, |call| call.id.index),
            prompts_end: Vec::new(),
            outputs_end: Vec::new(),
            subtree_end: nodes.len() + 1,
        });
        stack.extend(by_first_call(&radix.nodes[at as usize].children));
    }
    for node in (0..nodes.len()).rev() {
        if let Some(parent) = nodes[node].parent {
            nodes[parent].subtree_end = nodes[parent].subtree_end.max(nodes[node].subtree_end);
        }
    }
    let places = calls
        .iter()
        .zip(ends)
        .map(|(call, &(prompt_end, end))| {
            let index = |end: Option<u32>| end.map(|end| index_of[end as usize]);
            if let Some(node) = index(prompt_end) {
                nodes[node].prompts_end.push(call.id.index);
            }
            if let Some(node) = index(end) {
                nodes[node].outputs_end.push(call.id.index);
            }
            Place {
                call: call.id.index,
                prompt_node: index(prompt_end),
                node: index(end),
                prompt_tokens: call.prompt_ids.len(),
                output_tokens: call
                    .generation
                    .as_ref()
                    .map_or(0, |generation| generation.token_ids.len()),
                delivered: call.delivered(),
                generated: call.generation.is_some(),
                extends: None,
                previous: None,
                class: CallClass::Main,
                class_evidence: String::new(),
                thread: 0,
                segment: 0,
                opens: None,
                spawned_by: None,
            }
        })
        .collect::<Vec<_>>();
    let extends = extended(&nodes, &places, calls);
    let places = places
        .into_iter()
        .zip(extends)
        .map(|(place, extends)| Place { extends, ..place })
        .collect();
    (nodes, places)
}

/// For each call the latest earlier call with a generation whose output ends on the way to its
/// prompt's end.
fn extended(nodes: &[Node], places: &[Place], calls: &[&Call]) -> Vec<Option<u32>> {
    let generated = |index: u32| {
        calls
            .binary_search_by_key(&index, |call| call.id.index)
            .is_ok_and(|at| {
                calls[at]
                    .generation
                    .as_ref()
                    .is_some_and(|generation| !generation.token_ids.is_empty())
            })
    };
    places
        .iter()
        .map(|place| {
            let mut at = place.prompt_node;
            while let Some(node) = at {
                let found = nodes[node]
                    .outputs_end
                    .iter()
                    .copied()
                    .filter(|&call| call < place.call && generated(call))
                    .min_by_key(|&call| {
                        let delivered = places
                            .binary_search_by_key(&call, |place| place.call)
                            .is_ok_and(|at| places[at].delivered);
                        (!delivered, std::cmp::Reverse(call))
                    });
                if found.is_some() {
                    return found;
                }
                at = nodes[node].parent;
            }
            None
        })
        .collect()
}

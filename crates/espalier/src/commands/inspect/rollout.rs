//! One rollout: its calls, its tree, what was said, how it was scored.

use std::collections::BTreeMap;

use record::{Attempt, AttemptOutcome, Call, Disposition, FinishReason, Message, Role, Rollout};
use sandbox::EgressRecord;
use serde::Serialize;
use tree::{Fork, Kept, Origin, Selection, Tree, TreeStats, select};

use super::{egress, lineage, speech::Speech};
use crate::{
    error::CliError,
    text::{short, table},
};

/// Characters of a message that are shown.
const MESSAGE_CHARACTERS_MAX: usize = 160;
/// Lines of a verifier's or harness's output that are shown.
const OUTPUT_LINES_MAX: usize = 20;
/// Beyond this many columns of branch lines a tree is drawn no deeper to the right.
const INDENT_MAX: usize = 90;

#[derive(Debug, Serialize)]
struct CallRow {
    call: u32,
    class: &'static str,
    class_evidence: String,
    segment: u32,
    /// The call that this one carries on.
    carries_on: Option<u32>,
    prompt_tokens: usize,
    /// Of these, taken over from an earlier call as they were.
    exact_tokens: u32,
    reply_tokens: usize,
    end: String,
    attempts: usize,
    policy: Option<u64>,
}

#[derive(Debug, Serialize)]
struct NodeRow {
    node: usize,
    parent: Option<usize>,
    tokens: usize,
    what: String,
    /// What training does with it; empty for context of a kept branch.
    training: String,
    /// Its text, when that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(skip)]
    ids: Vec<u32>,
    #[serde(skip)]
    children: Vec<usize>,
}

/// One node with everything in it.
#[derive(Debug, Serialize)]
pub(super) struct NodeView {
    rollout: String,
    node: usize,
    what: String,
    training: String,
    ids: Vec<u32>,
    text: String,
}

impl NodeView {
    /// For a terminal: nothing is cut, but control characters are escaped.
    pub(super) fn text(&self) -> String {
        let training = match self.training.as_str() {
            "" => String::new(),
            training => format!(" · {training}"),
        };
        let (tokens, text) = (self.ids.len(), lines(&self.text));
        format!(
            "{} node {}: {tokens} tokens, {}{training}\n\n{text}\n",
            self.rollout, self.node, self.what
        )
    }
}

/// A rollout as it is shown.
#[derive(Debug, Serialize)]
pub(super) struct View<'a> {
    rollout: &'a Rollout,
    calls: Vec<CallRow>,
    stats: TreeStats,
    nodes: Vec<NodeRow>,
    forks: Vec<Fork>,
    kept: Kept,
    /// The main conversation's last call, with its reply.
    conversation: Vec<&'a Message>,
    /// What it asked of the internet; `None` when it had no way out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) egress: Option<Vec<EgressRecord>>,
    #[serde(skip)]
    fork_at: BTreeMap<usize, usize>,
}

impl<'a> View<'a> {
    /// Builds the tree and applies the rule of the run.
    pub(super) fn new(
        rollout: &'a Rollout,
        calls: &'a [Call],
        selection: &Selection,
    ) -> Result<Self, CliError> {
        let tree = Tree::build(calls).map_err(|error| {
            CliError::failed(format!("rollout {}: its tree", rollout.spec.id), error)
        })?;
        let kept = select(&tree, selection);
        let mut fork_at = BTreeMap::new();
        for (index, fork) in tree.forks.iter().enumerate() {
            fork_at.insert(first_own_node(&tree, fork), index);
        }
        Ok(Self {
            rollout,
            calls: calls
                .iter()
                .filter_map(|call| call_row(call, &tree))
                .collect(),
            stats: tree.stats(),
            nodes: node_rows(&tree, &kept),
            conversation: conversation(calls, &tree),
            forks: tree.forks,
            kept,
            egress: None,
            fork_at,
        })
    }

    /// Decodes all nodes.
    pub(super) fn decode(&mut self, speech: &Speech) {
        for row in &mut self.nodes {
            row.text = Some(speech.text(&row.ids));
        }
    }

    /// One node.
    pub(super) fn node(&mut self, node: usize, speech: &Speech) -> Result<NodeView, CliError> {
        let nodes = self.nodes.len();
        let Some(row) = self.nodes.get_mut(node) else {
            return Err(CliError::usage(
                format!("{} has no node {node}", self.rollout.spec.id),
                match nodes.checked_sub(1) {
                    Some(last) => format!("its nodes are 0 to {last}"),
                    None => "it has no nodes: nothing was captured".to_owned(),
                },
            ));
        };
        Ok(NodeView {
            rollout: self.rollout.spec.id.to_string(),
            node,
            what: std::mem::take(&mut row.what),
            training: std::mem::take(&mut row.training),
            text: speech.text(&row.ids),
            ids: std::mem::take(&mut row.ids),
        })
    }

    /// For a terminal.
    pub(super) fn text(&self) -> String {
        let mut text = self.head();
        for part in [
            self.calls_text(),
            self.tree_text(),
            self.conversation_text(),
            self.verdict_text(),
            egress::text(self.egress.as_deref()),
            lineage::text(&self.rollout.lineage),
        ] {
            if !part.is_empty() {
                text.push('\n');
                text.push_str(&part);
            }
        }
        text
    }

    fn head(&self) -> String {
        let Rollout {
            spec,
            lineage,
            seconds,
            ..
        } = self.rollout;
        let labels: Vec<String> = spec
            .labels
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        let disposition = match &self.rollout.disposition {
            None => "running".to_owned(),
            Some(Disposition::Train) => "train".to_owned(),
            Some(
                disposition @ (Disposition::Truncate { reason } | Disposition::Mask { reason }),
            ) => {
                format!("{}: {reason}", disposition.name())
            }
            Some(
                disposition @ (Disposition::Retry { fault, reason }
                | Disposition::Discard { fault, reason }),
            ) => format!("{}: {}: {reason}", disposition.name(), fault.name()),
        };
        let exit = self
            .rollout
            .harness_exit
            .map_or_else(|| "none".to_owned(), |code| code.to_string());
        format!(
            "rollout      {}\ntask         {}\ngroup        {}\nharness      {} (exit code {exit})\n\
             policy       version {}\nlabels       {}\ndisposition  {disposition}\n\
             seconds      queue {:.1}  create {:.2}  ready {:.1}  harness {:.1}  settle {:.2}  verify {:.2}  destroy {:.2}\n",
            spec.id,
            spec.task,
            spec.group,
            if lineage.harness_version.is_empty() {
                &spec.harness
            } else {
                &lineage.harness_version
            },
            lineage.policy,
            labels.join(" "),
            seconds.queue,
            seconds.create,
            seconds.ready,
            seconds.harness,
            seconds.settle,
            seconds.verify,
            seconds.destroy,
        )
    }

    fn calls_text(&self) -> String {
        let rows: Vec<Vec<String>> = self
            .calls
            .iter()
            .map(|row| {
                let dash =
                    |number: Option<u64>| number.map_or_else(|| "-".to_owned(), |n| n.to_string());
                vec![
                    row.call.to_string(),
                    row.class.to_owned(),
                    row.segment.to_string(),
                    dash(row.carries_on.map(u64::from)),
                    row.prompt_tokens.to_string(),
                    row.exact_tokens.to_string(),
                    row.reply_tokens.to_string(),
                    row.attempts.to_string(),
                    dash(row.policy),
                    row.end.clone(),
                    row.class_evidence.clone(),
                ]
            })
            .collect();
        if rows.is_empty() {
            return "no calls were captured\n".to_owned();
        }
        let header = [
            "call",
            "class",
            "segment",
            "carries on",
            "prompt",
            "exact",
            "reply",
            "attempts",
            "policy",
            "end",
            "class because",
        ];
        table(&header, &rows)
    }

    fn tree_text(&self) -> String {
        let stats = &self.stats;
        let mut text = format!(
            "tree: {} nodes, {} leaves; tokens: {} captured, {} unique, {} generated, {} trainable on kept branches\n",
            stats.nodes,
            stats.leaves,
            stats.tokens_logical,
            stats.tokens_unique,
            stats.tokens_generated,
            self.kept.tokens_trained,
        );
        if self.nodes.is_empty() {
            return String::new();
        }
        if let Some(over) = self.kept.discarded {
            text.push_str(&format!("nothing is kept: {over}\n"));
        }
        if !self
            .rollout
            .disposition
            .as_ref()
            .is_some_and(Disposition::trains)
        {
            text.push_str("the disposition keeps all of it out of training\n");
        }
        let split = self.rollout.spec.labels.get("split");
        if let Some(split) = split.filter(|split| *split != "train") {
            text.push_str(&format!(
                "split {split} is not trained: the marks say what would be\n"
            ));
        }
        // A stack instead of recursion: a chain may have thousands of nodes.
        let roots: Vec<usize> = self
            .nodes
            .iter()
            .filter(|row| row.parent.is_none())
            .map(|row| row.node)
            .collect();
        let mut stack: Vec<(usize, String, String)> = Vec::new();
        push_branches(&mut stack, &roots, "");
        while let Some((node, first, rest)) = stack.pop() {
            let row = &self.nodes[node];
            let training = if row.training.is_empty() {
                String::new()
            } else {
                format!(" · {}", row.training)
            };
            text.push_str(&format!(
                "{first}● [{node}] {} {}{training}\n",
                row.tokens, row.what
            ));
            if let Some(words) = &row.text {
                let words = short(words, MESSAGE_CHARACTERS_MAX);
                text.push_str(&format!("{rest}  {words}\n"));
            }
            if let Some(fork) = self
                .fork_at
                .get(&node)
                .and_then(|&index| self.forks.get(index))
            {
                text.push_str(&format!(
                    "{rest}  fork of call {} from call {}: {}, {} tokens again: {}\n",
                    fork.call,
                    fork.against,
                    fork.cause.name(),
                    fork.tokens_again,
                    short(&fork.evidence, MESSAGE_CHARACTERS_MAX),
                ));
            }
            push_branches(&mut stack, &row.children, &rest);
        }
        text
    }

    fn conversation_text(&self) -> String {
        let mut text = String::new();
        for message in &self.conversation {
            let name = match message.role {
                Role::System => "system",
                Role::User => "user",
                Role::Assistant => "assistant",
                Role::Tool => "tool",
            };
            let mut line = |what: &str| text.push_str(&format!("{name:<10} {what}\n"));
            if let Some(reasoning) = &message.reasoning {
                line(&format!(
                    "(thinks) {}",
                    short(reasoning, MESSAGE_CHARACTERS_MAX)
                ));
            }
            let said = message.text_content();
            if !said.trim().is_empty() || message.tool_calls.is_empty() {
                line(&short(&said, MESSAGE_CHARACTERS_MAX));
            }
            for call in &message.tool_calls {
                line(&format!(
                    "→ {} {}",
                    short(&call.name, 40),
                    short(&call.arguments.to_string(), MESSAGE_CHARACTERS_MAX)
                ));
            }
        }
        text
    }

    fn verdict_text(&self) -> String {
        let Some(verdict) = &self.rollout.verdict else {
            let tail = output(&self.rollout.harness_tail);
            return match tail.is_empty() {
                true => "no verdict\n".to_owned(),
                false => format!("no verdict; the harness's last words:\n{tail}"),
            };
        };
        let mut text = format!("reward {} in {:.2} s\n", verdict.reward, verdict.seconds);
        for (name, score) in &verdict.scores {
            text.push_str(&format!("  {name}: {score}\n"));
        }
        text.push_str(&output(&verdict.evidence));
        text
    }
}

/// A text with its line ends, all other control characters escaped.
fn lines(text: &str) -> String {
    let escaped = |c: char| -> String {
        match c {
            '\n' | '\t' => c.to_string(),
            c if c.is_control() => c.escape_default().collect(),
            c => c.to_string(),
        }
    };
    text.chars().map(escaped).collect()
}

/// The last lines of a program's output, indented.
fn output(text: &str) -> String {
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    let skipped = lines.len().saturating_sub(OUTPUT_LINES_MAX);
    let mut shown = String::new();
    if skipped > 0 {
        shown.push_str(&format!("  | … {skipped} lines\n"));
    }
    for line in &lines[skipped..] {
        shown.push_str(&format!("  | {}\n", short(line, MESSAGE_CHARACTERS_MAX)));
    }
    shown
}

/// Pushes nodes so that the first comes off the stack first. One alone goes on in the same
/// column; several branch off.
fn push_branches(stack: &mut Vec<(usize, String, String)>, nodes: &[usize], indent: &str) {
    let one = nodes.len() == 1 || indent.chars().count() >= INDENT_MAX;
    for (index, &node) in nodes.iter().enumerate().rev() {
        let last = index + 1 == nodes.len();
        let (first, rest) = match (one, last) {
            (true, _) => ("", ""),
            (false, false) => ("├─ ", "│  "),
            (false, true) => ("└─ ", "   "),
        };
        stack.push((node, format!("{indent}{first}"), format!("{indent}{rest}")));
    }
}

fn call_row(call: &Call, tree: &Tree) -> Option<CallRow> {
    let place = tree.place(call.id.index)?;
    let generation = call.generation.as_ref();
    Some(CallRow {
        call: place.call,
        class: place.class.name(),
        class_evidence: place.class_evidence.clone(),
        segment: place.segment,
        carries_on: place.previous,
        prompt_tokens: place.prompt_tokens,
        exact_tokens: call.continuation.exact,
        reply_tokens: place.output_tokens,
        end: end(call),
        attempts: call.attempts.len(),
        policy: generation
            .and_then(|generation| generation.policy.last())
            .map(|span| span.version),
    })
}

/// How a call ended, in words.
fn end(call: &Call) -> String {
    let finish =
        call.generation
            .as_ref()
            .map_or("no reply", |generation| match generation.finish {
                FinishReason::Stop => "stop",
                FinishReason::Length => "length limit",
                FinishReason::Context => "context full",
            });
    let outcome = |attempt: &Attempt| match &attempt.outcome {
        AttemptOutcome::Delivered => String::new(),
        AttemptOutcome::ClientGone => "client gone".to_owned(),
        AttemptOutcome::EngineFailed { reason } => format!("engine failed: {}", short(reason, 80)),
        AttemptOutcome::TooLong {
            prompt_tokens,
            context_tokens_max,
        } => {
            format!("prompt of {prompt_tokens} tokens, {context_tokens_max} fit")
        }
    };
    let problem = match call.attempts.last() {
        _ if call.delivered() => String::new(),
        Some(attempt) => outcome(attempt),
        None => "never answered".to_owned(),
    };
    let parse = if call.parse_failed {
        ", not parsed"
    } else {
        ""
    };
    if problem.is_empty() {
        format!("{finish}{parse}")
    } else {
        format!("{finish}{parse}, {problem}")
    }
}

fn node_rows(tree: &Tree, kept: &Kept) -> Vec<NodeRow> {
    let mut rows: Vec<NodeRow> = tree
        .nodes
        .iter()
        .enumerate()
        .map(|(index, node)| {
            let what = match &node.origin {
                Origin::Generated { calls, .. } => format!("generated by {}", call_names(calls)),
                Origin::Context if node.prompts_end.is_empty() => {
                    format!("context, from call {} on", node.first_call)
                }
                Origin::Context => format!("context, prompt of {}", call_names(&node.prompts_end)),
            };
            NodeRow {
                node: index,
                parent: node.parent,
                tokens: node.tokens.len(),
                what,
                training: training(index, tree, kept),
                text: None,
                ids: node.tokens.clone(),
                children: Vec::new(),
            }
        })
        .collect();
    for index in 0..rows.len() {
        if let Some(parent) = rows[index].parent {
            rows[parent].children.push(index);
        }
    }
    rows
}

fn call_names(calls: &[u32]) -> String {
    let names: Vec<String> = calls.iter().map(u32::to_string).collect();
    let word = if names.len() == 1 { "call" } else { "calls" };
    format!("{word} {}", names.join(", "))
}

fn training(node: usize, tree: &Tree, kept: &Kept) -> String {
    if let Some(dropped) = kept.dropped.iter().find(|dropped| dropped.node == node) {
        let tokens = match dropped.tokens_trainable {
            0 => String::new(),
            tokens => format!(", {tokens} trainable tokens lost"),
        };
        return format!("dropped: {}{tokens}", dropped.reason.name());
    }
    if kept.trained.contains(&node) {
        return "trained".to_owned();
    }
    if tree.nodes[node].generated() && !tree.nodes[node].trainable() {
        return "context: no log-probabilities".to_owned();
    }
    String::new()
}

/// The node where a fork is shown: the first on its call's path that earlier calls do not have,
/// else the end of the path.
fn first_own_node(tree: &Tree, fork: &Fork) -> usize {
    let end = tree.place(fork.call).and_then(|place| place.node);
    let path = tree.path(end);
    let own = path
        .iter()
        .find(|&&node| tree.nodes[node].first_call == fork.call);
    own.or(path.last()).copied().unwrap_or(0)
}

/// Messages and reply of the last delivered call of the main conversation; of the last call when
/// none was delivered.
fn conversation<'a>(calls: &'a [Call], tree: &Tree) -> Vec<&'a Message> {
    let main = |call: &&Call| {
        tree.place(call.id.index)
            .is_some_and(|place| place.thread == 0)
    };
    let last = calls.iter().filter(main).rfind(|call| call.delivered());
    let Some(call) = last.or(calls.last()) else {
        return Vec::new();
    };
    call.conversation
        .messages
        .iter()
        .chain(&call.reply)
        .collect()
}

//! Two branches of a rollout, at the token where they part.

use record::{Call, Rollout};
use serde::Serialize;
use tree::Tree;

use super::speech::Speech;
use crate::{
    error::CliError,
    text::{short, table},
};

/// Tokens shown before the place where they part.
const BEFORE: usize = 12;
/// Tokens shown after it.
const AFTER: usize = 24;
/// Characters of text shown before and after it.
const CHARACTERS_MAX: usize = 400;

/// A token and its text.
#[derive(Debug, Serialize)]
struct Token {
    id: u32,
    text: String,
}

/// One of the two branches.
#[derive(Debug, Serialize)]
struct Branch {
    call: u32,
    prompt_tokens: usize,
    reply_tokens: usize,
    /// Whether the token at the parting is the prompt's or the reply's; `None` when the branch
    /// ends there.
    parts_in: Option<&'static str>,
    tokens: Vec<Token>,
    /// Text from the parting on.
    text: String,
}

/// Where two branches part.
#[derive(Debug, Serialize)]
pub(super) struct Diff {
    rollout: String,
    /// Tokens that both begin with.
    shared: usize,
    before: Vec<Token>,
    /// Text up to the parting.
    text_before: String,
    branches: [Branch; 2],
    /// What the tree says of the fork, when one of the two left the other.
    fork: Option<String>,
}

impl Diff {
    /// Compares the branches that end with these calls.
    pub(super) fn between(
        rollout: &Rollout,
        calls: &[Call],
        (left, right): (u32, u32),
        speech: &Speech,
    ) -> Result<Self, CliError> {
        let find = |index: u32| {
            let call = calls.iter().find(|call| call.id.index == index);
            call.ok_or_else(|| {
                CliError::usage(
                    format!("{} has no call {index}", rollout.spec.id),
                    format!("its calls are 0 to {}", calls.len().saturating_sub(1)),
                )
            })
        };
        let (left, right) = (find(left)?, find(right)?);
        let (a, b) = (path(left), path(right));
        let shared = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
        let tokens = |ids: &[u32]| -> Vec<Token> {
            let token = |&id: &u32| Token {
                id,
                text: speech.text(&[id]),
            };
            ids.iter().map(token).collect()
        };
        let branch = |call: &Call, path: &[u32]| {
            let rest = path.get(shared..).unwrap_or_default();
            let parts_in = (!rest.is_empty()).then_some(match call.prompt_ids.len() > shared {
                true => "prompt",
                false => "reply",
            });
            Branch {
                call: call.id.index,
                prompt_tokens: call.prompt_ids.len(),
                reply_tokens: path.len() - call.prompt_ids.len(),
                parts_in,
                tokens: tokens(&rest[..rest.len().min(AFTER)]),
                text: first(&speech.text(rest)),
            }
        };
        let fork = Tree::build(calls).ok().and_then(|tree| {
            let both = [left.id.index, right.id.index];
            let fork = tree
                .forks
                .iter()
                .find(|fork| both.contains(&fork.call) && both.contains(&fork.against))?;
            Some(format!(
                "call {} left call {}: {}, {} tokens again: {}",
                fork.call,
                fork.against,
                fork.cause.name(),
                fork.tokens_again,
                fork.evidence
            ))
        });
        Ok(Self {
            rollout: rollout.spec.id.to_string(),
            shared,
            before: tokens(&a[shared.saturating_sub(BEFORE)..shared]),
            text_before: last(&speech.text(&a[..shared])),
            branches: [branch(left, &a), branch(right, &b)],
            fork,
        })
    }

    /// For a terminal.
    pub(super) fn text(&self) -> String {
        let [a, b] = &self.branches;
        let mut text = format!(
            "{}: calls {} and {} share {} tokens\n",
            self.rollout, a.call, b.call, self.shared
        );
        if let Some(fork) = &self.fork {
            text.push_str(&format!("{}\n", short(fork, CHARACTERS_MAX)));
        }
        text.push_str(&format!(
            "\nboth        {}\n",
            short(&self.text_before, CHARACTERS_MAX)
        ));
        for branch in &self.branches {
            let how = match branch.parts_in {
                None => format!(
                    "ends here ({} prompt, {} reply tokens)",
                    branch.prompt_tokens, branch.reply_tokens
                ),
                Some(part) => format!("({part}) {}", short(&branch.text, CHARACTERS_MAX)),
            };
            text.push_str(&format!("call {:<6} {how}\n", branch.call));
        }
        text.push('\n');
        let cell = |token: Option<&Token>| match token {
            None => "end".to_owned(),
            Some(token) => format!("{} {:?}", token.id, token.text),
        };
        let start = self.shared - self.before.len();
        let mut rows: Vec<Vec<String>> = self
            .before
            .iter()
            .enumerate()
            .map(|(at, token)| {
                let cell = cell(Some(token));
                vec![(start + at).to_string(), cell.clone(), cell]
            })
            .collect();
        for at in 0..a.tokens.len().max(b.tokens.len()) {
            let (left, right) = (a.tokens.get(at), b.tokens.get(at));
            rows.push(vec![
                (self.shared + at).to_string(),
                cell(left),
                cell(right),
            ]);
            if left.is_none() || right.is_none() {
                break;
            }
        }
        let names = [a.call, b.call].map(|call| format!("call {call}"));
        text.push_str(&table(&["token", &names[0], &names[1]], &rows));
        text
    }
}

/// Prompt and reply of a call.
fn path(call: &Call) -> Vec<u32> {
    let reply = call.generation.as_ref();
    let reply = reply.map_or(&[][..], |generation| &generation.token_ids);
    [&call.prompt_ids[..], reply].concat()
}

fn first(text: &str) -> String {
    text.chars().take(CHARACTERS_MAX + 1).collect()
}

/// The end of a text, one character more than is shown when it is longer.
fn last(text: &str) -> String {
    let skip = text.chars().count().saturating_sub(CHARACTERS_MAX / 4);
    let tail: String = text.chars().skip(skip).collect();
    if skip > 0 { format!("…{tail}") } else { tail }
}

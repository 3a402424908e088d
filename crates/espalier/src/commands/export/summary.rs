//! What became of the rollouts and tokens of a run on their way out.

use std::{collections::BTreeMap, path::Path};

use export::Source;
use serde::Serialize;

use crate::text::count;

/// The figures of an export.
#[derive(Debug, Default, Serialize)]
pub(super) struct Summary {
    format: &'static str,
    selection: String,
    /// Of the run.
    pub(super) rollouts: usize,
    written: usize,
    lines: usize,
    pub(super) bytes: u64,
    tokens: Tokens,
    /// Rollouts that are not written, by reason.
    skipped: BTreeMap<String, usize>,
}

/// Generated tokens of the rollouts that were looked into.
#[derive(Debug, Default, Serialize)]
struct Tokens {
    generated: usize,
    /// Trained in what is written.
    kept: usize,
    /// Could be trained, but are not, by reason.
    dropped: BTreeMap<String, usize>,
    /// On kept branches, but without log-probabilities: context.
    without_logprobs: usize,
}

impl Summary {
    pub(super) fn new(format: &'static str, selection: &str) -> Self {
        Self {
            format,
            selection: selection.to_owned(),
            ..Self::default()
        }
    }

    pub(super) fn skip(&mut self, reason: &str) {
        *self.skipped.entry(reason.to_owned()).or_default() += 1;
    }

    /// A rollout with too many leaves: out as a whole.
    pub(super) fn over_branched(&mut self, source: &Source<'_>) {
        self.skip("over-branched");
        self.tokens(source);
    }

    pub(super) fn wrote(&mut self, source: &Source<'_>, lines: usize) {
        self.written += 1;
        self.lines += lines;
        self.tokens(source);
    }

    fn tokens(&mut self, source: &Source<'_>) {
        let cut = source.rows.tokens_cut();
        self.tokens.generated += source.tree.stats().tokens_generated;
        self.tokens.kept += source.kept.tokens_trained.saturating_sub(cut);
        self.tokens.without_logprobs += source.kept.tokens_without_logprobs;
        let dropped = source.kept.dropped.iter();
        let reasons = dropped.map(|dropped| (dropped.reason.name(), dropped.tokens_trainable));
        for (reason, tokens) in reasons.chain([("cut by --tokens-max".to_owned(), cut)]) {
            if tokens > 0 {
                *self.tokens.dropped.entry(reason).or_default() += tokens;
            }
        }
    }

    /// For a person.
    pub(super) fn text(&self, out: &Path) -> String {
        let number = |number: usize| count(number as u64);
        let lines = match self.format {
            "atif" => String::new(),
            "captures" => format!(", {} calls", number(self.lines)),
            _ => format!(", {} rows", number(self.lines)),
        };
        let mut text = format!(
            "{} of {} rollouts written{lines}: {} ({} bytes, {}, selection {})\n",
            number(self.written),
            number(self.rollouts),
            out.display(),
            count(self.bytes),
            self.format,
            self.selection,
        );
        let list = |reasons: &BTreeMap<String, usize>| {
            let reasons = reasons
                .iter()
                .map(|(reason, tokens)| format!("{reason} {}", number(*tokens)));
            reasons.collect::<Vec<_>>().join(", ")
        };
        let tokens = &self.tokens;
        text.push_str(&format!(
            "generated tokens: {} seen, {} kept",
            number(tokens.generated),
            number(tokens.kept)
        ));
        if !tokens.dropped.is_empty() {
            text.push_str(&format!("; dropped: {}", list(&tokens.dropped)));
        }
        if tokens.without_logprobs > 0 {
            text.push_str(&format!(
                "; without log-probabilities, so context: {}",
                number(tokens.without_logprobs)
            ));
        }
        text.push('\n');
        if !self.skipped.is_empty() {
            text.push_str(&format!("rollouts left out: {}\n", list(&self.skipped)));
        }
        text
    }
}

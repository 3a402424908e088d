//! The drawing of one rollout's tree.

use std::path::Path;

use export::svg::{Caption, draw};
use record::{Call, Rollout};
use tree::{Selection, Tree, select};

use crate::{atomic::AtomicFile, error::CliError, text::count};

/// Draws the tree and what the run's rule keeps of it.
pub(super) fn write(
    file: &Path,
    rollout: &Rollout,
    calls: &[Call],
    selection: &Selection,
) -> Result<(), CliError> {
    let tree = Tree::build(calls).map_err(|error| {
        CliError::failed(format!("rollout {}: its tree", rollout.spec.id), error)
    })?;
    let kept = select(&tree, selection);
    let stats = tree.stats();
    let mut facts = vec![format!("harness {}", rollout.spec.harness)];
    facts.extend(
        rollout
            .verdict
            .as_ref()
            .map(|verdict| format!("reward {}", verdict.reward)),
    );
    facts.extend(
        rollout
            .disposition
            .as_ref()
            .map(|disposition| disposition.name().to_owned()),
    );
    facts.extend([
        format!("{} calls", stats.calls),
        format!("{} unique tokens", count(stats.tokens_unique as u64)),
        format!("{} generated", count(stats.tokens_generated as u64)),
        format!("{} trained", count(kept.tokens_trained as u64)),
    ]);
    let caption = Caption {
        title: rollout.spec.id.as_str().to_owned(),
        facts,
    };
    AtomicFile::write_all_to(file, draw(&tree, &kept, &caption).as_bytes()).map(|_| ())
}

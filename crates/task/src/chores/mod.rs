//! The built-in chores: small workspace jobs made from a seed.
//!
//! Pure: the same settings give the same tasks, byte for byte, and task number `i` does not
//! depend on how many are asked for. Families take turns, so any count is spread evenly.
//!
//! The chores are made for a policy of a few million parameters that learns to copy bytes:
//! instructions under 130 bytes of plain words, at most three files of under 250 bytes, commands
//! under 90 bytes, one to five tool calls. Invented names and numbers of the two splits are
//! disjoint by construction: a hash of the text decides which split it belongs to
//! ([`split_of`]), and [`Split`] is all that decides what may be drawn.
//!
//! Every verifier is a POSIX shell script that looks only at the workspace, scores doing nothing
//! with 0, and checks that the files which are none of the chore's business are still there.
//!
//! A new family is one function `fn(&mut Dice, &mut Draft)` and one row of `FAMILIES`.

mod dice;
mod draft;
mod edit;
mod find;
mod fix;
mod lines;
mod place;
mod settings;
mod text;

use std::{collections::BTreeMap, path::PathBuf};

use dice::Dice;
pub use dice::split_of;
use draft::Draft;
pub(crate) use draft::quote;
use record::TaskId;
pub use settings::Settings;

use crate::{
    Contract, Environment, Format, Grading, Payload, Split, Step, Task, TaskFile, Verifier, digest,
};

/// Where the chores live in the sandbox.
pub const WORKSPACE: &str = "/workspace";
/// HOME of the chores in the sandbox.
pub const HOME: &str = "/home/agent";
/// Wall-clock limit of a chore's verifier. It needs some milliseconds; the largest inner limit
/// is two programs of 5 s each.
pub const VERIFIER_TIMEOUT_S: u64 = 30;

type Family = fn(&mut Dice, &mut Draft);

/// Name and maker of every family, in the order in which they take turns.
const FAMILIES: &[(&str, Family)] = &[
    ("folder", place::folder),
    ("create", place::create),
    ("move", place::relocate),
    ("rename", place::rename),
    ("copy", place::copy),
    ("delete", place::delete),
    ("executable", place::executable),
    ("count", lines::count),
    ("sort", lines::sort),
    ("filter", lines::filter),
    ("merge", lines::merge),
    ("ends", lines::ends),
    ("append", lines::append),
    ("json", edit::json),
    ("ini", edit::ini),
    ("cell", edit::cell),
    ("row", edit::row),
    ("replace", edit::replace),
    ("extract", find::extract),
    ("answer", find::answer),
    ("note", find::note),
    ("trail", find::trail),
    ("highest", find::highest),
    ("locate", find::locate),
    ("fix-shell", fix::shell),
    ("fix-python", fix::python),
];

/// The names of all families, in turn.
pub fn families() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().map(|(name, _)| *name)
}

/// The first `count` chores of a split, all families in turn.
#[must_use]
pub fn generate(split: Split, seed: u64, count: usize) -> Vec<Task> {
    let all: Vec<_> = FAMILIES.iter().collect();
    make(&all, split, seed, count)
}

/// The chores that the settings ask for.
#[must_use]
pub fn generate_with(settings: &Settings, split: Split) -> Vec<Task> {
    let chosen: Vec<_> = FAMILIES
        .iter()
        .filter(|(name, _)| {
            settings.families.is_empty() || settings.families.iter().any(|one| one == name)
        })
        .collect();
    make(&chosen, split, settings.seed, settings.count(split))
}

fn make(families: &[&(&str, Family)], split: Split, seed: u64, count: usize) -> Vec<Task> {
    families
        .iter()
        .cycle()
        .take(count)
        .enumerate()
        .map(|(index, (name, family))| task(split, seed, index, name, *family))
        .collect()
}

fn task(split: Split, seed: u64, index: usize, name: &str, family: Family) -> Task {
    let mut dice = Dice::new(seed, split, index, name);
    let mut draft = Draft::default();
    family(&mut dice, &mut draft);
    draft.steps.push(Step::Say("Done.".to_owned()));
    let text = format!("chores-{}-{index:04}-{name}", split.name());
    let Ok(id) = TaskId::new(text) else {
        unreachable!("family names are short words of letters and dashes")
    };
    let script = draft.script();
    let mut task = Task {
        id,
        family: name.to_owned(),
        instruction: draft.instruction,
        files: draft.files,
        workspace: PathBuf::from(WORKSPACE),
        home: PathBuf::from(HOME),
        verifier: Verifier {
            files: vec![TaskFile {
                path: PathBuf::from("check.sh"),
                content: script.into_bytes(),
                executable: false,
            }],
            folder: PathBuf::from(".verify"),
            argv: vec!["sh".to_owned(), ".verify/check.sh".to_owned()],
            cwd: None,
            timeout_s: VERIFIER_TIMEOUT_S,
            contract: Contract::LastLine,
            payload: Payload::default(),
            env: BTreeMap::new(),
        },
        solution: draft.steps,
        metadata: BTreeMap::from([
            ("split".to_owned(), split.name().into()),
            ("seed".to_owned(), seed.into()),
            ("names".to_owned(), dice.used().to_vec().into()),
        ]),
        format: Format::default(),
        grading: Grading::default(),
        environment: Environment::default(),
        digest: String::new(),
    };
    task.digest = digest::digest(&task);
    task
}

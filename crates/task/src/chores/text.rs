//! Small pieces of invented text that several families share.

use super::dice::Dice;

/// A line of two invented names, without a newline.
pub(super) fn line(dice: &mut Dice) -> String {
    let [first, second] = dice.words();
    format!("{first} {second}")
}

/// So many lines of two invented names.
pub(super) fn lines(dice: &mut Dice, count: usize) -> String {
    (0..count).map(|_| line(dice) + "\n").collect()
}

/// A file name and its extension.
#[derive(Debug)]
pub(super) struct Named {
    pub(super) name: String,
    pub(super) kind: &'static str,
}

/// Two file names of different kinds.
pub(super) fn two_kinds(dice: &mut Dice) -> (Named, Named) {
    let mut kinds = ["txt", "csv", "log", "md"];
    dice.shuffle(&mut kinds);
    let mut named = |kind| Named {
        name: format!("{}.{kind}", dice.word()),
        kind,
    };
    (named(kinds[0]), named(kinds[1]))
}

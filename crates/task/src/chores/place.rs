//! Chores about where files are: make, create, move, rename, copy, delete, permissions.

use super::{
    dice::Dice,
    draft::Draft,
    text::{line, lines, two_kinds},
};

/// Make one folder, two, or one in another.
pub(super) fn folder(dice: &mut Dice, chore: &mut Draft) {
    let [first, second] = dice.words();
    match dice.below(3) {
        0 => {
            chore.ask(
                dice,
                &["Make a folder named {a}.", "Create the folder {a}."],
                &[&first],
            );
            chore.bash(format!("mkdir {first}"));
            chore.folder(&first);
        }
        1 => {
            chore.ask(
                dice,
                &[
                    "Make the folders {a} and {b}.",
                    "Create two folders, {a} and {b}.",
                ],
                &[&first, &second],
            );
            chore.bash(format!("mkdir {first} {second}"));
            chore.folder(&first);
            chore.folder(&second);
        }
        _ => {
            chore.ask(
                dice,
                &[
                    "Make a folder {b} inside a new folder {a}.",
                    "Create the folder {a}/{b}.",
                ],
                &[&first, &second],
            );
            chore.bash(format!("mkdir -p {first}/{second}"));
            chore.folder(&format!("{first}/{second}"));
        }
    }
}

/// Create a file with a given text.
pub(super) fn create(dice: &mut Dice, chore: &mut Draft) {
    let path = format!("{}.txt", dice.word());
    let text = line(dice);
    chore.ask(
        dice,
        &[
            "Create {a} with the text: {b}",
            "Write the line {b} to the new file {a}.",
            "Make a file {a} that says: {b}",
        ],
        &[&path, &text],
    );
    chore.put(dice, &path, &text);
    chore.holds(&path, &text);
}

/// Move a file into a folder; half of the time its name must be looked up.
pub(super) fn relocate(dice: &mut Dice, chore: &mut Draft) {
    let (path, other) = two_kinds(dice);
    let folder = dice.word();
    let content = lines(dice, 2);
    chore.file(&path.name, &content);
    let resident = format!("{folder}/{}.txt", dice.word());
    let text = lines(dice, 1);
    chore.kept(&resident, &text);
    let text = lines(dice, 1);
    chore.kept(&other.name, &text);
    if dice.coin() {
        chore.ask(
            dice,
            &[
                "Move the {a} file into the folder {b}.",
                "Put the {a} file into {b}.",
            ],
            &[path.kind, &folder],
        );
        chore.bash("ls");
    } else {
        chore.ask(
            dice,
            &[
                "Move {a} into the folder {b}.",
                "Put {a} into the folder {b}.",
            ],
            &[&path.name, &folder],
        );
    }
    chore.bash(format!("mv {} {folder}/", path.name));
    chore.gone(&path.name);
    chore.same(&format!("{folder}/{}", path.name), &content);
}

/// Rename the one file of a kind.
pub(super) fn rename(dice: &mut Dice, chore: &mut Draft) {
    let (path, other) = two_kinds(dice);
    let content = lines(dice, 2);
    chore.file(&path.name, &content);
    let text = lines(dice, 1);
    chore.kept(&other.name, &text);
    let target = format!("{}.{}", dice.word(), path.kind);
    chore.ask(
        dice,
        &[
            "Rename the {a} file to {b}.",
            "The {a} file must be called {b}. Rename it.",
            "Give the {a} file the name {b}.",
        ],
        &[path.kind, &target],
    );
    chore.bash("ls");
    chore.bash(format!("mv {} {target}", path.name));
    chore.gone(&path.name);
    chore.same(&target, &content);
}

/// Copy the only file of a folder.
pub(super) fn copy(dice: &mut Dice, chore: &mut Draft) {
    let folder = dice.word();
    let path = format!("{folder}/{}.txt", dice.word());
    let content = lines(dice, 2);
    chore.kept(&path, &content);
    let target = format!("{}.txt", dice.word());
    chore.ask(
        dice,
        &[
            "Copy the file in the folder {a} to {b}.",
            "Make a copy of the file in {a} and call it {b}.",
        ],
        &[&folder, &target],
    );
    chore.bash(format!("ls {folder}"));
    chore.bash(format!("cp {path} {target}"));
    chore.same(&target, &content);
}

/// Delete the file that contains a word.
pub(super) fn delete(dice: &mut Dice, chore: &mut Draft) {
    let word = dice.word();
    let mut names = dice.words::<3>().map(|name| format!("{name}.txt"));
    dice.shuffle(&mut names);
    let [victim, first, second] = names;
    let companion = dice.word();
    let content = if dice.coin() {
        format!("{word} {companion}\n")
    } else {
        format!("{companion} {word}\n")
    };
    chore.file(&victim, &content);
    let text = lines(dice, 1);
    chore.kept(&first, &text);
    let text = lines(dice, 1);
    chore.kept(&second, &text);
    chore.ask(
        dice,
        &[
            "Delete the file that contains the word {a}.",
            "Remove the file with the word {a} in it.",
            "One file contains {a}. Delete that file.",
        ],
        &[&word],
    );
    chore.bash(format!("grep -l {word} *"));
    chore.bash(format!("rm {victim}"));
    chore.gone(&victim);
}

/// Make the script executable.
pub(super) fn executable(dice: &mut Dice, chore: &mut Draft) {
    let path = format!("{}.sh", dice.word());
    let other = format!("{}.txt", dice.word());
    let content = format!("#!/bin/sh\necho {}\n", dice.word());
    chore.kept(&path, &content);
    let text = lines(dice, 1);
    chore.kept(&other, &text);
    if dice.coin() {
        chore.ask(
            dice,
            &[
                "Make the shell script executable.",
                "There is a script here. Make it executable.",
            ],
            &[],
        );
        chore.bash("ls");
    } else {
        chore.ask(dice, &["Make {a} executable."], &[&path]);
    }
    chore.bash(format!("chmod +x {path}"));
    chore.check(format!("[ -x {path} ] || no"));
}

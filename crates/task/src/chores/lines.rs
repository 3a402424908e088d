//! Chores about lines: count, sort, filter, merge, first and last, append.

use super::{
    dice::Dice,
    draft::Draft,
    text::{line, lines},
};

/// Lines of which some hold `word`, shuffled; and how many do.
fn scattered(dice: &mut Dice, word: &str, with: usize, without: usize) -> Vec<String> {
    let mut all = Vec::new();
    for _ in 0..with {
        let companion = dice.word();
        all.push(if dice.coin() {
            format!("{word} {companion}")
        } else {
            format!("{companion} {word}")
        });
    }
    for _ in 0..without {
        all.push(line(dice));
    }
    dice.shuffle(&mut all);
    all
}

fn joined(all: &[String]) -> String {
    all.iter().map(|line| format!("{line}\n")).collect()
}

/// Count the lines with a word.
pub(super) fn count(dice: &mut Dice, chore: &mut Draft) {
    let [name, target, word] = dice.words();
    let path = format!("{name}.log");
    let target = format!("{target}.txt");
    let with = 2 + dice.below(4);
    let without = 1 + dice.below(3);
    let content = joined(&scattered(dice, &word, with, without));
    chore.kept(&path, &content);
    chore.ask(
        dice,
        &[
            "Count the lines with {a} in {b}. Write the number to {c}.",
            "How many lines of {b} have {a}? Write the number to {c}.",
        ],
        &[&word, &path, &target],
    );
    chore.bash(format!("grep -c {word} {path}"));
    chore.put(dice, &target, &with.to_string());
    chore.holds(&target, &with.to_string());
}

/// Sort a file; half of the time its name must be looked up.
pub(super) fn sort(dice: &mut Dice, chore: &mut Draft) {
    let [name, target, folder] = dice.words();
    let target = format!("{target}.txt");
    let count = 3 + dice.below(3);
    let mut all: Vec<String> = (0..count).map(|_| dice.word()).collect();
    let content = joined(&all);
    let path = if dice.coin() {
        let path = format!("{folder}/{name}.txt");
        chore.ask(
            dice,
            &[
                "Sort the lines of the file in {a} into {b}.",
                "Write the sorted lines of the file in the folder {a} to {b}.",
            ],
            &[&folder, &target],
        );
        chore.bash(format!("ls {folder}"));
        path
    } else {
        let path = format!("{name}.txt");
        chore.ask(
            dice,
            &[
                "Sort the lines of {a} into {b}.",
                "Write the lines of {a} in order to {b}.",
            ],
            &[&path, &target],
        );
        path
    };
    chore.kept(&path, &content);
    chore.bash(format!("sort {path} > {target}"));
    all.sort();
    chore.holds(&target, &joined(&all));
}

/// Write the lines with a word to a file.
pub(super) fn filter(dice: &mut Dice, chore: &mut Draft) {
    let [name, target, word] = dice.words();
    let path = format!("{name}.log");
    let target = format!("{target}.txt");
    let with = 1 + dice.below(3);
    let all = scattered(dice, &word, with, 3);
    chore.kept(&path, &joined(&all));
    chore.ask(
        dice,
        &[
            "Write the lines of {b} that have {a} to {c}.",
            "Copy only the lines with {a} from {b} to {c}.",
            "Filter {b} for {a} into {c}.",
        ],
        &[&word, &path, &target],
    );
    chore.bash(format!("grep {word} {path} > {target}"));
    let kept: Vec<String> = all
        .into_iter()
        .filter(|line| line.contains(&word))
        .collect();
    chore.holds(&target, &joined(&kept));
}

/// Join two files; half of the time their names must be looked up.
pub(super) fn merge(dice: &mut Dice, chore: &mut Draft) {
    let mut names = dice.words::<2>();
    let [target, folder] = dice.words();
    let target = format!("{target}.txt");
    let looked_up = dice.coin();
    if looked_up {
        names.sort();
    }
    let paths = names.map(|name| {
        if looked_up {
            format!("{folder}/{name}.txt")
        } else {
            format!("{name}.txt")
        }
    });
    let contents = [lines(dice, 2), lines(dice, 1)];
    chore.kept(&paths[0], &contents[0]);
    chore.kept(&paths[1], &contents[1]);
    if looked_up {
        chore.ask(
            dice,
            &[
                "Join the files in {a} in order of name into {b}.",
                "Merge the files of the folder {a}, sorted by name, into {b}.",
            ],
            &[&folder, &target],
        );
        chore.bash(format!("ls {folder}"));
    } else {
        chore.ask(
            dice,
            &[
                "Join {a} and {b} into {c}.",
                "Write {a} and then {b} to {c}.",
            ],
            &[&paths[0], &paths[1], &target],
        );
    }
    chore.bash(format!("cat {} {} > {target}", paths[0], paths[1]));
    chore.holds(&target, &contents.concat());
}

/// Take the first or the last lines.
pub(super) fn ends(dice: &mut Dice, chore: &mut Draft) {
    let [name, target] = dice.words();
    let path = format!("{name}.txt");
    let target = format!("{target}.txt");
    let take = 1 + dice.below(3);
    let count = take + 2 + dice.below(2);
    let all: Vec<String> = (0..count).map(|_| dice.word()).collect();
    chore.kept(&path, &joined(&all));
    let (which, program, kept) = if dice.coin() {
        ("first", "head", &all[..take])
    } else {
        ("last", "tail", &all[count - take..])
    };
    let unit = if take == 1 { "line" } else { "lines" };
    chore.ask(
        dice,
        &[
            "Write the {a} {b} {c} of {d} to {e}.",
            "Put the {a} {b} {c} of {d} into {e}.",
        ],
        &[which, &take.to_string(), unit, &path, &target],
    );
    chore.bash(format!("{program} -n {take} {path} > {target}"));
    chore.holds(&target, &joined(kept));
}

/// Append a line; the file ends with a newline.
pub(super) fn append(dice: &mut Dice, chore: &mut Draft) {
    let path = format!("{}.txt", dice.word());
    let count = 1 + dice.below(3);
    let content = lines(dice, count);
    let added = line(dice);
    chore.file(&path, &content);
    chore.ask(
        dice,
        &[
            "Append the line {b} to {a}.",
            "Add the line {b} at the end of {a}.",
        ],
        &[&path, &added],
    );
    chore.bash(format!("echo {added} >> {path}"));
    chore.holds(&path, &format!("{content}{added}"));
}

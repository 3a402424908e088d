//! Chores that find something out first: logs, questions, notes, trails.

use super::{dice::Dice, draft::Draft, text::lines};

/// Write a value from a log to a file.
pub(super) fn extract(dice: &mut Dice, chore: &mut Draft) {
    let path = format!("{}.log", dice.word());
    let target = format!("{}.txt", dice.word());
    let names = dice.words::<3>();
    let codes: [String; 3] = std::array::from_fn(|_| dice.number());
    let place = dice.below(3);
    let content: String = names
        .iter()
        .zip(&codes)
        .map(|(name, code)| format!("user {name} code {code}\n"))
        .collect();
    chore.kept(&path, &content);
    chore.ask(
        dice,
        &[
            "Find the code of {a} in {b} and write it to {c}.",
            "Write the code of {a} from {b} to {c}.",
            "What is the code of {a} in {b}? Write it to {c}.",
        ],
        &[&names[place], &path, &target],
    );
    chore.bash(format!("grep {} {path}", names[place]));
    chore.put(dice, &target, &codes[place]);
    chore.holds(&target, &codes[place]);
}

/// Answer a question about a text.
pub(super) fn answer(dice: &mut Dice, chore: &mut Draft) {
    let path = format!("{}.txt", dice.word());
    let target = format!("{}.txt", dice.word());
    let things = dice.words::<3>();
    let owners = dice.words::<3>();
    let place = dice.below(3);
    let content: String = things
        .iter()
        .zip(&owners)
        .map(|(thing, owner)| format!("{owner} owns {thing}.\n"))
        .collect();
    chore.kept(&path, &content);
    chore.ask(
        dice,
        &[
            "Read {b}. Who owns {a}? Write the name to {c}.",
            "Who owns {a}? See {b}. Write only the name to {c}.",
        ],
        &[&things[place], &path, &target],
    );
    chore.look(dice, &path);
    chore.put(dice, &target, &owners[place]);
    chore.holds(&target, &owners[place]);
}

/// Do what a note says.
pub(super) fn note(dice: &mut Dice, chore: &mut Draft) {
    chore.ask(
        dice,
        &[
            "Do what note.txt says.",
            "Follow note.txt.",
            "Read note.txt and do it.",
        ],
        &[],
    );
    let [first, second] = dice.words();
    let path = format!("{first}.txt");
    let other = format!("{}.md", dice.word());
    let text = lines(dice, 1);
    let variant = dice.below(4);
    let said = match variant {
        0 => format!("Make a folder named {first}."),
        1 => format!("Create {path} with the text: {second}"),
        2 => format!("Delete {path}."),
        _ => format!("Rename {path} to {second}.txt."),
    };
    chore.kept("note.txt", &format!("{said}\n"));
    chore.kept(&other, &text);
    chore.look(dice, "note.txt");
    match variant {
        0 => {
            chore.bash(format!("mkdir {first}"));
            chore.folder(&first);
        }
        1 => {
            chore.put(dice, &path, &second);
            chore.holds(&path, &second);
        }
        2 => {
            let text = lines(dice, 1);
            chore.file(&path, &text);
            chore.bash(format!("rm {path}"));
            chore.gone(&path);
        }
        _ => {
            let text = lines(dice, 1);
            chore.file(&path, &text);
            chore.bash(format!("mv {path} {second}.txt"));
            chore.gone(&path);
            chore.same(&format!("{second}.txt"), &text);
        }
    }
}

/// Follow a trail of files to a number.
pub(super) fn trail(dice: &mut Dice, chore: &mut Draft) {
    let stops = if dice.coin() { 3 } else { 2 };
    let paths: Vec<String> = (0..stops).map(|_| format!("{}.txt", dice.word())).collect();
    let target = format!("{}.txt", dice.word());
    let number = dice.number();
    chore.ask(
        dice,
        &[
            "Start at {a} and follow the files. Write the number at the end to {b}.",
            "{a} leads to a number. Find it and write it to {b}.",
        ],
        &[&paths[0], &target],
    );
    for (index, path) in paths.iter().enumerate() {
        let said = match paths.get(index + 1) {
            Some(next) => format!("See {next}\n"),
            None => format!("The number is {number}\n"),
        };
        chore.kept(path, &said);
        chore.look(dice, path);
    }
    chore.put(dice, &target, &number);
    chore.holds(&target, &number);
}

/// Who has the highest number?
pub(super) fn highest(dice: &mut Dice, chore: &mut Draft) {
    let path = format!("{}.txt", dice.word());
    let target = format!("{}.txt", dice.word());
    let names = dice.words::<3>();
    let points: [String; 3] = std::array::from_fn(|_| dice.number());
    let content: String = names
        .iter()
        .zip(&points)
        .map(|(name, points)| format!("{name} {points}\n"))
        .collect();
    let best = names
        .iter()
        .zip(&points)
        .max_by_key(|(_, points)| points.parse::<u32>().unwrap_or(0))
        .map_or("", |(name, _)| name.as_str());
    chore.kept(&path, &content);
    chore.ask(
        dice,
        &[
            "Who has the highest number in {a}? Write the name to {b}.",
            "Write the name with the highest number in {a} to {b}.",
        ],
        &[&path, &target],
    );
    chore.bash(format!("sort -n -k 2 {path}"));
    chore.put(dice, &target, best);
    chore.holds(&target, best);
}

/// Which file has a word?
pub(super) fn locate(dice: &mut Dice, chore: &mut Draft) {
    let word = dice.word();
    let [folder, target] = dice.words();
    let target = format!("{target}.txt");
    let mut names = dice.words::<2>().map(|name| format!("{name}.md"));
    dice.shuffle(&mut names);
    let [found, other] = names;
    let companion = dice.word();
    chore.kept(
        &format!("{folder}/{found}"),
        &format!("{companion} {word}\n"),
    );
    let text = lines(dice, 1);
    chore.kept(&format!("{folder}/{other}"), &text);
    chore.ask(
        dice,
        &[
            "Which file in {a} has the word {b}? Write its name to {c}.",
            "Find the file in {a} with {b} in it. Write its name to {c}.",
        ],
        &[&folder, &word, &target],
    );
    chore.bash(format!("grep -l {word} {folder}/*"));
    chore.put(dice, &target, &found);
    // The name alone or with its folder: the instruction leaves that open.
    chore.check(format!(
        "plain {target}\ncase \"$(head -c 9999 {target})\" in {found}|{folder}/{found}|./{folder}/{found}) ;; *) no ;; esac"
    ));
}

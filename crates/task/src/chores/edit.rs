//! Chores that change a value in place: JSON, ini and TOML, CSV, plain text.

use super::{dice::Dice, draft::Draft};

/// Three keys, their old values, the place of the one to change and its new value.
fn settings(dice: &mut Dice) -> ([String; 3], [String; 3], usize, String) {
    let keys = dice.words();
    let values = std::array::from_fn(|_| dice.number());
    let place = dice.below(3);
    let new = dice.number();
    (keys, values, place, new)
}

/// Change a number in a JSON file.
pub(super) fn json(dice: &mut Dice, chore: &mut Draft) {
    let path = format!("{}.json", dice.word());
    let (keys, mut values, place, new) = settings(dice);
    let render = |values: &[String; 3]| {
        let rows: Vec<String> = keys
            .iter()
            .zip(values)
            .map(|(key, value)| format!("  \"{key}\": {value}"))
            .collect();
        format!("{{\n{}\n}}\n", rows.join(",\n"))
    };
    chore.file(&path, &render(&values));
    let key = &keys[place];
    chore.ask(
        dice,
        &[
            "In {a} set {b} to {c}.",
            "Change {b} to {c} in {a}.",
            "The value of {b} in {a} must be {c}.",
        ],
        &[&path, key, &new],
    );
    chore.look(dice, &path);
    let old = std::mem::replace(&mut values[place], new.clone());
    chore.swap(
        dice,
        &path,
        &format!("\"{key}\": {old}"),
        &format!("\"{key}\": {new}"),
    );
    chore.holds_reflowed(&path, &render(&values));
}

/// Change a number in an ini or TOML file.
pub(super) fn ini(dice: &mut Dice, chore: &mut Draft) {
    let path = format!("{}.{}", dice.word(), dice.pick(&["ini", "toml"]));
    let section = dice.word();
    let (keys, mut values, place, new) = settings(dice);
    let render = |values: &[String; 3]| {
        let rows: String = keys
            .iter()
            .zip(values)
            .map(|(key, value)| format!("{key} = {value}\n"))
            .collect();
        format!("[{section}]\n{rows}")
    };
    chore.file(&path, &render(&values));
    let key = &keys[place];
    chore.ask(
        dice,
        &[
            "In {a} set {b} to {c}.",
            "Change {b} to {c} in {a}.",
            "Give {b} the value {c} in {a}.",
        ],
        &[&path, key, &new],
    );
    chore.look(dice, &path);
    let old = std::mem::replace(&mut values[place], new.clone());
    chore.swap(
        dice,
        &path,
        &format!("{key} = {old}"),
        &format!("{key} = {new}"),
    );
    chore.holds_spaced(&path, &render(&values));
}

fn table(keys: &[String], values: &[String]) -> String {
    let rows: String = keys
        .iter()
        .zip(values)
        .map(|(key, value)| format!("{key},{value}\n"))
        .collect();
    format!("name,count\n{rows}")
}

/// Change a cell of a CSV file.
pub(super) fn cell(dice: &mut Dice, chore: &mut Draft) {
    let path = format!("{}.csv", dice.word());
    let (keys, mut values, place, new) = settings(dice);
    chore.file(&path, &table(&keys, &values));
    let key = &keys[place];
    chore.ask(
        dice,
        &[
            "In {a} set the count of {b} to {c}.",
            "Change the count of {b} in {a} to {c}.",
        ],
        &[&path, key, &new],
    );
    chore.bash(format!("grep {key} {path}"));
    let old = std::mem::replace(&mut values[place], new.clone());
    chore.swap(
        dice,
        &path,
        &format!("{key},{old}"),
        &format!("{key},{new}"),
    );
    chore.holds(&path, &table(&keys, &values));
}

/// Remove a row of a CSV file.
pub(super) fn row(dice: &mut Dice, chore: &mut Draft) {
    let path = format!("{}.csv", dice.word());
    let (keys, values, place, _) = settings(dice);
    chore.file(&path, &table(&keys, &values));
    let key = &keys[place];
    chore.ask(
        dice,
        &[
            "Remove the row of {b} from {a}.",
            "Delete the row {b} in {a}.",
        ],
        &[&path, key],
    );
    chore.look(dice, &path);
    chore.bash(format!("sed -i '/{key}/d' {path}"));
    let others = |items: &[String; 3]| {
        let mut items = items.to_vec();
        items.remove(place);
        items
    };
    chore.holds(&path, &table(&others(&keys), &others(&values)));
}

/// Replace a word everywhere in a text.
pub(super) fn replace(dice: &mut Dice, chore: &mut Draft) {
    let path = format!("{}.{}", dice.word(), dice.pick(&["txt", "md"]));
    let [old, new] = dice.words();
    let [first, second, third] = dice.words();
    let content = match dice.below(3) {
        0 => format!("{old} {first}\n{second} {third}\n"),
        1 => format!("{first} {old}\n{old} {second}\n"),
        _ => format!("{first}\n{old} {old}\n{second}\n"),
    };
    chore.file(&path, &content);
    chore.ask(
        dice,
        &[
            "Replace {b} with {c} in {a}.",
            "In {a} change every {b} to {c}.",
        ],
        &[&path, &old, &new],
    );
    chore.look(dice, &path);
    chore.bash(format!("sed -i 's/{old}/{new}/g' {path}"));
    chore.holds(&path, &content.replace(&old, &new));
}

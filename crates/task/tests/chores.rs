//! What the chores promise: honest verifiers, solvable, small, disjoint, stable.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests are not in a test function"
)]

mod runner;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::Instant,
};

use runner::{put, score};
use task::{
    Split, Step, Task,
    chores::{self, split_of},
    load,
};

fn play(folder: &Path, step: &Step) -> String {
    match step {
        Step::Bash(command) => runner::shell(folder, command),
        Step::Read(path) => std::fs::read_to_string(folder.join(path)).unwrap(),
        Step::Write(path, text) => {
            std::fs::write(folder.join(path), text).unwrap();
            String::new()
        }
        Step::Edit(path, old, new) => {
            let text = std::fs::read_to_string(folder.join(path)).unwrap();
            assert!(text.contains(old.as_str()), "{path:?} has no {old:?}");
            std::fs::write(folder.join(path), text.replacen(old.as_str(), new, 1)).unwrap();
            String::new()
        }
        Step::Say(_) => String::new(),
    }
}

fn both() -> Vec<Task> {
    let mut all = load("chores", Split::Train).unwrap();
    all.extend(load("chores", Split::HeldOut).unwrap());
    all
}

/// Spreads the tasks over two threads.
fn each(tasks: &[Task], check: impl Fn(&Task, &Path) + Sync) {
    std::thread::scope(|scope| {
        for half in tasks.chunks(tasks.len().div_ceil(2)) {
            let check = &check;
            scope.spawn(move || {
                for task in half {
                    let folder = tempfile::tempdir().unwrap();
                    put(folder.path(), &task.files);
                    check(task, folder.path());
                }
            });
        }
    });
}

#[test]
fn doing_nothing_scores_zero_and_the_solution_scores_one_again_and_again() {
    let tasks = both();
    let start = Instant::now();
    each(&tasks, |task, folder| {
        assert_eq!(score(folder, task), "0", "{}: nothing was done", task.id);
        for step in &task.solution {
            play(folder, step);
        }
        for _ in 0..2 {
            assert_eq!(score(folder, task), "1", "{}: solved", task.id);
        }
    });
    println!("{} chores in {:?}", tasks.len(), start.elapsed());
}

/// A solution that also empties a file which is none of its business is no solution.
#[test]
fn destroying_a_bystander_costs_the_reward() {
    let tasks = both();
    let harmed = std::sync::atomic::AtomicUsize::new(0);
    each(&tasks, |task, folder| {
        let before: BTreeMap<_, _> = task
            .files
            .iter()
            .map(|file| (&file.path, &file.content))
            .collect();
        for step in &task.solution {
            play(folder, step);
        }
        for (path, content) in before {
            let path = folder.join(path);
            // Changed or gone: it was the chore's business.
            if std::fs::read(&path).ok().as_ref() != Some(content) {
                continue;
            }
            std::fs::write(&path, "").unwrap();
            assert_eq!(score(folder, task), "0", "{}: {path:?} emptied", task.id);
            std::fs::remove_file(&path).unwrap();
            assert_eq!(score(folder, task), "0", "{}: {path:?} removed", task.id);
            std::fs::write(&path, content).unwrap();
            harmed.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    });
    assert!(harmed.into_inner() > 300);
}

/// Leaving the last step out must not be enough, else the chore needs fewer steps than it says.
#[test]
fn the_last_action_is_needed() {
    each(&both(), |task, folder| {
        let steps = &task.solution;
        for step in &steps[..steps.len() - 2] {
            play(folder, step);
        }
        assert_eq!(score(folder, task), "0", "{}", task.id);
    });
}

/// The solution of the next chore of the same family, played in this one's world.
#[test]
fn the_solution_of_another_chore_scores_zero() {
    let families = chores::families().count();
    let tasks = chores::generate(Split::Train, 31, 5 * families);
    for (task, other) in tasks.iter().zip(&tasks[families..]) {
        assert_eq!(task.family, other.family);
        let folder = tempfile::tempdir().unwrap();
        put(folder.path(), &task.files);
        for step in &other.solution {
            let command = match step {
                Step::Bash(command) => command.clone(),
                Step::Write(path, text) => format!("printf %s '{text}' > {}", path.display()),
                _ => continue,
            };
            runner::shell(folder.path(), &format!("{command} || true"));
        }
        assert_eq!(
            score(folder.path(), task),
            "0",
            "{} by {}",
            task.id,
            other.id
        );
    }
}

/// The first chore of a family for which `wanted` holds, solved.
fn solved(family: &str, wanted: impl Fn(&Task) -> bool) -> (Task, tempfile::TempDir) {
    let task = chores::generate(Split::Train, 17, 1300)
        .into_iter()
        .find(|task| task.family == family && wanted(task))
        .unwrap();
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), &task.files);
    for step in &task.solution {
        play(folder.path(), step);
    }
    (task, folder)
}

/// Score after a change of the solved world, told as a shell command; `FILE` is the first file.
fn after(family: &str, wanted: &str, command: &str) -> String {
    let (task, folder) = solved(family, |task| task.instruction.contains(wanted));
    let file = task
        .files
        .first()
        .map_or("", |file| file.path.to_str().unwrap());
    runner::shell(folder.path(), &command.replace("FILE", file));
    score(folder.path(), &task)
}

#[test]
fn what_the_instruction_leaves_open_is_accepted() {
    let unended = "for f in *.txt; do printf %s \"$(cat $f)\" > $f.n; mv $f.n $f; done";
    assert_eq!(after("create", "", unended), "1");
    assert_eq!(after("append", "", "echo >> FILE"), "1");
    assert_eq!(after("json", "", "tr -d ' \\n' < FILE > n; mv n FILE"), "1");
    assert_eq!(after("json", "", "sed -i 's/^/    /' FILE"), "1");
    assert_eq!(after("ini", "", "sed -i 's/ = /=/' FILE"), "1");
    assert_eq!(
        after(
            "fix-shell",
            "misspelled",
            "sed -i 's/echo/printf \"%s %s\"/' FILE"
        ),
        "1"
    );
    let swapped = "sed -i 's/a + b/sum([a, b])/' FILE";
    assert_eq!(after("fix-python", "add a and b", swapped), "1");
    assert_eq!(
        after(
            "locate",
            "",
            "t=$(ls *.txt); sed -i \"s,^,$(ls -d */),\" $t"
        ),
        "1"
    );
    assert_eq!(after("folder", "", "touch scratch"), "1");
}

#[test]
fn what_the_instruction_does_not_leave_open_is_refused() {
    assert_eq!(after("append", "", "echo more >> FILE"), "0");
    assert_eq!(after("json", "", "echo , >> FILE"), "0");
    assert_eq!(after("row", "", "sed -i 's/count/number/' FILE"), "0");
    assert_eq!(
        after("copy", "", "f=$(ls *.txt); rm $f; ln -s FILE $f"),
        "0"
    );
    assert_eq!(after("executable", "", "chmod -x *.sh"), "0");
    // A program that prints the right text for one of the arguments only.
    assert_eq!(after("fix-shell", "", "echo 'echo vibi bodi' > FILE"), "0");
    assert_eq!(
        after("fix-shell", "", "printf 'while :; do :; done' > FILE"),
        "0"
    );
    assert_eq!(
        after("fix-python", "add a and b", "sed -i 's/a + b/a * b/' FILE"),
        "0"
    );
    assert_eq!(after("fix-python", "", "rm FILE"), "0");
    assert_eq!(
        after("count", "", "for f in *.txt; do echo 99 > $f; done"),
        "0"
    );
    // Something huge where a short text is expected.
    assert_eq!(
        after(
            "create",
            "",
            "for f in *.txt; do head -c 9000000 /dev/zero > $f; done"
        ),
        "0"
    );
}

fn names(task: &Task) -> Vec<String> {
    task.metadata["names"]
        .as_array()
        .unwrap()
        .iter()
        .map(|name| name.as_str().unwrap().to_owned())
        .collect()
}

/// All letters-and-digits words of a task that a policy sees or writes.
fn tokens(task: &Task) -> BTreeSet<String> {
    let mut text = task.instruction.clone();
    for file in &task.files {
        text += &format!(" {} ", file.path.display());
        text += std::str::from_utf8(&file.content).unwrap();
    }
    for step in &task.solution {
        text += &match step {
            Step::Bash(a) | Step::Say(a) => format!(" {a}"),
            Step::Read(a) => format!(" {}", a.display()),
            Step::Write(a, b) => format!(" {} {b}", a.display()),
            Step::Edit(a, b, c) => format!(" {} {b} {c}", a.display()),
        };
    }
    text.split(|letter: char| !letter.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty())
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_splits_share_no_invented_name_or_number() {
    let mut vocabulary = [BTreeSet::new(), BTreeSet::new()];
    for (half, split) in [Split::Train, Split::HeldOut].into_iter().enumerate() {
        for seed in 0..4 {
            for task in chores::generate(split, seed, 520) {
                let names = names(&task);
                for name in &names {
                    assert_eq!(split_of(name), split, "{name} in {}", task.id);
                    let letters = name.bytes().all(|byte| byte.is_ascii_lowercase());
                    let digits = name.bytes().all(|byte| byte.is_ascii_digit());
                    assert!(letters && (4..=8).contains(&name.len()) || digits, "{name}");
                }
                vocabulary[half].extend(
                    tokens(&task)
                        .into_iter()
                        .filter(|token| !names.contains(token)),
                );
            }
        }
    }
    // Whatever is not invented is the same small vocabulary in both halves.
    assert_eq!(vocabulary[0], vocabulary[1]);
    assert!(vocabulary[0].len() < 250, "{}", vocabulary[0].len());
    for task in chores::generate(Split::Train, 9, 2600) {
        for name in names(&task) {
            assert!(!vocabulary[0].contains(&name), "{name}: name or word?");
        }
    }
}

#[test]
fn chores_stay_small() {
    for split in [Split::Train, Split::HeldOut] {
        for task in chores::generate(split, 3, 1300) {
            let id = &task.id;
            assert!(task.instruction.len() < 130, "{id}: {}", task.instruction);
            assert!(task.files.len() <= 3, "{id}");
            assert!(
                task.files.iter().all(|file| file.content.len() < 250),
                "{id}"
            );
            assert!((2..=5).contains(&task.solution.len()), "{id}");
            assert_eq!(task.solution.last(), Some(&Step::Say("Done.".to_owned())));
            for step in &task.solution {
                if let Step::Bash(command) = step {
                    assert!(command.len() < 90, "{id}: {command}");
                }
            }
        }
    }
}

#[test]
fn a_task_depends_on_seed_split_and_place_only() {
    let few = chores::generate(Split::Train, 5, 30);
    let many = chores::generate(Split::Train, 5, 60);
    assert_eq!(few[..], many[..30]);
    let other = chores::generate(Split::Train, 6, 30);
    assert!(few.iter().zip(&other).all(|(a, b)| a.digest != b.digest));
    let instructions: BTreeSet<_> = many.iter().map(|task| &task.digest).collect();
    assert_eq!(instructions.len(), 60);
}

#[test]
fn the_default_set_holds_every_family_equally_often() {
    let families = chores::families().count();
    assert!(families >= 14);
    for (split, least) in [(Split::Train, 256), (Split::HeldOut, 64)] {
        let tasks = load("chores", split).unwrap();
        assert!(tasks.len() >= least);
        let mut counts = BTreeMap::<_, usize>::new();
        for task in &tasks {
            *counts.entry(task.family.clone()).or_default() += 1;
        }
        assert!(
            counts
                .values()
                .all(|count| *count == tasks.len() / families)
        );
    }
}

/// The built-in set is a yardstick: when this fails, numbers of old runs no longer compare.
#[test]
fn the_default_set_never_changes_unnoticed() {
    use sha2::{Digest, Sha256};
    let mut hash = Sha256::new();
    for task in both() {
        hash.update(task.digest);
    }
    insta::assert_snapshot!(hex::encode(hash.finalize()), @r#"2427bb1cae7e8f90dee242a2b90188a2f646ad98590b8a8dfe9525d889342115"#);
}

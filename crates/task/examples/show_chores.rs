//! Shows the built-in chores: `show_chores [N]` renders the first N, `show_chores words` lists
//! the words that are not invented, `show_chores sizes` prints means.

use std::{collections::BTreeSet, error::Error, io::Write};

use task::{Split, Step, Task, chores, load};

fn step_text(step: &Step) -> String {
    match step {
        Step::Bash(command) => format!("bash   {command}"),
        Step::Read(path) => format!("read   {}", path.display()),
        Step::Write(path, text) => format!("write  {} {text:?}", path.display()),
        Step::Edit(path, old, new) => format!("edit   {} {old:?} {new:?}", path.display()),
        Step::Say(text) => format!("say    {text}"),
    }
}

fn render(task: &Task, with_verifier: bool) -> String {
    let mut text = format!("== {}\ninstruction: {}\n", task.id, task.instruction);
    for file in &task.files {
        let content = String::from_utf8_lossy(&file.content);
        text += &format!("file {}:\n", file.path.display());
        for line in content.lines() {
            text += &format!("  | {line}\n");
        }
    }
    for step in &task.solution {
        text += &format!("step {}\n", step_text(step));
    }
    if with_verifier {
        for file in &task.verifier.files {
            text += &format!("verifier:\n{}", String::from_utf8_lossy(&file.content));
        }
    }
    text + "\n"
}

fn tokens(tasks: &[Task]) -> BTreeSet<String> {
    tasks
        .iter()
        .flat_map(|task| {
            render(task, false)
                .lines()
                .skip(1)
                .collect::<Vec<_>>()
                .join("\n")
                .split(|letter: char| !letter.is_ascii_alphanumeric())
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .filter(|word| word.starts_with(|letter: char| letter.is_ascii_alphabetic()))
        .collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = std::io::stdout().lock();
    match std::env::args().nth(1).as_deref() {
        Some("words") => {
            let seen = tokens(&chores::generate(Split::Train, 1, 5200));
            let held_out = tokens(&chores::generate(Split::HeldOut, 1, 5200));
            for word in seen.intersection(&held_out) {
                writeln!(out, "{word}")?;
            }
        }
        Some("sizes") => {
            for split in [Split::Train, Split::HeldOut] {
                let tasks = load("chores", split)?;
                let mean = |of: &dyn Fn(&Task) -> usize| {
                    tasks.iter().map(of).sum::<usize>() as f64 / tasks.len() as f64
                };
                writeln!(
                    out,
                    "{}: {} tasks; mean bytes of instruction {:.1}, of files {:.1}; mean files {:.2}, tool calls {:.2}",
                    split.name(),
                    tasks.len(),
                    mean(&|task| task.instruction.len()),
                    mean(&|task| task.files.iter().map(|file| file.content.len()).sum()),
                    mean(&|task| task.files.len()),
                    mean(&|task| task.solution.len() - 1),
                )?;
            }
        }
        count => {
            let count = count.unwrap_or("26").parse()?;
            for task in load("chores", Split::Train)?.iter().take(count) {
                writeln!(out, "{}", render(task, true))?;
            }
        }
    }
    Ok(())
}

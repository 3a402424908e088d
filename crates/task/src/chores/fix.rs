//! Chores that repair one line of a program. The check runs the program with arguments that the
//! instruction does not show, so that printing the expected text is no way around.

use super::{dice::Dice, draft::Draft};

/// One wrong line in a shell script.
pub(super) fn shell(dice: &mut Dice, chore: &mut Draft) {
    let path = format!("{}.sh", dice.word());
    let [word, first, second] = dice.words();
    let (content, old, new) = match dice.below(3) {
        0 => {
            chore.ask(
                dice,
                &[
                    "{a} must print its first argument, not the second. Fix it.",
                    "{a} prints the second argument. Make it print the first.",
                ],
                &[&path],
            );
            (
                format!("#!/bin/sh\necho {word} $2\n"),
                format!("{word} $2"),
                format!("{word} $1"),
            )
        }
        1 => {
            chore.ask(
                dice,
                &[
                    "{a} has a misspelled command. Fix it.",
                    "{a} does not run: a command is misspelled. Fix it.",
                ],
                &[&path],
            );
            (
                format!("#!/bin/sh\nehco {word} $1\n"),
                "ehco".to_owned(),
                "echo".to_owned(),
            )
        }
        _ => {
            chore.ask(
                dice,
                &["{a} has a syntax error. Fix it.", "Fix the error in {a}."],
                &[&path],
            );
            (
                format!("#!/bin/sh\nif [ -n \"$1\" ]; then\n  echo {word} $1\ndone\n"),
                "done".to_owned(),
                "fi".to_owned(),
            )
        }
    };
    chore.file(&path, &content);
    chore.look(dice, &path);
    chore.swap(dice, &path, &old, &new);
    for (argument, other) in [(&first, &second), (&second, &first)] {
        chore.check(format!(
            "[ \"$(timeout 5 sh {path} {argument} {other} 2>&1 </dev/null | head -c 99)\" = '{word} {argument}' ] || no"
        ));
    }
}

/// One wrong line in a Python program.
///
/// The usual repair is recognised by its text, because starting Python costs more than the rest
/// of the check. Any other repair is tried out.
pub(super) fn python(dice: &mut Dice, chore: &mut Draft) {
    let path = format!("{}.py", dice.word());
    let name = dice.word();
    let good = format!("def {name}(a, b):\n    return a + b\n");
    let (old, new) = match dice.below(3) {
        0 => {
            chore.ask(
                dice,
                &[
                    "{b} in {a} must add a and b. Fix it.",
                    "Fix {a}: {b} must return the sum of a and b.",
                ],
                &[&path, &name],
            );
            ("a - b", "a + b")
        }
        1 => {
            chore.ask(
                dice,
                &["{a} has a syntax error. Fix it.", "Fix the error in {a}."],
                &[&path],
            );
            ("(a, b)", "(a, b):")
        }
        _ => {
            chore.ask(
                dice,
                &[
                    "{a} has a misspelled word. Fix it.",
                    "Fix the misspelled word in {a}.",
                ],
                &[&path],
            );
            ("retrun", "return")
        }
    };
    chore.file(&path, &good.replacen(new, old, 1));
    chore.look(dice, &path);
    chore.swap(dice, &path, old, new);
    let tight = good.replace([' ', '\n'], "");
    chore.check(format!(
        "plain {path}\n\
         if [ \"$(head -c 9999 {path} | tr -d ' \\t\\r\\n')\" != '{tight}' ]; then\n\
         t='import runpy; f=runpy.run_path(\"{path}\")[\"{name}\"]; print(f(7, 2), f(40, 5))'\n\
         [ \"$(timeout 5 python3 -B -c \"$t\" 2>/dev/null </dev/null | head -c 99)\" = '9 45' ] || no\n\
         fi"
    ));
}

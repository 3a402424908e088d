//! The shapes that real harnesses show on the wire, without their words.

use record::Conversation;

use super::{Talk, assistant, calls_tool, system, tool_result, user, with_tools};
use crate::{CallClass, ForkCause, Selection, Tree, select};

const TOOLS: [&str; 5] = ["bash", "read", "write", "edit", "task"];
const SUMMARY: &str = "Summary: two of the five files are renamed, three are left to do.";

fn main_with(messages: &[record::Message]) -> Conversation {
    let mut all = vec![
        system("You work in a workspace."),
        user("Rename the five files."),
    ];
    all.extend_from_slice(messages);
    with_tools(&TOOLS, all)
}

fn classes(tree: &Tree) -> Vec<CallClass> {
    tree.places.iter().map(|place| place.class).collect()
}

fn segments(tree: &Tree) -> Vec<u32> {
    tree.places.iter().map(|place| place.segment).collect()
}

fn built(talk: &Talk) -> Tree {
    let tree = Tree::build(&talk.calls).unwrap();
    tree.check(&talk.calls).unwrap();
    tree
}

#[test]
fn a_title_call_without_tools_comes_first_and_is_side() {
    let mut talk = Talk::new();
    talk.send(
        with_tools(
            &[],
            vec![system("Make a title."), user("Rename the five files.")],
        ),
        assistant("Renaming files"),
    );
    talk.send(main_with(&[]), calls_tool("bash", "ls"));
    talk.send(
        main_with(&[calls_tool("bash", "ls"), tool_result("a b c d e")]),
        assistant("Done."),
    );
    let tree = built(&talk);
    assert_eq!(
        classes(&tree),
        [CallClass::Side, CallClass::Main, CallClass::Main]
    );
    let kept = select(&tree, &Selection::default());
    assert_eq!(kept.calls, [1, 2]);
    assert!(kept.dropped.iter().all(|dropped| matches!(
        dropped.reason,
        crate::DropReason::Auxiliary(CallClass::Side)
    )));
}

#[test]
fn parallel_subagents_are_told_apart_from_the_main_thread() {
    let first = "Look for every place where the old name is used.";
    let second = "Write a test that fails while the old name is there.";
    let mut spawn = calls_tool("task", first);
    spawn
        .tool_calls
        .extend(calls_tool("task", second).tool_calls);
    let sub = |task: &str, rest: &[record::Message]| {
        let mut all = vec![system("You help."), user(task)];
        all.extend_from_slice(rest);
        with_tools(&TOOLS[..4], all)
    };
    let mut talk = Talk::new();
    talk.send(main_with(&[]), spawn.clone());
    talk.send(sub(first, &[]), calls_tool("bash", "grep -r old"));
    talk.send(sub(second, &[]), assistant("The test is written."));
    talk.send(
        sub(
            first,
            &[calls_tool("bash", "grep -r old"), tool_result("x:1")],
        ),
        assistant("One place."),
    );
    talk.send(
        main_with(&[spawn, tool_result("One place."), tool_result("Written.")]),
        assistant("Done."),
    );
    let tree = built(&talk);
    use CallClass::{Main, Subagent};
    assert_eq!(classes(&tree), [Main, Subagent, Subagent, Subagent, Main]);
    let threads: Vec<u32> = tree.places.iter().map(|place| place.thread).collect();
    assert_eq!((threads[0], threads[4]), (0, 0));
    assert_eq!(threads[1], threads[3]);
    assert_ne!(threads[1], threads[2]);
    assert!(
        tree.forks
            .iter()
            .all(|fork| fork.cause == ForkCause::Subagent)
    );
    assert_eq!(select(&tree, &Selection::default()).calls, [0, 4]);
    let both = Selection::Clawgym2 {
        leaves_max: 64,
        classes: vec![Main, Subagent],
    };
    assert_eq!(select(&tree, &both).calls, [0, 1, 2, 3, 4]);
}

#[test]
fn a_subagent_with_the_same_heading_is_found_by_what_it_was_asked() {
    let task = "Look for every place where the old name is used.";
    let mut talk = Talk::new();
    talk.send(main_with(&[]), calls_tool("task", task));
    talk.send(
        with_tools(&TOOLS, vec![system("You work in a workspace."), user(task)]),
        assistant("One place."),
    );
    let tree = built(&talk);
    assert_eq!(classes(&tree), [CallClass::Main, CallClass::Subagent]);
    assert_eq!(
        tree.places[1].class_evidence,
        "first message is in a tool call of call 0"
    );
}

#[test]
fn a_summary_asked_in_the_thread_starts_a_segment() {
    // Same system, same tools; the last user message grows by the request for a summary.
    let mut talk = Talk::new();
    talk.send(main_with(&[]), calls_tool("bash", "mv a b"));
    talk.send(
        main_with(&[calls_tool("bash", "mv a b"), tool_result("ok")]),
        calls_tool("bash", "mv c d"),
    );
    talk.send(
        main_with(&[
            calls_tool("bash", "mv a b"),
            tool_result("ok"),
            calls_tool("bash", "mv c d"),
            tool_result("ok"),
            user("Summarise what you did."),
        ]),
        assistant(SUMMARY),
    );
    let reopened = |rest: &[record::Message]| {
        let mut all = vec![
            system("You work in a workspace."),
            user(&format!("Earlier work, in short. {SUMMARY} Go on.")),
        ];
        all.extend_from_slice(rest);
        with_tools(&TOOLS, all)
    };
    talk.send(reopened(&[]), calls_tool("bash", "mv e f"));
    talk.send(
        reopened(&[calls_tool("bash", "mv e f"), tool_result("ok")]),
        assistant("Done."),
    );
    let tree = built(&talk);
    use CallClass::{Compaction, Main};
    assert_eq!(classes(&tree), [Main, Main, Compaction, Main, Main]);
    assert_eq!(segments(&tree), [0, 0, 0, 1, 1]);
    assert_eq!(tree.forks.len(), 1);
    assert_eq!(tree.forks[0].cause, ForkCause::Compaction);
    assert_eq!(select(&tree, &Selection::default()).calls, [0, 1, 3, 4]);
}

#[test]
fn a_summary_asked_apart_without_tools_starts_a_segment() {
    // A fresh two-message call; the new history holds the summary as a turn of the model.
    let mut talk = Talk::new();
    talk.send(main_with(&[]), calls_tool("bash", "mv a b"));
    talk.send(
        with_tools(
            &[],
            vec![
                system("You summarise."),
                user("user: Rename the five files."),
            ],
        ),
        assistant(SUMMARY),
    );
    talk.send(
        with_tools(
            &TOOLS,
            vec![
                system("You work in a workspace."),
                user("What did we do so far?"),
                assistant(SUMMARY),
                user("Go on."),
            ],
        ),
        assistant("Done."),
    );
    let tree = built(&talk);
    use CallClass::{Compaction, Main};
    assert_eq!(classes(&tree), [Main, Compaction, Main]);
    assert_eq!(segments(&tree), [0, 0, 1]);
}

#[test]
fn a_changed_system_message_stays_in_the_main_thread() {
    let mut talk = Talk::new();
    talk.send(main_with(&[]), calls_tool("bash", "ls"));
    let mut later = main_with(&[calls_tool("bash", "ls"), tool_result("a b")]);
    later.messages[0] = system("You work in a workspace. It is noon.");
    talk.send(later, assistant("Done."));
    let tree = built(&talk);
    assert_eq!(classes(&tree), [CallClass::Main, CallClass::Main]);
    assert_eq!(tree.places[1].previous, Some(0));
    assert_eq!(tree.forks[0].cause, ForkCause::SystemChanged);
    // Both replies acted on the world, so both are trained.
    assert_eq!(select(&tree, &Selection::default()).calls, [0, 1]);
}

#[test]
fn a_harness_without_tools_has_a_main_thread_too() {
    let talk_with = |messages: Vec<record::Message>| with_tools(&[], messages);
    let mut talk = Talk::new();
    talk.send(
        talk_with(vec![system("Title."), user("Do it, please.")]),
        assistant("A title"),
    );
    talk.send(
        talk_with(vec![system("Shell."), user("Do it.")]),
        assistant("ls"),
    );
    talk.send(
        talk_with(vec![
            system("Shell."),
            user("Do it."),
            assistant("ls"),
            user("a b c"),
        ]),
        assistant("done"),
    );
    let tree = built(&talk);
    assert_eq!(tree.places[1].class, CallClass::Main);
    assert_eq!(tree.places[2].class, CallClass::Main);
    assert_eq!(tree.places[1].thread, 0);
}

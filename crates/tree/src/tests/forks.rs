//! Every cause, with its price.

use record::{Conversation, Message};

use super::{END, Talk, assistant, call, calls_tool, said, system, tool_result, user, with_tools};
use crate::{ForkCause, Tree};

const TOOLS: [&str; 2] = ["bash", "read"];

fn conversation(rest: &[Message]) -> Conversation {
    let mut all = vec![system("Work."), user("Tidy up the folder.")];
    all.extend_from_slice(rest);
    with_tools(&TOOLS, all)
}

/// First turn `reply`, then a second request; the only fork, if any.
fn second(reply: Message, next: Conversation) -> (Tree, Talk) {
    let mut talk = Talk::new();
    talk.send(conversation(&[]), reply);
    talk.send(next, assistant("Done."));
    let tree = Tree::build(&talk.calls).unwrap();
    tree.check(&talk.calls).unwrap();
    (tree, talk)
}

fn cause(tree: &Tree) -> Option<(ForkCause, &str)> {
    tree.forks
        .first()
        .map(|fork| (fork.cause, fork.evidence.as_str()))
}

#[test]
fn an_exact_continuation_is_no_fork() {
    let reply = calls_tool("bash", "ls");
    let (tree, _) = second(reply.clone(), conversation(&[reply, tool_result("a")]));
    assert_eq!(cause(&tree), None);
    assert_eq!(tree.places[1].extends, Some(0));
}

#[test]
fn the_same_request_again_is_a_retry() {
    let (tree, _) = second(calls_tool("bash", "ls"), conversation(&[]));
    assert_eq!(
        cause(&tree),
        Some((ForkCause::Retry, "same request as call 0"))
    );
    assert_eq!(tree.forks[0].tokens_again, 0);
    // Even when it happens to draw the same tokens and adds no node.
    let same = [call(0, &[1], Some(&[2])), call(1, &[1], Some(&[2]))];
    let tree = Tree::build(&same).unwrap();
    assert_eq!(tree.nodes.len(), 2);
    assert_eq!(tree.forks[0].cause, ForkCause::Retry);
}

#[test]
fn a_retry_of_a_failed_call_costs_nothing_and_forks_nothing() {
    let calls = [call(0, &[1, 2], None), call(1, &[1, 2], Some(&[3]))];
    let tree = Tree::build(&calls).unwrap();
    assert_eq!(tree.forks, []);
}

#[test]
fn edited_history_names_the_message() {
    let reply = calls_tool("bash", "ls");
    let mut edited = conversation(&[reply.clone(), tool_result("a")]);
    edited.messages[1] = user("Tidy up the folder. Be quick.");
    let mut talk = Talk::new();
    talk.send(conversation(&[]), reply.clone());
    talk.send(
        conversation(&[reply.clone(), tool_result("long output")]),
        reply.clone(),
    );
    talk.send(
        conversation(&[
            reply.clone(),
            tool_result("[cleared]"),
            reply,
            tool_result("b"),
        ]),
        assistant("Done."),
    );
    let tree = Tree::build(&talk.calls).unwrap();
    assert_eq!(
        cause(&tree),
        Some((
            ForkCause::HistoryEdited,
            "message 2 (tool) differs from call 1"
        ))
    );
    assert_eq!(tree.places[2].previous, Some(1));
    let fork = &tree.forks[0];
    assert_eq!(
        fork.tokens_again + fork.tokens_shared,
        talk.calls[2].prompt_ids.len()
    );
}

#[test]
fn a_rollback_names_its_length() {
    let reply = calls_tool("bash", "ls");
    let mut talk = Talk::new();
    talk.send(conversation(&[reply.clone(), tool_result("a")]), reply);
    talk.send(conversation(&[assistant("No.")]), assistant("Done."));
    talk.send(conversation(&[]), assistant("Done."));
    let tree = Tree::build(&talk.calls).unwrap();
    let causes: Vec<ForkCause> = tree.forks.iter().map(|fork| fork.cause).collect();
    assert_eq!(causes, [ForkCause::HistoryEdited, ForkCause::HistoryEdited]);
    assert!(
        tree.forks[1].evidence.starts_with("rolled back"),
        "{:?}",
        tree.forks
    );
}

#[test]
fn other_tools_are_named() {
    let reply = calls_tool("bash", "ls");
    let mut next = conversation(&[reply.clone(), tool_result("a")]);
    next.tools.truncate(1);
    let (tree, _) = second(reply, next);
    assert_eq!(
        cause(&tree),
        Some((ForkCause::ToolsChanged, "1 tools, call 0 had 2"))
    );
}

#[test]
fn dropped_reasoning_is_template_drift() {
    let mut reply = calls_tool("bash", "ls");
    reply.reasoning = Some("I should look first.".to_owned());
    let echo = calls_tool("bash", "ls");
    let (tree, _) = second(reply, conversation(&[echo, tool_result("a")]));
    assert_eq!(
        cause(&tree),
        Some((
            ForkCause::TemplateDrift,
            "the reasoning of call 0 is not rendered again"
        ))
    );
    assert_eq!(tree.places[1].previous, Some(0));
}

#[test]
fn a_reply_that_encodes_differently_is_parse_drift() {
    let reply = calls_tool("bash", "ls");
    let mut talk = Talk::new();
    talk.send(conversation(&[]), reply.clone());
    // The policy wrote a blank that parsing forgets.
    let generation = talk.last().generation.as_mut().unwrap();
    generation.token_ids = [vec![32], said(&reply), vec![END]].concat();
    let length = generation.token_ids.len();
    generation.logprobs_model = vec![-1.0; length];
    generation.logprobs_sampled = vec![-1.0; length];
    talk.send(conversation(&[reply, tool_result("a")]), assistant("Done."));
    let tree = Tree::build(&talk.calls).unwrap();
    assert_eq!(
        cause(&tree),
        Some((
            ForkCause::ParseDrift,
            "the reply of call 0 encodes to other tokens"
        ))
    );
}

#[test]
fn a_history_rendered_differently_is_template_drift() {
    let reply = calls_tool("bash", "ls");
    let mut talk = Talk::new();
    talk.send(conversation(&[]), reply.clone());
    talk.send(conversation(&[reply, tool_result("a")]), assistant("Done."));
    talk.last().prompt_ids[4] += 500;
    let tree = Tree::build(&talk.calls).unwrap();
    assert_eq!(
        cause(&tree).map(|(cause, _)| cause),
        Some(ForkCause::TemplateDrift)
    );
}

#[test]
fn a_rewritten_reply_is_edited_history() {
    let (tree, _) = second(
        assistant("I will look."),
        conversation(&[assistant("I looked."), user("And?")]),
    );
    assert_eq!(
        cause(&tree),
        Some((
            ForkCause::HistoryEdited,
            "the reply of call 0 came back changed"
        ))
    );
    assert_eq!(tree.places[1].previous, Some(0));
}

/// As a client does whose connection broke: an order to go on stands where the reply should.
#[test]
fn a_history_that_goes_on_without_the_reply_is_edited() {
    let order = user("Continue from the transcript.");
    let (tree, _) = second(calls_tool("bash", "ls"), conversation(&[order]));
    assert_eq!(
        cause(&tree),
        Some((
            ForkCause::HistoryEdited,
            "the history of call 0 goes on without its reply"
        ))
    );
}

#[test]
fn without_evidence_the_cause_is_unknown() {
    let calls = [
        call(0, &[1, 2, 3], Some(&[4])),
        call(1, &[1, 2, 5], Some(&[4])),
    ];
    let tree = Tree::build(&calls).unwrap();
    assert_eq!(tree.forks[0].cause, ForkCause::Unknown);
    assert_eq!(
        (tree.forks[0].tokens_shared, tree.forks[0].tokens_again),
        (2, 1)
    );
}

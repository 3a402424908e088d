//! Simulated harnesses: rollouts with retries, rollbacks, drift, compactions, sub-agents, side calls
//! and interleaving, each a pure function of its seed; and the properties that hold for all.

use std::collections::{BTreeMap, BTreeSet};

use rand::{Rng, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use record::{Call, Message};

use super::{
    Talk, assistant, attempt, calls_tool, logprob, said, system, tool_result, user, with_tools,
};
use crate::{
    Builder, CallClass, DropReason, ForkCause, Kept, Row, SELECTION_NAMES, Selection, Target,
    TrainTree, Tree, TreeLimits, linearise, select,
};

const MAIN_TOOLS: [&str; 5] = ["bash", "read", "write", "edit", "task"];
const SUB_TOOLS: [&str; 4] = ["bash", "read", "write", "edit"];
const TURNS_MAX: u32 = 14;

/// One conversation of the harness.
struct Thread {
    messages: Vec<Message>,
    tools: &'static [&'static str],
    class: CallClass,
    /// Calls of the segment whose replies it holds.
    said: Vec<u32>,
}

/// A rollout and what is true of it.
pub(crate) struct World {
    pub(crate) calls: Vec<Call>,
    /// Class of each call, by number.
    classes: Vec<CallClass>,
    /// Calls whose replies the harness went on with, or that were its last words.
    alive: BTreeSet<u32>,
    /// Calls that start a segment of the main conversation.
    openers: BTreeSet<u32>,
    /// Calls whose prompt continues a history token by token.
    exact: BTreeMap<u32, u32>,
    retries: BTreeSet<u32>,
}

struct Maker {
    random: ChaCha8Rng,
    talk: Talk,
    world: World,
    /// Texts are numbered, so that none says by accident what another did.
    texts: u32,
}

impl Maker {
    fn text(&mut self, what: &str) -> String {
        self.texts += 1;
        let words = ["red", "green", "blue", "tall", "small", "old", "new"];
        let more: Vec<&str> = (0..self.random.random_range(0..4))
            .map(|_| words[self.random.random_range(0..words.len())])
            .collect();
        format!(
            "{what} number {} of this rollout {}",
            self.texts,
            more.join(" ")
        )
    }

    /// Sends what the thread holds. `delivered`: whether the harness got the reply.
    fn send(&mut self, thread: &Thread, reply: Message, delivered: bool) -> u32 {
        let conversation = with_tools(thread.tools, thread.messages.clone());
        let index = self.talk.send(conversation, reply);
        let call = self.talk.last();
        call.attempts = vec![attempt(delivered)];
        self.world.classes.push(thread.class);
        if self.random.random_bool(0.05) {
            // An engine that tells no log-probabilities.
            let generation = self.talk.last().generation.as_mut().unwrap();
            generation.logprobs_model.clear();
            generation.logprobs_sampled.clear();
        }
        index
    }

    /// A turn of a thread, with what may go wrong; the reply that counts is appended. Returns it.
    fn turn(&mut self, thread: &mut Thread, mut reply: Message) -> u32 {
        let thinks = self.random.random_bool(0.15);
        if thinks {
            // Not rendered again: the next prompt leaves this call at its output.
            reply.reasoning = Some(self.text("thought"));
        }
        while self.random.random_bool(0.12) {
            // The reply is lost on the way, or thrown away; the same request comes again.
            // Nothing but its length may show that a reply which arrived was the last one's rival.
            let delivered = self.random.random();
            let lost = match delivered {
                true => assistant(&format!("x{}", self.texts)),
                false => calls_tool("bash", &self.text("lost")),
            };
            let index = self.send(thread, lost, delivered);
            self.world.retries.insert(index);
        }
        let index = self.send(thread, reply.clone(), true);
        self.world.alive.insert(index);
        if let Some(&before) = thread.said.last()
            && let Some(reply) = &self.talk.calls[before as usize].reply
            && reply.reasoning.is_none()
        {
            self.world.exact.insert(index, before);
        }
        thread.said.push(index);
        reply.reasoning = None;
        thread.messages.push(reply);
        index
    }

    /// A sub-agent of a few turns; its calls come between those of `main`.
    fn subagent(&mut self, task: &str) -> Thread {
        let mut thread = Thread {
            messages: vec![system("You help."), user(task)],
            tools: &SUB_TOOLS,
            class: CallClass::Subagent,
            said: Vec::new(),
        };
        for _ in 0..self.random.random_range(0..3) {
            let command = self.text("command");
            self.turn(&mut thread, calls_tool("bash", &command));
            let output = self.text("output");
            thread.messages.push(tool_result(&output));
        }
        let report = self.text("report");
        self.turn(&mut thread, assistant(&report));
        thread
    }

    /// A summary is asked for, and the history is replaced. Three habits of harnesses.
    fn compact(&mut self, main: &mut Thread) {
        let summary = self.text("summary of all that was done so far");
        let opening = main.messages[..2].to_vec();
        let habit = self.random.random_range(0..3);
        let mut ask = Thread {
            messages: main.messages.clone(),
            tools: main.tools,
            class: CallClass::Compaction,
            said: Vec::new(),
        };
        if habit == 0 {
            ask.messages = vec![system("You summarise."), user("user: Rename the files.")];
            ask.tools = &[];
        } else {
            ask.messages.push(user("Summarise what you did."));
        }
        let index = self.send(&ask, assistant(&summary), true);
        self.world.alive.insert(index);
        let resumed = self.text("Earlier work, in short:");
        main.messages = match habit {
            // The first message stays; the rest becomes a summary.
            2 => [opening, vec![user(&format!("{resumed} {summary}"))]].concat(),
            _ => vec![
                opening[0].clone(),
                user(&format!("{resumed} {summary} Go on.")),
            ],
        };
        main.said.clear();
        self.world.openers.insert(self.talk.calls.len() as u32);
    }
}

/// The rollout of a seed.
pub(crate) fn world(seed: u64) -> World {
    let mut maker = Maker {
        random: ChaCha8Rng::seed_from_u64(seed),
        talk: Talk::with_chunk(8),
        world: World {
            calls: Vec::new(),
            classes: Vec::new(),
            alive: BTreeSet::new(),
            openers: BTreeSet::new(),
            exact: BTreeMap::new(),
            retries: BTreeSet::new(),
        },
        texts: 0,
    };
    let task = maker.text("Rename the files of folder");
    let mut main = Thread {
        messages: vec![system("You work in a workspace."), user(&task)],
        tools: &MAIN_TOOLS,
        class: CallClass::Main,
        said: Vec::new(),
    };
    if maker.random.random_bool(0.3) {
        let title = maker.text("title");
        let side = Thread {
            messages: vec![system("Make a title."), user(&task)],
            tools: &[],
            class: CallClass::Side,
            said: Vec::new(),
        };
        let index = maker.send(&side, assistant(&title), true);
        maker.world.alive.insert(index);
    }
    let turns = maker.random.random_range(1..TURNS_MAX);
    for turn in 0..turns {
        if turn + 1 == turns {
            let done = maker.text("done");
            maker.turn(&mut main, assistant(&done));
        } else if maker.random.random_bool(0.12) {
            let task = maker.text("Look for every place where the old name is used");
            let mut spawn = calls_tool("task", &task);
            let second = maker
                .random
                .random_bool(0.4)
                .then(|| maker.text("And write a test"));
            if let Some(second) = &second {
                spawn
                    .tool_calls
                    .extend(calls_tool("task", second).tool_calls);
            }
            maker.turn(&mut main, spawn);
            for task in [Some(task), second].into_iter().flatten() {
                maker.subagent(&task);
                let report = maker.text("sub-agent says");
                main.messages.push(tool_result(&report));
            }
        } else {
            let command = maker.text("command");
            maker.turn(&mut main, calls_tool("bash", &command));
            let output = maker.text("output");
            main.messages.push(tool_result(&output));
        }
        if turn > 1 && turn + 1 < turns && maker.random.random_bool(0.1) {
            maker.compact(&mut main);
        }
    }
    let mut world = maker.world;
    // Numbers tell the order; what the ledger hands over may come in any.
    let mut calls = maker.talk.calls;
    calls.shuffle(&mut maker.random);
    world.calls = calls;
    world
}

/// A hash of a prefix, from the hash of the prefix before its last token.
fn prefix(before: u64, token: u32) -> u64 {
    (before ^ u64::from(token))
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .rotate_left(29)
        .wrapping_add(0x2545_f491_4f6c_dd1d)
}

/// What brute force says: who generated the last token of each distinct prefix.
struct Truth {
    makers: BTreeMap<u64, Vec<(u32, usize)>>,
}

impl Truth {
    fn of(calls: &[Call]) -> Self {
        let mut made: Vec<(u64, Option<(u32, usize)>)> = Vec::new();
        for call in calls {
            let output = crate::builder::output_of(call);
            let mut hash = 0;
            for (at, &token) in call.prompt_ids.iter().chain(output).enumerate() {
                hash = prefix(hash, token);
                let offset = at.checked_sub(call.prompt_ids.len());
                made.push((hash, offset.map(|offset| (call.id.index, offset))));
            }
        }
        made.sort_unstable();
        let mut makers: BTreeMap<u64, Vec<(u32, usize)>> = BTreeMap::new();
        for (hash, maker) in made {
            makers.entry(hash).or_default().extend(maker);
        }
        Self { makers }
    }

    /// Exactly the tokens that a kept call generated are trained, each once, with the numbers of
    /// the earliest delivered call that generated it; what is not kept is in the price list.
    fn check(&self, calls: &[Call], tree: &Tree, kept: &Kept, seed: u64) {
        let mut expected: BTreeMap<u64, Target> = BTreeMap::new();
        for (&hash, makers) in &self.makers {
            if !makers
                .iter()
                .any(|(call, _)| kept.calls.binary_search(call).is_ok())
            {
                continue;
            }
            let owner = makers
                .iter()
                .min_by_key(|(call, _)| (!calls[*call as usize].delivered(), *call));
            let (call, offset) = *owner.unwrap();
            if calls[call as usize]
                .generation
                .as_ref()
                .unwrap()
                .trainable()
            {
                expected.insert(hash, super::algebra::sampled(call, offset));
            }
        }
        let packed = kept.train_tree(tree).unwrap();
        let found = spelled(&packed);
        assert_eq!(packed.terms(), expected.len(), "seed {seed}");
        assert_eq!(kept.tokens_trained, expected.len(), "seed {seed}");
        assert!(found == expected, "seed {seed}: other tokens are trained");
        let lost: usize = kept.dropped.iter().map(|drop| drop.tokens_trainable).sum();
        let trainable: usize = tree.nodes.iter().map(|node| node.tokens_trainable()).sum();
        assert_eq!(kept.tokens_trained + lost, trainable, "seed {seed}");
    }
}

/// The targets of a packed tree, by the hash of the prefix that each ends.
fn spelled(tree: &TrainTree) -> BTreeMap<u64, Target> {
    let mut ends: Vec<u64> = Vec::new();
    let mut all = Vec::new();
    for node in tree.nodes() {
        let mut hash = node.parent.map_or(0, |parent| ends[parent]);
        for (&token, target) in node.tokens.iter().zip(&node.targets) {
            hash = prefix(hash, token);
            all.extend(target.map(|target| (hash, target)));
        }
        ends.push(hash);
    }
    let count = all.len();
    let map: BTreeMap<u64, Target> = all.into_iter().collect();
    assert_eq!(map.len(), count, "a token is trained twice");
    map
}

/// The same of rows.
fn spelled_by_rows(rows: &[Row]) -> BTreeMap<u64, Target> {
    let mut all = BTreeMap::new();
    for row in rows {
        let mut hash = 0;
        for (at, &token) in row.tokens.iter().enumerate() {
            hash = prefix(hash, token);
            let target = at
                .checked_sub(row.prompt_tokens)
                .and_then(|at| row.targets[at]);
            if let Some(target) = target {
                assert!(
                    all.insert(hash, target).is_none(),
                    "a token is trained in two rows"
                );
            }
        }
    }
    all
}

/// Everything that must hold for a rollout, whatever happened in it.
pub(crate) fn check(seed: u64) {
    let world = world(seed);
    let tree = Tree::build(&world.calls).unwrap();
    // I1.
    tree.check(&world.calls).unwrap();
    let mut sorted = world.calls.clone();
    sorted.sort_by_key(|call| call.id.index);
    incremental(&sorted, &tree, seed);
    classes_and_segments(&world, &tree, seed);
    continuations(&world, &tree, seed);
    let truth = Truth::of(&sorted);
    assert_eq!(
        tree.stats().tokens_unique,
        truth.makers.len(),
        "seed {seed}"
    );
    // I3, I4, and the price list, for all policies.
    for name in SELECTION_NAMES {
        let selection = Selection::named(name, 1000).unwrap();
        let kept = select(&tree, &selection);
        truth.check(&sorted, &tree, &kept, seed);
        rows(&tree, &kept, seed);
    }
    alive(&world, &tree, seed);
}

/// Call by call in the order of arrival gives the same tree as all at once in any order, and
/// so does looking at it in between.
fn incremental(sorted: &[Call], tree: &Tree, seed: u64) {
    let mut builder = Builder::new(TreeLimits::default());
    for (at, call) in sorted.iter().enumerate() {
        builder.add(call).unwrap();
        if at == sorted.len() / 2 {
            assert_eq!(
                builder.snapshot().unwrap(),
                Tree::build(&sorted[..=at]).unwrap(),
                "seed {seed}"
            );
        }
    }
    assert_eq!(&builder.finish().unwrap(), tree, "seed {seed}");
}

fn classes_and_segments(world: &World, tree: &Tree, seed: u64) {
    let found: Vec<CallClass> = tree.places.iter().map(|place| place.class).collect();
    assert_eq!(found, world.classes, "seed {seed}: classes");
    let opens: BTreeSet<u32> = tree
        .places
        .iter()
        .filter(|place| place.opens.is_some())
        .map(|place| place.call)
        .collect();
    let mut segment = 0;
    let mut expected = BTreeSet::new();
    for place in &tree.places {
        // The opener is the first main call after the compaction.
        if world.openers.contains(&place.call) {
            segment += 1;
            expected.insert(place.call);
        }
        if place.class == CallClass::Main {
            assert_eq!(place.segment, segment, "seed {seed}: call {}", place.call);
        }
        if place.class == CallClass::Subagent {
            assert!(
                place.spawned_by.is_some(),
                "seed {seed}: call {}",
                place.call
            );
        }
    }
    assert_eq!(opens, expected, "seed {seed}: openers");
}

/// I2: an exact continuation extends the call before and is no fork but where a retry stands
/// beside it; every divergence has a cause.
fn continuations(world: &World, tree: &Tree, seed: u64) {
    for (&call, &before) in &world.exact {
        let place = tree.place(call).unwrap();
        assert_eq!(place.extends, Some(before), "seed {seed}: call {call}");
        assert_eq!(place.previous, Some(before), "seed {seed}: call {call}");
    }
    for fork in &tree.forks {
        assert_ne!(fork.cause, ForkCause::Unknown, "seed {seed}: {fork:?}");
        assert!(!fork.evidence.is_empty(), "seed {seed}: {fork:?}");
        assert!(fork.against < fork.call, "seed {seed}: {fork:?}");
    }
    for retry in &world.retries {
        let place = tree.place(*retry).unwrap();
        let like = tree
            .places
            .iter()
            .filter(|other| other.prompt_node == place.prompt_node && other.call < *retry)
            .count();
        let fork = tree.forks.iter().find(|fork| fork.call == *retry);
        if like > 0 {
            assert_eq!(
                fork.unwrap().cause,
                ForkCause::Retry,
                "seed {seed}: call {retry}"
            );
        }
    }
}

/// `clawgym2` keeps exactly the main calls that the harness went on with, `+aux` those of the
/// other classes too.
fn alive(world: &World, tree: &Tree, seed: u64) {
    for (name, classes) in [
        ("clawgym2", &[CallClass::Main][..]),
        (
            "clawgym2+aux",
            &[CallClass::Main, CallClass::Subagent, CallClass::Compaction],
        ),
    ] {
        let kept = select(tree, &Selection::named(name, 1000).unwrap());
        let expected: Vec<u32> = world
            .alive
            .iter()
            .copied()
            .filter(|&call| classes.contains(&world.classes[call as usize]))
            .collect();
        assert_eq!(kept.calls, expected, "seed {seed}: {name}");
        for dropped in &kept.dropped {
            let auxiliary =
                matches!(dropped.reason, DropReason::Auxiliary(class) if !classes.contains(&class));
            assert!(
                auxiliary || dropped.reason == DropReason::DeadLeaf,
                "seed {seed}: {dropped:?}"
            );
        }
    }
}

/// The rows train what the tree trains: the same tokens under the same prefixes, each once.
fn rows(tree: &Tree, kept: &Kept, seed: u64) {
    let packed = kept.train_tree(tree).unwrap();
    let rows = linearise(tree, kept, None).unwrap();
    assert!(rows.cut.is_empty());
    assert_eq!(rows.terms(), packed.terms(), "seed {seed}");
    for row in &rows.rows {
        assert!(row.prompt_tokens > 0 && row.terms() > 0);
        assert_eq!(row.tokens.len(), row.prompt_tokens + row.targets.len());
    }
    let of_tree = spelled(&packed);
    assert!(spelled_by_rows(&rows.rows) == of_tree, "seed {seed}");
    // As few as cover it: one per leaf of the packed tree.
    let parents: BTreeSet<usize> = packed
        .nodes()
        .iter()
        .filter_map(|node| node.parent)
        .collect();
    assert_eq!(
        rows.rows.len(),
        packed.nodes().len() - parents.len(),
        "seed {seed}"
    );

    // Cut to half the longest: only whole turns go, and they are counted.
    let longest = rows
        .rows
        .iter()
        .map(|row| row.tokens.len())
        .max()
        .unwrap_or(0);
    let cut = linearise(tree, kept, Some(longest / 2)).unwrap();
    assert_eq!(
        cut.terms() + cut.tokens_cut(),
        packed.terms(),
        "seed {seed}"
    );
    assert!(
        cut.rows.iter().all(|row| row.tokens.len() <= longest / 2),
        "seed {seed}"
    );
    for (hash, target) in spelled_by_rows(&cut.rows) {
        assert_eq!(of_tree.get(&hash), Some(&target), "seed {seed}");
    }
}

fn check_many(count: u64) {
    let seed: u64 = std::env::var("SEED").map_or(0, |text| text.parse().unwrap());
    println!("SEED={seed}");
    (0..count).for_each(|at| check(seed.wrapping_mul(1_000_000_007).wrapping_add(at)));
}

#[test]
fn contracts_hold_for_2000_rollouts() {
    check_many(2000);
}

#[test]
#[ignore = "long"]
fn contracts_hold_for_100000_rollouts() {
    check_many(100_000);
}

#[test]
fn the_worlds_are_worth_it() {
    // What the generator never makes is not tested by it.
    let worlds: Vec<World> = (0..300).map(world).collect();
    let count = |holds: &dyn Fn(&World) -> bool| worlds.iter().filter(|world| holds(world)).count();
    let with = |class: CallClass| count(&|world: &World| world.classes.contains(&class));
    assert!(with(CallClass::Subagent) > 60);
    assert!(with(CallClass::Compaction) > 30);
    assert!(with(CallClass::Side) > 60);
    assert!(count(&|world| !world.retries.is_empty()) > 100);
    assert!(count(&|world| world.exact.len() < world.calls.len() - 1) > 100);
    assert!(said(&assistant("x")).len() == 1 && logprob(1, 0) == -1.0);
}

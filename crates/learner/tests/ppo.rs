//! PPO against what it must reduce to, its critic's warm-up and failures, and whether it learns.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

mod support;

use learner::{
    Embedded, LearnError,
    grpo::{Beside, GrpoSettings, ScoredTree},
    ppo::{self, Critic, RewardedTree},
    settings::PpoSettings,
};
use model::{
    Weights,
    adamw::{AdamW, AdamWSettings},
    device::Device,
    forest::{self, Segment, ValueHead},
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use support::{tiny, weights};
use tree::{Target, TrainTree};

const COMPUTE: forest::Settings = forest::Settings {
    threads: 1,
    block_tokens_max: 512,
    temperature: 1.0,
    recompute: false,
    device: Device::CPU,
};

/// Log-probability of every token after `prompt`.
fn next(weights: &Weights, prompt: &[u32]) -> Vec<f32> {
    let tokens: Vec<u32> = (0..weights.config.vocab_size as u32).collect();
    let mut segments = vec![Segment {
        parent: None,
        tokens: prompt,
        targets: &[],
    }];
    segments.extend(tokens.chunks(1).map(|token| Segment {
        parent: Some(0),
        tokens: token,
        targets: &[0],
    }));
    let found = forest::run(weights, &segments, None, COMPUTE).unwrap();
    found.logprobs[1..].iter().map(|list| list[0]).collect()
}

/// A rollout: a prompt, a reply of one token, and two branches below it of one and two tokens.
fn forked(weights: &Weights, prompt: &[u32], replies: [u32; 4]) -> TrainTree {
    let target = |before: &[u32], token: u32| {
        let logprob = next(weights, before)[token as usize];
        Some(Target::Sampled {
            logprob_model: logprob,
            logprob_sampled: logprob,
            version: 0,
        })
    };
    let [first, left, right, last] = replies;
    let mut tree = TrainTree::new();
    let mut tokens = prompt.to_vec();
    let mut targets = vec![None; prompt.len()];
    targets.push(target(&tokens, first));
    tokens.push(first);
    let root = tree.push(None, tokens.clone(), targets).unwrap();
    let own = vec![target(&tokens, left)];
    let _ = tree.push(Some(root), vec![left], own).unwrap();
    let after = [tokens.as_slice(), &[right]].concat();
    let own = vec![target(&tokens, right), target(&after, last)];
    let _ = tree.push(Some(root), vec![right, last], own).unwrap();
    tree
}

fn batch(weights: &Weights) -> Vec<RewardedTree> {
    let of = |prompt: &[u32], replies, reward| RewardedTree {
        tree: forked(weights, prompt, replies),
        reward,
    };
    vec![
        of(&[1, 2, 3], [5, 6, 7, 8], 1.0),
        of(&[1, 2, 3], [9, 6, 4, 8], 0.0),
        of(&[1, 4], [5, 20, 21, 22], 0.25),
    ]
}

/// Gradient of the policy, and the critic after its step.
fn one_update(
    weights: &Weights,
    mut critic: Critic,
    batch: &[RewardedTree],
    ppo: &PpoSettings,
) -> (Vec<f32>, Critic) {
    let mut found = Vec::new();
    ppo::update(
        &mut weights.clone(),
        &mut critic,
        batch,
        &GrpoSettings::default(),
        ppo,
        COMPUTE,
        Beside::default(),
        1e-2,
        |_, gradient| {
            found = gradient.to_vec();
            Ok(0.0)
        },
    )
    .unwrap();
    (found, critic)
}

fn assert_close(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    let scale = b.iter().fold(1e-4_f32, |m, v| m.max(v.abs()));
    for (at, (x, y)) in a.iter().zip(b).enumerate() {
        assert!((x - y).abs() <= 1e-5 * scale, "{what} {at}: {x} and {y}");
    }
}

fn critic(policy: &Weights, separate: bool) -> Critic {
    let adam = AdamWSettings::default();
    if separate {
        Critic::separate(policy, adam)
    } else {
        Critic::shared(policy, adam)
    }
}

/// A head of zeros predicts nothing and sends nothing into the trunk: advantages are the whitened
/// rewards, so the first step is that of GRPO with those.
#[test]
fn the_first_step_with_a_fresh_head_is_that_of_whitened_rewards() {
    let weights = weights(3);
    let batch = batch(&weights);
    let critic = Critic::shared(&weights, AdamWSettings::default());
    assert!(critic.head.data.iter().all(|value| *value == 0.0));
    let (found, _) = one_update(&weights, critic, &batch, &PpoSettings::default());
    // Whitened over terms, one vote each: every rollout here has four.
    let rewards: Vec<f64> = batch.iter().map(|rewarded| rewarded.reward).collect();
    let mean = rewards.iter().sum::<f64>() / 3.0;
    let squares: f64 = rewards.iter().map(|reward| (reward - mean).powi(2)).sum();
    let deviation = (squares * 4.0 / 11.0 + 1e-8).sqrt();
    let trees: Vec<ScoredTree> = batch
        .iter()
        .map(|rewarded| ScoredTree {
            tree: rewarded.tree.clone(),
            advantage: (rewarded.reward - mean) / deviation,
        })
        .collect();
    let mut wanted = Vec::new();
    learner::grpo::update(
        &mut weights.clone(),
        &trees,
        &GrpoSettings::default(),
        COMPUTE,
        Beside::default(),
        |_, gradient| {
            wanted = gradient.to_vec();
            Ok(0.0)
        },
    )
    .unwrap();
    assert_close(&found, &wanted, "gradient");
}

fn some_head() -> ValueHead {
    let mut head = ValueHead::zeros(16);
    for (at, value) in head.data.iter_mut().enumerate() {
        *value = 0.05 * ((at % 5) as f32 - 2.0);
    }
    head
}

/// What the value loss sends into a shared trunk is exactly what a trunk of its own is trained
/// with, and then the policy gets none of it.
#[test]
fn a_separate_critic_gets_the_part_of_the_value_loss() {
    let weights = weights(3);
    let batch = batch(&weights);
    let adam = AdamWSettings {
        epsilon: 1e-3,
        ..AdamWSettings::default()
    };
    let ppo = PpoSettings {
        gamma: 0.97,
        lambda: 0.9,
        rate_factor: 3.0,
        ..PpoSettings::default()
    };
    let shared = || Critic {
        head: some_head(),
        ..Critic::shared(&weights, adam.clone())
    };
    let separate = Critic {
        head: some_head(),
        ..Critic::separate(&weights, adam.clone())
    };
    let (both, shared_after) = one_update(&weights, shared(), &batch, &ppo);
    let without = PpoSettings {
        value_weight: 0.0,
        ..ppo
    };
    let (policy, _) = one_update(&weights, shared(), &batch, &without);
    let (own, after) = one_update(&weights, separate, &batch, &ppo);
    assert_close(&own, &policy, "the policy's part");
    assert!(
        both.iter().zip(&policy).any(|(a, b)| (a - b).abs() > 1e-4),
        "the value loss reaches a shared trunk"
    );
    assert_close(&after.head.data, &shared_after.head.data, "value head");
    let value: Vec<f32> = both.iter().zip(&policy).map(|(a, b)| a - b).collect();
    let (mut trunk, mut optimiser) = (weights.clone(), AdamW::new(adam, weights.len()));
    optimiser.step(&mut trunk, &value, 1e-2 * ppo.rate_factor);
    let moved = |data: &[f32]| -> Vec<f32> {
        let pairs = data.iter().zip(&weights.data);
        pairs.map(|(after, before)| after - before).collect()
    };
    let (trained, _) = after.trunk.unwrap();
    let (found, wanted) = (moved(&trained.data), moved(&trunk.data));
    let scale = wanted.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
    for (at, (x, y)) in found.iter().zip(&wanted).enumerate() {
        // The difference of two gradients has lost some digits.
        assert!(
            (x - y).abs() <= 1e-3 * scale,
            "parameter {at} moved {x}, expected {y}"
        );
    }
}

/// The clip holds a prediction that ran away within one update, until the next.
#[test]
fn the_value_clip_bounds_what_one_update_may_learn() {
    let weights = weights(3);
    let batch = batch(&weights);
    // Without momentum: a term that the clip holds does not move the head any further.
    let adam = AdamWSettings {
        beta1: 0.0,
        ..AdamWSettings::default()
    };
    let learned = |clip: f64| {
        let mut critic = Critic::shared(&weights, adam.clone());
        let settings = GrpoSettings {
            passes: 100,
            ..GrpoSettings::default()
        };
        // The warm-up trains the head alone, so the hidden states stay as they are.
        let ppo = PpoSettings {
            value_clip: clip,
            warmup_updates: 1,
            ..PpoSettings::default()
        };
        let metrics = ppo::update(
            &mut weights.clone(),
            &mut critic,
            &batch,
            &settings,
            &ppo,
            COMPUTE,
            Beside::default(),
            1e-4,
            |_, _| panic!("the policy is not trained in the warm-up"),
        )
        .unwrap();
        // A state that only the rollout with reward 1 has seen.
        let segments = [Segment {
            parent: None,
            tokens: &[1, 2, 3, 5, 6],
            targets: &[4],
        }];
        let ask = forest::Ask {
            loss: None,
            values: Some(&critic.head),
            policy: false,
        };
        let found = forest::answer(&weights, &segments, &ask, COMPUTE).unwrap();
        (found.values[0][0], metrics.value_loss)
    };
    let (free, free_loss) = learned(10.0);
    let (held, held_loss) = learned(0.05);
    assert!(free > 0.3, "free: {free}");
    // Beyond the clip by at most a step.
    assert!(held > 0.0 && held < 0.1, "held: {held}");
    assert!(free_loss < held_loss, "{free_loss} and {held_loss}");
}

#[test]
fn a_warm_up_goes_on_where_the_checkpoint_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let start = weights(3);
    let batch = batch(&start);
    let ppo = PpoSettings {
        warmup_updates: 3,
        ..PpoSettings::default()
    };
    for separate in [false, true] {
        let make = |policy: &Weights| critic(policy, separate);
        let mut learner =
            Embedded::new(start.clone(), AdamWSettings::default(), COMPUTE).with_critic(make);
        let settings = GrpoSettings::default();
        learner.update_ppo(&batch, &settings, &ppo, 1e-3).unwrap();
        let place = folder.path().join(format!("{separate}"));
        learner.save(&place, 1, &[]).unwrap();
        let (mut resumed, _) = Embedded::resume(&place, COMPUTE).unwrap();
        assert_eq!(resumed.critic().unwrap().updates, 1);
        for version in [0, 0, 1] {
            resumed.update_ppo(&batch, &settings, &ppo, 1e-3).unwrap();
            assert_eq!(resumed.version(), version);
            assert_eq!(resumed.weights().data == start.data, version == 0);
        }
    }
}

/// An update that stops half-way, or meets a number that is none, moves nothing: policy, critic
/// and both optimisers go on to the same bits as if it had not been tried.
#[test]
fn a_failed_update_moves_neither_policy_nor_critic() {
    let start = weights(3);
    let good = batch(&start);
    let ppo = PpoSettings::default();
    let settings = GrpoSettings::default();
    let several = GrpoSettings {
        passes: 2,
        ..GrpoSettings::default()
    };
    let mut broken = good.clone();
    broken[1].reward = f64::NAN;
    for separate in [false, true] {
        let make = |policy: &Weights| critic(policy, separate);
        let fresh =
            || Embedded::new(start.clone(), AdamWSettings::default(), COMPUTE).with_critic(make);
        let (mut tried, mut plain) = (fresh(), fresh());
        let error = tried.update_ppo(&broken, &settings, &ppo, 1e-3);
        assert!(
            matches!(error, Err(LearnError::Sample { rollout: 1, .. })),
            "{error:?}"
        );
        // Its first step throws the weights so far that the second pass finds no number.
        let error = tried.update_ppo(&good, &several, &ppo, f32::MAX);
        assert!(error.is_err(), "{error:?}");
        for learner in [&mut tried, &mut plain] {
            learner.update_ppo(&good, &settings, &ppo, 1e-3).unwrap();
        }
        assert_eq!(tried.weights().data, plain.weights().data);
        let critics = [tried.critic().unwrap(), plain.critic().unwrap()];
        assert_eq!(critics[0].head, critics[1].head);
        assert_eq!(critics[0].updates, critics[1].updates);
        assert_eq!(critics[0].optimiser.mean, critics[1].optimiser.mean);
        let trunk = |critic: &Critic| critic.trunk.as_ref().map(|(w, _)| w.data.clone());
        assert_eq!(trunk(critics[0]), trunk(critics[1]));
    }
}

fn draw(logprobs: &[f32], rng: &mut ChaCha8Rng) -> u32 {
    let mut rest: f32 = rng.random();
    for (token, logprob) in (0_u32..).zip(logprobs) {
        rest -= logprob.exp();
        if rest <= 0.0 {
            return token;
        }
    }
    logprobs.len() as u32 - 1
}

/// On policy, two prompts that reward different replies: each of two tokens must be of the
/// prompt's third of the vocabulary. Returns the mean reward of the first and of the last updates,
/// and how far the value of the prompts is from the reward at the end.
fn learn(separate: bool, seed: u64) -> (f64, f64, f64) {
    const PROMPTS: [[u32; 3]; 2] = [[1, 2, 3], [1, 7, 4]];
    const UPDATES: usize = 80;
    let start = Weights::random(tiny(), seed);
    let mut learner = Embedded::new(start, AdamWSettings::default(), COMPUTE)
        .with_critic(|policy| critic(policy, separate));
    let ppo = PpoSettings {
        warmup_updates: 3,
        rate_factor: 3.0,
        ..PpoSettings::default()
    };
    let settings = GrpoSettings {
        minibatches: 2,
        ..GrpoSettings::default()
    };
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut means = Vec::new();
    for _ in 0..UPDATES {
        let weights = learner.weights();
        let mut batch = Vec::new();
        for (kind, prompt) in PROMPTS.iter().enumerate() {
            let first = next(&weights, prompt);
            for _ in 0..24 {
                let mut tokens = prompt.to_vec();
                let mut targets = vec![None; prompt.len()];
                let mut reward = 1.0;
                for at in 0..2 {
                    let logprobs = if at == 0 {
                        first.clone()
                    } else {
                        next(&weights, &tokens)
                    };
                    let token = draw(&logprobs, &mut rng);
                    if token as usize % 3 != kind {
                        reward = 0.0;
                    }
                    let logprob = logprobs[token as usize];
                    targets.push(Some(Target::Sampled {
                        logprob_model: logprob,
                        logprob_sampled: logprob,
                        version: learner.version(),
                    }));
                    tokens.push(token);
                }
                let mut tree = TrainTree::new();
                let _ = tree.push(None, tokens, targets).unwrap();
                batch.push(RewardedTree { tree, reward });
            }
        }
        means.push(batch.iter().map(|rewarded| rewarded.reward).sum::<f64>() / batch.len() as f64);
        learner.update_ppo(&batch, &settings, &ppo, 3e-3).unwrap();
    }
    let critic = learner.critic().unwrap();
    let policy = learner.weights();
    let trunk = critic.trunk.as_ref().map_or(&*policy, |(trunk, _)| trunk);
    let mean = |list: &[f64]| list.iter().sum::<f64>() / list.len() as f64;
    let last = mean(&means[UPDATES - 8..]);
    let values = PROMPTS.iter().map(|prompt| {
        let tokens = [prompt.as_slice(), &[0]].concat();
        let segments = [Segment {
            parent: None,
            tokens: &tokens,
            targets: &[3],
        }];
        let ask = forest::Ask {
            loss: None,
            values: Some(&critic.head),
            policy: false,
        };
        let found = forest::answer(trunk, &segments, &ask, COMPUTE).unwrap();
        (f64::from(found.values[0][0]) - last).abs()
    });
    (mean(&means[..5]), last, values.fold(0.0, f64::max))
}

#[test]
fn it_learns_with_either_critic() {
    for separate in [false, true] {
        for seed in [1, 2] {
            let (first, last, off) = learn(separate, seed);
            println!(
                "separate {separate}, seed {seed}: {first:.2} then {last:.2}, value off by {off:.2}"
            );
            assert!(
                first < 0.3 && last > 0.9,
                "separate {separate}, seed {seed}: mean reward {first} then {last}"
            );
            assert!(
                off < 0.25,
                "separate {separate}, seed {seed}: the value of a prompt is {off} off"
            );
        }
    }
}

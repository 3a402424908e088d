//! The scripted teacher as an engine: it plays the reference solution of the task that the
//! rollout is about, in the tool grammar of whatever harness asks.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use codec::Codec;
use engine::{
    EngineError, Hint,
    scripted::{Script, Scripted, Voice},
};
use record::{Message, TaskId};
use task::{Step, Task};

use crate::{error::CliError, lab};

/// Context that a teacher's harness is told: enough for any prompt.
pub(crate) const CONTEXT_TOKENS_MAX: u32 = 1 << 17;

/// Plays reference solutions, not always to their ends.
#[derive(Debug)]
pub(crate) struct Teacher {
    solutions: HashMap<TaskId, Vec<Step>>,
    /// Commands that end a run, by harness.
    ends_with: BTreeMap<String, String>,
    /// Part of the rollouts, drawn from their seeds, in which the solution is whole; in the others
    /// the last step is left out.
    share: f64,
}

impl Teacher {
    /// A teacher for these tasks through these harnesses; tasks without a solution are left out.
    pub(crate) fn of(
        tasks: &[Arc<Task>],
        harnesses: &[String],
        share: f64,
    ) -> Result<Self, CliError> {
        let solutions = tasks
            .iter()
            .filter_map(|task| Some((task.id.clone(), task::teacher::reference(task).ok()?)))
            .collect();
        let ends_with = lab::profiles(harnesses)?
            .into_iter()
            .filter_map(|profile| Some((profile.name, profile.habits.ends_with?)))
            .collect();
        Ok(Self {
            solutions,
            ends_with,
            share,
        })
    }
}

/// A number in [0, 1) from a seed (the last mix of `SplitMix64`).
fn draw(seed: u64) -> f64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
}

impl Script for Teacher {
    fn reply(&self, hint: &Hint) -> Result<Message, EngineError> {
        let rollout = hint.rollout.as_ref().ok_or_else(|| {
            EngineError::NoScript("the call does not say which rollout it belongs to".into())
        })?;
        let steps = self.solutions.get(&rollout.task).ok_or_else(|| {
            EngineError::NoScript(format!("task {} has no reference solution", rollout.task))
        })?;
        let mut steps = Cow::Borrowed(steps);
        if draw(rollout.seed) >= self.share
            && let Some(last) = steps.iter().rposition(|step| !matches!(step, Step::Say(_)))
        {
            steps.to_mut().remove(last);
        }
        let ends_with = self.ends_with.get(&rollout.harness).map(String::as_str);
        task::teacher::next_message_ending(&steps, ends_with, &hint.conversation)
            .map_err(|error| EngineError::NoScript(error.to_string()))
    }
}

/// What a scripted policy's messages are in the tokens of this model.
pub(crate) fn voice(codec: &Arc<Codec>) -> Voice {
    let codec = Arc::clone(codec);
    Arc::new(move |message: &Message| {
        let text = codec.speak(message).map_err(|error| error.to_string())?;
        codec.encode(&text).map_err(|error| error.to_string())
    })
}

/// A teacher for these tasks through these harnesses; tasks without a solution are left out.
pub(crate) fn engine(
    tasks: &[Arc<Task>],
    harnesses: &[String],
    codec: &Arc<Codec>,
    context_tokens_max: u32,
) -> Result<Arc<Scripted>, CliError> {
    Ok(Arc::new(Scripted::new(
        "teacher",
        Arc::new(Teacher::of(tasks, harnesses, 1.0)?),
        voice(codec),
        context_tokens_max,
        codec.vocabulary(),
    )))
}

/// Loads one split of a source.
pub(crate) fn load_tasks(source: &str, split: task::Split) -> Result<Vec<Arc<Task>>, CliError> {
    let tasks = task::load(source, split)
        .map_err(|error| CliError::failed(format!("tasks {source}"), error))?;
    if tasks.is_empty() {
        return Err(CliError::plain(
            format!("tasks {source}: there are none"),
            "give a folder of tasks, or `chores`",
        ));
    }
    Ok(tasks.into_iter().map(Arc::new).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_even() {
        let below: usize = (0..10_000).filter(|seed| draw(*seed) < 0.3).count();
        assert!((2_800..3_200).contains(&below), "{below}");
    }
}

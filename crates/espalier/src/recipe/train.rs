//! `[train]` of a recipe: reinforcement learning.

use std::path::PathBuf;

use learner::{
    Schedule,
    grpo::GrpoSettings,
    settings::{KlPlace, PpoSettings},
};
use model::{adamw::AdamWSettings, lora::LoraSettings};
use objective::Scale;
use serde::{Deserialize, Serialize};
use tree::Selection;

use crate::curriculum::{CurriculumSettings, Mix};

/// Reinforcement learning.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TrainSettings {
    /// Steps: batches of rollouts, each followed by an update.
    pub(crate) steps: u64,
    /// Tasks per step.
    pub(crate) tasks_per_step: usize,
    /// Rollouts per task and harness: the size of a group.
    pub(crate) samples: u32,
    /// A step ends when so many groups are complete and have a difference in reward; the rest of
    /// its rollouts is not run. 0 runs all.
    pub(crate) groups_enough: usize,
    /// What is taken from a reward.
    pub(crate) baseline: Baseline,
    /// What the differences to the group's mean reward are divided by.
    pub(crate) scale: Scale,
    /// Advantages get mean 0 and deviation 1 over the trained tokens of the batch. With
    /// `baseline = "none"` that is REINFORCE++, with `"group"` and `scale = "none"` its baseline
    /// form (arXiv 2501.03262).
    pub(crate) whiten: bool,
    /// Advantages below 0 are multiplied by this. 1 is GRPO; smaller values learn more from what
    /// worked than from what failed, which a small policy survives at higher learning rates
    /// (arXiv 2504.11343 and 2506.01347 compare both ends).
    pub(crate) negative_weight: f64,
    /// A checkpoint every so many steps; the last step always writes one.
    pub(crate) checkpoint_every: u64,
    /// So many of the newest checkpoints stay, and the best; 0 keeps all.
    pub(crate) keep_last: usize,
    /// Folder of the reference policy of `grpo.kl`; the policy that training starts from when not
    /// given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reference: Option<PathBuf>,
    /// Steps whose rollouts may run before the learner is through with the step before: 0 waits,
    /// 1 lets rollouts and learner work at the same time.
    pub(crate) ahead: u8,
    /// Generated tokens whose weights are more versions old than this are not trained; without it
    /// all are, and the importance weights say how far they are off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) staleness_max: Option<u64>,
    /// Which branches are trained.
    pub(crate) selection: Selection,
    /// Draw more of the tasks whose groups are mixed; without it all come equally often.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) curriculum: Option<CurriculumSettings>,
    /// With it a step draws pairs of task and harness, so many of each harness as its weight says;
    /// a harness of weight 0 is evaluated, not trained through. Without it every task of a step
    /// goes through every harness.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mix: Option<Mix>,
    /// The loss of the policy.
    pub(crate) grpo: GrpoSettings,
    /// With it advantages come from a learned critic (PPO), without it from the group (GRPO).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ppo: Option<PpoRecipe>,
    /// With it a low-rank adapter is trained, without it all weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) lora: Option<LoraSettings>,
    /// Learning rate.
    pub(crate) rate: Schedule,
    /// The optimiser.
    pub(crate) optimiser: AdamWSettings,
}

impl Default for TrainSettings {
    fn default() -> Self {
        Self {
            steps: 30,
            tasks_per_step: 16,
            samples: 8,
            groups_enough: 0,
            baseline: Baseline::Group,
            scale: Scale::Std,
            whiten: false,
            negative_weight: 1.0,
            checkpoint_every: 5,
            keep_last: 0,
            reference: None,
            ahead: 0,
            staleness_max: None,
            selection: Selection::default(),
            curriculum: None,
            mix: None,
            grpo: GrpoSettings::default(),
            ppo: None,
            lora: None,
            rate: Schedule::default(),
            optimiser: AdamWSettings::default(),
        }
    }
}

/// What is taken from a reward before anything else.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Baseline {
    /// The mean reward of the group (GRPO).
    #[default]
    Group,
    /// The mean of the other rollouts of the group (RLOO).
    LeaveOneOut,
    /// Nothing; `scale` is not applied either. Wants `whiten`.
    None,
}

/// Where the critic's value head sits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CriticPlace {
    /// On the policy's trunk: one pass computes both, and the value loss trains the trunk too.
    #[default]
    Shared,
    /// On a trunk of its own, which starts as a copy of the policy.
    Separate,
}

/// `[train.ppo]`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct PpoRecipe {
    /// Where the value head sits.
    pub(crate) critic: CriticPlace,
    /// Estimates and value loss.
    #[serde(flatten)]
    pub(crate) settings: PpoSettings,
    /// Optimiser of the critic.
    pub(crate) optimiser: AdamWSettings,
}

impl TrainSettings {
    /// The first value that makes no sense: its key, what was expected, what was found.
    pub(crate) fn wrong(
        &self,
        harnesses: &[String],
    ) -> Option<(&'static str, &'static str, String)> {
        if let Some(mix) = &self.mix {
            let unknown = mix.keys().find(|name| !harnesses.contains(name));
            let missing = harnesses.iter().find(|name| !mix.contains_key(*name));
            if let Some(name) = unknown.or(missing) {
                let expected = "a weight for each name that `harnesses` has, and no other";
                return Some(("train.mix", expected, format!("{name:?}")));
            }
            let bad = mix
                .values()
                .find(|weight| !(weight.is_finite() && **weight >= 0.0));
            if let Some(weight) = bad {
                let expected = "weights of 0 (evaluated only) or above";
                return Some(("train.mix", expected, weight.to_string()));
            }
            if mix.values().all(|weight| *weight == 0.0) {
                let expected = "a weight above 0: somebody has to be trained through";
                return Some(("train.mix", expected, "only weights of 0".into()));
            }
        }
        if self.ahead > 1 {
            return Some(("train.ahead", "0 or 1", self.ahead.to_string()));
        }
        if self.samples == 0 || (self.samples == 1 && self.ppo.is_none()) {
            let expected = "at least 2 (a group of one has no baseline), or 1 with [train.ppo]";
            return Some(("train.samples", expected, self.samples.to_string()));
        }
        if self.baseline == Baseline::None && !self.whiten && self.ppo.is_none() {
            let expected = "another one, or whiten = true: rewards alone would only ever encourage";
            return Some(("train.baseline", expected, "\"none\"".into()));
        }
        if self.ppo.is_some() && self.whiten {
            let expected = "false with [train.ppo], which has a `whiten` of its own";
            return Some(("train.whiten", expected, "true".into()));
        }
        if let Some(curriculum) = self.curriculum {
            for (key, value) in [
                ("train.curriculum.floor", curriculum.floor),
                ("train.curriculum.memory", curriculum.memory),
            ] {
                if !(0.0..=1.0).contains(&value) {
                    return Some((key, "a number between 0 and 1", value.to_string()));
                }
            }
        }
        if self.ppo.is_some() && self.negative_weight != 1.0 {
            let expected = "1 with [train.ppo], whose advantages are not those of a group";
            let found = self.negative_weight.to_string();
            return Some(("train.negative_weight", expected, found));
        }
        if let Some(ppo) = &self.ppo {
            for (key, value) in [
                ("train.ppo.gamma", ppo.settings.gamma),
                ("train.ppo.lambda", ppo.settings.lambda),
            ] {
                if !(0.0..=1.0).contains(&value) {
                    return Some((key, "a number between 0 and 1", value.to_string()));
                }
            }
        }
        let kl = &self.grpo.kl;
        if self.reference.is_some() && kl.weight == 0.0 {
            let expected = "none while train.grpo.kl.weight is 0";
            return Some(("train.reference", expected, "a folder".into()));
        }
        if self.grpo.stop.reference_kl.is_some() && kl.weight == 0.0 {
            let expected = "none while train.grpo.kl.weight is 0: no reference is computed";
            let found = "a limit".into();
            return Some(("train.grpo.stop.reference_kl", expected, found));
        }
        if kl.place == KlPlace::Reward && kl.straight_through {
            let expected = "false with place = \"reward\", which has no gradient of its own";
            return Some(("train.grpo.kl.straight_through", expected, "true".into()));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use crate::recipe::Recipe;

    #[test]
    fn values_that_contradict_each_other_are_named() {
        for (train, words) in [
            ("baseline = \"none\"\n", "train.baseline"),
            ("whiten = true\n[train.ppo]\n", "train.whiten"),
            (
                "negative_weight = 0.5\n[train.ppo]\n",
                "train.negative_weight",
            ),
            ("[train.ppo]\ngamma = 1.5\n", "train.ppo.gamma"),
            ("[train.ppo]\ngama = 1.0\n", "gama"),
            ("[train.mix]\npi = 1\n", "train.mix"),
            (
                "[train.mix]\nreact = 0\n",
                "train.mix: expected a weight above 0",
            ),
            (
                "[train.mix]\nreact = -1\n",
                "train.mix: expected weights of 0 (evaluated only) or above",
            ),
            ("reference = \"x\"\n", "train.reference"),
            ("[train.lora]\nrang = 1\n", "rang"),
        ] {
            let text = format!("[policy]\nfolder = \"policy\"\n[train]\n{train}");
            let refused = Recipe::parse(&text, "it").unwrap_err().to_string();
            assert!(refused.contains(words), "{train}: {refused}");
        }
    }

    #[test]
    fn what_is_written_down_is_read_back() {
        let text = "[policy]\nfolder = \"p\"\n[train]\nreference = \"r\"\n[train.ppo]\nlambda = 0.9\n\
                    critic = \"separate\"\n[train.lora]\nrank = 2\n[train.mix]\nreact = 2\n\
                    [train.grpo.kl]\nweight = 0.1\n[train.curriculum]\n[eval]\nevery = 3\n";
        let recipe = Recipe::parse(text, "it").unwrap();
        let again = Recipe::parse(&recipe.to_toml().unwrap(), "run.toml").unwrap();
        assert_eq!(recipe, again);
    }
}

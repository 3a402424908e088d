//! How the final reward of a task is made: of code, of a judged rubric, or of both.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// How the score of the code and the score of the judge become one reward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Mix {
    /// The code's score alone.
    #[default]
    Code,
    /// The judge's score alone; there is no code.
    Judge,
    /// (code · c + judge · j) / (c + j). ClawGym-Bench 0.7 / 0.3, PinchBench 0.5 / 0.5.
    Weighted {
        /// Weight of the code's score.
        code: f64,
        /// Weight of the judge's score.
        judge: f64,
    },
    /// As `Weighted`, but the judge counts only when the code's score reaches `code_min`
    /// (QwenClawBench: 0.75).
    Gated {
        /// Weight of the code's score.
        code: f64,
        /// Weight of the judge's score.
        judge: f64,
        /// The gate.
        code_min: f64,
    },
}

impl Mix {
    /// Whether a judge has to be asked when the code scored `code`.
    #[must_use]
    pub fn needs_judge(&self, code: f64) -> bool {
        match self {
            Self::Code => false,
            Self::Judge => true,
            Self::Weighted { judge, .. } => *judge > 0.0,
            Self::Gated {
                judge, code_min, ..
            } => *judge > 0.0 && code >= *code_min,
        }
    }

    /// The reward, given both scores in [0, 1]. A judge that was not needed counts 0.
    #[must_use]
    pub fn reward(&self, code: f64, judge: f64) -> f64 {
        let weighted = |c: f64, j: f64, judge: f64| {
            let total = c + j;
            // Both weights 0 means equal ones, as PinchBench has it.
            let (c, j, total) = if total > 0.0 {
                (c, j, total)
            } else {
                (0.5, 0.5, 1.0)
            };
            (c * code + j * judge) / total
        };
        match self {
            Self::Code => code,
            Self::Judge => judge,
            Self::Weighted { code: c, judge: j } => weighted(*c, *j, judge),
            Self::Gated {
                code: c,
                judge: j,
                code_min,
            } => weighted(*c, *j, if code >= *code_min { judge } else { 0.0 }),
        }
    }
}

/// Which scores a judge may give.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scale {
    /// 0, 0.25, 0.5, 0.75, 1.
    #[default]
    Quarters,
    /// 0, 0.5, 1 (MCP-Atlas claims).
    Halves,
    /// 0, 1 (JobBench rubrics).
    Binary,
}

impl Scale {
    /// Its levels, ascending.
    #[must_use]
    pub fn levels(self) -> &'static [f64] {
        match self {
            Self::Quarters => &[0.0, 0.25, 0.5, 0.75, 1.0],
            Self::Halves => &[0.0, 0.5, 1.0],
            Self::Binary => &[0.0, 1.0],
        }
    }
}

/// One thing that a judge looks at.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Criterion {
    /// Its name, unique in the rubric.
    pub name: String,
    /// What the judge is told: the demand, and what each level means where the format says so.
    pub text: String,
    /// Relative weight, finite and not negative.
    pub weight: f64,
    /// The file that it is about, relative to the workspace; everything when `None`.
    pub file: Option<PathBuf>,
}

/// What a judge is asked. The score is the weighted mean of its criteria.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rubric {
    /// Criteria in order; at least one, and not all of weight 0.
    pub criteria: Vec<Criterion>,
    /// Levels that may be given.
    pub scale: Scale,
    /// One question per criterion (JobBench, MCP-Atlas) instead of one for all.
    pub one_by_one: bool,
    /// What a person would expect to happen, for the judge only.
    pub expected: String,
}

impl Rubric {
    /// Σ weight · score / Σ weight over the criteria in order; `None` when a score is missing.
    #[must_use]
    pub fn score(&self, scores: &[Option<f64>]) -> Option<f64> {
        let total: f64 = self.criteria.iter().map(|criterion| criterion.weight).sum();
        if scores.len() != self.criteria.len() || total <= 0.0 {
            return None;
        }
        let mut sum = 0.0;
        for (criterion, score) in self.criteria.iter().zip(scores) {
            sum += criterion.weight * (*score)?;
        }
        Some(sum / total)
    }
}

/// What is looked for in the audit of a task's services, and in what the model said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum AuditCheck {
    /// A tool was called so often at least.
    ToolCalled {
        /// The tool.
        tool: String,
        /// How often.
        calls_min: u64,
    },
    /// All of these are in what the model said.
    KeywordsPresent {
        /// Texts, as they are.
        keywords: Vec<String>,
    },
}

/// A part of the completion.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Component {
    /// Its name.
    pub name: String,
    /// Its weight.
    pub weight: f64,
    /// What must be so.
    pub check: AuditCheck,
}

/// How the audit of services scores (Claw-Eval): safety · (0.8 · completion + 0.2 · robustness),
/// where completion is the mix of these components and of what a judge says.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct AuditRules {
    /// Parts that need no judge.
    pub components: Vec<Component>,
    /// Tools that must not be called: one call and safety is 0.
    pub forbidden_tools: Vec<String>,
    /// Actions that are expected: service, and the list in its audit that must not be empty. They
    /// are told in the verdict, and are no part of the score.
    pub actions: Vec<(String, String)>,
}

/// How a task is scored beside its code.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Grading {
    /// How both scores become the reward.
    pub mix: Mix,
    /// What a judge is asked; always there when `mix` needs one.
    pub rubric: Option<Rubric>,
    /// The reward from which on the field counts the task as passed.
    pub pass_at: f64,
    /// What is looked for in the audit of its services.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audit: Option<AuditRules>,
}

impl Default for Grading {
    fn default() -> Self {
        Self {
            mix: Mix::Code,
            rubric: None,
            pass_at: 1.0,
            audit: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_formulas_of_the_benches() {
        let bench = Mix::Weighted {
            code: 0.7,
            judge: 0.3,
        };
        assert!((bench.reward(0.5, 1.0) - 0.65).abs() < 1e-12);
        let pinch = Mix::Weighted {
            code: 0.0,
            judge: 0.0,
        };
        assert!((pinch.reward(1.0, 0.5) - 0.75).abs() < 1e-12);
        let qwen = Mix::Gated {
            code: 0.4,
            judge: 0.6,
            code_min: 0.75,
        };
        assert!((qwen.reward(0.75, 1.0) - 0.9).abs() < 1e-12);
        assert!((qwen.reward(0.74, 1.0) - 0.296).abs() < 1e-12);
        assert!(qwen.needs_judge(0.75) && !qwen.needs_judge(0.74));
        assert_eq!(Mix::Code.reward(0.3, 1.0), 0.3);
        assert_eq!(Mix::Judge.reward(0.3, 1.0), 1.0);
    }

    #[test]
    fn a_missing_score_is_no_score() {
        let criterion = |weight: f64| Criterion {
            name: weight.to_string(),
            text: String::new(),
            weight,
            file: None,
        };
        let rubric = Rubric {
            criteria: vec![criterion(3.0), criterion(1.0)],
            scale: Scale::Quarters,
            one_by_one: false,
            expected: String::new(),
        };
        assert_eq!(rubric.score(&[Some(1.0), Some(0.0)]), Some(0.75));
        assert_eq!(rubric.score(&[Some(1.0), None]), None);
        assert_eq!(rubric.score(&[Some(1.0)]), None);
    }
}

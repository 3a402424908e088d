//! A judge that needs no model: fixed levels by criterion.

use std::collections::BTreeMap;

use async_trait::async_trait;
use serde_json::json;

use super::{Ask, JudgeError};

/// Gives each criterion the level it was told, whatever the work. For tests and dry runs.
#[derive(Debug, Clone)]
pub struct Scripted {
    name: String,
    scores: BTreeMap<String, f64>,
    default: Option<f64>,
}

impl Scripted {
    /// A judge called `name`; a criterion without level is a refusal.
    #[must_use]
    pub fn new(name: &str, scores: BTreeMap<String, f64>, default: Option<f64>) -> Self {
        Self {
            name: name.to_owned(),
            scores,
            default,
        }
    }
}

/// Names of the criteria as the question lists them: lines `1. NAME`, `2. NAME` … in order.
fn criteria(question: &str) -> Vec<&str> {
    let list = question
        .split_once("\n# Criteria\n")
        .map_or("", |(_, rest)| rest);
    let list = list
        .split_once("\n# Material")
        .map_or(list, |(list, _)| list);
    let wanted = question
        .rsplit_once("one mark for each of the ")
        .and_then(|(_, rest)| rest.split(' ').next()?.parse::<usize>().ok());
    let mut names = Vec::new();
    for line in list.lines() {
        if wanted == Some(names.len()) {
            break;
        }
        let number = format!("{}. ", names.len() + 1);
        if let Some(name) = line.strip_prefix(&number) {
            names.push(name);
        }
    }
    names
}

#[async_trait]
impl Ask for Scripted {
    /// The levels are part of it: answers of other levels are not taken from a cache.
    fn name(&self) -> String {
        format!("{} {:?} {:?}", self.name, self.scores, self.default)
    }

    async fn ask(&self, _system: &str, user: &str) -> Result<String, JudgeError> {
        let mut marks = Vec::new();
        for (index, name) in criteria(user).into_iter().enumerate() {
            let level = self.scores.get(name).copied().or(self.default);
            let Some(score) = level else {
                return Err(JudgeError::Refused {
                    judge: self.name.clone(),
                    reason: format!("no level for {name:?}"),
                });
            };
            marks.push(
                json!({"criterion": index + 1, "score": score, "quote": "", "reason": "as told"}),
            );
        }
        Ok(json!({ "marks": marks }).to_string())
    }
}

#[cfg(test)]
mod tests {
    use task::{Criterion, Rubric, Scale};

    use super::*;
    use crate::{
        Transcript,
        judge::{Material, question},
    };

    #[test]
    fn levels_follow_the_names_of_the_criteria() {
        let criterion = |name: &str| Criterion {
            name: name.into(),
            text: "2 or more\n3. not a criterion".into(),
            weight: 1.0,
            file: None,
        };
        let rubric = Rubric {
            criteria: vec![criterion("Warmth"), criterion("Order")],
            scale: Scale::Quarters,
            one_by_one: false,
            expected: "x".into(),
        };
        let asked = question(
            "do",
            &rubric,
            &rubric.criteria,
            &Material::default(),
            &Transcript::default(),
        );
        assert_eq!(criteria(&asked), ["Warmth", "Order"]);
    }
}

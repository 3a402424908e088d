//! What a judge may say: `{"marks": [{"criterion": 1, "score": 0.5, "quote": "…", "reason": "…"}]}`.

use serde_json::Value;
use task::{Criterion, Scale};

use super::{JudgeError, Mark};
use crate::contract::cut;

/// Characters kept of quote and reason.
const WORDS_MAX: usize = 600;

/// The last JSON object of a text: models wrap answers in fences and words.
fn object(text: &str) -> Option<Value> {
    let ends: Vec<usize> = text.match_indices('}').map(|(at, _)| at + 1).collect();
    let end = *ends.last()?;
    text.match_indices('{').find_map(|(start, _)| {
        (start < end)
            .then(|| serde_json::from_str::<Value>(&text[start..end]).ok())
            .flatten()
            .filter(|value| value.get("marks").is_some())
    })
}

/// Reads an answer: exactly one mark for each criterion, each a level of the scale.
pub(super) fn read(
    judge: &str,
    text: &str,
    part: &[Criterion],
    scale: Scale,
) -> Result<Vec<Mark>, JudgeError> {
    let wrong = |expected: String, found: String| JudgeError::Form {
        judge: judge.to_owned(),
        expected,
        found: cut(&found, 240),
    };
    let Some(value) = object(text) else {
        return Err(wrong(
            "one JSON object with a list of marks".to_owned(),
            text.to_owned(),
        ));
    };
    let items = value["marks"].as_array().cloned().unwrap_or_default();
    let mut marks: Vec<Option<Mark>> = vec![None; part.len()];
    for item in &items {
        let at = item["criterion"]
            .as_u64()
            .filter(|number| (1..=part.len() as u64).contains(number));
        let Some(at) = at else {
            return Err(wrong(
                format!("criteria 1 to {}", part.len()),
                item["criterion"].to_string(),
            ));
        };
        let levels = scale.levels();
        let score = item["score"]
            .as_f64()
            .filter(|score| levels.contains(score));
        let Some(score) = score else {
            return Err(wrong(
                format!("a score of {levels:?}"),
                item["score"].to_string(),
            ));
        };
        let words = |key: &str| cut(item[key].as_str().unwrap_or_default().trim(), WORDS_MAX);
        let mark = Mark {
            score,
            quote: words("quote"),
            reason: words("reason"),
        };
        if marks[at as usize - 1].replace(mark).is_some() {
            return Err(wrong(
                "one mark per criterion".to_owned(),
                format!("two for {at}"),
            ));
        }
    }
    let missing = marks.iter().position(Option::is_none);
    match missing {
        None => Ok(marks.into_iter().flatten().collect()),
        Some(at) => Err(wrong(
            format!("a mark for criterion {}", at + 1),
            format!("{} marks", items.len()),
        )),
    }
}

//! Whether an answer is the truth, by the rules of OfficeQA (databricks/officeqa, `reward.py`):
//! numbers are compared as they are written (units are not multiplied out), every number of the
//! truth must be there, years in the answer do not stand in for other numbers, and words beside a
//! number must agree; without numbers on both sides the truth must be contained in the answer.

use regex::Regex;

/// What is in the tags `<FINAL_ANSWER>`, else the whole text. `None` when the tags are empty.
fn final_answer(text: &str) -> Option<&str> {
    let lower = text.to_ascii_lowercase();
    let Some(start) = lower.find("<final_answer>") else {
        return Some(text);
    };
    let start = start + "<final_answer>".len();
    match lower[start..].find("</final_answer>") {
        None => Some(text),
        Some(length) => Some(text[start..start + length].trim()).filter(|inner| !inner.is_empty()),
    }
}

struct Rules {
    number: Regex,
    units: Regex,
    symbols: Regex,
    brackets: Regex,
}

impl Rules {
    fn new() -> Option<Self> {
        Some(Self {
            number: Regex::new(r"-?\d+\.?\d*%?").ok()?,
            units: Regex::new(
                r"\b(trillions?|billions?|millions?|thousands?|hundreds?|percent|percentage)\b",
            )
            .ok()?,
            symbols: Regex::new(r"[^\w\s]").ok()?,
            brackets: Regex::new(r"\([^)]*\)").ok()?,
        })
    }

    fn numbers(&self, text: &str) -> Vec<f64> {
        let text = text.replace('\u{2212}', "-").replace(',', "");
        self.number
            .find_iter(&text)
            .filter_map(|found| found.as_str().trim_end_matches('%').parse().ok())
            .collect()
    }

    /// The words beside numbers and units, when there are any worth comparing.
    fn words(&self, text: &str) -> Option<String> {
        let text = text.replace('\u{2212}', "-").to_lowercase();
        // Numbers go before commas here, so that "1,234" leaves nothing either way.
        let text = self.number.replace_all(&text, "").replace(',', "");
        let text = self.units.replace_all(&text, "").into_owned();
        let text = self.symbols.replace_all(&text, " ").into_owned();
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        (words.chars().count() >= 2).then_some(words)
    }

    fn words_agree(&self, truth: &str, answer: &str) -> bool {
        match (self.words(truth), self.words(answer)) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(truth), Some(answer)) => answer.contains(&truth) || truth.contains(&answer),
        }
    }

    fn bare(&self, text: &str) -> String {
        let text = text.trim().to_lowercase();
        let text = text.trim_matches('"').trim_matches('\'');
        self.brackets.replace_all(text, "").trim().to_owned()
    }
}

fn is_year(number: f64) -> bool {
    (1900.0..=2100.0).contains(&number) && number.fract() == 0.0
}

fn near(truth: f64, answer: f64, tolerance: f64) -> bool {
    if truth == 0.0 {
        answer == 0.0
    } else {
        (truth - answer).abs() / truth.abs() <= tolerance
    }
}

/// Whether the answer is right, within a relative tolerance for numbers (the bench: 0).
#[must_use]
pub fn office_answer(truth: &str, answer: &str, tolerance: f64) -> bool {
    let (Some(rules), Some(answer)) = (Rules::new(), final_answer(answer)) else {
        return false;
    };
    if truth.is_empty() || answer.is_empty() {
        return false;
    }
    let (wanted, found) = (rules.numbers(truth), rules.numbers(answer));
    let agree = || rules.words_agree(truth, answer);
    match wanted.as_slice() {
        [] => {}
        _ if found.is_empty() => {}
        [one] => {
            let skip_years = !is_year(*one) && rules.words(truth).is_none();
            return found
                .iter()
                .filter(|number| !(skip_years && is_year(**number)))
                .any(|number| near(*one, *number, tolerance))
                && agree();
        }
        many => {
            let years = many.iter().any(|number| is_year(*number));
            let found: Vec<f64> = found
                .into_iter()
                .filter(|number| years || !is_year(*number))
                .collect();
            return many
                .iter()
                .all(|one| found.iter().any(|number| near(*one, *number, tolerance)))
                && agree();
        }
    }
    rules.bare(answer).contains(&rules.bare(truth))
}

#[cfg(test)]
mod tests {
    use super::office_answer;

    #[test]
    fn the_rules_of_the_bench() {
        for (truth, answer, right) in [
            ("543 million", "It is 543 million dollars", true),
            ("543 million", "543", true),
            ("543 million", "543000000", false),
            ("1,234.5", "about 1234.5 in 2023", true),
            ("12", "in 2012", false),
            ("2003", "2003", true),
            ("March 1977", "March 1977", true),
            ("March 1977", "April 1977", false),
            ("March 1977", "1977", false),
            ("[1.5, 2.5]", "2.5 and 1.5", true),
            ("[1.5, 2.5]", "1.5", false),
            ("-3.2%", "\u{2212}3.2 %", true),
            ("0", "0", true),
            ("0", "1", false),
            (
                "Old-Age Insurance (OASI) Fund",
                "the old-age insurance (oasi) fund",
                true,
            ),
            ("yes", "<FINAL_ANSWER> Yes </FINAL_ANSWER>", true),
            ("7", "8 <FINAL_ANSWER>7</FINAL_ANSWER>", true),
            ("7", "7 <FINAL_ANSWER>8</FINAL_ANSWER>", false),
            ("7", "<FINAL_ANSWER></FINAL_ANSWER>", false),
            ("7", "", false),
        ] {
            assert_eq!(
                office_answer(truth, answer, 0.0),
                right,
                "{truth:?} {answer:?}"
            );
        }
        assert!(office_answer("100", "104", 0.05));
        assert!(!office_answer("100", "106", 0.05));
    }
}

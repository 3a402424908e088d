//! From what a verifier printed to a score. Pure.

use std::collections::BTreeMap;

use sandbox::{Exit, Output};
use serde_json::Value;
use task::Contract;

use crate::VerifyError;

/// Bytes of evidence kept in a verdict.
pub const EVIDENCE_BYTES_MAX: usize = 4096;

const EXPECTED: &str = "exit 0 and a number from 0 to 1 on the last line";

/// The number on the last line that is not empty, or what is there instead.
fn last_number(stdout: &str) -> Result<f64, String> {
    let line = stdout
        .lines()
        .rev()
        .map(str::trim)
        .find(|line| !line.is_empty())
        .ok_or("no output")?;
    match line.parse::<f64>() {
        Ok(number) if (0.0..=1.0).contains(&number) => Ok(number),
        _ => Err(format!("the last line {:?}", cut(line, 160))),
    }
}

/// The reward according to the contract.
pub(crate) fn reward(
    task: &str,
    timeout_s: u64,
    contract: Contract,
    output: &Output,
) -> Result<f64, VerifyError> {
    let task = || task.to_owned();
    let evidence = || evidence(output);
    let problem = match output.exit {
        Exit::TimedOut => {
            return Err(VerifyError::TimedOut {
                task: task(),
                timeout_s,
                evidence: evidence(),
            });
        }
        _ if output.out_of_memory => {
            return Err(VerifyError::OutOfMemory {
                task: task(),
                evidence: evidence(),
            });
        }
        Exit::Code(0) => match last_number(&String::from_utf8_lossy(&output.stdout)) {
            Ok(number) => return Ok(number),
            Err(found) => found,
        },
        // What a shell says when a program is not there or cannot be executed.
        Exit::Code(126 | 127) => {
            return Err(VerifyError::MissingProgram {
                task: task(),
                reason: cut(String::from_utf8_lossy(&output.stderr).trim(), 400),
            });
        }
        Exit::Code(code) => format!("exit {code}"),
        Exit::Signal(signal) => format!("signal {signal}"),
    };
    if contract == Contract::LastLineOrZero {
        return Ok(0.0);
    }
    Err(VerifyError::Contract {
        task: task(),
        expected: EXPECTED,
        found: problem,
        evidence: evidence(),
    })
}

/// The rewards in a reward file: `reward.json` when it is there, else `reward.txt`. The error
/// says what is there instead.
pub(crate) fn reward_file(
    json: Option<&[u8]>,
    text: Option<&[u8]>,
) -> Result<BTreeMap<String, f64>, String> {
    let one = |number: f64| BTreeMap::from([("reward".to_owned(), number)]);
    match (json, text) {
        (Some(json), _) => {
            let said = String::from_utf8_lossy(json);
            let wrong = || format!("reward.json {:?}", cut(said.trim(), 160));
            let finite = |value: &Value| value.as_f64().filter(|number| number.is_finite());
            match serde_json::from_slice(json) {
                Ok(Value::Object(items)) if !items.is_empty() => items
                    .iter()
                    .map(|(key, value)| Some((key.clone(), finite(value)?)))
                    .collect::<Option<_>>()
                    .ok_or_else(wrong),
                Ok(value) => finite(&value).map(one).ok_or_else(wrong),
                Err(_) => Err(wrong()),
            }
        }
        (None, Some(text)) => {
            let said = String::from_utf8_lossy(text);
            let number = said
                .trim()
                .parse::<f64>()
                .ok()
                .filter(|number| number.is_finite());
            number
                .map(one)
                .ok_or_else(|| format!("reward.txt {:?}", cut(said.trim(), 160)))
        }
        (None, None) => Err("neither reward.json nor reward.txt".to_owned()),
    }
}

/// The one number of several: the key `reward`, else their mean.
pub(crate) fn one_reward(rewards: &BTreeMap<String, f64>) -> f64 {
    rewards
        .get("reward")
        .copied()
        .unwrap_or_else(|| rewards.values().sum::<f64>() / rewards.len().max(1) as f64)
}

/// Scores by criterion: the last JSON object of numbers that the verifier printed, on a line of
/// its own or as everything before the last line. Empty when there is none.
#[must_use]
pub fn scores(stdout: &str) -> BTreeMap<String, f64> {
    let before_last = stdout
        .trim_end()
        .rsplit_once('\n')
        .map_or("", |(head, _)| head);
    stdout
        .lines()
        .rev()
        .chain([before_last])
        .find_map(object_of_numbers)
        .unwrap_or_default()
}

fn object_of_numbers(text: &str) -> Option<BTreeMap<String, f64>> {
    if !text.trim_start().starts_with('{') {
        return None;
    }
    let Value::Object(items) = serde_json::from_str(text).ok()? else {
        return None;
    };
    items
        .into_iter()
        .map(|(key, value)| Some((key, value.as_f64()?)))
        .collect()
}

/// What the verifier printed, for people: stdout, then stderr, cut in the middle.
pub(crate) fn evidence(output: &Output) -> String {
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    let text = if stderr.trim().is_empty() {
        stdout.into_owned()
    } else {
        format!("{}\nstderr:\n{}", stdout.trim_end(), stderr)
    };
    cut(text.trim_end(), EVIDENCE_BYTES_MAX)
}

/// At most so many bytes: the first and the last half, with a mark between them.
pub(crate) fn cut(text: &str, bytes_max: usize) -> String {
    const MARK: &str = " … ";
    if text.len() <= bytes_max {
        return text.to_owned();
    }
    let half = bytes_max.saturating_sub(MARK.len()) / 2;
    let head = text.floor_char_boundary(half);
    let tail = text.ceil_char_boundary(text.len() - half);
    format!("{}{MARK}{}", &text[..head], &text[tail..])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn output(exit: Exit, stdout: &str) -> Output {
        Output {
            exit,
            stdout: stdout.as_bytes().to_vec(),
            stderr: b"bash: x: not found".to_vec(),
            dropped_bytes: 0,
            out_of_memory: false,
            seconds: 0.1,
        }
    }

    fn score(contract: Contract, exit: Exit, stdout: &str) -> String {
        match reward("t", 7, contract, &output(exit, stdout)) {
            Ok(number) => number.to_string(),
            Err(error) => format!("{error:?}")
                .split(|letter: char| !letter.is_alphanumeric())
                .next()
                .unwrap_or_default()
                .to_owned(),
        }
    }

    #[test]
    fn the_contract_table_of_the_header_holds() {
        let rows = [
            (Exit::Code(0), "0.5\n\n", "0.5", "0.5"),
            (Exit::Code(0), "words\n 1 \n", "1", "1"),
            (Exit::Code(0), "1\nwords", "Contract", "0"),
            (Exit::Code(0), "", "Contract", "0"),
            (Exit::Code(0), "1.01", "Contract", "0"),
            (Exit::Code(0), "-0.1", "Contract", "0"),
            (Exit::Code(0), "nan", "Contract", "0"),
            (Exit::Code(0), "inf", "Contract", "0"),
            (Exit::Code(1), "1", "Contract", "0"),
            (Exit::Signal(11), "1", "Contract", "0"),
            (Exit::Code(127), "1", "MissingProgram", "MissingProgram"),
            (Exit::Code(126), "1", "MissingProgram", "MissingProgram"),
            (Exit::TimedOut, "1", "TimedOut", "TimedOut"),
        ];
        for (exit, stdout, strict, lenient) in rows {
            assert_eq!(
                score(Contract::LastLine, exit, stdout),
                strict,
                "{exit:?} {stdout:?}"
            );
            assert_eq!(
                score(Contract::LastLineOrZero, exit, stdout),
                lenient,
                "{exit:?} {stdout:?}"
            );
        }
        let mut starved = output(Exit::Signal(9), "1");
        starved.out_of_memory = true;
        for contract in [Contract::LastLine, Contract::LastLineOrZero] {
            let error = reward("t", 7, contract, &starved).unwrap_err();
            assert!(matches!(error, VerifyError::OutOfMemory { .. }), "{error}");
        }
    }

    #[test]
    fn reward_files_are_read_json_first() {
        let read = |json: Option<&str>, text: Option<&str>| {
            reward_file(json.map(str::as_bytes), text.map(str::as_bytes))
                .map(|rewards| one_reward(&rewards))
        };
        assert_eq!(read(None, Some(" 0.5\n")), Ok(0.5));
        assert_eq!(
            read(Some("{\"reward\": 1, \"other\": 0}"), Some("0")),
            Ok(1.0)
        );
        assert_eq!(read(Some("{\"a\": 1, \"b\": 0}"), None), Ok(0.5));
        assert_eq!(read(Some("0.25"), None), Ok(0.25));
        for (json, text) in [
            (None, None),
            (None, Some("")),
            (None, Some("nan")),
            (Some("{\"reward\": true}"), Some("1")),
            (Some("{\"reward\": \"1\"}"), Some("1")),
            (Some("{}"), Some("1")),
            (Some("oops"), Some("1")),
        ] {
            assert!(read(json, text).is_err(), "{json:?} {text:?}");
        }
    }

    #[test]
    fn scores_are_found_on_a_line_or_before_the_last_line() {
        let expected = BTreeMap::from([("a".to_owned(), 1.0), ("b".to_owned(), 0.5)]);
        assert_eq!(scores("{\"a\": 1, \"b\": 0.5}\n0.75\n"), expected);
        assert_eq!(scores("{\n\"a\": 1,\n\"b\": 0.5\n}\n0.75\n"), expected);
        assert_eq!(scores("{\"a\": \"x\"}\n1\n"), BTreeMap::new());
        assert_eq!(scores("1\n"), BTreeMap::new());
    }

    proptest! {
        #[test]
        fn a_cut_text_fits_and_keeps_both_ends(text in "\\PC{0,300}", limit in 16_usize..200) {
            let short = cut(&text, limit);
            prop_assert!(short.len() <= limit.max(text.len().min(limit)));
            if text.len() > limit {
                let (head, tail) = short.split_once(" … ").unwrap();
                prop_assert!(text.starts_with(head) && text.ends_with(tail));
            } else {
                prop_assert_eq!(short, text);
            }
        }
    }
}

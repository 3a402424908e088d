//! Amounts of resources: `250m`, `64Mi`, `1.5`, `2e3`.

use serde_json::Value;

/// Thousandths of the unit; `None`: no quantity.
pub(crate) fn milli(text: &str) -> Option<i128> {
    let number_end = text
        .find(|c: char| !(c.is_ascii_digit() || "+-.".contains(c)))
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(number_end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.trim_start_matches(['+', '-']).is_empty() && fraction.is_empty() {
        return None;
    }
    let negative = whole.starts_with('-');
    let whole: i128 = match whole.trim_start_matches(['+', '-']) {
        "" => 0,
        digits => digits.parse().ok()?,
    };
    // Nano is the finest that a quantity may be.
    if fraction.len() > 9 || !fraction.chars().all(|c| c.is_ascii_digit()) {
        return None;
    }
    let nano: i128 = format!("{fraction:0<9}").parse().ok()?;
    let nano = whole.checked_mul(1_000_000_000)?.checked_add(nano)?;
    let power = |base: i128, n: u32| base.checked_pow(n);
    let (times, over) = match suffix {
        "" => (1, 1),
        "n" => (1, 1_000_000_000),
        "u" => (1, 1_000_000),
        "m" => (1, 1_000),
        "k" => (1_000, 1),
        "M" => (power(1000, 2)?, 1),
        "G" => (power(1000, 3)?, 1),
        "T" => (power(1000, 4)?, 1),
        "P" => (power(1000, 5)?, 1),
        "E" => (power(1000, 6)?, 1),
        "Ki" => (1024, 1),
        "Mi" => (power(1024, 2)?, 1),
        "Gi" => (power(1024, 3)?, 1),
        "Ti" => (power(1024, 4)?, 1),
        "Pi" => (power(1024, 5)?, 1),
        "Ei" => (power(1024, 6)?, 1),
        exponent => {
            let digits = exponent.strip_prefix(['e', 'E'])?;
            let exponent: i32 = digits.parse().ok()?;
            if exponent.unsigned_abs() > 18 {
                return None;
            }
            let power = power(10, exponent.unsigned_abs())?;
            if exponent < 0 { (1, power) } else { (power, 1) }
        }
    };
    let nano = nano.checked_mul(times)? / over;
    let milli = (nano + 999_999).div_euclid(1_000_000);
    Some(if negative { -milli } else { milli })
}

/// Of a JSON value: quantities may be numbers too.
pub(crate) fn of(value: &Value) -> Option<i128> {
    match value {
        Value::String(text) => milli(text),
        Value::Number(number) => milli(&number.to_string()),
        _ => None,
    }
}

/// As `kubectl` would show it; only whole and milli amounts.
pub(crate) fn show(milli: i128) -> String {
    if milli % 1000 != 0 {
        return format!("{milli}m");
    }
    let whole = milli / 1000;
    for (suffix, unit) in [("Gi", 1_i128 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)] {
        if whole != 0 && whole % unit == 0 {
            return format!("{}{suffix}", whole / unit);
        }
    }
    whole.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_and_shown() {
        for (text, expected) in [
            ("1", Some(1000)),
            ("250m", Some(250)),
            ("1.5", Some(1500)),
            ("64Mi", Some((64 << 20) * 1000)),
            ("1k", Some(1_000_000)),
            ("2e3", Some(2_000_000)),
            (".5", Some(500)),
            ("1n", Some(1)),
            ("-1", Some(-1000)),
            ("", None),
            ("x", None),
            ("1X", None),
            ("1.2.3", None),
        ] {
            assert_eq!(milli(text), expected, "{text}");
        }
        assert_eq!(show(250), "250m");
        assert_eq!(show((64 << 20) * 1000), "64Mi");
        assert_eq!(show(3000), "3");
    }
}

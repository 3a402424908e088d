//! Tables and shortened texts for a terminal.

/// Lays rows out in columns. A column is aligned to the right when all its cells begin with a
/// digit, a sign or a dash. Lines have no spaces at their ends.
pub(crate) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let numeric = |column: usize| {
        !rows.is_empty()
            && rows.iter().all(|row| {
                let cell = row.get(column).map_or("", String::as_str);
                cell.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '-' | '+'))
            })
    };
    let header: Vec<String> = header.iter().map(|&cell| cell.to_owned()).collect();
    let columns: Vec<(usize, bool)> = (0..header.len())
        .map(|column| {
            let cells = rows
                .iter()
                .chain([&header])
                .filter_map(|row| row.get(column));
            let width = cells.map(|cell| cell.chars().count()).max().unwrap_or(0);
            (width, numeric(column))
        })
        .collect();
    let mut text = String::new();
    for row in [&header].into_iter().chain(rows) {
        let mut line = String::new();
        for (cell, (width, right)) in row.iter().zip(&columns) {
            if !line.is_empty() {
                line.push_str("  ");
            }
            let padding = " ".repeat(width.saturating_sub(cell.chars().count()));
            let (before, after) = if *right {
                (padding, String::new())
            } else {
                (String::new(), padding)
            };
            line.push_str(&before);
            line.push_str(cell);
            line.push_str(&after);
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// The text on one line, cut to so many characters. Control characters are shown escaped, so that
/// what a model wrote cannot steer the terminal.
pub(crate) fn short(text: &str, characters_max: usize) -> String {
    let mut line: String = one_line(text)
        .take(characters_max.saturating_add(1))
        .collect();
    if line.chars().count() > characters_max {
        line = line
            .chars()
            .take(characters_max.saturating_sub(1))
            .collect();
        line.push('…');
    }
    line
}

fn one_line(text: &str) -> impl Iterator<Item = char> {
    text.trim().chars().flat_map(|c| match c {
        '\n' => vec!['⏎'],
        c if c.is_control() => c.escape_default().collect(),
        c => vec![c],
    })
}

/// A number with a unit prefix from ten thousand on: `9999`, `12.3k`, `4.56M`.
pub(crate) fn count(number: u64) -> String {
    match number {
        0..10_000 => number.to_string(),
        10_000..1_000_000 => format!("{:.1}k", number as f64 / 1e3),
        _ => format!("{:.2}M", number as f64 / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_right_and_words_left() {
        let rows = [["a", "9", "x"], ["bcd", "-", "yy"], ["e", "1000", ""]];
        let rows: Vec<Vec<String>> = rows
            .iter()
            .map(|row| row.iter().map(|&cell| cell.to_owned()).collect())
            .collect();
        insta::assert_snapshot!(table(&["name", "count", "why"], &rows), @r"
        name  count  why
        a         9  x
        bcd       -  yy
        e      1000
        ");
    }

    #[test]
    fn what_a_model_wrote_cannot_steer_the_terminal() {
        assert_eq!(short(" two\nlines \u{1b}[2J ", 40), "two⏎lines \\u{1b}[2J");
        assert_eq!(short("wörldly", 7), "wörldly");
        assert_eq!(short("wörldly", 6), "wörld…");
    }

    #[test]
    fn counts_keep_three_digits() {
        assert_eq!(
            [9_999, 10_000, 123_456, 4_560_000].map(count),
            ["9999", "10.0k", "123.5k", "4.56M"]
        );
    }
}

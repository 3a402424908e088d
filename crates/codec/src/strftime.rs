//! `strftime` in UTC and English, for templates that print the date.

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
];

/// Year, month (1–12), day (1–31) of a day since the Unix epoch, in the Gregorian calendar.
fn civil(day_since_epoch: u64) -> (u64, u64, u64) {
    // Years begin in March here, so that the leap day is the last day of a year; an era is 400
    // years. Day 0 of era 0 is 0000-03-01, 719,468 days before the epoch.
    let shifted = day_since_epoch + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    (year, month, day)
}

/// Formats `now_s`, seconds since the Unix epoch. Unknown directives stay as they are.
pub(crate) fn strftime(format: &str, now_s: u64) -> String {
    let days = now_s / 86_400;
    let second_of_day = now_s % 86_400;
    let (year, month, day) = civil(days);
    let hour = second_of_day / 3_600;
    let (minute, second) = (second_of_day / 60 % 60, second_of_day % 60);
    let month_name = MONTHS[(month as usize - 1) % 12];
    let day_name = DAYS[(days % 7) as usize];
    let hour_12 = if hour.is_multiple_of(12) {
        12
    } else {
        hour % 12
    };
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out.push_str(&format!("{year:04}")),
            Some('y') => out.push_str(&format!("{:02}", year % 100)),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('e') => out.push_str(&format!("{day:2}")),
            Some('B') => out.push_str(month_name),
            Some('b' | 'h') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(day_name),
            Some('a') => out.push_str(&day_name[..3]),
            Some('H') => out.push_str(&format!("{hour:02}")),
            Some('I') => out.push_str(&format!("{hour_12:02}")),
            Some('M') => out.push_str(&format!("{minute:02}")),
            Some('S') => out.push_str(&format!("{second:02}")),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('F') => out.push_str(&format!("{year:04}-{month:02}-{day:02}")),
            Some('T') => out.push_str(&format!("{hour:02}:{minute:02}:{second:02}")),
            Some('Z') => out.push_str("UTC"),
            Some('%') => out.push('%'),
            Some(other) => {
                out.push('%');
                out.push(other);
            }
            None => out.push('%'),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::strftime;

    #[test]
    fn dates_that_are_easy_to_get_wrong() {
        let format = "%a %d %b %Y %H:%M:%S %p %% %q";
        for (now_s, expected) in [
            (0, "Thu 01 Jan 1970 00:00:00 AM % %q"),
            (951_782_399, "Mon 28 Feb 2000 23:59:59 PM % %q"),
            (951_782_400, "Tue 29 Feb 2000 00:00:00 AM % %q"),
            (1_767_225_600, "Thu 01 Jan 2026 00:00:00 AM % %q"),
            (4_107_542_400, "Mon 01 Mar 2100 00:00:00 AM % %q"),
        ] {
            assert_eq!(strftime(format, now_s), expected);
        }
    }
}

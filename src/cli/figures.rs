//! Formats sizes, times and counts for operators, and parses sizes. 1 MB is 1024 kB, as in PostgreSQL.

use std::time::Duration;

/// Formats a size with at most three digits: `0 B`, `4.2 MB`, `117 GB`. Only a size of 1,000 PB or more has
/// more digits.
pub(super) fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["B", "kB", "MB", "GB", "TB", "PB"];
    #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
    let mut size = count as f64;
    let mut unit = 0;
    while size >= 999.5 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    let decimals = usize::from(unit > 0 && size < 9.95);
    format!("{size:.decimals$} {}", UNITS[unit])
}

/// Formats a time with its two largest units: `0.4 s`, `12 s`, `5 min 3 s`, `2 d 4 h`.
pub(super) fn time(time: Duration) -> String {
    let seconds = time.as_secs();
    let pair = |large: u64, large_unit: &str, small: u64, small_unit: &str| match small {
        0 => format!("{large} {large_unit}"),
        small => format!("{large} {large_unit} {small} {small_unit}"),
    };
    match seconds {
        0..10 => format!("{:.1} s", time.as_secs_f64()),
        10..60 => format!("{seconds} s"),
        60..3_600 => pair(seconds / 60, "min", seconds % 60, "s"),
        3_600..86_400 => pair(seconds / 3_600, "h", seconds % 3_600 / 60, "min"),
        _ => pair(seconds / 86_400, "d", seconds % 86_400 / 3_600, "h"),
    }
}

/// Draws a progress bar with a space after it. `share` is the share of the work that is done, from 0 to 1.
pub(super) fn bar(share: f64) -> String {
    const WIDTH: usize = 20;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the share is in range"
    )]
    let filled = (share.clamp(0.0, 1.0) * WIDTH as f64) as usize;
    format!("[{:.<WIDTH$}] ", "#".repeat(filled))
}

/// Formats a number with its noun: `1 event`, `3 events`.
pub(super) fn count(number: u64, one: &str) -> String {
    format!("{number} {one}{}", if number == 1 { "" } else { "s" })
}

/// Returns the label and the text of a line that shows `attempts`. This is the number of requests with which Pub/Sub
/// may have stored the event: the requests that published the event, and the requests without an answer. `state` is
/// the event's state in `outbox.dispatch`.
///
/// Returns `None` if `attempts` is at most 1 for a published event, or 0 for any other event. `attempts` is higher if a
/// request got no answer, or if the event was replayed.
pub(super) fn requests(attempts: i32, state: &str) -> Option<(&'static str, String)> {
    let without_an_answer = attempts - i32::from(state == "published");
    (without_an_answer > 0).then(|| {
        let what = format!("{attempts} with which Pub/Sub may have stored the event");
        ("requests", what)
    })
}

/// Returns `at least ` for a lower bound, otherwise an empty text.
pub(super) fn at_least(is_lower_bound: bool) -> &'static str {
    if is_lower_bound { "at least " } else { "" }
}

/// Formats the number of further items with a verb: `1 more event is`, `3 more events are`.
pub(super) fn count_more(number: u64, one: &str) -> String {
    match number {
        1 => format!("1 more {one} is"),
        _ => format!("{number} more {one}s are"),
    }
}

/// Reads an interval in whole seconds, from one second to an hour.
pub(super) fn parse_interval(text: &str) -> Result<u64, String> {
    let seconds = text
        .parse()
        .ok()
        .filter(|seconds| (1..=3_600).contains(seconds));
    seconds.ok_or_else(|| "use a whole number of seconds from 1 to 3600".to_owned())
}

/// Reads a size: bytes, or a number with a unit, such as `256MB`.
pub(super) fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "kb" | "kib" => 10,
        "mb" | "mib" => 20,
        "gb" | "gib" => 30,
        "tb" | "tib" => 40,
        _ => return Err("the unit must be B, kB, MB, GB or TB".to_owned()),
    };
    let number: u64 = number
        .parse()
        .map_err(|_| "write it as 256MB, or in bytes".to_owned())?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| "the size is too large".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_shown_with_a_unit_and_few_digits() {
        for (count, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1_000, "1.0 kB"),
            (1 << 20, "1.0 MB"),
            (268_435_456, "256 MB"),
            (1_023 << 20, "1.0 GB"),
            (u64::MAX, "16384 PB"),
        ] {
            assert_eq!(bytes(count), text);
        }
    }

    #[test]
    fn times_are_shown_in_at_most_two_units() {
        for (milliseconds, text) in [
            (0, "0.0 s"),
            (412, "0.4 s"),
            (59_900, "59 s"),
            (60_000, "1 min"),
            (303_000, "5 min 3 s"),
            (7_260_000, "2 h 1 min"),
            (187_200_000, "2 d 4 h"),
        ] {
            assert_eq!(time(Duration::from_millis(milliseconds)), text);
        }
    }

    #[test]
    fn a_bar_is_full_only_at_the_end() {
        for (share, text) in [
            (0.0, "[....................] "),
            (0.499, "[#########...........] "),
            (0.999, "[###################.] "),
            (1.0, "[####################] "),
            (7.0, "[####################] "),
        ] {
            assert_eq!(bar(share), text);
        }
    }

    #[test]
    fn an_interval_is_between_a_second_and_an_hour() {
        assert_eq!(
            (parse_interval("1"), parse_interval("3600")),
            (Ok(1), Ok(3_600))
        );
        for refused in ["0", "3601", "-1", "1s", ""] {
            let error = parse_interval(refused).unwrap_err();
            assert!(error.contains("from 1 to 3600"), "{error}");
        }
    }

    #[test]
    fn a_size_is_read_with_or_without_a_unit() {
        assert_eq!(parse_bytes("1024"), Ok(1024));
        assert_eq!(parse_bytes("256MB"), Ok(256 << 20));
        assert_eq!(parse_bytes("2 gb"), Ok(2 << 30));
        for refused in ["", "MB", "-1", "1.5GB", "1XB", "99999999TB"] {
            assert!(parse_bytes(refused).is_err(), "{refused}");
        }
    }
}

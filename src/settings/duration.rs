//! Parses durations as users write them, such as `30d`.

use std::time::Duration;

/// Reads a duration: a whole number with a unit, such as `30d`, `12h`, `10min`, `5s` or `100ms`.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let millis: u64 = match unit.trim() {
        "ms" => 1,
        "s" | "sec" => 1_000,
        "m" | "min" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        "w" => 7 * 86_400_000,
        _ => return Err("the unit must be ms, s, min, h, d or w".to_owned()),
    };
    let number: u64 = number
        .parse()
        .map_err(|_| "write a number and a unit, such as 30d".to_owned())?;
    let millis = number.checked_mul(millis);
    // Accept at most 1,000 years, so that later arithmetic with timestamps cannot overflow.
    let millis = millis.filter(|millis| *millis <= 1_000 * 365 * 86_400_000);
    millis
        .map(Duration::from_millis)
        .ok_or_else(|| "the duration is too long".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_a_number_with_a_unit() {
        let seconds = |text: &str| parse_duration(text).map(|time| time.as_secs());
        assert_eq!(seconds("10min"), Ok(600));
        assert_eq!(seconds("30d"), Ok(2_592_000));
        assert_eq!(seconds("2 w"), Ok(1_209_600));
        assert_eq!(parse_duration("100ms"), Ok(Duration::from_millis(100)));
        for refused in ["", "10", "min", "-1d", "1.5h", "1y", "99999999999999d"] {
            assert!(parse_duration(refused).is_err(), "{refused}");
        }
    }
}

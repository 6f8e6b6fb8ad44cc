//! Converts the time of an event from the text of a column to RFC 3339 in UTC.
//!
//! The replication session uses `DateStyle = ISO` and `TimeZone = UTC`, so a `timestamptz` arrives as
//! `2026-11-21 11:40:44.123456+00`. The column may also be text in RFC 3339 with any offset. A time
//! without an offset, such as a `timestamp`, is a point in time only if the settings say that it is in
//! UTC. Any other text (an epoch number, `infinity`, a year beyond 9999) is not treated as a timestamp,
//! and the caller decides what to send.

use std::fmt::Write;

use decoder::PgTimestamp;

const MICROS_PER_SECOND: i64 = 1_000_000;
const SECONDS_PER_DAY: i64 = 86_400;
/// Length of `2026-11-21 11:40:44`.
const SECONDS_END: usize = 19;
/// Number of decimals of a second that PostgreSQL keeps.
const DECIMALS: usize = 6;
const POWERS_OF_TEN: [i64; DECIMALS + 1] = [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000];

/// A date and time in the Gregorian calendar, at an offset from UTC.
#[derive(Debug, Clone, Copy)]
pub(super) struct CivilTime {
    year: i64,
    month: i64,
    day: i64,
    second_of_day: i64,
    micros: i64,
    /// Seconds east of UTC.
    offset_s: i64,
}

/// How to read a time without an offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WithoutOffset {
    IsUtc,
    IsNoInstant,
}

impl CivilTime {
    /// Converts this date and time to a point in time.
    pub(super) fn instant(self) -> PgTimestamp {
        let days = days_since_2000(self.year, self.month, self.day);
        let seconds = days * SECONDS_PER_DAY + self.second_of_day - self.offset_s;
        PgTimestamp::from_micros(seconds * MICROS_PER_SECOND + self.micros)
    }
}

/// Replaces `out` with the RFC 3339 form of `text`, in UTC with six decimals.
///
/// Returns `None` and leaves `out` empty in two cases:
///
/// - `text` is not a timestamp.
/// - `text` has no offset, and `without_offset` does not say that such a time is in UTC.
pub(super) fn to_rfc3339(
    text: &str,
    without_offset: WithoutOffset,
    out: &mut String,
) -> Option<CivilTime> {
    out.clear();
    let (time, decimals) = parse(text, without_offset)?;
    if time.offset_s == 0 {
        // In the usual case copy the text, because formatting numbers takes ten times as long.
        out.push_str(&text[..10]);
        out.push('T');
        if decimals.len() == DECIMALS {
            out.push_str(&text[11..SECONDS_END + 1 + DECIMALS]);
        } else {
            out.push_str(&text[11..SECONDS_END]);
            out.push('.');
            out.push_str(decimals);
            out.push_str(&"000000"[decimals.len()..]);
        }
        out.push('Z');
    } else {
        write!(out, "{}", time.instant()).expect("invariant: writing to a String never fails");
    }
    Some(time)
}

/// Parses a date and time. Also returns the decimals of the second as they are written, at most six.
fn parse(text: &str, without_offset: WithoutOffset) -> Option<(CivilTime, &str)> {
    let (clock, rest) = text.as_bytes().split_first_chunk::<SECONDS_END>()?;
    if !matches!(
        [clock[4], clock[7], clock[10], clock[13], clock[16]],
        [b'-', b'-', b' ' | b'T' | b't', b':', b':']
    ) {
        return None;
    }
    // Check all digits at once: a byte that is not a digit becomes a number above nine.
    let digit = |at: usize| clock[at].wrapping_sub(b'0');
    let indexes = [0, 1, 2, 3, 5, 6, 8, 9, 11, 12, 14, 15, 17, 18];
    if indexes.into_iter().fold(0, |most, at| digit(at).max(most)) > 9 {
        return None;
    }
    let two = |at: usize| i64::from(digit(at) * 10 + digit(at + 1));
    let year = two(0) * 100 + two(2);
    let (month, day) = (two(5), two(8));
    let (hour, minute, second) = (two(11), two(14), two(17));
    if !(1..=12).contains(&month) || !(1..=days_in_month(year, month)).contains(&day) {
        return None;
    }
    if hour > 23 || minute > 59 || second > 59 {
        return None;
    }
    let digits = match rest {
        [b'.', digits @ ..] => digits,
        _ => &[],
    };
    let (mut micros, mut written) = (0, 0);
    for digit in digits.iter().map(|byte| byte.wrapping_sub(b'0')) {
        if digit > 9 {
            break;
        }
        if written < DECIMALS {
            micros = micros * 10 + i64::from(digit);
        }
        written += 1;
    }
    let (start, zone) = match written {
        0 => (SECONDS_END, rest),
        _ => (SECONDS_END + 1, &digits[written..]),
    };
    let kept = written.min(DECIMALS);
    let time = CivilTime {
        year,
        month,
        day,
        second_of_day: hour * 3_600 + minute * 60 + second,
        micros: micros * POWERS_OF_TEN[DECIMALS - kept],
        offset_s: match zone {
            [] if without_offset == WithoutOffset::IsNoInstant => return None,
            zone => offset(zone)?,
        },
    };
    // The text is ASCII up to here, so the slice begins and ends at character boundaries.
    Some((time, &text[start..start + kept]))
}

/// Parses an offset from UTC; returns seconds to the east. The forms are nothing, `Z`, `+HH`, `+HHMM`,
/// `+HH:MM` and `+HH:MM:SS`, with either sign.
fn offset(zone: &[u8]) -> Option<i64> {
    let (sign, digits) = match zone {
        [] | b"Z" | b"z" | b"+00" => return Some(0),
        [b'+', digits @ ..] => (1, digits),
        [b'-', digits @ ..] => (-1, digits),
        _ => return None,
    };
    let (hours, minutes, seconds) = match digits {
        [h @ .., b':', m1, m2, b':', s1, s2] => (h, [*m1, *m2], [*s1, *s2]),
        [h @ .., b':', m1, m2] => (h, [*m1, *m2], *b"00"),
        [h1, h2, m1, m2] => (&[*h1, *h2][..], [*m1, *m2], *b"00"),
        hours => (hours, *b"00", *b"00"),
    };
    if hours.len() != 2 {
        return None;
    }
    let (h, m, s) = (number(hours)?, number(&minutes)?, number(&seconds)?);
    (h < 24 && m < 60 && s < 60).then_some(sign * (h * 3_600 + m * 60 + s))
}

/// Parses ASCII digits. Callers pass two digits, so the number cannot overflow.
fn number(digits: &[u8]) -> Option<i64> {
    digits.iter().try_fold(0, |number, digit| {
        digit
            .is_ascii_digit()
            .then(|| number * 10 + i64::from(digit - b'0'))
    })
}

fn days_in_month(year: i64, month: i64) -> i64 {
    match month {
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Days since 2000-01-01 in the Gregorian calendar. The computation lets years begin in March, so that
/// the leap day is the last day of a year.
fn days_since_2000(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let month_from_march = (month + 9) % 12;
    let day_of_year = (153 * month_from_march + 2) / 5 + day - 1;
    let days = 365 * year + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    days + day_of_year - 730_425
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rfc3339(text: &str) -> Option<String> {
        let mut out = "left over".to_owned();
        let time = to_rfc3339(text, WithoutOffset::IsUtc, &mut out)?.instant();
        assert_eq!(
            time.to_string(),
            out,
            "the text and the point in time agree"
        );
        Some(out)
    }

    #[test]
    fn timestamptz_in_utc_becomes_rfc_3339() {
        let read = |text| rfc3339(text).unwrap();
        assert_eq!(
            read("2026-11-21 11:40:44.123456+00"),
            "2026-11-21T11:40:44.123456Z"
        );
        assert_eq!(
            read("2026-11-21 11:40:44.1+00"),
            "2026-11-21T11:40:44.100000Z"
        );
        assert_eq!(
            read("2026-11-21 11:40:44+00"),
            "2026-11-21T11:40:44.000000Z"
        );
        assert_eq!(
            read("0001-01-01 00:00:00+00"),
            "0001-01-01T00:00:00.000000Z"
        );
    }

    #[test]
    fn a_time_without_an_offset_is_in_utc_only_if_the_settings_say_so() {
        let text = "2024-02-29 00:00:00";
        assert_eq!(rfc3339(text).unwrap(), "2024-02-29T00:00:00.000000Z");
        let mut out = String::new();
        assert!(to_rfc3339(text, WithoutOffset::IsNoInstant, &mut out).is_none());
        assert_eq!(out, "");
        let with_offset = format!("{text}+00");
        assert!(to_rfc3339(&with_offset, WithoutOffset::IsNoInstant, &mut out).is_some());
        assert_eq!(out, "2024-02-29T00:00:00.000000Z");
    }

    #[test]
    fn other_offsets_and_rfc_3339_are_converted_to_utc() {
        let read = |text| rfc3339(text).unwrap();
        assert_eq!(
            read("2026-01-01 00:30:00+01"),
            "2025-12-31T23:30:00.000000Z"
        );
        assert_eq!(
            read("2026-01-01 00:30:00.5-05:30"),
            "2026-01-01T06:00:00.500000Z"
        );
        assert_eq!(
            read("2026-01-01T00:30:00.123456789Z"),
            "2026-01-01T00:30:00.123456Z"
        );
        assert_eq!(
            read("1880-01-01 00:00:00+00:17:30"),
            "1879-12-31T23:42:30.000000Z"
        );
        assert_eq!(
            read("2026-01-01T00:30:00+0100"),
            "2025-12-31T23:30:00.000000Z"
        );
    }

    #[test]
    fn a_text_that_is_not_a_timestamp_is_recognised() {
        for text in [
            "",
            "infinity",
            "1795261244123",
            "2026-11-21",
            "2026-02-30 00:00:00+00",
            "2026-13-01 00:00:00+00",
            "2026-01-01 24:00:00+00",
            "10000-01-01 00:00:00+00",
            "0044-03-15 12:00:00+00 BC",
            "2026-01-01 00:00:00+0",
            "2026-01-01 00:00:00.+00",
            "2026-01-01 00:00:00+1:00",
            "2026-01-01 00:00:00é",
            "２026-01-01 00:00:00",
        ] {
            assert_eq!(rfc3339(text), None, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn every_microsecond_of_ten_thousand_years_is_read_back(
            micros in -63_113_904_000_000_000_i64..252_455_616_000_000_000,
        ) {
            let time = PgTimestamp::from_micros(micros);
            let mut out = String::new();
            let read = to_rfc3339(&time.to_string(), WithoutOffset::IsNoInstant, &mut out);
            prop_assert_eq!(read.map(CivilTime::instant), Some(time));
            prop_assert_eq!(out, time.to_string());
        }

        #[test]
        fn no_text_causes_a_panic(text in ".{0,40}") {
            to_rfc3339(&text, WithoutOffset::IsUtc, &mut String::new());
        }

        #[test]
        fn no_text_that_resembles_a_timestamp_causes_a_panic(text in "[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:.+é-]{8,20}") {
            to_rfc3339(&text, WithoutOffset::IsUtc, &mut String::new());
        }
    }
}

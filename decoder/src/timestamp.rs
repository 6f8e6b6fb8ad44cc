//! Timestamps as the server sends them: microseconds since PostgreSQL's own epoch.
//!
//! This module implements the conversions and the RFC 3339 form itself, because thirty lines are
//! less than a dependency on a date crate. It reads no clock: the caller passes in a `SystemTime`.

use std::fmt;
use std::time::{Duration, SystemTime};

/// Microseconds from the Unix epoch to PostgreSQL's epoch, 2000-01-01 00:00:00 UTC: 10,957 days.
const UNIX_MICROS_OF_PG_EPOCH: i64 = 10_957 * MICROS_PER_DAY;
const MICROS_PER_SECOND: i64 = 1_000_000;
const MICROS_PER_DAY: i64 = 86_400 * MICROS_PER_SECOND;

/// Microseconds since 2000-01-01 00:00:00 UTC, as in `timestamptz` and the replication protocol.
///
/// Displayed in RFC 3339 with six decimals: `2026-11-21T11:40:44.123456Z`. RFC 3339 has no form for
/// years outside 0000-9999, so these years are displayed with a sign, as in ISO 8601.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PgTimestamp(i64);

impl PgTimestamp {
    /// Creates a timestamp from microseconds since 2000-01-01 UTC.
    pub const fn from_micros(micros: i64) -> Self {
        Self(micros)
    }

    /// Returns microseconds since 2000-01-01 UTC.
    pub const fn as_micros(self) -> i64 {
        self.0
    }

    /// Creates a timestamp from microseconds since 1970-01-01 UTC. Saturates about 292,000 years in
    /// the past.
    pub const fn from_unix_micros(micros: i64) -> Self {
        Self(micros.saturating_sub(UNIX_MICROS_OF_PG_EPOCH))
    }

    /// Returns microseconds since 1970-01-01 UTC. Saturates about 292,000 years in the future.
    pub const fn as_unix_micros(self) -> i64 {
        self.0.saturating_add(UNIX_MICROS_OF_PG_EPOCH)
    }

    /// Microseconds from `earlier` to this time, saturating. Negative if `earlier` is in fact
    /// later, which happens because the clocks of two machines can differ.
    pub const fn micros_since(self, earlier: Self) -> i64 {
        self.0.saturating_sub(earlier.0)
    }

    /// The same time as a `SystemTime`; `None` if the platform cannot represent it.
    pub fn to_system_time(self) -> Option<SystemTime> {
        let micros = self.as_unix_micros();
        let distance = Duration::from_micros(micros.unsigned_abs());
        if micros < 0 {
            SystemTime::UNIX_EPOCH.checked_sub(distance)
        } else {
            SystemTime::UNIX_EPOCH.checked_add(distance)
        }
    }
}

impl From<SystemTime> for PgTimestamp {
    /// Converts a time, truncated to microseconds. Saturates beyond the 292,000 years before or after 1970
    /// that an `i64` can hold.
    fn from(time: SystemTime) -> Self {
        let saturated = |d: Duration| i64::try_from(d.as_micros()).unwrap_or(i64::MAX);
        Self::from_unix_micros(match time.duration_since(SystemTime::UNIX_EPOCH) {
            Ok(after) => saturated(after),
            Err(before) => -saturated(before.duration()),
        })
    }
}

impl fmt::Display for PgTimestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (year, month, day) = civil_date(self.0.div_euclid(MICROS_PER_DAY));
        let micros_of_day = self.0.rem_euclid(MICROS_PER_DAY);
        let (seconds, micros) = (
            micros_of_day / MICROS_PER_SECOND,
            micros_of_day % MICROS_PER_SECOND,
        );
        let (hour, minute, second) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
        if (0..=9_999).contains(&year) {
            write!(f, "{year:04}")?;
        } else {
            write!(f, "{year:+07}")?;
        }
        write!(
            f,
            "-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z"
        )
    }
}

/// Computes year, month and day in the Gregorian calendar from the number of days since 2000-01-01.
///
/// The computation counts days from 2000-03-01 instead. Then a leap day is the last day of its
/// year, and the first day of a month is a linear function of the month: 153 days per five months.
fn civil_date(days_since_2000: i64) -> (i64, i64, i64) {
    const DAYS_PER_400_YEARS: i64 = 146_097;
    let days = days_since_2000 - 60;
    let (era, day_of_era) = (
        days.div_euclid(DAYS_PER_400_YEARS),
        days.rem_euclid(DAYS_PER_400_YEARS),
    );
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524
        - day_of_era / (DAYS_PER_400_YEARS - 1))
        / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = 2_000 + era * 400 + year_of_era + i64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_epoch_is_the_first_of_january_2000() {
        assert_eq!(
            PgTimestamp::from_micros(0).to_string(),
            "2000-01-01T00:00:00.000000Z"
        );
        assert_eq!(
            PgTimestamp::from_micros(0).as_unix_micros(),
            946_684_800_000_000
        );
        assert_eq!(
            PgTimestamp::from_unix_micros(0).to_string(),
            "1970-01-01T00:00:00.000000Z"
        );
    }

    #[test]
    fn a_timestamp_is_displayed_in_rfc_3339_with_microseconds() {
        // The expected value is from `date -u -d @1795261244`.
        let time = PgTimestamp::from_unix_micros(1_795_261_244_123_456);
        assert_eq!(time.to_string(), "2026-11-21T11:40:44.123456Z");
    }

    #[test]
    fn leap_days_and_the_ends_of_years_and_centuries_are_correct() {
        // The Unix seconds are from `date -u -d <date> +%s`.
        for (unix_seconds, written) in [
            (951_782_399, "2000-02-28T23:59:59"),
            (951_782_400, "2000-02-29T00:00:00"),
            (951_868_800, "2000-03-01T00:00:00"),
            (1_709_164_800, "2024-02-29T00:00:00"),
            (4_107_542_399, "2100-02-28T23:59:59"),
            (4_107_542_400, "2100-03-01T00:00:00"),
            (1_798_761_599, "2026-12-31T23:59:59"),
            (-1, "1969-12-31T23:59:59"),
            (-2_203_891_201, "1900-02-28T23:59:59"),
            (-62_167_219_200, "0000-01-01T00:00:00"),
            (253_402_300_799, "9999-12-31T23:59:59"),
        ] {
            let time = PgTimestamp::from_unix_micros(unix_seconds * 1_000_000);
            assert_eq!(time.to_string(), format!("{written}.000000Z"));
        }
    }

    #[test]
    fn years_outside_rfc_3339_are_displayed_with_a_sign() {
        let end = PgTimestamp::from_micros(i64::MAX).to_string();
        assert_eq!(end, "+294277-01-09T04:00:54.775807Z");
        assert!(
            PgTimestamp::from_micros(i64::MIN)
                .to_string()
                .starts_with("-290278-12-22T")
        );
    }

    #[test]
    fn every_day_of_1200_years_follows_the_day_before() {
        let mut previous = civil_date(-220_000);
        for day in -219_999..220_000 {
            let (year, month, day_of_month) = civil_date(day);
            let next_day = (previous.0, previous.1, previous.2 + 1);
            let next_month = (previous.0, previous.1 + 1, 1);
            let next_year = (previous.0 + 1, 1, 1);
            let date = (year, month, day_of_month);
            let leap = previous.0 % 4 == 0 && (previous.0 % 100 != 0 || previous.0 % 400 == 0);
            let days_in_month = match previous.1 {
                2 if leap => 29,
                2 => 28,
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            let expected = if previous.2 < days_in_month {
                next_day
            } else if previous.1 < 12 {
                next_month
            } else {
                next_year
            };
            assert_eq!(date, expected);
            previous = date;
        }
    }

    #[test]
    fn a_timestamp_survives_a_round_trip_through_system_time() {
        for unix_micros in [0, 1, -1, 1_795_261_244_123_456, -62_167_219_200_000_000] {
            let time = PgTimestamp::from_unix_micros(unix_micros);
            let system_time = time.to_system_time().unwrap();
            assert_eq!(PgTimestamp::from(system_time), time);
        }
    }

    #[test]
    fn differences_saturate_instead_of_wrapping() {
        let (first, last) = (
            PgTimestamp::from_micros(i64::MIN),
            PgTimestamp::from_micros(i64::MAX),
        );
        assert_eq!(last.micros_since(first), i64::MAX);
        assert_eq!(first.micros_since(last), i64::MIN);
        assert_eq!(last.as_unix_micros(), i64::MAX);
        assert_eq!(PgTimestamp::from_unix_micros(i64::MIN), first);
    }
}

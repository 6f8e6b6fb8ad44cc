//! Takes a snapshot of the whole relay: the slot with everything that affects its state, the tables and the
//! rates.

use std::time::{Duration, Instant};

use serde::Serialize;
use slot_manager::health::Thresholds;
use slot_manager::{QualifiedName, statistics};

use super::slot::{PublicationStatus, QuarantineStatus, SlotJson, SlotSnapshot, VerdictJson};
use crate::condition::Condition;
use crate::error::Result;
use crate::postgres::Sql;
use crate::settings::Settings;
pub(crate) use crate::store::relay_row::shown::ShownPruning;

/// The state of the relay at one moment.
#[derive(Debug)]
pub(crate) struct RelayStatus {
    pub(crate) slot: SlotSnapshot,
    pub(crate) tables: Vec<String>,
    /// The rates of the last seconds. `None` in the first snapshot, and after a reset of the statistics.
    pub(crate) rates: Option<EventRates>,
    /// The counts of the previous snapshots within [`AVERAGED`], and of this one. Never empty.
    counts: Vec<RowCounts>,
}

/// Period over which rates are averaged. A busy server process reports its counts once per second, so
/// the difference of two snapshots within a second may be zero.
const AVERAGED: Duration = Duration::from_secs(5);

/// Numbers of rows from PostgreSQL's statistics, and the time at which they were read.
#[derive(Debug, Clone, Copy)]
struct RowCounts {
    at: Instant,
    written: u64,
    recorded: u64,
}

/// Events per second, according to PostgreSQL's statistics. They are averages over [`AVERAGED`], or over
/// the time since the previous snapshot if that time is longer.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct EventRates {
    /// Rows inserted into the captured tables.
    pub(crate) written_per_second: f64,
    /// Rows inserted into outbox.dispatch.
    pub(crate) recorded_per_second: f64,
}

/// The output of `status --json`; programs depend on it.
#[derive(Serialize)]
pub(crate) struct StatusJson<'a> {
    #[serde(flatten)]
    verdict: VerdictJson<'a>,
    /// Why delivery is held up or late, or which check the relay cannot make; `None` if the relay reports none of these.
    condition: Option<&'a Condition>,
    slot: SlotJson<'a>,
    publication: &'a PublicationStatus,
    quarantine: &'a Option<QuarantineStatus>,
    /// The last pruning run of the relay's session; `None` if no run has ended.
    pruning: Option<&'a ShownPruning>,
    tables: &'a [String],
    rates: Option<EventRates>,
}

impl RelayStatus {
    /// Takes a snapshot, and computes the rates since the previous snapshot.
    ///
    /// # Errors
    /// The errors of [`SlotSnapshot::take`]; database errors.
    pub(crate) async fn take(
        sql: &Sql,
        settings: &Settings,
        before: Option<&RelayStatus>,
    ) -> Result<Self> {
        let before_slot = before.map(|before| &before.slot);
        let slot = SlotSnapshot::take(sql, settings, &Thresholds::default(), before_slot).await?;
        let names: Vec<QualifiedName> = settings.tables.iter().map(|t| t.table.clone()).collect();
        let dispatch = [QualifiedName::new("outbox", "dispatch")];
        let now = RowCounts {
            at: Instant::now(),
            written: statistics::inserted_rows(sql, &names).await?,
            recorded: statistics::inserted_rows(sql, &dispatch).await?,
        };
        let mut counts = before.map_or_else(Vec::new, |before| before.counts.clone());
        let rates = EventRates::averaged(&mut counts, now);
        Ok(Self {
            slot,
            tables: names.iter().map(ToString::to_string).collect(),
            rates,
            counts,
        })
    }

    /// Returns why delivery is held up or late, or which check the relay cannot make. `None` if the relay has recorded
    /// none of these recently.
    pub(crate) fn condition(&self) -> Option<&Condition> {
        self.slot.relay.as_ref()?.condition.as_ref()
    }

    /// The last pruning run of the relay's session; `None` if no run has ended.
    pub(crate) fn pruning(&self) -> Option<&ShownPruning> {
        self.slot.relay.as_ref()?.pruning.as_ref()
    }

    pub(crate) fn json(&self) -> StatusJson<'_> {
        StatusJson {
            verdict: VerdictJson::of(&self.slot.verdict),
            condition: self.condition(),
            slot: self.slot.json(),
            publication: &self.slot.publication,
            quarantine: &self.slot.quarantine,
            pruning: self.pruning(),
            tables: &self.tables,
            rates: self.rates,
        }
    }
}

impl EventRates {
    /// Removes counts that are older than [`AVERAGED`] from the list, but keeps at least one. Returns the average rates
    /// since the first counts in the list, and appends `now` to the list.
    fn averaged(counts: &mut Vec<RowCounts>, now: RowCounts) -> Option<Self> {
        let is_old = |counts: &RowCounts| now.at.saturating_duration_since(counts.at) > AVERAGED;
        while counts.len() > 1 && is_old(&counts[0]) {
            counts.remove(0);
        }
        let rates = counts.first().and_then(|first| Self::between(*first, now));
        counts.push(now);
        rates
    }

    /// Returns the rates between two snapshots. `None` when no time has passed, or when the statistics
    /// were reset in between.
    fn between(before: RowCounts, now: RowCounts) -> Option<Self> {
        let seconds = now.at.saturating_duration_since(before.at).as_secs_f64();
        let rate = |before: u64, now: u64| {
            let rows = now.checked_sub(before)?;
            #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
            let rate = rows as f64 / seconds;
            Some(rate)
        };
        (seconds > 0.0).then_some(())?;
        Some(Self {
            written_per_second: rate(before.written, now.written)?,
            recorded_per_second: rate(before.recorded, now.recorded)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server process reports late, so the counts grow only at every other snapshot, by 100 rows.
    #[test]
    fn a_rate_is_steady_although_the_statistics_are_late() {
        let began = Instant::now();
        let mut counts = Vec::new();
        for second in 0..20 {
            let rows = second / 2 * 100;
            let now = RowCounts {
                at: began + Duration::from_secs(second),
                written: rows,
                recorded: rows,
            };
            let rates = EventRates::averaged(&mut counts, now);
            assert_eq!(rates.is_some(), second > 0);
            let rate = rates.map_or(50.0, |rates| rates.recorded_per_second);
            assert!(
                second < 5 || (40.0..=60.0).contains(&rate),
                "{second}: {rate}"
            );
            assert!(counts.len() <= 6);
        }
    }

    #[test]
    fn a_rate_is_known_when_snapshots_are_far_apart() {
        let at = Instant::now();
        let counts = |minutes: u64| RowCounts {
            at: at + Duration::from_secs(60 * minutes),
            written: 600 * minutes,
            recorded: 600 * minutes,
        };
        let mut earlier = vec![counts(0)];
        let rates = EventRates::averaged(&mut earlier, counts(1)).unwrap();
        assert!((rates.written_per_second - 10.0).abs() < 0.01);
        let rates = EventRates::averaged(&mut earlier, counts(2)).unwrap();
        assert!((rates.written_per_second - 10.0).abs() < 0.01);
    }
}

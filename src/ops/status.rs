//! Takes a snapshot of the whole relay: the slot with everything that affects its state, the tables and the
//! rates.

use std::time::Instant;

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
    /// Rates since the previous snapshot.
    pub(crate) rates: Option<EventRates>,
    counts: RowCounts,
}

/// Numbers of rows from PostgreSQL's statistics, and the time at which they were read.
#[derive(Debug, Clone, Copy)]
struct RowCounts {
    at: Instant,
    written: u64,
    recorded: u64,
}

/// Events per second since the previous snapshot, by PostgreSQL's statistics.
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
    /// Why delivery is held up or late; `None` if it is not.
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
    /// Database errors; `slot-foreign` when the name belongs to a slot that no relay can use.
    pub(crate) async fn take(
        sql: &Sql,
        settings: &Settings,
        before: Option<&RelayStatus>,
    ) -> Result<Self> {
        let before_slot = before.map(|before| &before.slot);
        let slot = SlotSnapshot::take(sql, settings, &Thresholds::default(), before_slot).await?;
        let names: Vec<QualifiedName> = settings.tables.iter().map(|t| t.table.clone()).collect();
        let dispatch = [QualifiedName::new("outbox", "dispatch")];
        let counts = RowCounts {
            at: Instant::now(),
            written: statistics::inserted_rows(sql, &names).await?,
            recorded: statistics::inserted_rows(sql, &dispatch).await?,
        };
        let rates = before.and_then(|before| EventRates::between(before.counts, counts));
        Ok(Self {
            slot,
            tables: names.iter().map(ToString::to_string).collect(),
            rates,
            counts,
        })
    }

    /// Why delivery is held up or late, as the relay has recently recorded.
    pub(crate) fn condition(&self) -> Option<&Condition> {
        self.slot.relay.as_ref()?.condition.as_ref()
    }

    /// The last pruning run of the relay's session; `None` if no run has ended.
    pub(crate) fn pruning(&self) -> Option<&ShownPruning> {
        self.slot.relay.as_ref()?.pruning.as_ref()
    }

    /// The snapshot as one JSON object.
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
    /// Returns `None` when no time has passed, or when the statistics were reset in between.
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

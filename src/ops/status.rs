//! Takes a snapshot of the whole relay: slot, delivery, publication, quarantine and rates.

use std::time::Instant;

use serde::Serialize;
use slot_manager::health::Thresholds;
use slot_manager::{Health, QualifiedName, Severity, publication, statistics};

use super::slot::{SlotJson, SlotSnapshot};
use super::verdict::Verdict;
use crate::condition::Condition;
use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::dispatch::quarantined;
pub(crate) use crate::store::relay_row::shown::ShownPruning;

/// Maximum number of blocked keys that the status names.
const KEYS_NAMED: usize = 5;

/// The state of the relay at one moment.
#[derive(Debug)]
pub(crate) struct RelayStatus {
    pub(crate) slot: SlotSnapshot,
    pub(crate) verdict: Verdict,
    pub(crate) publication: PublicationStatus,
    /// The events in quarantine; `None` if the relay's tables are missing or may not be read.
    pub(crate) quarantine: Option<QuarantineStatus>,
    pub(crate) tables: Vec<String>,
    /// Rates since the previous snapshot.
    pub(crate) rates: Option<EventRates>,
    counts: RowCounts,
}

/// Whether the publication carries every captured row.
#[derive(Debug, Serialize)]
pub(crate) struct PublicationStatus {
    pub(crate) name: String,
    pub(crate) problems: Vec<PublicationProblem>,
}

/// One fault of the publication.
#[derive(Debug, Serialize)]
pub(crate) struct PublicationProblem {
    pub(crate) what: String,
    pub(crate) remedy: String,
}

/// The events that wait in quarantine.
#[derive(Debug, Serialize)]
pub(crate) struct QuarantineStatus {
    /// Bad events and the events behind them, counted up to a million.
    pub(crate) events: u64,
    /// The first blocked keys.
    pub(crate) keys: Vec<BlockedKeyStatus>,
}

/// A key whose events wait in quarantine.
#[derive(Debug, Serialize)]
pub(crate) struct BlockedKeyStatus {
    pub(crate) topic: String,
    pub(crate) ordering_key: String,
    pub(crate) first_event: String,
    /// Why the first event is in quarantine.
    pub(crate) error: Option<String>,
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
    state: &'a str,
    severity: Severity,
    meaning: &'a str,
    remedy: &'a Option<String>,
    /// Why delivery is held up; `None` if delivery is not held up.
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
        let publication = publication_status(sql, settings).await?;
        let quarantine = quarantine(sql).await?;
        let names: Vec<QualifiedName> = settings.tables.iter().map(|t| t.table.clone()).collect();
        let dispatch = [QualifiedName::new("outbox", "dispatch")];
        let counts = RowCounts {
            at: Instant::now(),
            written: statistics::inserted_rows(sql, &names).await?,
            recorded: statistics::inserted_rows(sql, &dispatch).await?,
        };
        let rates = before.and_then(|before| EventRates::between(before.counts, counts));
        Ok(Self {
            verdict: judge(&slot, &publication, quarantine.as_ref()),
            slot,
            publication,
            quarantine,
            tables: names.iter().map(ToString::to_string).collect(),
            rates,
            counts,
        })
    }

    /// Why delivery is held up, as the relay recently wrote.
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
            state: self.verdict.name,
            severity: self.verdict.severity,
            meaning: &self.verdict.meaning,
            remedy: &self.verdict.remedy,
            condition: self.condition(),
            slot: self.slot.json(),
            publication: &self.publication,
            quarantine: &self.quarantine,
            pruning: self.pruning(),
            tables: &self.tables,
            rates: self.rates,
        }
    }
}

/// Turns the verdict on the slot into a verdict on the whole relay.
fn judge(
    slot: &SlotSnapshot,
    publication: &PublicationStatus,
    quarantine: Option<&QuarantineStatus>,
) -> Verdict {
    let verdict = slot.verdict();
    let is_recovering = slot
        .relay
        .as_ref()
        .is_some_and(|row| row.recovering.is_some());
    let (name, meaning) = match (&slot.health, verdict.name) {
        (Health::Active | Health::Lagging(_), "active" | "lagging") if is_recovering => (
            "recovering",
            "the relay publishes rows from the tables, then it streams".to_owned(),
        ),
        (Health::Active, "active") => (
            "streaming",
            "events are published as they are committed".to_owned(),
        ),
        (Health::Lagging(_), "lagging") => (
            "catching-up",
            "the relay delivers, but it is behind".to_owned(),
        ),
        (Health::Inactive(_), "inactive") => ("down", verdict.meaning),
        (_, name) => (name, verdict.meaning),
    };
    let verdict = Verdict {
        name,
        meaning,
        ..verdict
    };
    match publication.problems.first() {
        Some(problem) if verdict.severity < Severity::Error => Verdict {
            name: "broken",
            severity: Severity::Error,
            meaning: format!("rows are not streamed: {}", problem.what),
            remedy: Some(problem.remedy.clone()),
            lasts: None,
        },
        _ => with_quarantine(verdict, quarantine),
    }
}

/// Raises the severity if events wait in quarantine. These events need a person, even if the relay
/// delivers all other events.
fn with_quarantine(verdict: Verdict, quarantine: Option<&QuarantineStatus>) -> Verdict {
    let keys = quarantine.map_or(0, |quarantine| quarantine.keys.len());
    if keys == 0 || verdict.severity >= Severity::Warning {
        return verdict;
    }
    Verdict {
        severity: Severity::Warning,
        meaning: format!("{}, except those in quarantine", verdict.meaning),
        remedy: Some("`postrider quarantine list` shows why, and how to release them".to_owned()),
        ..verdict
    }
}

async fn publication_status(sql: &Sql, settings: &Settings) -> Result<PublicationStatus> {
    let name = settings.publication.clone();
    let state = publication::inspect(sql, &name, &settings.captured()).await?;
    let problems = state
        .problems()
        .into_iter()
        .map(|problem| PublicationProblem {
            what: problem.to_string(),
            remedy: problem.remedy(),
        });
    Ok(PublicationStatus {
        name,
        problems: problems.collect(),
    })
}

async fn quarantine(sql: &Sql) -> Result<Option<QuarantineStatus>> {
    let looking = async {
        let events = quarantined::count(sql).await?;
        let keys = if events == 0 {
            Vec::new()
        } else {
            quarantined::first_keys(sql, KEYS_NAMED).await?
        };
        Ok::<_, Error>((events, keys))
    };
    match looking.await {
        Ok((events, keys)) => {
            let keys = keys.iter().map(|key| BlockedKeyStatus {
                topic: key.group.topic.to_string(),
                ordering_key: key.group.ordering_key.to_string(),
                first_event: key.first.shown(),
                error: key.error.clone(),
            });
            Ok(Some(QuarantineStatus {
                events: events.unsigned_abs(),
                keys: keys.collect(),
            }))
        }
        Err(error) if [Code::SchemaMissing, Code::PrivilegeMissing].contains(&error.code()) => {
            Ok(None)
        }
        Err(error) => Err(error),
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

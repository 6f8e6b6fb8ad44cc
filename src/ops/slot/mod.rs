//! Takes a snapshot of the slot and of everything that affects its state: the row of its relay, the
//! publication and the quarantine. Also defines its JSON form. [`change`] creates, drops and advances the
//! slot.

pub(crate) mod change;
mod publication;
mod quarantine;

use std::time::{Duration, Instant};

use decoder::Lsn;
use serde::Serialize;
use slot_manager::health::{
    self, Observation, RecordedPosition, SlotObservation, Thresholds, Viewer,
};
use slot_manager::retention::{self, WalHolder};
use slot_manager::{Cluster, Finding, Severity, Slot, SlotName, cluster, slots};

pub(crate) use self::publication::PublicationStatus;
pub(crate) use self::quarantine::QuarantineStatus;
use crate::condition::{self, State, StateFacts, Verdict};
use crate::error::{Code, Result};
use crate::ops::pending::{self, PendingEvents};
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::capture_record::{self as captures, CaptureRecord};
use crate::store::relay_row::shown::{self, RelayRow};

/// Only transactions older than this are reported. Younger transactions also hold back WAL, but not for
/// long.
const HOLDERS_OLDER_THAN: Duration = Duration::from_secs(30);

/// The state of the slot at one moment.
#[derive(Debug)]
pub(crate) struct SlotSnapshot {
    pub(crate) name: SlotName,
    pub(crate) cluster: Cluster,
    pub(crate) at: Instant,
    /// The slot; `None` if no slot with this name exists.
    pub(crate) slot: Option<Slot>,
    pub(crate) verdict: Verdict,
    pub(crate) publication: PublicationStatus,
    /// The events in quarantine; `None` if the relay's tables are missing or may not be read.
    pub(crate) quarantine: Option<QuarantineStatus>,
    /// The events that wait; `None` if unknown.
    pub(crate) pending: Option<PendingEvents>,
    /// Transactions and slots that hold back WAL, oldest first.
    pub(crate) holders: Vec<WalHolder>,
    pub(crate) relay: Option<RelayRow>,
    /// A warning if the slot is older than the publication.
    pub(crate) warning: Option<Finding>,
    /// Rates since the previous snapshot.
    pub(crate) rates: Option<Rates>,
    pub(crate) time_to_loss: Option<Duration>,
}

/// Bytes of WAL per second since the previous snapshot.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Rates {
    /// Written by the server.
    pub(crate) written_bytes_per_second: u64,
    /// Confirmed by the reader.
    pub(crate) confirmed_bytes_per_second: u64,
}

/// The output of `slot show --json`; programs depend on it.
#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum SlotJson<'a> {
    Missing {
        slot_name: &'a SlotName,
        #[serde(flatten)]
        verdict: VerdictJson<'a>,
    },
    Found(Box<FoundSlot<'a>>),
}

/// The columns of the slot, plus the fields below.
#[derive(Serialize)]
pub(crate) struct FoundSlot<'a> {
    #[serde(flatten)]
    slot: &'a Slot,
    #[serde(flatten)]
    verdict: VerdictJson<'a>,
    lag_seconds: Option<f64>,
    pending_events: Option<u64>,
    held_back_by: &'a [WalHolder],
    relay: &'a Option<RelayRow>,
    warning: &'a Option<Finding>,
    #[serde(flatten)]
    rates: Option<Rates>,
    time_to_loss_seconds: Option<f64>,
}

/// The state in the output of `--json`, the same for all commands and the page.
#[derive(Debug, Serialize)]
pub(crate) struct VerdictJson<'a> {
    state: State,
    severity: Severity,
    meaning: &'a str,
    remedy: Option<&'a str>,
    /// Time until the relay has caught up, if known.
    caught_up_in_seconds: Option<f64>,
}

impl<'a> VerdictJson<'a> {
    pub(crate) fn of(verdict: &'a Verdict) -> Self {
        Self {
            state: verdict.state,
            severity: verdict.severity,
            meaning: &verdict.meaning,
            remedy: verdict.remedy.as_deref(),
            caught_up_in_seconds: verdict.caught_up_in.map(|time| time.as_secs_f64()),
        }
    }
}

impl SlotSnapshot {
    /// Takes a snapshot, and computes the rates since the previous snapshot.
    ///
    /// # Errors
    /// `slot-foreign` when the name belongs to a slot that no relay can use; database errors.
    pub(crate) async fn take(
        sql: &Sql,
        settings: &Settings,
        thresholds: &Thresholds,
        before: Option<&SlotSnapshot>,
    ) -> Result<Self> {
        let name = settings.slot.clone();
        let cluster = cluster::inspect(sql).await?;
        let relay = shown::read(sql, &name).await?;
        let slot = slots::find(sql, &name).await?;
        let at = Instant::now();
        let (mut pending, mut holders) = (None, Vec::new());
        if let Some(slot) = &slot {
            slot.require_ours()?;
            pending = pending::read(sql, settings).await?;
            holders = retention::holders(sql, &name, HOLDERS_OLDER_THAN).await?;
        }
        let earlier = before.and_then(|before| {
            Some(SlotObservation {
                slot: before.slot.as_ref()?,
                ago: at.duration_since(before.at),
            })
        });
        let records = capture_records(sql).await?;
        let recorded = match &relay {
            Some(relay) if relay.has_confirmed() => relay.position(),
            _ => RecordedPosition::unused(cluster.origin(), captures::since_lsn(&records, &name)),
        };
        let warning = slot
            .as_ref()
            .and_then(|slot| before_publication(slot, &records));
        let observation = Observation {
            slot: slot.as_ref(),
            viewer: Viewer::Outside,
            time_lag: pending.and_then(|pending| pending.oldest),
            origin: cluster.origin(),
            recorded: recorded.as_ref(),
        };
        let health = health::judge(&observation, thresholds);
        let publication = publication::read(sql, settings).await?;
        let quarantine = quarantine::read(sql).await?;
        let verdict = condition::decide(StateFacts {
            health: Some(&health),
            lag_bytes: slot.as_ref().and_then(|slot| slot.lag_bytes),
            oldest: observation.time_lag,
            ..facts_around(relay.as_ref(), &publication, quarantine.as_ref())
        });
        let rates = slot
            .as_ref()
            .zip(earlier)
            .and_then(|(slot, earlier)| Rates::of(slot, earlier));
        let time_to_loss = slot
            .as_ref()
            .zip(earlier)
            .and_then(|(slot, earlier)| health::time_to_loss(slot, earlier));
        Ok(Self {
            name,
            cluster,
            at,
            slot,
            verdict,
            publication,
            quarantine,
            pending,
            holders,
            relay,
            warning,
            rates,
            time_to_loss,
        })
    }

    /// The snapshot as one JSON object. For a missing slot it has only the name and the state.
    pub(crate) fn json(&self) -> SlotJson<'_> {
        let verdict = VerdictJson::of(&self.verdict);
        let Some(slot) = &self.slot else {
            return SlotJson::Missing {
                slot_name: &self.name,
                verdict,
            };
        };
        SlotJson::Found(Box::new(FoundSlot {
            slot,
            verdict,
            lag_seconds: self.lag_time().map(|lag| lag.as_secs_f64()),
            pending_events: self.pending.map(|pending| pending.events),
            held_back_by: &self.holders,
            relay: &self.relay,
            warning: &self.warning,
            rates: self.rates,
            time_to_loss_seconds: self.time_to_loss.map(|time| time.as_secs_f64()),
        }))
    }

    /// Age of the oldest undelivered event, if known.
    pub(crate) fn lag_time(&self) -> Option<Duration> {
        self.pending.and_then(|pending| pending.oldest)
    }
}

/// Reads the capture records. Returns none if the relay's tables do not exist or this role may not read
/// them.
async fn capture_records(sql: &Sql) -> Result<Vec<CaptureRecord>> {
    match captures::read(&**sql).await {
        Err(error) if [Code::SchemaMissing, Code::PrivilegeMissing].contains(&error.code()) => {
            Ok(Vec::new())
        }
        read => read,
    }
}

/// The facts that do not come from the slot itself.
fn facts_around<'a>(
    relay: Option<&'a RelayRow>,
    publication: &'a PublicationStatus,
    quarantine: Option<&QuarantineStatus>,
) -> StateFacts<'a> {
    let fault = publication.problems.first();
    StateFacts {
        condition: relay.and_then(|relay| relay.condition.as_ref()),
        is_recovering: relay.is_some_and(|relay| relay.recovering.is_some()),
        publication: fault.map(|fault| (fault.what.as_str(), fault.remedy.as_str())),
        has_quarantine: quarantine.is_some_and(|quarantine| !quarantine.keys.is_empty()),
        ..StateFacts::default()
    }
}

/// Warns if the slot is older than the publication: its confirmed position lies before the position
/// at which capturing began.
pub(crate) fn before_publication(slot: &Slot, records: &[CaptureRecord]) -> Option<Finding> {
    let name = &slot.slot_name;
    let of_slot = records.iter().filter(|known| known.slot == *name);
    let since = of_slot.filter_map(|known| known.since_lsn).max()?;
    let at = slot.confirmed_flush_lsn.filter(|at| *at < since)?;
    Some(Finding {
        code: "slot-before-publication",
        severity: Severity::Warning,
        what: format!(
            "slot {name} begins at {at}, but the publication and capturing began at {since}: the relay \
             does not deliver rows that were committed in between"
        ),
        remedy: Some(
            "if these rows must be delivered, set `start = all` for the first start: the relay then \
             publishes every older row of the tables; otherwise start the relay, which passes them"
                .to_owned(),
        ),
    })
}

impl Rates {
    fn of(slot: &Slot, earlier: SlotObservation<'_>) -> Option<Self> {
        let seconds = earlier.ago.as_secs_f64();
        let rate = |now: Option<Lsn>, before: Option<Lsn>| {
            let bytes = now?.bytes_since(before?).unwrap_or(0);
            #[expect(
                clippy::cast_precision_loss,
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a rate for people; never negative"
            )]
            let rate = (bytes as f64 / seconds) as u64;
            Some(rate)
        };
        (seconds > 0.0).then_some(())?;
        Some(Self {
            written_bytes_per_second: rate(slot.server_lsn, earlier.slot.server_lsn)?,
            confirmed_bytes_per_second: rate(
                slot.confirmed_flush_lsn,
                earlier.slot.confirmed_flush_lsn,
            )?,
        })
    }
}

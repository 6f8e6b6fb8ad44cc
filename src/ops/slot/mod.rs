//! Takes a snapshot of the slot and of everything that affects its state: the row of its relay, the
//! publication and the quarantine. Also defines its JSON form. [`change`] creates, drops and advances the
//! slot.

pub(crate) mod change;
mod judgement;
mod publication;
mod quarantine;

use std::time::{Duration, Instant};

use decoder::Lsn;
use serde::Serialize;
use slot_manager::health::{self, SlotObservation, Thresholds};
use slot_manager::retention::{self, WalHolder};
use slot_manager::{Cluster, Finding, Severity, Slot, SlotName, cluster, slots};

use self::judgement::CommandFacts;
pub(crate) use self::publication::PublicationStatus;
pub(crate) use self::quarantine::{BlockedKeyStatus, QuarantineStatus};
use crate::capture::claim;
use crate::condition::{Condition, State, Verdict};
use crate::error::{Code, Error, Result};
use crate::ops::pending::{self, AgeClock, EventAge, PendingEvents};
use crate::postgres::{Sql, naming_locks, on_standby};
use crate::recovery::foreign_records::ForeignRecords;
use crate::settings::Settings;
use crate::store::capture_record::{self as captures, CaptureRecord};
use crate::store::relay_row::shown::{self, RelayRow};

/// Minimum age of a transaction that the snapshot reports. Younger transactions also hold back WAL, but
/// usually not for long.
const HOLDERS_OLDER_THAN: Duration = Duration::from_secs(30);

/// How long a snapshot waits for a lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

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
    /// The events in quarantine; `None` if the relay's tables are missing or locked, or if this role lacks
    /// the privilege to read them.
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
    /// The time from which `lag_seconds` is measured: `commit` or `occurred_at`.
    lag_seconds_by: Option<AgeClock>,
    pending_events: Option<u64>,
    /// Whether `pending_events` may be too low, because the command has read only a part of a table. The rest of the
    /// table may contain waiting events, and some of them may be older than the counted ones. `None` if
    /// `pending_events` is unknown.
    pending_is_lower_bound: Option<bool>,
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
    /// `postgres-standby` if the slot is missing on a standby server; `slot-foreign` when the name belongs to
    /// a slot that no relay can use; `lock-wait` if a table of the relay is locked; database errors.
    pub(crate) async fn take(
        sql: &Sql,
        settings: &Settings,
        thresholds: &Thresholds,
        before: Option<&SlotSnapshot>,
    ) -> Result<Self> {
        // A snapshot must not hang, for example behind a migration that holds a lock on an outbox table.
        sql.limit_lock_waits(LOCK_TIMEOUT).await?;
        let reading = Self::read(sql, settings, thresholds, before);
        naming_locks(sql, LOCK_TIMEOUT, reading).await
    }

    async fn read(
        sql: &Sql,
        settings: &Settings,
        thresholds: &Thresholds,
        before: Option<&SlotSnapshot>,
    ) -> Result<Self> {
        let name = settings.slot.clone();
        let cluster = cluster::inspect(sql).await?;
        let mut relay = shown::read(sql, &name).await?;
        let mut slot = slots::find(sql, &name).await?;
        if slot.is_none() && cluster.in_recovery {
            // The slot is missing here because it and its relay are on the primary.
            return Err(on_standby(sql));
        }
        let at = Instant::now();
        let (mut pending, mut holders) = (None, Vec::new());
        if let Some(slot) = &mut slot {
            slot.require_ours()?;
            let updated_ago = relay.as_ref().map(|relay| relay.updated_ago);
            slot.inactive_for = slot.inactive_for.or(updated_ago.filter(|_| !slot.active));
            pending = pending::read(sql, settings).await?;
            holders = retention::holders(sql, &name, HOLDERS_OLDER_THAN).await?;
        }
        let records = capture_records(sql).await?;
        let foreign = later_records(sql, &name, &cluster).await?;
        let publication = publication::read(sql, settings).await?;
        let quarantine = quarantine::read(sql).await?;
        let mut facts = CommandFacts {
            slot: slot.as_ref(),
            origin: cluster.origin(),
            relay: relay.as_ref(),
            records: &records,
            pending,
            publication: &publication,
            quarantine: quarantine.as_ref(),
            foreign: foreign.as_ref(),
        };
        let (mut verdict, holds) = facts.judge(&name, thresholds);
        if let Some(age) = relay.as_ref().filter(|_| holds).and_then(known_age) {
            // Prefer the age that the relay has recorded. The relay knows the commit times of the events that it
            // has read.
            if let Some(pending) = &mut pending {
                pending.oldest = Some(EventAge::by_commit(age));
            }
            facts.pending = pending;
            (verdict, _) = facts.judge(&name, thresholds);
        }
        if let Some(relay) = relay.as_mut().filter(|_| !holds) {
            relay.condition = None;
        }
        if verdict.state == State::Missing {
            name_owner(sql, settings, &records, &mut verdict).await;
        }
        let warning = slot
            .as_ref()
            .and_then(|slot| before_publication(slot, &records));
        let earlier = before.and_then(|before| before.observed(at));
        let both = slot.as_ref().zip(earlier);
        let rates = both.and_then(|(slot, earlier)| Rates::of(slot, earlier));
        let time_to_loss = both.and_then(|(slot, earlier)| health::time_to_loss(slot, earlier));
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

    /// Returns the snapshot as one JSON object. For a missing slot it has only the name and the state.
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
            lag_seconds: self.oldest().map(|oldest| oldest.age.as_secs_f64()),
            lag_seconds_by: self.oldest().map(|oldest| oldest.by),
            pending_events: self.pending.map(|pending| pending.events),
            pending_is_lower_bound: self.pending.map(|pending| pending.is_lower_bound),
            held_back_by: &self.holders,
            relay: &self.relay,
            warning: &self.warning,
            rates: self.rates,
            time_to_loss_seconds: self.time_to_loss.map(|time| time.as_secs_f64()),
        }))
    }

    /// Returns the slot as this snapshot found it, for a comparison with a later snapshot.
    fn observed(&self, at: Instant) -> Option<SlotObservation<'_>> {
        Some(SlotObservation {
            slot: self.slot.as_ref()?,
            ago: at.duration_since(self.at),
        })
    }

    /// Returns the number of events that wait for failing topics, according to the relay's latest record.
    pub(crate) fn waiting_for_topics(&self) -> u64 {
        let condition = self.relay.as_ref().and_then(|row| row.condition.as_ref());
        condition.map_or(0, Condition::waiting_for_topics)
    }

    /// Returns the age of the oldest undelivered event, if known; see [`PendingEvents`].
    pub(crate) fn oldest(&self) -> Option<EventAge> {
        self.pending.and_then(|pending| pending.oldest)
    }
}

/// The age of the oldest undelivered event, according to the relay's latest record. `None` if the relay has
/// read no such event. Also `None` during a recovery, because the relay does not know when the rows that it
/// reads from the tables were committed.
fn known_age(relay: &RelayRow) -> Option<Duration> {
    let said = relay.condition.as_ref();
    let said = said.filter(|said| said.state != State::Recovering && relay.recovering.is_none());
    let seconds = said?.oldest_seconds.filter(|seconds| *seconds > 0.0);
    Duration::try_from_secs_f64(seconds?).ok()
}

/// Reads the capture records. Returns an empty list if they cannot be read, as [`unless_unknown`] says.
async fn capture_records(sql: &Sql) -> Result<Vec<CaptureRecord>> {
    unless_unknown(captures::read(&**sql).await)
}

/// If another slot captures the tables, adds to the verdict on a missing slot that a relay would not start.
async fn name_owner(
    sql: &Sql,
    settings: &Settings,
    records: &[CaptureRecord],
    verdict: &mut Verdict,
) {
    let Ok(found) = claim::find_tables(sql, &settings.tables).await else {
        return;
    };
    if let Err(error) = claim::refuse_others(&found, records, &settings.slot) {
        verdict.meaning += &format!("; a relay would not start: {error}");
        verdict.remedy = Some(error.hint_text().to_owned());
    }
}

/// Returns the error with which a relay refuses records of a later state of the server. Returns `None` if the records
/// belong to this state, or cannot be read. Ignores records of another cluster, which the slot's health already shows.
async fn later_records(sql: &Sql, name: &SlotName, cluster: &Cluster) -> Result<Option<Error>> {
    let foreign = unless_unknown(ForeignRecords::find(sql, name, None, cluster).await)?;
    Ok(foreign.map(|foreign| foreign.error(name)))
}

/// Returns the default value if the relay's tables cannot be read now: they do not exist or are locked, this role lacks
/// the privilege to read them, or the disk is full.
fn unless_unknown<T: Default>(read: Result<T>) -> Result<T> {
    let unknown = [
        Code::SchemaMissing,
        Code::PrivilegeMissing,
        Code::PostgresTimeout,
        Code::DiskFull,
    ];
    match read {
        Err(error) if unknown.contains(&error.code()) => Ok(T::default()),
        read => read,
    }
}

/// Maximum number of tables that a warning names.
const TABLES_NAMED: usize = 5;

/// Warns if the slot is older than the publication of some tables, and names these tables. The slot is older
/// than the publication of a table if its confirmed position is before the position at which the capture of
/// the table began.
pub(crate) fn before_publication(slot: &Slot, records: &[CaptureRecord]) -> Option<Finding> {
    let name = &slot.slot_name;
    let at = slot.confirmed_flush_lsn?;
    let of_slot = records.iter().filter(|known| known.slot == *name);
    let since = of_slot.filter_map(|known| Some((known.since_lsn?, known.table.to_string())));
    let mut later: Vec<_> = since.filter(|(since, _)| at < *since).collect();
    later.sort();
    let of_tables = match &later[..] {
        [] => return None,
        [(_, table)] => table.as_str(),
        _ => "these tables",
    };
    Some(Finding {
        code: "slot-before-publication",
        severity: Severity::Warning,
        what: format!(
            "slot {name} begins at {at}, but the publication and capturing of {}: the relay does not deliver rows of \
             {of_tables} that were committed in between",
            beginnings(&later)
        ),
        remedy: Some(
            "if these rows must be delivered, set `start = all` for the first start: the relay then \
             publishes every older row of the tables; otherwise start the relay, which skips them"
                .to_owned(),
        ),
    })
}

/// Ends a sentence that begins with "capturing of": `a.b, a.c began at 0/10, of a.d at 0/20 and of 2 more tables by
/// 0/30`. Names at most [`TABLES_NAMED`] tables. `later` is sorted.
fn beginnings(later: &[(Lsn, String)]) -> String {
    let (named, more) = later.split_at(later.len().min(TABLES_NAMED));
    let mut parts = Vec::new();
    for group in named.chunk_by(|one, next| one.0 == next.0) {
        let tables: Vec<&str> = group.iter().map(|(_, table)| table.as_str()).collect();
        let verb = if parts.is_empty() { "began at" } else { "at" };
        parts.push(format!("{} {verb} {}", tables.join(", "), group[0].0));
    }
    if let Some((last, _)) = more.last() {
        let plural = if more.len() == 1 { "" } else { "s" };
        parts.push(format!("{} more table{plural} by {last}", more.len()));
    }
    match parts.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and of {last}", rest.join(", of ")),
        _ => parts.concat(),
    }
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

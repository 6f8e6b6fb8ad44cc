//! The state of the slot at one moment, with what its relay says, and its JSON form.

use std::time::{Duration, Instant};

use decoder::Lsn;
use serde::Serialize;
use slot_manager::health::{
    self, Observation, RecordedPosition, SlotObservation, Thresholds, Viewer,
};
use slot_manager::retention::{self, WalHolder};
use slot_manager::{Cluster, DatabaseOrigin, Health, Severity, Slot, SlotName, cluster, slots};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::PgLsn;

use super::pending::{self, PendingEvents};
use super::verdict::{self, Verdict};
use crate::condition::Condition;
use crate::error::Result;
use crate::postgres::Sql;
use crate::settings::Settings;

/// A relay that is held up says so every 30 seconds.
const SAID_FOR: Duration = Duration::from_secs(75);

/// Transactions younger than this also hold back WAL, but are not worth reporting.
const HOLDERS_OLDER_THAN: Duration = Duration::from_secs(30);

/// One look at the slot.
#[derive(Debug)]
pub(crate) struct SlotLook {
    pub(crate) name: SlotName,
    pub(crate) cluster: Cluster,
    pub(crate) at: Instant,
    /// `None`: no slot with this name exists.
    pub(crate) slot: Option<Slot>,
    pub(crate) health: Health,
    /// `None`: unknown.
    pub(crate) pending: Option<PendingEvents>,
    /// Transactions and slots that hold back WAL, oldest first.
    pub(crate) holders: Vec<WalHolder>,
    pub(crate) relay: Option<RelayRow>,
    /// Rates since the previous look.
    pub(crate) rates: Option<Rates>,
    pub(crate) time_to_loss: Option<Duration>,
}

/// The relay's row in `outbox.relay`.
#[derive(Debug, Serialize)]
pub(crate) struct RelayRow {
    pub(crate) instance: String,
    /// RFC 3339, UTC.
    pub(crate) since: String,
    pub(crate) system_identifier: String,
    #[serde(skip)]
    database_oid: Option<u32>,
    #[serde(skip)]
    confirmed_lsn: Option<Lsn>,
    #[serde(skip)]
    confirmed_is_final: bool,
    /// Why a recovery is due or running; absent if none is.
    pub(crate) recovering: Option<String>,
    /// Which events get a row in outbox.dispatch: `full` or `exceptions`.
    pub(crate) dispatch: String,
    /// What holds the delivery up, as the relay said a moment ago; `None` if nothing does.
    pub(crate) condition: Option<Condition>,
}

/// Bytes of WAL per second since the previous look.
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
        health: &'a Health,
    },
    Found(Box<FoundSlot<'a>>),
}

/// The columns of the slot, plus the fields below.
#[derive(Serialize)]
pub(crate) struct FoundSlot<'a> {
    #[serde(flatten)]
    slot: &'a Slot,
    health: &'static str,
    severity: Severity,
    remedy: Option<String>,
    lag_seconds: Option<f64>,
    pending_events: Option<u64>,
    held_back_by: &'a [WalHolder],
    relay: &'a Option<RelayRow>,
    #[serde(flatten)]
    rates: Option<Rates>,
    time_to_loss_seconds: Option<f64>,
}

const RELAY: &str = "\
    select instance, to_char(since at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"'), \
           system_identifier, confirmed_lsn, confirmed_is_final, recovering, dispatch, database_oid, \
           condition::text, extract(epoch from clock_timestamp() - condition_at)::float8 \
    from outbox.relay where slot = $1";

impl SlotLook {
    /// Looks at the slot, and compares it with the previous look.
    ///
    /// # Errors
    /// `slot-foreign` when the name belongs to a slot that no relay can use.
    pub(crate) async fn take(
        sql: &Sql,
        settings: &Settings,
        thresholds: &Thresholds,
        before: Option<&SlotLook>,
    ) -> Result<Self> {
        let name = settings.slot.clone();
        let cluster = cluster::inspect(sql).await?;
        let relay = relay_row(sql, &name).await?;
        let slot = slots::find(sql, &name).await?;
        let at = Instant::now();
        let (mut pending, mut holders) = (None, Vec::new());
        if let Some(slot) = &slot {
            slot.require_ours()?;
            pending = pending::look(sql, settings).await?;
            holders = retention::holders(sql, &name, HOLDERS_OLDER_THAN).await?;
        }
        let earlier = before.and_then(|before| {
            Some(SlotObservation {
                slot: before.slot.as_ref()?,
                ago: at.duration_since(before.at),
            })
        });
        let recorded = relay.as_ref().and_then(RelayRow::position);
        let observation = Observation {
            slot: slot.as_ref(),
            earlier,
            viewer: Viewer::Outside,
            time_lag: pending.and_then(|pending| pending.oldest),
            origin: cluster.origin(),
            recorded: recorded.as_ref(),
        };
        let health = health::judge(&observation, thresholds);
        let rates = slot
            .as_ref()
            .zip(earlier)
            .and_then(|(slot, earlier)| Rates::of(slot, earlier));
        let time_to_loss = slot
            .as_ref()
            .and_then(|slot| health::headroom(slot, earlier).time_to_loss);
        Ok(Self {
            name,
            cluster,
            at,
            slot,
            health,
            pending,
            holders,
            relay,
            rates,
            time_to_loss,
        })
    }

    /// The health of the slot, or what holds up the relay that reads it.
    pub(crate) fn verdict(&self) -> Verdict {
        let relay = self.relay.as_ref();
        let condition = relay.and_then(|relay| relay.condition.as_ref());
        verdict::of(&self.health, condition)
    }

    /// One JSON object; for a missing slot it has only name and health.
    pub(crate) fn json(&self) -> SlotJson<'_> {
        let health = &self.health;
        let Some(slot) = &self.slot else {
            return SlotJson::Missing {
                slot_name: &self.name,
                health,
            };
        };
        let verdict = self.verdict();
        SlotJson::Found(Box::new(FoundSlot {
            slot,
            health: verdict.name,
            severity: verdict.severity,
            remedy: verdict.remedy,
            lag_seconds: self.lag_time().map(|lag| lag.as_secs_f64()),
            pending_events: self.pending.map(|pending| pending.events),
            held_back_by: &self.holders,
            relay: &self.relay,
            rates: self.rates,
            time_to_loss_seconds: self.time_to_loss.map(|time| time.as_secs_f64()),
        }))
    }

    /// Age of the oldest undelivered event, if known.
    pub(crate) fn lag_time(&self) -> Option<Duration> {
        self.pending.and_then(|pending| pending.oldest)
    }
}

async fn relay_row(sql: &Sql, slot: &SlotName) -> Result<Option<RelayRow>> {
    match sql.query_opt(RELAY, &[&slot.as_str()]).await {
        Ok(row) => Ok(row.map(|row| {
            let confirmed: Option<PgLsn> = row.get(3);
            RelayRow {
                instance: row.get(0),
                since: row.get(1),
                system_identifier: row.get(2),
                database_oid: row.get(7),
                confirmed_lsn: confirmed.map(|lsn| Lsn::new(lsn.into())),
                confirmed_is_final: row.get(4),
                recovering: row.get(5),
                dispatch: row.get(6),
                condition: said(row.get(8), row.get(9)),
            }
        })),
        Err(error) if not_to_be_read(&error) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The condition that the relay wrote this many seconds ago, unless it would have written again since.
fn said(json: Option<&str>, seconds_ago: Option<f64>) -> Option<Condition> {
    let mut condition: Condition = serde_json::from_str(json?).ok()?;
    let ago = seconds_ago.filter(|ago| *ago < SAID_FOR.as_secs_f64())?;
    condition.for_seconds += ago;
    Some(condition)
}

impl RelayRow {
    fn position(&self) -> Option<RecordedPosition> {
        Some(RecordedPosition {
            origin: DatabaseOrigin {
                system_identifier: self.system_identifier.parse().ok()?,
                database_oid: self.database_oid,
            },
            confirmed_lsn: self.confirmed_lsn,
            is_final: self.confirmed_is_final,
        })
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

/// The position up to which the relay of this slot has confirmed, if one ever ran. If it did, a missing
/// slot means a gap. `None` also when the relay's tables do not exist or this role may not read them.
pub(crate) async fn served_before(sql: &Sql, slot: &SlotName) -> Result<Option<Lsn>> {
    const STATEMENT: &str = "select confirmed_lsn from outbox.relay where slot = $1";
    match sql.query_opt(STATEMENT, &[&slot.as_str()]).await {
        Ok(row) => {
            let confirmed: Option<PgLsn> = row.and_then(|row| row.get(0));
            Ok(confirmed.map(|lsn| Lsn::new(lsn.into())))
        }
        Err(error) if not_to_be_read(&error) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Whether a statement failed because the relay's tables do not exist or this role may not read them.
fn not_to_be_read(error: &tokio_postgres::Error) -> bool {
    let states = [
        SqlState::UNDEFINED_TABLE,
        SqlState::INVALID_SCHEMA_NAME,
        SqlState::UNDEFINED_COLUMN,
        SqlState::INSUFFICIENT_PRIVILEGE,
    ];
    error.code().is_some_and(|code| states.contains(code))
}

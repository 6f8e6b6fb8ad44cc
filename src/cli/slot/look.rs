//! Gathers the state of the slot at one moment, and defines its JSON form.

use std::time::{Duration, Instant};

use decoder::Lsn;
use serde::Serialize;
use slot_manager::health::{
    self, Observation, RecordedPosition, SlotObservation, Thresholds, Viewer,
};
use slot_manager::retention::{self, WalHolder};
use slot_manager::{Cluster, DatabaseOrigin, Health, Severity, Slot, SlotName, cluster, slots};
use tokio_postgres::types::PgLsn;

use super::not_to_be_read;
use super::pending::{self, PendingEvents};
use crate::error::Result;
use crate::postgres::Sql;
use crate::settings::Settings;

/// Transactions younger than this also hold back WAL, but are not worth reporting.
const HOLDERS_OLDER_THAN: Duration = Duration::from_secs(30);

/// One look at the slot.
#[derive(Debug)]
pub(super) struct Look {
    pub(super) name: SlotName,
    pub(super) cluster: Cluster,
    pub(super) at: Instant,
    /// `None`: no slot with this name exists.
    pub(super) slot: Option<Slot>,
    pub(super) health: Health,
    /// `None`: unknown.
    pub(super) pending: Option<PendingEvents>,
    /// Transactions and slots that hold back WAL, oldest first.
    pub(super) holders: Vec<WalHolder>,
    pub(super) relay: Option<RelayRow>,
    /// Rates since the previous look.
    pub(super) rates: Option<Rates>,
    pub(super) time_to_loss: Option<Duration>,
}

/// The relay's row in `outbox.relay`.
#[derive(Debug, Serialize)]
pub(super) struct RelayRow {
    pub(super) instance: String,
    /// RFC 3339, UTC.
    pub(super) since: String,
    pub(super) system_identifier: String,
    #[serde(skip)]
    database_oid: Option<u32>,
    #[serde(skip)]
    confirmed_lsn: Option<Lsn>,
    #[serde(skip)]
    confirmed_is_final: bool,
    /// Why a recovery is due or running; absent if none is.
    pub(super) recovering: Option<String>,
    /// Which events get a row in outbox.dispatch: `full` or `exceptions`.
    pub(super) dispatch: String,
}

/// Bytes of WAL per second since the previous look.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Rates {
    /// Written by the server.
    pub(super) written_bytes_per_second: u64,
    /// Confirmed by the reader.
    pub(super) confirmed_bytes_per_second: u64,
}

/// The output of `slot show --json`; programs depend on it.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum SlotJson<'a> {
    Missing {
        slot_name: &'a SlotName,
        health: &'a Health,
    },
    Found(Box<FoundSlot<'a>>),
}

/// The columns of the slot, plus the fields below.
#[derive(Serialize)]
pub(super) struct FoundSlot<'a> {
    #[serde(flatten)]
    slot: &'a Slot,
    health: &'a Health,
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
           system_identifier, confirmed_lsn, confirmed_is_final, recovering, dispatch, database_oid \
    from outbox.relay where slot = $1";

impl Look {
    /// Looks at the slot, and compares it with the previous look.
    ///
    /// # Errors
    /// `slot-foreign` when the name belongs to a slot that no relay can use.
    pub(super) async fn take(
        sql: &Sql,
        settings: &Settings,
        thresholds: &Thresholds,
        before: Option<&Look>,
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

    /// One JSON object; for a missing slot it has only name and health.
    pub(super) fn json(&self) -> SlotJson<'_> {
        let health = &self.health;
        let Some(slot) = &self.slot else {
            return SlotJson::Missing {
                slot_name: &self.name,
                health,
            };
        };
        SlotJson::Found(Box::new(FoundSlot {
            slot,
            health,
            severity: health.severity(),
            remedy: health.remedy(),
            lag_seconds: self.lag_time().map(|lag| lag.as_secs_f64()),
            pending_events: self.pending.map(|pending| pending.events),
            held_back_by: &self.holders,
            relay: &self.relay,
            rates: self.rates,
            time_to_loss_seconds: self.time_to_loss.map(|time| time.as_secs_f64()),
        }))
    }

    /// Age of the oldest undelivered event, if known.
    pub(super) fn lag_time(&self) -> Option<Duration> {
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
            }
        })),
        Err(error) if not_to_be_read(&error) => Ok(None),
        Err(error) => Err(error.into()),
    }
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

//! Gathers the state of the slot at one moment, and defines its JSON form.

use std::time::{Duration, Instant};

use decoder::Lsn;
use serde::Serialize;
use slot_manager::health::{self, Observation, SlotObservation, Thresholds, Viewer};
use slot_manager::retention::{self, WalHolder};
use slot_manager::{Cluster, Health, Severity, Slot, SlotName, cluster, slots};

use super::pending::{self, PendingEvents};
use crate::error::Result;
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::relay_row::shown::{self, RelayRow};

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
        let relay = shown::read(sql, &name).await?;
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

//! Creates, drops and advances the slot. After a drop or an advance, PostgreSQL might not stream some events.

use std::time::Duration;

use decoder::Lsn;
use serde::Serialize;
use slot_manager::slots::{self, CreateOptions};
use slot_manager::{Slot, publication};
use tokio_postgres::types::PgLsn;

use crate::error::{Code, Error, Result};
use crate::ops::{capture, pending};
use crate::postgres::{Sql, require_primary};
use crate::settings::Settings;
use crate::store::relay_row;
use crate::store::relay_row::shown::served_before;

/// The events and the WAL that the slot does not stream because of a drop or an advance. The output of
/// `slot drop --json` and `slot advance --json`; programs depend on it.
#[derive(Debug, Serialize)]
pub(crate) struct LeftOut {
    pub(crate) slot_name: String,
    /// The slot's confirmed position, before a drop or after an advance.
    #[serde(serialize_with = "as_text")]
    pub(crate) confirmed_flush_lsn: Lsn,
    /// Bytes of WAL that were not confirmed, up to the server's position or the target of the
    /// advance.
    pub(crate) lag_bytes: u64,
    /// Number of events without a record; `None` if unknown.
    pub(crate) pending_events: Option<u64>,
    /// Whether there may be more events without a record than `pending_events`, because the command has read only a
    /// part of the tables. `None` if `pending_events` is `None`.
    pub(crate) pending_is_lower_bound: Option<bool>,
}

/// Creates the slot, and records that its relay captures the tables. Returns the position at which the slot
/// begins. With `although_lost`, creates the slot even if the relay has lost an earlier slot of this name.
///
/// # Errors
/// `postgres-standby`; `publication-missing`; `slot-missing` if an earlier slot is lost; `slot-exists`;
/// `table-captured`; `slot-busy` if running transactions last longer than `wait`; database errors.
pub(crate) async fn create(
    sql: &Sql,
    settings: &Settings,
    wait: Duration,
    although_lost: bool,
) -> Result<Lsn> {
    require_primary(sql).await?;
    let name = &settings.slot;
    let state = publication::inspect(sql, &settings.publication, &settings.captured()).await?;
    if state.publication.is_none() {
        let what = format!("publication {} does not exist", settings.publication);
        return Err(Error::new(Code::PublicationMissing, what).hint(
            "create the publication first, with `postrider init --apply`: rows inserted after the \
             slot and before the publication cannot be streamed",
        ));
    }
    let slot = slots::find(sql, name).await?;
    if let Some(slot) = &slot {
        slot.require_ours()?;
    }
    let missing = slot.is_none();
    if let Some(confirmed) = served_before(sql, name)
        .await?
        .filter(|_| missing && !although_lost)
    {
        let what = format!(
            "slot {name} was confirmed up to {confirmed} and is gone: rows committed between that \
             position and a new slot are not streamed"
        );
        return Err(Error::new(Code::SlotMissing, what).hint(
            "the relay recreates the slot automatically and publishes the unrecorded rows from the tables \
             (`postrider recover --dry-run` lists them); add --yes to create the slot here",
        ));
    }
    let options = CreateOptions {
        failover: settings.slot_failover,
    };
    capture::refuse_others(sql, settings).await?;
    let at = slots::create(sql, name, options, wait).await?;
    capture::from_now_on(sql, settings, "postrider slot create", Some(at)).await?;
    Ok(at)
}

/// A drop of the slot that is prepared, but not carried out yet.
pub(crate) struct SlotDrop {
    /// The events and the WAL that PostgreSQL would not stream because of the drop.
    pub(crate) left_out: LeftOut,
}

impl SlotDrop {
    /// Finds out how many events and how much WAL PostgreSQL would not stream because of a drop. Changes nothing.
    ///
    /// # Errors
    /// `slot-missing`; `slot-foreign`; database errors.
    pub(crate) async fn prepare(sql: &Sql, settings: &Settings) -> Result<Self> {
        let slot = find(sql, settings).await?;
        let left_out = left_out(sql, settings, &slot).await?;
        Ok(Self { left_out })
    }

    /// Drops the slot.
    ///
    /// # Errors
    /// `slot-held` while it is being read; database errors.
    pub(crate) async fn carry_out(self, sql: &Sql, settings: &Settings) -> Result<LeftOut> {
        slots::drop(sql, &settings.slot).await?;
        Ok(self.left_out)
    }
}

/// An advance of the slot that is prepared, but not carried out yet.
pub(crate) struct SlotAdvance {
    /// The events and the WAL that PostgreSQL would not stream because of the advance.
    pub(crate) left_out: LeftOut,
    /// The position to which the slot advances.
    pub(crate) to: Lsn,
}

impl SlotAdvance {
    /// Finds out how many events and how much WAL PostgreSQL would not stream because of an advance. Changes nothing.
    /// Without `to`, the slot advances to the server's current position.
    ///
    /// # Errors
    /// `slot-missing`; `slot-foreign`; database errors.
    pub(crate) async fn prepare(sql: &Sql, settings: &Settings, to: Option<Lsn>) -> Result<Self> {
        let slot = find(sql, settings).await?;
        let mut left_out = left_out(sql, settings, &slot).await?;
        let target = to.or(slot.server_lsn).unwrap_or_default();
        if let Some(bytes) = target.bytes_since(left_out.confirmed_flush_lsn) {
            left_out.lag_bytes = bytes;
        }
        if to.is_some() {
            // The number of events was counted up to the server's position, so it does not apply to `to`.
            (left_out.pending_events, left_out.pending_is_lower_bound) = (None, None);
        }
        Ok(Self {
            left_out,
            to: target,
        })
    }

    /// Advances the slot. Returns what was left out, with the slot's new confirmed position.
    ///
    /// # Errors
    /// `slot-held` while it is being read; database errors.
    pub(crate) async fn carry_out(self, sql: &Sql, settings: &Settings) -> Result<LeftOut> {
        let Self { mut left_out, to } = self;
        let left = PgLsn::from(left_out.confirmed_flush_lsn.as_u64());
        slots::can_advance(sql, &settings.slot, to).await?;
        // Record the slot's old position before advancing the slot. A relay with `dispatch = exceptions`
        // notices the advance only by comparing the slot with the old position.
        relay_row::write_left(sql, &settings.slot, left).await?;
        left_out.confirmed_flush_lsn = slots::advance(sql, &settings.slot, to).await?;
        Ok(left_out)
    }
}

async fn find(sql: &Sql, settings: &Settings) -> Result<Slot> {
    let name = &settings.slot;
    let Some(slot) = slots::find(sql, name).await? else {
        require_primary(sql).await?;
        let missing = Error::new(Code::SlotMissing, format!("there is no slot {name}"));
        return Err(
            missing.hint("`postrider slot list` shows all slots; choose another with --slot")
        );
    };
    slot.require_ours()?;
    Ok(slot)
}

async fn left_out(sql: &Sql, settings: &Settings, slot: &Slot) -> Result<LeftOut> {
    let pending = pending::read(sql, settings).await?;
    Ok(LeftOut {
        slot_name: slot.slot_name.clone(),
        confirmed_flush_lsn: slot.confirmed_flush_lsn.unwrap_or_default(),
        lag_bytes: slot.lag_bytes.unwrap_or_default(),
        pending_events: pending.map(|pending| pending.events),
        pending_is_lower_bound: pending.map(|pending| pending.is_lower_bound),
    })
}

fn as_text<S: serde::Serializer>(lsn: &Lsn, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(lsn)
}

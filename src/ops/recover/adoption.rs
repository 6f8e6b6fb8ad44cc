//! `postrider recover --adopt`: decides whether the relay can continue with the existing slot, and refuses to take
//! tables from a slot that a relay reads.

use decoder::Lsn;
use slot_manager::{SlotName, slots};

use super::preview;
use super::situation::Situation;
use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::settings::Settings;

/// Returns the position from which the relay continues with the existing slot, or `None` if the relay has to recover.
///
/// The relay continues with the slot if all of these conditions hold:
///
/// - The relay's records come from another server or database, and no other slot owns the tables.
/// - A relay could stream from the slot without a recovery.
/// - A recovery would find no row to publish now.
///
/// For example, after `pg_upgrade` the relay keeps the slot if everything was delivered before the upgrade. Keeping the
/// slot loses no row: the slot exists before this function reads the tables, so it streams every row that is committed
/// later.
pub(super) async fn kept_from(situation: &Situation, settings: &Settings) -> Result<Option<Lsn>> {
    if !situation.is_foreign() || situation.owner.is_some() || situation.usable_from.is_none() {
        return Ok(None);
    }
    let waits = preview::any_row_waits(situation, settings).await?;
    Ok(situation.usable_from.filter(|_| !waits))
}

/// Refuses to adopt while a relay reads the slot that owns the tables, because that relay would keep
/// publishing.
pub(super) async fn refuse_a_live_owner(sql: &Sql, owner: &SlotName) -> Result<()> {
    match slots::find(sql, owner).await? {
        Some(slot) if slot.active => Err(Error::new(
            Code::SlotHeld,
            format!("slot \"{owner}\", which owns the tables, is being read"),
        )
        .hint("stop the relay that reads it first; `postrider slot list` shows who that is")),
        Some(_) | None => Ok(()),
    }
}

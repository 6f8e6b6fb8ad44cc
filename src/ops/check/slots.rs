//! Finds slots that look like a relay's slot but have no reader, for example because the setting `slot`
//! was changed.

use slot_manager::{Finding, Severity, Slot, slots};

use crate::error::Result;
use crate::ops::finding::finding_with_remedy;
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::capture_record;
use crate::store::relay_row::shown;

/// Returns a warning for each other slot of this database that a relay could have used, and that nobody
/// reads.
///
/// # Errors
/// Database errors.
pub(super) async fn unread(sql: &Sql, settings: &Settings) -> Result<Vec<Finding>> {
    let unread: Vec<Slot> = slots::list(sql)
        .await?
        .into_iter()
        .filter(is_unread)
        .collect();
    let others = unread
        .iter()
        .filter(|slot| slot.slot_name != settings.slot.as_str());
    let others: Vec<&Slot> = others.collect();
    if others.is_empty() {
        return Ok(Vec::new());
    }
    // The two results only affect the text of the warning. If a statement fails, for example because the tables
    // are missing, treat its result as empty. Other checks report the error.
    let served = shown::served_slots(sql).await.unwrap_or_default();
    let records = capture_record::read(&**sql).await.unwrap_or_default();
    let of_a_relay = |name: &str| {
        served.iter().any(|served| served == name)
            || records.iter().any(|record| record.slot == name)
    };
    let found = others
        .iter()
        .map(|slot| warning(slot, of_a_relay(&slot.slot_name), settings));
    Ok(found.collect())
}

/// Whether a relay in this database could read the slot, and nobody reads it. Ignores synchronised slots,
/// which belong to the primary server, and temporary slots, which end with their session.
fn is_unread(slot: &Slot) -> bool {
    slot.require_ours().is_ok() && !slot.active && !slot.temporary && slot.synced != Some(true)
}

fn warning(slot: &Slot, is_of_a_relay: bool, settings: &Settings) -> Finding {
    let name = &slot.slot_name;
    let whose = if is_of_a_relay {
        format!(
            "a Postrider relay used slot {name}, and now nobody reads it (the setting `slot` is {}): \
             it keeps WAL until it is dropped",
            settings.slot
        )
    } else {
        format!(
            "nobody reads slot {name}, which is in this database and has the plugin pgoutput, as the \
             slots of relays do: it keeps WAL until it is dropped"
        )
    };
    finding_with_remedy(
        Severity::Warning,
        "slot-unread",
        whose,
        format!(
            "if its relay should still run, set POSTRIDER_SLOT={name}; if nobody will read it again: \
             `postrider slot drop --slot {name} --yes`"
        ),
    )
}

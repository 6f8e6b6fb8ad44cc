//! Handles a stream that cannot get past a position in the WAL.
//!
//! The stream gets stuck at one of these rows:
//!
//! - On PostgreSQL 14 to 17: a row that was inserted while the publication did not exist.
//! - A row that PostgreSQL cannot decode or send, because bytes have no equivalent in UTF-8 or a value is
//!   larger than a message of the protocol.
//! - A row that was inserted before a column was renamed, dropped or retyped, if the settings no longer fit that row.
//! - A row that was inserted while the publication left out a column that the relay uses.
//!
//! Another session on the same slot would end at the same position, so only a new slot helps. A recovery
//! (`recovery`) then publishes the unresolved rows from the tables, and sets only the bad row aside. This
//! module marks the slot for recovery, or stops the relay if the relay is not allowed to recover.

use std::sync::atomic::{AtomicU64, Ordering};

use decoder::Lsn;
use slot_manager::{SlotName, cluster};

use super::STATEMENT_TIMEOUT;
use super::publication::PublicationCheck;
use crate::capture::claim;
use crate::capture::table::TableReader;
use crate::error::{Code, Error, Result};
use crate::postgres::{Sql, Target, connect};
use crate::settings::{OnLoss, Settings};
use crate::store::relay_row::{ServedSlot, mark};

/// Whether the next stream would end at the same position in the WAL, for the same reason.
pub(super) fn recurs_at_its_position(error: &Error) -> bool {
    matches!(
        error.code(),
        Code::PublicationMissing | Code::SlotStuck | Code::ColumnMissing | Code::SettingInvalid
    )
}

/// Remembers, across sessions, where PostgreSQL last failed to decode.
#[derive(Debug)]
pub(super) struct StuckPositions {
    /// The slot's position when PostgreSQL last failed to decode. `u64::MAX` before the first failure.
    undecodable_after: AtomicU64,
}

impl StuckPositions {
    pub(super) fn new() -> Self {
        Self {
            undecodable_after: AtomicU64::new(u64::MAX),
        }
    }

    /// Whether `ended`, the error that ended the session, is a decoding failure at a new position. `confirmed` is the
    /// slot's position. This position is new unless the previous decoding failure happened at the same position.
    /// Remembers the position of a decoding failure until the next one.
    ///
    /// After the first failure at a position, the next session streams from the same slot again, because the failure
    /// may be temporary. After the second failure in a row at this position, the relay marks the slot for recovery.
    pub(super) fn is_new(&self, ended: &Error, confirmed: Lsn) -> bool {
        let confirmed = confirmed.as_u64();
        ended.code() == Code::SlotStuck
            && self.undecodable_after.swap(confirmed, Ordering::Relaxed) != confirmed
    }
}

/// Returns the error with which a stuck session ends if the slot is not marked for recovery. The next session
/// streams from the same slot again.
pub(super) fn retry(ended: &Error) -> Error {
    session_end_before_retry(ended, ended.what().to_owned())
}

/// Marks the slot for recovery, and returns the error with which the session ends. Does not mark the slot in these
/// cases:
///
/// - The session ended because the settings do not fit a table in the stream, and they do not fit the current tables
///   either.
/// - The session ended for another reason, and the publication is still wrong.
/// - The relay is not allowed to recover (`slot_on_loss = stop`).
/// - Another relay has taken the slot. That relay handles the problem.
pub(super) async fn mark_for_recovery(
    target: &Target,
    settings: &Settings,
    instance: &str,
    publication: &PublicationCheck,
    ended: Error,
) -> Error {
    let marking = async {
        let sql = connect(target, "postrider", STATEMENT_TIMEOUT).await?;
        if is_of_columns(&ended) && !tables_can_be_mapped(&sql, settings).await? {
            return Ok(None);
        }
        let mut wrong_publication = publication.check(&sql).await.err();
        // A wrong publication usually has to be corrected before the slot is marked. But if rows in the stream lack a
        // column, a corrected publication does not add the column to them. So mark the slot at once in this case.
        let marks_anyway = is_of_columns(&ended) && settings.slot_on_loss == OnLoss::Recover;
        if !marks_anyway && let Some(error) = wrong_publication.take() {
            return Err(error);
        }
        let slot = &settings.slot;
        let what = what_is_stuck(slot, &ended);
        let (replaces_error, error) = match settings.slot_on_loss {
            OnLoss::Stop => {
                let anothers = mark::is_anothers(&sql, slot, instance).await?;
                (!anothers, Error::new(Code::SlotStuck, what))
            }
            OnLoss::Recover => {
                let served = ServedSlot {
                    slot,
                    cluster: &cluster::inspect(&sql).await?,
                    instance,
                };
                let marked = mark::mark_stuck(&sql, served, Code::SlotStuck.name()).await?;
                let stuck = || session_end_before_retry(&ended, what);
                // `marked` is false if another relay has taken the slot. That relay marks the slot if necessary, and
                // this relay must become a standby. But `column-missing` and `setting-invalid` would stop the process.
                // So end the session with an error after which the next session begins, even if the slot is not marked.
                let tries_again = marked || is_of_columns(&ended);
                (tries_again, wrong_publication.unwrap_or_else(stuck))
            }
        };
        Ok(replaces_error.then_some(error))
    };
    let told: Result<Option<Error>> = marking.await;
    match told {
        Ok(Some(stuck)) => stuck,
        Ok(None) if ended.code() == Code::SlotStuck => retry(&ended),
        Ok(None) => ended,
        Err(error) => error,
    }
}

/// Whether the session ended because the stream's description of a table does not fit the settings.
fn is_of_columns(ended: &Error) -> bool {
    matches!(ended.code(), Code::ColumnMissing | Code::SettingInvalid)
}

/// Whether the settings fit the current tables. If not, an operator has to correct the settings.
async fn tables_can_be_mapped(sql: &Sql, settings: &Settings) -> Result<bool> {
    let known = claim::known(sql, &settings.slot, &settings.tables).await?;
    for (table, captured) in settings.tables.iter().zip(&known) {
        let resolving = TableReader::resolve(sql, table, settings.project()?, captured);
        match resolving.await {
            Ok(_) => {}
            Err(error) if is_of_columns(&error) => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

fn what_is_stuck(slot: &SlotName, ended: &Error) -> String {
    match ended.code() {
        Code::SlotStuck => format!(
            "slot \"{slot}\" cannot be read past a position in the WAL that PostgreSQL fails to decode: {}",
            ended.what()
        ),
        Code::ColumnMissing | Code::SettingInvalid => format!(
            "slot \"{slot}\" cannot be read past a row from before its table was altered: {}",
            ended.what()
        ),
        _ => format!(
            "slot \"{slot}\" cannot be read past a row that was inserted while the publication \
             did not exist"
        ),
    }
}

/// Returns the error that ends the session. The next session then retries or creates a new slot.
fn session_end_before_retry(ended: &Error, what: String) -> Error {
    match ended.code() {
        Code::SlotStuck | Code::ColumnMissing | Code::SettingInvalid => {
            Error::new(Code::SlotBusy, what)
                .hint("no action needed: the relay retries, and recreates the slot if necessary")
        }
        _ => Error::new(Code::PublicationGap, what),
    }
}

//! A stream that cannot get past a place in the WAL: on PostgreSQL 14 to 17 where there was no
//! publication, on each major where decoding fails.
//!
//! Another session on the same slot ends at the same place. Only a new slot helps, and what the old
//! one would have brought comes from the tables (`recovery`). Here the slot is marked for that, or
//! the relay stops, when it may not recover.

use std::sync::atomic::Ordering;

use decoder::Lsn;
use slot_manager::{SlotName, cluster};

use super::opening::check_publication;
use super::session::{ANSWER_LIMIT, STATEMENT_TIMEOUT};
use super::{Relay, record};
use crate::error::{Code, Error, Result};
use crate::postgres::{answer_within, connect};
use crate::settings::OnLoss;

/// Whether a stream ended for a reason that comes again at the same place of the WAL.
pub(super) fn is_of_this_place(error: &Error) -> bool {
    matches!(error.code(), Code::PublicationMissing | Code::SlotStuck)
}

/// Marks the slot for a recovery, once the publication is there again, and gives the error with
/// which the session ends. A relay that has taken the slot meanwhile sees to that: what it has made
/// is left alone.
pub(super) async fn what_to_do(relay: &Relay, confirmed: Lsn, ended: Error) -> Error {
    let settings = &relay.settings;
    if ended.code() == Code::SlotStuck && !fails_again(relay, confirmed) {
        return while_it_is_mended(&ended, ended.what().to_owned());
    }
    let marking = async {
        let sql = connect(settings.database()?, "postrider", STATEMENT_TIMEOUT).await?;
        check_publication(relay, &sql).await?;
        let what = what_is_stuck(&settings.slot, &ended);
        let (slot, instance) = (&settings.slot, &relay.instance);
        let (ours, error) = match settings.slot_on_loss {
            OnLoss::Stop => {
                let looking = record::is_anothers(&sql, slot, instance);
                let anothers = answer_within(ANSWER_LIMIT, looking).await?;
                (!anothers, Error::new(Code::SlotStuck, what))
            }
            OnLoss::Recover => {
                let cluster = answer_within(ANSWER_LIMIT, cluster::inspect(&sql)).await?;
                let why = Code::SlotStuck.name();
                let marking = record::mark_stuck(&sql, slot, &cluster, instance, why);
                let marked = answer_within(ANSWER_LIMIT, marking).await?;
                (marked, while_it_is_mended(&ended, what))
            }
        };
        Ok(ours.then_some(error))
    };
    let told: Result<Option<Error>> = marking.await;
    match told {
        Ok(Some(stuck)) => stuck,
        Ok(None) if ended.code() == Code::SlotStuck => {
            while_it_is_mended(&ended, ended.what().to_owned())
        }
        Ok(None) => ended,
        Err(error) => error,
    }
}

fn what_is_stuck(slot: &SlotName, ended: &Error) -> String {
    match ended.code() {
        Code::SlotStuck => format!(
            "slot \"{slot}\" cannot be read past a place that PostgreSQL fails to decode: {}",
            ended.what()
        ),
        _ => format!(
            "slot \"{slot}\" cannot be read past a row that was inserted while the publication \
             did not exist"
        ),
    }
}

/// An internal error may pass; one that comes again, with the slot where it was, does not.
fn fails_again(relay: &Relay, confirmed: Lsn) -> bool {
    let confirmed = confirmed.as_u64();
    relay.undecodable_after.swap(confirmed, Ordering::Relaxed) == confirmed
}

/// Ends a session so that the next one tries again, or makes the slot anew.
fn while_it_is_mended(ended: &Error, what: String) -> Error {
    match ended.code() {
        Code::SlotStuck => Error::new(Code::SlotBusy, what)
            .hint("no action needed: the relay tries again, and makes the slot anew if need be"),
        _ => Error::new(Code::PublicationGap, what),
    }
}

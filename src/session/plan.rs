//! Decides how a session begins. Once no other session holds the slot, [`SlotFacts::gather`] reads the facts
//! about the slot and the tables, and [`decide`] makes the decision without IO.
//!
//! The relay's row is read only after the slot is free, because the previous holder of the slot may still
//! write the row until then.
//!
//! Not here: deciding whether the slot will stream every event (`recovery::slot_verdict`), and carrying out the
//! decision (`open`).

use decoder::Lsn;
use slot_manager::{Cluster, Slot, cluster};

use super::database::{OurDatabase, recorded_here};
use super::standby::FreeSlot;
use crate::capture::claim;
use crate::capture::shape::FoundTable;
use crate::error::{Error, Result};
use crate::recovery::slot_verdict::{OpeningFacts, SlotVerdict, is_first_start};
use crate::settings::{OnLoss, Settings};
use crate::store::capture_record::{self as captures, CaptureRecord};
use crate::store::relay_row::{EarlierSession, RecordKeeping};

/// All facts on which the decision depends, apart from the settings.
#[derive(Debug)]
pub(super) struct SlotFacts<'a> {
    pub(super) cluster: &'a Cluster,
    /// The slot, from which no walsender reads. `None` if the slot does not exist.
    pub(super) slot: Option<&'a Slot>,
    /// Fingerprint of the publication. An earlier step has checked the publication.
    pub(super) publication: &'a str,
    /// The relay's row as an earlier session left it. `None` if no relay has used the slot yet.
    pub(super) earlier: Option<EarlierSession>,
    /// The end of the server's WAL.
    pub(super) server_lsn: Lsn,
    /// The configured tables, as the catalogue describes them.
    pub(super) found: Vec<FoundTable>,
    /// The capture records of all relays.
    pub(super) records: Vec<CaptureRecord>,
}

impl<'a> SlotFacts<'a> {
    /// Reads the facts. The facts stay valid until somebody takes the free slot.
    ///
    /// # Errors
    /// `foreign-cluster`, `schema-missing`; the errors of [`claim::find_tables`]; database errors.
    pub(super) async fn gather(
        OurDatabase { sql, cluster, .. }: &'a OurDatabase,
        FreeSlot { slot, publication }: &'a FreeSlot,
        settings: &Settings,
    ) -> Result<Self> {
        Ok(Self {
            cluster,
            slot: slot.as_ref(),
            publication: publication.fingerprint(),
            earlier: recorded_here(sql, &settings.slot, cluster).await?,
            found: claim::find_tables(sql, &settings.tables).await?,
            records: captures::read(&**sql).await?,
            server_lsn: cluster::written_wal_end(sql).await?,
        })
    }

    /// Warns if the server was promoted since the last session on this slot.
    pub(super) fn log_failover(&self) {
        let now = self.cluster.timeline;
        let earlier = self.earlier.as_ref();
        if let Some(earlier) = earlier.filter(|earlier| earlier.timeline != now) {
            tracing::warn!(
                before = earlier.timeline,
                now,
                "the server was promoted from a standby, and it has the slot: auditing everything; \
                 recent events may be published twice"
            );
        }
    }
}

/// How the session begins.
#[derive(Debug)]
pub(super) struct Decision {
    pub(super) begin: SlotVerdict,
    /// The error with which the relay stops, if the slot is lost or was replaced and `slot_on_loss` is `stop`.
    pub(super) stop: Option<Error>,
    pub(super) records: RecordKeeping,
    /// Whether no relay has ever used the slot, apart from an interrupted first start.
    pub(super) is_first: bool,
}

/// Decides how the session begins.
///
/// # Errors
/// `table-captured`.
pub(super) fn decide(facts: &SlotFacts<'_>, settings: &Settings) -> Result<Decision> {
    let known = claim::matched(&facts.found, &facts.records, &settings.slot);
    claim::refuse_others(&facts.found, &facts.records, &settings.slot)?;
    let earlier = facts.earlier.as_ref();
    let is_first = is_first_start(earlier);
    let records = RecordKeeping::of(settings.dispatch, earlier);
    let facts = OpeningFacts {
        earlier,
        slot: facts.slot,
        cluster: facts.cluster,
        server_lsn: facts.server_lsn,
        start: claim::start(settings.start, is_first, &known),
        records,
        publication: facts.publication,
        has_new_table: known.iter().any(Option::is_none),
        has_other_table: claim::has_taken_over(&facts.found, &known),
        since_lsn: captures::since_lsn(&facts.records, &settings.slot),
        can_continue: can_continue(earlier, records, &facts.found, &known),
    };
    let begin = SlotVerdict::of(facts);
    Ok(Decision {
        stop: match &begin {
            SlotVerdict::Keep { reason, .. } | SlotVerdict::Recover(reason)
                if settings.slot_on_loss == OnLoss::Stop =>
            {
                reason.stops(&settings.slot)
            }
            _ => None,
        },
        begin,
        records,
        is_first,
    })
}

/// Whether the unfinished recovery can continue. A recovery finds rows by the transaction that inserted them,
/// so every table must have had the column `inserted_xid` before that recovery began. There must also be a
/// record of every outcome. Without records, the recovery could not distinguish new rows from rows that the
/// stream has already delivered.
fn can_continue(
    earlier: Option<&EarlierSession>,
    records: RecordKeeping,
    found: &[FoundTable],
    known: &[Option<&CaptureRecord>],
) -> bool {
    let has_begun = earlier.is_some_and(|earlier| earlier.unfinished.is_some());
    let has_had_xids = |(found, known): (&FoundTable, &Option<&CaptureRecord>)| {
        known.is_some_and(|record| {
            let mut added = record.added_xids.iter().chain(&found.shape.missing_xids);
            let has_them = found.shape.has_inserted_xid && record.has_inserted_xid;
            has_them && added.all(|xid| *xid < record.floor)
        })
    };
    has_begun && !records.may_lack_records() && found.iter().zip(known).all(has_had_xids)
}

#[cfg(test)]
mod tests;

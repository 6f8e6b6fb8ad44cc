//! Decides whether the relay's records in this database belong to this server. If not, a relay must not use them:
//! it would take undelivered rows for delivered ones, or publish the events of a copy.
//!
//! There are two kinds of such records:
//!
//! - The database is a copy: the relay's row names another cluster or another database.
//! - The server was set back to an earlier state, and then somebody restored records that were written later. The
//!   floors then name transactions that this server has not reached, and new rows would count as resolved.
//!
//! [`ForeignRecords::of`] is pure. `store::records_reach` reads the facts about the second kind.

use slot_manager::{Cluster, DatabaseOrigin, SlotName};

use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::store::records_reach::{self, RecordsReach};
use crate::store::relay_row::EarlierSession;

/// Why the relay's records do not belong to this server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ForeignRecords {
    /// The records come from another cluster or database.
    Copy {
        recorded: DatabaseOrigin,
        found: DatabaseOrigin,
    },
    /// The records come from a later state of this database. The text names the proof.
    Later(String),
}

impl ForeignRecords {
    /// Reads how far the records reach, and decides. `earlier` is the relay's row. A standby server gets the records
    /// and the WAL from its primary, so there only the relay's row decides.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn find(
        sql: &Sql,
        slot: &SlotName,
        earlier: Option<&EarlierSession>,
        cluster: &Cluster,
    ) -> Result<Option<Self>> {
        let reach = if cluster.in_recovery {
            RecordsReach::default()
        } else {
            records_reach::read(sql, slot).await?
        };
        Ok(Self::of(earlier, cluster, &reach))
    }

    /// Returns `None` if the records belong to this server. `earlier` is the relay's row. Without this row, for example
    /// if the slot has a new name, records of another cluster look like records of a later state. The rows of other
    /// relays then show which it is.
    pub(crate) fn of(
        earlier: Option<&EarlierSession>,
        cluster: &Cluster,
        reach: &RecordsReach,
    ) -> Option<Self> {
        let found = cluster.origin();
        match earlier.map(|earlier| earlier.origin) {
            Some(recorded) if !recorded.matches(found) => Some(Self::Copy { recorded, found }),
            Some(_) => later(reach).map(Self::Later),
            None => later(reach).map(|proof| match reach.served_elsewhere(found) {
                Some(recorded) => Self::Copy { recorded, found },
                None => Self::Later(proof),
            }),
        }
    }

    /// Whether the records come from another cluster, whose transaction ids have nothing to do with ours.
    pub(crate) fn is_of_another_cluster(&self) -> bool {
        match self {
            Self::Copy { recorded, found } => recorded.system_identifier != found.system_identifier,
            Self::Later(_) => false,
        }
    }

    /// Returns the error with which a relay refuses the records.
    pub(crate) fn error(&self, slot: &SlotName) -> Error {
        let question = match self {
            Self::Copy { .. } => "is it a copy?",
            Self::Later(_) => {
                "was the server set back, and the schema outbox restored from a newer dump?"
            }
        };
        let what = format!("{}: {question}", self.what(slot));
        let error = Error::new(Code::ForeignCluster, what);
        match self {
            Self::Copy { .. } if self.is_of_another_cluster() => error,
            Self::Copy { .. } => error.hint(
                "make sure that DATABASE_URL names the right database; if this one replaces the old one: \
                 `postrider slot drop` with the DATABASE_URL of the old database, then `postrider recover --adopt` \
                 with this one",
            ),
            Self::Later(_) => error.hint(
                "`postrider recover --dry-run` lists the rows without a known outcome; then `postrider recover \
                 --adopt` lets the relay publish them and continue on this server",
            ),
        }
    }

    /// Says what is wrong, in one sentence.
    pub(crate) fn what(&self, slot: &SlotName) -> String {
        match self {
            Self::Copy { recorded, found } => format!(
                "slot \"{slot}\": the relay's records come from cluster {recorded}, but this is cluster {found}"
            ),
            Self::Later(proof) => {
                format!("the relay's records come from a later state of this server ({proof})")
            }
        }
    }
}

/// Returns the proof that the records come from a later state.
fn later(reach: &RecordsReach) -> Option<String> {
    let mut ids = reach.ids.iter();
    if let Some(ahead) = ids.find(|named| named.highest > named.written_by) {
        return Some(format!(
            "{} names transaction {}, but transaction {} wrote it here",
            ahead.row, ahead.highest, ahead.written_by
        ));
    }
    let last = reach.last_commit.filter(|last| *last > reach.wal_end)?;
    Some(format!(
        "outbox.dispatch has an event at {last}, but the server's WAL ends at {}",
        reach.wal_end
    ))
}

#[cfg(test)]
mod tests {
    use decoder::Lsn;
    use slot_manager::SystemIdentifier;

    use super::*;
    use crate::recovery::slot_verdict::tests::{cluster, left};
    use crate::store::records_reach::NamedId;

    fn reach(highest: u64, written_by: u64, last_commit: Option<u64>) -> RecordsReach {
        let row = "outbox.capture (outbox.events)".to_owned();
        RecordsReach {
            ids: vec![NamedId {
                row,
                highest,
                written_by,
            }],
            last_commit: last_commit.map(Lsn::new),
            wal_end: Lsn::new(1_000),
            origins: Vec::new(),
        }
    }

    #[test]
    fn records_that_name_what_their_writer_cannot_know_come_from_a_later_state() {
        for (case, reach, is_later) in [
            ("there are no records", RecordsReach::default(), false),
            (
                "the writer has raised the floor to an older transaction",
                reach(90, 91, None),
                false,
            ),
            (
                "the writer has raised the floor to its own transaction",
                reach(91, 91, None),
                false,
            ),
            (
                "the floor is a later transaction than the writer",
                reach(92, 91, None),
                true,
            ),
            (
                "the last event is before the end of the WAL",
                reach(90, 91, Some(999)),
                false,
            ),
            (
                "the last event is at the end of the WAL",
                reach(90, 91, Some(1_000)),
                false,
            ),
            (
                "the last event is after the end of the WAL",
                reach(90, 91, Some(1_001)),
                true,
            ),
        ] {
            let found = ForeignRecords::of(Some(&left(true)), &cluster(1), &reach);
            assert_eq!(
                matches!(found, Some(ForeignRecords::Later(_))),
                is_later,
                "{case}"
            );
            // The relay's row may be missing, for example because only one table was restored.
            assert_eq!(
                ForeignRecords::of(None, &cluster(1), &reach),
                found,
                "{case}"
            );
        }
    }

    #[test]
    fn with_a_new_slot_records_ahead_of_this_server_are_a_copy_if_no_relay_has_run_here() {
        let here = cluster(1);
        let elsewhere = DatabaseOrigin {
            system_identifier: SystemIdentifier::new(42),
            ..here.origin()
        };
        let found = |highest, origins: &[DatabaseOrigin]| {
            let mut reach = reach(highest, 2, None);
            reach.origins = origins.to_vec();
            ForeignRecords::of(None, &here, &reach)
        };
        let copy = ForeignRecords::Copy {
            recorded: elsewhere,
            found: here.origin(),
        };
        assert_eq!(found(9, &[elsewhere]), Some(copy));
        let of_here = [elsewhere, here.origin()];
        assert!(matches!(found(9, &of_here), Some(ForeignRecords::Later(_))));
        assert_eq!(found(1, &[elsewhere]), None, "the slot may be new");
    }

    #[test]
    fn records_of_another_cluster_or_database_are_a_copy_however_far_they_reach() {
        let slot = "postrider".parse().unwrap();
        let here = cluster(1);
        let origin = here.origin();
        let other_cluster = DatabaseOrigin {
            system_identifier: SystemIdentifier::new(42),
            ..origin
        };
        let other_database = DatabaseOrigin {
            database_oid: Some(1),
            ..origin
        };
        for (recorded, hint) in [
            (other_cluster, "`postrider recover --adopt`"),
            (
                other_database,
                "`postrider slot drop` with the DATABASE_URL of the old database",
            ),
        ] {
            let mut earlier = left(true);
            earlier.origin = recorded;
            for reach in [reach(1, 2, None), reach(9, 2, Some(5_000))] {
                let found = ForeignRecords::of(Some(&earlier), &here, &reach).unwrap();
                assert!(matches!(found, ForeignRecords::Copy { .. }));
                let error = found.error(&slot);
                assert_eq!(error.code(), Code::ForeignCluster);
                assert!(error.hint_text().contains(hint), "{}", error.hint_text());
            }
        }
    }
}

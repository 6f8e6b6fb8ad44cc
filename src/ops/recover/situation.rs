//! Finds out whether a relay would recover at its next session, and why.

use decoder::Lsn;
use slot_manager::{Cluster, Slot, SlotName, cluster, publication, slots};

use crate::capture::claim;
use crate::error::{Code, Error, Result};
use crate::postgres::{Sql, on_standby};
use crate::recovery::slot_verdict::{OpeningFacts, SlotVerdict};
use crate::settings::Settings;
use crate::store::capture_record as captures;
use crate::store::relay_row::{self, Audit, EarlierSession, RecordKeeping};

/// The facts that decide whether a recovery is needed.
pub(crate) struct Situation {
    pub(crate) cluster: Cluster,
    pub(crate) slot: Option<Slot>,
    earlier: Option<EarlierSession>,
    /// Another slot that owns one of the tables, if any.
    pub(crate) owner: Option<SlotName>,
    /// The identities of the tables' capture records.
    pub(super) identities: Vec<String>,
    pub(super) records: RecordKeeping,
    /// Fingerprint of the publication.
    pub(super) publication: String,
    /// The slot's confirmed position, if nobody reads the slot and a relay could continue to stream from this
    /// position without a recovery.
    pub(super) usable_from: Option<Lsn>,
    /// Why the next session of a relay would begin with a recovery. `None` if the session would stream at
    /// once.
    pub(crate) why: Option<RecoveryReason>,
}

/// A reason to recover.
pub(crate) struct RecoveryReason {
    /// In kebab case, such as `slot-missing`.
    pub(crate) name: &'static str,
    pub(crate) what: String,
    /// The error with which a relay stops if `slot_on_loss` does not allow it to recover. `None` for a reason
    /// to which `slot_on_loss` does not apply.
    pub(super) stops: Option<Error>,
}

impl Situation {
    /// Reads the facts. Changes nothing.
    ///
    /// # Errors
    /// `postgres-standby` on a standby; `slot-foreign` when the slot is physical, or belongs to another output
    /// plugin or another database; `publication-drift` when a table is missing; `table-captured` when one of our
    /// tables shares only a part of its rows with a table that another slot captures; database errors.
    pub(crate) async fn read(sql: &Sql, settings: &Settings) -> Result<Self> {
        let name = &settings.slot;
        let cluster = cluster::inspect(sql).await?;
        if cluster.in_recovery {
            return Err(on_standby(sql));
        }
        let slot = slots::find(sql, name).await?;
        if let Some(slot) = &slot {
            slot.require_ours()?;
        }
        let earlier = relay_row::read(sql, name).await?;
        let server_lsn = cluster::written_wal_end(sql).await?;
        let publication =
            publication::inspect(sql, &settings.publication, &settings.captured()).await?;
        let found = claim::find_tables(sql, &settings.tables).await?;
        let is_foreign = is_foreign(earlier.as_ref(), &cluster);
        let records = if is_foreign {
            captures::read_as_adopted(&**sql).await?
        } else {
            captures::read(&**sql).await?
        };
        let known = claim::matched(&found, &records, name);
        claim::refuse_partial_overlap(&found, &records, name)?;
        let owned = claim::with_partitions(&found, &records, name);
        let identities = owned.iter().map(|record| record.identity.clone());
        let mut owners = owned.iter().map(|record| record.slot.as_str());
        let other = owners.find(|owner| *owner != name.as_str());
        let keeping = RecordKeeping::of(settings.dispatch, earlier.as_ref());
        let mut situation = Self {
            cluster,
            slot,
            earlier,
            owner: other.and_then(|owner| owner.parse().ok()),
            identities: identities.collect(),
            records: keeping,
            publication: publication.fingerprint().to_owned(),
            usable_from: None,
            why: None,
        };
        let facts = OpeningFacts {
            earlier: situation.earlier.as_ref(),
            slot: situation.slot.as_ref(),
            cluster: &situation.cluster,
            server_lsn,
            start: claim::start(settings.start, situation.earlier.is_none(), &known),
            records: keeping,
            publication: publication.fingerprint(),
            has_new_table: known.iter().any(Option::is_none),
            has_other_table: claim::has_taken_over(&found, &known),
            since_lsn: captures::since_lsn(&records, name),
            // A relay may be able to continue an unfinished recovery. This makes no difference here, because
            // a new recovery would publish the same rows.
            can_continue: false,
        };
        let why = situation.why(name, facts);
        // A dump may have been restored after the slot was created. The slot then streams the restored rows as
        // inserts. In a table without the column `inserted_xid`, the relay would take them for new events and
        // publish them again. So a table without this column needs a recovery with a new slot.
        let tells_restored_rows = found.iter().all(|found| found.shape.has_inserted_xid);
        let usable_from = usable_from(facts).filter(|_| tells_restored_rows);
        situation.why = why;
        situation.usable_from = usable_from;
        Ok(situation)
    }

    /// Whether the relay's records come from another cluster, or from another database of this cluster.
    pub(crate) fn is_foreign(&self) -> bool {
        is_foreign(self.earlier.as_ref(), &self.cluster)
    }

    /// Whether the relay's records come from another cluster. The transaction ids in the records can then be higher
    /// than all transaction ids of this cluster.
    pub(super) fn is_of_another_cluster(&self) -> bool {
        let earlier = self.earlier.as_ref();
        earlier.is_some_and(|row| {
            row.origin.system_identifier != self.cluster.origin().system_identifier
        })
    }

    /// Whether the tables or the records belong to another server, database or slot.
    pub(super) fn needs_adoption(&self) -> bool {
        self.is_foreign() || self.owner.is_some()
    }

    fn why(&self, slot: &SlotName, facts: OpeningFacts<'_>) -> Option<RecoveryReason> {
        if let Some(earlier) = self.earlier.as_ref().filter(|_| self.is_foreign()) {
            let what = format!(
                "the relay's records come from cluster {}, and this is cluster {}: a relay refuses to \
                 run here until `postrider recover --adopt`",
                earlier.origin,
                self.cluster.origin()
            );
            return Some(RecoveryReason {
                name: Code::ForeignCluster.name(),
                what,
                stops: None,
            });
        }
        if let Some(owner) = &self.owner {
            let what = format!(
                "the tables are captured through slot \"{owner}\": a relay refuses to run here until \
                 `postrider recover --adopt`"
            );
            return Some(RecoveryReason {
                name: Code::TableCaptured.name(),
                what,
                stops: None,
            });
        }
        match SlotVerdict::of(facts) {
            SlotVerdict::Stream { .. } | SlotVerdict::Continue { .. } => None,
            SlotVerdict::Keep { reason, .. } | SlotVerdict::Recover(reason) => {
                Some(RecoveryReason {
                    name: reason.name(),
                    what: reason.to_string(),
                    stops: reason.stops(slot),
                })
            }
        }
    }
}

fn is_foreign(earlier: Option<&EarlierSession>, cluster: &Cluster) -> bool {
    earlier.is_some_and(|row| !row.origin.matches(cluster.origin()))
}

/// Returns the slot's confirmed position if an adoption can keep the slot, otherwise `None`. The adoption can keep the
/// slot if nobody reads it and a relay could continue from this position without a recovery.
///
/// An adoption that keeps the slot changes the relay's row: the row then names this cluster, the present publication
/// and the slot's confirmed position. This function judges the slot by a row with these changes, because the next relay
/// finds such a row.
fn usable_from(facts: OpeningFacts<'_>) -> Option<Lsn> {
    let slot = facts.slot.filter(|slot| !slot.active)?;
    let left_here = EarlierSession {
        origin: facts.cluster.origin(),
        timeline: facts.cluster.timeline,
        confirmed_lsn: slot.confirmed_flush_lsn,
        confirmed_is_final: false,
        publication: Some(facts.publication.to_owned()),
        ..facts.earlier?.clone()
    };
    let verdict = SlotVerdict::of(OpeningFacts {
        earlier: Some(&left_here),
        ..facts
    });
    match verdict {
        SlotVerdict::Stream {
            confirmed,
            audit: Audit::Continue,
        } => Some(confirmed),
        _ => None,
    }
}

//! Finds out whether a relay would recover at its next session, and why.

use decoder::Lsn;
use slot_manager::{Cluster, Slot, SlotName, cluster, health, publication, slots};

use crate::capture::claim;
use crate::error::{Code, Error, Result};
use crate::postgres::{Sql, on_standby};
use crate::recovery::foreign_records::ForeignRecords;
use crate::recovery::slot_verdict::{OpeningFacts, RecoveryCause, SlotVerdict, is_first_start};
use crate::settings::{OnLoss, Settings, Start};
use crate::store::capture_record as captures;
use crate::store::relay_row::{self, Audit, EarlierSession, RecordKeeping};

/// The facts that decide whether a recovery is needed.
pub(crate) struct Situation {
    pub(crate) cluster: Cluster,
    pub(crate) slot: Option<Slot>,
    earlier: Option<EarlierSession>,
    /// Why the relay's records do not belong to this server; `None` if they do.
    foreign: Option<ForeignRecords>,
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
    /// Why the next session of a relay would not simply stream from the slot: it would recover, create its first slot,
    /// or stop. `None` if it would simply stream.
    pub(crate) why: Option<RecoveryReason>,
}

/// Why a relay would not simply stream from its slot. [`ReasonEffect`] says what the relay would do instead.
pub(crate) struct RecoveryReason {
    /// In kebab case, such as `slot-missing`.
    pub(crate) name: &'static str,
    pub(crate) what: String,
    /// The error with which a relay stops if `slot_on_loss` does not allow it to recover. `None` for a reason
    /// to which `slot_on_loss` does not apply.
    pub(crate) stops: Option<Error>,
    /// What `postrider run` would do about the reason.
    pub(crate) effect: ReasonEffect,
}

/// What a relay does if it cannot simply stream from its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReasonEffect {
    /// The relay recovers.
    Recovers,
    /// The relay creates its first slot, and publishes no older rows.
    CreatesSlot,
    /// The relay stops, because an operator must decide first.
    Stops,
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
        let foreign = ForeignRecords::find(sql, name, earlier.as_ref(), &cluster).await?;
        let records = match &foreign {
            Some(foreign) => {
                let is_later = matches!(foreign, ForeignRecords::Later(_));
                captures::read_as_adopted(&**sql, is_later).await?
            }
            None => captures::read(&**sql).await?,
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
            foreign,
            owner: other.and_then(|owner| owner.parse().ok()),
            identities: identities.collect(),
            records: keeping,
            publication: publication.fingerprint().to_owned(),
            usable_from: None,
            why: None,
        };
        let is_first = is_first_start(situation.earlier.as_ref());
        let facts = OpeningFacts {
            earlier: situation.earlier.as_ref(),
            slot: situation.slot.as_ref(),
            cluster: &situation.cluster,
            server_lsn,
            start: claim::start(settings.start, is_first, &known),
            records: keeping,
            publication: publication.fingerprint(),
            has_new_table: known.iter().any(Option::is_none),
            has_other_table: claim::has_taken_over(&found, &known),
            since_lsn: captures::since_lsn(&records, name),
            // A relay may be able to continue an unfinished recovery. This makes no difference here, because
            // a new recovery would publish the same rows.
            can_continue: false,
        };
        let why = situation.why(settings, facts);
        // A dump may have been restored after the slot was created. The slot then streams the restored rows as
        // inserts. In a table without the column `inserted_xid`, the relay would take them for new events and
        // publish them again. So a table without this column needs a recovery with a new slot.
        let tells_restored_rows = found.iter().all(|found| found.shape.has_inserted_xid);
        let usable_from = usable_from(facts).filter(|_| tells_restored_rows);
        situation.why = why;
        situation.usable_from = usable_from;
        Ok(situation)
    }

    /// Whether the relay's records come from another cluster, from another database of this cluster, or from a later
    /// state of this server.
    pub(crate) fn is_foreign(&self) -> bool {
        self.foreign.is_some()
    }

    /// Whether the records come from this database, but from a later state of the server.
    pub(super) fn is_of_a_later_state(&self) -> bool {
        matches!(self.foreign, Some(ForeignRecords::Later(_)))
    }

    /// Whether the transaction ids in the records can be higher than all transaction ids of this cluster.
    pub(super) fn may_have_higher_ids(&self) -> bool {
        let foreign = self.foreign.as_ref();
        self.is_of_a_later_state() || foreign.is_some_and(ForeignRecords::is_of_another_cluster)
    }

    /// Whether the tables or the records belong to another server, database or slot.
    pub(super) fn needs_adoption(&self) -> bool {
        self.is_foreign() || self.owner.is_some()
    }

    fn why(
        &self,
        Settings {
            slot, slot_on_loss, ..
        }: &Settings,
        facts: OpeningFacts<'_>,
    ) -> Option<RecoveryReason> {
        if let Some(foreign) = &self.foreign {
            let what = format!(
                "{}: a relay refuses to run here until `postrider recover --adopt`",
                foreign.what(slot)
            );
            return Some(RecoveryReason {
                name: Code::ForeignCluster.name(),
                what,
                stops: None,
                effect: ReasonEffect::Stops,
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
                effect: ReasonEffect::Stops,
            });
        }
        let cause = match SlotVerdict::of(facts) {
            SlotVerdict::Stream { .. } | SlotVerdict::Continue { .. } => return None,
            SlotVerdict::Keep { reason, .. } | SlotVerdict::Recover(reason) => reason,
        };
        // If a relay reads the slot, `SlotUnproven` is no reason to recover. That relay moves the slot all the time
        // and records its position only now and then, so the slot may be far past the recorded position.
        let is_read = facts.slot.is_some_and(health::is_read_by_relay);
        let is_of_the_reader = is_read && matches!(cause, RecoveryCause::SlotUnproven { .. });
        (!is_of_the_reader).then(|| RecoveryReason::of(&cause, slot, *slot_on_loss))
    }
}

impl RecoveryReason {
    /// The code of the error with which a relay stops if it may not recover.
    pub(crate) fn code(&self) -> &'static str {
        self.stops
            .as_ref()
            .map_or(self.name, |error| error.code().name())
    }

    pub(crate) fn of(cause: &RecoveryCause, slot: &SlotName, on_loss: OnLoss) -> Self {
        let stops = cause.stops(slot);
        let effect = match cause {
            RecoveryCause::FirstStart(Start::New) => ReasonEffect::CreatesSlot,
            _ if on_loss == OnLoss::Stop && stops.is_some() => ReasonEffect::Stops,
            _ => ReasonEffect::Recovers,
        };
        Self {
            name: cause.name(),
            what: cause.to_string(),
            stops,
            effect,
        }
    }
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

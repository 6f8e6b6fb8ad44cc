//! Finds the proof that an event is published: either the position of the slot together with the records, or
//! only the records.
//!
//! [`find`] reads the facts, and [`decide`] decides without IO.

use decoder::Lsn;
use slot_manager::health::{self, Observation, Thresholds, Viewer};
use slot_manager::{Cluster, Health, Slot, SlotName, cluster, slots};

use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::recovery::foreign_records::ForeignRecords;
use crate::settings::{Dispatch, Settings};
use crate::store::relay_row::{self, EarlierSession};

/// The proof that rows may be deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PruneProof {
    /// The slot has no fault and no recovery is due, so the confirmed position proves which events are resolved.
    Slot {
        confirmed: Lsn,
        /// The slot's `restart_lsn`. It survives a crash of PostgreSQL, and is never above the
        /// confirmed position.
        durable: Lsn,
        /// Whether some published events might lack a record. A recovery would publish such events again.
        repeats: bool,
    },
    /// The position of the slot proves nothing, for example because the slot is lost. Rows with a
    /// record may be deleted, because the relay never publishes them again. The records themselves
    /// stay.
    RecordsOnly { why: String },
}

/// The facts that [`decide`] needs.
struct PruneFacts<'a> {
    name: &'a SlotName,
    slot: Option<&'a Slot>,
    cluster: &'a Cluster,
    earlier: Option<&'a EarlierSession>,
    /// The setting of this command, which may differ from the relay's setting.
    dispatch: Dispatch,
}

/// Reads the slot and the relay's row, and decides what proves that events are published.
///
/// # Errors
/// `foreign-cluster`; the errors of [`decide`]; database errors.
pub(super) async fn find(sql: &Sql, settings: &Settings) -> Result<PruneProof> {
    let cluster = cluster::inspect(sql).await?;
    let slot = slots::find(sql, &settings.slot).await?;
    if let Some(slot) = &slot {
        slot.require_ours()?;
    }
    let earlier = relay_row::read(sql, &settings.slot).await?;
    if let Some(foreign) =
        ForeignRecords::find(sql, &settings.slot, earlier.as_ref(), &cluster).await?
    {
        return Err(foreign.error(&settings.slot));
    }
    decide(&PruneFacts {
        name: &settings.slot,
        slot: slot.as_ref(),
        cluster: &cluster,
        earlier: earlier.as_ref(),
        dispatch: settings.dispatch,
    })
}

/// Decides what proves that events are published.
///
/// # Errors
/// `postgres-standby`, `foreign-cluster`; with `dispatch = exceptions` also `slot-missing`,
/// `slot-lost`, `slot-recreated` and `slot-stuck` (a recovery is due).
fn decide(facts: &PruneFacts<'_>) -> Result<PruneProof> {
    if facts.cluster.in_recovery {
        let what = "the server is a standby, where nothing can be deleted";
        return Err(Error::new(Code::PostgresStandby, what));
    }
    // Use the mode that the relay has recorded, because the settings of this command may differ.
    let dispatch = facts.earlier.map_or(facts.dispatch, |relay| relay.dispatch);
    let repeats = dispatch == Dispatch::Exceptions;
    let (code, why) = match (fault(facts)?, facts.slot) {
        (
            None,
            Some(Slot {
                confirmed_flush_lsn: Some(confirmed),
                restart_lsn: Some(durable),
                ..
            }),
        ) => {
            return Ok(PruneProof::Slot {
                confirmed: *confirmed,
                durable: *durable.min(confirmed),
                repeats,
            });
        }
        (None, _) => (
            Code::SlotLost,
            format!("slot {} has no confirmed position", facts.name),
        ),
        (Some(fault), _) => fault,
    };
    if !repeats {
        return Ok(PruneProof::RecordsOnly { why });
    }
    let what = format!(
        "{why}: with dispatch = exceptions published events have no record, so nothing proves which \
         rows are published"
    );
    Err(Error::new(code, what)
        .hint("start the relay and let it recover, then prune; nothing was deleted"))
}

/// Returns why the slot's position proves nothing; `None` if it can be used.
fn fault(facts: &PruneFacts<'_>) -> Result<Option<(Code, String)>> {
    let name = facts.name;
    if let Some(why) = facts
        .earlier
        .and_then(|earlier| earlier.recovering.as_ref())
    {
        let what = format!("a recovery of slot {name} is due or has not finished ({why})");
        return Ok(Some((Code::SlotStuck, what)));
    }
    let recorded = facts.earlier.map(EarlierSession::position);
    let observation = Observation {
        slot: facts.slot,
        viewer: Viewer::Outside,
        time_lag: None,
        origin: facts.cluster.origin(),
        recorded: recorded.as_ref(),
    };
    Ok(match health::judge(&observation, &Thresholds::default()) {
        Health::ForeignCluster { .. } => {
            let what = "the records of the relay come from another cluster or database";
            return Err(Error::new(Code::ForeignCluster, what));
        }
        Health::Missing => Some((Code::SlotMissing, format!("slot {name} does not exist"))),
        Health::Lost | Health::Invalidated { .. } => {
            Some((Code::SlotLost, format!("slot {name} is lost")))
        }
        Health::Recreated { recorded, found } => Some((
            Code::SlotRecreated,
            format!("slot {name} is at {found}, but the relay left it at {recorded}"),
        )),
        _ => None,
    })
}

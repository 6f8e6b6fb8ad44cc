//! What proves that an event is published: the records, and how far the slot is.
//!
//! [`find`] gathers the facts, and [`decide`] is pure.

use decoder::Lsn;
use slot_manager::health::{self, Observation, Thresholds, Viewer};
use slot_manager::{Cluster, Health, Slot, SlotName, cluster, slots};

use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::settings::{Dispatch, Settings};
use crate::store::relay_row::{self, Recorded};

/// What proves which rows may go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PruneProof {
    /// The slot is the one that the relay serves.
    Slot {
        confirmed: Lsn,
        /// The slot's `restart_lsn`. It survives a crash of PostgreSQL, and is never above the
        /// confirmed position.
        durable: Lsn,
        /// Whether published events may have no record.
        repeats: bool,
    },
    /// The position of the slot means nothing. A row with a record is never published again, so it may
    /// go; records stay.
    RecordsOnly { why: String },
}

/// The facts to decide on.
struct PruneFacts<'a> {
    name: &'a SlotName,
    slot: Option<&'a Slot>,
    cluster: &'a Cluster,
    earlier: Option<&'a Recorded>,
    /// From the settings of this command, which may differ from those of the relay.
    dispatch: Dispatch,
}

/// Looks at the slot, and decides.
///
/// # Errors
/// Those of the decision; database errors.
pub(super) async fn find(sql: &Sql, settings: &Settings) -> Result<PruneProof> {
    let cluster = cluster::inspect(sql).await?;
    let slot = slots::find(sql, &settings.slot).await?;
    if let Some(slot) = &slot {
        slot.require_ours()?;
    }
    let earlier = relay_row::read(sql, &settings.slot).await?;
    decide(&PruneFacts {
        name: &settings.slot,
        slot: slot.as_ref(),
        cluster: &cluster,
        earlier: earlier.as_ref(),
        dispatch: settings.dispatch,
    })
}

/// # Errors
/// `postgres-standby`, `foreign-cluster`; with `dispatch = exceptions` also `slot-missing`,
/// `slot-lost`, `slot-recreated` and `slot-stuck` (a recovery is due).
fn decide(facts: &PruneFacts<'_>) -> Result<PruneProof> {
    if facts.cluster.in_recovery {
        let what = "the server is a standby, where nothing can be deleted";
        return Err(Error::new(Code::PostgresStandby, what));
    }
    // What the relay does counts, not what the settings of this command say.
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

/// Why the slot's position cannot be used; `None` if it can.
fn fault(facts: &PruneFacts<'_>) -> Result<Option<(Code, String)>> {
    let name = facts.name;
    if let Some(why) = facts
        .earlier
        .and_then(|earlier| earlier.recovering.as_ref())
    {
        let what = format!("a recovery of slot {name} is due or has not finished ({why})");
        return Ok(Some((Code::SlotStuck, what)));
    }
    let recorded = facts.earlier.map(Recorded::position);
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
            format!("slot {name} is at {found}, but it was left at {recorded}"),
        )),
        _ => None,
    })
}

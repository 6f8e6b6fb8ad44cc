//! Whether the stream of this slot brings everything that has no record: the decision at the
//! opening of a session, from what was written down, the slot and the server.
//!
//! Pure. What is done about a loss stands in the parent module. Another cluster is not judged
//! here, since it always needs a person.

use std::fmt;

use decoder::Lsn;
use slot_manager::health::{self, Observation, Thresholds, Viewer};
use slot_manager::{Cluster, Health, Slot, SlotName};

use crate::error::{Code, Error};
use crate::relay::record::Recorded;
use crate::settings::{Dispatch, Start};

/// What is known when a session opens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen<'a> {
    /// What an earlier session wrote down.
    pub(crate) earlier: Option<&'a Recorded>,
    /// The slot, free.
    pub(crate) slot: Option<&'a Slot>,
    pub(crate) cluster: &'a Cluster,
    /// End of the server's WAL.
    pub(crate) server_lsn: Lsn,
    pub(crate) start: Start,
    /// How this session is to record.
    pub(crate) dispatch: Dispatch,
    /// The publication, which is right, as it is now.
    pub(crate) publication: &'a str,
    /// Whether a table of the settings is not captured yet.
    pub(crate) has_new_table: bool,
    /// Whether one is captured already, so that there was a slot.
    pub(crate) is_captured: bool,
}

/// How the session has to begin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The slot has everything.
    Stream { confirmed: Lsn, audit: Audit },
    /// The first start, and only what comes from now on is wanted.
    CreateSlot,
    /// Rows may be in the tables alone.
    Recover(Loss),
}

/// What the auditor has to look at after the opening.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Audit {
    /// What it has not looked at yet.
    Continue,
    /// Everything: the slot is further on than what was written down, or has been through a
    /// fail-over. Both are normal, and neither can be told from a loss.
    Everything,
}

/// Why rows may be in the tables alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Loss {
    /// A recovery was begun, or asked for, and has not ended.
    Unfinished(String),
    /// Nobody has served this database yet, and the rows that are there are wanted.
    FirstStart,
    /// A table is captured from now on, and the rows that are there are wanted.
    TableAdded,
    /// The slot that served is gone.
    SlotMissing,
    /// The server has given the slot up.
    SlotLost(Health),
    /// The slot stands beyond what was confirmed.
    SlotRecreated { recorded: Lsn, found: Lsn },
    /// The server has less WAL than was confirmed.
    WalMissing { recorded: Lsn, server: Lsn },
    /// The publication was altered, and what was left out of the stream cannot be told from what
    /// was delivered without a record.
    PublicationChanged,
    /// Nothing proves that the slot is the one that was served, and what it may have left out
    /// cannot be told from what was delivered without a record.
    SlotUnproven { recorded: Lsn, found: Lsn },
}

/// Decides, on the cluster that was served before.
pub(crate) fn judge(seen: Seen<'_>) -> Verdict {
    let Some(earlier) = seen.earlier else {
        return first_start(seen);
    };
    if let Some(why) = &earlier.recovering {
        return Verdict::Recover(Loss::Unfinished(why.clone()));
    }
    let Some(recorded) = earlier.confirmed_lsn else {
        return first_start(seen);
    };
    let Some(slot) = seen.slot else {
        return Verdict::Recover(Loss::SlotMissing);
    };
    match health(slot, seen) {
        health @ (Health::Lost | Health::Invalidated { .. }) => {
            Verdict::Recover(Loss::SlotLost(health))
        }
        Health::Recreated { recorded, found } => {
            Verdict::Recover(Loss::SlotRecreated { recorded, found })
        }
        _ if earlier.confirmed_is_final && recorded > seen.server_lsn => {
            let server = seen.server_lsn;
            Verdict::Recover(Loss::WalMissing { recorded, server })
        }
        _ if seen.has_new_table && seen.start == Start::All => Verdict::Recover(Loss::TableAdded),
        _ if repeats(seen) => without_records(earlier, recorded, slot, seen),
        _ => stream(slot, audit(earlier, recorded, slot, seen.cluster)),
    }
}

/// Whether events may have been delivered without a record, or will be.
pub(crate) fn repeats(seen: Seen<'_>) -> bool {
    let earlier = seen.earlier.map(|earlier| earlier.dispatch);
    seen.dispatch == Dispatch::Exceptions || earlier == Some(Dispatch::Exceptions)
}

/// Where a comparison of the tables with the records would tell nothing.
fn without_records(earlier: &Recorded, recorded: Lsn, slot: &Slot, seen: Seen<'_>) -> Verdict {
    if earlier.publication.as_deref() != Some(seen.publication) {
        return Verdict::Recover(Loss::PublicationChanged);
    }
    match audit(earlier, recorded, slot, seen.cluster) {
        Audit::Continue => stream(slot, Audit::Continue),
        Audit::Everything if is_proven(earlier, recorded, slot, seen) => {
            stream(slot, Audit::Continue)
        }
        Audit::Everything => Verdict::Recover(Loss::SlotUnproven {
            recorded,
            found: slot.confirmed_flush_lsn.unwrap_or_default(),
        }),
    }
}

/// Whether the slot is the one that was served. One that is made anew begins to keep WAL at the end
/// of that time, which is not before anything that was confirmed. (What cannot be told apart is a
/// slot that was moved on, since `pg_replication_slot_advance` may leave `restart_lsn` where it is,
/// and a copy of another slot. Who moves it by `postrider slot advance` leaves a final position
/// behind.)
fn is_proven(earlier: &Recorded, recorded: Lsn, slot: &Slot, seen: Seen<'_>) -> bool {
    let is_old = slot.restart_lsn.is_some_and(|at| at < recorded);
    earlier.timeline == seen.cluster.timeline && is_old
}

fn first_start(seen: Seen<'_>) -> Verdict {
    match (seen.start, seen.slot) {
        (Start::All, _) => Verdict::Recover(Loss::FirstStart),
        (Start::New, None) if seen.is_captured => Verdict::Recover(Loss::SlotMissing),
        (Start::New, None) => Verdict::CreateSlot,
        (Start::New, Some(slot)) => match health(slot, seen) {
            health @ (Health::Lost | Health::Invalidated { .. }) => {
                Verdict::Recover(Loss::SlotLost(health))
            }
            _ => stream(slot, Audit::Continue),
        },
    }
}

fn stream(slot: &Slot, audit: Audit) -> Verdict {
    match slot.confirmed_flush_lsn {
        Some(confirmed) => Verdict::Stream { confirmed, audit },
        // It was never usable.
        None => Verdict::Recover(Loss::SlotLost(Health::Lost)),
    }
}

fn audit(earlier: &Recorded, recorded: Lsn, slot: &Slot, cluster: &Cluster) -> Audit {
    let is_ahead = slot.confirmed_flush_lsn.is_some_and(|at| at > recorded);
    match is_ahead || earlier.timeline != cluster.timeline {
        true => Audit::Everything,
        false => Audit::Continue,
    }
}

fn health(slot: &Slot, seen: Seen<'_>) -> Health {
    let recorded = seen.earlier.map(Recorded::position);
    let observation = Observation {
        slot: Some(slot),
        earlier: None,
        viewer: Viewer::Waiting,
        time_lag: None,
        origin: seen.cluster.origin(),
        recorded: recorded.as_ref(),
    };
    health::judge(&observation, &Thresholds::default())
}

impl Loss {
    /// Stable name in kebab case: an error code where the loss can be one.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Loss::Unfinished(_) => "recovery-unfinished",
            Loss::FirstStart => "first-start",
            Loss::TableAdded => "table-added",
            Loss::SlotMissing => "slot-missing",
            Loss::SlotLost(_) => "slot-lost",
            Loss::SlotRecreated { .. } => "slot-recreated",
            Loss::WalMissing { .. } => "wal-missing",
            Loss::PublicationChanged => "publication-changed",
            Loss::SlotUnproven { .. } => "slot-unproven",
        }
    }

    /// The error with which a relay stops that may not recover by itself; `None` for what is
    /// recovered whatever the settings say: a person has asked for it, or the slot is not lost.
    pub(crate) fn stops(&self, slot: &SlotName) -> Option<Error> {
        let code = match self {
            Loss::Unfinished(_)
            | Loss::FirstStart
            | Loss::TableAdded
            | Loss::PublicationChanged
            | Loss::SlotUnproven { .. } => return None,
            Loss::SlotMissing => Code::SlotMissing,
            Loss::SlotLost(_) => Code::SlotLost,
            Loss::SlotRecreated { .. } | Loss::WalMissing { .. } => Code::SlotRecreated,
        };
        Some(Error::new(code, format!("slot \"{slot}\": {self}")))
    }

    /// The slot's health as metrics show it, where it has a name there.
    pub(crate) fn health_name(&self) -> Option<&'static str> {
        match self {
            Loss::Unfinished(_)
            | Loss::FirstStart
            | Loss::TableAdded
            | Loss::PublicationChanged
            | Loss::SlotUnproven { .. } => None,
            Loss::SlotMissing => Some(Health::Missing.name()),
            Loss::SlotLost(health) => Some(health.name()),
            Loss::SlotRecreated { .. } | Loss::WalMissing { .. } => Some("recreated"),
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Loss::Unfinished(why) => write!(f, "a recovery was begun ({why}) and has not ended"),
            Loss::FirstStart => f.write_str("first start, and `start` is `all`"),
            Loss::TableAdded => {
                f.write_str("a table is captured from now on, and `start` is `all`")
            }
            Loss::SlotMissing => f.write_str("it has served before and is gone"),
            Loss::SlotLost(Health::Invalidated { cause }) => {
                write!(f, "PostgreSQL has invalidated it ({cause:?})")
            }
            Loss::SlotLost(_) => f.write_str("PostgreSQL has removed WAL that it needed"),
            Loss::SlotRecreated { recorded, found } => write!(
                f,
                "it stands at {found}, and this relay left it at {recorded}: it was made anew or \
                 advanced by somebody else"
            ),
            Loss::WalMissing { recorded, server } => write!(
                f,
                "{recorded} was confirmed, and the server's WAL ends at {server}: it was rolled \
                 back"
            ),
            Loss::PublicationChanged => f.write_str(
                "the publication was altered since everything was last known to be delivered \
                 (dispatch = exceptions)",
            ),
            Loss::SlotUnproven { recorded, found } => write!(
                f,
                "it stands at {found}, {recorded} was written down last, and it may be another \
                 slot or on another server (dispatch = exceptions)"
            ),
        }
    }
}

#[cfg(test)]
mod tests;

//! Decides, when a session opens, whether the slot's stream will bring every unrecorded event. The inputs
//! are the relay's row, the slot and the server.
//!
//! The functions here are pure. `session::plan` gathers the facts, and `session::open` reacts to a loss.
//! `session::database` refuses another cluster, because that always needs a person.

use std::fmt;

use decoder::Lsn;
use slot_manager::health::{self, Observation, RecordedPosition, Thresholds, Viewer};
use slot_manager::{Cluster, Health, Slot, SlotName};

use crate::error::{Code, Error};
use crate::settings::Start;
use crate::store::relay_row::{Audit, RecordKeeping, Recorded, Unfinished};

/// The name of [`Loss::Unfinished`].
pub(crate) const UNFINISHED: &str = "recovery-unfinished";

/// The facts when a session opens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OpeningFacts<'a> {
    /// The relay's row, as an earlier session has left it.
    pub(crate) earlier: Option<&'a Recorded>,
    /// The slot, which no session holds now; `None` if it does not exist.
    pub(crate) slot: Option<&'a Slot>,
    pub(crate) cluster: &'a Cluster,
    /// The end of the server's WAL.
    pub(crate) server_lsn: Lsn,
    pub(crate) start: Start,
    /// Which published events have a record, in `earlier` and in this session.
    pub(crate) records: RecordKeeping,
    /// Fingerprint of the publication, which was just checked and has no problem.
    pub(crate) publication: &'a str,
    /// Whether a table of the settings is not captured yet.
    pub(crate) has_new_table: bool,
    /// The WAL position at which capturing began, if a command has recorded that position.
    pub(crate) since_lsn: Option<Lsn>,
    /// Whether an unfinished recovery can continue, because the tables and settings still allow the
    /// recovery to find the rows that it has not read yet.
    pub(crate) can_continue: bool,
}

/// How the session must begin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SlotVerdict {
    /// The slot brings every unrecorded event: stream from it.
    Stream { confirmed: Lsn, audit: Audit },
    /// An earlier recovery has not finished, and its slot streams everything that was committed after the
    /// slot's creation. Publish the remaining rows from the tables, then stream.
    Continue {
        confirmed: Lsn,
        audit: Audit,
        unfinished: Unfinished,
    },
    /// The stream of the slot may miss rows that are in the tables: recover.
    Recover(Loss),
}

/// Why the stream of the slot may miss rows that are in the tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Loss {
    /// A recovery was begun or requested, and has not ended.
    Unfinished(String),
    /// No relay has served the slot yet. Either there is no slot, or the existing rows are wanted.
    FirstStart(Start),
    /// A new table is captured from now on, and its existing rows are wanted.
    TableAdded,
    /// The slot was in use before, and no longer exists.
    SlotMissing,
    /// The server has invalidated the slot, or has removed WAL that the slot needed.
    SlotLost(Health),
    /// The slot's position is ahead of the final position that the last session recorded. If no relay has
    /// served the slot, the slot's position is ahead of the position at which capturing began.
    SlotRecreated { recorded: Lsn, found: Lsn },
    /// The server's WAL ends before the last confirmed position.
    WalMissing { recorded: Lsn, server: Lsn },
    /// The publication was altered (only if published events may lack a record). Without records, events
    /// that the stream left out cannot be distinguished from delivered events.
    PublicationChanged,
    /// The relay cannot prove that this is the slot that it served before, so the stream may have left
    /// events out (only if published events may lack a record). Without records, such events cannot be
    /// distinguished from delivered events.
    SlotUnproven { recorded: Lsn, found: Lsn },
}

/// Decides how to begin. The caller has checked that this is the cluster that was served before.
pub(crate) fn judge(facts: OpeningFacts<'_>) -> SlotVerdict {
    let Some(earlier) = facts.earlier else {
        return first_start(facts);
    };
    let Some(why) = &earlier.recovering else {
        return served(earlier, facts);
    };
    let unfinished = earlier.unfinished.as_ref().filter(|_| facts.can_continue);
    match (served(earlier, facts), unfinished) {
        (SlotVerdict::Stream { confirmed, audit }, Some(unfinished))
            if audit == Audit::Continue || is_proven(earlier, facts) =>
        {
            let unfinished = unfinished.clone();
            SlotVerdict::Continue {
                confirmed,
                audit,
                unfinished,
            }
        }
        _ => SlotVerdict::Recover(Loss::Unfinished(why.clone())),
    }
}

/// Decides as if no recovery were unfinished.
fn served(earlier: &Recorded, facts: OpeningFacts<'_>) -> SlotVerdict {
    let Some(recorded) = earlier.confirmed_lsn else {
        return first_start(facts);
    };
    let Some(slot) = facts.slot else {
        return SlotVerdict::Recover(Loss::SlotMissing);
    };
    match health(slot, facts) {
        health @ (Health::Lost | Health::Invalidated { .. }) => {
            SlotVerdict::Recover(Loss::SlotLost(health))
        }
        Health::Recreated { recorded, found } => {
            SlotVerdict::Recover(Loss::SlotRecreated { recorded, found })
        }
        _ if earlier.confirmed_is_final && recorded > facts.server_lsn => {
            let server = facts.server_lsn;
            SlotVerdict::Recover(Loss::WalMissing { recorded, server })
        }
        _ if facts.has_new_table && facts.start == Start::All => {
            SlotVerdict::Recover(Loss::TableAdded)
        }
        _ if facts.records.may_lack_records() => without_records(earlier, recorded, slot, facts),
        _ => stream(slot, audit(earlier, recorded, slot, facts.cluster)),
    }
}

/// Decides for the case that published events may have no record. Comparing the tables with the records
/// then proves nothing.
fn without_records(
    earlier: &Recorded,
    recorded: Lsn,
    slot: &Slot,
    facts: OpeningFacts<'_>,
) -> SlotVerdict {
    if earlier.publication.as_deref() != Some(facts.publication) {
        return SlotVerdict::Recover(Loss::PublicationChanged);
    }
    match audit(earlier, recorded, slot, facts.cluster) {
        Audit::Continue => stream(slot, Audit::Continue),
        Audit::Everything if is_proven(earlier, facts) => stream(slot, Audit::Continue),
        Audit::Everything => SlotVerdict::Recover(Loss::SlotUnproven {
            recorded,
            found: slot.confirmed_flush_lsn.unwrap_or_default(),
        }),
    }
}

/// Whether the slot is provably the slot that was served: it keeps WAL from before the recorded position,
/// and the timeline is the same. A recreated slot keeps WAL only from its creation on, which is never
/// before the recorded position. Two kinds of slots pass this check by mistake: a slot that somebody has
/// advanced, because `pg_replication_slot_advance` may leave `restart_lsn` where it is, and a copy of
/// another slot. (The relay does notice `postrider slot advance`, because that command records a final
/// position or makes an unfinished recovery start again.)
fn is_proven(earlier: &Recorded, facts: OpeningFacts<'_>) -> bool {
    let keeps_from = facts.slot.and_then(|slot| slot.restart_lsn);
    let is_old = keeps_from.is_some_and(|at| earlier.confirmed_lsn.is_some_and(|to| at < to));
    earlier.timeline == facts.cluster.timeline && is_old
}

fn first_start(facts: OpeningFacts<'_>) -> SlotVerdict {
    match (facts.start, facts.slot) {
        (Start::All, _) | (Start::New, None) => SlotVerdict::Recover(Loss::FirstStart(facts.start)),
        (Start::New, Some(slot)) => match health(slot, facts) {
            health @ (Health::Lost | Health::Invalidated { .. }) => {
                SlotVerdict::Recover(Loss::SlotLost(health))
            }
            Health::Recreated { recorded, found } => {
                SlotVerdict::Recover(Loss::SlotRecreated { recorded, found })
            }
            _ => stream(slot, Audit::Continue),
        },
    }
}

fn stream(slot: &Slot, audit: Audit) -> SlotVerdict {
    match slot.confirmed_flush_lsn {
        Some(confirmed) => SlotVerdict::Stream { confirmed, audit },
        // A slot without a confirmed position was never usable.
        None => SlotVerdict::Recover(Loss::SlotLost(Health::Lost)),
    }
}

fn audit(earlier: &Recorded, recorded: Lsn, slot: &Slot, cluster: &Cluster) -> Audit {
    let is_ahead = slot.confirmed_flush_lsn.is_some_and(|at| at > recorded);
    if is_ahead || earlier.timeline != cluster.timeline {
        Audit::Everything
    } else {
        Audit::Continue
    }
}

fn health(slot: &Slot, facts: OpeningFacts<'_>) -> Health {
    let served = facts
        .earlier
        .filter(|earlier| earlier.confirmed_lsn.is_some());
    let recorded = match served {
        Some(earlier) => Some(earlier.position()),
        None => RecordedPosition::unused(facts.cluster.origin(), facts.since_lsn),
    };
    let observation = Observation {
        slot: Some(slot),
        viewer: Viewer::Waiting,
        time_lag: None,
        origin: facts.cluster.origin(),
        recorded: recorded.as_ref(),
    };
    health::judge(&observation, &Thresholds::default())
}

impl Loss {
    /// A stable name in kebab case, for the log, the metrics and the recovery mark.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Loss::Unfinished(_) => UNFINISHED,
            Loss::FirstStart(_) => "first-start",
            Loss::TableAdded => "table-added",
            Loss::SlotMissing => "slot-missing",
            Loss::SlotLost(_) => "slot-lost",
            Loss::SlotRecreated { .. } => "slot-recreated",
            Loss::WalMissing { .. } => "wal-missing",
            Loss::PublicationChanged => "publication-changed",
            Loss::SlotUnproven { .. } => "slot-unproven",
        }
    }

    /// Returns the error with which the relay stops if `slot_on_loss` is `stop`. Returns `None` if the
    /// relay recovers under any settings, because a recovery was begun or requested, or because the slot
    /// is not lost.
    pub(crate) fn stops(&self, slot: &SlotName) -> Option<Error> {
        let code = match self {
            Loss::Unfinished(_)
            | Loss::FirstStart(_)
            | Loss::TableAdded
            | Loss::PublicationChanged
            | Loss::SlotUnproven { .. } => return None,
            Loss::SlotMissing => Code::SlotMissing,
            Loss::SlotLost(_) => Code::SlotLost,
            Loss::SlotRecreated { .. } | Loss::WalMissing { .. } => Code::SlotRecreated,
        };
        Some(Error::new(code, format!("slot \"{slot}\": {self}")))
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Loss::Unfinished(why) => write!(f, "an earlier recovery ({why}) has not finished"),
            Loss::FirstStart(Start::All) => f.write_str("first start, and `start` is `all`"),
            Loss::FirstStart(Start::New) => f.write_str("first start: there is no slot yet"),
            Loss::TableAdded => f.write_str("a new table is captured, and `start` is `all`"),
            Loss::SlotMissing => f.write_str("the slot was in use before and no longer exists"),
            Loss::SlotLost(Health::Invalidated { cause }) => {
                write!(f, "PostgreSQL has invalidated the slot ({cause:?})")
            }
            Loss::SlotLost(_) => f.write_str("PostgreSQL has removed WAL that the slot needed"),
            Loss::SlotRecreated { recorded, found } => write!(
                f,
                "the slot's position is {found}, but it was left at {recorded}: somebody has recreated or \
                 advanced it"
            ),
            Loss::WalMissing { recorded, server } => write!(
                f,
                "{recorded} was confirmed, but the server's WAL ends at {server}: the server was rolled \
                 back"
            ),
            Loss::PublicationChanged => f.write_str(
                "the publication was altered after everything was last known to be delivered \
                 (dispatch = exceptions)",
            ),
            Loss::SlotUnproven { recorded, found } => write!(
                f,
                "the slot's position is {found}, but {recorded} was recorded last: it may be another \
                 slot, or on another server (dispatch = exceptions)"
            ),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;

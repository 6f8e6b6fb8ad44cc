//! Decides, when a session opens, whether the slot will stream every unrecorded event. The decision uses
//! the relay's row and the state of the slot and of the server.
//!
//! The functions here are pure. `session::plan` gathers the facts, and `session::open` carries out the verdict.
//! `session::database` refuses another cluster, because only an operator can decide what to do then.

use std::fmt;

use decoder::Lsn;
use slot_manager::health::{self, Observation, RecordedPosition, Thresholds, Viewer};
use slot_manager::{Cluster, Health, Slot, SlotName};

use crate::error::{Code, Error};
use crate::settings::Start;
use crate::store::relay_row::{Audit, EarlierSession, RecordKeeping, Unfinished};

/// The name of [`RecoveryCause::Unfinished`].
pub(crate) const UNFINISHED: &str = "recovery-unfinished";

/// Names of the reasons that make a recovery necessary although the slot itself is fine. Such a recovery
/// keeps the slot if it can.
const REASONS_NOT_ABOUT_THE_SLOT: [&str; 4] =
    [TABLE_ADDED, OTHER_TABLE, PUBLICATION_CHANGED, SLOT_UNPROVEN];
const TABLE_ADDED: &str = "table-added";
const OTHER_TABLE: &str = "other-table";
const PUBLICATION_CHANGED: &str = "publication-changed";
const SLOT_UNPROVEN: &str = "slot-unproven";

/// The facts when a session opens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OpeningFacts<'a> {
    /// The relay's row, as an earlier session left it. `None` if no relay has used the slot yet.
    pub(crate) earlier: Option<&'a EarlierSession>,
    /// The slot, which no session holds now. `None` if the slot does not exist.
    pub(crate) slot: Option<&'a Slot>,
    pub(crate) cluster: &'a Cluster,
    /// The end of the server's WAL.
    pub(crate) server_lsn: Lsn,
    pub(crate) start: Start,
    /// Whether every published event has a record, in earlier sessions and in this session.
    pub(crate) records: RecordKeeping,
    /// Fingerprint of the publication, which was just checked and has no problem.
    pub(crate) publication: &'a str,
    /// Whether a configured table is not captured yet.
    pub(crate) has_new_table: bool,
    /// Whether a configured table takes over the record of an earlier table of the same partition tree.
    pub(crate) has_other_table: bool,
    /// The WAL position at which capturing began, if a command has recorded that position.
    pub(crate) since_lsn: Option<Lsn>,
    /// Whether the tables and settings still allow an unfinished recovery to find the rows that it has not read
    /// yet. If not, the recovery begins again.
    pub(crate) can_continue: bool,
}

/// How the session must begin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SlotVerdict {
    /// The facts show no loss, so the slot should stream every unrecorded event: stream from it. `audit` says
    /// which rows the first audit compares.
    Stream { confirmed: Lsn, audit: Audit },
    /// An earlier recovery has not finished, and its slot streams every transaction that the recovery's
    /// snapshot does not show. Publish the remaining rows from the tables, then stream.
    Continue {
        confirmed: Lsn,
        audit: Audit,
        unfinished: Unfinished,
    },
    /// The slot is fine, but its stream may miss rows that are in the tables: publish these rows from the
    /// tables, then stream from the same slot. A new slot would lose rows that were deleted from the tables.
    Keep {
        confirmed: Lsn,
        reason: RecoveryCause,
    },
    /// The stream of the slot may miss rows that are in the tables, and the slot is lost or suspect: recover
    /// with a new slot.
    Recover(RecoveryCause),
}

impl SlotVerdict {
    /// Decides how the session begins. The caller has checked that the relay's row comes from this cluster.
    pub(crate) fn of(facts: OpeningFacts<'_>) -> Self {
        let Some(earlier) = facts.earlier else {
            return first_start(facts);
        };
        let Some(why) = &earlier.recovering else {
            return served(earlier, facts);
        };
        let first_start = RecoveryCause::FirstStart(facts.start);
        let reason = if earlier.confirmed_lsn.is_none() && *why == first_start.name() {
            first_start
        } else {
            RecoveryCause::Unfinished(why.clone())
        };
        let unfinished = earlier.unfinished.as_ref();
        match (
            served(earlier, facts),
            unfinished.filter(|_| facts.can_continue),
        ) {
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
            // An interrupted recovery has created this slot, or has kept it, so the recovery begins again
            // with this slot.
            (SlotVerdict::Stream { .. } | SlotVerdict::Keep { .. }, _)
                if unfinished.is_some() || REASONS_NOT_ABOUT_THE_SLOT.contains(&why.as_str()) =>
            {
                keep(reason, facts)
            }
            _ => SlotVerdict::Recover(reason),
        }
    }

    /// The position of the slot, if a recovery keeps it.
    pub(crate) fn kept_from(&self) -> Option<Lsn> {
        match self {
            Self::Keep { confirmed, .. } => Some(*confirmed),
            Self::Stream { .. } | Self::Continue { .. } | Self::Recover(_) => None,
        }
    }
}

/// The reason why the stream of the slot may miss rows that are in the tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RecoveryCause {
    /// A recovery was begun or requested, and has not ended.
    Unfinished(String),
    /// No relay has used the slot yet. A recovery is needed because there is no slot, or because the existing rows
    /// must be published too (`start = all`).
    FirstStart(Start),
    /// A new table is captured from now on, and its existing rows must be published too (`start = all`).
    TableAdded,
    /// The settings name another table of the same partition tree than before. The stream still contains rows under
    /// the name of the earlier table. The relay cannot publish these rows from the stream, because the settings no
    /// longer contain the earlier table. So a recovery publishes them from the tables.
    OtherTable,
    /// The slot was in use before, and no longer exists.
    SlotMissing,
    /// The server has invalidated the slot, or has removed WAL that the slot needed.
    SlotLost(Health),
    /// The slot's position is ahead of `recorded`. `recorded` is the final position that the last session recorded.
    /// If no relay has used the slot yet, `recorded` is the position at which capturing began.
    SlotRecreated { recorded: Lsn, found: Lsn },
    /// The server's WAL ends before the last confirmed position.
    WalMissing { recorded: Lsn, server: Lsn },
    /// The publication was altered. This matters only if published events may lack a record, because the
    /// relay then cannot distinguish events that the stream left out from delivered events.
    PublicationChanged,
    /// The relay cannot prove that this is the slot from which it streamed before, so the stream may have left
    /// events out. This matters only if published events may lack a record, as with `PublicationChanged`.
    SlotUnproven { recorded: Lsn, found: Lsn },
}

/// Whether no relay has ever used the slot, apart from an interrupted first start.
pub(crate) fn is_first_start(earlier: Option<&EarlierSession>) -> bool {
    let first_start = RecoveryCause::FirstStart(Start::New).name();
    earlier.is_none_or(|earlier| {
        earlier.confirmed_lsn.is_none() && earlier.recovering.as_deref() == Some(first_start)
    })
}

/// Recovers with the present slot if that is possible, and otherwise with a new slot.
fn keep(reason: RecoveryCause, facts: OpeningFacts<'_>) -> SlotVerdict {
    let position = facts.slot.and_then(|slot| slot.confirmed_flush_lsn);
    // Keep no slot whose position is beyond the end of the WAL: it would skip the events that are committed up to
    // that position.
    let position = position.filter(|confirmed| *confirmed <= facts.server_lsn);
    match position.filter(|_| facts.cluster.streams_all_after_an_alter()) {
        Some(confirmed) => SlotVerdict::Keep { confirmed, reason },
        None => SlotVerdict::Recover(reason),
    }
}

/// Decides how the session begins if the relay has a row in `outbox.relay`. Ignores an unfinished recovery, because the
/// caller handles that case.
fn served(earlier: &EarlierSession, facts: OpeningFacts<'_>) -> SlotVerdict {
    let Some(recorded) = earlier.confirmed_lsn else {
        return first_start(facts);
    };
    let Some(slot) = facts.slot else {
        return SlotVerdict::Recover(RecoveryCause::SlotMissing);
    };
    match health(slot, facts) {
        health @ (Health::Lost | Health::Invalidated { .. }) => {
            SlotVerdict::Recover(RecoveryCause::SlotLost(health))
        }
        Health::Recreated { recorded, found } => {
            SlotVerdict::Recover(RecoveryCause::SlotRecreated { recorded, found })
        }
        _ if recorded > facts.server_lsn => {
            let server = facts.server_lsn;
            SlotVerdict::Recover(RecoveryCause::WalMissing { recorded, server })
        }
        _ if facts.has_new_table && facts.start == Start::All => {
            keep(RecoveryCause::TableAdded, facts)
        }
        _ if facts.has_other_table => keep(RecoveryCause::OtherTable, facts),
        _ if facts.records.may_lack_records() => without_records(earlier, recorded, slot, facts),
        _ => stream(slot, audit(earlier, recorded, slot, facts.cluster)),
    }
}

/// Decides how the session begins, if a relay has used the slot before and published events may lack a record. A row
/// without a record may have been published, so an audit cannot find the rows that the stream has missed. The relay
/// therefore recovers, unless all of these conditions hold:
///
/// - The publication has not changed.
/// - The timeline has not changed.
/// - The slot is not ahead of the recorded position, or [`is_proven`] shows that nobody has recreated the slot.
fn without_records(
    earlier: &EarlierSession,
    recorded: Lsn,
    slot: &Slot,
    facts: OpeningFacts<'_>,
) -> SlotVerdict {
    if earlier.publication.as_deref() != Some(facts.publication) {
        return keep(RecoveryCause::PublicationChanged, facts);
    }
    match audit(earlier, recorded, slot, facts.cluster) {
        Audit::Continue => stream(slot, Audit::Continue),
        Audit::Everything if is_proven(earlier, facts) => stream(slot, Audit::Continue),
        Audit::Everything => {
            let found = slot.confirmed_flush_lsn.unwrap_or_default();
            keep(RecoveryCause::SlotUnproven { recorded, found }, facts)
        }
    }
}

/// Whether it is certain that nobody has recreated the slot since the relay recorded its position. It is certain if
/// the timeline has not changed, and the slot keeps WAL from before the recorded position. A recreated slot would keep
/// WAL only from its creation on, so only from the recorded position or later.
///
/// The check does not detect two other changes:
///
/// - Somebody has advanced the slot with `pg_replication_slot_advance`, which may leave `restart_lsn` unchanged. (The
///   relay does notice `postrider slot advance`, because this command records a final position, or makes an
///   unfinished recovery start again.)
/// - Somebody has replaced the slot with a copy of another slot.
fn is_proven(earlier: &EarlierSession, facts: OpeningFacts<'_>) -> bool {
    let keeps_from = facts.slot.and_then(|slot| slot.restart_lsn);
    let is_old = keeps_from.is_some_and(|at| earlier.confirmed_lsn.is_some_and(|to| at < to));
    earlier.timeline == facts.cluster.timeline && is_old
}

fn first_start(facts: OpeningFacts<'_>) -> SlotVerdict {
    match (facts.start, facts.slot) {
        (Start::All, _) | (Start::New, None) => {
            SlotVerdict::Recover(RecoveryCause::FirstStart(facts.start))
        }
        (Start::New, Some(slot)) => match health(slot, facts) {
            health @ (Health::Lost | Health::Invalidated { .. }) => {
                SlotVerdict::Recover(RecoveryCause::SlotLost(health))
            }
            Health::Recreated { recorded, found } => {
                SlotVerdict::Recover(RecoveryCause::SlotRecreated { recorded, found })
            }
            _ if facts.has_other_table => keep(RecoveryCause::OtherTable, facts),
            _ => stream(slot, Audit::Continue),
        },
    }
}

fn stream(slot: &Slot, audit: Audit) -> SlotVerdict {
    match slot.confirmed_flush_lsn {
        Some(confirmed) => SlotVerdict::Stream { confirmed, audit },
        // A slot without a confirmed position was never completely created, so nothing can be streamed
        // from it.
        None => SlotVerdict::Recover(RecoveryCause::SlotLost(Health::Lost)),
    }
}

fn audit(earlier: &EarlierSession, recorded: Lsn, slot: &Slot, cluster: &Cluster) -> Audit {
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

impl RecoveryCause {
    /// A stable name in kebab case, for the relay's log, the metrics and the recovery mark.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            RecoveryCause::Unfinished(_) => UNFINISHED,
            RecoveryCause::FirstStart(_) => "first-start",
            RecoveryCause::TableAdded => TABLE_ADDED,
            RecoveryCause::OtherTable => OTHER_TABLE,
            RecoveryCause::SlotMissing => "slot-missing",
            RecoveryCause::SlotLost(_) => "slot-lost",
            RecoveryCause::SlotRecreated { .. } => "slot-recreated",
            RecoveryCause::WalMissing { .. } => "wal-missing",
            RecoveryCause::PublicationChanged => PUBLICATION_CHANGED,
            RecoveryCause::SlotUnproven { .. } => SLOT_UNPROVEN,
        }
    }

    /// Returns the error with which the relay stops if `slot_on_loss` is `stop`. Returns `None` if the relay
    /// recovers even with this setting, because a recovery was begun or requested, or because the slot is not
    /// lost.
    pub(crate) fn stops(&self, slot: &SlotName) -> Option<Error> {
        let code = match self {
            RecoveryCause::Unfinished(_)
            | RecoveryCause::FirstStart(_)
            | RecoveryCause::TableAdded
            | RecoveryCause::OtherTable
            | RecoveryCause::PublicationChanged
            | RecoveryCause::SlotUnproven { .. } => return None,
            RecoveryCause::SlotMissing => Code::SlotMissing,
            RecoveryCause::SlotLost(_) => Code::SlotLost,
            RecoveryCause::SlotRecreated { .. } | RecoveryCause::WalMissing { .. } => {
                Code::SlotRecreated
            }
        };
        Some(Error::new(code, format!("slot \"{slot}\": {self}")))
    }
}

impl fmt::Display for RecoveryCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RecoveryCause::Unfinished(why) => {
                write!(f, "an earlier recovery ({why}) has not finished")
            }
            RecoveryCause::FirstStart(Start::All) => {
                f.write_str("first start, and `start` is `all`")
            }
            RecoveryCause::FirstStart(Start::New) => {
                f.write_str("first start: there is no slot yet")
            }
            RecoveryCause::TableAdded => {
                f.write_str("a new table is captured, and `start` is `all`")
            }
            RecoveryCause::OtherTable => f.write_str(
                "the settings name another table of the same partition tree than before",
            ),
            RecoveryCause::SlotMissing => {
                f.write_str("the slot was in use before and no longer exists")
            }
            RecoveryCause::SlotLost(Health::Invalidated { cause }) => {
                write!(f, "PostgreSQL has invalidated the slot ({cause:?})")
            }
            RecoveryCause::SlotLost(_) => {
                f.write_str("PostgreSQL has removed WAL that the slot needed")
            }
            RecoveryCause::SlotRecreated { recorded, found } => write!(
                f,
                "the slot's position is {found}, but the relay left it at {recorded}: somebody has recreated \
                 or advanced it"
            ),
            RecoveryCause::WalMissing { recorded, server } => write!(
                f,
                "{recorded} was confirmed, but the server's WAL ends at {server}: the server was rolled \
                 back"
            ),
            RecoveryCause::PublicationChanged => f.write_str(
                "the publication was altered after everything was last known to be delivered \
                 (dispatch = exceptions)",
            ),
            RecoveryCause::SlotUnproven { recorded, found } => write!(
                f,
                "the slot's position is {found}, but {recorded} was recorded last: it may be another \
                 slot, or on another server (dispatch = exceptions)"
            ),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;

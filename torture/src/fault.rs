//! The faults of a schedule.

use std::fmt;
use std::time::Duration;

use pubsub_emulator::Action;

#[derive(Debug, Clone)]
pub(crate) enum Fault {
    /// A relay is killed by SIGKILL, and a new relay starts after this time.
    Kill(Duration),
    /// A relay is stopped by SIGTERM, and a new relay starts after this time.
    Stop(Duration),
    /// A relay, usually the one that holds the slot, gets SIGSTOP, and SIGCONT after this time.
    Freeze(Duration),
    /// `pg_terminate_backend` ends every walsender.
    TerminateWalsender,
    /// `pg_terminate_backend` ends all SQL sessions of the relays.
    TerminateSql,
    /// No session can write to the dispatch table for this time.
    LockDispatch(Duration),
    /// PostgreSQL goes down for this time.
    Server(Outage, Duration),
    /// Pub/Sub applies this action to the next publish requests. The number says to how many.
    Publish(Action, u64),
    /// Pub/Sub applies this action to every publish request until this time has passed.
    PublishFor(Action, Duration),
    /// The topic of this kind of events does not exist for this time.
    TopicGone(&'static str, Duration),
    /// All connections to Pub/Sub are cut.
    CutPubsub,
    /// All connections to Pub/Sub are reset, and new ones are refused for this time.
    RefusePubsub(Duration),
    /// The network between a relay and one of its peers is disturbed for this time.
    Network(Side, Trouble, Duration),
    /// The slot is lost while the relay is in this state.
    SlotLost(Down, Loss),
    /// The stream does not contain the outbox table during this time, because the publication or the
    /// relay's settings do not contain it.
    Gap(Down, Unpublished, Duration),
    /// The outbox table is replaced by another one with the same name.
    Replaced(Down, Replacement),
    /// A service commits a row that is longer than the relay accepts from the stream.
    TooLong,
    /// A service commits a row with bytes that PostgreSQL cannot convert to UTF-8. The number identifies the
    /// row in its schedule.
    Undecodable(u64),
    /// Pub/Sub accepts the refused events from now on, and everything in quarantine is released.
    Release,
}

/// What happens to a relay right before the fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Down {
    Running,
    /// The relay is killed by SIGKILL before the fault. A new relay starts afterwards.
    Killed,
    /// The relay is stopped by SIGTERM before the fault. A new relay starts afterwards.
    Stopped,
}

/// How a slot is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Loss {
    Dropped,
    /// The slot is dropped and recreated at once.
    Recreated,
    /// The server invalidates the slot because of `max_slot_wal_keep_size`.
    Invalidated,
}

/// Why the stream does not contain the outbox table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unpublished {
    TableOut,
    PublicationDropped,
    /// For a while, a relay whose settings name another table reads from the slot.
    NotInSettings,
}

/// What happens to the rows of the replaced table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Replacement {
    /// The rows are copied to the new table before it takes the old table's name.
    Copied,
    /// The rows are dropped with the old table. Rows that were not published yet are then only in
    /// the WAL.
    Recreated,
}

/// A peer of the relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Postgres,
    Pubsub,
}

/// How the network is disturbed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// No bytes pass until the fault ends. Then all bytes arrive.
    Stalled,
    /// All bytes are lost, and the connections break when the fault ends.
    Swallowed,
    /// All bytes arrive this much later.
    Delayed(Duration),
    /// All connections break once, by RST.
    Reset,
    /// All connections end once, by FIN.
    Finished,
}

/// How PostgreSQL goes down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outage {
    Fast,
    Immediate,
    Kill9,
}

impl Fault {
    /// Whether the fault withholds answers, so that only the relay's own timeout ends an attempt to publish.
    pub(crate) fn withholds_answers(&self) -> bool {
        matches!(
            self,
            Fault::Publish(Action::NeverAnswer | Action::StoreThenNeverAnswer, _)
                | Fault::Network(Side::Pubsub, Trouble::Stalled | Trouble::Swallowed, _)
        )
    }

    /// Whether the fault can make the relay lose its lease.
    pub(crate) fn tries_the_lease(&self) -> bool {
        matches!(
            self,
            Fault::Freeze(_)
                | Fault::Network(Side::Postgres, Trouble::Stalled | Trouble::Swallowed, _)
        )
    }

    /// Whether the stream omits rows because of this fault, and the relay publishes them after later rows of
    /// their key. This happens after a gap in the stream. It also happens if the relay mistakes a recreated
    /// slot for its old slot.
    pub(crate) fn leaves_late_rows(&self) -> bool {
        match self {
            Fault::Gap(..) => true,
            Fault::SlotLost(down, loss) => *down != Down::Stopped && *loss == Loss::Recreated,
            _ => false,
        }
    }

    /// Whether the slot is lost or cannot deliver a row. The relay must then read the missing rows from their
    /// table.
    pub(crate) fn needs_new_slot(&self) -> bool {
        matches!(
            self,
            Fault::SlotLost(..) | Fault::TooLong | Fault::Undecodable(_)
        )
    }

    /// Whether the slot is recreated after a clean stop. The relay can notice this only by comparing the slot's
    /// position with the final position that it recorded at the stop.
    pub(crate) fn follows_a_clean_stop(&self) -> bool {
        matches!(self, Fault::SlotLost(Down::Stopped, Loss::Recreated))
    }

    /// How long the fault continues after the harness has caused it.
    pub(crate) fn lasts(&self) -> Duration {
        match self {
            Fault::PublishFor(_, span)
            | Fault::TopicGone(_, span)
            | Fault::RefusePubsub(span)
            | Fault::LockDispatch(span)
            | Fault::Network(_, _, span) => *span,
            // Long enough for the relay to read the row twice and then create a new slot.
            Fault::TooLong | Fault::Undecodable(_) => Duration::from_secs(30),
            // These faults are over once the harness has caused them. Only `Publish` continues, because it acts on the
            // next requests. The judges do not need to know how long. If the relay repeats an event because of
            // `Publish`, the answer to the first copy explains the duplicate: it was an error, or it did not arrive in
            // time.
            Fault::Kill(_)
            | Fault::Stop(_)
            | Fault::Freeze(_)
            | Fault::TerminateWalsender
            | Fault::TerminateSql
            | Fault::Server(..)
            | Fault::Publish(..)
            | Fault::CutPubsub
            | Fault::SlotLost(..)
            | Fault::Gap(..)
            | Fault::Replaced(..)
            | Fault::Release => Duration::ZERO,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Kill(gap) => write!(f, "kill -9 of the relay, a new relay after {gap:?}"),
            Fault::Stop(gap) => write!(f, "SIGTERM to the relay, a new relay after {gap:?}"),
            Fault::Freeze(span) => write!(f, "SIGSTOP to the relay for {span:?}"),
            Fault::TerminateWalsender => f.write_str("pg_terminate_backend of the walsender"),
            Fault::TerminateSql => f.write_str("pg_terminate_backend of the relay's SQL sessions"),
            Fault::LockDispatch(span) => write!(f, "outbox.dispatch is locked for {span:?}"),
            Fault::Server(outage, span) => {
                let how = match outage {
                    Outage::Fast => "fast shutdown",
                    Outage::Immediate => "immediate shutdown",
                    Outage::Kill9 => "kill -9",
                };
                write!(f, "{how} of PostgreSQL, up again after {span:?}")
            }
            Fault::Publish(action, times) => write!(f, "the next {times} publishes: {action:?}"),
            Fault::PublishFor(action, span) => {
                write!(f, "every publish for {span:?}: {action:?}")
            }
            Fault::TopicGone(kind, span) => write!(f, "topic {kind}.events is gone for {span:?}"),
            Fault::CutPubsub => f.write_str("all connections to Pub/Sub are cut"),
            Fault::RefusePubsub(span) => write!(f, "Pub/Sub refuses connections for {span:?}"),
            Fault::Network(side, Trouble::Reset | Trouble::Finished, _) => {
                write!(f, "a relay's connections to {side:?} are broken")
            }
            Fault::Network(side, trouble, span) => {
                write!(f, "network to {side:?} for {span:?}: {trouble:?}")
            }
            Fault::SlotLost(down, loss) => write!(f, "the slot is {loss}, the relay {down}"),
            Fault::Gap(down, Unpublished::TableOut, span) => {
                write!(
                    f,
                    "the table is out of the publication for {span:?}, the relay {down}"
                )
            }
            Fault::Gap(down, Unpublished::PublicationDropped, span) => {
                write!(f, "there is no publication for {span:?}, the relay {down}")
            }
            Fault::Gap(_, Unpublished::NotInSettings, span) => {
                write!(f, "the settings have another table for {span:?}")
            }
            Fault::Replaced(down, how) => {
                write!(f, "the table is {how:?} under its name, the relay {down}")
            }
            Fault::TooLong => f.write_str("a row is too long for the stream"),
            Fault::Undecodable(number) => write!(f, "row {number} that has no form in UTF-8"),
            Fault::Release => {
                f.write_str("refusals are lifted and everything in quarantine is released")
            }
        }
    }
}

impl fmt::Display for Down {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Down::Running => "running",
            Down::Killed => "was killed by kill -9 before",
            Down::Stopped => "was stopped by SIGTERM before",
        })
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Loss::Dropped => "dropped",
            Loss::Recreated => "dropped and recreated",
            Loss::Invalidated => "invalidated by the server",
        })
    }
}

//! What can go wrong in a schedule.

use std::fmt;
use std::time::Duration;

use pubsub_emulator::Action;

/// What goes wrong.
#[derive(Debug, Clone)]
pub(super) enum Fault {
    /// SIGKILL to a relay, and a new one after this time.
    Kill(Duration),
    /// SIGTERM to a relay, and a new one after this time.
    Stop(Duration),
    /// SIGSTOP to the relay that holds the slot, SIGCONT after this time.
    Freeze(Duration),
    /// `pg_terminate_backend` of the walsender.
    TerminateWalsender,
    /// `pg_terminate_backend` of all SQL sessions of the relay.
    TerminateSql,
    /// Nobody can write to the dispatch table for this time.
    LockDispatch(Duration),
    /// PostgreSQL goes down for this time.
    Server(Outage, Duration),
    /// So many publishes meet this action.
    Publish(Action, u64),
    /// Every publish meets this action for this time.
    PublishFor(Action, Duration),
    /// A topic is gone for this time.
    TopicGone(&'static str, Duration),
    /// All connections to Pub/Sub are cut.
    CutPubsub,
    /// Pub/Sub is cut and takes no connections for this time.
    RefusePubsub(Duration),
    /// The network between a relay and one of its peers, for this time.
    Network(Side, Trouble, Duration),
    /// The slot is lost behind a relay that is in this condition.
    SlotLost(Down, Loss),
    /// The publication does not carry the outbox table for this time.
    Gap(Down, Unpublished, Duration),
    /// The outbox table is another one from now on, under the same name.
    Replaced(Down, Replacement),
    /// A row that is longer than the relay reads from the stream.
    TooLong,
    /// Nothing is refused any more, and everything in quarantine is released.
    Release,
}

/// What a relay does while something happens behind its back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Down {
    Running,
    /// By `kill -9`; started again afterwards.
    Killed,
    /// By SIGTERM; started again afterwards.
    Stopped,
}

/// How a slot is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loss {
    Dropped,
    /// Dropped, and made anew at once.
    Recreated,
    /// By `max_slot_wal_keep_size`.
    Invalidated,
}

/// How the stream leaves the outbox table out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unpublished {
    TableOut,
    PublicationDropped,
    /// Another version of the settings serves for a while, and has another table.
    NotInSettings,
}

/// Where the rows of the old table are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Replacement {
    /// In the new table, which is swapped for the old one.
    Copied,
    /// Dropped with the old table; the WAL has those that were not published yet.
    Recreated,
}

/// A peer of the relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Postgres,
    Pubsub,
}

/// What a network does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trouble {
    /// Nothing passes, and all of it comes in the end.
    Stalled,
    /// Everything vanishes, and connections break in the end.
    Swallowed,
    /// Everything comes so much later.
    Delayed(Duration),
    /// Connections break by RST, once.
    Reset,
    /// Connections end by FIN, once.
    Finished,
}

/// How PostgreSQL goes down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outage {
    Fast,
    Immediate,
    Kill9,
}

impl Fault {
    /// Whether an attempt ends only by the relay's own limit.
    pub(super) fn withholds_answers(&self) -> bool {
        matches!(
            self,
            Fault::Publish(Action::NeverAnswer | Action::StoreThenNeverAnswer, _)
                | Fault::Network(Side::Pubsub, Trouble::Stalled | Trouble::Swallowed, _)
        )
    }

    /// Whether the relay may lose its lease over it.
    pub(super) fn tries_the_lease(&self) -> bool {
        matches!(
            self,
            Fault::Freeze(_)
                | Fault::Network(Side::Postgres, Trouble::Stalled | Trouble::Swallowed, _)
        )
    }

    /// Whether rows that are left out come behind later ones of their key: a gap that the stream
    /// has passed, or a slot that cannot be told from one that moved on.
    pub(super) fn leaves_late_rows(&self) -> bool {
        match self {
            Fault::Gap(..) => true,
            Fault::SlotLost(down, loss) => *down != Down::Stopped && *loss == Loss::Recreated,
            _ => false,
        }
    }

    /// Whether rows have to be read from their table, since the slot cannot bring them.
    pub(super) fn needs_new_slot(&self) -> bool {
        matches!(self, Fault::SlotLost(..) | Fault::TooLong)
    }

    /// Whether the relay has to tell a slot that was made anew by what it left behind.
    pub(super) fn follows_a_clean_stop(&self) -> bool {
        matches!(self, Fault::SlotLost(Down::Stopped, Loss::Recreated))
    }

    /// How long it goes on when it has been caused and left alone.
    pub(super) fn lasts(&self) -> Duration {
        match self {
            Fault::PublishFor(_, span)
            | Fault::TopicGone(_, span)
            | Fault::RefusePubsub(span)
            | Fault::LockDispatch(span)
            | Fault::Network(_, _, span) => *span,
            // Some seconds until the relay has met the row twice and made a new slot.
            Fault::TooLong => Duration::from_secs(30),
            // Over when they have been caused.
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
            Fault::Kill(gap) => write!(f, "kill -9 of the relay, a new one after {gap:?}"),
            Fault::Stop(gap) => write!(f, "SIGTERM to the relay, a new one after {gap:?}"),
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
            Fault::Release => f.write_str("everything in quarantine is cured and released"),
        }
    }
}

impl fmt::Display for Down {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Down::Running => "running",
            Down::Killed => "killed before by kill -9",
            Down::Stopped => "stopped before by SIGTERM",
        })
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Loss::Dropped => "dropped",
            Loss::Recreated => "dropped and made anew",
            Loss::Invalidated => "invalidated by the server",
        })
    }
}

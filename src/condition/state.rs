//! Names the states of a relay and its slot. Every view uses these names: the commands, the HTTP port,
//! the page, the metrics and the relay's log.

use serde::{Deserialize, Serialize};

/// The state of a relay and its slot. docs/reference/states.md describes each state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// The relay is opening a session.
    Starting,
    /// The relay delivers each event soon after its commit.
    Streaming,
    /// The relay delivers, but events wait because it was stopped, or is slower than the services that
    /// insert them.
    CatchingUp,
    /// Publishing to one or more topics fails.
    BlockedOnPubsub,
    /// PostgreSQL cannot be reached, or holds up the relay: for example, the relay cannot write its records,
    /// or waits for a lock before its session can begin.
    BlockedOnDatabase,
    /// The relay publishes rows from the tables, for example because it has lost its slot or has created its
    /// first one.
    Recovering,
    /// Another relay has the slot.
    Standby,
    /// A session cannot begin or has ended with an error, or the publication is wrong. An operator must
    /// correct this.
    Broken,
    /// No relay reads the slot, or the relay that holds the slot does not answer.
    Down,
    /// Less than a quarter of `max_slot_wal_keep_size`, the WAL that PostgreSQL may keep for a slot, is
    /// still unused.
    NearlyFull,
    /// The next checkpoint may remove WAL that the slot needs.
    Unreserved,
    /// PostgreSQL removed WAL that the slot needs.
    Lost,
    /// PostgreSQL invalidated the slot for another reason.
    Invalidated,
    /// The slot does not exist.
    Missing,
    /// Somebody recreated the slot or advanced it, so the slot does not stream some events.
    Recreated,
    /// The records of the relay come from another cluster or database.
    ForeignCluster,
}

impl State {
    /// All states.
    pub const ALL: [Self; 16] = [
        Self::Starting,
        Self::Streaming,
        Self::CatchingUp,
        Self::BlockedOnPubsub,
        Self::BlockedOnDatabase,
        Self::Recovering,
        Self::Standby,
        Self::Broken,
        Self::Down,
        Self::NearlyFull,
        Self::Unreserved,
        Self::Lost,
        Self::Invalidated,
        Self::Missing,
        Self::Recreated,
        Self::ForeignCluster,
    ];

    /// The name of the state, in kebab case.
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Streaming => "streaming",
            Self::CatchingUp => "catching-up",
            Self::BlockedOnPubsub => "blocked-on-pubsub",
            Self::BlockedOnDatabase => "blocked-on-database",
            Self::Recovering => "recovering",
            Self::Standby => "standby",
            Self::Broken => "broken",
            Self::Down => "down",
            Self::NearlyFull => "nearly-full",
            Self::Unreserved => "unreserved",
            Self::Lost => "lost",
            Self::Invalidated => "invalidated",
            Self::Missing => "missing",
            Self::Recreated => "recreated",
            Self::ForeignCluster => "foreign-cluster",
        }
    }
}

//! The types of settings that choose one of a few options.

/// What to do with an event that can never be published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnBadEvent {
    /// Quarantine the event and the later events of its ordering key, to keep the order.
    QuarantineKey,
    /// Quarantine only the event; later events are published.
    QuarantineEvent,
    /// The relay stops.
    Halt,
}

/// What the first start on a database delivers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Rows committed from then on.
    New,
    /// Also the unrecorded rows that are already in the tables.
    All,
}

/// What to do when the slot is missing, lost or recreated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnLoss {
    /// Create a new slot, and publish the unrecorded rows from the tables.
    Recover,
    /// Exit with an error that gives the reason.
    Stop,
}

/// Which events get a row in `outbox.dispatch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dispatch {
    /// All events.
    Full,
    /// Only quarantined events. After a crash, all events since the confirmed position are published
    /// again.
    Exceptions,
}

impl Dispatch {
    /// The name in the settings and in `outbox.relay`.
    pub fn name(self) -> &'static str {
        match self {
            Dispatch::Full => "full",
            Dispatch::Exceptions => "exceptions",
        }
    }

    /// The option with this name.
    pub fn named(name: &str) -> Option<Self> {
        [Dispatch::Full, Dispatch::Exceptions]
            .into_iter()
            .find(|dispatch| dispatch.name() == name)
    }
}

/// Where Pub/Sub is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// An emulator at `host:port`: plain text, no credentials.
    Emulator(String),
    /// The service, or anything that speaks its protocol, as a URL.
    Service(String),
}

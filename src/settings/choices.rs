//! What a setting that names one of a few things stands for.

/// What becomes of an event that can never be published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnBadEvent {
    /// It is set aside, and so are later events of its ordering key: order is kept.
    QuarantineKey,
    /// It is set aside; later ones go on.
    QuarantineEvent,
    /// The relay stops.
    Halt,
}

/// What the first start on a database delivers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Rows that are committed from then on.
    New,
    /// Also the rows that are in the tables and have no record.
    All,
}

/// What to do when the slot is missing, lost or not the one that was left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnLoss {
    /// Make a new one, and deliver what has no record from the tables.
    Recover,
    /// Leave with the reason.
    Stop,
}

/// Which events get a row in `outbox.dispatch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dispatch {
    /// Each one.
    Full,
    /// Those that are set aside. A crash repeats what was published since the confirmed position.
    Exceptions,
}

impl Dispatch {
    /// As it is written in settings and in `outbox.relay`.
    pub fn name(self) -> &'static str {
        match self {
            Dispatch::Full => "full",
            Dispatch::Exceptions => "exceptions",
        }
    }

    /// The one of that name.
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

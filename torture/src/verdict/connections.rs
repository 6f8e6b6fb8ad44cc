//! When each connection to Pub/Sub was opened, and when its last request arrived.
//!
//! A fault that kills a relay or breaks its connections explains a duplicate only if one copy arrived over a
//! connection that ended with the fault, and the other copy over a connection that was opened afterwards. Such
//! a fault does not explain a duplicate that a living relay sends over its own connections.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use pubsub_emulator::Attempt;

use super::duplicates::LATE;
use crate::stage::Occurrence;

/// A connection: the client's address, and when the connection was accepted, if known. A client may
/// use a port again later, so only the time distinguishes the connections of a port.
pub(super) type Connection = (SocketAddr, Option<Duration>);

/// The connection over which an attempt arrived, if the journal knows it.
pub(super) fn connection(attempt: &Attempt) -> Option<Connection> {
    Some((attempt.peer?, attempt.connected))
}

/// For each connection: when it was accepted (or, if that is not known, when its first request
/// arrived), and when its last request arrived.
#[derive(Debug)]
pub(super) struct Connections(HashMap<Connection, (Duration, Duration)>);

impl Connections {
    pub(super) fn of(attempts: &[Attempt]) -> Self {
        let mut connections = HashMap::new();
        for attempt in attempts {
            let Some(connection) = connection(attempt) else {
                continue;
            };
            let at = attempt.received;
            let opened = attempt.connected.unwrap_or(at);
            let (first, last) = connections.entry(connection).or_insert((opened, at));
            (*first, *last) = (opened.min(*first), at.max(*last));
        }
        Self(connections)
    }

    /// When the connection was accepted, or `None` if no attempt arrived over it.
    pub(super) fn opened(&self, connection: Connection) -> Option<Duration> {
        self.0.get(&connection).map(|(opened, _)| *opened)
    }

    /// Whether the fault may be the reason why the two attempts arrived over different connections: the fault has ended
    /// the connection of one attempt, and a relay has sent the other attempt over a new connection. The conditions are:
    ///
    /// - One connection was opened before the end of the fault. Its last request arrived before the end of the fault,
    ///   or at most [`LATE`] afterwards.
    /// - The other connection was opened after the beginning of the fault. With several relays, it may also be older:
    ///   the relay that takes over the slot may have held the slot before, and may still have a connection from that
    ///   time.
    pub(super) fn are_parted_by(
        &self,
        occurrence: &Occurrence,
        relays: usize,
        one: &Attempt,
        other: &Attempt,
    ) -> bool {
        let span = |attempt: &Attempt| self.0.get(&connection(attempt)?).copied();
        let (Some(of_one), Some(of_other)) = (span(one), span(other)) else {
            return false;
        };
        let ended = |(opened, last)| opened <= occurrence.to && last <= occurrence.to + LATE;
        let began = |(opened, _)| opened >= occurrence.from || relays > 1;
        connection(one) != connection(other)
            && [(of_one, of_other), (of_other, of_one)]
                .into_iter()
                .any(|(gone, next)| ended(gone) && began(next))
    }
}

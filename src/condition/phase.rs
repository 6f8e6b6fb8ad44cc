//! The phase of the relay: what it is doing between and during its sessions.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use slot_manager::Holder;

use super::trouble::Trouble;
use crate::error::Error;

/// The phase of the relay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// No session yet.
    Connecting,
    /// Another session, described here, holds the slot.
    Standby(String),
    /// Recovers: creates a new slot, or continues with the slot of an unfinished recovery, and
    /// publishes older rows from the tables.
    Recovering,
    /// Streams from the slot.
    Streaming,
    /// The last session broke; another attempt follows.
    Broken(Trouble),
}

impl Phase {
    /// The name of the phase, in kebab case.
    pub fn name(&self) -> &'static str {
        match self {
            Phase::Connecting => "connecting",
            Phase::Standby(_) => "standby",
            Phase::Recovering => "recovering",
            Phase::Streaming => "streaming",
            Phase::Broken(_) => "broken",
        }
    }
}

/// The shared, current phase, and since when it lasts.
#[derive(Debug)]
pub struct RelayState(Mutex<(Phase, Instant)>);

impl Default for RelayState {
    fn default() -> Self {
        Self(Mutex::new((Phase::Connecting, Instant::now())))
    }
}

impl RelayState {
    fn lock(&self) -> MutexGuard<'_, (Phase, Instant)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The current phase.
    pub fn phase(&self) -> Phase {
        self.lock().0.clone()
    }

    /// The current phase, and since when it lasts.
    pub fn phase_since(&self) -> (Phase, Instant) {
        self.lock().clone()
    }

    pub(crate) fn set(&self, phase: Phase) {
        let mut current = self.lock();
        if current.0 != phase {
            *current = (phase, Instant::now());
        }
    }

    /// A session has ended with an error, or could not begin. An error that lasts over several attempts
    /// keeps its beginning.
    pub(crate) fn broken(&self, error: &Error) {
        let mut current = self.lock();
        let since = match &current.0 {
            Phase::Broken(earlier) if earlier.code == error.code() => earlier.since,
            _ => Instant::now(),
        };
        *current = (Phase::Broken(Trouble::of(error, since)), since);
    }

    /// Sets the phase. Leaves out the holder's role and address, because anyone who can reach the
    /// HTTP port sees this. The log and `postrider slot` have them.
    pub(crate) fn standby(&self, holder: Option<&Holder>) {
        let shown = holder.map(|holder| Holder {
            client_addr: None,
            user: None,
            ..holder.clone()
        });
        self.set(Phase::Standby(
            shown.map(|holder| holder.to_string()).unwrap_or_default(),
        ));
    }
}

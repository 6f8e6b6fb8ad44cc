//! Tracks the phase of the relay: what the relay is doing between and during its sessions.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use slot_manager::Holder;

use super::trouble::Trouble;
use crate::error::Error;

/// The phase of the relay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// The relay has had no session yet.
    Connecting,
    /// Another session, described here, holds the slot.
    Standby(String),
    /// The relay recovers: it creates a new slot, or continues with the slot of an unfinished recovery, and
    /// publishes older rows from the tables.
    Recovering,
    /// The relay streams from the slot.
    Streaming,
    /// The last session ended with an error; another attempt follows.
    Broken(Trouble),
}

/// The current phase and when it began, shared by all parts of the relay.
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

    /// The current phase, and when it began.
    pub fn phase_since(&self) -> (Phase, Instant) {
        self.lock().clone()
    }

    pub(crate) fn set(&self, phase: Phase) {
        let mut current = self.lock();
        if current.0 != phase {
            *current = (phase, Instant::now());
        }
    }

    /// Notes that a session has ended with an error, or could not begin. An error that recurs over several
    /// attempts keeps its start time.
    pub(crate) fn broken(&self, error: &Error) {
        let mut current = self.lock();
        let since = match &current.0 {
            Phase::Broken(earlier) if earlier.code == error.code() => earlier.since,
            _ => Instant::now(),
        };
        *current = (Phase::Broken(Trouble::of(error, since)), since);
    }

    /// Sets the phase to [`Phase::Standby`]. Leaves out the holder's role and address, because anyone who
    /// can reach the HTTP port sees the phase. The log and `postrider slot` show them.
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

//! What the relay is doing now, for `/readyz`, `/status` and the log.

use std::sync::Mutex;

use slot_manager::Holder;

use crate::error::Code;

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
    Broken(Code),
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

/// The shared, current phase.
#[derive(Debug)]
pub struct RelayState(Mutex<Phase>);

impl Default for RelayState {
    fn default() -> Self {
        Self(Mutex::new(Phase::Connecting))
    }
}

impl RelayState {
    /// The current phase.
    pub fn phase(&self) -> Phase {
        match self.0.lock() {
            Ok(phase) => phase.clone(),
            Err(poisoned) => poisoned.into_inner().clone(),
        }
    }

    pub(crate) fn set(&self, phase: Phase) {
        match self.0.lock() {
            Ok(mut current) => *current = phase,
            Err(poisoned) => *poisoned.into_inner() = phase,
        }
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

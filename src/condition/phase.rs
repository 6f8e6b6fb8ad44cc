//! Tracks the phase of the relay: what the relay is doing between and during its sessions.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use slot_manager::Holder;

use super::trouble::Trouble;
use crate::error::Error;

/// The phase of the relay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// The relay opens its first session, or its next session after another program has held the slot.
    Connecting,
    /// Another relay holds the slot. The text describes the session of that relay.
    Standby(String),
    /// A program that is not a relay holds the slot.
    HeldByStranger(Trouble),
    /// The relay recovers: the stream of its slot may lack rows, so the relay publishes them from the tables.
    /// The slot is a new slot, a healthy slot that the relay keeps, or the slot of an unfinished recovery.
    Recovering,
    /// The relay streams from the slot.
    Streaming,
    /// The last session ended with an error; another attempt follows.
    Broken(Trouble),
}

/// The current phase and when it began, shared by all parts of the relay.
#[derive(Debug)]
pub struct RelayState {
    phase: Mutex<(Phase, Instant)>,
    /// The trouble that ended the previous relay. If this relay cannot start because of the same trouble, it reports
    /// the trouble with the original start time. `None` once this relay has streamed, begun a recovery, or been a
    /// standby.
    earlier: Mutex<Option<Trouble>>,
    /// Whether this relay has streamed, or was a standby. If not, the error `table-captured` stops the relay. If so,
    /// the error ends only the session, and the relay tries again.
    has_served: AtomicBool,
}

impl Default for RelayState {
    fn default() -> Self {
        Self {
            phase: Mutex::new((Phase::Connecting, Instant::now())),
            earlier: Mutex::default(),
            has_served: AtomicBool::new(false),
        }
    }
}

impl RelayState {
    fn lock(&self) -> MutexGuard<'_, (Phase, Instant)> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn earlier(&self) -> MutexGuard<'_, Option<Trouble>> {
        self.earlier.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the trouble that ended the previous relay.
    pub(crate) fn ended_before(&self, trouble: Trouble) {
        *self.earlier() = Some(trouble);
    }

    /// Whether this relay has streamed, or was a standby.
    pub(crate) fn has_served(&self) -> bool {
        self.has_served.load(Ordering::Relaxed)
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
        if matches!(
            phase,
            Phase::Streaming | Phase::Recovering | Phase::Standby(_)
        ) {
            *self.earlier() = None;
        }
        // `Recovering` does not set `has_served`, because a relay may enter this phase at its first start, before it
        // claims the tables. If another slot captures one of them, the error `table-captured` must stop the relay.
        if matches!(phase, Phase::Streaming | Phase::Standby(_)) {
            self.has_served.store(true, Ordering::Relaxed);
        }
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
            _ => {
                let what = error.to_string();
                let same =
                    |trouble: &&Trouble| trouble.code == error.code() && trouble.what == what;
                let earlier = self.earlier();
                let earlier = earlier.as_ref().filter(same);
                earlier.map_or_else(Instant::now, |trouble| trouble.since)
            }
        };
        *current = (Phase::Broken(Trouble::of(error, since)), since);
    }

    pub(crate) fn standby(&self, holder: &Holder) {
        self.set(Phase::Standby(public(holder)));
    }

    /// Notes that a program that is not a relay holds the slot. `error` describes this trouble.
    pub(crate) fn held_by_stranger(&self, error: &Error) {
        let mut current = self.lock();
        let since = match &current.0 {
            Phase::HeldByStranger(earlier) => earlier.since,
            _ => Instant::now(),
        };
        *current = (Phase::HeldByStranger(Trouble::of(error, since)), since);
    }
}

/// Describes the holder of a slot for the HTTP port, which anyone may read. Leaves out the holder's role and
/// address, which the relay's log and `postrider slot` show.
pub(crate) fn public(holder: &Holder) -> String {
    let shown = Holder {
        client_addr: None,
        user: None,
        ..holder.clone()
    };
    shown.to_string()
}

//! Tracks the phase of the relay: what the relay is doing between and during its sessions.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

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

/// If a recovery has run at least this long before it fails, its error counts as a new trouble, even if an earlier
/// attempt failed with the same error. An attempt that cannot create the slot fails earlier.
const WORKING_RECOVERY: Duration = Duration::from_secs(600);

/// The current phase and when it began, shared by all parts of the relay.
#[derive(Debug)]
pub struct RelayState {
    phase: Mutex<(Phase, Instant)>,
    /// The trouble that ended the previous relay, or the session before the present recovery. If the same trouble occurs
    /// again, the relay reports it with its original start time, unless the recovery has run for [`WORKING_RECOVERY`].
    /// `None` once this relay streams or is a standby.
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
        let ended = self.lock().0.clone();
        match (&phase, ended) {
            (Phase::Streaming | Phase::Standby(_), _) => *self.earlier() = None,
            (Phase::Recovering, Phase::Broken(trouble)) => *self.earlier() = Some(trouble),
            _ => {}
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
            phase => {
                let what = error.to_string();
                let has_worked =
                    *phase == Phase::Recovering && current.1.elapsed() >= WORKING_RECOVERY;
                let same = |trouble: &&Trouble| {
                    !has_worked && trouble.code == error.code() && trouble.what == what
                };
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    #[test]
    fn a_trouble_that_ends_each_attempt_to_recover_keeps_its_start_time() {
        let state = RelayState::default();
        let error = |what: &str| Error::new(Code::PostgresTimeout, what);
        let since = |what: &str| {
            state.set(Phase::Recovering);
            state.broken(&error(what));
            state.phase_since().1
        };
        let first = since("all slots are in use");
        assert_eq!(since("all slots are in use"), first);
        assert_eq!(since("all slots are in use"), first);
        assert!(since("something else") > first);
        assert!(since("all slots are in use") > first, "a new trouble");
    }

    #[test]
    fn an_error_after_a_long_recovery_is_a_new_trouble() {
        let state = RelayState::default();
        let error = Error::new(Code::PostgresTimeout, "all slots are in use");
        state.broken(&error);
        let first = state.phase_since().1;
        state.set(Phase::Recovering);
        state.lock().1 -= WORKING_RECOVERY;
        state.broken(&error);
        assert!(state.phase_since().1 > first);
    }
}

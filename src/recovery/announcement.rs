//! Limits the log lines with which recoveries and first starts begin. If the slot cannot be created, for example
//! because PostgreSQL has no free slot, each new attempt would log such a line.

use std::sync::{Mutex, PoisonError};

use super::slot_verdict::RecoveryCause;
use crate::throttled_log::ThrottledLog;

/// Remembers across sessions when the relay last logged, for each cause, that it begins a recovery or a first
/// start.
#[derive(Debug, Default)]
pub(crate) struct Announcements(Mutex<ThrottledLog<&'static str>>);

impl Announcements {
    /// Whether to log this attempt. Returns false if the relay has logged an attempt with the same cause a moment ago.
    pub(super) fn are_due(&self, reason: &RecoveryCause) -> bool {
        let mut log = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        log.due(reason.name()).is_some()
    }

    /// Notes that an attempt has succeeded. A later attempt with the same cause belongs to a new recovery, so the relay
    /// logs it at once.
    pub(super) fn begun(&self, reason: &RecoveryCause) {
        let mut log = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        log.forget(&reason.name());
    }
}

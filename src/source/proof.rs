//! What the session's thread and the rest of the relay tell each other of the lease.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A handle; clones share it.
#[derive(Debug, Clone)]
pub(crate) struct LeaseProof(Arc<Times>);

/// Microseconds after `origin`; 0 is never.
#[derive(Debug)]
struct Times {
    origin: Instant,
    proven: AtomicU64,
    end: AtomicU64,
}

impl LeaseProof {
    pub(super) fn new() -> Self {
        Self(Arc::new(Times {
            origin: Instant::now(),
            proven: AtomicU64::new(0),
            end: AtomicU64::new(0),
        }))
    }

    /// PostgreSQL has taken in a status message that was sent then.
    pub(crate) fn prove(&self, sent_at: Instant) {
        self.0
            .proven
            .fetch_max(self.micros(sent_at), Ordering::AcqRel);
    }

    /// The latest that was proven.
    pub(super) fn proven(&self) -> Option<Instant> {
        match self.0.proven.load(Ordering::Acquire) {
            0 => None,
            micros => Some(self.0.origin + Duration::from_micros(micros)),
        }
    }

    /// Sending has to stop then.
    pub(super) fn set_end(&self, end: Instant) {
        self.0.end.store(self.micros(end), Ordering::Release);
    }

    /// Whether that time has come. The session's own thread moves it: if that stands still, so
    /// does this.
    pub(super) fn is_over(&self) -> bool {
        self.micros(Instant::now()) >= self.0.end.load(Ordering::Acquire)
    }

    fn micros(&self, at: Instant) -> u64 {
        let micros = at.saturating_duration_since(self.0.origin).as_micros();
        u64::try_from(micros).unwrap_or(u64::MAX)
    }
}

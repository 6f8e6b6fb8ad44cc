//! The right to send: until when the slot is certainly ours.
//!
//! The thread of the replication session judges it and moves it on, several times a second; every
//! attempt to publish looks at it right before it goes out. So a process that was frozen for a
//! while, or starved, sends nothing when it wakes up: by then the slot may be another relay's, and
//! a request of ours would come in the middle of its.
//!
//! Not here: what makes the right run out (`source::feedback`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A handle to the right of one session. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Lease {
    began: Instant,
    /// Nanoseconds after `began`.
    until: Arc<AtomicU64>,
}

impl Lease {
    /// A right that is not ours yet.
    pub(crate) fn new(began: Instant) -> Self {
        Self {
            began,
            until: Arc::default(),
        }
    }

    /// The slot is ours until then.
    pub(crate) fn extend(&self, until: Instant) {
        let until = until.saturating_duration_since(self.began);
        // Enough for 580 years.
        self.until.store(until.as_nanos() as u64, Ordering::Release);
    }

    /// Whether the slot is ours at this moment.
    pub(crate) fn is_held(&self, now: Instant) -> bool {
        let until = Duration::from_nanos(self.until.load(Ordering::Acquire));
        now.saturating_duration_since(self.began) < until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_runs_out_by_itself_and_every_handle_sees_it_extended() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let lease = Lease::new(start);
        let publisher = lease.clone();
        assert!(!publisher.is_held(start));
        lease.extend(at(5));
        assert!(publisher.is_held(at(4)) && !publisher.is_held(at(5)));
        lease.extend(at(8));
        assert!(publisher.is_held(at(7)) && !publisher.is_held(at(8)));
    }
}

//! Keeps the failing topics of a session that has ended, so that the next session continues their counts, their
//! durations and the pauses between their log lines.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::lines::LineBudget;
use super::{Failing, LanesOfTopic};

/// How long a topic is kept after its last failure. An older failure proves little: the relay may have been a standby
/// since, and another relay may have published to the topic.
const KEPT_FOR: Duration = Duration::from_secs(600);

/// The failing topics of the sessions that have ended. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct EarlierFailures(Arc<Mutex<KeptTopics>>);

#[derive(Debug, Default)]
pub(super) struct KeptTopics {
    pub(super) topics: HashMap<Arc<str>, Failing>,
    pub(super) lines: LineBudget,
}

impl EarlierFailures {
    /// Takes the topics out for a new session, and drops those whose last failure is older than [`KEPT_FOR`]. The
    /// others keep their troubles and failure counts. Resets the facts about lanes and published requests,
    /// because these belong to the old session.
    pub(super) fn take(&self) -> KeptTopics {
        let mut kept = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        let now = Instant::now();
        let is_recent =
            |failing: &Failing| now.saturating_duration_since(failing.failed_at) < KEPT_FOR;
        kept.topics.retain(|_, failing| is_recent(failing));
        for failing in kept.topics.values_mut() {
            failing.lanes = LanesOfTopic::default();
            failing.has_published = false;
            failing.published_at = None;
            failing.fails_in_part = false;
        }
        kept
    }

    pub(super) fn keep(&self, kept: KeptTopics) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = kept;
    }
}

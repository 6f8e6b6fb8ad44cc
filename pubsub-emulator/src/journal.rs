//! The journal: every attempt to publish, in the order of processing.
//!
//! An attempt is one `Publish` request, with any outcome. `checks.rs` judges the journal. A journal that
//! keeps attempts grows without bound, so a long-running program should make its journal keep only totals.
//! Other modules decide whether to store a request and how to answer it.

mod attempt;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

pub use self::attempt::{Answer, Attempt, Counts, Recording};
use crate::connections::Peer;
use crate::wire::MessageView;

/// A handle to the journal of one emulator. Clones share it.
#[derive(Debug, Clone)]
pub struct Journal {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    started: Instant,
    counts_only: AtomicBool,
    attempts: AtomicU64,
    messages: AtomicU64,
    stored_messages: AtomicU64,
    answered_messages: AtomicU64,
    error_answers: AtomicU64,
    withheld_answers: AtomicU64,
    log: Mutex<Log>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Log {
    attempts: Vec<Attempt>,
    /// The sequence number of the next attempt.
    next: u64,
}

impl Log {
    fn attempt(&mut self, sequence: u64) -> Option<&mut Attempt> {
        let first = self.attempts.first()?.sequence;
        let index = usize::try_from(sequence.checked_sub(first)?).ok()?;
        self.attempts.get_mut(index)
    }
}

impl Journal {
    pub(crate) fn new(recording: Recording) -> Self {
        let inner = Inner {
            started: Instant::now(),
            counts_only: AtomicBool::new(recording == Recording::Counts),
            attempts: AtomicU64::new(0),
            messages: AtomicU64::new(0),
            stored_messages: AtomicU64::new(0),
            answered_messages: AtomicU64::new(0),
            error_answers: AtomicU64::new(0),
            withheld_answers: AtomicU64::new(0),
            log: Mutex::default(),
            changed: Notify::new(),
        };
        Self {
            inner: Arc::new(inner),
        }
    }

    /// Changes how much the journal keeps of the attempts from now on.
    pub fn set_recording(&self, recording: Recording) {
        self.inner
            .counts_only
            .store(recording == Recording::Counts, Ordering::Relaxed);
    }

    /// The recorded attempts, in the order of processing.
    pub fn attempts(&self) -> Vec<Attempt> {
        self.inner.log().attempts.clone()
    }

    /// The time since the start of the emulator. The times of all attempts use the same clock.
    pub fn now(&self) -> Duration {
        self.inner.started.elapsed()
    }

    /// The totals so far.
    pub fn counts(&self) -> Counts {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Counts {
            attempts: read(&self.inner.attempts),
            messages: read(&self.inner.messages),
            stored_messages: read(&self.inner.stored_messages),
            answered_messages: read(&self.inner.answered_messages),
            error_answers: read(&self.inner.error_answers),
            withheld_answers: read(&self.inner.withheld_answers),
        }
    }

    /// Waits until the totals satisfy `condition`, and returns the totals. If `condition` is still false
    /// after `limit`, returns the totals as the error.
    pub async fn wait_until(
        &self,
        limit: Duration,
        condition: impl Fn(&Counts) -> bool,
    ) -> Result<Counts, Counts> {
        let satisfied = async {
            loop {
                let changed = self.inner.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                let counts = self.counts();
                if condition(&counts) {
                    return counts;
                }
                changed.await;
            }
        };
        tokio::time::timeout(limit, satisfied)
            .await
            .map_err(|_| self.counts())
    }

    /// Forgets all attempts and totals. Sequence numbers and message ids continue.
    pub fn clear(&self) {
        let inner = &self.inner;
        inner.log().attempts.clear();
        for count in [
            &inner.attempts,
            &inner.messages,
            &inner.stored_messages,
            &inner.answered_messages,
            &inner.error_answers,
            &inner.withheld_answers,
        ] {
            count.store(0, Ordering::Relaxed);
        }
    }

    /// Enters an attempt in the journal. If the entry is dropped without an answer, the attempt
    /// counts as never answered.
    pub(crate) fn enter(
        &self,
        peer: Option<Peer>,
        topic: &str,
        messages: &[MessageView<'_>],
    ) -> Entry {
        let inner = &self.inner;
        let count = messages.len() as u64;
        inner.attempts.fetch_add(1, Ordering::Relaxed);
        inner.messages.fetch_add(count, Ordering::Relaxed);
        let sequence = if inner.counts_only.load(Ordering::Relaxed) {
            None
        } else {
            Some(inner.record(peer, topic, messages))
        };
        inner.changed.notify_waiters();
        Entry {
            inner: Arc::clone(inner),
            sequence,
            messages: count,
            stored: false,
            ended: false,
        }
    }
}

impl Inner {
    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, peer: Option<Peer>, topic: &str, messages: &[MessageView<'_>]) -> u64 {
        let ordering_key = messages.first().map_or("", |message| message.ordering_key);
        let mut attempt = Attempt {
            sequence: 0,
            peer: peer.map(|peer| peer.address),
            connected: peer.map(|peer| peer.accepted.saturating_duration_since(self.started)),
            topic: topic.into(),
            ordering_key: ordering_key.into(),
            other_keys: messages
                .iter()
                .filter(|message| message.ordering_key != ordering_key)
                .map(|message| message.ordering_key.to_owned())
                .collect(),
            event_ids: messages
                .iter()
                .map(|message| event_id(*message).map(Box::from))
                .collect(),
            received: Duration::ZERO,
            stored: None,
            ended: None,
            first_message_id: None,
            answer: Answer::Pending,
        };
        let mut log = self.log();
        attempt.sequence = log.next;
        attempt.received = self.started.elapsed();
        log.next += 1;
        log.attempts.push(attempt);
        log.next - 1
    }
}

/// The id by which the publisher identifies an event: the attribute `event_id`, or if there is
/// none, the attribute `ce-id` of CloudEvents.
pub(crate) fn event_id(message: MessageView<'_>) -> Option<&str> {
    let mut cloud_event = None;
    for (key, value) in message.attributes() {
        match key {
            "event_id" => return Some(value),
            "ce-id" => cloud_event = Some(value),
            _ => {}
        }
    }
    cloud_event
}

/// An attempt that is being processed.
#[derive(Debug)]
pub(crate) struct Entry {
    inner: Arc<Inner>,
    /// The sequence number of the attempt. `None` if the journal keeps only totals.
    sequence: Option<u64>,
    messages: u64,
    stored: bool,
    ended: bool,
}

impl Entry {
    /// Notes that the messages were stored, with consecutive ids from `first_message_id` on.
    pub(crate) fn stored(&mut self, first_message_id: u64) {
        self.stored = true;
        self.inner
            .stored_messages
            .fetch_add(self.messages, Ordering::Relaxed);
        self.update(|attempt, now| {
            attempt.first_message_id = Some(first_message_id);
            attempt.stored = Some(now);
        });
        self.inner.changed.notify_waiters();
    }

    /// Notes the answer. Call this right before the answer is sent, because the time of the call counts as
    /// the end of the attempt.
    pub(crate) fn answered(mut self, answer: Answer) {
        self.end(answer);
    }

    fn end(&mut self, answer: Answer) {
        self.ended = true;
        match answer {
            Answer::MessageIds => {
                self.inner
                    .answered_messages
                    .fetch_add(self.messages, Ordering::Relaxed);
            }
            Answer::Error(_) | Answer::FewerIds => {
                self.inner.error_answers.fetch_add(1, Ordering::Relaxed);
            }
            Answer::Never => {
                self.inner.withheld_answers.fetch_add(1, Ordering::Relaxed);
            }
            Answer::Pending => {}
        }
        self.update(|attempt, now| {
            attempt.answer = answer;
            attempt.ended = Some(now);
        });
        self.inner.changed.notify_waiters();
    }

    fn update(&self, change: impl FnOnce(&mut Attempt, Duration)) {
        let Some(sequence) = self.sequence else {
            return;
        };
        let mut log = self.inner.log();
        let now = self.inner.started.elapsed();
        if let Some(attempt) = log.attempt(sequence) {
            change(attempt, now);
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if !self.ended {
            self.end(Answer::Never);
        }
    }
}

#[cfg(test)]
mod tests;

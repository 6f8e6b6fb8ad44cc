//! The receiving end of the channel. It remembers which events from tables are unresolved.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use replication::CommitLsn;
use tokio::sync::{mpsc, oneshot};

use super::FromTable;
use crate::event::{EventId, EventPosition};

/// The receiving end of the channel, from which the pipeline takes rows.
#[derive(Debug)]
pub(crate) struct TableRows {
    batches: mpsc::Receiver<Vec<FromTable>>,
    /// The ids of the unresolved events from tables, by their ordinal and commit LSN.
    unresolved: BTreeMap<(u32, CommitLsn), [u8; 16]>,
    /// The number of unresolved events per id.
    ids: HashMap<[u8; 16], u32, foldhash::fast::RandomState>,
    waiting: Vec<oneshot::Sender<()>>,
    /// The ordinal after the last event that was taken.
    next: u32,
    resolved_below: Arc<AtomicU32>,
}

impl TableRows {
    pub(super) fn new(
        batches: mpsc::Receiver<Vec<FromTable>>,
        resolved_below: Arc<AtomicU32>,
    ) -> Self {
        Self {
            batches,
            unresolved: BTreeMap::new(),
            ids: HashMap::default(),
            waiting: Vec::new(),
            next: 0,
            resolved_below,
        }
    }

    /// Returns the next batch, or `None` when all senders are gone. Cancel-safe.
    pub(crate) async fn recv(&mut self) -> Option<Vec<FromTable>> {
        self.batches.recv().await
    }

    /// Notes an event that the pipeline has taken from a batch. The event is unresolved until
    /// [`resolve`](Self::resolve).
    pub(crate) fn taken(&mut self, position: EventPosition, event_id: &EventId) {
        let key = (position.ordinal, position.commit);
        if self.unresolved.insert(key, event_id.uuid).is_none() {
            *self.ids.entry(event_id.uuid).or_default() += 1;
        }
        self.next = position.ordinal + 1;
    }

    /// Answers as soon as all events from tables are resolved. Events that the pipeline takes later can delay the
    /// answer.
    pub(crate) fn settle(&mut self, answer: oneshot::Sender<()>) {
        self.waiting.retain(|waiting| !waiting.is_closed());
        self.waiting.push(answer);
        self.answer();
    }

    /// Notes that these events are resolved.
    pub(crate) fn resolve(&mut self, events: &[EventPosition]) {
        for event in events {
            let id = self.unresolved.remove(&(event.ordinal, event.commit));
            debug_assert!(id.is_some(), "the event was not taken");
            if let Some(id) = id
                && let Some(count) = self.ids.get_mut(&id)
            {
                *count -= 1;
                if *count == 0 {
                    self.ids.remove(&id);
                }
            }
        }
        let first = self.unresolved.first_key_value();
        let below = first.map_or(self.next, |((ordinal, _), _)| *ordinal);
        self.resolved_below.store(below, Ordering::Release);
        self.answer();
    }

    /// Whether an event with this id has come from a table and is unresolved.
    pub(crate) fn is_unresolved(&self, event_id: &EventId) -> bool {
        self.ids.contains_key(&event_id.uuid)
    }

    fn answer(&mut self) {
        if self.unresolved.is_empty() {
            for waiting in self.waiting.drain(..) {
                // If the task that asked has ended, nobody needs the answer.
                let _ = waiting.send(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::positions::commit_before;
    use super::super::channel;
    use super::*;
    use decoder::Lsn;

    fn at(ordinal: u32) -> EventPosition {
        let commit = commit_before(Lsn::new(800));
        EventPosition { commit, ordinal }
    }

    fn id(n: u8) -> EventId {
        EventId {
            uuid: [n; 16],
            source_id: None,
        }
    }

    #[tokio::test]
    async fn sent_rows_are_settled_only_once_their_last_outcome_is_recorded() {
        let (mut sender, mut rows) = channel();
        let settled = tokio::spawn(async move { sender.settled().await });
        for row in rows.recv().await.unwrap() {
            rows.taken(at(1), &id(1));
            rows.taken(at(2), &id(2));
            match row {
                FromTable::Settle(answer) => rows.settle(answer),
                other => unreachable!("was not sent: {other:?}"),
            }
        }
        rows.resolve(&[at(1)]);
        assert!(!settled.is_finished());
        rows.resolve(&[at(2)]);
        assert_eq!(settled.await.unwrap(), Ok(()));
    }

    #[test]
    fn resolved_below_reports_the_first_unresolved_event() {
        let (sender, mut rows) = channel();
        assert_eq!(sender.resolved_below(), 0);
        for n in 5..9 {
            rows.taken(at(u32::from(n)), &id(n));
        }
        rows.resolve(&[at(6)]);
        assert_eq!(sender.resolved_below(), 5);
        assert!(rows.is_unresolved(&id(5)) && !rows.is_unresolved(&id(6)));
        rows.resolve(&[at(5)]);
        assert_eq!(sender.resolved_below(), 7);
        rows.resolve(&[at(8), at(7)]);
        assert_eq!(sender.resolved_below(), 9);
    }

    #[test]
    fn an_id_that_was_taken_twice_is_unresolved_until_both_events_are_resolved() {
        let (_sender, mut rows) = channel();
        rows.taken(at(1), &id(1));
        rows.taken(at(2), &id(1));
        rows.resolve(&[at(1)]);
        assert!(rows.is_unresolved(&id(1)));
        rows.resolve(&[at(2)]);
        assert!(!rows.is_unresolved(&id(1)));
    }
}

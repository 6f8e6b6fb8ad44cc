//! How far everything is resolved: the one place that makes a position which may be confirmed.
//!
//! What PostgreSQL promises, and what follows from it (manual, "Logical Decoding" and "Streaming
//! Replication Protocol"):
//!
//! - With protocol 1 transactions come whole and in the order of their commits. A Commit's
//!   `end_lsn` is where the slot may resume: everything up to that commit is never sent again.
//!   Its `commit_lsn` would bring the same transaction again.
//! - A keepalive's `wal_end` says that everything before it has been sent. It may be confirmed
//!   only if, in the order of the stream, nothing is pending before it.
//! - So each transaction keeps the position that was safe just before its Begin, its *floor*. The
//!   watermark is the floor of the first transaction that is not resolved, and the last position
//!   of the stream when there is none.
//!
//! Only transactions with unresolved events are kept, so that one stuck event costs one entry,
//! however much flows past it. No IO, no clock.

use std::collections::BTreeMap;

use decoder::{Lsn, PgTimestamp};

/// A position that may be reported to PostgreSQL as flushed. Made in this module alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Confirmable(Lsn);

impl Confirmable {
    /// The position.
    pub fn lsn(self) -> Lsn {
        self.0
    }

    /// What the slot itself has confirmed: the position to begin a session with.
    pub fn by_slot(confirmed_flush_lsn: Lsn) -> Self {
        Self(confirmed_flush_lsn)
    }
}

/// The commit LSN of a transaction, from its Begin (`final_lsn`): its name, and the first half of
/// the identity of its events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommitLsn(Lsn);

impl CommitLsn {
    /// The LSN.
    pub fn lsn(self) -> Lsn {
        self.0
    }

    /// Takes the `final_lsn` of a Begin, or a stored commit LSN.
    pub fn new(lsn: Lsn) -> Self {
        Self(lsn)
    }
}

/// A transaction with something unresolved.
#[derive(Debug)]
struct Pending {
    /// The position that is safe while this transaction is not resolved.
    floor: Lsn,
    commit_time: PgTimestamp,
    /// Events that have no durable outcome yet; a transaction whose Commit has not come counts
    /// as one more.
    unresolved: u64,
}

/// The ledger of unresolved transactions of one session.
#[derive(Debug)]
pub struct Watermark {
    /// The last safe position of the stream: a commit's end, or a keepalive with nothing open.
    position: Lsn,
    open: Option<CommitLsn>,
    pending: BTreeMap<CommitLsn, Pending>,
    last_resolved_commit_time: Option<PgTimestamp>,
}

impl Watermark {
    /// A session that resumes at the slot's own position.
    pub fn new(start: Confirmable) -> Self {
        Self {
            position: start.0,
            open: None,
            pending: BTreeMap::new(),
            last_resolved_commit_time: None,
        }
    }

    /// A transaction begins.
    pub fn begin(&mut self, transaction: CommitLsn, commit_time: PgTimestamp) {
        debug_assert!(self.open.is_none(), "transactions come one after the other");
        self.open = Some(transaction);
        let floor = self.position;
        self.pending.insert(
            transaction,
            Pending {
                floor,
                commit_time,
                unresolved: 1,
            },
        );
    }

    /// The open transaction has one more event to resolve.
    pub fn add_event(&mut self) {
        if let Some(pending) = self.open.and_then(|open| self.pending.get_mut(&open)) {
            pending.unresolved += 1;
        }
    }

    /// The open transaction ends; `end_lsn` is its Commit's.
    pub fn commit(&mut self, end_lsn: Lsn) {
        self.position = self.position.max(end_lsn);
        if let Some(open) = self.open.take() {
            self.resolve(open, 1);
        }
    }

    /// `events` events of `transaction` have a durable outcome.
    pub fn resolve(&mut self, transaction: CommitLsn, events: u64) {
        let Some(pending) = self.pending.get_mut(&transaction) else {
            return;
        };
        debug_assert!(pending.unresolved >= events, "more outcomes than events");
        pending.unresolved = pending.unresolved.saturating_sub(events);
        if pending.unresolved == 0 {
            self.last_resolved_commit_time = self
                .last_resolved_commit_time
                .max(Some(pending.commit_time));
            self.pending.remove(&transaction);
        }
    }

    /// A keepalive said that everything before `wal_end` has been sent.
    ///
    /// The caller leaves this out while the publication is not known to be right.
    pub fn keepalive(&mut self, wal_end: Lsn) {
        if self.open.is_none() {
            self.position = self.position.max(wal_end);
        }
    }

    /// The position up to which everything is resolved. Never moves back.
    pub fn confirmable(&self) -> Confirmable {
        let first = self.pending.values().next();
        Confirmable(first.map_or(self.position, |pending| pending.floor))
    }

    /// Whether a transaction has begun and not ended.
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Transactions with something unresolved.
    pub fn pending_transactions(&self) -> usize {
        self.pending.len()
    }

    /// When the oldest unresolved transaction was committed; `None` when nothing is pending.
    pub fn oldest_pending(&self) -> Option<PgTimestamp> {
        self.pending
            .values()
            .next()
            .map(|pending| pending.commit_time)
    }

    /// When the newest resolved transaction with events was committed.
    pub fn last_resolved_commit_time(&self) -> Option<PgTimestamp> {
        self.last_resolved_commit_time
    }
}

#[cfg(test)]
mod promises;
#[cfg(test)]
mod tests;

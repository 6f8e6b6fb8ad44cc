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
//! Only transactions with unresolved events are kept, and at most as many others, so that one stuck
//! event costs little, however much flows past it. Transactions come in the order of their commits,
//! so a queue holds them: no tree to keep in balance. No IO, no clock.

use std::collections::VecDeque;

use decoder::{Lsn, PgTimestamp};

/// Entries whose room is not worth the trouble of giving it back.
const KEPT: usize = 64;

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
    pub const fn new(lsn: Lsn) -> Self {
        Self(lsn)
    }
}

/// A transaction whose Commit has not come.
#[derive(Debug)]
struct Open {
    commit: CommitLsn,
    xid: u32,
    commit_time: PgTimestamp,
    /// Events so far that have no durable outcome yet.
    unresolved: u64,
}

/// A transaction that has ended.
#[derive(Debug)]
struct Pending {
    commit: CommitLsn,
    xid: u32,
    /// The position that is safe while this transaction is not resolved.
    floor: Lsn,
    commit_time: PgTimestamp,
    /// Events that have no durable outcome yet; with none its entry waits to be taken away.
    unresolved: u64,
}

/// The ledger of unresolved transactions of one session.
#[derive(Debug)]
pub struct Watermark {
    /// The last safe position of the stream: a commit's end, or a keepalive with nothing open.
    position: Lsn,
    open: Option<Open>,
    /// In the order of their commits; the first one is not resolved.
    pending: VecDeque<Pending>,
    /// Entries of `pending` that are resolved.
    resolved: usize,
    last_resolved_commit_time: Option<PgTimestamp>,
}

impl Watermark {
    /// A session that resumes at the slot's own position.
    pub fn new(start: Confirmable) -> Self {
        Self {
            position: start.0,
            open: None,
            pending: VecDeque::new(),
            resolved: 0,
            last_resolved_commit_time: None,
        }
    }

    /// A transaction begins; `xid` is its id as the log has it.
    pub fn begin(&mut self, transaction: CommitLsn, commit_time: PgTimestamp, xid: u32) {
        debug_assert!(self.open.is_none(), "transactions come one after the other");
        debug_assert!(
            self.pending
                .back()
                .is_none_or(|last| last.commit < transaction),
            "transactions come in the order of their commits"
        );
        self.open = Some(Open {
            commit: transaction,
            xid,
            commit_time,
            unresolved: 0,
        });
    }

    /// The open transaction has one more event to resolve.
    pub fn add_event(&mut self) {
        if let Some(open) = &mut self.open {
            open.unresolved += 1;
        }
    }

    /// The open transaction ends; `end_lsn` is its Commit's.
    pub fn commit(&mut self, end_lsn: Lsn) {
        let floor = self.position;
        self.position = self.position.max(end_lsn);
        let Some(open) = self.open.take() else { return };
        if open.unresolved == 0 {
            self.is_resolved(open.commit_time);
            return;
        }
        self.pending.push_back(Pending {
            commit: open.commit,
            xid: open.xid,
            floor,
            commit_time: open.commit_time,
            unresolved: open.unresolved,
        });
    }

    /// `events` events of `transaction` have a durable outcome.
    pub fn resolve(&mut self, transaction: CommitLsn, events: u64) {
        if let Some(open) = self.open.as_mut().filter(|open| open.commit == transaction) {
            debug_assert!(open.unresolved >= events, "more outcomes than events");
            open.unresolved = open.unresolved.saturating_sub(events);
            return;
        }
        let place = self
            .pending
            .binary_search_by_key(&transaction, |pending| pending.commit);
        let Some(pending) = place.ok().and_then(|place| self.pending.get_mut(place)) else {
            return;
        };
        if pending.unresolved == 0 {
            return;
        }
        debug_assert!(pending.unresolved >= events, "more outcomes than events");
        pending.unresolved = pending.unresolved.saturating_sub(events);
        if pending.unresolved == 0 {
            let commit_time = pending.commit_time;
            self.is_resolved(commit_time);
            self.resolved += 1;
            self.take_resolved_away();
        }
    }

    /// The ended transaction with this id, if it is not resolved.
    pub fn unresolved_of(&self, xid: u32) -> Option<CommitLsn> {
        let mut pending = self.pending.iter().rev();
        let found = pending.find(|pending| pending.xid == xid && pending.unresolved > 0);
        found.map(|pending| pending.commit)
    }

    /// Whether this ended transaction has events without an outcome.
    pub fn is_unresolved(&self, transaction: CommitLsn) -> bool {
        let place = self
            .pending
            .binary_search_by_key(&transaction, |pending| pending.commit);
        place.is_ok_and(|place| self.pending[place].unresolved > 0)
    }

    fn is_resolved(&mut self, commit_time: PgTimestamp) {
        self.last_resolved_commit_time = self.last_resolved_commit_time.max(Some(commit_time));
    }

    /// Takes resolved entries away: all at the front, and the others as soon as they are the
    /// greater part, so that behind a stuck transaction there are hardly more of them
    /// than of unresolved ones, and each costs the same whatever the order.
    fn take_resolved_away(&mut self) {
        while self
            .pending
            .front()
            .is_some_and(|pending| pending.unresolved == 0)
        {
            self.pending.pop_front();
            self.resolved -= 1;
        }
        if self.pending.is_empty() {
            self.pending.shrink_to(KEPT);
        } else if self.resolved > KEPT + self.pending.len() / 2 {
            self.pending.retain(|pending| pending.unresolved > 0);
            self.resolved = 0;
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
        let first = self.pending.front();
        Confirmable(first.map_or(self.position, |pending| pending.floor))
    }

    /// Whether a transaction has begun and not ended.
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Transactions with something unresolved.
    pub fn pending_transactions(&self) -> usize {
        self.pending.len() - self.resolved + usize::from(self.open.is_some())
    }

    /// When the oldest unresolved transaction was committed; `None` when nothing is pending.
    pub fn oldest_pending(&self) -> Option<PgTimestamp> {
        let first = self.pending.front().map(|pending| pending.commit_time);
        first.or_else(|| self.open.as_ref().map(|open| open.commit_time))
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

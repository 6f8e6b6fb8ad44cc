//! The watermark: the position up to which every event has a durable outcome. Only this module
//! creates positions that may be confirmed to PostgreSQL.
//!
//! PostgreSQL gives two guarantees (manual, "Logical Decoding" and "Streaming Replication Protocol"):
//!
//! - With protocol 1, transactions arrive whole and in commit order. If we confirm the `end_lsn` of
//!   a Commit, PostgreSQL never sends that transaction, or an earlier one, again. If we confirmed
//!   its `commit_lsn` instead, PostgreSQL would send the transaction again.
//! - A keepalive's `wal_end` says that the server has sent every transaction that committed before
//!   this position. We may confirm `wal_end` only if nothing earlier in the stream is still pending.
//!
//! So while a transaction is unresolved, the last position that we may confirm is the position of the
//! stream just before its Begin. The entry of the transaction stores this position as `floor`. The
//! watermark is the `floor` of the first unresolved transaction. If everything is resolved, the
//! watermark is the last position of the stream.
//!
//! A [`Watermark`] stores every unresolved transaction, but only a limited surplus of resolved ones (see
//! `KEPT`). So one stuck event costs little memory, no matter how many transactions follow it. Transactions
//! arrive in commit order, so a queue is enough to hold them. This module does no IO and reads no clock.

use std::collections::VecDeque;

use decoder::{Lsn, PgTimestamp};

/// Limits the unused memory in the queue of a [`Watermark`]:
///
/// - An empty queue keeps the capacity for `KEPT` entries. Freeing so few would gain nothing.
/// - Resolved entries behind an unresolved entry may stay in the queue. When they outnumber the unresolved entries by
///   more than `2 * KEPT`, the watermark removes all resolved entries.
const KEPT: usize = 64;

/// A position that may be reported to PostgreSQL as flushed. It is either the slot's own position,
/// or a position up to which a [`Watermark`] knows every outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Confirmable(Lsn);

impl Confirmable {
    /// The position as a plain LSN.
    #[inline]
    pub fn lsn(self) -> Lsn {
        self.0
    }

    /// Returns the slot's own confirmed position, with which a session begins.
    #[inline]
    pub fn by_slot(confirmed_flush_lsn: Lsn) -> Self {
        Self(confirmed_flush_lsn)
    }
}

/// The commit LSN of a transaction, from its Begin (`final_lsn`). It identifies the transaction. Together
/// with an ordinal, it identifies each event of the transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct CommitLsn(Lsn);

impl CommitLsn {
    /// The plain LSN.
    #[inline]
    pub fn lsn(self) -> Lsn {
        self.0
    }

    /// Wraps the `final_lsn` of a Begin, or a stored commit LSN.
    #[inline]
    pub const fn new(lsn: Lsn) -> Self {
        Self(lsn)
    }
}

/// A transaction whose Commit has not arrived yet.
#[derive(Debug)]
struct OpenTransaction {
    commit: CommitLsn,
    xid: u32,
    commit_time: PgTimestamp,
    /// Number of events so far that have no durable outcome.
    unresolved: u64,
}

/// A transaction whose Commit has arrived.
#[derive(Debug)]
struct EndedTransaction {
    commit: CommitLsn,
    xid: u32,
    /// The last position that may be confirmed while this transaction is unresolved.
    floor: Lsn,
    commit_time: PgTimestamp,
    /// Number of events without a durable outcome. At zero, the transaction is resolved, and its
    /// entry waits to be removed.
    unresolved: u64,
}

/// The unresolved transactions of one session, and the position that may be confirmed.
#[derive(Debug)]
pub struct Watermark {
    /// The last position of the stream that lies between two transactions: the end of a commit, or
    /// the `wal_end` of a keepalive.
    position: Lsn,
    open: Option<OpenTransaction>,
    /// Ended transactions in commit order. The first one is always unresolved.
    pending: VecDeque<EndedTransaction>,
    /// Number of resolved entries in `pending`.
    resolved: usize,
    last_resolved_commit_time: Option<PgTimestamp>,
}

impl Watermark {
    /// Creates the watermark of a session that resumes at the slot's position.
    pub fn new(start: Confirmable) -> Self {
        Self {
            position: start.0,
            open: None,
            pending: VecDeque::new(),
            resolved: 0,
            last_resolved_commit_time: None,
        }
    }

    /// Records that a transaction begins. `xid` is the transaction's id in the stream.
    #[inline]
    pub fn begin(&mut self, transaction: CommitLsn, commit_time: PgTimestamp, xid: u32) {
        debug_assert!(self.open.is_none(), "transactions come one after the other");
        debug_assert!(
            self.pending
                .back()
                .is_none_or(|last| last.commit < transaction),
            "transactions come in the order of their commits"
        );
        self.open = Some(OpenTransaction {
            commit: transaction,
            xid,
            commit_time,
            unresolved: 0,
        });
    }

    /// Records one more event of the open transaction. The event is unresolved.
    #[inline]
    pub fn add_event(&mut self) {
        if let Some(open) = &mut self.open {
            open.unresolved += 1;
        }
    }

    /// Records the end of the open transaction. `end_lsn` comes from its Commit.
    #[inline]
    pub fn commit(&mut self, end_lsn: Lsn) {
        let floor = self.position;
        self.position = self.position.max(end_lsn);
        let Some(open) = self.open.take() else { return };
        if open.unresolved == 0 {
            self.is_resolved(open.commit_time);
            return;
        }
        self.pending.push_back(EndedTransaction {
            commit: open.commit,
            xid: open.xid,
            floor,
            commit_time: open.commit_time,
            unresolved: open.unresolved,
        });
    }

    /// Records that `events` more events of `transaction` have a durable outcome.
    #[inline]
    pub fn resolve(&mut self, transaction: CommitLsn, events: u64) {
        if let Some(open) = self.open.as_mut().filter(|open| open.commit == transaction) {
            debug_assert!(open.unresolved >= events, "more outcomes than events");
            open.unresolved = open.unresolved.saturating_sub(events);
            return;
        }
        let index = self
            .pending
            .binary_search_by_key(&transaction, |pending| pending.commit);
        let Some(pending) = index.ok().and_then(|index| self.pending.get_mut(index)) else {
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

    /// Returns the commit LSN of the ended transaction with the id `xid`, if it is unresolved.
    #[inline]
    pub fn unresolved_of(&self, xid: u32) -> Option<CommitLsn> {
        let mut pending = self.pending.iter().rev();
        let found = pending.find(|pending| pending.xid == xid && pending.unresolved > 0);
        found.map(|pending| pending.commit)
    }

    /// Whether this transaction has events without an outcome. The transaction may be open or ended.
    #[inline]
    pub fn is_unresolved(&self, transaction: CommitLsn) -> bool {
        if let Some(open) = self.open.as_ref().filter(|open| open.commit == transaction) {
            return open.unresolved > 0;
        }
        let index = self
            .pending
            .binary_search_by_key(&transaction, |pending| pending.commit);
        index.is_ok_and(|index| self.pending[index].unresolved > 0)
    }

    #[inline]
    fn is_resolved(&mut self, commit_time: PgTimestamp) {
        self.last_resolved_commit_time = self.last_resolved_commit_time.max(Some(commit_time));
    }

    /// Removes resolved entries: at once from the front of the queue, and everywhere else when resolved entries
    /// outnumber unresolved entries by more than 2 × [`KEPT`]. So the queue stays short behind a stuck
    /// transaction, and the average cost per entry is constant for every order in which transactions are
    /// resolved.
    #[inline]
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

    /// Records a keepalive, which says that the server has sent every transaction that committed before `wal_end`.
    ///
    /// The caller must not call this while the publication is wrong or its state is unknown,
    /// because the server may then have skipped rows before `wal_end`.
    #[inline]
    pub fn keepalive(&mut self, wal_end: Lsn) {
        if self.open.is_none() {
            self.position = self.position.max(wal_end);
        }
    }

    /// The position up to which everything is resolved. It never moves back.
    #[inline]
    pub fn confirmable(&self) -> Confirmable {
        let first = self.pending.front();
        Confirmable(first.map_or(self.position, |pending| pending.floor))
    }

    /// The position up to which the session has read the stream. The session has received every transaction that was
    /// committed before this position. The events of these transactions may be unresolved.
    #[inline]
    pub fn read_up_to(&self) -> Lsn {
        self.position
    }

    /// Whether a transaction has begun but not ended.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Number of transactions that are open or have unresolved events.
    #[inline]
    pub fn pending_transactions(&self) -> usize {
        self.pending.len() - self.resolved + usize::from(self.open.is_some())
    }

    /// When the oldest pending transaction was committed; `None` if nothing is pending.
    #[inline]
    pub fn oldest_pending(&self) -> Option<PgTimestamp> {
        let first = self.pending.front().map(|pending| pending.commit_time);
        first.or_else(|| self.open.as_ref().map(|open| open.commit_time))
    }

    /// The latest commit time of all resolved transactions; `None` if none is resolved yet. A
    /// transaction without events counts as resolved when its Commit arrives.
    #[inline]
    pub fn last_resolved_commit_time(&self) -> Option<PgTimestamp> {
        self.last_resolved_commit_time
    }
}

#[cfg(test)]
mod tests;

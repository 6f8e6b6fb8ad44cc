//! The watermark: the position up to which every event has a durable outcome. Only this module
//! creates positions that may be confirmed to PostgreSQL.
//!
//! PostgreSQL's guarantees and their consequences (manual, "Logical Decoding" and "Streaming
//! Replication Protocol"):
//!
//! - With protocol 1, transactions arrive whole and in commit order. The slot can resume at a
//!   Commit's `end_lsn`: PostgreSQL then never sends that transaction, or an earlier one, again. If
//!   we confirmed its `commit_lsn`, PostgreSQL would send it again.
//! - A keepalive's `wal_end` says that the server has sent everything before this position. `wal_end`
//!   may be confirmed only if nothing earlier in the stream is still pending.
//! - So each transaction keeps its *floor*: the position that was safe just before its Begin. The
//!   watermark is the floor of the first unresolved transaction, or the last position of the stream
//!   when everything is resolved.
//!
//! The ledger keeps unresolved transactions, and at most about as many resolved ones. So one stuck
//! event costs little memory, no matter how many transactions follow it. Transactions arrive in
//! commit order, so a queue can hold them instead of a tree. No IO, no clock.

use std::collections::VecDeque;

use decoder::{Lsn, PgTimestamp};

/// An empty ledger keeps memory for this many entries, because freeing less is not worth the trouble.
const KEPT: usize = 64;

/// A position that may be reported to PostgreSQL as flushed. Only this module can construct it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Confirmable(Lsn);

impl Confirmable {
    /// The position.
    #[inline]
    pub fn lsn(self) -> Lsn {
        self.0
    }

    /// The slot's own confirmed position, with which a session begins.
    #[inline]
    pub fn by_slot(confirmed_flush_lsn: Lsn) -> Self {
        Self(confirmed_flush_lsn)
    }
}

/// The commit LSN of a transaction, from its Begin (`final_lsn`). It identifies the transaction, and
/// is the first half of its events' identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct CommitLsn(Lsn);

impl CommitLsn {
    /// The LSN.
    #[inline]
    pub fn lsn(self) -> Lsn {
        self.0
    }

    /// Takes the `final_lsn` of a Begin, or a stored commit LSN.
    #[inline]
    pub const fn new(lsn: Lsn) -> Self {
        Self(lsn)
    }
}

/// A transaction whose Commit has not arrived.
#[derive(Debug)]
struct OpenTransaction {
    commit: CommitLsn,
    xid: u32,
    commit_time: PgTimestamp,
    /// Events so far without a durable outcome.
    unresolved: u64,
}

/// A transaction that has ended.
#[derive(Debug)]
struct EndedTransaction {
    commit: CommitLsn,
    xid: u32,
    /// The position that may be confirmed while this transaction is unresolved.
    floor: Lsn,
    commit_time: PgTimestamp,
    /// Events without a durable outcome. At zero, the entry waits to be removed.
    unresolved: u64,
}

/// The ledger of one session's unresolved transactions.
#[derive(Debug)]
pub struct Watermark {
    /// The last safe position of the stream: the end of a commit, or a keepalive outside any
    /// transaction.
    position: Lsn,
    open: Option<OpenTransaction>,
    /// Ended transactions in commit order. The first one is always unresolved.
    pending: VecDeque<EndedTransaction>,
    /// How many entries of `pending` are resolved.
    resolved: usize,
    last_resolved_commit_time: Option<PgTimestamp>,
}

impl Watermark {
    /// The ledger of a session that resumes at the slot's position.
    pub fn new(start: Confirmable) -> Self {
        Self {
            position: start.0,
            open: None,
            pending: VecDeque::new(),
            resolved: 0,
            last_resolved_commit_time: None,
        }
    }

    /// Records that a transaction begins. `xid` is its id in the log.
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

    /// Records one more unresolved event of the open transaction.
    #[inline]
    pub fn add_event(&mut self) {
        if let Some(open) = &mut self.open {
            open.unresolved += 1;
        }
    }

    /// Records the end of the open transaction. `end_lsn` is from its Commit.
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

    /// The commit LSN of the ended transaction with this id, if it is unresolved.
    #[inline]
    pub fn unresolved_of(&self, xid: u32) -> Option<CommitLsn> {
        let mut pending = self.pending.iter().rev();
        let found = pending.find(|pending| pending.xid == xid && pending.unresolved > 0);
        found.map(|pending| pending.commit)
    }

    /// Whether this ended transaction has events without an outcome.
    #[inline]
    pub fn is_unresolved(&self, transaction: CommitLsn) -> bool {
        let place = self
            .pending
            .binary_search_by_key(&transaction, |pending| pending.commit);
        place.is_ok_and(|place| self.pending[place].unresolved > 0)
    }

    #[inline]
    fn is_resolved(&mut self, commit_time: PgTimestamp) {
        self.last_resolved_commit_time = self.last_resolved_commit_time.max(Some(commit_time));
    }

    /// Removes resolved entries: those at the front at once, the others when they outnumber the
    /// unresolved ones. So the queue stays short behind a stuck transaction. The cost per entry is
    /// constant, and does not depend on the order in which transactions are resolved.
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

    /// Records a keepalive, which says that the server has sent everything before `wal_end`.
    ///
    /// The caller must not call this while the publication is wrong or unknown.
    #[inline]
    pub fn keepalive(&mut self, wal_end: Lsn) {
        if self.open.is_none() {
            self.position = self.position.max(wal_end);
        }
    }

    /// The position up to which everything is resolved. Never moves back.
    #[inline]
    pub fn confirmable(&self) -> Confirmable {
        let first = self.pending.front();
        Confirmable(first.map_or(self.position, |pending| pending.floor))
    }

    /// Whether a transaction has begun and not ended.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// How many transactions are open or have unresolved events.
    #[inline]
    pub fn pending_transactions(&self) -> usize {
        self.pending.len() - self.resolved + usize::from(self.open.is_some())
    }

    /// When the oldest unresolved transaction was committed; `None` when nothing is pending.
    #[inline]
    pub fn oldest_pending(&self) -> Option<PgTimestamp> {
        let first = self.pending.front().map(|pending| pending.commit_time);
        first.or_else(|| self.open.as_ref().map(|open| open.commit_time))
    }

    /// The latest commit time of a resolved transaction; `None` until one is resolved. A transaction
    /// without events counts as resolved at its Commit.
    #[inline]
    pub fn last_resolved_commit_time(&self) -> Option<PgTimestamp> {
        self.last_resolved_commit_time
    }
}

#[cfg(test)]
mod tests;

//! `dispatch = exceptions`: says up to which transaction every row has its outcome, recorded or not.
//!
//! Take the oldest transaction that runs, and then the end of the WAL: whatever is older has ended
//! before that position. When the slot has confirmed it, everything that was streamed of them has
//! its outcome. And nothing was left out, if the publication is still the one that it was when the
//! same was said the last time: each change leaves a trace that is not taken back. So that is
//! looked at last.
//!
//! When it is another one, nobody can tell the rows that were left out from those that were
//! delivered. The session ends, and the next one begins with a recovery: every row after the last
//! such transaction comes from its table, and then the stream goes on.

use std::time::Duration;

use decoder::Lsn;

use super::{AT_ONCE, Audit, Earlier, SOON, Subject, statements};
use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::relay::recovery::loss::Loss;
use crate::settings::Dispatch;

/// What is waited for.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    /// All older transactions have ended.
    oldest: i64,
    /// Before this position.
    end: Lsn,
}

#[derive(Debug, Default)]
pub(super) struct Vouching {
    waiting: Option<Waiting>,
    /// Events that had been delivered by the last look.
    delivered: Option<u64>,
    /// The rows of those events are of transactions before this one; `None` when all of them are
    /// vouched for: an idle relay writes nothing.
    goal: Option<i64>,
    /// Up to where this session has vouched.
    vouched: Option<i64>,
    /// The transaction that was to come next when the session began to vouch: what earlier ones
    /// have delivered is of older ones.
    began_before: Option<i64>,
}

impl Vouching {
    /// Whether this session has brought the slot to the position that is waited for.
    pub(super) async fn has_reached(&self, sql: &Sql, subject: &Subject) -> Result<bool> {
        let (slot, walsender) = (&subject.slot, subject.walsender);
        match self.waiting {
            Some(Waiting { end, .. }) => statements::is_confirmed(sql, slot, walsender, end).await,
            None => Ok(false),
        }
    }
}

impl Audit {
    /// One step; returns the time until the next. `reached` is what [`Vouching::has_reached`] said
    /// before `publication` was looked at.
    pub(super) async fn vouch(
        &mut self,
        sql: &Sql,
        earlier: &Earlier,
        publication: &str,
        reached: bool,
    ) -> Result<Duration> {
        if earlier.publication.as_deref() != Some(publication) {
            return self.end_session(sql).await;
        }
        let vouching = &mut self.vouching;
        if let Some(Waiting { oldest, .. }) = vouching.waiting.take_if(|_| reached) {
            let is_new = vouching.vouched.is_none_or(|before| before < oldest);
            // Back to full records goes whoever has vouched for all that was delivered without.
            let is_full = self.subject.dispatch == Dispatch::Full
                && vouching.began_before.is_some_and(|next| oldest >= next);
            if is_new || is_full {
                let dispatch = match is_full {
                    true => Dispatch::Full,
                    false => Dispatch::Exceptions,
                };
                statements::vouch(sql, &self.subject, publication, oldest, dispatch).await?;
            }
            vouching.vouched = Some(oldest);
            vouching.goal = vouching.goal.filter(|goal| oldest < *goal);
            return Ok(SOON);
        }
        if vouching.waiting.is_some() {
            return Ok(AT_ONCE);
        }
        let delivered = self.subject.metrics.delivered();
        let running = statements::running(sql).await?;
        vouching.began_before.get_or_insert(running.next);
        if vouching.delivered.replace(delivered) != Some(delivered) {
            vouching.goal = Some(running.next);
        }
        if vouching.goal.is_none() {
            return Ok(SOON);
        }
        vouching.waiting = Some(Waiting {
            oldest: running.oldest,
            end: statements::wal_end(sql).await?,
        });
        Ok(AT_ONCE)
    }

    async fn end_session(&mut self, sql: &Sql) -> Result<Duration> {
        statements::mark_broken(sql, &self.subject, Loss::PublicationChanged.name()).await?;
        let what = "the publication or a captured table was altered or made anew: what has no \
                    known outcome is delivered from the tables";
        // Nobody listens any more when the session has ended.
        let _ = self.broken.try_send(Error::new(Code::PublicationGap, what));
        Ok(SOON)
    }
}

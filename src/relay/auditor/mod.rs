//! Looks for committed rows that the stream never brought, and delivers them from their table.
//!
//! The outbox is append-only and the dispatch table durable, so a row without a record is either
//! on its way or was never streamed. Which of the two: list such rows, note the end of the WAL,
//! wait until everything up to there is confirmed, and look again (`pass`).
//!
//! Rows go missing when the publication does not hold their table at their position in the WAL,
//! which PostgreSQL does not tell. Each change of the publication or of a captured table leaves a
//! trace in the catalog. So:
//!
//! - When that trace is not the one of the last audit, the whole table is compared, and again
//!   until every transaction that was running then has ended (`full`).
//! - Otherwise, every few minutes, what was appended since the last time (`marks`). That finds
//!   what left no trace, at a small price; it may miss rows in pages that were used again.
//!
//! Before the first start there was no relay: rows of that time are not delivered (`start = new`),
//! and the first whole audit records them as `discarded`. From then on each row has a record.
//!
//! Not here: the look at the publication itself (`supervisor`), the loss of the slot (`recovery`).

mod marks;
mod pass;
mod statements;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use slot_manager::SlotName;
use slot_manager::publication::{self, CapturedTable};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;

use super::from_table::TableSender;
use crate::error::{Code, Result};
use crate::map::TableSettings;
use crate::metrics::Metrics;
use crate::postgres::{Sql, Target, connect};
use crate::table::TableReader;
use marks::Marks;
use pass::{Missing, Outcome, Pass};

/// Between two audits of what was appended.
const INTERVAL: Duration = Duration::from_secs(300);
/// Until the next attempt when the relay is behind, or a transaction of that time still runs.
const SOON: Duration = Duration::from_secs(10);
/// Until rows that were found are looked at again.
const AT_ONCE: Duration = Duration::from_secs(1);

/// A whole table may have to be compared in one statement.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(3600);

/// What to audit.
#[derive(Debug)]
pub(super) struct Subject {
    pub(super) target: Target,
    pub(super) slot: SlotName,
    pub(super) publication: String,
    pub(super) captured: Vec<CapturedTable>,
    pub(super) tables: Arc<[TableSettings]>,
    pub(super) project: Arc<str>,
    pub(super) metrics: Metrics,
}

/// How a session begins.
#[derive(Debug)]
pub(super) struct Start {
    /// Compare everything, though the publication looks as it did: the slot may have left events
    /// out.
    pub(super) everything: bool,
    /// Not before this: a recovery delivers from the tables.
    pub(super) after: Option<oneshot::Receiver<()>>,
}

/// The running task; ends when dropped.
#[derive(Debug)]
pub(super) struct Auditor(JoinHandle<()>);

impl Drop for Auditor {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Starts to audit; `hasten` asks for a look at once, and what was found comes through `events`.
pub(super) fn start(
    subject: Subject,
    start: Start,
    hasten: Arc<Notify>,
    events: TableSender,
) -> Auditor {
    Auditor(tokio::spawn(async move {
        if let Some(after) = start.after
            && after.await.is_err()
        {
            // The recovery failed, and the session ends.
            return;
        }
        let mut audit = Audit {
            everything: start.everything,
            subject,
            events,
            sent: HashSet::new(),
            horizon: None,
        };
        let mut sql = None;
        loop {
            let pause = match audit.round(&mut sql).await {
                Ok(pause) => pause,
                Err(error) => {
                    tracing::warn!(
                        code = %error.code(), hint = error.hint_text(),
                        "cannot compare the tables with outbox.dispatch, again in {SOON:?}: {error}"
                    );
                    sql = None;
                    SOON
                }
            };
            tokio::select! {
                () = hasten.notified() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }))
}

/// What the relay's row says of earlier audits.
#[derive(Debug)]
struct Earlier {
    /// Whether every row had a record at some time since the first start.
    had_one: bool,
    publication: Option<String>,
    marks: Marks,
}

struct Audit {
    subject: Subject,
    events: TableSender,
    /// Ids of rows that were handed over and had no record when last seen.
    sent: HashSet<uuid::Uuid>,
    everything: bool,
    /// The publication as it was seen first after a change, and a transaction id: a whole audit
    /// counts when no older transaction runs any more.
    horizon: Option<(String, i64)>,
}

impl Audit {
    /// One audit of whatever is due; returns the time until the next.
    async fn round(&mut self, sql: &mut Option<Sql>) -> Result<Duration> {
        let sql = match sql {
            Some(sql) => sql,
            None => sql.insert(
                connect(&self.subject.target, "postrider auditor", STATEMENT_TIMEOUT).await?,
            ),
        };
        let Subject {
            slot,
            publication,
            captured,
            ..
        } = &self.subject;
        let state = publication::inspect(sql, publication, captured).await?;
        if !state.problems().is_empty() {
            // The supervisor says so, and hastens us when it is mended.
            return Ok(SOON);
        }
        let earlier = statements::earlier(sql, slot).await?;
        let is_as_it_was = earlier.publication.as_deref() == Some(state.fingerprint());
        if is_as_it_was && earlier.had_one && !self.everything {
            return self.appended(sql, earlier.marks).await;
        }
        self.full(sql, state.fingerprint(), earlier.had_one).await
    }

    /// Compares whole tables.
    async fn full(&mut self, sql: &Sql, publication: &str, had_one: bool) -> Result<Duration> {
        let running = statements::running(sql).await?;
        let horizon = match &self.horizon {
            Some((seen, horizon)) if seen == publication => *horizon,
            Some(_) | None => running.next,
        };
        self.horizon = Some((publication.to_owned(), horizon));
        let missing = match had_one {
            true => Missing::Publish,
            false => Missing::Discard,
        };
        let marks = Marks::at_the_end(&statements::leaves(sql, &self.subject.tables).await?);
        let mut outcome = Outcome::Complete;
        for table in self.subject.tables.clone().iter() {
            let reader = TableReader::resolve(sql, table, &self.subject.project).await?;
            outcome = outcome.and(self.pass(sql, reader, None, missing).await?);
        }
        match outcome {
            Outcome::Complete if running.oldest >= horizon => {
                statements::audited(sql, &self.subject.slot, publication, &marks).await?;
                tracing::debug!("every row of the captured tables has a record");
                self.horizon = None;
                self.everything = false;
                Ok(INTERVAL)
            }
            Outcome::Complete | Outcome::Behind => Ok(SOON),
            Outcome::Found => Ok(AT_ONCE),
        }
    }

    /// Compares what was appended since the last time.
    async fn appended(&mut self, sql: &Sql, mut marks: Marks) -> Result<Duration> {
        let leaves = statements::leaves(sql, &self.subject.tables).await?;
        let before = marks.clone();
        let mut pause = INTERVAL;
        for leaf in &leaves {
            let Some(range) = marks.due(leaf) else {
                continue;
            };
            let table = &self.subject.tables[leaf.table];
            let reader = TableReader::resolve(sql, table, &self.subject.project).await?;
            match self
                .pass(sql, reader, Some(range), Missing::Publish)
                .await?
            {
                Outcome::Complete => marks.done(leaf),
                Outcome::Behind => pause = pause.min(SOON),
                Outcome::Found => pause = AT_ONCE,
            }
        }
        // An idle relay writes nothing.
        if marks != before {
            statements::save_marks(sql, &self.subject.slot, &marks).await?;
        }
        Ok(pause)
    }

    async fn pass(
        &mut self,
        sql: &Sql,
        reader: TableReader,
        range: Option<marks::Range>,
        missing: Missing,
    ) -> Result<Outcome> {
        let pass = Pass {
            sql,
            slot: &self.subject.slot,
            reader,
            missing,
            events: &mut self.events,
            sent: &mut self.sent,
        };
        let (outcome, found) = pass.run(range).await?;
        if found > 0 {
            self.subject.metrics.events_from_table.inc_by(found);
            match missing {
                Missing::Publish => tracing::error!(
                    code = Code::PublicationGap.name(),
                    rows = found,
                    hint = Code::PublicationGap.hint(),
                    "rows were committed that the stream never brought: delivering them from \
                     their table"
                ),
                Missing::Discard => tracing::warn!(
                    rows = found,
                    "rows from before the first start are recorded as discarded (start = new)"
                ),
            }
        }
        Ok(outcome)
    }
}

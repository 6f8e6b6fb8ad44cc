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
//! and the first whole audit records them as `discarded`, by the transaction that inserted them.
//! From then on each row has a record. A shard compares the rows of its share.
//!
//! Where published events get no record (`dispatch = exceptions`) there is nothing to compare with:
//! then it says from time to time up to which transaction everything has its outcome (`vouching`).
//!
//! Not here: the look at the publication itself (`supervisor`), the loss of the slot (`recovery`).

mod marks;
mod pass;
mod statements;
mod vouching;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use slot_manager::publication::{self, CapturedTable};
use slot_manager::{Shard, SlotName};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinHandle;

use super::from_table::TableSender;
use super::places::Places;
use crate::dispatch::Resolved;
use crate::error::{Code, Error, Result};
use crate::map::TableSettings;
use crate::metrics::Metrics;
use crate::postgres::{PatientSql, Target};
use crate::settings::{Dispatch, Start as FromWhere};
use crate::table::TableReader;
use marks::Marks;
use pass::{Found, Outcome, Pass};
use vouching::Vouching;

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
    /// Whose rows are compared.
    pub(super) shard: Option<Shard>,
    /// Whether rows from before are wanted.
    pub(super) start: FromWhere,
    /// How the session records.
    pub(super) dispatch: Dispatch,
    pub(super) instance: String,
    /// The process that reads the slot for this session.
    pub(super) walsender: i32,
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
/// The second part says why the session has to end, if it has to; it closes when the task has died.
pub(super) fn start(
    subject: Subject,
    start: Start,
    hasten: Arc<Notify>,
    events: TableSender,
) -> (Auditor, mpsc::Receiver<Error>) {
    let (broken, told) = mpsc::channel(1);
    let auditor = Auditor(tokio::spawn(async move {
        if let Some(after) = start.after
            && after.await.is_err()
        {
            // The recovery failed, and the session ends with its error.
            return std::future::pending().await;
        }
        let mut audit = Audit {
            everything: start.everything,
            subject,
            events,
            horizon: None,
            captured_since: HashMap::new(),
            vouching: Vouching::default(),
            broken,
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
    }));
    (auditor, told)
}

/// What the relay's row says of earlier audits.
#[derive(Debug)]
struct Earlier {
    /// Whether every row had a record at some time since the first start.
    had_one: bool,
    /// The oldest transaction of the time of the first start.
    first_xid: i64,
    publication: Option<String>,
    marks: Marks,
    /// Whether events may have been delivered without a record.
    repeats: bool,
    /// Up to where the outcome of each row is known.
    resolved: Resolved,
}

struct Audit {
    subject: Subject,
    events: TableSender,
    everything: bool,
    horizon: Option<Horizon>,
    /// For tables that are captured since the last whole comparison, the oldest transaction of
    /// the time when that was seen.
    captured_since: HashMap<u32, i64>,
    vouching: Vouching,
    broken: mpsc::Sender<Error>,
}

/// When a whole audit counts: rows of a gap may be committed long after it.
struct Horizon {
    /// The publication as it was seen first after a change.
    publication: String,
    /// Transactions of that time are older than this one.
    next_xid: i64,
    /// Everything had a record, but such a transaction was running still.
    was_complete: bool,
}

impl Audit {
    /// One audit of whatever is due; returns the time until the next.
    async fn round(&mut self, sql: &mut Option<PatientSql>) -> Result<Duration> {
        let sql = match sql {
            Some(sql) => sql,
            None => {
                let target = &self.subject.target;
                sql.insert(PatientSql::open(target, "postrider auditor", STATEMENT_TIMEOUT).await?)
            }
        };
        let Subject {
            slot,
            publication,
            captured,
            ..
        } = &self.subject;
        let looking = async {
            let earlier = statements::earlier(sql, slot).await?;
            // What is said of the publication must be later than that the slot has come so far.
            let reached = match earlier.repeats {
                true => self.vouching.has_reached(sql, &self.subject).await?,
                false => false,
            };
            let state = publication::inspect(sql, publication, captured).await?;
            Ok::<_, Error>((earlier, reached, state))
        };
        let (earlier, reached, state) = sql.answer(looking).await?;
        if !state.problems().is_empty() {
            // The supervisor says so, and hastens us when it is mended.
            return Ok(SOON);
        }
        if earlier.repeats {
            let vouching = self.vouch(sql, &earlier, state.fingerprint(), reached);
            return sql.answer(vouching).await;
        }
        let is_as_it_was = earlier.publication.as_deref() == Some(state.fingerprint());
        if is_as_it_was && earlier.had_one && !self.everything {
            return self.appended(sql, earlier).await;
        }
        self.full(sql, state.fingerprint(), &earlier).await
    }

    /// Compares whole tables.
    async fn full(
        &mut self,
        sql: &PatientSql,
        publication: &str,
        earlier: &Earlier,
    ) -> Result<Duration> {
        let running = sql.answer(statements::running(sql)).await?;
        let mut horizon = match self.horizon.take() {
            Some(horizon) if horizon.publication == publication => horizon,
            Some(_) | None => Horizon {
                publication: publication.to_owned(),
                next_xid: running.next,
                was_complete: false,
            },
        };
        let is_over = running.oldest >= horizon.next_xid;
        if horizon.was_complete && !is_over {
            self.horizon = Some(horizon);
            return Ok(SOON);
        }
        let tables = self.subject.tables.clone();
        let oids = sql.answer(statements::tables(sql, &tables)).await?;
        let leaves = sql.answer(statements::leaves(sql, &tables)).await?;
        let marks = Marks::at_the_end(&leaves).and_tables(&oids);
        let mut outcome = Outcome::Complete;
        for (table, oid) in tables.iter().zip(oids) {
            let first_xid = self.first_xid(earlier, oid, running.oldest);
            let reader = self.reader(sql, table).await?;
            let passed = self.pass(sql, reader, None, first_xid, earlier);
            outcome = outcome.and(passed.await?);
        }
        horizon.was_complete = outcome == Outcome::Complete;
        self.horizon = Some(horizon);
        match outcome {
            Outcome::Complete if is_over => {
                let writing = statements::audited(sql, &self.subject.slot, publication, &marks);
                sql.answer(writing).await?;
                tracing::debug!("every row of the captured tables has a record");
                self.horizon = None;
                self.everything = false;
                Ok(INTERVAL)
            }
            Outcome::Complete | Outcome::Behind => Ok(SOON),
            Outcome::Found => Ok(AT_ONCE),
        }
    }

    /// From which transaction on the rows of a table are delivered; `None` for all of them. Before
    /// it is what was there before the first start, or before the table was captured at all.
    fn first_xid(&mut self, earlier: &Earlier, table: u32, oldest: i64) -> Option<i64> {
        if !earlier.had_one {
            return Some(earlier.first_xid);
        }
        let is_new = self.subject.start == FromWhere::New && earlier.marks.is_new(table);
        is_new.then(|| *self.captured_since.entry(table).or_insert(oldest))
    }

    /// Compares what was appended since the last time.
    async fn appended(&mut self, sql: &PatientSql, earlier: Earlier) -> Result<Duration> {
        let mut marks = earlier.marks.clone();
        let looking = statements::leaves(sql, &self.subject.tables);
        let leaves = sql.answer(looking).await?;
        let before = marks.clone();
        let mut pause = INTERVAL;
        for leaf in &leaves {
            let Some(range) = marks.due(leaf) else {
                continue;
            };
            let table = &self.subject.tables[leaf.table];
            let reader = self.reader(sql, table).await?;
            let passed = self.pass(sql, reader, Some(range), None, &earlier);
            match passed.await? {
                Outcome::Complete => marks.done(leaf),
                Outcome::Behind => pause = pause.min(SOON),
                Outcome::Found => pause = AT_ONCE,
            }
        }
        // An idle relay writes nothing.
        if marks != before {
            let saving = statements::save_marks(sql, &self.subject.slot, &marks);
            sql.answer(saving).await?;
        }
        Ok(pause)
    }

    async fn reader(&self, sql: &PatientSql, table: &TableSettings) -> Result<TableReader> {
        let (project, shard) = (&self.subject.project, self.subject.shard);
        let identity = table.identity();
        let resolving = TableReader::resolve(sql, table, &identity, project, shard);
        sql.answer(resolving).await
    }

    async fn pass(
        &mut self,
        sql: &PatientSql,
        reader: TableReader,
        range: Option<marks::Range>,
        first_xid: Option<i64>,
        earlier: &Earlier,
    ) -> Result<Outcome> {
        let pass = Pass {
            sql,
            slot: &self.subject.slot,
            walsender: self.subject.walsender,
            places: Places::of(self.subject.shard),
            reader,
            first_xid,
            resolved: earlier.resolved,
            events: &mut self.events,
        };
        let Found {
            outcome,
            published,
            discarded,
        } = pass.run(range).await?;
        if published > 0 {
            self.subject.metrics.events_from_table.inc_by(published);
            log_gap(published, earlier.had_one);
        }
        if discarded > 0 {
            tracing::warn!(
                rows = discarded,
                "rows from before the first start are recorded as discarded (start = new)"
            );
        }
        Ok(outcome)
    }
}

/// Some rows at the first look are usual: those that were committed while the slot was being made.
fn log_gap(rows: u64, had_one: bool) {
    let code = Code::PublicationGap;
    if had_one {
        tracing::error!(
            code = code.name(),
            rows,
            hint = code.hint(),
            "rows were committed that the stream never brought: delivering them from their table"
        );
    } else {
        tracing::warn!(
            code = code.name(),
            rows,
            hint = "a few are usual, when the slot was made while services wrote; for more, see \
                    `postrider explain publication-gap`",
            "rows since the slot was made that the stream did not bring: delivering them from their \
             table"
        );
    }
}

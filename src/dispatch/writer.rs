//! Records outcomes: one transaction per batch, on a connection of its own.
//!
//! While one batch is being written the next one gathers, so batches grow with the load. Small ones
//! keep a distance from each other ([`MIN_INTERVAL`]): each commit makes the server flush its log,
//! and the services' own commits wait for that. The first after a while is not delayed, and no
//! publish ever waits for a row. A batch that fails is written again, after a new connection if need
//! be. It may have been committed all the same: rows that are there already are left as they are.
//!
//! A relay that has lost the slot records nothing any more: its successor has looked here already,
//! and sends again what had no record. Half of that must not be taken from it later. So each
//! transaction begins by asking who serves by now (`successor`), and the successor waits until those
//! that began before it came are over (`predecessor`).
//!
//! An event that was released from quarantine has a row already: its new outcome is an update. So
//! a batch that is written a second time cannot undo what an operator has asked for in between.

use std::collections::{HashMap, HashSet};
use std::pin::pin;
use std::time::Duration;

use decoder::Lsn;
use futures_util::SinkExt;
use slot_manager::{SlotFamily, SlotName, SystemIdentifier, cluster};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};
use tokio_postgres::Statement;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::PgLsn;

use super::outcome::Record;
use super::predecessor::writer_name;
use super::released::{ReleasedRows, UPDATE};
use super::rows::{COPY, RowKey, encode, row_key};
use super::successor::{ACTIVE_SLOTS, is_there};
use crate::error::{Code, Disposition, Error, Result};
use crate::lanes::Standing;
use crate::postgres::{Sql, Target, answer_within, connect};
use crate::watermark::CommitLsn;

/// Rows per transaction: enough that a commit's cost is spread thin, small enough to be quick.
const MAX_ROWS: usize = 8_000;
/// Bytes of texts per transaction, if the rows have long ones: it is in memory once more to be sent.
const MAX_TEXT_BYTES: usize = 4 << 20;
/// A batch of so many rows does not wait for more: a commit is cheap beside them.
const ENOUGH_ROWS: usize = 2_000;
/// From one commit to the next while batches are small. A crash repeats what was published in this
/// time, and nothing of it is confirmed sooner.
const MIN_INTERVAL: Duration = Duration::from_millis(50);

const STATEMENT_TIMEOUT: Duration = Duration::from_secs(30);
/// Of connecting and of one transaction, when the connection leads nowhere: longer than the
/// server's own limit for the one statement of it that may have to wait.
const ANSWER_LIMIT: Duration = Duration::from_secs(35);
/// How often a batch meets rows that were not there just before.
const MAX_CONFLICTS: u32 = 3;
const RETRY_PAUSE: Duration = Duration::from_millis(500);

const HAS_SUCCESSOR: &str = "another session has had the slot meanwhile: what is on its way gets no \
    record from here, and is sent again by the next that serves";

/// Why a session that goes on regardless ends.
const SLOT_IS_ANOTHERS: &str = "the dispatch writer has found another session serving the slot";

/// A transaction that waits for us, because we stand still, holds our successor up.
const BE_QUICK: &str = "SET idle_in_transaction_session_timeout = '5s'";

const WHICH_ARE_THERE: &str = "\
    SELECT d.commit_lsn, d.ordinal, d.event_id FROM outbox.dispatch d \
    JOIN unnest($1::pg_lsn[], $2::int[]) u (commit_lsn, ordinal) \
        ON d.commit_lsn = u.commit_lsn AND d.ordinal = u.ordinal";

/// What was durably recorded with one batch.
#[derive(Debug, Default)]
pub(crate) struct Written {
    /// How many events of which transactions have their first outcome by it.
    pub(crate) commits: Vec<(CommitLsn, u64)>,
    /// Events in it.
    pub(crate) events: usize,
    /// [`Record::text_bytes`] of all of it.
    pub(crate) text_bytes: usize,
    /// [`Record`]s in it. They are written in the order in which they were handed over.
    pub(crate) records: u64,
}

/// What the writer tells the relay.
#[derive(Debug)]
pub(crate) enum WriterEvent {
    /// These are durable.
    Recorded(Written),
    /// Writing cannot succeed until a person has changed something.
    Failed(Error),
}

/// Who reads the slot, and on which server.
#[derive(Debug, Clone)]
pub(crate) struct Reader {
    /// The name that the relay has written into outbox.relay.
    pub(crate) instance: String,
    /// Process of the walsender; 0 when it is not known.
    pub(crate) walsender: i32,
    pub(crate) system_identifier: SystemIdentifier,
    pub(crate) timeline: u32,
}

impl Reader {
    /// A standby that was promoted may lack records that its primary had: what was recorded there
    /// behind them would make the next session repeat these alone, out of order.
    ///
    /// # Errors
    /// `postgres-stopping` on another server than that of the session, those of a statement.
    async fn is_still_served_by(&self, sql: &Sql) -> Result<()> {
        let cluster = cluster::inspect(sql).await?;
        if cluster.system_identifier == self.system_identifier && cluster.timeline == self.timeline
        {
            return Ok(());
        }
        let what = "another server answers than the one that the session began on";
        Err(Error::new(Code::PostgresStopping, what)
            .hint("no action needed: the relay opens a session on the server that answers now"))
    }
}

/// The writer's task.
#[derive(Debug)]
pub(crate) struct Writer {
    /// Unbounded, as what it holds is within the budget of bytes in flight.
    queue: Option<mpsc::UnboundedSender<Record>>,
    task: JoinHandle<()>,
}

impl Writer {
    /// Starts the task; what it has to say comes through `events`.
    pub(crate) fn start(
        target: Target,
        slot: &SlotName,
        family: &SlotFamily,
        reader: Reader,
        events: mpsc::UnboundedSender<WriterEvent>,
    ) -> Self {
        let (queue, incoming) = mpsc::unbounded_channel();
        let place = Place {
            target,
            name: writer_name(slot),
            slot: slot.to_string(),
            family: family.clone(),
            reader,
        };
        let task = tokio::spawn(async move {
            if let Err(error) = run(&place, incoming, &events).await {
                // Nobody listens any more when the session has ended.
                let _ = events.send(WriterEvent::Failed(error));
            }
        });
        Self {
            queue: Some(queue),
            task,
        }
    }

    /// Hands outcomes over.
    pub(crate) fn record(&self, record: Record) {
        // The task ends early only with an error, which it has reported by itself.
        if let Some(queue) = &self.queue {
            let _ = queue.send(record);
        }
    }

    /// Writes what was handed over, or gives up after `limit`.
    pub(crate) async fn finish(mut self, limit: Duration) {
        self.queue = None;
        if tokio::time::timeout(limit, &mut self.task).await.is_err() {
            tracing::warn!("the dispatch table could not be written in time: events may repeat");
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn run(
    place: &Place,
    mut incoming: mpsc::UnboundedReceiver<Record>,
    events: &mpsc::UnboundedSender<WriterEvent>,
) -> Result<()> {
    let mut sql: Option<Connected> = None;
    let mut batch = Batch::default();
    let mut gathered = Vec::new();
    let mut earliest = Instant::now();
    loop {
        let room = MAX_ROWS.saturating_sub(batch.recorded.events).max(1);
        let gathering = incoming.recv_many(&mut gathered, room);
        let is_over = match batch.recorded.events {
            0 => gathering.await == 0,
            // Nothing more until the batch is due also means that it is complete.
            _ => timeout_at(earliest, gathering).await.unwrap_or(0) == 0,
        };
        if is_over && batch.recorded.events == 0 {
            return Ok(());
        }
        for record in gathered.drain(..) {
            batch.add(record);
            if batch.is_full() {
                write_until_done(place, &mut sql, &mut batch, events).await?;
            }
        }
        let is_due = is_over || batch.recorded.events >= ENOUGH_ROWS || Instant::now() >= earliest;
        if is_due && batch.recorded.events > 0 {
            write_until_done(place, &mut sql, &mut batch, events).await?;
            earliest = Instant::now() + MIN_INTERVAL;
        }
    }
}

/// Writes the batch and empties it; tries again without end on what may pass.
async fn write_until_done(
    place: &Place,
    sql: &mut Option<Connected>,
    batch: &mut Batch,
    events: &mpsc::UnboundedSender<WriterEvent>,
) -> Result<()> {
    loop {
        match write(place, sql, batch).await {
            Ok(()) => {
                let done = std::mem::take(batch);
                // Nobody listens any more when the session has ended.
                let _ = events.send(WriterEvent::Recorded(done.recorded));
                return Ok(());
            }
            // The session ends: the server will not come back before, or the slot is another's.
            Err(error) if matches!(error.code(), Code::PostgresStopping | Code::LeaseLost) => {
                return Err(error);
            }
            Err(error) if error.code().disposition() == Disposition::Retry => {
                tracing::warn!(code = %error.code(), "cannot write outbox.dispatch, again: {error}");
                *sql = None;
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Where the writer connects, under which name, and for whom.
struct Place {
    target: Target,
    name: String,
    slot: String,
    family: SlotFamily,
    reader: Reader,
}

struct Connected {
    sql: Sql,
    active_slots: Statement,
    copy: Statement,
    update: Statement,
}

impl Connected {
    async fn new(place: &Place) -> Result<Self> {
        let sql = connect(&place.target, &place.name, STATEMENT_TIMEOUT).await?;
        place.reader.is_still_served_by(&sql).await?;
        sql.batch_execute(BE_QUICK).await?;
        Ok(Self {
            active_slots: sql.prepare(ACTIVE_SLOTS).await?,
            copy: sql.prepare(COPY).await?,
            update: sql.prepare(UPDATE).await?,
            sql,
        })
    }
}

async fn write(place: &Place, connected: &mut Option<Connected>, batch: &Batch) -> Result<()> {
    let connected = match connected {
        Some(connected) => connected,
        None => connected.insert(answer_within(ANSWER_LIMIT, Connected::new(place)).await?),
    };
    let mut there = HashSet::new();
    for _ in 0..MAX_CONFLICTS {
        let attempt = async { Ok::<_, Error>(attempt(place, connected, batch, &there).await) };
        match answer_within(ANSWER_LIMIT, attempt).await? {
            // It was written before, and the answer was lost. The transaction is rolled back, and
            // the session is in step: the server had all of the COPY.
            Err(error) if error.code() == Some(&SqlState::UNIQUE_VIOLATION) => {
                let asking = rows_that_are_there(&connected.sql, batch);
                there = answer_within(ANSWER_LIMIT, asking).await?;
            }
            Ok(Attempt::SlotIsAnothers) => {
                // The session may be over already: then nobody listens to the error.
                tracing::warn!("{HAS_SUCCESSOR}");
                return Err(Error::new(Code::LeaseLost, SLOT_IS_ANOTHERS));
            }
            Ok(Attempt::Committed) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
    let what = "another session writes rows of the same events to outbox.dispatch";
    Err(Error::new(Code::PostgresConnectionLost, what))
}

/// What became of a transaction that did not fail.
enum Attempt {
    Committed,
    /// Rolled back, since nothing may be recorded any more.
    SlotIsAnothers,
}

/// One transaction with the whole batch, but for new rows that are `there`.
async fn attempt(
    place: &Place,
    connected: &mut Connected,
    batch: &Batch,
    there: &HashSet<RowKey>,
) -> Result<Attempt, tokio_postgres::Error> {
    let transaction = connected.sql.client_mut().transaction().await?;
    let active = transaction
        .query(
            &connected.active_slots,
            &[&place.slot, &place.reader.instance],
        )
        .await?;
    let active = active.iter().map(|row| (row.get(0), row.get(1)));
    if is_there(active, &place.slot, &place.family, place.reader.walsender) {
        transaction.rollback().await?;
        return Ok(Attempt::SlotIsAnothers);
    }
    // Released events go before new ones of their key, and so do their outcomes.
    if batch.holds_released {
        let rows = ReleasedRows::of(&batch.records);
        transaction
            .execute(&connected.update, &rows.parameters())
            .await?;
    }
    if let Some(rows) = encode(&batch.records, there) {
        let mut copy = pin!(transaction.copy_in(&connected.copy).await?);
        copy.send(rows).await?;
        copy.finish().await?;
    }
    transaction.commit().await?;
    Ok(Attempt::Committed)
}

/// Which of the batch's new events have a row.
///
/// # Errors
/// `internal` when the place of one has the row of another: it must not count as recorded. The next
/// session looks such a transaction up by ids.
async fn rows_that_are_there(sql: &Sql, batch: &Batch) -> Result<HashSet<RowKey>> {
    let events = batch.records.iter().flat_map(|record| &record.events);
    let new = events.filter(|event| event.standing == Standing::New);
    let new = new.map(|event| (row_key(event), event.event_id.uuid));
    let new: HashMap<RowKey, [u8; 16]> = new.collect();
    let (lsns, ordinals): (Vec<_>, Vec<_>) = new
        .keys()
        .copied()
        .map(|(lsn, ordinal)| (PgLsn::from(lsn), ordinal))
        .unzip();
    let rows = sql.query(WHICH_ARE_THERE, &[&lsns, &ordinals]).await?;
    let mut there = HashSet::new();
    for row in &rows {
        let key = (row.get::<_, PgLsn>(0).into(), row.get(1));
        let id: uuid::Uuid = row.get(2);
        if new.get(&key).is_some_and(|event| id.as_bytes() != event) {
            let (lsn, ordinal) = (Lsn::new(key.0), key.1);
            let what =
                format!("outbox.dispatch has another event at commit {lsn}, ordinal {ordinal}");
            return Err(Error::new(Code::Internal, what));
        }
        there.insert(key);
    }
    Ok(there)
}

/// One batch of outcomes.
#[derive(Debug, Default)]
struct Batch {
    records: Vec<Record>,
    holds_released: bool,
    recorded: Written,
}

impl Batch {
    fn add(&mut self, record: Record) {
        self.recorded.records += 1;
        self.recorded.events += record.events.len();
        self.recorded.text_bytes += record.text_bytes();
        for event in &record.events {
            match event.standing {
                // One that gets no row waits here for those before it.
                Standing::New | Standing::Repeated => self.recorded.count(event.commit),
                Standing::Released => self.holds_released = true,
            }
        }
        self.records.push(record);
    }

    fn is_full(&self) -> bool {
        self.recorded.events >= MAX_ROWS || self.recorded.text_bytes >= MAX_TEXT_BYTES
    }
}

impl Written {
    /// One more event of `commit` has its first outcome; neighbours are put together.
    pub(crate) fn count(&mut self, commit: CommitLsn) {
        match self.commits.last_mut() {
            Some((last, count)) if *last == commit => *count += 1,
            Some(_) | None => self.commits.push((commit, 1)),
        }
    }
}

#[cfg(test)]
mod tests;

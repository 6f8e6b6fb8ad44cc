//! Records outcomes: one statement per batch, on a connection of its own.
//!
//! While one batch is being written the next one gathers, so batches grow with the load and there
//! is no delay without it. A batch that fails is written again, after a new connection if need
//! be: rows that are there already are left as they are.
//!
//! An event that was released from quarantine has a row already: its new outcome is an update, a
//! statement of its own. So what is usual stays as cheap as it is, and a batch that is written a
//! second time cannot undo what an operator has asked for in between.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::BytesMut;
use slot_manager::SlotName;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_postgres::Statement;
use tokio_postgres::types::{IsNull, PgLsn, ToSql, Type, to_sql_checked};

use super::predecessor::writer_name;
use crate::error::{Code, Disposition, Result};
use crate::lanes::{EventRef, Standing};
use crate::map::OrderingKey;
use crate::postgres::{Sql, Target, answer_within, connect};
use crate::watermark::CommitLsn;

/// Rows per statement: enough that a commit's cost is spread thin, small enough to be quick.
const MAX_ROWS: usize = 2_000;

const STATEMENT_TIMEOUT: Duration = Duration::from_secs(30);
/// Of a connection that leads nowhere; the server's own limit comes first.
const ANSWER_LIMIT: Duration = Duration::from_secs(35);
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// An array that is shorter than the others is filled up with nulls: as long as nothing is set
/// aside, the arrays of errors and states are empty.
/// A relay that has lost the slot records nothing any more: its successor has looked here already,
/// and sends again what had no record. Half of that must not be taken from it later.
const INSERT: &str = "\
    INSERT INTO outbox.dispatch (commit_lsn, ordinal, event_id, source_id, topic, ordering_key, \
        message_id, attempts, committed_at, dispatched_at, error, state) \
    SELECT commit_lsn, ordinal, event_id, source_id, topic, ordering_key, \
        message_id, attempts, committed_at, dispatched_at, error, coalesce(state, 'published') \
    FROM unnest($1::pg_lsn[], $2::int[], $3::uuid[], $4::text[], $5::text[], $6::text[], \
        $7::text[], $8::int[], $9::timestamptz[], $10::timestamptz[], $11::text[], $12::text[]) \
        u (commit_lsn, ordinal, event_id, source_id, topic, ordering_key, message_id, attempts, \
           committed_at, dispatched_at, error, state) \
    WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_replication_slots s \
        WHERE s.slot_name = $13::text AND s.active_pid <> nullif($14::int, 0)) \
    ON CONFLICT (commit_lsn, ordinal) DO NOTHING";

/// What was discarded while it was on its way is published all the same: the row says so.
const UPDATE: &str = "\
    UPDATE outbox.dispatch d SET \
        state = coalesce(u.state, 'published'), topic = u.topic, ordering_key = u.ordering_key, \
        message_id = u.message_id, attempts = d.attempts + u.attempts, \
        dispatched_at = u.dispatched_at, error = u.error \
    FROM unnest($1::pg_lsn[], $2::int[], $3::text[], $4::text[], $5::text[], $6::int[], \
        $7::timestamptz[], $8::text[], $9::text[]) \
        u (commit_lsn, ordinal, topic, ordering_key, message_id, attempts, dispatched_at, error, \
           state) \
    WHERE d.commit_lsn = u.commit_lsn AND d.ordinal = u.ordinal \
      AND (d.state IN ('quarantined', 'released') OR d.state = 'discarded' AND u.state IS NULL) \
      AND NOT EXISTS (SELECT FROM pg_catalog.pg_replication_slots s \
        WHERE s.slot_name = $10::text AND s.active_pid <> nullif($11::int, 0))";

/// Outcomes of events of one topic and ordering key.
#[derive(Debug)]
pub(crate) struct Record {
    /// `None` when the row does not tell.
    pub(crate) topic: Option<Arc<str>>,
    pub(crate) ordering_key: OrderingKey,
    pub(crate) at: SystemTime,
    pub(crate) events: Vec<EventRef>,
    pub(crate) outcome: Outcome,
}

/// What became of events.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Stored, with Pub/Sub's ids in the order of the events.
    Published(Vec<String>),
    /// Set aside, and why.
    Quarantined(Arc<str>),
    /// Set aside behind events that are being released: it is released with them.
    Released(Arc<str>),
}

/// What was durably recorded with one batch.
#[derive(Debug, Default)]
pub(crate) struct Written {
    /// How many events of which transactions have their first outcome by it.
    pub(crate) commits: Vec<(CommitLsn, u64)>,
    /// Events in it.
    pub(crate) events: usize,
    /// [`Record`]s in it. They are written in the order in which they were handed over.
    pub(crate) records: u64,
}

/// What the writer tells the relay.
#[derive(Debug)]
pub(crate) enum WriterEvent {
    /// These are durable.
    Recorded(Written),
    /// Writing cannot succeed until a person has changed something.
    Failed(crate::error::Error),
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
        walsender: i32,
        events: mpsc::UnboundedSender<WriterEvent>,
    ) -> Self {
        let (queue, incoming) = mpsc::unbounded_channel();
        let place = Place {
            target,
            name: writer_name(slot),
            slot: slot.to_string(),
            walsender,
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
        let _ = self.queue.as_ref().map(|queue| queue.send(record));
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
    loop {
        let room = MAX_ROWS.saturating_sub(batch.recorded.events).max(1);
        if incoming.recv_many(&mut gathered, room).await == 0 {
            return Ok(());
        }
        for record in gathered.drain(..) {
            batch.add(record);
            if batch.recorded.events >= MAX_ROWS {
                write_until_done(place, &mut sql, &mut batch, events).await?;
            }
        }
        if batch.recorded.events > 0 {
            write_until_done(place, &mut sql, &mut batch, events).await?;
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
        match answer_within(ANSWER_LIMIT, write(place, sql, batch)).await {
            Ok(()) => {
                let done = std::mem::take(batch);
                // Nobody listens any more when the session has ended.
                let _ = events.send(WriterEvent::Recorded(done.recorded));
                return Ok(());
            }
            // The server will not come back before this session has ended.
            Err(error) if error.code() == Code::PostgresStopping => return Err(error),
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
    /// The process that reads the slot for this session; 0 when it is not known.
    walsender: i32,
}

struct Connected {
    sql: Sql,
    insert: Statement,
    update: Statement,
}

async fn write(place: &Place, connected: &mut Option<Connected>, batch: &Batch) -> Result<()> {
    let Connected {
        sql,
        insert,
        update,
    } = match connected {
        Some(connected) => connected,
        None => {
            let sql = connect(&place.target, &place.name, STATEMENT_TIMEOUT).await?;
            let insert = sql.prepare(INSERT).await?;
            let update = sql.prepare(UPDATE).await?;
            connected.insert(Connected {
                sql,
                insert,
                update,
            })
        }
    };
    // Released events go before new ones of their key, and so do their outcomes.
    if !batch.released.is_empty() {
        sql.execute(update, &batch.released.to_update(place))
            .await?;
    }
    if !batch.new.is_empty() {
        sql.execute(insert, &batch.new.to_insert(place)).await?;
    }
    Ok(())
}

/// A shared text as a parameter, without a copy.
#[derive(Debug)]
struct Shared<T>(T);

impl<T: AsRef<str> + std::fmt::Debug> ToSql for Shared<T> {
    fn to_sql(
        &self,
        ty: &Type,
        out: &mut BytesMut,
    ) -> Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        self.0.as_ref().to_sql(ty, out)
    }

    fn accepts(ty: &Type) -> bool {
        <&str as ToSql>::accepts(ty)
    }

    to_sql_checked!();
}

/// The rows of one statement, by column.
#[derive(Debug, Default)]
struct Rows {
    commit_lsns: Vec<PgLsn>,
    ordinals: Vec<i32>,
    event_ids: Vec<uuid::Uuid>,
    source_ids: Vec<Option<Box<str>>>,
    topics: Vec<Option<Shared<Arc<str>>>>,
    ordering_keys: Vec<Option<Shared<OrderingKey>>>,
    message_ids: Vec<Option<String>>,
    attempts: Vec<i32>,
    committed_at: Vec<SystemTime>,
    dispatched_at: Vec<SystemTime>,
    /// Up to the last event that was set aside.
    errors: Vec<Option<Shared<Arc<str>>>>,
    states: Vec<Option<&'static str>>,
}

/// One batch of outcomes.
#[derive(Debug, Default)]
struct Batch {
    new: Rows,
    released: Rows,
    recorded: Written,
}

impl Batch {
    fn add(&mut self, record: Record) {
        let Record {
            topic,
            ordering_key,
            at,
            events,
            outcome,
        } = record;
        let key = Some(ordering_key).filter(|key| !key.is_unordered());
        self.recorded.records += 1;
        self.recorded.events += events.len();
        let (mut message_ids, set_aside) = match outcome {
            Outcome::Published(ids) => (ids.into_iter(), None),
            Outcome::Quarantined(error) => (Vec::new().into_iter(), Some(("quarantined", error))),
            Outcome::Released(error) => (Vec::new().into_iter(), Some(("released", error))),
        };
        for event in events {
            let rows = match event.standing {
                Standing::New => {
                    self.recorded.count(event.commit);
                    &mut self.new
                }
                Standing::Released => &mut self.released,
            };
            rows.topics.push(topic.clone().map(Shared));
            rows.ordering_keys.push(key.clone().map(Shared));
            rows.add(event, message_ids.next(), set_aside.as_ref(), at);
        }
    }
}

impl Written {
    /// One more event of `commit` has its first outcome; neighbours are put together.
    fn count(&mut self, commit: CommitLsn) {
        match self.commits.last_mut() {
            Some((last, count)) if *last == commit => *count += 1,
            Some(_) | None => self.commits.push((commit, 1)),
        }
    }
}

impl Rows {
    fn is_empty(&self) -> bool {
        self.commit_lsns.is_empty()
    }

    fn add(
        &mut self,
        event: EventRef,
        message_id: Option<String>,
        set_aside: Option<&(&'static str, Arc<str>)>,
        at: SystemTime,
    ) {
        let carried = event.failed_attempts + u32::from(message_id.is_some());
        if let Some((state, error)) = set_aside {
            let place = self.commit_lsns.len();
            self.errors.resize_with(place, || None);
            self.states.resize(place, None);
            self.errors.push(Some(Shared(error.clone())));
            self.states.push(Some(state));
        }
        self.commit_lsns
            .push(PgLsn::from(event.commit.lsn().as_u64()));
        self.ordinals.push(event.ordinal as i32);
        self.event_ids
            .push(uuid::Uuid::from_bytes(event.event_id.uuid));
        self.source_ids.push(event.event_id.source_id);
        self.message_ids.push(message_id);
        self.attempts
            .push(i32::try_from(carried).unwrap_or(i32::MAX));
        self.committed_at.push(
            event
                .commit_time
                .to_system_time()
                .unwrap_or(SystemTime::UNIX_EPOCH),
        );
        self.dispatched_at.push(at);
    }

    fn to_insert<'a>(&'a self, place: &'a Place) -> [&'a (dyn ToSql + Sync); 14] {
        [
            &self.commit_lsns,
            &self.ordinals,
            &self.event_ids,
            &self.source_ids,
            &self.topics,
            &self.ordering_keys,
            &self.message_ids,
            &self.attempts,
            &self.committed_at,
            &self.dispatched_at,
            &self.errors,
            &self.states,
            &place.slot,
            &place.walsender,
        ]
    }

    fn to_update<'a>(&'a self, place: &'a Place) -> [&'a (dyn ToSql + Sync); 11] {
        [
            &self.commit_lsns,
            &self.ordinals,
            &self.topics,
            &self.ordering_keys,
            &self.message_ids,
            &self.attempts,
            &self.dispatched_at,
            &self.errors,
            &self.states,
            &place.slot,
            &place.walsender,
        ]
    }
}

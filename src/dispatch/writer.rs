//! Records published events: one statement per batch, on a connection of its own.
//!
//! While one batch is being written the next one gathers, so batches grow with the load and there
//! is no delay without it. A batch that fails is written again, after a new connection if need
//! be: rows that are there already are left as they are.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::BytesMut;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_postgres::Statement;
use tokio_postgres::types::{IsNull, PgLsn, ToSql, Type, to_sql_checked};

use crate::error::{Code, Disposition, Result};
use crate::lanes::EventRef;
use crate::map::OrderingKey;
use crate::postgres::{Sql, Target, answer_within, connect};
use crate::watermark::CommitLsn;

/// Rows per statement: enough that a commit's cost is spread thin, small enough to be quick.
const MAX_ROWS: usize = 2_000;

const STATEMENT_TIMEOUT: Duration = Duration::from_secs(30);
/// Of a connection that leads nowhere; the server's own limit comes first.
const ANSWER_LIMIT: Duration = Duration::from_secs(35);
const RETRY_PAUSE: Duration = Duration::from_millis(500);

const INSERT: &str = "\
    INSERT INTO outbox.dispatch (commit_lsn, ordinal, event_id, source_id, topic, ordering_key, \
        message_id, attempts, committed_at, dispatched_at, state) \
    SELECT u.*, 'published' FROM unnest($1::pg_lsn[], $2::int[], $3::uuid[], $4::text[], \
        $5::text[], $6::text[], $7::text[], $8::int[], $9::timestamptz[], $10::timestamptz[]) u \
    ON CONFLICT (commit_lsn, ordinal) DO NOTHING";

/// One request that Pub/Sub has stored.
#[derive(Debug)]
pub(crate) struct Published {
    pub(crate) topic: Arc<str>,
    pub(crate) ordering_key: OrderingKey,
    /// Attempts that carried the events, this one included.
    pub(crate) attempts: i32,
    pub(crate) at: SystemTime,
    pub(crate) events: Vec<EventRef>,
    /// Pub/Sub's ids, in the order of the events.
    pub(crate) message_ids: Vec<String>,
}

/// What the writer tells the relay.
#[derive(Debug)]
pub(crate) enum WriterEvent {
    /// So many events of these transactions are durably recorded.
    Recorded(Vec<(CommitLsn, u64)>),
    /// Writing cannot succeed until a person has changed something.
    Failed(crate::error::Error),
}

/// The writer's task.
#[derive(Debug)]
pub(crate) struct Writer {
    /// Unbounded, as what it holds is within the budget of bytes in flight.
    queue: Option<mpsc::UnboundedSender<Published>>,
    task: JoinHandle<()>,
}

impl Writer {
    /// Starts the task; what it has to say comes through `events`.
    pub(crate) fn start(target: Target, events: mpsc::UnboundedSender<WriterEvent>) -> Self {
        let (queue, incoming) = mpsc::unbounded_channel();
        let task = tokio::spawn(async move {
            if let Err(error) = run(&target, incoming, &events).await {
                // Nobody listens any more when the session has ended.
                let _ = events.send(WriterEvent::Failed(error));
            }
        });
        Self {
            queue: Some(queue),
            task,
        }
    }

    /// Hands a request over.
    pub(crate) fn record(&self, published: Published) {
        // The task ends early only with an error, which it has reported by itself.
        let _ = self.queue.as_ref().map(|queue| queue.send(published));
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
    target: &Target,
    mut incoming: mpsc::UnboundedReceiver<Published>,
    events: &mpsc::UnboundedSender<WriterEvent>,
) -> Result<()> {
    let mut sql: Option<Connected> = None;
    let mut batch = Batch::default();
    let mut gathered = Vec::new();
    loop {
        let room = MAX_ROWS.saturating_sub(batch.rows()).max(1);
        if incoming.recv_many(&mut gathered, room).await == 0 {
            return Ok(());
        }
        for published in gathered.drain(..) {
            batch.add(published);
            if batch.rows() >= MAX_ROWS {
                write_until_done(target, &mut sql, &mut batch, events).await?;
            }
        }
        if batch.rows() > 0 {
            write_until_done(target, &mut sql, &mut batch, events).await?;
        }
    }
}

/// Writes the batch and empties it; tries again without end on what may pass.
async fn write_until_done(
    target: &Target,
    sql: &mut Option<Connected>,
    batch: &mut Batch,
    events: &mpsc::UnboundedSender<WriterEvent>,
) -> Result<()> {
    loop {
        match answer_within(ANSWER_LIMIT, write(target, sql, batch)).await {
            Ok(()) => {
                let done = std::mem::take(batch);
                // Nobody listens any more when the session has ended.
                let _ = events.send(WriterEvent::Recorded(done.commits));
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

struct Connected {
    sql: Sql,
    insert: Statement,
}

async fn write(target: &Target, connected: &mut Option<Connected>, batch: &Batch) -> Result<()> {
    let Connected { sql, insert } = match connected {
        Some(connected) => connected,
        None => {
            let sql = connect(target, "postrider dispatch", STATEMENT_TIMEOUT).await?;
            let insert = sql.prepare(INSERT).await?;
            connected.insert(Connected { sql, insert })
        }
    };
    sql.execute(
        insert,
        &[
            &batch.commit_lsns,
            &batch.ordinals,
            &batch.event_ids,
            &batch.source_ids,
            &batch.topics,
            &batch.ordering_keys,
            &batch.message_ids,
            &batch.attempts,
            &batch.committed_at,
            &batch.dispatched_at,
        ],
    )
    .await?;
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
struct Batch {
    commit_lsns: Vec<PgLsn>,
    ordinals: Vec<i32>,
    event_ids: Vec<uuid::Uuid>,
    source_ids: Vec<Option<Box<str>>>,
    topics: Vec<Shared<Arc<str>>>,
    ordering_keys: Vec<Option<Shared<OrderingKey>>>,
    message_ids: Vec<String>,
    attempts: Vec<i32>,
    committed_at: Vec<SystemTime>,
    dispatched_at: Vec<SystemTime>,
    /// Events by transaction, neighbours put together.
    commits: Vec<(CommitLsn, u64)>,
}

impl Batch {
    fn rows(&self) -> usize {
        self.commit_lsns.len()
    }

    fn add(&mut self, published: Published) {
        let key = Some(published.ordering_key).filter(|key| !key.is_unordered());
        for (event, message_id) in published.events.into_iter().zip(published.message_ids) {
            match self.commits.last_mut() {
                Some((commit, count)) if *commit == event.commit => *count += 1,
                Some(_) | None => self.commits.push((event.commit, 1)),
            }
            self.commit_lsns
                .push(PgLsn::from(event.commit.lsn().as_u64()));
            self.ordinals.push(event.ordinal as i32);
            self.event_ids
                .push(uuid::Uuid::from_bytes(event.event_id.uuid));
            self.source_ids.push(event.event_id.source_id);
            self.topics.push(Shared(published.topic.clone()));
            self.ordering_keys.push(key.clone().map(Shared));
            self.message_ids.push(message_id);
            self.attempts.push(published.attempts);
            self.committed_at.push(
                event
                    .commit_time
                    .to_system_time()
                    .unwrap_or(SystemTime::UNIX_EPOCH),
            );
            self.dispatched_at.push(published.at);
        }
    }
}

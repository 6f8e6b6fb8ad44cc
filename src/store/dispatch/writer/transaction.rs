//! Writes one batch in a transaction, on the writer's connection.

use std::collections::{HashMap, HashSet};
use std::pin::pin;
use std::time::Duration;

use futures_util::SinkExt;
use slot_manager::{SlotName, cluster};
use tokio_postgres::Statement;
use tokio_postgres::error::SqlState;

use super::super::released::{ReleasedRows, UPDATE};
use super::super::rows::{COPY, Storing, encode};
use super::super::slot_reader::SlotReader;
use super::super::successor::{WHO_SERVES, is_there};
use super::batch::Batch;
use crate::condition::Condition;
use crate::error::{Code, Error, Result};
use crate::event::{EventPosition, Standing};
use crate::postgres::{Sql, WatchedSession, connect};
use crate::store::{position, relay_row};

const STATEMENT_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of attempts to write a batch. An attempt fails if some rows of the batch exist already. The
/// next attempt leaves these rows out.
const MAX_CONFLICTS: u32 = 3;
const HAS_SUCCESSOR: &str = "another session has taken over the slot: events in flight are not \
    recorded by this session, and the next session on the slot publishes them again";

/// The message of the error that ends the session, if the session has not ended already.
const SLOT_IS_ANOTHERS: &str =
    "another session serves the slot, so the dispatch writer has stopped";

/// An open transaction of ours would delay the next relay on the slot, so PostgreSQL ends our SQL session
/// if a transaction is idle for 5 seconds.
const BE_QUICK: &str = "SET idle_in_transaction_session_timeout = '5s'";

const WHICH_ARE_THERE: &str = "\
    SELECT d.commit_lsn, d.ordinal, d.event_id FROM outbox.dispatch d \
    JOIN unnest($1::pg_lsn[], $2::int[]) u (commit_lsn, ordinal) \
        ON d.commit_lsn = u.commit_lsn AND d.ordinal = u.ordinal";

pub(super) struct WriterContext {
    pub(super) name: String,
    pub(super) slot: SlotName,
    pub(super) reader: SlotReader,
    pub(super) connection: WatchedSession,
}

pub(super) struct Connected {
    sql: Sql,
    who_serves: Statement,
    copy: Statement,
    update: Statement,
    storing: Storing,
}

impl Connected {
    async fn new(context: &WriterContext) -> Result<Self> {
        let sql = connect(&context.reader.target, &context.name, STATEMENT_TIMEOUT).await?;
        context.reader.is_still_served_by(&sql).await?;
        context.connection.set(&sql).await?;
        sql.batch_execute(BE_QUICK).await?;
        let encoding = cluster::server_encoding(&sql).await?;
        Ok(Self {
            storing: Storing::in_encoding(&encoding),
            who_serves: sql.prepare(WHO_SERVES).await?,
            copy: sql.prepare(COPY).await?,
            update: sql.prepare(UPDATE).await?,
            sql,
        })
    }
}

/// Writes the batch, over a new connection if there is none.
pub(super) async fn write(
    context: &WriterContext,
    connected: &mut Option<Connected>,
    batch: &Batch,
) -> Result<()> {
    let connected = match connected {
        Some(connected) => connected,
        None => connected.insert(Connected::new(context).await?),
    };
    let mut there = HashSet::new();
    for _ in 0..MAX_CONFLICTS {
        match attempt(context, connected, batch, &there).await {
            // Some rows exist already, because an earlier attempt was committed and only its answer was lost.
            // PostgreSQL has rolled back the present attempt, so try again without these rows. The connection
            // stays usable, because the server has read the whole COPY.
            Err(error) if error.code() == Some(&SqlState::UNIQUE_VIOLATION) => {
                there = rows_that_are_there(&connected.sql, batch).await?;
            }
            Ok(Attempt::SlotIsAnothers) => {
                // Log the takeover here, because nobody receives the error if the session has already
                // ended.
                tracing::warn!("{HAS_SUCCESSOR}");
                return Err(Error::new(Code::LeaseLost, SLOT_IS_ANOTHERS));
            }
            Ok(Attempt::Committed) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
    let what = "another session is writing rows of the same events to outbox.dispatch";
    Err(Error::new(Code::PostgresConnectionLost, what))
}

/// Limits how long the write of the condition may wait, because the writer writes no batches meanwhile. The
/// write never waits for a synchronous standby server.
const LIMIT_WAITS: &str = "SET LOCAL lock_timeout = '500ms'; SET LOCAL synchronous_commit = local";

/// Writes the relay's condition to its row, if there is one and the writer has a connection. Only logs an
/// error, because the supervisor writes the condition again and the batches do not need it.
pub(super) async fn write_condition(
    context: &WriterContext,
    connected: &mut Option<Connected>,
    condition: Option<&Condition>,
) {
    let (Some(connected), Some(_)) = (connected, condition) else {
        return;
    };
    let writing = async {
        let transaction = connected.sql.client_mut().transaction().await?;
        transaction.batch_execute(LIMIT_WAITS).await?;
        let (slot, instance) = (&context.slot, &context.reader.instance);
        relay_row::write_condition(&transaction, slot, instance, condition).await?;
        Ok::<_, Error>(transaction.commit().await?)
    };
    if let Err(error) = writing.await {
        tracing::debug!(code = %error.code(), "outbox.relay: {error}");
    }
}

/// How a transaction ended, if it did not fail.
enum Attempt {
    Committed,
    /// Rolled back, because another session has the slot and nothing may be recorded.
    SlotIsAnothers,
}

/// Writes the outcomes of a batch in one transaction: updates the rows of released events, and inserts rows for new
/// events. Inserts no row at the positions in `there`, because an earlier attempt has inserted these rows.
async fn attempt(
    context: &WriterContext,
    connected: &mut Connected,
    batch: &Batch,
    there: &HashSet<EventPosition>,
) -> Result<Attempt, tokio_postgres::Error> {
    let transaction = connected.sql.client_mut().transaction().await?;
    let SlotReader {
        instance,
        walsender,
        ..
    } = &context.reader;
    let serving = transaction
        .query_one(&connected.who_serves, &[&context.slot.as_str(), instance])
        .await?;
    if is_there(serving.get(0), serving.get(1), *walsender) {
        transaction.rollback().await?;
        return Ok(Attempt::SlotIsAnothers);
    }
    // Released events were sent before new events of their key, so write their outcomes first.
    if batch.holds_released {
        let rows = ReleasedRows::of(&batch.records, connected.storing);
        transaction
            .execute(&connected.update, &rows.parameters())
            .await?;
    }
    if let Some(rows) = encode(&batch.records, there, connected.storing) {
        let mut copy = pin!(transaction.copy_in(&connected.copy).await?);
        copy.send(rows).await?;
        copy.finish().await?;
    }
    transaction.commit().await?;
    Ok(Attempt::Committed)
}

/// Returns the positions of the batch's new events that already have a row. The caller does not write these rows again,
/// because an earlier attempt has written them.
///
/// # Errors
/// `internal` if the row at the position of an event has the id of another event. The earlier attempt has not written
/// such a row, so the caller must not leave out the event's own row. The error stops the relay. After a restart, the
/// next session notices the wrong id, and looks the event up by its own id.
async fn rows_that_are_there(sql: &Sql, batch: &Batch) -> Result<HashSet<EventPosition>> {
    let events = batch.records.iter().flat_map(|record| &record.events);
    let new = events.filter(|event| event.standing == Standing::New);
    let new = new.map(|event| (event.position, event.event_id.uuid));
    let new: HashMap<EventPosition, [u8; 16]> = new.collect();
    let (lsns, ordinals): (Vec<_>, Vec<_>) = new.keys().copied().map(position::columns).unzip();
    let rows = sql.query(WHICH_ARE_THERE, &[&lsns, &ordinals]).await?;
    let mut there = HashSet::new();
    for row in &rows {
        let at = position::read(row, 0);
        let id: uuid::Uuid = row.get(2);
        if new.get(&at).is_some_and(|event| id.as_bytes() != event) {
            let what = format!("outbox.dispatch already has another event at {at}");
            return Err(Error::new(Code::Internal, what));
        }
        there.insert(at);
    }
    Ok(there)
}

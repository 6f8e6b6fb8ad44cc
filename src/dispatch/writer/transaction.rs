//! The transaction that one batch is written in, on the connection of the writer.

use std::collections::{HashMap, HashSet};
use std::pin::pin;
use std::time::Duration;

use decoder::Lsn;
use futures_util::SinkExt;
use slot_manager::{SystemIdentifier, cluster};
use tokio_postgres::Statement;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::PgLsn;

use super::super::released::{ReleasedRows, UPDATE};
use super::super::rows::{COPY, RowKey, Storing, encode, row_key};
use super::super::successor::{WHO_SERVES, is_there};
use super::batch::Batch;
use crate::error::{Code, Error, Result};
use crate::lanes::Standing;
use crate::postgres::{Sql, Target, answer_within, connect};

const STATEMENT_TIMEOUT: Duration = Duration::from_secs(30);
/// Of connecting and of one transaction, when the connection leads nowhere: longer than the
/// server's own limit for the one statement of it that may have to wait.
const ANSWER_LIMIT: Duration = Duration::from_secs(35);
/// How often a batch meets rows that were not there just before.
const MAX_CONFLICTS: u32 = 3;
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

/// Where the writer connects, under which name, and for whom.
pub(super) struct Place {
    pub(super) target: Target,
    pub(super) name: String,
    pub(super) slot: String,
    pub(super) reader: Reader,
}

pub(super) struct Connected {
    sql: Sql,
    who_serves: Statement,
    copy: Statement,
    update: Statement,
    storing: Storing,
}

impl Connected {
    async fn new(place: &Place) -> Result<Self> {
        let sql = connect(&place.target, &place.name, STATEMENT_TIMEOUT).await?;
        place.reader.is_still_served_by(&sql).await?;
        sql.batch_execute(BE_QUICK).await?;
        let encoding = sql.query_one("SHOW server_encoding", &[]).await?;
        Ok(Self {
            storing: Storing::in_encoding(encoding.get(0)),
            who_serves: sql.prepare(WHO_SERVES).await?,
            copy: sql.prepare(COPY).await?,
            update: sql.prepare(UPDATE).await?,
            sql,
        })
    }
}

/// Writes the batch, over a new connection if there is none.
pub(super) async fn write(
    place: &Place,
    connected: &mut Option<Connected>,
    batch: &Batch,
) -> Result<()> {
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
    let Reader {
        instance,
        walsender,
        ..
    } = &place.reader;
    let serving = transaction
        .query_one(&connected.who_serves, &[&place.slot, instance])
        .await?;
    if is_there(serving.get(0), serving.get(1), *walsender) {
        transaction.rollback().await?;
        return Ok(Attempt::SlotIsAnothers);
    }
    // Released events go before new ones of their key, and so do their outcomes.
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

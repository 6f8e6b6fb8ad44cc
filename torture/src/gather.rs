//! Reads the evidence of a schedule: events and dispatch rows from the tables of its database, and
//! stored events from the emulator's attempts.

use std::collections::HashSet;

use pubsub_emulator::Attempt;
use tokio_postgres::Client;
use tokio_postgres::types::PgLsn;

use crate::schedule::topic;
use crate::verdict::{Event, Record};

/// The transaction label of old rows, which were in the outbox before a relay captured the table.
/// The judges do not count old rows as events.
pub(crate) const HISTORY: &str = "history";

/// Reads every committed event, including the events of a dropped outbox table.
const EVENTS: &str = "\
    (SELECT id, aggregatetype, aggregateid, version, payload FROM outbox.events \
        WHERE payload->>'t' IS DISTINCT FROM 'history' \
     UNION ALL SELECT id, aggregatetype, aggregateid, version, payload FROM shop.former)";

/// The single value that a query returns.
pub(crate) async fn one<T>(client: &Client, sql: &str) -> Result<T, String>
where
    T: for<'a> tokio_postgres::types::FromSql<'a>,
{
    let row = client.query_one(sql, &[]).await;
    row.and_then(|row| row.try_get(0))
        .map_err(|e| format!("{sql}: {e:?}"))
}

pub(crate) async fn count(client: &Client, sql: &str) -> Result<i64, String> {
    one(client, sql).await
}

/// Ids of events without a dispatch row.
pub(crate) async fn unrecorded(client: &Client) -> Result<HashSet<String>, String> {
    let sql = format!(
        "SELECT e.id::text FROM {EVENTS} e \
         WHERE NOT EXISTS (SELECT FROM outbox.dispatch d WHERE d.event_id = e.id)"
    );
    let rows = client.query(&sql, &[]).await;
    let rows = rows.map_err(|e| format!("{e:?}"))?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// Ids of events that Pub/Sub has stored.
pub(crate) fn stored(attempts: &[Attempt]) -> HashSet<String> {
    let stored = attempts.iter().filter(|attempt| attempt.is_stored());
    let ids = stored.flat_map(|attempt| attempt.event_ids.iter().flatten());
    ids.map(|id| id.to_string()).collect()
}

/// Ids of quarantined events.
pub(crate) async fn set_aside(client: &Client) -> Result<HashSet<String>, String> {
    let sql = "SELECT event_id::text FROM outbox.dispatch WHERE state = 'quarantined'";
    let rows = client.query(sql, &[]).await;
    let rows = rows.map_err(|e| format!("{e:?}"))?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// All committed events: the rows of the current outbox table and the rows of dropped ones.
pub(crate) async fn events(client: &Client) -> Result<Vec<Event>, String> {
    let sql = format!(
        "SELECT id::text, aggregatetype, coalesce(aggregateid, ''), coalesce(version, 0), \
             payload->>'t' FROM {EVENTS} e"
    );
    let rows = client
        .query(&sql, &[])
        .await
        .map_err(|e| format!("{e:?}"))?;
    let event = |row: &tokio_postgres::Row| Event {
        id: row.get(0),
        topic: topic(row.get(1)),
        key: row.get(2),
        version: row.get(3),
        transaction: row.get(4),
    };
    Ok(rows.iter().map(event).collect())
}

pub(crate) async fn records(client: &Client) -> Result<Vec<Record>, String> {
    let rows = client
        .query(
            "SELECT event_id::text, commit_lsn, ordinal, state, topic, coalesce(ordering_key, ''), \
                    message_id \
             FROM outbox.dispatch ORDER BY commit_lsn, ordinal",
            &[],
        )
        .await
        .map_err(|e| format!("{e:?}"))?;
    let record = |row: &tokio_postgres::Row| Record {
        event_id: row.get(0),
        commit_lsn: row.get::<_, PgLsn>(1).into(),
        ordinal: row.get(2),
        state: row.get(3),
        topic: row.get::<_, Option<String>>(4).unwrap_or_default(),
        key: row.get(5),
        message_id: row
            .get::<_, Option<String>>(6)
            .and_then(|id| id.parse().ok()),
    };
    Ok(rows.iter().map(record).collect())
}

//! Reads records from `outbox.dispatch`, for commands that show the outcomes of events.

use serde::{Deserialize, Serialize};
use tokio_postgres::Row;
use tokio_postgres::types::{PgLsn, ToSql};
use uuid::Uuid;

use crate::error::{Code, Result};
use crate::event::EventPosition;
use crate::postgres::Sql;
use crate::store::position;

const COLUMNS: &str = "\
    d.event_id, d.source_id, d.state, d.topic, d.ordering_key, d.message_id, d.attempts, \
    d.commit_lsn, d.ordinal, \
    to_char(d.committed_at at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"'), \
    to_char(d.dispatched_at at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"'), \
    extract(epoch from d.dispatched_at - d.committed_at)::float8 * 1000, d.error, \
    (extract(epoch from d.dispatched_at) * 1000000)::bigint, \
    to_jsonb(d) ->> 'replay', to_jsonb(d) ->> 'earlier_messages'";

/// Number of the newest records that [`newest_of_table`] searches. The limit keeps the search fast, because no index
/// finds the records of one table.
const SEARCHED: usize = 10_000;

/// The outcome of an event as commands show it. Times are in RFC 3339, UTC.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct EventOutcome {
    pub(crate) state: String,
    #[serde(flatten)]
    pub(crate) position: EventPosition,
    pub(crate) committed_at: String,
    pub(crate) recorded_at: String,
    /// Milliseconds from the commit to the outcome. Both times are by PostgreSQL's clock. For the time of the outcome,
    /// the relay uses its estimate of that clock (`server_clock`).
    pub(crate) took_ms: f64,
    /// Number of requests with which Pub/Sub may have stored the event. Requests that Pub/Sub refused do not
    /// count.
    pub(crate) attempts: i32,
    pub(crate) error: Option<String>,
    /// The error code, such as `event-refused`.
    pub(crate) error_code: Option<String>,
}

/// A row of `outbox.dispatch`.
#[derive(Debug, Clone)]
pub(crate) struct RecordedRow {
    /// When the outcome was recorded, in microseconds since 1970.
    pub(crate) recorded_micros: i64,
    pub(crate) event_id: Uuid,
    pub(crate) source_id: Option<String>,
    pub(crate) topic: Option<String>,
    pub(crate) ordering_key: Option<String>,
    pub(crate) message_id: Option<String>,
    /// The replay that published the message; `None` for the original message.
    pub(crate) replay: Option<String>,
    /// The event's earlier messages, oldest first.
    pub(crate) earlier_messages: Vec<EarlierMessage>,
    pub(crate) record: EventOutcome,
}

/// An earlier message of an event that a replay has published again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EarlierMessage {
    pub(crate) message_id: String,
    /// In RFC 3339, UTC.
    pub(crate) published_at: Option<String>,
    /// The replay that published this message; `None` for the original message.
    pub(crate) replay: Option<String>,
}

impl RecordedRow {
    fn is_in_quarantine(&self) -> bool {
        ["quarantined", "released"].contains(&self.record.state.as_str())
    }
}

/// Selects the records that meet all of these conditions.
#[derive(Debug, Default)]
pub(crate) struct RecordFilter {
    pub(crate) key: Option<String>,
    pub(crate) topic: Option<String>,
    /// Only records from this commit LSN on, whose events were committed at or after this time. The time is
    /// an SQL expression.
    pub(crate) since: Option<(PgLsn, String)>,
}

/// Returns one record for each of these events that has a record: the first quarantined or released
/// record if there is one, otherwise the last record in commit order.
pub(crate) async fn of_events(sql: &Sql, ids: &[Uuid]) -> Result<Vec<RecordedRow>> {
    let statement = format!(
        "select {COLUMNS} from outbox.dispatch d where d.event_id = any ($1) \
         order by d.commit_lsn, d.ordinal"
    );
    let rows = sql.query(&statement, &[&ids]).await?;
    Ok(one_per_event(rows.iter().map(recorded).collect()))
}

/// Returns the records of the events with these source ids, one record for each event. Reads at most 100 records,
/// the first in commit order.
///
/// First searches only the quarantined and released records, which PostgreSQL finds by a partial index. If none of
/// them matches, searches all records. Postrider creates no index on the source id, so this search usually scans the
/// whole table.
pub(crate) async fn of_source_ids(sql: &Sql, source_ids: &[String]) -> Result<Vec<RecordedRow>> {
    for which in ["d.state in ('quarantined', 'released')", "true"] {
        let statement = format!(
            "select {COLUMNS} from outbox.dispatch d where d.source_id = any ($1) and {which} \
             order by d.commit_lsn, d.ordinal limit 100"
        );
        let rows = sql.query(&statement, &[&source_ids]).await?;
        if !rows.is_empty() {
            return Ok(one_per_event(rows.iter().map(recorded).collect()));
        }
    }
    Ok(Vec::new())
}

pub(in crate::store) type QueryParameters<'a> = Vec<&'a (dyn ToSql + Sync)>;

impl RecordFilter {
    /// Returns the filter as an SQL condition on a row `d`, and appends the values that the condition
    /// needs to `parameters`.
    pub(in crate::store) fn condition<'a>(
        &'a self,
        parameters: &mut QueryParameters<'a>,
    ) -> String {
        let mut which = vec!["true".to_owned()];
        match &self.key {
            // An empty key selects the events without a key, as it does in `postrider quarantine`.
            Some(key) if key.is_empty() => {
                which.push("coalesce(d.ordering_key, '') = ''".to_owned());
            }
            Some(key) => {
                parameters.push(key);
                which.push(format!("d.ordering_key = ${}", parameters.len()));
            }
            None => {}
        }
        if let Some(topic) = &self.topic {
            parameters.push(topic);
            let n = parameters.len();
            which.push(format!(
                "(d.topic = ${n} or split_part(d.topic, '/', 4) = ${n})"
            ));
        }
        if let Some((from, since)) = &self.since {
            parameters.push(from);
            which.push(format!(
                "d.commit_lsn >= ${} and d.committed_at >= {since}",
                parameters.len()
            ));
        }
        which.join(" and ")
    }
}

/// Returns the `limit` records with the highest positions, highest first.
pub(crate) async fn newest(
    sql: &Sql,
    filter: &RecordFilter,
    limit: usize,
) -> Result<Vec<RecordedRow>> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let mut parameters: QueryParameters<'_> = vec![&limit];
    let which = filter.condition(&mut parameters);
    let statement = format!(
        "select {COLUMNS} from outbox.dispatch d where {which} \
         order by d.commit_lsn desc, d.ordinal desc limit $1"
    );
    let rows = sql.query(&statement, &parameters).await?;
    Ok(rows.iter().map(recorded).collect())
}

/// Returns one record for each of the newest events whose source id begins with `prefix`. Searches only
/// the newest [`SEARCHED`] records of all tables, and reads at most `limit` matching records.
pub(crate) async fn newest_of_table(
    sql: &Sql,
    prefix: &str,
    limit: usize,
) -> Result<Vec<RecordedRow>> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let statement = format!(
        "select {COLUMNS} from (select * from outbox.dispatch \
             order by commit_lsn desc, ordinal desc limit {SEARCHED}) d \
         where pg_catalog.starts_with(d.source_id, $1) \
         order by d.commit_lsn desc, d.ordinal desc limit $2"
    );
    let rows = sql.query(&statement, &[&prefix, &limit]).await?;
    Ok(one_per_event(rows.iter().rev().map(recorded).collect()))
}

/// Returns the next `limit` records after the position `after`, in commit order.
pub(crate) async fn page(
    sql: &Sql,
    filter: &RecordFilter,
    after: EventPosition,
    limit: usize,
) -> Result<Vec<RecordedRow>> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let (commit, ordinal) = position::columns(after);
    let mut parameters: QueryParameters<'_> = vec![&limit, &commit, &ordinal];
    let which = filter.condition(&mut parameters);
    let statement = format!(
        "select {COLUMNS} from outbox.dispatch d \
         where (d.commit_lsn, d.ordinal) > ($2, $3) and {which} \
         order by d.commit_lsn, d.ordinal limit $1"
    );
    let rows = sql.query(&statement, &parameters).await?;
    Ok(rows.iter().map(recorded).collect())
}

/// Returns the positions of the newest `limit` records at or after `from`, highest position first. With
/// each position comes the time at which its outcome was recorded, in microseconds since 1970.
pub(crate) async fn newest_positions(
    sql: &Sql,
    filter: &RecordFilter,
    from: EventPosition,
    limit: usize,
) -> Result<Vec<(EventPosition, i64)>> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let (commit, ordinal) = position::columns(from);
    let mut parameters: QueryParameters<'_> = vec![&limit, &commit, &ordinal];
    let which = filter.condition(&mut parameters);
    let statement = format!(
        "select d.commit_lsn, d.ordinal, (extract(epoch from d.dispatched_at) * 1000000)::bigint \
         from outbox.dispatch d where (d.commit_lsn, d.ordinal) >= ($2, $3) and {which} \
         order by d.commit_lsn desc, d.ordinal desc limit $1"
    );
    let rows = sql.query(&statement, &parameters).await?;
    Ok(rows
        .iter()
        .map(|row| (position::read(row, 0), row.get(2)))
        .collect())
}

/// Returns the records at these positions, in commit order.
pub(crate) async fn at_positions(
    sql: &Sql,
    positions: &[EventPosition],
) -> Result<Vec<RecordedRow>> {
    let columns = positions.iter().copied().map(position::columns);
    let (commits, ordinals): (Vec<_>, Vec<_>) = columns.unzip();
    let statement = format!(
        "select {COLUMNS} from unnest($1::pg_lsn[], $2::int[]) as at (commit_lsn, ordinal) \
         join outbox.dispatch d using (commit_lsn, ordinal) order by d.commit_lsn, d.ordinal"
    );
    let rows = sql.query(&statement, &[&commits, &ordinals]).await?;
    Ok(rows.iter().map(recorded).collect())
}

/// Returns the highest position that has a record, or position 0 if there are no records.
pub(crate) async fn last_position(sql: &Sql) -> Result<EventPosition> {
    let statement = "select d.commit_lsn, d.ordinal from outbox.dispatch d \
                     order by d.commit_lsn desc, d.ordinal desc limit 1";
    let row = sql.query_opt(statement, &[]).await?;
    Ok(row.map_or_else(EventPosition::default, |row| position::read(&row, 0)))
}

fn recorded(row: &Row) -> RecordedRow {
    let message_id: Option<String> = row.get(5);
    let earlier: Option<&str> = row.get(15);
    let mut earlier: Vec<EarlierMessage> = earlier
        .and_then(|json| serde_json::from_str(json).ok())
        .unwrap_or_default();
    // A replay that releases an event adds the current message to `earlier_messages`, and writes its own name to the
    // column `replay`. When the relay publishes the event, the new message becomes the current one. So there are two
    // cases:
    //
    // - `earlier_messages` lacks the current message. The replay in the column `replay` published it.
    // - `earlier_messages` has the current message. The replay in the column `replay` has published nothing, and the
    //   entry names the replay that published the message. Remove the entry, because the message is not an earlier one.
    let is_current = |known: &EarlierMessage| Some(&known.message_id) == message_id.as_ref();
    let replay = match earlier.iter().position(is_current) {
        Some(index) => earlier.remove(index).replay,
        None => row.get(14),
    };
    let error: Option<String> = row.get(12);
    RecordedRow {
        recorded_micros: row.get(13),
        event_id: row.get(0),
        source_id: row.get(1),
        topic: row.get(3),
        ordering_key: row.get(4),
        message_id,
        replay,
        earlier_messages: earlier,
        record: EventOutcome {
            state: row.get(2),
            position: position::read(row, 7),
            committed_at: row.get(9),
            recorded_at: row.get(10),
            took_ms: row.get(11),
            attempts: row.get(6),
            error_code: error.as_deref().and_then(code),
            error,
        },
    }
}

/// Returns the error code at the beginning of an error text.
fn code(error: &str) -> Option<String> {
    let (code, _) = error.split_once(':').unwrap_or((error, ""));
    let code: Code = code.parse().ok()?;
    Some(code.name().to_owned())
}

/// Keeps one record of each event: the first quarantined or released record, or otherwise the last
/// record.
fn one_per_event(rows: Vec<RecordedRow>) -> Vec<RecordedRow> {
    let mut kept: Vec<RecordedRow> = Vec::new();
    for row in rows {
        match kept.iter_mut().find(|kept| kept.event_id == row.event_id) {
            Some(known) if known.is_in_quarantine() => {}
            Some(known) => *known = row,
            None => kept.push(row),
        }
    }
    kept
}

/// Returns the first commit LSN whose events were committed at or after `since`, an SQL expression for a time. Searches
/// by bisection, which works because commit times grow with commit LSNs.
///
/// Events that were published from their table do not fit this order, because their records do not have the LSN of
/// their commit. The search leaves out these records. It recognises them by their commit LSN: only the LSN of a real
/// commit is a multiple of 8 (`capture::positions`).
pub(crate) async fn first_commit(sql: &Sql, since: &str) -> Result<PgLsn> {
    let ends = "select min(commit_lsn), max(commit_lsn) from outbox.dispatch";
    let ends = sql.query_one(ends, &[]).await?;
    let (low, high): (Option<PgLsn>, Option<PgLsn>) = (ends.get(0), ends.get(1));
    let (mut low, high) = (low.map_or(0, u64::from), high.map_or(0, u64::from));
    let probe = format!(
        "select committed_at >= {since} from outbox.dispatch \
         where commit_lsn >= $1 and mod(commit_lsn - '0/0'::pg_lsn, 8) = 0 \
         order by commit_lsn, ordinal limit 1"
    );
    let mut above = high.saturating_add(1);
    while low < above {
        let middle = u64::midpoint(low, above);
        let row = sql.query_opt(&probe, &[&PgLsn::from(middle)]).await?;
        if row.is_none_or(|row| row.get(0)) {
            above = middle;
        } else {
            low = middle + 1;
        }
    }
    Ok(PgLsn::from(low))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns the record of a published event.
    pub(crate) fn published(id: Uuid, topic: &str, key: &str, committed_at: &str) -> RecordedRow {
        RecordedRow {
            replay: None,
            earlier_messages: Vec::new(),
            recorded_micros: 0,
            event_id: id,
            source_id: None,
            topic: Some(topic.to_owned()),
            ordering_key: Some(key.to_owned()),
            message_id: None,
            record: EventOutcome {
                state: "published".to_owned(),
                position: EventPosition::default(),
                committed_at: committed_at.to_owned(),
                recorded_at: String::new(),
                took_ms: 0.0,
                attempts: 1,
                error: None,
                error_code: None,
            },
        }
    }
}

//! The queries of `postrider quarantine`, with which an operator lists, releases and discards events.
//!
//! A running relay notices the changes when it polls the quarantine (`quarantined`).

use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use crate::error::Result;
use crate::event::EventPosition;
use crate::postgres::Sql;
use crate::store::position;

/// The condition for rows in quarantine. A released event with a message id is not in quarantine, because
/// it was published before and is being replayed.
const IN_QUARANTINE: &str = "d.state in ('quarantined', 'released') \
    and (d.state = 'quarantined' or d.message_id is null)";

const SELECT: &str = "\
    select topic, ordering_key, error, attempts, \
           extract(epoch from clock_timestamp() - committed_at)::float8, \
           extract(epoch from clock_timestamp() - dispatched_at)::float8, message_id \
    from outbox.dispatch where commit_lsn = $1 and ordinal = $2";

/// An event's row in `outbox.dispatch`.
#[derive(Debug)]
pub(crate) struct EventRow {
    pub(crate) position: EventPosition,
    pub(crate) uuid: Uuid,
    /// `schema.table:id` if the id is not a uuid, otherwise `None`.
    pub(crate) source_id: Option<String>,
    pub(crate) state: String,
    /// Empty if the event has no topic.
    pub(crate) topic: String,
    pub(crate) key: String,
}

impl EventRow {
    pub(crate) fn is_in_quarantine(&self) -> bool {
        ["quarantined", "released"].contains(&self.state.as_str())
    }

    /// Whether the order of the event matters, because it has a topic and an ordering key.
    pub(crate) fn is_ordered(&self) -> bool {
        !self.topic.is_empty() && !self.key.is_empty()
    }
}

/// Selects events in quarantine by ordering key, by topic, or by both. Without key and topic, it selects all of
/// them. A topic can be given without its project.
pub(crate) struct QuarantineFilter {
    sql: String,
    texts: Vec<String>,
}

impl QuarantineFilter {
    pub(crate) fn new(key: Option<&str>, topic: Option<&str>) -> Self {
        let mut sql = IN_QUARANTINE.to_owned();
        let mut texts = Vec::new();
        if let Some(key) = key {
            texts.push(key.to_owned());
            sql += &format!(" and coalesce(d.ordering_key, '') = ${}", texts.len());
        }
        if let Some(topic) = topic {
            texts.push(topic.to_owned());
            let n = texts.len();
            sql += &format!(" and (d.topic = ${n} or split_part(d.topic, '/', 4) = ${n})");
        }
        Self { sql, texts }
    }

    fn sql(&self) -> &str {
        &self.sql
    }

    fn parameters(&self) -> Vec<&(dyn ToSql + Sync)> {
        self.texts.iter().map(|text| text as _).collect()
    }
}

/// A key with events in quarantine.
#[derive(Debug)]
pub(crate) struct QuarantinedKey {
    pub(crate) topic: Option<String>,
    pub(crate) ordering_key: Option<String>,
    pub(crate) events: i64,
    /// Number of the key's events that are released but not published yet.
    pub(crate) released: i64,
    /// `schema.table:id` of the key's first event if its id is not a uuid, otherwise `None`.
    pub(crate) source_id: Option<String>,
    /// The uuid of the key's first event.
    pub(crate) uuid: Uuid,
    /// Age of the first event's commit, by the server's clock.
    pub(crate) age_seconds: f64,
    /// Why the first event is in quarantine.
    pub(crate) error: Option<String>,
    /// Number of all keys that match the filter, not only of the returned keys.
    pub(crate) total_keys: i64,
    /// Number of the events of all these keys.
    pub(crate) total_events: i64,
}

/// Details of the row of one event. Ages are by the server's clock.
#[derive(Debug)]
pub(crate) struct EventRecord {
    pub(crate) topic: Option<String>,
    pub(crate) ordering_key: Option<String>,
    pub(crate) error: Option<String>,
    pub(crate) attempts: i32,
    pub(crate) committed_seconds_ago: f64,
    pub(crate) dispatched_seconds_ago: f64,
    pub(crate) message_id: Option<String>,
}

/// Returns up to `limit` keys with events in quarantine. The key that has waited longest comes first.
///
/// # Errors
/// Database errors.
pub(crate) async fn keys(
    sql: &Sql,
    filter: &QuarantineFilter,
    limit: i64,
) -> Result<Vec<QuarantinedKey>> {
    let statement = format!(
        "with q as (select * from outbox.dispatch d where {}), \
         counted as (select topic, ordering_key, count(*) as events, \
                            count(*) filter (where state = 'released') as released, \
                            min(commit_lsn) as since from q group by 1, 2), \
         shown as (select *, count(*) over () as total_keys, \
                          sum(events) over ()::bigint as total_events \
                   from counted order by since limit {}) \
         select s.topic, s.ordering_key, s.events, s.released, f.source_id, f.event_id, \
                extract(epoch from clock_timestamp() - f.committed_at)::float8, f.error, \
                s.total_keys, s.total_events \
         from shown s, lateral ( \
             select q.source_id, q.event_id, q.committed_at, q.error from q \
             where q.topic is not distinct from s.topic \
               and q.ordering_key is not distinct from s.ordering_key \
               and q.commit_lsn = s.since order by q.ordinal limit 1) f \
         order by s.since",
        filter.sql(),
        limit
    );
    let rows = sql.query(&statement, &filter.parameters()).await?;
    let key = |row: &Row| QuarantinedKey {
        topic: row.get(0),
        ordering_key: row.get(1),
        events: row.get(2),
        released: row.get(3),
        source_id: row.get(4),
        uuid: row.get(5),
        age_seconds: row.get(6),
        error: row.get(7),
        total_keys: row.get(8),
        total_events: row.get(9),
    };
    Ok(rows.iter().map(key).collect())
}

/// Reads the details of an event's row.
///
/// # Errors
/// Database errors.
pub(crate) async fn record(sql: &Sql, event: &EventRow) -> Result<EventRecord> {
    let (commit, ordinal) = position::columns(event.position);
    let row = sql.query_one(SELECT, &[&commit, &ordinal]).await?;
    Ok(EventRecord {
        topic: row.get(0),
        ordering_key: row.get(1),
        error: row.get(2),
        attempts: row.get(3),
        committed_seconds_ago: row.get(4),
        dispatched_seconds_ago: row.get(5),
        message_id: row.get(6),
    })
}

/// Returns those rows of an event that are in quarantine, in commit order.
///
/// # Errors
/// Database errors.
pub(crate) async fn rows_in_quarantine(sql: &Sql, id: &str) -> Result<Vec<EventRow>> {
    rows_where(sql, id, IN_QUARANTINE).await
}

/// Returns all rows of an event, in commit order.
///
/// # Errors
/// Database errors.
pub(crate) async fn all_rows(sql: &Sql, id: &str) -> Result<Vec<EventRow>> {
    rows_where(sql, id, "true").await
}

async fn rows_where(sql: &Sql, id: &str, condition: &str) -> Result<Vec<EventRow>> {
    let uuid = Uuid::parse_str(id);
    let (column, value): (_, &(dyn ToSql + Sync)) = match &uuid {
        Ok(uuid) => ("event_id", uuid),
        Err(_) => ("source_id", &id),
    };
    let statement = format!(
        "select d.commit_lsn, d.ordinal, d.event_id, d.source_id, d.state, \
                coalesce(d.topic, ''), coalesce(d.ordering_key, '') \
         from outbox.dispatch d where d.{column} = $1 and {condition} \
         order by d.commit_lsn, d.ordinal"
    );
    let rows = sql.query(&statement, &[value]).await?;
    Ok(rows.iter().map(event).collect())
}

fn event(row: &Row) -> EventRow {
    EventRow {
        position: position::read(row, 0),
        uuid: row.get(2),
        source_id: row.get(3),
        state: row.get(4),
        topic: row.get(5),
        key: row.get(6),
    }
}

/// Returns how many events of the same key are in quarantine before `event`, and how many after it. Both
/// numbers are 0 if `event` has no topic or no ordering key.
///
/// # Errors
/// Database errors.
pub(crate) async fn neighbours(sql: &Sql, event: &EventRow) -> Result<(u64, u64)> {
    if !event.is_ordered() {
        return Ok((0, 0));
    }
    let EventRow { topic, key, .. } = event;
    let (commit, ordinal) = position::columns(event.position);
    let statement = format!(
        "select count(*) filter (where (d.commit_lsn, d.ordinal) < ($3, $4)), \
                count(*) filter (where (d.commit_lsn, d.ordinal) > ($3, $4)) \
         from outbox.dispatch d where {IN_QUARANTINE} \
           and coalesce(d.topic, '') = $1 and coalesce(d.ordering_key, '') = $2"
    );
    let row = sql
        .query_one(&statement, &[topic, key, &commit, &ordinal])
        .await?;
    let count = |i| u64::try_from(row.get::<_, i64>(i)).unwrap_or_default();
    Ok((count(0), count(1)))
}

/// Returns how many events match the filter.
///
/// # Errors
/// Database errors.
pub(crate) async fn count(sql: &Sql, filter: &QuarantineFilter) -> Result<u64> {
    let statement = format!(
        "select count(*) from outbox.dispatch d where {}",
        filter.sql()
    );
    let row = sql.query_one(&statement, &filter.parameters()).await?;
    Ok(u64::try_from(row.get::<_, i64>(0)).unwrap_or_default())
}

/// Counts the events that have a quarantined or released record `w` which meets the condition. An event with several
/// such records counts once.
///
/// # Errors
/// Database errors.
pub(crate) async fn count_unpublished(sql: &Sql, condition: &str) -> Result<u64> {
    let statement = format!(
        "select count(distinct w.event_id) from outbox.dispatch w \
         where w.state in ('quarantined', 'released') and {condition}"
    );
    let row = sql.query_one(&statement, &[]).await?;
    Ok(u64::try_from(row.get::<_, i64>(0)).unwrap_or_default())
}

/// Releases one event, unless the event has left the quarantine. Returns the number of released events.
///
/// # Errors
/// Database errors.
pub(crate) async fn release_event(sql: &Sql, event: &EventRow) -> Result<u64> {
    let (commit, ordinal) = position::columns(event.position);
    let statement = format!(
        "update outbox.dispatch d set state = 'released' \
         where d.commit_lsn = $1 and d.ordinal = $2 and {IN_QUARANTINE}"
    );
    Ok(sql.execute(&statement, &[&commit, &ordinal]).await?)
}

/// Releases all events in quarantine that have the same topic and key as `event`. Returns their number.
///
/// # Errors
/// Database errors.
pub(crate) async fn release_key(sql: &Sql, event: &EventRow) -> Result<u64> {
    let EventRow { topic, key, .. } = event;
    let statement = format!(
        "update outbox.dispatch d set state = 'released' where {IN_QUARANTINE} \
           and coalesce(d.topic, '') = $1 and coalesce(d.ordering_key, '') = $2"
    );
    Ok(sql.execute(&statement, &[topic, key]).await?)
}

/// Releases the events that match the filter. Returns their number.
///
/// # Errors
/// Database errors.
pub(crate) async fn release(sql: &Sql, filter: &QuarantineFilter) -> Result<u64> {
    let statement = format!(
        "update outbox.dispatch d set state = 'released' where {}",
        filter.sql()
    );
    Ok(sql.execute(&statement, &filter.parameters()).await?)
}

/// Discards one event, unless the event has left the quarantine. Returns the number of discarded events.
///
/// # Errors
/// Database errors.
pub(crate) async fn discard_event(sql: &Sql, event: &EventRow) -> Result<u64> {
    let (commit, ordinal) = position::columns(event.position);
    let statement = format!(
        "update outbox.dispatch d set state = 'discarded', dispatched_at = now() \
         where d.commit_lsn = $1 and d.ordinal = $2 and {IN_QUARANTINE}"
    );
    Ok(sql.execute(&statement, &[&commit, &ordinal]).await?)
}

/// Discards the events that match the filter. Returns their number.
///
/// # Errors
/// Database errors.
pub(crate) async fn discard(sql: &Sql, filter: &QuarantineFilter) -> Result<u64> {
    let statement = format!(
        "update outbox.dispatch d set state = 'discarded', dispatched_at = now() where {}",
        filter.sql()
    );
    Ok(sql.execute(&statement, &filter.parameters()).await?)
}

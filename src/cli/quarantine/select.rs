//! Which events a command means: one by its id, those of a key, of a topic, or all.

use tokio_postgres::Row;
use tokio_postgres::types::{PgLsn, ToSql};
use uuid::Uuid;

use crate::error::{Code, Error, Result};
use crate::postgres::Sql;

/// What is in quarantine.
pub(super) const IN_QUARANTINE: &str = "d.state in ('quarantined', 'released')";

/// The arguments that say which events.
#[derive(Debug, clap::Args)]
pub(super) struct Which {
    /// The event: its id, or `schema.table:id` where ids are not uuids
    #[arg(value_name = "ID", conflicts_with_all = ["key", "topic", "all"],
          required_unless_present_any = ["key", "all"])]
    pub(super) id: Option<String>,
    /// All events of this ordering key
    #[arg(long, value_name = "KEY", conflicts_with = "all")]
    pub(super) key: Option<String>,
    /// Only of this topic
    #[arg(long, value_name = "TOPIC")]
    pub(super) topic: Option<String>,
    /// All events in quarantine
    #[arg(long)]
    pub(super) all: bool,
}

/// A row in quarantine, or any row of an event.
#[derive(Debug)]
pub(super) struct Event {
    pub(super) place: (PgLsn, i32),
    pub(super) id: String,
    pub(super) state: String,
    /// Empty where there is none.
    pub(super) topic: String,
    pub(super) key: String,
}

impl Event {
    /// Whether its key has an order to keep.
    pub(super) fn is_ordered(&self) -> bool {
        !self.topic.is_empty() && !self.key.is_empty()
    }
}

/// A condition on `outbox.dispatch d` for a key and a topic; a topic may be given without its
/// project.
pub(super) struct Condition {
    sql: String,
    texts: Vec<String>,
}

impl Condition {
    pub(super) fn new(key: Option<&str>, topic: Option<&str>) -> Self {
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

    pub(super) fn sql(&self) -> &str {
        &self.sql
    }

    pub(super) fn parameters(&self) -> Vec<&(dyn ToSql + Sync)> {
        self.texts.iter().map(|text| text as _).collect()
    }
}

/// The rows of an event, whatever their state, the first in the log first. An id that is not a uuid
/// is looked for in the whole table, since its uuid also depends on the transaction that wrote it.
pub(super) async fn rows_of(sql: &Sql, id: &str) -> Result<Vec<Event>> {
    rows_where(sql, id, "true").await
}

async fn rows_where(sql: &Sql, id: &str, condition: &str) -> Result<Vec<Event>> {
    let select = "select d.commit_lsn, d.ordinal, coalesce(d.source_id, d.event_id::text), \
                         d.state, coalesce(d.topic, ''), coalesce(d.ordering_key, '') \
                  from outbox.dispatch d";
    let order = "order by d.commit_lsn, d.ordinal";
    let rows = match Uuid::parse_str(id) {
        Ok(uuid) => {
            let statement = format!("{select} where d.event_id = $1 and {condition} {order}");
            sql.query(&statement, &[&uuid]).await?
        }
        Err(_) => {
            let statement = format!("{select} where d.source_id = $1 and {condition} {order}");
            sql.query(&statement, &[&id]).await?
        }
    };
    Ok(rows.iter().map(event).collect())
}

fn event(row: &Row) -> Event {
    Event {
        place: (row.get(0), row.get(1)),
        id: row.get(2),
        state: row.get(3),
        topic: row.get(4),
        key: row.get(5),
    }
}

/// The row of an event in quarantine.
pub(super) async fn in_quarantine(sql: &Sql, id: &str) -> Result<Event> {
    let waiting = rows_where(sql, id, IN_QUARANTINE).await?;
    if let Some(first) = waiting.into_iter().next() {
        return Ok(first);
    }
    let rows = rows_of(sql, id).await?;
    let what = match rows.first() {
        Some(row) => format!("event {id} is {}", row.state),
        None => format!("event {id} is not recorded"),
    };
    Err(Error::new(Code::NotInQuarantine, what))
}

/// How many events of the key of `event` are in quarantine before it, and after it.
pub(super) async fn neighbours(sql: &Sql, event: &Event) -> Result<(u64, u64)> {
    if !event.is_ordered() {
        return Ok((0, 0));
    }
    let Event {
        place: (commit, ordinal),
        topic,
        key,
        ..
    } = event;
    let statement = format!(
        "select count(*) filter (where (d.commit_lsn, d.ordinal) < ($3, $4)), \
                count(*) filter (where (d.commit_lsn, d.ordinal) > ($3, $4)) \
         from outbox.dispatch d where {IN_QUARANTINE} \
           and coalesce(d.topic, '') = $1 and coalesce(d.ordering_key, '') = $2"
    );
    let row = sql
        .query_one(&statement, &[topic, key, commit, ordinal])
        .await?;
    let count = |i| u64::try_from(row.get::<_, i64>(i)).unwrap_or_default();
    Ok((count(0), count(1)))
}

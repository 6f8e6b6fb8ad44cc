//! Resolves which events a command means: one by its id, those of a key, of a topic, or all.

use tokio_postgres::Row;
use tokio_postgres::types::{PgLsn, ToSql};
use uuid::Uuid;

use crate::error::{Code, Error, Result};
use crate::event::SHOWN_CHARS;
use crate::postgres::Sql;
use crate::printable::printable;

/// The condition for rows in quarantine.
pub(super) const IN_QUARANTINE: &str = "d.state in ('quarantined', 'released')";

/// The arguments that select events.
#[derive(Debug, clap::Args)]
pub(super) struct Which {
    /// The event: its uuid, or `schema.table:id` where ids are not uuids
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
pub(super) struct EventRow {
    pub(super) place: (PgLsn, i32),
    pub(super) uuid: Uuid,
    /// `schema.table:id` where the id is not a uuid.
    pub(super) source_id: Option<String>,
    pub(super) state: String,
    /// Empty if the event has none.
    pub(super) topic: String,
    pub(super) key: String,
}

impl EventRow {
    pub(super) fn is_in_quarantine(&self) -> bool {
        ["quarantined", "released"].contains(&self.state.as_str())
    }

    /// Whether the event has an ordering key.
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

/// The name of an event that a person can type as an argument: its source id, or its uuid if the id is
/// long or has characters that a terminal cannot show.
pub(super) fn name(source_id: Option<&str>, uuid: Uuid) -> String {
    let can_be_typed = |id: &&str| id.chars().nth(SHOWN_CHARS).is_none() && printable(id) == **id;
    source_id
        .filter(can_be_typed)
        .map_or_else(|| uuid.to_string(), str::to_owned)
}

/// The rows of an event in log order: those in quarantine, or all its rows if none is in quarantine.
///
/// # Errors
/// `not-in-quarantine` when the event has no row; `setting-invalid` when several events have this id.
pub(super) async fn rows_of(sql: &Sql, id: &str) -> Result<Vec<EventRow>> {
    let mut rows = rows_where(sql, id, IN_QUARANTINE).await?;
    if rows.is_empty() {
        // A search by `source_id` reads the whole table. The uuid cannot be computed from the id,
        // because it also depends on the transaction.
        rows = rows_where(sql, id, "true").await?;
    }
    let mut uuids: Vec<Uuid> = rows.iter().map(|row| row.uuid).collect();
    uuids.sort_unstable();
    uuids.dedup();
    match uuids.len() {
        0 => Err(not_in_quarantine(format!("event {id} is not recorded"))),
        1 => Ok(rows),
        count => {
            let uuids: Vec<String> = uuids.iter().take(5).map(Uuid::to_string).collect();
            let what = format!("{count} events have the id {id}: their table was recreated");
            Err(Error::new(Code::SettingInvalid, what)
                .hint(format!("name one by its uuid: {}", uuids.join(", "))))
        }
    }
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
        place: (row.get(0), row.get(1)),
        uuid: row.get(2),
        source_id: row.get(3),
        state: row.get(4),
        topic: row.get(5),
        key: row.get(6),
    }
}

fn not_in_quarantine(what: String) -> Error {
    Error::new(Code::NotInQuarantine, what)
}

/// The row of an event in quarantine.
///
/// # Errors
/// Those of [`rows_of`]; `not-in-quarantine` when the event has another state.
pub(super) async fn in_quarantine(sql: &Sql, id: &str) -> Result<EventRow> {
    let first = rows_of(sql, id).await?.swap_remove(0);
    if first.is_in_quarantine() {
        Ok(first)
    } else {
        Err(not_in_quarantine(format!("event {id} is {}", first.state)))
    }
}

/// The number of quarantined events of the same key before and after `event`.
pub(super) async fn neighbours(sql: &Sql, event: &EventRow) -> Result<(u64, u64)> {
    if !event.is_ordered() {
        return Ok((0, 0));
    }
    let EventRow {
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

//! Reads and writes the tables of `postrider replay`: `outbox.replay` has a row for each replay, and
//! `outbox.replay_event` has the replay's events until they get an outcome.
//!
//! A replay releases an event in the same way as `postrider quarantine` does: it sets the event's state
//! in `outbox.dispatch` to `released`. The relay therefore needs no extra query to find replayed events.

mod released;

use decoder::Lsn;
use tokio_postgres::Row;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::PgLsn;

pub(crate) use released::{
    ReplayCounts, count_waiting, next_group, release, released_by_others, settle,
};

use super::dispatch::history::{QueryParameters, RecordFilter};
use crate::error::{Code, Error, Result};
use crate::event::EventPosition;
use crate::postgres::Sql;
use crate::store::position;

/// Returns a statement that reads the next page of records, and selects the published records that match
/// `which`. Records that another replay has released also count as published. With `inserts`, the
/// statement adds the selected records to the replay. The statement returns:
///
/// - three numbers: the records in the page, the selected records, and the matching records in quarantine,
/// - the position of the page's last record,
/// - the earliest commit time of the selected records, and the event ids of the first 10 of them.
fn select_sql(which: &str, inserts: bool) -> String {
    let insert = if inserts {
        "insert into outbox.replay_event (replay, topic, ordering_key, commit_lsn, ordinal) \
         select $5::text, coalesce(m.topic, ''), coalesce(m.ordering_key, ''), m.commit_lsn, m.ordinal \
         from matching m where m.was_published on conflict do nothing"
    } else {
        "select where $5::text is null"
    };
    format!(
        "with looked as materialized ( \
             select d.* from outbox.dispatch d \
             where (d.commit_lsn, d.ordinal) > ($1::pg_lsn, $2::int) and d.commit_lsn < $3::pg_lsn \
             order by d.commit_lsn, d.ordinal limit $4::bigint), \
         matching as materialized ( \
             select d.*, d.state = 'published' or d.state = 'released' and d.message_id is not null \
                 as was_published \
             from looked d where {which}), \
         selected as ({insert}) \
         select (select count(*) from looked), \
             (select count(*) from matching where was_published), \
             (select count(*) from matching \
              where state in ('quarantined', 'released') and not was_published), \
             last.commit_lsn, last.ordinal, \
             (select to_char(min(committed_at) at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"') \
              from matching where was_published), \
             array(select event_id::text from matching where was_published \
                   order by commit_lsn, ordinal limit 10) \
         from (select commit_lsn, ordinal from looked order by 1 desc, 2 desc limit 1) last"
    )
}

/// Planner settings that keep the cost of a statement proportional to the number of its events, even if the
/// statistics are wrong.
const PLAN: &str = "\
    SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off; SET jit = off";

/// A row of `outbox.replay`.
#[derive(Debug)]
pub(crate) struct ReplayRow {
    pub(crate) name: String,
    /// Which events to replay, as JSON.
    pub(crate) criteria: String,
    /// The replay leaves out events that were committed at or after this position.
    pub(crate) until: Lsn,
    /// Whether the selection of events is complete.
    pub(crate) is_selected: bool,
    pub(crate) has_ended: bool,
}

/// A topic and an ordering key; both may be empty.
pub(crate) type ReplayGroup = (String, String);

/// Sets the planner options ([`PLAN`]) for the statements of a replay.
///
/// # Errors
/// Database errors.
pub(crate) async fn prepare(sql: &Sql) -> Result<()> {
    Ok(sql.batch_execute(PLAN).await?)
}

/// Begins a replay with this name.
///
/// # Errors
/// `setting-invalid` when the name is taken; `schema-missing` before migration 0016; database errors.
pub(crate) async fn begin(sql: &Sql, name: &str, criteria: &str, until: Lsn) -> Result<ReplayRow> {
    let statement = "insert into outbox.replay (name, criteria, until_lsn) values ($1, $2, $3)";
    let until_lsn = PgLsn::from(until.as_u64());
    match sql
        .execute(statement, &[&name, &criteria, &until_lsn])
        .await
    {
        Ok(_) => Ok(ReplayRow {
            name: name.to_owned(),
            criteria: criteria.to_owned(),
            until,
            is_selected: false,
            has_ended: false,
        }),
        Err(error) if error.code() == Some(&SqlState::UNIQUE_VIOLATION) => {
            let what = format!("there is a replay called {name} already");
            Err(Error::new(Code::SettingInvalid, what)
                .hint("choose another --name, or continue that replay with --resume"))
        }
        Err(error) => Err(unmigrated(error)),
    }
}

/// Reads the replay with this name.
///
/// # Errors
/// `schema-missing` before migration 0016; database errors.
pub(crate) async fn find(sql: &Sql, name: &str) -> Result<Option<ReplayRow>> {
    let statement = "select name, criteria, until_lsn, selected_at is not null, ended_at is not null \
                     from outbox.replay where name = $1";
    let row = sql
        .query_opt(statement, &[&name])
        .await
        .map_err(unmigrated)?;
    Ok(row.map(|row| ReplayRow {
        name: row.get(0),
        criteria: row.get(1),
        until: Lsn::new(row.get::<_, PgLsn>(2).into()),
        is_selected: row.get(3),
        has_ended: row.get(4),
    }))
}

fn unmigrated(error: tokio_postgres::Error) -> Error {
    let what = match error.code() {
        Some(&SqlState::UNDEFINED_TABLE) => {
            "the table outbox.replay (migration 0016) does not exist"
        }
        Some(&SqlState::UNDEFINED_COLUMN) => {
            "outbox.dispatch has no column earlier_messages (migration 0021)"
        }
        _ => return error.into(),
    };
    Error::new(Code::SchemaMissing, what)
}

/// Returns the names of the replays that have not ended, newest first, at most 10.
///
/// # Errors
/// Database errors.
pub(crate) async fn unfinished(sql: &Sql) -> Result<Vec<String>> {
    let statement =
        "select name from outbox.replay where ended_at is null order by requested_at desc limit 10";
    let rows = sql.query(statement, &[]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// A page of records, and the filter that selects events from it.
#[derive(Debug)]
pub(crate) struct SelectionPage<'a> {
    /// The position of the last record of the previous page, or a position before all records.
    pub(crate) after: EventPosition,
    /// Only records before this position.
    pub(crate) until: Lsn,
    /// Maximum number of records in the page.
    pub(crate) records: i64,
    pub(crate) filter: &'a RecordFilter,
    /// If set, only records committed before this time, which is an SQL expression.
    pub(crate) before: Option<&'a str>,
}

/// The result of a selection from one page.
#[derive(Debug)]
pub(crate) struct SelectedPage {
    pub(crate) records: u64,
    pub(crate) selected: u64,
    pub(crate) in_quarantine: u64,
    pub(crate) last: EventPosition,
    /// The earliest commit time of the selected events, in RFC 3339.
    pub(crate) oldest: Option<String>,
    pub(crate) first_ids: Vec<String>,
}

/// Selects the matching events of a page for the replay `name`. Without a name, only counts them. Returns
/// `None` after the last page.
///
/// # Errors
/// Database errors.
pub(crate) async fn select(
    sql: &Sql,
    name: Option<&str>,
    page: &SelectionPage<'_>,
) -> Result<Option<SelectedPage>> {
    let (after, ordinal) = position::columns(page.after);
    let until = PgLsn::from(page.until.as_u64());
    let mut parameters: QueryParameters<'_> = vec![&after, &ordinal, &until, &page.records, &name];
    let mut which = page.filter.condition(&mut parameters);
    if let Some(before) = page.before {
        which += &format!(" and d.committed_at < {before}");
    }
    let statement = select_sql(&which, name.is_some());
    let row = sql.query_opt(&statement, &parameters).await?;
    Ok(row.map(|row| SelectedPage {
        records: count(&row, 0),
        selected: count(&row, 1),
        in_quarantine: count(&row, 2),
        last: position::read(&row, 3),
        oldest: row.get(5),
        first_ids: row.get(6),
    }))
}

/// Selects the event at this position for the replay `name`.
///
/// # Errors
/// Database errors.
pub(crate) async fn select_one(
    sql: &Sql,
    name: &str,
    (topic, key): &ReplayGroup,
    at: EventPosition,
) -> Result<()> {
    let statement = "insert into outbox.replay_event (replay, topic, ordering_key, commit_lsn, ordinal) \
                     values ($1, $2, $3, $4, $5) on conflict do nothing";
    let (commit, ordinal) = position::columns(at);
    sql.execute(statement, &[&name, topic, key, &commit, &ordinal])
        .await?;
    Ok(())
}

/// Records that the selection of events is complete.
///
/// # Errors
/// Database errors.
pub(crate) async fn selected(sql: &Sql, name: &str) -> Result<()> {
    let statement = "update outbox.replay set selected_at = now() where name = $1";
    sql.execute(statement, &[&name]).await?;
    Ok(())
}

/// Cancels the rest of a replay: removes its events that are not released yet, and ends the selection.
/// Returns how many events were removed.
///
/// # Errors
/// Database errors.
pub(crate) async fn cancel(sql: &Sql, name: &str) -> Result<u64> {
    selected(sql, name).await?;
    let statement = "delete from outbox.replay_event where replay = $1 and dispatched_at is null";
    Ok(sql.execute(statement, &[&name]).await?)
}

/// Records that the replay has ended.
///
/// # Errors
/// Database errors.
pub(crate) async fn end(sql: &Sql, name: &str) -> Result<()> {
    let statement = "update outbox.replay set ended_at = now() where name = $1";
    sql.execute(statement, &[&name]).await?;
    Ok(())
}

fn count(row: &Row, column: usize) -> u64 {
    u64::try_from(row.get::<_, i64>(column)).unwrap_or_default()
}

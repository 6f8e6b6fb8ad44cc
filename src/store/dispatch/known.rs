//! SQL fragments with which statements on captured tables look up an event in `outbox.dispatch`.
//!
//! In these fragments, `outbox.dispatch` has the alias `d`. The functions take an SQL expression for the
//! event's id.

use crate::error::Result;
use crate::postgres::Sql;

/// A statement that needs the same privileges in the schema `outbox` as statements on captured tables.
const OURS: &str = "SELECT outbox.event_uuid('', '', null) FROM outbox.dispatch LIMIT 0";

/// Checks that our role may use the objects in `outbox` that statements on captured tables use. The check
/// reads no rows, but the server refuses the statement if a privilege is missing.
///
/// # Errors
/// `schema-missing`, `privilege-missing`.
pub(crate) async fn check_readable(sql: &Sql) -> Result<()> {
    Ok(sql.batch_execute(OURS).await?)
}

/// Returns an SQL condition that is true if the event has no row.
pub(crate) fn has_no_row_sql(event_id: &str) -> String {
    format!("not exists (select from outbox.dispatch d where d.event_id = {event_id})")
}

/// Returns an SQL expression for the event's state: null if the event has no row, `published` if all its rows
/// are published, otherwise `aside` (quarantined, released or discarded).
pub(crate) fn state_sql(event_id: &str) -> String {
    format!(
        "(select case when count(*) = 0 then null when bool_and(d.state = 'published') \
             then 'published' else 'aside' end \
          from outbox.dispatch d where d.event_id = {event_id})"
    )
}

/// An SQL query that summarises the dispatch rows of the event `w.id`. Its column `records` is 0 if the
/// event has no row.
pub(crate) const RECORD_OF_ROW: &str = "\
    select count(*) as records, \
        case when bool_or(d.state = 'quarantined') then 'quarantined' \
             when bool_or(d.state = 'released') then 'released' \
             when bool_or(d.state = 'published') then 'published' \
             when count(*) > 0 then 'discarded' end as state, \
        max(d.commit_lsn) as commit_lsn, max(d.dispatched_at) as dispatched_at, \
        min(d.committed_at) as committed_at, \
        count(*) filter (where d.state = 'published') > 1 as is_recorded_twice, \
        coalesce(bool_or(d.attempts > 1 and to_jsonb(d) ->> 'replay' is null), false) as is_sent_again \
    from outbox.dispatch d where d.event_id = w.id";

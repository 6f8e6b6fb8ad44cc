//! SQL fragments with which statements on captured tables look up an event in `outbox.dispatch`.
//!
//! The fragments call that table `d`. The functions take an SQL expression for the event's id.

use crate::error::Result;
use crate::postgres::Sql;

/// Uses every object of the schema `outbox` that statements on captured tables use.
const OURS: &str = "SELECT outbox.event_uuid('', '', null) FROM outbox.dispatch LIMIT 0";

/// Checks that our role may use these objects. The statement reads no rows, but the server still refuses
/// it if a privilege is missing.
///
/// # Errors
/// `schema-missing`, `privilege-missing`.
pub(crate) async fn check_readable(sql: &Sql) -> Result<()> {
    Ok(sql.batch_execute(OURS).await?)
}

/// A condition: the event has no row.
pub(crate) fn has_no_row_sql(event_id: &str) -> String {
    format!("not exists (select from outbox.dispatch d where d.event_id = {event_id})")
}

/// An expression for the event's state: null if it has no row, `published` if all its rows are
/// published, otherwise `aside`.
pub(crate) fn state_sql(event_id: &str) -> String {
    format!(
        "(select case when count(*) = 0 then null when bool_and(d.state = 'published') \
             then 'published' else 'aside' end \
          from outbox.dispatch d where d.event_id = {event_id})"
    )
}

/// A summary of the dispatch rows of a row `w`. `records` is 0 if there are none.
pub(crate) const RECORD_OF_ROW: &str = "\
    select count(*) as records, \
        case when bool_or(d.state = 'quarantined') then 'quarantined' \
             when bool_or(d.state = 'released') then 'released' \
             when bool_or(d.state = 'published') then 'published' \
             when count(*) > 0 then 'discarded' end as state, \
        max(d.commit_lsn) as commit_lsn, max(d.dispatched_at) as dispatched_at, \
        min(d.committed_at) as committed_at, max(d.attempts) as attempts \
    from outbox.dispatch d where d.event_id = w.id";

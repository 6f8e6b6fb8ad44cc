//! Fragments of SQL by which statements over captured tables ask what `outbox.dispatch` knows of an
//! event.
//!
//! They name the table `d`. Their argument is an SQL expression for the event's id.

use crate::error::Result;
use crate::postgres::Sql;

/// Touches every object of the schema `outbox` that statements over captured tables use.
const OURS: &str = "SELECT outbox.event_uuid('', '', null) FROM outbox.dispatch LIMIT 0";

/// Makes sure that these fragments can be used. Even when a statement asks for no rows, the server
/// refuses it if a privilege is missing.
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

/// What the rows of the event say: null without a row, `published` if all of them say so, otherwise
/// `aside`.
pub(crate) fn state_sql(event_id: &str) -> String {
    format!(
        "(select case when count(*) = 0 then null when bool_and(d.state = 'published') \
             then 'published' else 'aside' end \
          from outbox.dispatch d where d.event_id = {event_id})"
    )
}

/// What outbox.dispatch says about a row `w`; `records` is 0 if it says nothing.
pub(crate) const RECORD_OF_ROW: &str = "\
    select count(*) as records, \
        case when bool_or(d.state = 'quarantined') then 'quarantined' \
             when bool_or(d.state = 'released') then 'released' \
             when bool_or(d.state = 'published') then 'published' \
             when count(*) > 0 then 'discarded' end as state, \
        max(d.commit_lsn) as commit_lsn, max(d.dispatched_at) as dispatched_at, \
        min(d.committed_at) as committed_at, max(d.attempts) as attempts \
    from outbox.dispatch d where d.event_id = w.id";

//! The statements that delete old records. `ops::prune` decides which records may be deleted.

use crate::event::EventPosition;
use decoder::Lsn;

/// The verdict that a record or an outbox row may be deleted.
pub(crate) const GO: &str = "go";

/// Selects the name of one captured table that still exists, but is not among the identities in `$1`. If there is
/// such a table, no dispatch row may be deleted, because the dispatch row might belong to one of the table's rows.
///
/// The statement looks for a table with the recorded OID, and then for a table with the recorded name. It ignores a
/// table with the recorded name if `$1` contains this table's own identity. This happens after a rotation, when the
/// name belongs to another captured table.
pub(crate) const OTHER_TABLES: &str = "\
    select case when r.oid is null then n.name else c.table_oid::pg_catalog.regclass::text end \
    from outbox.capture c \
    cross join lateral pg_catalog.format('%I.%I', c.schema_name, c.table_name) n (name) \
    left join pg_catalog.pg_class r on r.oid = c.table_oid and r.relkind in ('r', 'p') \
    where c.identity <> all ($1) and ( \
        r.oid is not null \
        or pg_catalog.to_regclass(n.name)::oid not in ( \
            select k.table_oid from outbox.capture k where k.identity = any ($1))) \
    order by 1 limit 1";

/// Returns an SQL condition on a record `w`: its event has another record that must stay. The outbox row of
/// the event must then stay too.
pub(crate) fn other_record_stays_sql(confirmed: Lsn, cutoff: &str) -> String {
    format!(
        "exists (select from outbox.dispatch o where o.event_id = w.event_id \
             and (o.state in ('quarantined', 'released') or o.dispatched_at >= {cutoff} \
                 or o.commit_lsn >= '{confirmed}'::pg_lsn))"
    )
}

/// The bounds of one chunk of records.
#[derive(Debug)]
pub(crate) struct RecordChunkBounds<'a> {
    /// The position of the last record of the previous chunk.
    pub(crate) after: EventPosition,
    /// The chunk contains only records before this position.
    pub(crate) durable: Lsn,
    /// Maximum number of records in the chunk.
    pub(crate) limit: u32,
    /// An SQL expression for a time. A record stays if its outcome was recorded at this time or later.
    pub(crate) cutoff: &'a str,
    /// An SQL condition: the outbox row of the record `w` still exists. Such a record stays.
    pub(crate) has_row: &'a str,
    /// Whether records are deleted, or only counted.
    pub(crate) deletes: bool,
}

/// Returns the statement for one chunk. The statement returns no row at the end of the table.
pub(crate) fn chunk_sql(bounds: &RecordChunkBounds<'_>) -> String {
    let RecordChunkBounds {
        after,
        durable,
        limit,
        cutoff,
        has_row,
        deletes,
    } = bounds;
    let delete = if *deletes {
        format!(
            "delete from outbox.dispatch d using judged j where j.verdict = '{GO}' \
                 and d.commit_lsn = j.commit_lsn and d.ordinal = j.ordinal returning 1"
        )
    } else {
        format!("select 1 from judged j where j.verdict = '{GO}'")
    };
    let (commit, ordinal) = (after.commit.lsn(), after.ordinal);
    format!(
        "with looked as materialized ( \
             select commit_lsn, ordinal, event_id, source_id, state, dispatched_at \
             from outbox.dispatch \
             where (commit_lsn, ordinal) > ('{commit}'::pg_lsn, {ordinal}) \
               and commit_lsn < '{durable}'::pg_lsn \
             order by commit_lsn, ordinal limit {limit}), \
         judged as materialized ( \
             select w.*, case when w.state not in ('published', 'discarded') then 'quarantined' \
                 when w.dispatched_at >= {cutoff} then 'young' \
                 when {has_row} then 'of_row' else '{GO}' end as verdict from looked w), \
         gone as ({delete}) \
         select (select count(*) from judged), (select count(*) from gone), \
             (select count(*) from judged where verdict = 'young'), \
             (select count(*) from judged where verdict = 'of_row'), \
             (select to_char(min(dispatched_at) at time zone 'UTC', \
                  'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"') from judged where verdict = '{GO}'), \
             last.commit_lsn, last.ordinal \
         from (select commit_lsn, ordinal from looked order by 1 desc, 2 desc limit 1) last"
    )
}

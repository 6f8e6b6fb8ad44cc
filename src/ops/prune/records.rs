//! Deletes rows of outbox.dispatch whose outbox row is gone, chunk by chunk along the primary key.

use std::time::Duration;

use decoder::Lsn;
use replication::CommitLsn;
use slot_manager::table::{self, LookupColumn};
use slot_manager::{cluster, quoted_identifier, quoted_literal};
use tokio_postgres::Row;

use super::proof::PruneProof;
use super::{
    FailedAttempts, OnPruneStep, PruneContext, PruneStep, PrunedRecords, Pruning, RECORDS, WAITING,
    rows,
};
use crate::capture::claim::Captured;
use crate::capture::detached::{self, DetachedTable};
use crate::capture::table::TableReader;
use crate::error::{Code, Error, Result};
use crate::event::EventPosition;
use crate::ops::progress;
use crate::postgres::Sql;
use crate::store::dispatch::pruning;
use crate::store::position;

/// How long to wait until the slot has passed the deleted rows. A relay that keeps up confirms the end
/// of the WAL within seconds.
const WAIT: Duration = Duration::from_secs(20);

/// Minimum number of records that one chunk reads, unless the request asks for fewer.
const CHUNK_MIN: u32 = 50;

/// Maximum number of former tables that the notes name.
const NOTES: usize = 3;

/// Deletes all records that may be deleted, or counts them. Returns false if `on_step` stopped the run.
pub(super) async fn prune(
    context: &PruneContext<'_>,
    captured: &[Captured],
    on_step: &mut OnPruneStep<'_>,
) -> Result<(PrunedRecords, bool)> {
    let mut pruned = PrunedRecords::default();
    let durable = match &context.proof {
        PruneProof::Slot { durable, .. } => *durable,
        PruneProof::RecordsOnly { why } => {
            pruned.postponed = Some(format!(
                "{why}, so nothing shows which records are still needed"
            ));
            return Ok((pruned, true));
        }
    };
    let kept = match kept_records(context, captured).await? {
        Ok(kept) => kept,
        Err(why) => {
            pruned.postponed = Some(why);
            return Ok((pruned, true));
        }
    };
    pruned.notes = kept.notes;
    // Make PostgreSQL look each record up by its key. It might otherwise read the whole table for a hash
    // join.
    context
        .sql
        .batch_execute("SET enable_nestloop = on; SET enable_hashjoin = off")
        .await?;
    let mut after = kept.up_to;
    let mut examined = 0;
    // At first, only look for a record to delete. If there is none, there is no need to wait for the slot.
    let mut deletes = false;
    loop {
        let statement = pruning::chunk_sql(&pruning::RecordChunkBounds {
            after,
            durable,
            limit: kept.chunk,
            cutoff: context.cutoff.sql(),
            has_row: &kept.has_row,
            deletes,
        });
        let Some(chunk) = one_chunk(context.sql, &statement).await? else {
            return Ok((pruned, true));
        };
        if chunk.gone > 0 && !deletes && !context.request.is_dry_run() {
            if let Some(why) = wait_until_passed(context, on_step).await? {
                pruned.postponed = Some(why);
                return Ok((pruned, true));
            }
            deletes = true;
            continue;
        }
        examined += chunk.rows;
        pruned.rows += chunk.gone;
        pruned.of_rows += chunk.of_rows;
        pruned.oldest = rows::earlier(pruned.oldest.take(), chunk.oldest);
        if !on_step(&PruneStep {
            what: RECORDS,
            examined,
            deleted: pruned.rows,
            share: None,
        }) {
            return Ok((pruned, false));
        }
        // Records are read in commit order, so all later records are young too.
        let is_young = chunk.gone == 0 && chunk.young * 2 > chunk.rows;
        if is_young || chunk.rows < u64::from(kept.chunk) {
            return Ok((pruned, true));
        }
        if chunk.gone > 0 && !context.request.is_dry_run() {
            tokio::time::sleep(context.request.pause).await;
        }
        after = chunk.last;
    }
}

/// Waits up to [`WAIT`] until the slot has passed the current end of the WAL. If it has not, returns why
/// the records have to stay.
async fn wait_until_passed(
    context: &PruneContext<'_>,
    on_step: &mut OnPruneStep<'_>,
) -> Result<Option<String>> {
    on_step(&PruneStep {
        what: WAITING,
        examined: 0,
        deleted: 0,
        share: None,
    });
    let end = cluster::wal_end(context.sql).await?;
    let name = &context.settings.slot;
    let (slot, is_passed) = progress::wait_until_confirmed(context.sql, name, end, WAIT).await?;
    if is_passed {
        return Ok(None);
    }
    let confirmed = slot.as_ref().and_then(|slot| slot.confirmed_flush_lsn);
    let confirmed = confirmed.map_or_else(|| "nowhere".to_owned(), |at| format!("at {at}"));
    let reader = if slot.is_some_and(|slot| slot.active) {
        "something holds it back (`postrider status` says what)"
    } else {
        "no relay reads it"
    };
    Ok(Some(format!(
        "slot {name} is {confirmed} and has not passed {end}, the end of the WAL after the deletions: {reader}. \
         Until then the relay may need the records; run the command again later"
    )))
}

/// Runs one chunk; `None` at the end of the table.
async fn one_chunk(sql: &Sql, statement: &str) -> Result<Option<RecordChunk>> {
    let mut failed = FailedAttempts::default();
    loop {
        match sql.query_typed(statement, &[]).await {
            Ok(found) => return Ok(found.first().map(RecordChunk::of)),
            Err(error) => failed.again(error).await?,
        }
    }
}

/// The findings of one chunk.
struct RecordChunk {
    rows: u64,
    gone: u64,
    young: u64,
    of_rows: u64,
    oldest: Option<String>,
    last: EventPosition,
}

impl RecordChunk {
    fn of(row: &Row) -> Self {
        let count = |n| u64::try_from(row.get::<_, i64>(n)).unwrap_or_default();
        Self {
            rows: count(0),
            gone: count(1),
            young: count(2),
            of_rows: count(3),
            oldest: row.get(4),
            last: position::read(row, 5),
        }
    }
}

/// The records that have to stay, because an outbox row may need them.
struct KeptRecords {
    /// An SQL condition on a record `w`: a captured table or a former table may still contain the outbox row of the
    /// record's event. In a dry run, outbox rows that a real run would have deleted do not count.
    has_row: String,
    /// Number of records that one chunk reads. The number is lower if there are several tables, because PostgreSQL may
    /// look up each record in each table.
    chunk: u32,
    /// All records up to this position stay.
    up_to: EventPosition,
    /// Notes on former tables whose records all stay.
    notes: Vec<String>,
}

/// Finds out which records have to stay. The inner error says why this cannot be found out. In this case, all records
/// must stay.
async fn kept_records(
    context: &PruneContext<'_>,
    captured: &[Captured],
) -> Result<Result<KeptRecords, String>> {
    let identities: Vec<&str> = captured
        .iter()
        .map(|captured| captured.record.identity.as_str())
        .collect();
    let sql = context.sql;
    // Look for a table that was captured before and still exists, but is not in the settings. If there is one, delete
    // no records, because some may belong to rows of this table. If a relay captured the table again later, it would
    // find these rows without a record, and publish them a second time.
    if let Some(row) = sql.query_opt(pruning::OTHER_TABLES, &[&identities]).await? {
        return Ok(Err(format!(
            "table {} was captured and is not in the settings, so nothing shows whether a record \
             belongs to one of its rows: name it in the settings, or drop it once none of its events are in quarantine",
            row.get::<_, &str>(0)
        )));
    }
    let mut conditions = Vec::new();
    let tables = &context.settings.tables;
    // A dry run has deleted no rows, so leave out the rows that a real run would have deleted by now.
    let is_dry_run = context.request.is_dry_run();
    let project = context.settings.project().unwrap_or("none");
    for (table, captured) in tables.iter().zip(captured) {
        let which = is_dry_run.then(|| rows::stays_sql(context, captured));
        let which = which.unwrap_or_else(|| "true".to_owned());
        let reader = TableReader::resolve(sql, table, project, captured).await?;
        match exists_sql(sql, captured, &reader, &which).await? {
            Ok(condition) => conditions.push(condition),
            Err(why) => return Ok(Err(why)),
        }
    }
    let settled = detached::find_settled(sql, tables, captured).await?;
    let (mut up_to, mut notes) = (EventPosition::default(), Vec::new());
    if context.request.who == Pruning::Relay {
        // Keep all records up to the last position at which a table was settled: they include all records of these
        // tables' rows. Looking them up instead would repeat the same work in every run of the relay.
        let last = settled.iter().filter_map(|table| table.settled).max();
        up_to.commit = last.map(CommitLsn::new).unwrap_or_default();
    } else {
        notes = former_tables(context, &settled, &mut conditions).await?;
    }
    for table in detached::find(sql, tables, captured).await? {
        match of_former_sql(sql, project, &table).await? {
            Ok(condition) => conditions.extend(condition),
            Err(why) => return Ok(Err(why)),
        }
    }
    let lookups = u32::try_from(conditions.len()).unwrap_or(u32::MAX);
    Ok(Ok(KeptRecords {
        has_row: format!("({})", conditions.join(" or ")),
        chunk: (context.request.chunk / lookups.max(1)).max(CHUNK_MIN.min(context.request.chunk)),
        up_to,
        notes,
    }))
}

/// Adds the SQL conditions that the row of the record `w` is in one of these `settled` tables. A table that cannot be
/// searched keeps all records from before the position at which it was settled, because all records of its rows are
/// older. Returns notes on these tables.
async fn former_tables(
    context: &PruneContext<'_>,
    settled: &[DetachedTable],
    conditions: &mut Vec<String>,
) -> Result<Vec<String>> {
    let project = context.settings.project().unwrap_or("none");
    let mut unsearched: Vec<(Lsn, String)> = Vec::new();
    for table in settled {
        match (
            of_former_sql(context.sql, project, table).await?,
            table.settled,
        ) {
            (Ok(condition), _) => conditions.extend(condition),
            (Err(why), settled) => unsearched.push((settled.unwrap_or_default(), why)),
        }
    }
    let last = unsearched.iter().map(|(settled, _)| *settled).max();
    conditions.extend(last.map(before_sql));
    let more = unsearched.len().saturating_sub(NOTES);
    let notes = unsearched.into_iter().take(NOTES);
    let mut notes: Vec<String> = notes.map(|(_, why)| why).collect();
    if more > 0 {
        notes.push(format!("the same is true of {more} more former tables"));
    }
    if let Some(last) = last {
        notes.push(format!("so the old records from before {last} stay"));
    }
    Ok(notes)
}

/// Returns the SQL condition that the row of the record `w` is in this former table. `None` if the table is gone. The
/// inner error says why the rows cannot be looked up.
async fn of_former_sql(
    sql: &Sql,
    project: &str,
    table: &DetachedTable,
) -> Result<Result<Option<String>, String>> {
    if let Some((table, why, remedy)) = table.unreadable() {
        return Ok(Err(format!(
            "rows of {table} may still need their records, and cannot be read: {why}: {remedy}"
        )));
    }
    let Some(rows) = table.rows() else {
        return Ok(Ok(None));
    };
    let (settings, captured) = (&rows.settings, &rows.captured);
    let reader = TableReader::resolve(sql, settings, project, captured).await?;
    let exists = exists_sql(sql, captured, &reader, "true").await?;
    Ok(exists.map(|exists| {
        let before = table.settled.map(before_sql);
        Some(before.map_or_else(
            || exists.clone(),
            |before| format!("({before} and {exists})"),
        ))
    }))
}

/// The SQL condition that the record `w` may belong to a row of a table that was settled at this position.
fn before_sql(settled: Lsn) -> String {
    format!("w.commit_lsn < '{settled}'::pg_lsn")
}

/// Returns an SQL condition on a record `w`, which is a row of outbox.dispatch. The condition is true if the table
/// contains the outbox row of the record's event, and this outbox row, `e`, meets the SQL condition `condition`.
///
/// If no index serves to look up the outbox rows, the condition is true for all records whose `source_id` names the
/// table. If there is no such index and the records have no `source_id`, the function returns the inner error.
///
/// `offset 0` makes PostgreSQL look up the outbox row of each record, instead of reading the whole table at once.
pub(in crate::ops) async fn exists_sql(
    sql: &Sql,
    captured: &Captured,
    reader: &TableReader,
    condition: &str,
) -> Result<Result<String, String>> {
    const INTEGERS: [u32; 3] = [20, 21, 23];
    const TEXTS: [u32; 2] = [25, 1043];
    let column = reader.id_column();
    let table = reader.table_sql();
    let found = table::lookup_column(sql, captured.shape.oid, column).await?;
    let LookupColumn {
        type_oid: id_type,
        is_indexed,
    } = found.ok_or_else(|| {
        let what = format!("column {column} of {table} was dropped in the meantime");
        Error::new(Code::ColumnMissing, what)
    })?;
    let id = format!("e.{}", quoted_identifier(column));
    let rows = reader.rows_sql();
    let exists = |id_of_record: &str| {
        format!("exists (select from {rows} and {id} = {id_of_record} and {condition} offset 0)")
    };
    let Some(prefix) = reader.source_prefix() else {
        return Ok(if is_indexed {
            Ok(exists("w.event_id"))
        } else {
            Err(format!(
                "column {column} of {table} has no index, so looking up the row of a record would read \
                 the whole table: CREATE INDEX ON {table} ({})",
                quoted_identifier(column)
            ))
        });
    };
    let is_of_table = format!("starts_with(w.source_id, {})", quoted_literal(prefix));
    let text = format!("substr(w.source_id, {})", prefix.chars().count() + 1);
    let condition = match id_type {
        _ if !is_indexed => is_of_table,
        id_type if INTEGERS.contains(&id_type) => {
            // An id that is not a bigint cannot be looked up, so its record stays.
            let number = format!(
                "case when {text} ~ '^-?[0-9]{{1,19}}$' and {text}::numeric \
                     between '-9223372036854775808' and '9223372036854775807' \
                 then {text}::bigint end"
            );
            format!(
                "{is_of_table} and (({number}) is null or {})",
                exists(&format!("({number})"))
            )
        }
        id_type if TEXTS.contains(&id_type) => {
            format!("{is_of_table} and {}", exists(&text))
        }
        // Records store ids as text, and an index on an id column of another type cannot be used to look up a
        // text. So pruning keeps all records of this table.
        _ => is_of_table,
    };
    Ok(Ok(format!("coalesce({condition}, false)")))
}

//! What the auditor asks the database, apart from the comparison itself.

use decoder::Lsn;
use slot_manager::SlotName;
use tokio_postgres::types::{PgLsn, ToSql};

use super::marks::{Leaf, Marks};
use super::{Earlier, Subject};
use crate::dispatch::Resolved;
use crate::error::Result;
use crate::map::TableSettings;
use crate::postgres::Sql;
use crate::settings::Dispatch;

/// Headers of a WAL page and of a segment's first page, bytes: right behind one the end of the WAL
/// seems further on than the end of the last record.
const PAGE_HEADERS: [u64; 2] = [24, 40];
const WAL_PAGE: u64 = 8_192;

/// Ordinary tables, and the partitions of partitioned ones; without those that only the root gives
/// a right to: their rows are compared when the whole table is.
const LEAVES: &str = "\
    with root as ( \
        select c.oid, c.relkind from pg_catalog.pg_class c \
        join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
        where n.nspname = $1 and c.relname = $2), \
    leaf as ( \
        select oid from root where relkind = 'r' \
        union all \
        select t.relid from root, pg_catalog.pg_partition_tree(root.oid) t \
        where root.relkind = 'p' and t.isleaf) \
    select oid, pg_catalog.pg_relation_filenode(oid) as file, \
           pg_catalog.pg_relation_size(oid) / pg_catalog.current_setting('block_size')::int \
               as blocks, \
           coalesce(pg_catalog.pg_stat_get_tuples_inserted(oid), 0) as inserted, \
           oid::regclass::text as name \
    from leaf where pg_catalog.has_table_privilege(oid, 'select')";

const TABLE: &str = "\
    select c.oid from pg_catalog.pg_class c \
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
    where n.nspname = $1 and c.relname = $2";

const EARLIER: &str = "\
    select audited_at is not null, audited_publication, audit_marks::text, first_xid, dispatch \
    from outbox.relay where slot = $1";

const AUDITED: &str = "\
    update outbox.relay set audited_at = now(), audited_publication = $2, \
        audit_marks = $3::text::jsonb, updated_at = now() where slot = $1";

const VOUCH: &str = "\
    update outbox.relay set resolved_xid = greatest(resolved_xid, $4), audited_at = now(), \
        updated_at = now(), dispatch = $5::text, \
        exceptions_xid = case when $5::text = 'exceptions' then exceptions_xid end \
    where slot = $1 and instance = $2 and audited_publication = $3 and recovering is null \
      and exists (select from pg_catalog.pg_replication_slots s \
                  where s.slot_name = $1 and s.active_pid = $6)";

const MARK_BROKEN: &str = "\
    update outbox.relay set recovering = coalesce(recovering, $3), updated_at = now() \
    where slot = $1 and instance = $2";

const SAVE_MARKS: &str = "\
    update outbox.relay set audit_marks = $2::text::jsonb where slot = $1";

const RUNNING: &str = "\
    select pg_catalog.pg_snapshot_xmin(s)::text::bigint, pg_catalog.pg_snapshot_xmax(s)::text::bigint \
    from pg_catalog.pg_current_snapshot() s";

/// Transactions that write at this moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Running {
    /// All older ones have ended.
    pub(super) oldest: i64,
    /// The id that comes next.
    pub(super) next: i64,
}

pub(super) async fn running(sql: &Sql) -> Result<Running> {
    let row = sql.query_one(RUNNING, &[]).await?;
    Ok(Running {
        oldest: row.get(0),
        next: row.get(1),
    })
}

/// Every table with rows of its own that may be read.
pub(super) async fn leaves(sql: &Sql, tables: &[TableSettings]) -> Result<Vec<Leaf>> {
    let mut leaves = Vec::new();
    for (table, settings) in tables.iter().enumerate() {
        let name = &settings.table;
        for row in sql.query(LEAVES, &[&name.schema, &name.name]).await? {
            // Neither is there when the table was dropped just now, nor for a foreign table, of
            // which nothing is streamed.
            let (Some(file), Some(blocks)) = (row.get("file"), row.get::<_, Option<i64>>("blocks"))
            else {
                continue;
            };
            leaves.push(Leaf {
                table,
                oid: row.get("oid"),
                file,
                blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
                inserted: row.get("inserted"),
                name: row.get("name"),
            });
        }
    }
    Ok(leaves)
}

/// The oids of the captured tables, in their order; all are there, as the publication is right.
pub(super) async fn tables(sql: &Sql, tables: &[TableSettings]) -> Result<Vec<u32>> {
    let mut oids = Vec::with_capacity(tables.len());
    for TableSettings { table, .. } in tables {
        let row = sql.query_one(TABLE, &[&table.schema, &table.name]).await?;
        oids.push(row.get(0));
    }
    Ok(oids)
}

/// What earlier audits left behind. Marks that cannot be read count as none.
pub(super) async fn earlier(sql: &Sql, slot: &SlotName) -> Result<Earlier> {
    let row = sql.query_one(EARLIER, &[&slot.as_str()]).await?;
    let marks: Option<&str> = row.get(2);
    Ok(Earlier {
        had_one: row.get(0),
        first_xid: row.get(3),
        publication: row.get(1),
        repeats: Dispatch::named(row.get(4)) != Some(Dispatch::Full),
        resolved: Resolved::read(sql, slot).await?,
        marks: marks
            .and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_default(),
    })
}

/// Every row has a record, with the publication as it is in `publication`.
pub(super) async fn audited(
    sql: &Sql,
    slot: &SlotName,
    publication: &str,
    marks: &Marks,
) -> Result<()> {
    sql.execute(AUDITED, &[&slot.as_str(), &publication, &json(marks)])
        .await?;
    Ok(())
}

/// Rows of transactions before `oldest` have their outcome, with the publication as it is in
/// `publication`; those after it are handled as `dispatch` says. Nothing when the session has lost
/// the slot.
pub(super) async fn vouch(
    sql: &Sql,
    subject: &Subject,
    publication: &str,
    oldest: i64,
    dispatch: Dispatch,
) -> Result<()> {
    let (slot, instance) = (subject.slot.as_str(), &subject.instance);
    let (dispatch, walsender) = (dispatch.name(), subject.walsender);
    let parameters: [&(dyn ToSql + Sync); 6] = [
        &slot,
        instance,
        &publication,
        &oldest,
        &dispatch,
        &walsender,
    ];
    sql.execute(VOUCH, &parameters).await?;
    Ok(())
}

/// The next session begins with a recovery, unless another relay has taken the slot.
pub(super) async fn mark_broken(sql: &Sql, subject: &Subject, why: &str) -> Result<()> {
    let (slot, instance) = (subject.slot.as_str(), &subject.instance);
    sql.execute(MARK_BROKEN, &[&slot, instance, &why]).await?;
    Ok(())
}

/// Where the WAL ends; each transaction that is visible lies before it.
pub(super) async fn wal_end(sql: &Sql) -> Result<Lsn> {
    let row = sql
        .query_one("select pg_catalog.pg_current_wal_insert_lsn()", &[])
        .await?;
    let end = u64::from(row.get::<_, PgLsn>(0));
    let header = PAGE_HEADERS.into_iter().find(|h| end % WAL_PAGE == *h);
    Ok(Lsn::new(end - header.unwrap_or(0)))
}

/// Whether everything up to `end` is confirmed by the session that reads through `walsender`: a
/// slot of the same name that somebody has made anew may have any position.
pub(super) async fn is_confirmed(
    sql: &Sql,
    slot: &SlotName,
    walsender: i32,
    end: Lsn,
) -> Result<bool> {
    const CONFIRMED: &str = "\
        select confirmed_flush_lsn >= $2 from pg_catalog.pg_replication_slots \
        where slot_name = $1 and active_pid = $3";
    let end = PgLsn::from(end.as_u64());
    let parameters: [&(dyn ToSql + Sync); 3] = [&slot.as_str(), &end, &walsender];
    let row = sql.query_opt(CONFIRMED, &parameters).await?;
    Ok(row.is_some_and(|row| row.get(0)))
}

/// So far the tables are compared.
pub(super) async fn save_marks(sql: &Sql, slot: &SlotName, marks: &Marks) -> Result<()> {
    sql.execute(SAVE_MARKS, &[&slot.as_str(), &json(marks)])
        .await?;
    Ok(())
}

fn json(marks: &Marks) -> String {
    serde_json::to_string(marks).expect("invariant: numbers by numbers are JSON")
}

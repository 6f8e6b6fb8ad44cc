//! Finds the former tables that audits and recoveries no longer read: settled tables, whose rows all have an outcome, and
//! displaced tables, whose rows may have none. Only the rows of single events are looked up there.

use decoder::Lsn;
use slot_manager::table;

use super::{DetachedState, DetachedTable, describe, find, is_displaced, owners, unresolved_of};
use crate::capture::captured::Captured;
use crate::error::Result;
use crate::mapping::TableSettings;
use crate::postgres::Sql;
use crate::store::capture_record::{self, CaptureRecord};

/// Finds the settled tables. The table that was settled first comes first. After them come the displaced tables.
///
/// # Errors
/// Database errors.
pub(crate) async fn find_settled(
    sql: &Sql,
    tables: &[TableSettings],
    captured: &[Captured],
) -> Result<Vec<DetachedTable>> {
    let owners = owners(sql, captured).await?;
    let mut settled = Vec::new();
    for (number, (settings, one)) in tables.iter().zip(captured).enumerate() {
        let tables = settled_of(one).map(|(oid, at)| (oid, Some(at)));
        settled.extend(describe(sql, (number, settings, one), &owners, tables.collect()).await?);
    }
    settled.sort_by_key(|table| table.settled);
    let at = Some(Lsn::new(u64::MAX));
    for Displaced { record, of, oids } in displaced(sql, tables, captured).await? {
        if let Some(number) = of {
            let shape = captured[number].shape.clone();
            let captured = Captured { record, shape };
            let oids = oids.into_iter().map(|oid| (oid, at)).collect();
            let one = (number, &tables[number], &captured);
            settled.extend(describe(sql, one, &owners, oids).await?);
            continue;
        }
        // The settings do not name this table, so they do not say how to map its rows.
        settled.push(DetachedTable {
            number: 0,
            oid: record.oid,
            is_pending: false,
            is_uncaptured: false,
            is_in_settings: false,
            settled: at,
            state: DetachedState::Unreadable {
                why: "the table was captured, and is not in the settings".to_owned(),
                remedy: format!("name {} in the settings", record.table),
                name: record.table,
            },
        });
    }
    Ok(settled)
}

/// Finds all former tables: those of [`find`], and after them those of [`find_settled`].
///
/// # Errors
/// Database errors.
pub(crate) async fn find_all(
    sql: &Sql,
    tables: &[TableSettings],
    captured: &[Captured],
) -> Result<Vec<DetachedTable>> {
    let mut former = find(sql, tables, captured).await?;
    former.extend(find_settled(sql, tables, captured).await?);
    Ok(former)
}

/// A table that has a capture record, but is not among the captured tables.
struct Displaced {
    record: CaptureRecord,
    /// Set if a captured table was renamed away, and another captured table got its name: the index of the settings of
    /// that name, which map the rows of both. `None` if the settings no longer name the table.
    of: Option<usize>,
    /// The table, or its partitions.
    oids: Vec<u32>,
}

/// Finds the displaced tables of this slot that still exist.
///
/// Nobody raises the floor of a displaced table, so its settled position is unknown. [`find_settled`] uses the highest
/// position, so that every event is looked up in the displaced table.
async fn displaced(
    sql: &Sql,
    tables: &[TableSettings],
    captured: &[Captured],
) -> Result<Vec<Displaced>> {
    let mut records = capture_record::read(&**sql).await?;
    records.retain(|record| is_displaced(record, captured));
    let mut displaced = Vec::new();
    for record in records {
        let mut oids = record.former_partitions("");
        oids.extend(record.settled.keys());
        oids.retain(|oid| *oid != record.oid);
        oids.push(record.oid);
        let exist = table::former_partitions(sql, &oids).await?;
        if !exist.is_empty() {
            displaced.push(Displaced {
                of: tables.iter().position(|one| one.table == record.table),
                oids: exist.iter().map(|found| found.oid).collect(),
                record,
            });
        }
    }
    Ok(displaced)
}

/// The OIDs of the tables that [`find_all`] finds. A settled table has the position at which it was settled, every other
/// table has `None`.
///
/// # Errors
/// Database errors.
pub(crate) async fn former_oids(
    sql: &Sql,
    tables: &[TableSettings],
    captured: &[Captured],
) -> Result<Vec<(u32, Option<Lsn>)>> {
    let unresolved = captured.iter().flat_map(unresolved_of);
    let settled = captured.iter().flat_map(settled_of);
    let displaced = displaced(sql, tables, captured).await?;
    Ok(unresolved
        .map(|oid| (oid, None))
        .chain(settled.map(|(oid, at)| (oid, Some(at))))
        .chain(
            displaced
                .iter()
                .flat_map(|one| &one.oids)
                .map(|oid| (*oid, None)),
        )
        .collect())
}

fn settled_of(captured: &Captured) -> impl Iterator<Item = (u32, Lsn)> {
    let unresolved = unresolved_of(captured);
    let settled = captured.record.settled.iter().map(|(oid, at)| (*oid, *at));
    settled.filter(move |(oid, _)| {
        !unresolved.contains(oid) && captured.shape.leaves().all(|leaf| leaf != *oid)
    })
}

//! Finds the former tables whose rows all have an outcome. Only rows of single events are looked up there.

use decoder::Lsn;
use slot_manager::table;

use super::{DetachedState, DetachedTable, describe, find, unresolved_of};
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
    let mut settled = Vec::new();
    for (number, (settings, captured)) in tables.iter().zip(captured).enumerate() {
        let tables = settled_of(captured).map(|(oid, at)| (oid, Some(at)));
        settled.extend(describe(sql, (number, settings, captured), tables.collect()).await?);
    }
    settled.sort_by_key(|table| table.settled);
    let at = Some(Lsn::new(u64::MAX));
    for (record, number) in displaced(sql, tables, captured).await? {
        if let Some(number) = number {
            let shape = captured[number].shape.clone();
            let oids = vec![(record.oid, at)];
            let captured = Captured { record, shape };
            settled.extend(describe(sql, (number, &tables[number], &captured), oids).await?);
            continue;
        }
        // Only the settings say how to map the rows.
        let found = table::former_partitions(sql, &[record.oid]).await?;
        settled.extend(found.into_iter().map(|found| DetachedTable {
            number: 0,
            oid: found.oid,
            is_pending: false,
            is_uncaptured: true,
            settled: at,
            state: DetachedState::Unreadable {
                remedy: format!("name {} in the settings", found.name),
                name: found.name,
                why: "the table was captured, and is not in the settings".to_owned(),
            },
        }));
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

/// Finds the displaced tables: tables of this slot that have a capture record, but are not among the `captured` tables.
/// There are two kinds:
///
/// - A captured table was renamed away, and another captured table got its name. Its rows are mapped by the settings of
///   that name. The result has the index of these settings.
/// - The settings no longer name the table. The result has no index.
///
/// Nobody raises the floor of a displaced table, so nothing shows when its rows were settled.
async fn displaced(
    sql: &Sql,
    tables: &[TableSettings],
    captured: &[Captured],
) -> Result<Vec<(CaptureRecord, Option<usize>)>> {
    let Some(slot) = captured.first().map(|one| &one.record.slot) else {
        return Ok(Vec::new());
    };
    let is_captured = |record: &CaptureRecord| {
        let mut captured = captured.iter();
        captured.any(|one| one.record.identity == record.identity)
    };
    let mut records = capture_record::read(&**sql).await?;
    records.retain(|record| record.slot == *slot && !is_captured(record));
    let number = |record: &CaptureRecord| tables.iter().position(|one| one.table == record.table);
    let displaced = records.into_iter().map(|record| {
        let number = number(&record);
        (record, number)
    });
    Ok(displaced.collect())
}

/// The OIDs of the tables that [`find_all`] finds, each with the position at which it was settled.
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
        .chain(displaced.iter().map(|(record, _)| (record.oid, None)))
        .collect())
}

fn settled_of(captured: &Captured) -> impl Iterator<Item = (u32, Lsn)> {
    let unresolved = unresolved_of(captured);
    let settled = captured.record.settled.iter().map(|(oid, at)| (*oid, *at));
    settled.filter(move |(oid, _)| {
        !unresolved.contains(oid) && captured.shape.leaves().all(|leaf| leaf != *oid)
    })
}

//! Refuses a new cluster whose next transaction id is lower than the transaction ids of the rows, and says how
//! to raise the cluster's next id.

use slot_manager::table;

use crate::capture::claim;
use crate::capture::table::altered_since;
use crate::error::{Code, Error, Result};
use crate::postgres::{Snapshot, Sql, current_snapshot};
use crate::settings::Settings;
use crate::store::capture_record as captures;

/// Refuses a cluster whose transaction ids are lower than those of the rows in the tables. A new
/// cluster that was filled from a dump counts transactions from the beginning. Its new rows would look
/// older than the capture, so the relay would not publish them.
pub(super) async fn refuse_lower(sql: &Sql, settings: &Settings) -> Result<()> {
    let now = current_snapshot(&**sql).await?.xmax();
    let records = captures::read(&**sql).await?;
    let since = records.iter().filter_map(|record| record.since.as_ref());
    let mut wanted = since.map(Snapshot::xmax).max().unwrap_or_default();
    for found in claim::find_tables(sql, &settings.tables).await? {
        if found.shape.has_inserted_xid {
            let table = &found.table;
            let statement = format!(
                "select max(e.inserted_xid::text::bigint)::text from {table} e \
                 where {} and e.inserted_xid < '{IMPOSSIBLE}'::xid8",
                table::has_oid_sql(table, found.shape.oid)
            );
            let row = sql.query_one(&statement, &[]).await;
            let row = row.map_err(altered_since)?;
            let last: Option<&str> = row.get(0);
            let last: Option<u64> = last.and_then(|last| last.parse().ok());
            wanted = wanted.max(last.map_or(0, |last| last + 1));
        }
    }
    if now >= wanted {
        return Ok(());
    }
    let what = format!(
        "the next transaction of this cluster is {now}, but the tables have rows of transactions up to \
         {wanted}: new rows could not be distinguished from the old ones"
    );
    let next = next_xid_to_set(now, wanted);
    let (epoch, xid) = (next >> 32, next & u64::from(u32::MAX));
    Err(Error::new(Code::ForeignCluster, what).hint(format!(
        "stop PostgreSQL; as its user, with DATADIR as its data directory: `dd if=/dev/zero \
         of=DATADIR/pg_xact/{:04X} bs=8192 count=32` (the server does not start without this file) and \
         `pg_resetwal -e {epoch} -x {xid} DATADIR`; start it, and run this again. Without access to the \
         server's files, use up the numbers in between: `DO $$ BEGIN WHILE pg_current_xact_id() < \
         '{wanted}' LOOP COMMIT; END LOOP; END $$`",
        xid / XIDS_PER_FILE
    )))
}

/// No cluster reaches this transaction id: at 100,000 transactions per second it would need 89 years. If a
/// row has such an `inserted_xid`, somebody inserted it with an explicit value. [`refuse_lower`] ignores this value.
/// The relay uses the row's `xmin` instead (`Shape::inserted_xid_sql`).
const IMPOSSIBLE: u64 = 1 << 48;

/// How many transactions one file of `pg_xact` covers: 32 pages of 8 KiB, 2 bits each.
const XIDS_PER_FILE: u64 = 1 << 20;

/// Maximum distance by which the lower 32 bits may move at once. PostgreSQL compares transaction ids modulo
/// 2^32, and would treat an old id that is more than 2^31 away as a future id. 2^30 leaves a margin.
const FARTHEST: u64 = 1 << 30;

/// Returns the transaction id with which the cluster should continue. The id is not below `wanted`,
/// and is the first id in a file of `pg_xact` that does not exist yet.
fn next_xid_to_set(now: u64, wanted: u64) -> u64 {
    const EPOCH: u64 = 1 << 32;
    let after_now = (now / XIDS_PER_FILE + 1) * XIDS_PER_FILE;
    let next = wanted.max(after_now).next_multiple_of(XIDS_PER_FILE);
    // PostgreSQL reserves the first ids of an epoch, so skip the first file of an epoch.
    let next = if next.is_multiple_of(EPOCH) {
        next + XIDS_PER_FILE
    } else {
        next
    };
    if next.wrapping_sub(now) % EPOCH <= FARTHEST {
        return next;
    }
    // `next` is too far away. Keep the lower 32 bits just after `now`, and raise the epoch until the id is at
    // least `wanted`.
    let epochs = (next - after_now).div_ceil(EPOCH);
    let next = after_now + epochs * EPOCH;
    if next.is_multiple_of(EPOCH) {
        next + XIDS_PER_FILE
    } else {
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_transaction_id_to_set_begins_a_file_and_its_lower_32_bits_are_near() {
        const EPOCH: u64 = 1 << 32;
        for (now, wanted) in [
            (800, 801),
            (800, 5_000_000),
            (800, 3_000_000_000),
            (800, EPOCH),
            (800, 7 * EPOCH + 5),
            (3_000_000_000, 7 * EPOCH + 5),
            (EPOCH - 5, EPOCH - 2),
            (EPOCH - 5, EPOCH + 2),
            (5 * EPOCH + 900, 6 * EPOCH - 1),
        ] {
            let next = next_xid_to_set(now, wanted);
            assert!(next >= wanted && next > now, "{now} {wanted}: {next}");
            assert_eq!(next % XIDS_PER_FILE, 0);
            assert_ne!(next % EPOCH, 0);
            assert_ne!(next / XIDS_PER_FILE, now / XIDS_PER_FILE);
            let ahead = (next - now) % EPOCH;
            assert!(
                ahead <= FARTHEST + 2 * XIDS_PER_FILE,
                "{now} {wanted}: {next}"
            );
        }
    }
}

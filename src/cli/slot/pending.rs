//! Which events wait for delivery, and how old the oldest is: exact, while that is cheap.
//!
//! A row waits when its transaction is not older than those that the slot still has to stream
//! (`catalog_xmin`), and it has no known outcome: no record in the dispatch table, and the relay
//! has not vouched for it (where it does that, it may be delivered all the same, and only that
//! nothing waits is known). Rows from before the slot do not
//! count: they are never streamed. (A slot that is made while an older logical slot lags begins
//! with that one's `catalog_xmin`: until it has been read from for a while, some rows from before
//! it count too.) There is no index for this, on purpose (writers would pay for it), so that
//! tables beyond [`LARGEST_BYTES`] are not read and the answer is not known.

use std::time::Duration;

use slot_manager::{Shard, Slot};

use super::not_to_be_read;
use crate::dispatch::Resolved;
use crate::error::{Code, Result};
use crate::map::TableSettings;
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::table::TableReader;

/// Read in some 100 ms when cached; holds about half a million small events.
const LARGEST_BYTES: i64 = 128 << 20;

/// What waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pending {
    /// Events without a record.
    pub(super) events: u64,
    /// Since the oldest of them happened, by the server's clock; zero when nothing waits, absent
    /// when a table has no such column.
    pub(super) oldest: Option<Duration>,
}

const BYTES: &str = "\
    select coalesce((select sum(pg_catalog.pg_relation_size(t.relid))::bigint \
                     from pg_catalog.pg_partition_tree(c.oid) t), \
                    pg_catalog.pg_relation_size(c.oid)) \
    from pg_catalog.pg_class c where c.oid = pg_catalog.to_regclass($1)";

/// Topics need some project; here none is looked at.
const NO_PROJECT: &str = "no-project";

/// Looks at all captured tables; `None` when it would take long, or cannot be known.
pub(super) async fn look(sql: &Sql, settings: &Settings, slot: &Slot) -> Result<Option<Pending>> {
    let Some(catalog_xmin) = slot.catalog_xmin.filter(|_| slot.lag_bytes.is_some()) else {
        return Ok(None);
    };
    let mut all = Pending {
        events: 0,
        oldest: Some(Duration::ZERO),
    };
    let resolved = match Resolved::read(sql, &settings.slot).await {
        Ok(resolved) => resolved,
        Err(error) if not_to_be_read(&error) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    for table in &settings.tables {
        match look_at(sql, table, settings.shard(), catalog_xmin, &resolved).await {
            Ok(Some(one)) => {
                all.events += one.events;
                all.oldest = all.oldest.zip(one.oldest).map(|(a, b)| a.max(b));
            }
            Ok(None) => return Ok(None),
            Err(error) if is_not_to_be_known(error.code()) => return Ok(None),
            Err(error) => return Err(error),
        }
    }
    if all.events > 0 && resolved.repeats() {
        return Ok(None);
    }
    Ok(Some(all))
}

async fn look_at(
    sql: &Sql,
    settings: &TableSettings,
    shard: Option<Shard>,
    catalog_xmin: i64,
    resolved: &Resolved,
) -> Result<Option<Pending>> {
    let table = settings.table.to_string();
    let row = sql.query_opt(BYTES, &[&table]).await?;
    let bytes: Option<i64> = row.and_then(|row| row.get(0));
    if bytes.is_none_or(|bytes| bytes > LARGEST_BYTES) {
        return Ok(None);
    }
    let identity = settings.identity();
    let reader = TableReader::resolve(sql, settings, &identity, NO_PROJECT, shard).await?;
    let statement = format!(
        "select count(*), {} from {table} e where age(e.xmin) <= age($1::text::xid) and {}",
        reader.oldest_age_sql().unwrap_or("null::float8"),
        reader.lacks_outcome(resolved)
    );
    let row = sql
        .query_one(&statement, &[&catalog_xmin.to_string()])
        .await?;
    let (events, age): (i64, Option<f64>) = (row.get(0), row.get(1));
    let oldest = match (events, age) {
        (0, _) => Some(Duration::ZERO),
        // What has a time in the future has happened just now.
        (_, age) => age.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default()),
    };
    Ok(Some(Pending {
        events: events.unsigned_abs(),
        oldest,
    }))
}

/// Something is missing or wrong; `postrider check` says more.
fn is_not_to_be_known(code: Code) -> bool {
    matches!(
        code,
        Code::PublicationDrift
            | Code::ColumnMissing
            | Code::SettingInvalid
            | Code::SchemaMissing
            | Code::PrivilegeMissing
    )
}

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

use slot_manager::{Slot, quoted_identifier};

use super::not_to_be_read;
use crate::dispatch::Resolved;
use crate::error::Result;
use crate::map::TableSettings;
use crate::postgres::Sql;
use crate::settings::Settings;

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

const DESCRIPTION: &str = "\
    select coalesce((select sum(pg_catalog.pg_relation_size(t.relid))::bigint \
                     from pg_catalog.pg_partition_tree(c.oid) t), \
                    pg_catalog.pg_relation_size(c.oid)) as bytes, \
           (select a.atttypid = 'uuid'::regtype from pg_catalog.pg_attribute a \
            where a.attrelid = c.oid and a.attname = $2 and not a.attisdropped) as id_is_uuid, \
           exists (select from pg_catalog.pg_attribute a where a.attrelid = c.oid \
            and a.attname = $3 and not a.attisdropped) as has_time \
    from pg_catalog.pg_class c where c.oid = pg_catalog.to_regclass($1)";

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
        match look_at(sql, table, catalog_xmin, &resolved).await {
            Ok(Some(one)) => {
                all.events += one.events;
                all.oldest = all.oldest.zip(one.oldest).map(|(a, b)| a.max(b));
            }
            Ok(None) => return Ok(None),
            Err(error) if not_to_be_read(&error) => return Ok(None),
            Err(error) => return Err(error.into()),
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
    catalog_xmin: i64,
    resolved: &Resolved,
) -> Result<Option<Pending>, tokio_postgres::Error> {
    let id = settings.columns.id.as_deref().unwrap_or("id");
    let time = settings
        .columns
        .occurred_at
        .as_deref()
        .unwrap_or("occurred_at");
    let table = settings.table.to_string();
    let Some(row) = sql.query_opt(DESCRIPTION, &[&table, &id, &time]).await? else {
        return Ok(None);
    };
    let bytes: Option<i64> = row.get(0);
    let id_is_uuid: Option<bool> = row.get(1);
    let has_time: bool = row.get(2);
    let Some(id_is_uuid) = id_is_uuid.filter(|_| bytes.is_some_and(|n| n <= LARGEST_BYTES)) else {
        return Ok(None);
    };
    let statement = statement(settings, id, id_is_uuid, has_time.then_some(time), resolved);
    let row = sql
        .query_one(&statement, &[&catalog_xmin.to_string()])
        .await?;
    let (events, age): (i64, Option<f64>) = (row.get(0), row.get(1));
    let oldest = match (events, age) {
        (0, _) => Some(Duration::ZERO),
        (_, age) => age.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default()),
    };
    Ok(Some(Pending {
        events: events.unsigned_abs(),
        oldest,
    }))
}

/// Counts one table. Parameter: the slot's `catalog_xmin` (text).
fn statement(
    settings: &TableSettings,
    id: &str,
    id_is_uuid: bool,
    time: Option<&str>,
    resolved: &Resolved,
) -> String {
    let table = &settings.table;
    let id = format!("e.{}", quoted_identifier(id));
    let event_id = match id_is_uuid {
        true => id,
        false => {
            let name = format!("{}.{}", table.schema, table.name).replace('\'', "''");
            format!("outbox.event_uuid('{name}', {id}::text)")
        }
    };
    let age = match time {
        Some(time) => format!(
            "extract(epoch from clock_timestamp() - min(e.{}))::float8",
            quoted_identifier(time)
        ),
        None => "null::float8".to_owned(),
    };
    format!(
        "select count(*), {age} from {table} e \
         where age(e.xmin) <= age($1::text::xid) and {}",
        resolved.lacks_outcome(&event_id)
    )
}

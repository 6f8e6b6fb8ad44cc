//! The relay's own row in `outbox.relay`: a tripwire, and something for an operator to look at.
//!
//! Never a source of the position to resume from: that is the slot's alone.

use slot_manager::{Cluster, SlotName};
use tokio_postgres::types::PgLsn;

use crate::error::{Code, Error, Result};
use crate::postgres::Sql;

const SELECT: &str = "SELECT system_identifier, confirmed_lsn FROM outbox.relay WHERE slot = $1";

const TAKE: &str = "\
    INSERT INTO outbox.relay (slot, system_identifier, timeline, confirmed_lsn, instance) \
    VALUES ($1, $2, $3, $4, $5) \
    ON CONFLICT (slot) DO UPDATE SET system_identifier = excluded.system_identifier, \
        timeline = excluded.timeline, confirmed_lsn = excluded.confirmed_lsn, \
        instance = excluded.instance, since = now(), updated_at = now()";

const UPDATE: &str = "\
    UPDATE outbox.relay SET confirmed_lsn = $2, updated_at = now() WHERE slot = $1";

/// What an earlier session wrote down.
#[derive(Debug)]
pub(super) struct Recorded {
    pub(super) confirmed_lsn: Option<PgLsn>,
}

/// Reads the row, and makes sure that it was written on this cluster.
///
/// # Errors
/// `foreign-cluster`: a restored copy must not publish by accident. `schema-missing`.
pub(super) async fn read(
    sql: &Sql,
    slot: &SlotName,
    cluster: &Cluster,
) -> Result<Option<Recorded>> {
    let Some(row) = sql.query_opt(SELECT, &[&slot.as_str()]).await? else {
        return Ok(None);
    };
    let expected: String = row.get(0);
    let found = cluster.system_identifier.to_string();
    if expected != found {
        return Err(Error::new(
            Code::ForeignCluster,
            format!(
                "slot \"{slot}\" was served on cluster {expected}, and this is cluster {found}: \
                 a restored copy?"
            ),
        ));
    }
    Ok(Some(Recorded {
        confirmed_lsn: row.get(1),
    }))
}

/// Writes down that this process serves the slot from now on.
pub(super) async fn take(
    sql: &Sql,
    slot: &SlotName,
    cluster: &Cluster,
    confirmed: PgLsn,
    instance: &str,
) -> Result<()> {
    let identifier = cluster.system_identifier.to_string();
    let timeline = i32::try_from(cluster.timeline).unwrap_or(i32::MAX);
    sql.execute(
        TAKE,
        &[
            &slot.as_str(),
            &identifier,
            &timeline,
            &confirmed,
            &instance,
        ],
    )
    .await?;
    Ok(())
}

/// Writes down how far the slot is confirmed.
pub(super) async fn update(sql: &Sql, slot: &SlotName, confirmed: PgLsn) -> Result<()> {
    sql.execute(UPDATE, &[&slot.as_str(), &confirmed]).await?;
    Ok(())
}

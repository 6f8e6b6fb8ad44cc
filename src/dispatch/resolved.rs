//! Which rows of a captured table have no outcome yet: one condition for whoever looks for them.
//!
//! A row has an outcome when `outbox.dispatch` has a row of it, or when its transaction is older
//! than the one up to which the relay has vouched for everything (`outbox.relay.resolved_xid`).
//! Where published events get no row, the few that have one all the same (they were released from
//! quarantine) count as the others do: if those are sent again, so are they, since what is repeated
//! is repeated whole.

use slot_manager::SlotName;

use crate::postgres::Sql;

const SELECT: &str = "SELECT resolved_xid, exceptions_xid FROM outbox.relay WHERE slot = $1";

/// The transaction that inserted a row of `alias`, with its epoch: none is ahead of the next one,
/// nor 2^32 behind.
pub(crate) fn row_xid(alias: &str) -> String {
    // In the snapshot that a new slot exports `xmax` may be below `xmin`, and below rows that it shows:
    // those of subtransactions whose transaction was the first that the slot had to wait for
    // (`SnapBuildCommitTxn`).
    const NEXT: &str = "(select greatest(pg_catalog.pg_snapshot_xmin(s), pg_catalog.pg_snapshot_xmax(s))\
                        ::text::bigint from pg_catalog.pg_current_snapshot() s)";
    format!(
        "({NEXT} - (({NEXT} - {alias}.xmin::text::bigint) % 4294967296 + 4294967296) % 4294967296)"
    )
}

/// How far the relay of a slot has vouched, and since when published events get no row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Resolved {
    xid: Option<i64>,
    exceptions_xid: Option<i64>,
}

impl Resolved {
    /// What stands in `outbox.relay`.
    ///
    /// # Errors
    /// Those of a statement.
    pub(crate) async fn read(sql: &Sql, slot: &SlotName) -> Result<Self, tokio_postgres::Error> {
        let row = sql.query_opt(SELECT, &[&slot.as_str()]).await?;
        Ok(row.map_or_else(Self::default, |row| Self {
            xid: row.get(0),
            exceptions_xid: row.get(1),
        }))
    }

    /// Whether rows may have been published without a record.
    pub(crate) fn repeats(&self) -> bool {
        self.exceptions_xid.is_some()
    }

    /// The condition on a row of `e`: its transaction is not vouched for.
    pub(crate) fn is_recent(&self) -> String {
        match self.xid {
            Some(xid) => format!("{} >= {xid}", row_xid("e")),
            None => "true".to_owned(),
        }
    }

    /// The condition on a row of `e`, whose id in outbox.dispatch is `event_id`: it has no outcome.
    pub(crate) fn lacks_outcome(&self, event_id: &str) -> String {
        let counts = match self.exceptions_xid {
            Some(xid) => format!(
                " and not (d.state = 'published' and {} >= {xid})",
                row_xid("d")
            ),
            None => String::new(),
        };
        format!(
            "{event_id} is not null and {} and not exists (select from outbox.dispatch d \
             where d.event_id = {event_id}{counts})",
            self.is_recent()
        )
    }
}

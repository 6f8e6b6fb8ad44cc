//! `postrider recover --adopt`: decides whether this server may replace another one, and whether the
//! relay can continue with the existing slot.

use decoder::Lsn;
use slot_manager::{SlotName, slots};

use super::{Situation, preview};
use crate::capture::{Snapshot, claim, record as captures};
use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::relay::record::Recorded;
use crate::relay::recovery::loss::{self, Audit, Seen, Verdict};
use crate::settings::Settings;

/// The slot's position, if a relay that stopped there on this cluster would continue to stream.
pub(super) fn usable_from(seen: Seen<'_>) -> Option<Lsn> {
    let slot = seen.slot.filter(|slot| !slot.active)?;
    let left_here = Recorded {
        origin: seen.cluster.origin(),
        timeline: seen.cluster.timeline,
        confirmed_lsn: slot.confirmed_flush_lsn,
        confirmed_is_final: false,
        publication: Some(seen.publication.to_owned()),
        ..seen.earlier?.clone()
    };
    let verdict = loss::judge(Seen {
        earlier: Some(&left_here),
        ..seen
    });
    match verdict {
        Verdict::Stream {
            confirmed,
            audit: Audit::Continue,
        } => Some(confirmed),
        _ => None,
    }
}

/// Returns the position from which the relay continues with the slot, or `None` if it has to recover.
/// We keep the slot if every visible row has an outcome: the slot existed before we look at the rows, so
/// it brings every row that is committed later. `pg_upgrade` leads to this state if everything was
/// delivered before.
pub(super) async fn kept_from(situation: &Situation, settings: &Settings) -> Result<Option<Lsn>> {
    if !situation.is_foreign() || situation.owner.is_some() || situation.usable_from.is_none() {
        return Ok(None);
    }
    let waits = preview::any_row_waits(situation, settings).await?;
    Ok(situation.usable_from.filter(|_| !waits))
}

/// Refuses a cluster whose transaction ids are below those in the tables. A cluster that a dump was
/// restored into counts transactions from the beginning, so new rows would look older than the relay.
pub(super) async fn refuse_lower_transactions(sql: &Sql, settings: &Settings) -> Result<()> {
    let now = captures::current_snapshot(&**sql).await?.xmax();
    let records = captures::read(&**sql).await?;
    let since = records.iter().filter_map(|record| record.since.as_ref());
    let mut wanted = since.map(Snapshot::xmax).max().unwrap_or_default();
    for found in claim::look(sql, &settings.tables).await? {
        if found.shape.has_inserted_xid {
            let table = &found.table;
            let statement = format!(
                "select e.inserted_xid::text from {table} e order by e.inserted_xid desc limit 1"
            );
            let row = sql.query_opt(&statement, &[]).await?;
            let last: Option<u64> = row.and_then(|row| row.get::<_, &str>(0).parse().ok());
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
    Err(Error::new(Code::ForeignCluster, what).hint(format!(
        "stop PostgreSQL, run `pg_resetwal -e {} -x {} DATADIR`, start it, and run this again",
        wanted >> 32,
        wanted & u64::from(u32::MAX)
    )))
}

/// Refuses while a relay reads the slot that owns the tables: it would keep publishing.
pub(super) async fn refuse_a_live_owner(sql: &Sql, owner: &SlotName) -> Result<()> {
    match slots::find(sql, owner).await? {
        Some(slot) if slot.active => Err(Error::new(
            Code::SlotHeld,
            format!("slot \"{owner}\", which owns the tables, is being read"),
        )
        .hint("stop the relay that reads it first; `postrider slot list` shows who that is")),
        Some(_) | None => Ok(()),
    }
}

//! How many relays serve the database, and what happens when that number changes.
//!
//! Each layout (a number of shards, or none) has slots of its own, and leaves its rows in
//! outbox.relay when it is given up. So a relay looks at its opening whether another layout has
//! served since it did so itself: then its slot does not bring what was delivered meanwhile, and
//! the places in its part of the log mean something else. That counts as a lost slot: it begins
//! with a new one, and delivers from the tables what has no record in its share. The step from one
//! layout to the next is as safe as a recovery, and nothing else is needed for it.
//!
//! Two layouts at once would send the same events, so they are refused: each relay looks, after its
//! own slot is active, for an active one of another layout. One of two that start at the same time
//! sees the other.
//!
//! A row in quarantine belongs to the relay that its ordinal names, which only the layout knows
//! that has given it: such rows must be gone before another layout begins.

use decoder::Lsn;
use slot_manager::shard::{ROW_FILTERS_MAJOR, layout};
use slot_manager::{Cluster, Shard, SlotFamily, SlotName, SystemIdentifier, slots};
use tokio_postgres::types::{PgLsn, ToSql};

use super::{Relay, record};
use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::settings::Dispatch;

const FAMILY: &str = "\
    SELECT slot, system_identifier, (extract(epoch FROM since) * 1000000)::bigint, \
        confirmed_lsn IS NOT NULL, places_from, first_xid, resolved_xid, exceptions_xid, dispatch \
    FROM outbox.relay WHERE slot = $1 OR starts_with(slot, $1 || '_')";

/// As `record::mark_recovering` does it, with what the layout before has left. A slot that is made
/// after this stands beyond `places_from`, and so do all places that its relay gives. Until it has
/// taken its new slot it has not served, whatever it did before. Nothing is marked while the slot
/// itself, or one of another layout (`$11`), is read from.
const MARK: &str = "\
    INSERT INTO outbox.relay (slot, system_identifier, timeline, instance, recovering, \
        first_xid, resolved_xid, exceptions_xid, dispatch, places_from) \
    SELECT $1::text, $2::text, $3::int, $4::text, $5::text, \
        $6::bigint, $7::bigint, $8::bigint, $9::text, \
        least($10::pg_lsn, pg_current_wal_insert_lsn()) \
    WHERE NOT EXISTS ( \
        SELECT FROM pg_catalog.pg_replication_slots s \
        WHERE s.active AND (s.slot_name = $1::text \
            OR s.slot_name = ANY ($11::text[]) AND s.database = current_database())) \
    ON CONFLICT (slot) DO UPDATE SET instance = excluded.instance, \
        recovering = coalesce(relay.recovering, excluded.recovering), \
        first_xid = excluded.first_xid, resolved_xid = excluded.resolved_xid, \
        exceptions_xid = excluded.exceptions_xid, dispatch = excluded.dispatch, \
        places_from = excluded.places_from, confirmed_lsn = NULL, confirmed_is_final = false, \
        since = now(), updated_at = now()";

/// What stands before everything else (`FIRST_PLACE`) may be of any layout, and has no key after it
/// that is not blocked.
const IN_QUARANTINE: &str = "\
    SELECT EXISTS (SELECT FROM outbox.dispatch WHERE state IN ('quarantined', 'released') \
        AND ($1::pg_lsn IS NULL OR commit_lsn < $1 AND commit_lsn <> '0/7'))";

/// What a relay of the family has written down.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Row {
    slot: String,
    shard: Option<Shard>,
    system_identifier: String,
    /// When its last session began, in microseconds.
    since: i64,
    has_served: bool,
    places_from: Option<Lsn>,
    legacy: Legacy,
}

/// What is known of rows that were handled before, by xid: see `record` and `dispatch::resolved`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Legacy {
    pub(crate) first_xid: i64,
    pub(crate) resolved_xid: Option<i64>,
    pub(crate) exceptions_xid: Option<i64>,
    pub(crate) dispatch: Dispatch,
}

/// The layout that has served since this relay did so itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Followed {
    /// Its slots that served, and those of all layouts before.
    pub(crate) slots: Vec<SlotName>,
    /// The slot that began to serve last.
    pub(crate) last: String,
    pub(crate) legacy: Legacy,
    /// Places before this are of that layout; `None`: all are.
    pub(crate) places_from: Option<Lsn>,
}

/// What stands in outbox.relay, from the view of one relay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Before {
    /// No other layout has served since.
    SameLayout,
    OtherLayout(Box<Followed>),
    /// This relay has never served, and others have, on this cluster.
    Foreign(SystemIdentifier),
}

impl Before {
    pub(crate) fn followed(&self) -> Option<&Followed> {
        match self {
            Before::OtherLayout(followed) => Some(followed),
            Before::SameLayout | Before::Foreign(_) => None,
        }
    }
}

/// Looks what relays of this family have written down.
///
/// # Errors
/// `schema-missing`, those of a statement.
pub(crate) async fn before(sql: &Sql, family: &SlotFamily, cluster: &Cluster) -> Result<Before> {
    let base = family.base.as_str();
    let rows = sql.query(FAMILY, &[&base]).await;
    let rows = rows.map_err(record::outdated)?;
    let rows = rows.iter().filter_map(|row| {
        let slot: String = row.get(0);
        let places_from: Option<PgLsn> = row.get(4);
        Some(Row {
            shard: family.member(&slot)?,
            slot,
            system_identifier: row.get(1),
            since: row.get(2),
            has_served: row.get(3),
            places_from: places_from.map(|lsn| Lsn::new(lsn.into())),
            legacy: Legacy {
                first_xid: row.get(5),
                resolved_xid: row.get(6),
                exceptions_xid: row.get(7),
                dispatch: Dispatch::named(row.get(8)).unwrap_or(Dispatch::Exceptions),
            },
        })
    });
    let (rows, here): (Vec<Row>, _) = (rows.collect(), cluster.system_identifier);
    Ok(judge(family.shard, &rows, here))
}

/// Pure: see [`before`].
fn judge(shard: Option<Shard>, rows: &[Row], here: SystemIdentifier) -> Before {
    let is_here = |row: &&Row| row.system_identifier == here.to_string();
    let own = rows.iter().find(|row| row.shard == shard);
    if own.is_none()
        && !rows.iter().any(|row| is_here(&row))
        && let Some(elsewhere) = rows.first()
        && let Ok(identifier) = elsewhere.system_identifier.parse()
    {
        return Before::Foreign(identifier);
    }
    let of = |row: &Row| layout(row.shard);
    let own_since = own.filter(|own| own.has_served).map(|own| own.since);
    // Those of another cluster say nothing here.
    let rows: Vec<&Row> = rows.iter().filter(is_here).collect();
    let others = rows.iter().filter(|row| of(row) != layout(shard));
    let last = others
        .clone()
        .filter(|row| row.has_served)
        .max_by_key(|row| row.since);
    let Some(last) = last.filter(|last| own_since.is_none_or(|own| last.since > own)) else {
        return Before::SameLayout;
    };
    // Siblings that have followed it already say where their layout begins.
    let siblings = rows.iter().filter(|row| of(row) == layout(shard));
    let places_from = siblings
        .filter(|row| row.since > last.since)
        .filter_map(|row| row.places_from)
        .min();
    let slots = others.filter_map(|row| row.slot.parse().ok());
    Before::OtherLayout(Box::new(Followed {
        slots: slots.collect(),
        last: last.slot.clone(),
        legacy: legacy(&rows, of(last)),
        places_from,
    }))
}

/// What the layout has left, when all its relays have served; else what holds for each row of any:
/// the share of a relay that never served is as older layouts have left it.
fn legacy(rows: &[&Row], of: u32) -> Legacy {
    let mut whole: Vec<Legacy> = Vec::new();
    whole.extend(
        rows.iter()
            .filter(|row| row.has_served && layout(row.shard) == of)
            .map(|row| row.legacy),
    );
    if whole.len() < of as usize {
        whole = rows.iter().map(|row| row.legacy).collect();
    }
    let first = whole[0];
    whole.into_iter().fold(first, |a, b| Legacy {
        first_xid: a.first_xid.min(b.first_xid),
        // Unknown is less than anything.
        resolved_xid: a.resolved_xid.min(b.resolved_xid),
        exceptions_xid: match (a.exceptions_xid, b.exceptions_xid) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        },
        dispatch: match (a.dispatch, b.dispatch) {
            (Dispatch::Full, Dispatch::Full) => Dispatch::Full,
            (Dispatch::Exceptions, _) | (_, Dispatch::Exceptions) => Dispatch::Exceptions,
        },
    })
}

/// Whether the server can share events out.
///
/// # Errors
/// `postgres-version`.
pub(crate) fn is_supported(shard: Option<Shard>, cluster: &Cluster) -> Result<()> {
    let major = cluster.major_version();
    match shard {
        Some(_) if major < ROW_FILTERS_MAJOR => Err(Error::new(
            Code::PostgresVersion,
            format!("the server is PostgreSQL {major}, whose publications have no row filters"),
        )
        .hint("shards need PostgreSQL 15 or newer: leave the setting `shard` out")),
        Some(_) | None => Ok(()),
    }
}

/// Marks the slot for a recovery, as the successor of another layout.
///
/// # Errors
/// `slot-held` when the slot is read from by now, `shards-mixed` when one of another layout is: then
/// nothing is marked.
pub(super) async fn mark(
    sql: &Sql,
    relay: &Relay,
    cluster: &Cluster,
    why: &str,
    followed: &Followed,
) -> Result<()> {
    let (slot, family) = (&relay.settings.slot, &relay.settings.family);
    let (identifier, timeline) = record::names(cluster);
    let places_from = followed.places_from.map(|lsn| PgLsn::from(lsn.as_u64()));
    let legacy = &followed.legacy;
    let parameters: [&(dyn ToSql + Sync); 11] = [
        &slot.as_str(),
        &identifier,
        &timeline,
        &relay.instance,
        &why,
        &legacy.first_xid,
        &legacy.resolved_xid,
        &legacy.exceptions_xid,
        &legacy.dispatch.name(),
        &places_from,
        &family.other_layouts(),
    ];
    if sql.execute(MARK, &parameters).await? > 0 {
        return Ok(());
    }
    refuse_mixed(sql, family).await?;
    Err(record::taken(slot))
}

/// Refuses to serve beside relays of another layout.
///
/// # Errors
/// `shards-mixed`.
pub(super) async fn refuse_mixed(sql: &Sql, family: &SlotFamily) -> Result<()> {
    let slots = slots::list(sql).await?;
    let mut active = slots
        .iter()
        .filter(|slot| slot.in_this_database && slot.active);
    let other = active.find(|slot| family.is_other_layout(&slot.slot_name));
    let Some(other) = other else { return Ok(()) };
    let holder = other.holder.as_ref().map(|holder| format!(" ({holder})"));
    Err(Error::new(
        Code::ShardsMixed,
        format!(
            "slot \"{}\", of another number of shards, is being read{}: both would send the same \
             events",
            other.slot_name,
            holder.unwrap_or_default()
        ),
    ))
}

/// Refuses to open while something is in quarantine whose relay this layout cannot tell: places
/// before `places_from`, or all.
///
/// # Errors
/// `shards-quarantine`.
pub(super) async fn refuse_quarantine(sql: &Sql, places_from: Option<Lsn>) -> Result<()> {
    let from = places_from.map(|lsn| PgLsn::from(lsn.as_u64()));
    let row = sql.query_one(IN_QUARANTINE, &[&from]).await?;
    match row.get(0) {
        false => Ok(()),
        true => Err(Error::new(
            Code::ShardsQuarantine,
            "events are in quarantine that were set aside under another number of shards",
        )),
    }
}

#[cfg(test)]
mod tests;

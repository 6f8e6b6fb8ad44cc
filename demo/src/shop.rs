//! The database of the demonstration: a shop with orders.
//!
//! As in production, the relay and the services have their own roles, with only the grants that the
//! documentation asks for. The demonstration itself reads the database as the superuser.

use std::collections::BTreeMap;

use slot_manager::{Slot, SlotName, slots};

use crate::error::{Result, failed};
use crate::session::Session;
use crate::verdict::Committed;
use crate::writers::ORDERS;

/// The database's name.
pub(crate) const DATABASE: &str = "shop";
/// The role of the services.
pub(crate) const WRITER: &str = "shop";
/// The role of the relay.
pub(crate) const RELAY: &str = "relay";

const APPLICATION_NAME: &str = "postrider-demo";

/// Inspects the database in a superuser session.
#[derive(Debug)]
pub(crate) struct Shop {
    sql: Session,
    slot: SlotName,
}

impl Shop {
    /// Creates the database and the relay's role. `maintenance` is the URL of another database on
    /// the same server.
    pub(crate) async fn create(maintenance: &str) -> Result<()> {
        let sql = Session::connect(maintenance, APPLICATION_NAME).await?;
        sql.batch_execute(&format!("create role {RELAY} login replication"))
            .await?;
        sql.batch_execute(&format!("create database {DATABASE}"))
            .await?;
        Ok(())
    }

    /// Creates the business table and the role of the services, in a database that `postrider init`
    /// has prepared.
    pub(crate) async fn open(url: &str) -> Result<Self> {
        let sql = Session::connect(url, APPLICATION_NAME).await?;
        sql.batch_execute(&format!(
            "create table public.orders ( \
                 id int primary key, \
                 version bigint not null, \
                 status text not null, \
                 changed_at timestamptz not null default now() \
             ) with (fillfactor = 20); \
             insert into public.orders select id, 0, 'new' from generate_series(1, {ORDERS}) id; \
             create role {WRITER} login in role postrider_writer; \
             grant select, update on public.orders to {WRITER}"
        ))
        .await?;
        let slot = "postrider"
            .parse()
            .expect("invariant: the default slot has a valid name");
        Ok(Self { sql, slot })
    }

    /// The current state of the slot.
    pub(crate) async fn slot(&self) -> Result<Slot> {
        let slot = slots::find(&self.sql, &self.slot).await;
        let slot = slot.map_err(|e| failed("cannot read the replication slot").caused_by(e))?;
        slot.ok_or_else(|| failed("the replication slot no longer exists"))
    }

    /// The number of committed events.
    pub(crate) async fn events(&self) -> Result<u64> {
        self.count("select count(*) from outbox.events").await
    }

    /// The number of events with a dispatch row of state `published`.
    pub(crate) async fn recorded(&self) -> Result<u64> {
        self.count("select count(*) from outbox.dispatch where state = 'published'")
            .await
    }

    /// Reads the committed state from the database. The verdict compares the ledger with this
    /// state.
    pub(crate) async fn committed(&self) -> Result<Committed> {
        let mut committed = Committed::default();
        let events = "select aggregateid::int, id from outbox.events order by 1, version";
        for row in self.sql.query(events, &[]).await? {
            committed
                .events
                .entry(row.get(0))
                .or_default()
                .push(row.get(1));
        }
        let versions = self
            .sql
            .query("select id, version from public.orders", &[])
            .await?;
        committed.versions = versions
            .iter()
            .map(|row| (row.get(0), row.get(1)))
            .collect();
        committed.unrecorded = self
            .count(
                "select count(*) from outbox.events e \
                 where not exists (select from outbox.dispatch d where d.event_id = e.id)",
            )
            .await?;
        Ok(committed)
    }

    /// The number of rows in the dispatch table, by state.
    pub(crate) async fn dispatch(&self) -> Result<BTreeMap<String, u64>> {
        let states = "select state, count(*) from outbox.dispatch group by state";
        let rows = self.sql.query(states, &[]).await?;
        Ok(rows
            .iter()
            .map(|row| (row.get(0), row.get::<_, i64>(1).unsigned_abs()))
            .collect())
    }

    async fn count(&self, sql: &str) -> Result<u64> {
        let count: i64 = self.sql.query_one(sql, &[]).await?.get(0);
        Ok(count.unsigned_abs())
    }
}

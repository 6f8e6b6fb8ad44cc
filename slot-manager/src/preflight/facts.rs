//! Reads the facts that the checks need.

use std::collections::HashMap;

use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};

use super::Expectation;
use crate::shown_name::shown;
use crate::slot::get;
use crate::{Cluster, QualifiedName, Slot, SlotError, slots, sql};

/// The server settings that the checks need. Three of them do not exist in every version:
/// `reserved_connections` is new in PostgreSQL 16, `synchronized_standby_slots` in 17, and
/// `idle_replication_slot_timeout` in 18.
const SETTINGS: [&str; 10] = [
    "wal_level",
    "max_wal_senders",
    "max_replication_slots",
    "max_slot_wal_keep_size",
    "wal_sender_timeout",
    "max_connections",
    "superuser_reserved_connections",
    "reserved_connections",
    "synchronized_standby_slots",
    "idle_replication_slot_timeout",
];

/// Number of times to ask for the backend PID. Different answers prove that a pooler switches backends
/// between statements. A pooler may keep the same backend while no other client is waiting, so ask more than
/// twice.
const PID_READS: usize = 3;

#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub(super) cluster: Cluster,
    pub(super) settings: ServerSettings,
    /// The role whose privileges our statements have.
    pub(super) role: String,
    /// The role that logged in. Differs from `role` after `ALTER ROLE ... SET role`.
    pub(super) login_role: String,
    /// Whether the role that logged in may replicate.
    pub(super) may_replicate: bool,
    /// Whether `role` may drop a slot with a statement.
    pub(super) may_drop_slots: bool,
    pub(super) may_read_stats: bool,
    pub(super) connections: ConnectionLimits,
    /// Whether a session reads from the slot. The checks assume that this session is the relay's
    /// own.
    pub(super) is_read: bool,
    pub(super) wal_senders: i64,
    pub(super) slot_count: i64,
    pub(super) slots: Vec<Slot>,
    pub(super) backend_pids: Vec<i32>,
    /// Our role's rights on each table, in the order of [`Expectation::all_tables`].
    pub(super) rights: Vec<TableRights>,
}

/// Connection limits, and the number of connections that count towards each limit, without the connection that
/// reads these facts. A negative limit means no limit.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConnectionLimits {
    /// Whether the role that logged in is a superuser. The limits of the role and the database do not apply to
    /// superusers.
    pub(super) is_superuser: bool,
    pub(super) role_limit: i64,
    pub(super) of_role: i64,
    pub(super) database_limit: i64,
    pub(super) of_database: i64,
    pub(super) of_clients: i64,
}

#[derive(Debug, Clone, Default)]
pub(super) struct ServerSettings(pub(super) HashMap<String, String>);

#[derive(Debug, Clone, Copy)]
pub(super) struct TableRights {
    pub(super) exists: bool,
    pub(super) may_use_schema: bool,
    pub(super) may_select: bool,
    pub(super) may_insert: bool,
    pub(super) may_update: bool,
    /// Whether row-level security applies to the role. If so, it can hide some rows from the role.
    pub(super) hides_rows: bool,
    pub(super) is_unlogged: bool,
}

impl Facts {
    pub(super) async fn read(
        client: &Client,
        cluster: Cluster,
        expectation: &Expectation,
    ) -> Result<Self, SlotError> {
        let rows = client
            .query_typed(sql::ROLE_AND_USAGE, &[])
            .await
            .map_err(SlotError::database("reading the role's attributes"))?;
        let row = rows
            .first()
            .expect("invariant: the current role is in pg_roles");
        let slots = slots::list(client).await?;
        let is_ours = |slot: &&Slot| slot.slot_name == expectation.slot.as_str();
        Ok(Self {
            connections: ConnectionLimits {
                is_superuser: get(row, "superuser")?,
                role_limit: get(row, "role_limit")?,
                of_role: get(row, "role_connections")?,
                database_limit: get(row, "database_limit")?,
                of_database: get(row, "database_connections")?,
                of_clients: get(row, "client_connections")?,
            },
            is_read: slots.iter().find(is_ours).is_some_and(|slot| slot.active),
            cluster,
            settings: ServerSettings::read(client).await?,
            role: shown(row, "role")?.unwrap_or_default(),
            login_role: shown(row, "login_role")?.unwrap_or_default(),
            may_replicate: get(row, "may_replicate")?,
            may_drop_slots: get(row, "may_drop_slots")?,
            may_read_stats: get(row, "may_read_stats")?,
            wal_senders: get(row, "wal_senders")?,
            slot_count: get(row, "slots")?,
            slots,
            backend_pids: backend_pids(client).await?,
            rights: read_rights(client, &expectation.all_tables()).await?,
        })
    }
}

impl Expectation {
    /// The captured tables, then the dispatch table if it is used, then the relay and capture
    /// tables.
    pub(super) fn all_tables(&self) -> Vec<&QualifiedName> {
        let captured = self.tables.iter().map(|t| &t.name);
        captured
            .chain(&self.dispatch)
            .chain([&self.relay, &self.capture])
            .collect()
    }
}

impl ServerSettings {
    async fn read(client: &Client) -> Result<Self, SlotError> {
        let names: &[&str] = &SETTINGS;
        let rows = client
            .query_typed(sql::SETTINGS, &[(&names, Type::TEXT_ARRAY)])
            .await
            .map_err(SlotError::database("reading the server's settings"))?;
        let pairs = rows
            .iter()
            .map(|row| Ok((get(row, "name")?, get(row, "setting")?)));
        Ok(Self(pairs.collect::<Result<_, SlotError>>()?))
    }

    /// The value in `pg_settings`, in the setting's base unit; empty if this major version lacks
    /// the setting.
    pub(super) fn text(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    pub(super) fn number(&self, name: &str) -> Option<i64> {
        self.text(name).parse().ok()
    }
}

async fn backend_pids(client: &Client) -> Result<Vec<i32>, SlotError> {
    let mut pids = Vec::with_capacity(PID_READS);
    for _ in 0..PID_READS {
        let rows = client
            .query_typed(sql::BACKEND_PID, &[])
            .await
            .map_err(SlotError::database("asking for the server process"))?;
        for row in &rows {
            pids.push(get(row, "pg_backend_pid")?);
        }
    }
    Ok(pids)
}

async fn read_rights(
    client: &Client,
    tables: &[&QualifiedName],
) -> Result<Vec<TableRights>, SlotError> {
    let schemas: Vec<&str> = tables.iter().map(|t| t.schema.as_str()).collect();
    let names: Vec<&str> = tables.iter().map(|t| t.name.as_str()).collect();
    let parameters: [(&(dyn ToSql + Sync), Type); 2] =
        [(&schemas, Type::TEXT_ARRAY), (&names, Type::TEXT_ARRAY)];
    let rows = client
        .query_typed(sql::TABLE_RIGHTS, &parameters)
        .await
        .map_err(SlotError::database("reading the role's grants"))?;
    let rights = rows.iter().map(|row| {
        Ok(TableRights {
            exists: get(row, "exists")?,
            may_use_schema: get(row, "may_use_schema")?,
            may_select: get(row, "may_select")?,
            may_insert: get(row, "may_insert")?,
            may_update: get(row, "may_update")?,
            hides_rows: get(row, "hides_rows")?,
            is_unlogged: get(row, "is_unlogged")?,
        })
    });
    rights.collect()
}

//! Reads what the checks look at.

use std::collections::HashMap;

use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};

use super::Expectation;
use crate::slot::get;
use crate::{Cluster, Error, QualifiedName, Slot, slots, sql};

/// Settings that the checks look at; the last two only exist from 17 and 18 on.
const SETTINGS: [&str; 7] = [
    "wal_level",
    "max_wal_senders",
    "max_replication_slots",
    "max_slot_wal_keep_size",
    "wal_sender_timeout",
    "synchronized_standby_slots",
    "idle_replication_slot_timeout",
];

/// How often the server process is asked for: a pooler gives away the process between two
/// statements, though not always when nobody else wants it.
const PID_LOOKS: usize = 3;

#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub(super) cluster: Cluster,
    pub(super) settings: Settings,
    pub(super) role: String,
    pub(super) may_replicate: bool,
    pub(super) may_read_stats: bool,
    pub(super) wal_senders: i64,
    pub(super) slot_count: i64,
    pub(super) slots: Vec<Slot>,
    pub(super) backend_pids: Vec<i32>,
    /// In the order of [`Expectation::all_tables`].
    pub(super) rights: Vec<TableRights>,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Settings(pub(super) HashMap<String, String>);

#[derive(Debug, Clone, Copy)]
pub(super) struct TableRights {
    pub(super) exists: bool,
    pub(super) may_use_schema: bool,
    pub(super) may_select: bool,
    pub(super) may_insert: bool,
    pub(super) may_update: bool,
    /// Whether row-level security applies to the role.
    pub(super) hides_rows: bool,
}

impl Facts {
    pub(super) async fn read(
        client: &Client,
        cluster: Cluster,
        expectation: &Expectation,
    ) -> Result<Self, Error> {
        let rows = client
            .query_typed(sql::ROLE_AND_USAGE, &[])
            .await
            .map_err(Error::database("reading the role's attributes"))?;
        let row = rows
            .first()
            .expect("invariant: the current role is in pg_roles");
        Ok(Self {
            cluster,
            settings: Settings::read(client).await?,
            role: get(row, "role")?,
            may_replicate: get(row, "may_replicate")?,
            may_read_stats: get(row, "may_read_stats")?,
            wal_senders: get(row, "wal_senders")?,
            slot_count: get(row, "slots")?,
            slots: slots::list(client).await?,
            backend_pids: backend_pids(client).await?,
            rights: read_rights(client, &expectation.all_tables()).await?,
        })
    }
}

impl Expectation {
    /// Captured tables, then dispatch if wanted, then relay.
    pub(super) fn all_tables(&self) -> Vec<&QualifiedName> {
        let captured = self.tables.iter().map(|t| &t.name);
        captured
            .chain(&self.dispatch)
            .chain([&self.relay])
            .collect()
    }
}

impl Settings {
    async fn read(client: &Client) -> Result<Self, Error> {
        let names: &[&str] = &SETTINGS;
        let rows = client
            .query_typed(sql::SETTINGS, &[(&names, Type::TEXT_ARRAY)])
            .await
            .map_err(Error::database("reading the server's settings"))?;
        let pairs = rows
            .iter()
            .map(|row| Ok((get(row, "name")?, get(row, "setting")?)));
        Ok(Self(pairs.collect::<Result<_, Error>>()?))
    }

    /// As `pg_settings` has it, in its base unit; empty when this major lacks the setting.
    pub(super) fn text(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    pub(super) fn number(&self, name: &str) -> Option<i64> {
        self.text(name).parse().ok()
    }
}

async fn backend_pids(client: &Client) -> Result<Vec<i32>, Error> {
    let mut pids = Vec::with_capacity(PID_LOOKS);
    for _ in 0..PID_LOOKS {
        let rows = client
            .query_typed(sql::BACKEND_PID, &[])
            .await
            .map_err(Error::database("asking for the server process"))?;
        for row in &rows {
            pids.push(get(row, "pg_backend_pid")?);
        }
    }
    Ok(pids)
}

async fn read_rights(
    client: &Client,
    tables: &[&QualifiedName],
) -> Result<Vec<TableRights>, Error> {
    let schemas: Vec<&str> = tables.iter().map(|t| t.schema.as_str()).collect();
    let names: Vec<&str> = tables.iter().map(|t| t.name.as_str()).collect();
    let parameters: [(&(dyn ToSql + Sync), Type); 2] =
        [(&schemas, Type::TEXT_ARRAY), (&names, Type::TEXT_ARRAY)];
    let rows = client
        .query_typed(sql::TABLE_RIGHTS, &parameters)
        .await
        .map_err(Error::database("reading the role's grants"))?;
    let rights = rows.iter().map(|row| {
        Ok(TableRights {
            exists: get(row, "exists")?,
            may_use_schema: get(row, "may_use_schema")?,
            may_select: get(row, "may_select")?,
            may_insert: get(row, "may_insert")?,
            may_update: get(row, "may_update")?,
            hides_rows: get(row, "hides_rows")?,
        })
    });
    rights.collect()
}

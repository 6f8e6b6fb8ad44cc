//! Finds out which transactions and slots keep WAL from being removed, or delay the creation of a
//! slot.
//!
//! A slot's `restart_lsn` cannot pass the start of a transaction that was running at the confirmed
//! position. So even a reader that confirms everything keeps WAL back to the oldest of these
//! transactions. Only transactions that have written (and so have an xid) count.

use std::fmt;
use std::time::Duration;

use serde::{Serialize, Serializer};
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Row};

use crate::slot::get;
use crate::{SlotError, SlotName, sql};

/// A transaction or slot that keeps WAL.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WalHolder {
    /// Its kind.
    pub kind: WalHolderKind,
    /// Its server process; `None` for a prepared transaction, and for a slot without a reader.
    pub pid: Option<i32>,
    /// Identifier of a prepared transaction, or name of a slot.
    pub name: Option<String>,
    /// The database.
    pub database: Option<String>,
    /// The role.
    pub user: Option<String>,
    /// The application name of the client.
    pub application_name: Option<String>,
    /// How long the transaction has been open; `None` when our role may not see it.
    #[serde(rename = "age_seconds", serialize_with = "seconds")]
    pub age: Option<Duration>,
}

/// The kinds of WAL holders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum WalHolderKind {
    /// A transaction that is running a statement.
    Transaction,
    /// A transaction whose client is idle.
    IdleInTransaction,
    /// A transaction between PREPARE and COMMIT PREPARED.
    PreparedTransaction,
    /// Another slot that keeps even older WAL.
    OtherSlot,
}

impl WalHolder {
    /// What to do so that it no longer keeps WAL.
    #[must_use]
    pub fn remedy(&self) -> String {
        let name = self.name.as_deref().unwrap_or_default().replace('\'', "''");
        let pid = self.pid.unwrap_or_default();
        match self.kind {
            WalHolderKind::Transaction => {
                format!("wait for it, or `select pg_cancel_backend({pid})`")
            }
            WalHolderKind::IdleInTransaction => format!(
                "make its client commit, or `select pg_terminate_backend({pid})`; \
                 idle_in_transaction_session_timeout prevents it"
            ),
            WalHolderKind::PreparedTransaction => {
                let database = self.database.as_deref().unwrap_or("its database");
                format!("in {database}: `commit prepared '{name}'` or `rollback prepared '{name}'`")
            }
            WalHolderKind::OtherSlot => {
                let whose = match &self.database {
                    Some(database) => format!("the users of database {database}"),
                    None => "the operators of the standby servers and backups".to_owned(),
                };
                format!(
                    "ask {whose} to start its reader; only if it will never have a reader again: \
                     `select pg_drop_replication_slot('{name}')`, which works in every database"
                )
            }
        }
    }

    fn from_row(row: &Row) -> Result<Self, SlotError> {
        let age: Option<f64> = get(row, "age_seconds")?;
        Ok(Self {
            kind: match get(row, "kind")? {
                "transaction" => WalHolderKind::Transaction,
                "idle-in-transaction" => WalHolderKind::IdleInTransaction,
                "prepared-transaction" => WalHolderKind::PreparedTransaction,
                _ => WalHolderKind::OtherSlot,
            },
            pid: get(row, "pid")?,
            name: get(row, "name")?,
            database: get(row, "database")?,
            user: get(row, "user_name")?,
            application_name: get::<Option<String>>(row, "application_name")?
                .filter(|name| !name.is_empty()),
            age: age.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default()),
        })
    }
}

impl fmt::Display for WalHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            WalHolderKind::Transaction => "transaction",
            WalHolderKind::IdleInTransaction => "idle transaction",
            WalHolderKind::PreparedTransaction => "prepared transaction",
            WalHolderKind::OtherSlot => "replication slot",
        })?;
        if let Some(name) = &self.name {
            write!(f, " {name:?}")?;
        }
        match (self.kind, &self.database) {
            (WalHolderKind::PreparedTransaction | WalHolderKind::OtherSlot, Some(database)) => {
                write!(f, " of database {database}")?;
            }
            (WalHolderKind::OtherSlot, None) => f.write_str(" of no database")?,
            _ => {}
        }
        if self.kind == WalHolderKind::OtherSlot {
            f.write_str(", which keeps even older WAL")?;
        }
        match (self.kind, self.pid) {
            (WalHolderKind::OtherSlot, Some(pid)) => write!(f, ", read by server process {pid}")?,
            (WalHolderKind::OtherSlot, None) => f.write_str(", without a reader")?,
            (_, Some(pid)) => write!(f, " of server process {pid}")?,
            (_, None) => {}
        }
        if let Some(application) = &self.application_name {
            write!(f, ", application {application}")?;
        }
        if let Some(user) = &self.user {
            write!(f, ", as {user}")?;
        }
        if let Some(age) = self.age {
            write!(f, ", open for {} s", age.as_secs())?;
        }
        Ok(())
    }
}

/// Lists the holders of WAL for `slot`: transactions that have been open for at least `older_than`,
/// oldest first, then transactions whose age our role may not see, and other slots that keep older
/// WAL than `slot`.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn holders(
    client: &Client,
    slot: &SlotName,
    older_than: Duration,
) -> Result<Vec<WalHolder>, SlotError> {
    query(client, Some(slot.as_str()), older_than).await
}

/// Lists the transactions that the creation of a slot has to wait for, oldest first.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn blockers_of_creation(client: &Client) -> Result<Vec<WalHolder>, SlotError> {
    query(client, None, Duration::ZERO).await
}

async fn query(
    client: &Client,
    slot: Option<&str>,
    older_than: Duration,
) -> Result<Vec<WalHolder>, SlotError> {
    let parameters: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 2] = [
        (&slot, Type::TEXT),
        (&older_than.as_secs_f64(), Type::FLOAT8),
    ];
    let rows = client
        .query_typed(sql::RETENTION, &parameters)
        .await
        .map_err(SlotError::database("listing the holders of WAL"))?;
    rows.iter().map(WalHolder::from_row).collect()
}

fn seconds<S: Serializer>(age: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    match age {
        Some(age) => serializer.serialize_f64(age.as_secs_f64()),
        None => serializer.serialize_none(),
    }
}

//! Who keeps WAL from being removed, and makes the creation of a slot wait.
//!
//! A slot's `restart_lsn` cannot pass the start of a transaction that was running at the confirmed
//! position: a reader that confirms everything still keeps the WAL back to the oldest of them.
//! Only transactions that have written (that have an xid) count.

use std::fmt;
use std::time::Duration;

use serde::{Serialize, Serializer};
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Row};

use crate::slot::get;
use crate::{Error, SlotName, sql};

/// Something that keeps WAL.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WalHolder {
    /// What it is.
    pub kind: WalHolderKind,
    /// Its server process; absent for a prepared transaction and a slot that nobody reads.
    pub pid: Option<i32>,
    /// Identifier of a prepared transaction, or name of a slot.
    pub name: Option<String>,
    /// The database.
    pub database: Option<String>,
    /// The role.
    pub user: Option<String>,
    /// As the client names itself.
    pub application_name: Option<String>,
    /// How long the transaction has been open; absent when our role may not see it.
    #[serde(rename = "age_seconds", serialize_with = "seconds")]
    pub age: Option<Duration>,
}

/// The kinds of things that keep WAL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum WalHolderKind {
    /// A transaction at work.
    Transaction,
    /// A transaction whose client does nothing.
    IdleInTransaction,
    /// A transaction between PREPARE and COMMIT PREPARED.
    PreparedTransaction,
    /// Another slot that keeps even older WAL.
    OtherSlot,
}

impl WalHolder {
    /// What ends it.
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
                format!("`commit prepared '{name}'` or `rollback prepared '{name}'`")
            }
            WalHolderKind::OtherSlot => format!(
                "start its reader, or if it has none any more `select \
                 pg_drop_replication_slot('{name}')`"
            ),
        }
    }

    fn from_row(row: &Row) -> Result<Self, Error> {
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
        if let Some(pid) = self.pid {
            write!(f, " of server process {pid}")?;
        }
        if let Some(age) = self.age {
            write!(f, ", open for {} s", age.as_secs())?;
        }
        Ok(())
    }
}

/// Lists what keeps the WAL of `slot`, the oldest first: transactions that are open for at least
/// `older_than`, and slots that keep more than this one.
///
/// # Errors
/// [`Error::Database`].
pub async fn holders(
    client: &Client,
    slot: &SlotName,
    older_than: Duration,
) -> Result<Vec<WalHolder>, Error> {
    query(client, Some(slot.as_str()), older_than).await
}

/// Lists what a new slot has to wait for, the oldest first.
///
/// # Errors
/// [`Error::Database`].
pub async fn blockers_of_creation(client: &Client) -> Result<Vec<WalHolder>, Error> {
    query(client, None, Duration::ZERO).await
}

async fn query(
    client: &Client,
    slot: Option<&str>,
    older_than: Duration,
) -> Result<Vec<WalHolder>, Error> {
    let parameters: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 2] = [
        (&slot, Type::TEXT),
        (&older_than.as_secs_f64(), Type::FLOAT8),
    ];
    let rows = client
        .query_typed(sql::RETENTION, &parameters)
        .await
        .map_err(Error::database("listing what keeps WAL"))?;
    rows.iter().map(WalHolder::from_row).collect()
}

fn seconds<S: Serializer>(age: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    match age {
        Some(age) => serializer.serialize_f64(age.as_secs_f64()),
        None => serializer.serialize_none(),
    }
}

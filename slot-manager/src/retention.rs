//! Finds out which transactions and slots keep WAL from being removed, delay the creation of a slot, or
//! hold a lock for which a session waits.
//!
//! A slot's `restart_lsn` cannot pass the start of a transaction that was running at the confirmed
//! position. So even if the reader confirms everything, the slot keeps WAL back to the start of the
//! oldest of these transactions. A transaction without an xid, which has written nothing, does not count.

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Row};

use crate::shown_name::shown;
use crate::slot::{get, seconds};
use crate::{SlotError, SlotName, query, sql};

/// A transaction or slot that keeps WAL.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WalHolder {
    /// The kind of the holder.
    pub kind: WalHolderKind,
    /// Pid of the server process that runs the transaction or reads the slot; `None` for a prepared
    /// transaction, and for a slot without a reader.
    pub pid: Option<i32>,
    /// Identifier of the prepared transaction, or name of the slot; `None` for any other transaction.
    pub name: Option<String>,
    /// The database of the transaction or slot; `None` for a physical slot.
    pub database: Option<String>,
    /// The role that runs the transaction.
    pub user: Option<String>,
    /// The application name of the client.
    pub application_name: Option<String>,
    /// How long the transaction has been open, or how long ago it was prepared. `None` for a slot, or if our
    /// role is not allowed to see this.
    #[serde(rename = "age_seconds", serialize_with = "seconds")]
    pub age: Option<Duration>,
}

/// The kinds of WAL holders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum WalHolderKind {
    /// A transaction that is running a statement, or whose state our role is not allowed to see.
    Transaction,
    /// A transaction whose client is idle.
    IdleInTransaction,
    /// A transaction between PREPARE TRANSACTION and COMMIT PREPARED.
    PreparedTransaction,
    /// Another slot that keeps even older WAL.
    OtherSlot,
}

impl WalHolder {
    /// The action with which an operator can stop the holder from keeping WAL.
    #[must_use]
    pub fn remedy(&self) -> String {
        let name = self.name.as_deref().unwrap_or_default().replace('\'', "''");
        let pid = self.pid.unwrap_or_default();
        match self.kind {
            // Our role is not allowed to see whether this session is idle, nor to end the session.
            WalHolderKind::Transaction if self.age.is_none() => format!(
                "wait for it, or end it as a superuser: `select pg_terminate_backend({pid})`; \
                 `grant pg_read_all_stats to` our role shows what it does"
            ),
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
                if self.pid.is_some() {
                    return format!(
                        "ask {whose} why its reader confirms nothing newer; the slot belongs to them"
                    );
                }
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
            name: shown(row, "name")?,
            database: shown(row, "database")?,
            user: shown(row, "user_name")?,
            application_name: shown(row, "application_name")?.filter(|name| !name.is_empty()),
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
            (WalHolderKind::OtherSlot, None) => f.write_str(" (physical)")?,
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
        if let (WalHolderKind::Transaction | WalHolderKind::IdleInTransaction, Some(database)) =
            (self.kind, &self.database)
        {
            write!(f, " in database {database}")?;
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

/// Lists the transactions and slots that keep WAL for `slot`. First come the transactions that have been open
/// for at least `older_than`, oldest first. Then come transactions whose age our role is not allowed to see,
/// and other slots that keep older WAL than `slot`.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn holders(
    client: &Client,
    slot: &SlotName,
    older_than: Duration,
) -> Result<Vec<WalHolder>, SlotError> {
    transactions_and_slots(client, Some(slot.as_str()), older_than).await
}

/// Lists the transactions for which the creation of a slot has to wait, oldest first.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn blockers_of_creation(client: &Client) -> Result<Vec<WalHolder>, SlotError> {
    transactions_and_slots(client, None, Duration::ZERO).await
}

/// A session that waits for a lock.
#[derive(Debug, Clone, PartialEq)]
pub struct LockWait {
    /// How long the session has waited.
    pub waited: Duration,
    /// The table or index of the lock; `None` if the lock is on something else.
    pub relation: Option<String>,
    /// The transactions that hold the lock, or wait for it ahead of the session. The oldest comes first.
    pub blockers: Vec<WalHolder>,
}

impl LockWait {
    /// What to do so that the session continues.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self.blockers.first() {
            Some(blocker) => blocker.remedy(),
            None => "look for the holder of the lock in pg_locks".to_owned(),
        }
    }
}

impl fmt::Display for LockWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let relation = self.relation.as_deref();
        let relation = relation.map_or(String::new(), |name| format!(" on {name}"));
        write!(f, "waiting for a lock{relation}")?;
        for (i, blocker) in self.blockers.iter().enumerate() {
            let before = if i == 0 { ", blocked by " } else { "; " };
            write!(f, "{before}{blocker}")?;
        }
        Ok(())
    }
}

/// The lock for which the server process `pid` waits; `None` if it does not wait for a lock.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn lock_wait(client: &Client, pid: i32) -> Result<Option<LockWait>, SlotError> {
    let action = "looking for the holder of a lock";
    let rows = query::all(
        client,
        action,
        sql::activity::LOCK_WAIT,
        &[(&pid, Type::INT4)],
    )
    .await?;
    let Some(first) = rows.first() else {
        return Ok(None);
    };
    let waited: Option<f64> = get(first, "waited_seconds")?;
    let mut blockers = Vec::new();
    for row in &rows {
        let kind: Option<&str> = get(row, "kind")?;
        if kind.is_some() {
            blockers.push(WalHolder::from_row(row)?);
        }
    }
    Ok(Some(LockWait {
        waited: Duration::try_from_secs_f64(waited.unwrap_or(0.0)).unwrap_or_default(),
        relation: get(first, "relation")?,
        blockers,
    }))
}

async fn transactions_and_slots(
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

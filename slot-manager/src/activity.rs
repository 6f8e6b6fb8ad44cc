//! Sessions and locks of the server: finds sessions, terminates a relay's sessions, takes and
//! releases advisory locks, and finds out which session holds a lock.

use std::fmt;
use std::time::{Duration, SystemTime};

use tokio_postgres::types::Type;
use tokio_postgres::{Client, Row};

use crate::shown_name::shown;
use crate::slot::get;
use crate::sql::activity as sql;
use crate::{SlotError, query};

/// The known facts about the last status message that a walsender has processed. The client that reads from a
/// slot sends status messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LastReply {
    /// The walsender does not read from a slot.
    NoSlot,
    /// The walsender reads from a slot, but the time of the message is not visible, usually because our role
    /// lacks the privileges of `pg_read_all_stats`.
    Hidden,
    /// When the client sent the message, by the client's own clock.
    SentAt(SystemTime),
}

/// Finds the last status message that the walsender with pid `walsender` has processed.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn last_reply(client: &Client, walsender: i32) -> Result<LastReply, SlotError> {
    let action = "reading the last status message";
    let parameters = [(&walsender as _, Type::INT4)];
    let Some(row) = query::first(client, action, sql::LAST_REPLY, &parameters).await? else {
        return Ok(LastReply::NoSlot);
    };
    let sent_at: Option<SystemTime> = get(&row, "reply_time")?;
    Ok(sent_at.map_or(LastReply::Hidden, LastReply::SentAt))
}

/// The `application_name` of the session in which a relay polls the server every few seconds while it streams.
/// `walsender` is the pid of the relay's walsender.
///
/// [`slots`](crate::slots) finds the polling session by this name. The time of the session's last statement shows
/// whether the relay is alive. `pg_stat_replication.reply_time` does not, because it comes from the relay's clock.
#[must_use]
pub fn supervisor_name(walsender: i32) -> String {
    format!("postrider supervisor {walsender}")
}

/// Identifies a server process by its pid and start time, because pids are reused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerProcess {
    pid: i32,
    started: Option<String>,
}

/// Returns the server process of `client`'s session.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn own_process(client: &Client) -> Result<ServerProcess, SlotError> {
    let action = "asking for the server process";
    let row = query::single(client, action, sql::OWN_PROCESS, &[]).await?;
    Ok(ServerProcess {
        pid: get(&row, "pid")?,
        started: get(&row, "started")?,
    })
}

impl ServerProcess {
    /// The pid of the process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }
}

/// Whether the server process is busy: it exists, runs a statement, and does not wait for its client. Also true
/// if our role is not allowed to see the state of the process.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn is_at_work(client: &Client, process: &ServerProcess) -> Result<bool, SlotError> {
    let action = "reading the state of a server process";
    let parameters = [
        (&process.pid as _, Type::INT4),
        (&process.started as _, Type::TEXT),
    ];
    let row = query::single(client, action, sql::IS_AT_WORK, &parameters).await?;
    get(&row, "is_at_work")
}

/// If the server process waits for a synchronous standby server to confirm a commit, returns how long ago its
/// current statement began. `None` if the process waits for no standby server, or if our role is not allowed
/// to see this.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn synchronous_standby_wait(
    client: &Client,
    pid: i32,
) -> Result<Option<Duration>, SlotError> {
    let action = "finding out what a server process waits for";
    let row = query::first(
        client,
        action,
        sql::SYNCHRONOUS_STANDBY_WAIT,
        &[(&pid, Type::INT4)],
    )
    .await?;
    let Some(row) = row else { return Ok(None) };
    let waited: Option<f64> = get(&row, "waited_seconds")?;
    Ok(waited.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()))
}

/// Counts the other sessions in this database, with this application name, that may be writing.
///
/// A session of our own role counts while it runs a statement or has a transaction open. A session of another
/// role counts while it holds a lock on `table` (a quoted name), if that role is allowed to update the table.
/// So a relay that still runs with an earlier role counts, and a session whose role is not a relay's does not.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn busy_sessions(
    client: &Client,
    application_name: &str,
    table: &str,
) -> Result<i64, SlotError> {
    let action = "counting the sessions of a relay";
    let parameters = [
        (&application_name as _, Type::TEXT),
        (&table as _, Type::TEXT),
    ];
    let row = query::single(client, action, sql::BUSY_SESSIONS, &parameters).await?;
    get(&row, "sessions")
}

/// Terminates the sessions of our own role that [`busy_sessions`] counts.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn end_busy_sessions(client: &Client, application_name: &str) -> Result<(), SlotError> {
    let action = "terminating the sessions of a relay";
    let parameters = [(&application_name as _, Type::TEXT)];
    query::single(client, action, sql::END_BUSY_SESSIONS, &parameters).await?;
    Ok(())
}

/// A session whose role is neither ours nor allowed to write our tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StrangersSession {
    /// The pid of the session's server process.
    pub pid: i32,
    /// The role; `None` for a process without a role.
    pub role: Option<String>,
}

/// Finds a session in this database with this application name. The session's role must be neither ours nor
/// allowed to update `table` (a quoted name).
///
/// # Errors
/// [`SlotError::Database`].
pub async fn session_of_a_stranger(
    client: &Client,
    application_name: &str,
    table: &str,
) -> Result<Option<StrangersSession>, SlotError> {
    let action = "looking for sessions of other roles";
    let parameters = [
        (&application_name as _, Type::TEXT),
        (&table as _, Type::TEXT),
    ];
    let row = query::first(client, action, sql::SESSION_OF_A_STRANGER, &parameters).await?;
    let session = |row: Row| {
        Ok(StrangersSession {
            pid: get(&row, "pid")?,
            role: shown(&row, "role")?,
        })
    };
    row.map(session).transpose()
}

/// The holder of a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockHolder {
    /// The pid of the holder's server process; `None` for a prepared transaction.
    pub pid: Option<i32>,
    /// The role of the holder's session, if our role is allowed to see that.
    pub role: Option<String>,
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let role = self.role.as_deref().unwrap_or("?");
        match self.pid {
            Some(pid) => write!(f, "process {pid}, role {role}"),
            None => f.write_str("a prepared transaction"),
        }
    }
}

/// Takes the advisory lock with this key for our session, if no other session holds it. Returns
/// whether our session has the lock.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn try_advisory_lock(client: &Client, key: i64) -> Result<bool, SlotError> {
    let action = "taking an advisory lock";
    let parameters = [(&key as _, Type::INT8)];
    let row = query::single(client, action, sql::TRY_ADVISORY_LOCK, &parameters).await?;
    get(&row, "pg_try_advisory_lock")
}

/// Releases the advisory lock with this key.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn advisory_unlock(client: &Client, key: i64) -> Result<(), SlotError> {
    let action = "releasing an advisory lock";
    let parameters = [(&key as _, Type::INT8)];
    query::single(client, action, sql::ADVISORY_UNLOCK, &parameters).await?;
    Ok(())
}

/// Finds a session that holds the advisory lock with this key, if there is one.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn advisory_lock_holder(
    client: &Client,
    key: i64,
) -> Result<Option<LockHolder>, SlotError> {
    let parameters = [(&key as _, Type::INT8)];
    lock_holder(client, sql::ADVISORY_LOCK_HOLDER, &parameters).await
}

/// Finds the oldest transaction, other than ours, that holds a lock on the table or one of its
/// partitions. `table` is quoted as in SQL.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn table_lock_holder(
    client: &Client,
    table: &str,
) -> Result<Option<LockHolder>, SlotError> {
    let parameters = [(&table as _, Type::TEXT)];
    lock_holder(client, sql::TABLE_LOCK_HOLDER, &parameters).await
}

async fn lock_holder(
    client: &Client,
    statement: &str,
    parameters: &[query::TypedParameter<'_>],
) -> Result<Option<LockHolder>, SlotError> {
    let row = query::first(
        client,
        "looking for the holder of a lock",
        statement,
        parameters,
    );
    let holder = |row: Row| {
        Ok(LockHolder {
            pid: get(&row, "pid")?,
            role: shown(&row, "role")?,
        })
    };
    row.await?.map(holder).transpose()
}

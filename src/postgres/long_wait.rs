//! Finds out, through a second session, whether an SQL session waits for a lock or for a synchronous standby
//! server. For a lock, the error names the transactions that hold it.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use replication::Target;
use slot_manager::{activity, retention};

use super::sql::{Sql, connect};
use crate::error::{Code, Error, Result};

/// Time between two checks. It is shorter than [`LONG`], so a wait is reported soon after it has become long.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// Minimum time that a session must have waited before the wait is reported.
const LONG: Duration = Duration::from_secs(5);

/// Time limit of one check, including a new connection if one is needed.
const LOOK_LIMIT: Duration = Duration::from_secs(2);

/// The SQL session that is watched: its server, and the id of its process on that server. Empty until
/// [`WatchedSession::set`].
#[derive(Debug, Default)]
pub(crate) struct WatchedSession(Mutex<Option<(Target, i32)>>);

/// A wait of the watched session that has lasted for at least [`LONG`].
#[derive(Debug)]
pub(crate) struct LongWait {
    /// `lock-wait`, which names the lock and its holders, or `postgres-timeout` if a synchronous standby
    /// server does not answer.
    pub(crate) error: Error,
    /// When the wait began.
    pub(crate) since: Instant,
}

impl WatchedSession {
    /// Watches the session `sql` from now on.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn set(&self, sql: &Sql) -> Result<()> {
        let process = activity::own_process(sql).await?;
        let watched = (sql.target().clone(), process.pid());
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(watched);
        Ok(())
    }

    /// Finds out whether the watched session has waited for at least [`LONG`]. The check uses a second session,
    /// `looking`, which is opened here if there is none, and dropped if the check fails.
    ///
    /// # Errors
    /// A connection or database error of the second session, which says nothing about the watched session.
    pub(crate) async fn long_wait(&self, looking: &mut Option<Sql>) -> Result<Option<LongWait>> {
        let watched = self
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let Some((target, pid)) = watched else {
            return Ok(None);
        };
        let sql = looking.take();
        let look = async {
            let sql = match sql {
                Some(sql) => sql,
                None => connect(&target, "postrider", LOOK_LIMIT).await?,
            };
            let wait = find_wait(&sql, pid).await?;
            Ok::<_, Error>((sql, wait))
        };
        let looked = tokio::time::timeout(LOOK_LIMIT, look).await;
        let (sql, wait) = looked.unwrap_or_else(|_| {
            let what = "PostgreSQL does not answer";
            Err(Error::new(Code::PostgresConnectionLost, what))
        })?;
        *looking = Some(sql);
        let wait = wait.filter(|(waited, _)| *waited >= LONG);
        Ok(wait.map(|(waited, error)| LongWait {
            error,
            since: Instant::now()
                .checked_sub(waited)
                .unwrap_or_else(Instant::now),
        }))
    }
}

/// Does `work` on the session `sql`, whose statements wait for a lock for at most `limit`. If `work` fails
/// because it waited too long, the error names the lock and its holders.
///
/// # Errors
/// The error of `work`, or `lock-wait`.
pub(crate) async fn naming_locks<T>(
    sql: &Sql,
    limit: Duration,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    let pid = activity::own_process(sql).await?.pid();
    let mut looking: Option<Sql> = None;
    let mut waits_for: Option<Error> = None;
    let mut work = std::pin::pin!(work);
    loop {
        let look = async {
            tokio::time::sleep(limit / 4).await;
            let looking = match &mut looking {
                Some(looking) => looking,
                none => none.insert(connect(sql.target(), "postrider", LOOK_LIMIT).await?),
            };
            find_wait(looking, pid).await
        };
        tokio::select! {
            biased;
            done = &mut work => {
                return match (done, waits_for) {
                    (Err(error), Some(wait)) if error.code() == Code::PostgresTimeout => Err(wait),
                    (done, _) => done,
                };
            }
            looked = look => {
                // If a check fails, keep the result of the previous check.
                if let Ok(found) = looked {
                    waits_for = found.map(|(_, wait)| wait);
                }
            }
        }
    }
}

/// Like [`naming_locks`], but also sets the session's lock timeout: to `limit` while `work` runs, and to no limit
/// afterwards.
///
/// # Errors
/// The error of `work`, or `lock-wait`.
pub(crate) async fn limiting_lock_waits<T>(
    sql: &Sql,
    limit: Duration,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    sql.limit_lock_waits(limit).await?;
    let done = naming_locks(sql, limit, work).await;
    let unlimited = sql.limit_lock_waits(Duration::ZERO).await;
    let done = done?;
    unlimited?;
    Ok(done)
}

/// Returns the time that the process `pid` has waited, and an error that says for what. `None` if it does not
/// wait.
async fn find_wait(sql: &Sql, pid: i32) -> Result<Option<(Duration, Error)>> {
    if let Some(wait) = retention::lock_wait(sql, pid).await? {
        let error = Error::new(Code::LockWait, wait.to_string()).hint(wait.remedy());
        return Ok(Some((wait.waited, error)));
    }
    let wait = activity::synchronous_standby_wait(sql, pid).await?;
    Ok(wait.map(|waited| {
        let what = "a commit is waiting for a synchronous standby server, as the commits of all other \
                    sessions do";
        let hint = "start the standby servers of synchronous_standby_names, or correct that setting and \
                    reload; the relay continues automatically";
        (waited, Error::new(Code::PostgresTimeout, what).hint(hint))
    }))
}

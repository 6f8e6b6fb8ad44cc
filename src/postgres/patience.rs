//! Runs statements that may take long, and detects a dead connection without a statement timeout.
//!
//! A timeout would end a statement on a large table on every attempt. TCP keepalives do not help
//! either: a proxy may answer them while it no longer forwards anything. So we ask the server over
//! another connection whether it is still working on the statement.

use std::ops::Deref;
use std::time::Duration;

use replication::Target;
use slot_manager::activity::{self, ServerProcess};

use super::sql::{Sql, connect};
use crate::error::{Code, Error, Result};

/// Poll interval for the server process. An answer in transit arrives within this time.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// Time limit of one poll.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);

/// A session whose statements may take any amount of time.
#[derive(Debug)]
pub(crate) struct PatientSql {
    sql: Sql,
    process: ServerProcess,
}

impl Deref for PatientSql {
    type Target = Sql;

    fn deref(&self) -> &Sql {
        &self.sql
    }
}

impl PatientSql {
    /// Opens a session. A `statement_timeout` of 0 means no timeout.
    ///
    /// # Errors
    /// Errors of the connection.
    pub(crate) async fn open(
        servers: &impl AsRef<[Target]>,
        application_name: &str,
        statement_timeout: Duration,
    ) -> Result<Self> {
        let sql = connect(servers, application_name, CHECK_TIMEOUT).await?;
        let process = activity::own_process(&sql).await?;
        sql.limit_statements(statement_timeout).await?;
        Ok(Self { sql, process })
    }

    /// Waits for the result of `asking` as long as the server works on its statement. `asking` must wait
    /// only for this session.
    ///
    /// # Errors
    /// The errors of `asking`; `postgres-connection-lost` if two polls in a row show that the server no
    /// longer works on the statement, but no answer arrives.
    pub(crate) async fn answer<T, E>(&self, asking: impl Future<Output = Result<T, E>>) -> Result<T>
    where
        Error: From<E>,
    {
        let mut asking = std::pin::pin!(asking);
        let mut seen_done = false;
        loop {
            if let Ok(answer) = tokio::time::timeout(POLL_INTERVAL, &mut asking).await {
                return Ok(answer?);
            }
            // A poll that fails proves nothing about this connection.
            let is_done = matches!(self.is_at_work().await, Ok(false));
            if is_done && seen_done {
                return Err(Error::new(
                    Code::PostgresConnectionLost,
                    "PostgreSQL has answered, but the answer does not arrive",
                ));
            }
            seen_done = is_done;
        }
    }

    async fn is_at_work(&self) -> Result<bool> {
        let sql = connect(self.sql.target(), "postrider", CHECK_TIMEOUT).await?;
        Ok(activity::is_at_work(&sql, &self.process).await?)
    }
}

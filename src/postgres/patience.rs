//! Statements that may take long, on a connection that may lead nowhere.
//!
//! A limit of time would end a statement over a large table again and again. And the connection
//! itself shows nothing when a proxy on the way holds it open, though it passes nothing on any
//! more: TCP's own signs of life are the proxy's. But the server knows: asked on another connection
//! it tells whether it still works on the statement.

use std::ops::Deref;
use std::time::Duration;

use super::sql::{Sql, connect};
use super::target::Target;
use crate::error::{Code, Error, Result};

/// Between two looks at what the server does. An answer that is on its way comes within that.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);

/// Limits of a look; one that fails tells nothing.
const LOOK_TIMEOUT: Duration = Duration::from_secs(5);
const LOOK_LIMIT: Duration = Duration::from_secs(15);

/// A pid may be used again.
const WHO: &str = "\
    SELECT pid, backend_start::text FROM pg_catalog.pg_stat_activity \
    WHERE pid = pg_catalog.pg_backend_pid()";

/// Whether a server process is there that neither waits for its client nor has answered it. One that
/// shows no state counts as at work.
const IS_AT_WORK: &str = "\
    SELECT count(*) > 0 FROM pg_catalog.pg_stat_activity \
    WHERE pid = $1 AND backend_start::text IS NOT DISTINCT FROM $2 \
        AND wait_event_type IS DISTINCT FROM 'Client' AND coalesce(state, '') NOT IN \
        ('idle', 'idle in transaction', 'idle in transaction (aborted)')";

/// A session in which nothing is cut short, however long it takes or is left waiting.
#[derive(Debug)]
pub(crate) struct PatientSql {
    sql: Sql,
    target: Target,
    pid: i32,
    began: Option<String>,
}

impl Deref for PatientSql {
    type Target = Sql;

    fn deref(&self) -> &Sql {
        &self.sql
    }
}

impl PatientSql {
    /// Opens a session; `statement_timeout` may be 0, which is none.
    ///
    /// # Errors
    /// Those of the connection.
    pub(crate) async fn open(
        target: &Target,
        application_name: &str,
        statement_timeout: Duration,
    ) -> Result<Self> {
        let sql = connect(target, application_name, statement_timeout).await?;
        let who = super::answer_within(LOOK_LIMIT, sql.query_one(WHO, &[])).await?;
        Ok(Self {
            sql,
            target: target.clone(),
            pid: who.get(0),
            began: who.get(1),
        })
    }

    /// What `asking` brings of this session, as long as the server works on it. It must wait for
    /// nothing else.
    ///
    /// # Errors
    /// Those of `asking`; `postgres-connection-lost` when the server has answered, or waits for us,
    /// and nothing comes.
    pub(crate) async fn answer<T, E>(&self, asking: impl Future<Output = Result<T, E>>) -> Result<T>
    where
        Error: From<E>,
    {
        let mut asking = std::pin::pin!(asking);
        let mut seen_done = false;
        loop {
            if let Ok(answer) = tokio::time::timeout(LOOK_INTERVAL, &mut asking).await {
                return Ok(answer?);
            }
            // A look that fails tells nothing of this connection.
            let is_done = matches!(self.is_at_work().await, Ok(false));
            if is_done && seen_done {
                return Err(Error::new(
                    Code::PostgresConnectionLost,
                    "PostgreSQL has answered, and the answer does not come",
                ));
            }
            seen_done = is_done;
        }
    }

    async fn is_at_work(&self) -> Result<bool> {
        let looking = async {
            let sql = connect(&self.target, "postrider", LOOK_TIMEOUT).await?;
            let row = sql.query_one(IS_AT_WORK, &[&self.pid, &self.began]).await?;
            Ok::<_, Error>(row.get(0))
        };
        super::answer_within(LOOK_LIMIT, looking).await
    }
}

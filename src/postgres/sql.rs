//! Opens an SQL session, and says why a session could not be opened.

use std::io::ErrorKind;
use std::ops::Deref;
use std::time::Duration;

use replication::connection::{
    self, CHANNEL_BINDING_HINT, ChannelBinding, Liveness, Target, Wire, session_settings,
    transaction_timeout, unreachable,
};
use tokio::task::{AbortHandle, JoinHandle};
use tokio_postgres::config::{
    ChannelBinding as PgChannelBinding, SslMode as PgSslMode, SslNegotiation,
};
use tokio_postgres::{Client, Config};

use super::failed_servers::FailedServers;
use super::limited::{AlreadyOpen, AnswerLimit, Limited};
use crate::error::{Code, Error, LoginFor, Result};

/// TCP keepalives for SQL sessions. An idle SQL session has no liveness check of its own, so only keepalives
/// show that the other side is gone.
const LIVENESS: Liveness = Liveness {
    idle: Duration::from_secs(10),
    interval: Some((Duration::from_secs(5), 2)),
    user_timeout: Duration::from_secs(20),
};

/// An open SQL session; dropping this value closes it. The session also ends if the server owes an answer and
/// is silent for a little longer than the statement timeout.
#[derive(Debug)]
pub struct Sql {
    client: Client,
    target: Target,
    limit: AnswerLimit,
    driver: JoinHandle<()>,
    /// The task that ends the session when its connection is dead; see
    /// [`connect_patiently`](super::connect_patiently).
    watchdog: Option<JoinHandle<()>>,
}

impl Deref for Sql {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Sql {
    /// The server of this session. Sessions that must be on the same server connect to this target.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The client, which is needed to begin a transaction.
    pub fn client_mut(&mut self) -> &mut Client {
        &mut self.client
    }

    /// Switches off the session's own time limit for answers, for commands that an operator can
    /// interrupt. The server's `statement_timeout` stays in force.
    pub(crate) fn wait_without_limit(&self) {
        self.limit.set(Duration::ZERO);
    }

    /// The time limit for answers, shared with the session's stream.
    pub(super) fn answers(&self) -> &AnswerLimit {
        &self.limit
    }

    /// Returns a handle with which another task can end the session.
    pub(super) fn abort_handle(&self) -> AbortHandle {
        self.driver.abort_handle()
    }

    /// Adds a task that runs as long as the session.
    pub(super) fn watch(&mut self, watchdog: JoinHandle<()>) {
        self.watchdog = Some(watchdog);
    }

    /// Limits how long each statement waits for a lock. Zero means no limit.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn limit_lock_waits(&self, timeout: Duration) -> Result<()> {
        let statement = format!("SET lock_timeout = {}", timeout.as_millis());
        Ok(self.batch_execute(&statement).await?)
    }

    /// Makes the commits of this session return without waiting for synchronous standby servers. Otherwise a
    /// missing standby server would block the commits, and other sessions would keep seeing the old values. Use
    /// this only for values whose loss is harmless, such as progress: a failover may bring back an older value,
    /// which costs some work but loses no event.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn commit_locally(&self) -> Result<()> {
        Ok(self.batch_execute("SET synchronous_commit = local").await?)
    }

    /// Changes the statement timeout. Zero means no timeout.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn limit_statements(&self, timeout: Duration) -> Result<()> {
        let millis = timeout.as_millis();
        let statement = format!("SET statement_timeout = {millis}");
        self.batch_execute(&statement).await?;
        self.limit.set(timeout);
        Ok(())
    }
}

impl Drop for Sql {
    fn drop(&mut self) {
        self.driver.abort();
        if let Some(watchdog) = &self.watchdog {
            watchdog.abort();
        }
    }
}

/// Opens a session on the first usable server, with this `application_name` and statement timeout.
/// `servers` are the configured [`Servers`](super::Servers), or one [`Target`].
///
/// # Errors
/// `postgres-unreachable`, `postgres-tls`, `postgres-authentication`, `postgres-standby`, or the code of
/// the server's SQLSTATE.
pub async fn connect(
    servers: &impl AsRef<[Target]>,
    application_name: &str,
    statement_timeout: Duration,
) -> Result<Sql> {
    connect_to_first(servers.as_ref(), application_name, statement_timeout).await
}

async fn connect_to_first(
    targets: &[Target],
    application_name: &str,
    statement_timeout: Duration,
) -> Result<Sql> {
    let mut failed = FailedServers::default();
    for target in targets {
        match connect_to(target, application_name, statement_timeout).await {
            Ok(sql) => return Ok(sql),
            Err(error) => failed.add(error)?,
        }
    }
    Err(failed.into_error())
}

async fn connect_to(
    target: &Target,
    application_name: &str,
    statement_timeout: Duration,
) -> Result<Sql> {
    let wire = connection::open(target, LIVENESS).await?;
    let logging_in = log_in(wire, target, application_name, statement_timeout);
    connection::within_connect_timeout(target, logging_in).await
}

async fn log_in(
    wire: Wire,
    target: &Target,
    application_name: &str,
    statement_timeout: Duration,
) -> Result<Sql> {
    let mut config = config(target, application_name, statement_timeout);
    if let Some(password) = connection::password(target).await? {
        config.password(password.as_bytes());
    }
    // There is no limit for answers during the login, because `connect_timeout` limits the whole login.
    let limit = AnswerLimit::default();
    let logging_in = config.connect_raw(Limited::new(wire, limit.clone()), AlreadyOpen);
    let (client, driving) = logging_in.await.map_err(|e| refused(e, target))?;
    let version = driving.parameter("server_version").map(str::to_owned);
    let standby = driving.parameter("in_hot_standby").map(str::to_owned);
    limit.set(statement_timeout);
    let driver = tokio::spawn(async move {
        if let Err(error) = driving.await {
            log_end(&error);
        }
    });
    let sql = Sql {
        client,
        target: target.clone(),
        limit,
        driver,
        watchdog: None,
    };
    connection::refuse_a_standby(target, standby.as_deref())?;
    if transaction_timeout::exists(version.as_deref()) {
        sql.batch_execute(transaction_timeout::OFF).await?;
    }
    Ok(sql)
}

/// Logs why a session ended, because the errors of its statements only say that the session is closed.
fn log_end(error: &tokio_postgres::Error) {
    let cause = std::error::Error::source(error);
    match cause.and_then(|cause| cause.downcast_ref::<std::io::Error>()) {
        Some(silent) if silent.kind() == ErrorKind::TimedOut => {
            log_dead(&silent.to_string());
        }
        _ => tracing::debug!(%error, "an SQL session ended"),
    }
}

/// Logs that a session is closed because its server is silent.
pub(super) fn log_dead(what: &str) {
    let code = Code::PostgresConnectionLost;
    tracing::warn!(%code, hint = code.hint(), "closing an SQL session: {what}");
}

fn config(target: &Target, application_name: &str, statement_timeout: Duration) -> Config {
    let mut config = Config::new();
    config
        .user(&target.user)
        .dbname(&target.database)
        .application_name(application_name)
        .channel_binding(match target.channel_binding {
            ChannelBinding::Disable => PgChannelBinding::Disable,
            ChannelBinding::Prefer => PgChannelBinding::Prefer,
            ChannelBinding::Require => PgChannelBinding::Require,
        })
        .options(session_settings::of_sql(
            target.options.as_deref(),
            statement_timeout.as_millis(),
        ))
        // `replication` has already set up TLS on the stream. With these two settings, tokio-postgres
        // uses the stream unchanged.
        .ssl_mode(PgSslMode::Require)
        .ssl_negotiation(SslNegotiation::Direct);
    config
}

/// Returns the error for a login that failed on an open stream.
fn refused(error: tokio_postgres::Error, target: &Target) -> Error {
    if let Some(db) = error.as_db_error() {
        let (sqlstate, routine) = (db.code().code(), db.routine().unwrap_or_default());
        let what = format!("cannot log in as {target}");
        let error = Error::of_login(sqlstate, routine, db.message(), LoginFor::Sql, &what);
        return with_password_advice(error, target).for_role(&target.user, &target.database);
    }
    let is_of_the_network =
        std::error::Error::source(&error).is_some_and(|cause| cause.is::<std::io::Error>());
    if error.is_closed() || is_of_the_network {
        return Error::from(unreachable(target)).caused_by(error);
    }
    // Neither the server nor the network reported an error, so the client gave up. Possible causes: the server
    // requires a password but none is set, requires a login method that is not supported, or does not support
    // channel binding.
    let failed = Error::new(
        Code::PostgresAuthentication,
        format!("cannot log in as {target}"),
    );
    match target.channel_binding {
        ChannelBinding::Require => failed.hint(CHANNEL_BINDING_HINT).caused_by(error),
        _ => with_password_advice(failed, target).caused_by(error),
    }
}

/// Names the source of the password in the hint of a refused login.
fn with_password_advice(error: Error, target: &Target) -> Error {
    let is_refused = error.code() == Code::PostgresAuthentication;
    let advice = is_refused.then(|| connection::password_advice(target));
    match advice.flatten() {
        Some(advice) => error.hint(advice),
        None => error,
    }
}

#[cfg(test)]
mod tests;

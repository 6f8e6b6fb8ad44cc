//! An SQL session, and the reason when there is none.

use std::ops::Deref;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_postgres::config::SslMode as PgSslMode;
use tokio_postgres::{Client, Config};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::end_point;
use super::passfile::password;
use super::target::{ChannelBinding, Host, SslMode, Target};
use super::tls::client_config;
use super::transaction_timeout;
use crate::error::{Code, Error, Result};

/// How long one attempt to connect may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long data may stay unacknowledged by the peer's kernel before the connection counts as
/// dead; the sessions have no liveness check of their own.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(20);

/// An open SQL session; closes when dropped.
#[derive(Debug)]
pub struct Sql {
    client: Client,
    driver: JoinHandle<()>,
}

impl Deref for Sql {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Sql {
    /// The client, for a transaction.
    pub fn client_mut(&mut self) -> &mut Client {
        &mut self.client
    }
}

impl Drop for Sql {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Opens a session with `application_name` and a limit on each statement.
///
/// # Errors
/// `postgres-unreachable`, `postgres-tls`, `postgres-authentication`, or by SQLSTATE.
pub async fn connect(
    target: &Target,
    application_name: &str,
    statement_timeout: Duration,
) -> Result<Sql> {
    let mut config = config(target, application_name, statement_timeout);
    if let Some(password) = password(target)? {
        config.password(password.as_bytes());
    }
    let connecting = config.connect(MakeRustlsConnect::new(client_config(target)?));
    let (client, connection) = match tokio::time::timeout(CONNECT_TIMEOUT, connecting).await {
        Ok(Ok(pair)) => pair,
        Ok(Err(error)) => return Err(classify(error, target)),
        Err(_) => {
            return Err(unreachable(target).caused_by(format!("no answer in {CONNECT_TIMEOUT:?}")));
        }
    };
    let version = connection.parameter("server_version").map(str::to_owned);
    let driver = tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "an SQL session ended");
        }
    });
    let sql = Sql { client, driver };
    if transaction_timeout::exists(version.as_deref()) {
        answer_within(CONNECT_TIMEOUT, sql.batch_execute(transaction_timeout::OFF)).await?;
    }
    Ok(sql)
}

/// What `asking` brings within `limit`. The limit has to be longer than the server's own for a
/// statement: past it the connection leads nowhere, although something on the way, such as a
/// proxy, keeps it alive.
///
/// # Errors
/// Those of `asking`; `postgres-connection-lost` when the time is over.
pub(crate) async fn answer_within<T, E>(
    limit: Duration,
    asking: impl Future<Output = Result<T, E>>,
) -> Result<T>
where
    Error: From<E>,
{
    match tokio::time::timeout(limit, asking).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(Error::new(
            Code::PostgresConnectionLost,
            format!("PostgreSQL has not answered in {limit:?}"),
        )),
    }
}

fn config(target: &Target, application_name: &str, statement_timeout: Duration) -> Config {
    let mut config = Config::new();
    match &target.host {
        Host::Tcp(name) => config.host(name),
        Host::Unix(folder) => config.host_path(folder),
    };
    config
        .port(target.port)
        .user(&target.user)
        .dbname(&target.database)
        .application_name(application_name)
        .channel_binding(target.channel_binding)
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_user_timeout(TCP_USER_TIMEOUT)
        .keepalives_idle(Duration::from_secs(10))
        .keepalives_interval(Duration::from_secs(5))
        .keepalives_retries(2)
        // What a role or a database sets for its sessions must not change what is read here: without
        // `row_security=off` a policy hides rows without a word, and with it the server refuses
        // (42501); whoever looks a second time in one transaction wants to see what is new.
        .options(format!(
            "-c row_security=off -c default_transaction_isolation=read\\ committed \
             -c timezone=UTC -c datestyle=ISO -c bytea_output=hex -c synchronous_commit=on \
             -c standard_conforming_strings=on -c idle_session_timeout=0 -c tcp_keepalives_idle=10 \
             -c tcp_keepalives_interval=5 -c tcp_keepalives_count=2 -c tcp_user_timeout=0 \
             -c statement_timeout={}",
            statement_timeout.as_millis()
        ))
        .ssl_mode(match (target.may_use_tls(), target.ssl_mode) {
            (false, _) | (_, SslMode::Disable) => PgSslMode::Disable,
            (_, SslMode::Prefer) => PgSslMode::Prefer,
            (_, SslMode::Require | SslMode::VerifyCa | SslMode::VerifyFull) => PgSslMode::Require,
        });
    config
}

/// Whether an error of a stream is TLS' own, and not the network's.
pub(crate) fn is_tls(error: &std::io::Error) -> bool {
    error
        .get_ref()
        .is_some_and(|inner| inner.is::<rustls::Error>())
}

pub(crate) fn unreachable(target: &Target) -> Error {
    Error::new(
        Code::PostgresUnreachable,
        format!("cannot reach PostgreSQL as {target}"),
    )
}

/// Tells refused connections, TLS trouble and refused logins apart by type.
fn classify(error: tokio_postgres::Error, target: &Target) -> Error {
    use std::error::Error as _;
    if error.as_db_error().is_some() {
        return Error::from(error);
    }
    if error.is_closed() {
        return unreachable(target).caused_by(error);
    }
    let io = error
        .source()
        .and_then(|source| source.downcast_ref::<std::io::Error>());
    match io {
        Some(io)
            if io
                .get_ref()
                .is_some_and(|inner| inner.is::<rustls::Error>()) =>
        {
            tls_failed(target).caused_by(error)
        }
        Some(_) => unreachable(target).caused_by(error),
        // Neither the server's word nor the network's: TLS that was demanded is not offered, or
        // the server wants a password and none is set, or does not bind the login.
        None if target.channel_binding == ChannelBinding::Require => {
            login_failed(target).hint(end_point::HINT).caused_by(error)
        }
        None if matches!(target.ssl_mode, SslMode::Disable | SslMode::Prefer) => {
            login_failed(target).caused_by(error)
        }
        None => tls_failed(target).caused_by(error),
    }
}

fn login_failed(target: &Target) -> Error {
    Error::new(
        Code::PostgresAuthentication,
        format!("cannot log in as {target}"),
    )
}

fn tls_failed(target: &Target) -> Error {
    Error::new(
        Code::PostgresTls,
        format!("no TLS session with PostgreSQL as {target}"),
    )
}

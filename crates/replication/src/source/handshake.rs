//! Starts a replication session on an open byte stream: start-up, login, START_REPLICATION.
//!
//! Source: manual, "Message Flow" and "Streaming Replication Protocol".

use std::time::Duration;

use bytes::BytesMut;
use postgres_protocol::message::backend::Message;
use postgres_protocol::message::frontend;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::walsender_error::{log_notice, login_refused, lost, protocol, server_error, unexpected};
use super::{StreamOptions, quoted};
use crate::connection::{
    Duplex, Liveness, Target, Wire, refuse_a_standby, session_settings, transaction_timeout,
    within_connect_timeout,
};
use crate::error::Result;

/// Tag of CopyBothResponse, which postgres-protocol does not support.
const COPY_BOTH_TAG: u8 = b'W';
/// How long closing a session may take.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// Length in bytes of a message's tag and length field. We need it for CopyBothResponse, whose tag
/// postgres-protocol does not know.
const HEADER: usize = 5;

/// A logged-in stream, with the bytes that were read beyond the last complete message.
pub(super) struct ReplicationConnection {
    pub(super) stream: Box<dyn Duplex>,
    pub(super) buffer: BytesMut,
    /// Process id of the walsender, and the secret key with which its current command can be
    /// cancelled.
    pub(super) cancel_key: Option<(i32, i32)>,
}

/// What the server reports about itself at login.
#[derive(Debug, Default)]
struct Server {
    version: Option<String>,
    in_hot_standby: Option<String>,
}

/// Where to log in, and the name and timeout of the session.
#[derive(Debug, Clone, Copy)]
pub(super) struct Login<'a> {
    pub(super) target: &'a Target,
    pub(super) application_name: &'a str,
    pub(super) wal_sender_timeout: Duration,
}

/// TCP settings with which a dead server is noticed after the time `silence`. The operating system's default
/// time between two keepalives is good enough, because the replication protocol has keepalives of its own.
pub(super) fn liveness(silence: Duration) -> Liveness {
    Liveness {
        idle: silence,
        interval: None,
        user_timeout: silence,
    }
}

/// Logs in and starts the replication stream.
pub(super) async fn start(wire: Wire, options: &StreamOptions) -> Result<ReplicationConnection> {
    let login = Login {
        target: &options.target,
        application_name: &options.application_name,
        wal_sender_timeout: options.wal_sender_timeout,
    };
    let mut connection = log_in(wire, login).await?;
    connection.start_replication(options).await?;
    Ok(connection)
}

/// Logs in as a walsender within `connect_timeout`. The connection is then ready for replication
/// commands.
pub(super) async fn log_in(wire: Wire, login: Login<'_>) -> Result<ReplicationConnection> {
    within_connect_timeout(login.target, introduce(wire, login)).await
}

async fn introduce(wire: Wire, login: Login<'_>) -> Result<ReplicationConnection> {
    let mut connection = ReplicationConnection {
        stream: wire.stream,
        buffer: BytesMut::with_capacity(8 << 10),
        cancel_key: None,
    };
    connection.start_up(login).await?;
    connection
        .authenticate(login.target, wire.end_point)
        .await?;
    let server = connection.greeting(login.target).await?;
    refuse_a_standby(login.target, server.in_hot_standby.as_deref())?;
    if transaction_timeout::exists(server.version.as_deref()) {
        connection.set(transaction_timeout::OFF).await?;
    }
    Ok(connection)
}

impl ReplicationConnection {
    async fn start_up(&mut self, login: Login<'_>) -> Result<()> {
        let session = session_settings::of_replication(
            login.target.options.as_deref(),
            login.wal_sender_timeout.as_millis(),
        );
        let parameters = [
            ("user", login.target.user.as_str()),
            ("database", login.target.database.as_str()),
            ("replication", "database"),
            ("application_name", login.application_name),
            ("client_encoding", "UTF8"),
            ("options", session.as_str()),
        ];
        let mut message = BytesMut::new();
        frontend::startup_message(parameters, &mut message).map_err(protocol)?;
        self.send(&message).await
    }

    /// Reads what the server reports about itself, until it is ready for a command.
    async fn greeting(&mut self, target: &Target) -> Result<Server> {
        let mut server = Server::default();
        loop {
            match self.message().await? {
                Message::BackendKeyData(body) => {
                    self.cancel_key = Some((body.process_id(), body.secret_key()));
                }
                Message::ParameterStatus(body) => {
                    let value = || body.value().map(str::to_owned).map_err(protocol);
                    match body.name().map_err(protocol)? {
                        "server_version" => server.version = Some(value()?),
                        "in_hot_standby" => server.in_hot_standby = Some(value()?),
                        _ => {}
                    }
                }
                Message::ReadyForQuery(_) => return Ok(server),
                Message::ErrorResponse(body) => {
                    return Err(login_refused(body.fields(), target));
                }
                Message::NoticeResponse(_) => {}
                _ => return Err(unexpected("login")),
            }
        }
    }

    /// Runs an SQL statement that returns no rows. A walsender that is connected to a database
    /// accepts SQL.
    async fn set(&mut self, statement: &str) -> Result<()> {
        let mut message = BytesMut::new();
        frontend::query(statement, &mut message).map_err(protocol)?;
        self.send(&message).await?;
        loop {
            match self.message().await? {
                Message::ReadyForQuery(_) => return Ok(()),
                Message::CommandComplete(_) | Message::ParameterStatus(_) => {}
                Message::NoticeResponse(body) => log_notice(body.fields()),
                Message::ErrorResponse(body) => {
                    return Err(server_error(
                        body.fields(),
                        &format!("cannot run {statement}"),
                    ));
                }
                _ => return Err(unexpected("SET")),
            }
        }
    }

    async fn start_replication(&mut self, options: &StreamOptions) -> Result<()> {
        let what = format!("cannot stream from slot \"{}\"", options.slot);
        let mut message = BytesMut::new();
        frontend::query(&start_statement(options), &mut message).map_err(protocol)?;
        self.send(&message).await?;
        loop {
            while self.buffer.len() < HEADER {
                self.read_more().await?;
            }
            if self.buffer[0] == COPY_BOTH_TAG {
                return self.skip_message().await;
            }
            match self.message().await? {
                Message::ErrorResponse(body) => return Err(server_error(body.fields(), &what)),
                Message::NoticeResponse(body) => log_notice(body.fields()),
                Message::ParameterStatus(_) => {}
                _ => return Err(unexpected("START_REPLICATION")),
            }
        }
    }

    async fn skip_message(&mut self) -> Result<()> {
        let length = i32::from_be_bytes([
            self.buffer[1],
            self.buffer[2],
            self.buffer[3],
            self.buffer[4],
        ]);
        let whole = usize::try_from(length).map_err(|_| unexpected("START_REPLICATION"))? + 1;
        while self.buffer.len() < whole {
            self.read_more().await?;
        }
        drop(self.buffer.split_to(whole));
        Ok(())
    }

    pub(super) async fn message(&mut self) -> Result<Message> {
        loop {
            if let Some(message) = Message::parse(&mut self.buffer).map_err(protocol)? {
                return Ok(message);
            }
            self.read_more().await?;
        }
    }

    async fn read_more(&mut self) -> Result<()> {
        match self.stream.read_buf(&mut self.buffer).await {
            Ok(0) => Err(lost("the server closed the connection")),
            Ok(_) => Ok(()),
            Err(e) => Err(lost("reading failed").caused_by(e)),
        }
    }

    /// Ends the session and waits up to [`CLOSE_LIMIT`] until the server closes the connection. By
    /// then, the server process has released its walsender slot and its connection slot.
    pub(super) async fn close(mut self) {
        let mut message = BytesMut::new();
        frontend::terminate(&mut message);
        let closing = async {
            self.send(&message).await?;
            loop {
                self.message().await?;
            }
        };
        // Ignore the result: `closing` always ends with an error, because the server closes the connection.
        // After a timeout, the server notices on its own that the connection is gone.
        let _: Result<Result<()>, _> = tokio::time::timeout(CLOSE_LIMIT, closing).await;
    }

    pub(super) async fn send(&mut self, bytes: &[u8]) -> Result<()> {
        let sent = async {
            self.stream.write_all(bytes).await?;
            self.stream.flush().await
        };
        sent.await.map_err(|e| lost("writing failed").caused_by(e))
    }
}

/// Builds the START_REPLICATION command. It names position 0/0, so that the server starts at the
/// slot's own position. If the command named a later position, the server would obey and skip
/// changes.
fn start_statement(options: &StreamOptions) -> String {
    // `publication_names` is a list of identifiers inside a string literal, so it is quoted twice.
    let publication = quoted(&options.publication).replace('\'', "''");
    format!(
        "START_REPLICATION SLOT {} LOGICAL 0/0 \
         (proto_version '1', publication_names '{publication}')",
        quoted(&options.slot)
    )
}

//! Starts a replication session on an open byte stream: start-up, login, START_REPLICATION.
//!
//! Source: manual, "Message Flow" and "Streaming Replication Protocol".

use std::time::Duration;

use bytes::BytesMut;
use fallible_iterator::FallibleIterator;
use postgres_protocol::authentication::md5_hash;
use postgres_protocol::authentication::sasl::ScramSha256;
use postgres_protocol::message::backend::{AuthenticationSaslBody, ErrorFields, Message};
use postgres_protocol::message::frontend;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::scram::{self, Binding, Refusal};
use super::walsender_error::{
    ServerErrorFields, log_notice, lost, protocol, server_error, unexpected, with_sqlstate,
};
use super::{StreamOptions, quoted};
use crate::connection::{
    self, CHANNEL_BINDING_HINT, ChannelBinding, Duplex, Liveness, Target, Wire, refuse_a_standby,
    session_settings, transaction_timeout, within_connect_timeout,
};
use crate::error::{ErrorKind, ReplicationError, Result};

/// CopyBothResponse, which postgres-protocol does not support.
const COPY_BOTH_TAG: u8 = b'W';
/// How long closing a session may take.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// Bytes of a message header, tag and length. Used where postgres-protocol does not know the tag.
const HEADER: usize = 5;

/// A logged-in stream, with the bytes that were read past the last message.
pub(super) struct ReplicationConnection {
    pub(super) stream: Box<dyn Duplex>,
    pub(super) buffer: BytesMut,
    /// Process id of the walsender, and the secret key that cancels its current command.
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

/// TCP settings that detect a dead server after `silence`. The operating system's default interval
/// between TCP keepalives is good enough, because the protocol has keepalives of its own.
pub(super) fn liveness(silence: Duration) -> Liveness {
    Liveness {
        idle: silence,
        interval: None,
        user_timeout: silence,
    }
}

/// Logs in and starts the replication.
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

/// Logs in as a walsender, ready for replication commands, within `connect_timeout`.
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

    /// Authenticates us to the server. With SCRAM, the server also authenticates itself to us.
    async fn authenticate(&mut self, target: &Target, end_point: Option<Vec<u8>>) -> Result<()> {
        let mut has_to_be_bound = target.channel_binding == ChannelBinding::Require;
        let mut scram: Option<ScramSha256> = None;
        // Only one SASL exchange is allowed: a second one would choose its binding without knowing
        // which mechanisms the server offered in the first.
        let mut end_point = Some(end_point);
        loop {
            let mut reply = BytesMut::new();
            match self.message().await? {
                // The SCRAM exchange is not finished. Without its proof the server may be an
                // impostor.
                Message::AuthenticationOk if scram.is_some() => {
                    return Err(refused(
                        target,
                        "the server did not prove that it knows the password",
                    ));
                }
                Message::AuthenticationOk if has_to_be_bound => {
                    return Err(unbound(target));
                }
                Message::AuthenticationOk => return Ok(()),
                // Never send a password to a server that may be an impostor.
                Message::AuthenticationCleartextPassword
                | Message::AuthenticationMd5Password(_)
                    if target.channel_binding == ChannelBinding::Require =>
                {
                    return Err(unbound(target));
                }
                Message::AuthenticationCleartextPassword => {
                    plain_answer(target, &mut reply).await?;
                }
                Message::AuthenticationMd5Password(body) => {
                    md5_answer(target, body.salt(), &mut reply).await?;
                }
                Message::AuthenticationSasl(body) => {
                    let end_point = end_point.take().ok_or_else(|| unexpected("login"))?;
                    let binding = binding_for(&body, target, end_point)?;
                    has_to_be_bound &= !matches!(binding, Binding::Bound(_));
                    scram = Some(begin_scram(target, binding, &mut reply).await?);
                }
                Message::AuthenticationSaslContinue(body) => {
                    let exchange = scram.as_mut().ok_or_else(|| unexpected("login"))?;
                    let updated = exchange.update(body.data());
                    updated.map_err(|e| login_failed(target, e))?;
                    frontend::sasl_response(exchange.message(), &mut reply).map_err(protocol)?;
                }
                Message::AuthenticationSaslFinal(body) => {
                    let mut exchange = scram.take().ok_or_else(|| unexpected("login"))?;
                    let finished = exchange.finish(body.data());
                    finished.map_err(|e| login_failed(target, e))?;
                }
                Message::ErrorResponse(body) => {
                    return Err(login_refused(body.fields(), target));
                }
                Message::NoticeResponse(_) => {}
                // None of these messages may arrive before the server accepts the login.
                Message::ReadyForQuery(_)
                | Message::BackendKeyData(_)
                | Message::ParameterStatus(_) => return Err(unexpected("login")),
                _ => {
                    return Err(refused(
                        target,
                        "the server asks for an authentication method that is not supported",
                    ));
                }
            }
            if !reply.is_empty() {
                self.send(&reply).await?;
            }
        }
    }

    /// Reads what the server reports about itself, until the server is ready for a command.
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

    /// Runs a statement that returns no rows. A walsender with a database accepts SQL.
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

    /// Ends the session and waits up to [`CLOSE_LIMIT`] for the server to close the connection.
    /// Before that, the server process releases its walsender and connection slots.
    pub(super) async fn close(mut self) {
        let mut message = BytesMut::new();
        frontend::terminate(&mut message);
        let closing = async {
            self.send(&message).await?;
            loop {
                self.message().await?;
            }
        };
        // `closing` always ends in an error, because the server closes the connection. A timeout is
        // ignored as well: the server itself notices that the connection is gone.
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

/// The START_REPLICATION command. It names position 0/0, so that the server starts at the slot's own
/// position. If it named a later position, the server would obey and skip data.
fn start_statement(options: &StreamOptions) -> String {
    // `publication_names` is a list of identifiers inside a string literal, so both levels are
    // quoted.
    let publication = quoted(&options.publication).replace('\'', "''");
    format!(
        "START_REPLICATION SLOT {} LOGICAL 0/0 \
         (proto_version '1', publication_names '{publication}')",
        quoted(&options.slot)
    )
}

/// The error for an ErrorResponse during login.
fn login_refused(fields: ErrorFields<'_>, target: &Target) -> ReplicationError {
    let ServerErrorFields {
        sqlstate,
        message,
        routine,
    } = ServerErrorFields::read(fields);
    let what = cannot_log_in(target);
    let what = with_sqlstate(&what, &message, &sqlstate);
    ReplicationError::new(ErrorKind::LoginRefused { sqlstate, routine }, what)
}

/// Begins the SCRAM exchange, and puts its first message into `reply`.
async fn begin_scram(
    target: &Target,
    binding: Binding,
    reply: &mut BytesMut,
) -> Result<ScramSha256> {
    let mechanism = binding.mechanism();
    let password = password(target).await?;
    let exchange = ScramSha256::new(password.as_bytes(), binding.into());
    frontend::sasl_initial_response(mechanism, exchange.message(), reply).map_err(protocol)?;
    Ok(exchange)
}

/// Chooses how to bind the SCRAM exchange to the TLS channel, from the offered mechanisms.
fn binding_for(
    body: &AuthenticationSaslBody,
    target: &Target,
    end_point: Option<Vec<u8>>,
) -> Result<Binding> {
    let offered = body.mechanisms().map(|name| Ok(name.to_owned()));
    let offered: Vec<String> = offered.collect().map_err(protocol)?;
    let chosen = scram::choose(&offered, end_point, target.channel_binding);
    chosen.map_err(|refusal| match refusal {
        Refusal::Unbound => unbound(target),
        Refusal::NoScram => refused(target, "the server offers no SCRAM-SHA-256"),
    })
}

/// Writes the answer to a request for the plain password into `reply`.
async fn plain_answer(target: &Target, reply: &mut BytesMut) -> Result<()> {
    let password = password(target).await?;
    frontend::password_message(password.as_bytes(), reply).map_err(protocol)
}

/// Writes the answer to a request for the password's MD5 hash into `reply`.
async fn md5_answer(target: &Target, salt: [u8; 4], reply: &mut BytesMut) -> Result<()> {
    let password = password(target).await?;
    let hash = md5_hash(target.user.as_bytes(), password.as_bytes(), salt);
    frontend::password_message(hash.as_bytes(), reply).map_err(protocol)
}

async fn password(target: &Target) -> Result<String> {
    connection::password(target)
        .await?
        .ok_or_else(|| refused(target, "the server asks for a password and none is set"))
}

fn cannot_log_in(target: &Target) -> String {
    format!("cannot log in as {target}")
}

fn refused(target: &Target, why: &str) -> ReplicationError {
    let what = format!("{}: {why}", cannot_log_in(target));
    ReplicationError::new(ErrorKind::Authentication, what)
}

fn unbound(target: &Target) -> ReplicationError {
    let why = "channel_binding=require, and the login cannot be bound to the TLS channel";
    refused(target, why).hint(CHANNEL_BINDING_HINT)
}

fn login_failed(target: &Target, error: std::io::Error) -> ReplicationError {
    refused(target, "SCRAM failed").caused_by(error)
}

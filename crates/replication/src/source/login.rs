//! Logs in: answers the server's requests for authentication.

use bytes::BytesMut;
use fallible_iterator::FallibleIterator;
use postgres_protocol::authentication::md5_hash;
use postgres_protocol::authentication::sasl::ScramSha256;
use postgres_protocol::message::backend::{AuthenticationSaslBody, Message};
use postgres_protocol::message::frontend;

use super::handshake::ReplicationConnection;
use super::scram::{self, Binding, Refusal};
use super::walsender_error::{cannot_log_in, login_refused, protocol, unexpected};
use crate::connection::{self, CHANNEL_BINDING_HINT, ChannelBinding, Target};
use crate::error::{ErrorKind, ReplicationError, Result};

impl ReplicationConnection {
    /// Authenticates us to the server. With SCRAM, the server also authenticates itself to us.
    pub(super) async fn authenticate(
        &mut self,
        target: &Target,
        end_point: Option<Vec<u8>>,
    ) -> Result<()> {
        let mut has_to_be_bound = target.channel_binding == ChannelBinding::Require;
        let mut scram: Option<ScramSha256> = None;
        // Allow only one SASL exchange. A second exchange would choose its channel binding without
        // knowing which mechanisms the server offered in the first.
        let mut end_point = Some(end_point);
        loop {
            let mut reply = BytesMut::new();
            match self.message().await? {
                // The SCRAM exchange is not finished, so the server has not proved its identity and
                // may be an impostor.
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
                // The login cannot be bound with these two methods. Without the binding, the server may be an
                // impostor, so do not send it the password.
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
                Message::NoticeResponse(_) => {}
                other => return Err(not_a_login(&other, target)),
            }
            if !reply.is_empty() {
                self.send(&reply).await?;
            }
        }
    }
}

/// Returns the error for a message after which no login can continue.
fn not_a_login(message: &Message, target: &Target) -> ReplicationError {
    match message {
        Message::ErrorResponse(body) => login_refused(body.fields(), target),
        // None of these messages may arrive before the server accepts the login.
        Message::ReadyForQuery(_) | Message::BackendKeyData(_) | Message::ParameterStatus(_) => {
            unexpected("login")
        }
        _ => refused(
            target,
            "the server asks for an authentication method that is not supported",
        ),
    }
}

/// Begins the SCRAM exchange, and puts our first message of it into `reply`.
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

/// Chooses from the offered mechanisms how to bind the SCRAM exchange to the TLS channel.
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

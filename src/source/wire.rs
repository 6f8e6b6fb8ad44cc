//! The byte stream to the server: TCP or Unix socket, with TLS when `sslmode` wants it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use postgres_protocol::message::frontend;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

use crate::error::{Code, Error, Result};
use crate::postgres::{Host, SslMode, Target, client_config, end_point, is_tls, unreachable};

/// A stream in both directions, whatever it runs over.
pub(super) trait Duplex: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Duplex for T {}

/// An open stream.
pub(super) struct Wire {
    pub(super) stream: Box<dyn Duplex>,
    /// What the login over it can be bound to, if anything.
    pub(super) end_point: Option<Vec<u8>>,
}

impl Wire {
    fn plain(stream: impl Duplex + 'static) -> Self {
        Self {
            stream: Box::new(stream),
            end_point: None,
        }
    }
}

/// Opens the stream; after `user_timeout` without an acknowledgement by the peer's kernel a
/// write fails, so that a dead peer is noticed also while nothing is read.
///
/// # Errors
/// `postgres-unreachable`, `postgres-tls`.
pub(super) async fn open(target: &Target, user_timeout: Duration) -> Result<Wire> {
    let unreachable = |e: io::Error| unreachable(target).caused_by(e);
    let host = match &target.host {
        Host::Unix(folder) => {
            let path = folder.join(format!(".s.PGSQL.{}", target.port));
            let stream = UnixStream::connect(path).await.map_err(unreachable)?;
            return Ok(Wire::plain(stream));
        }
        Host::Tcp(host) => host,
    };
    let stream = TcpStream::connect((host.as_str(), target.port))
        .await
        .map_err(unreachable)?;
    stream.set_nodelay(true).map_err(unreachable)?;
    let socket = socket2::SockRef::from(&stream);
    #[cfg(target_os = "linux")]
    socket
        .set_tcp_user_timeout(Some(user_timeout))
        .map_err(unreachable)?;
    socket
        .set_tcp_keepalive(&socket2::TcpKeepalive::new().with_time(user_timeout))
        .map_err(unreachable)?;
    if target.may_use_tls() {
        return encrypt(stream, host, target).await;
    }
    Ok(Wire::plain(stream))
}

/// Asks the server for TLS (source: manual, "SSL Session Encryption").
async fn encrypt(mut stream: TcpStream, host: &str, target: &Target) -> Result<Wire> {
    let failed = |what: &str| Error::new(Code::PostgresTls, format!("{what} as {target}"));
    let mut request = BytesMut::new();
    frontend::ssl_request(&mut request);
    let answer = async {
        stream.write_all(&request).await?;
        stream.read_u8().await
    };
    match answer.await.map_err(|e| unreachable(target).caused_by(e))? {
        b'S' => {}
        b'N' if target.ssl_mode == SslMode::Prefer => return Ok(Wire::plain(stream)),
        b'N' => return Err(failed("the server offers no TLS")),
        // An ErrorResponse of a server that could not start a process for us.
        b'E' => return Err(unreachable(target)),
        _ => return Err(failed("no PostgreSQL server answers")),
    }
    let name =
        ServerName::try_from(host.to_owned()).map_err(|e| failed("no TLS session").caused_by(e))?;
    let connector = TlsConnector::from(Arc::new(client_config(target)?));
    let stream = connector
        .connect(name, stream)
        .await
        .map_err(|e| match is_tls(&e) {
            true => failed("no TLS session").caused_by(e),
            false => unreachable(target).caused_by(e),
        })?;
    let certificates = stream.get_ref().1.peer_certificates();
    let end_point = certificates.and_then(|chain| end_point::of(chain.first()?));
    Ok(Wire {
        stream: Box::new(stream),
        end_point,
    })
}

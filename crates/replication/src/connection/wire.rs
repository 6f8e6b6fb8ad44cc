//! Opens the byte stream to the server, for replication and SQL sessions: over TCP or a Unix socket. `sslmode`
//! decides whether the stream uses TLS.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::BytesMut;
use postgres_protocol::message::frontend;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

use super::channel_binding::ChannelBinding;
use super::target::{Host, SslMode, Target};
use super::{end_point, tls};
use crate::LOG_TARGET;
use crate::error::{ErrorKind, ReplicationError, Result};

/// A stream in both directions, over TCP, TLS or a Unix socket.
pub(crate) trait Duplex: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Duplex for T {}

/// An open byte stream to the server.
pub struct Wire {
    pub(crate) stream: Box<dyn Duplex>,
    pub(crate) end_point: Option<Vec<u8>>,
}

impl Wire {
    /// The hash for channel binding (`tls-server-end-point`), if the login can be bound to this
    /// stream.
    pub fn end_point(&self) -> Option<&[u8]> {
        self.end_point.as_deref()
    }

    fn plain(stream: impl Duplex + 'static) -> Self {
        Self {
            stream: Box::new(stream),
            end_point: None,
        }
    }
}

/// When a silent connection counts as dead. The operator's connection parameters override these
/// values.
#[derive(Debug, Clone, Copy)]
pub struct Liveness {
    /// Idle time on the connection before the first keepalive.
    pub idle: Duration,
    /// Time between two keepalives, and how many of them may stay unanswered. `None` means the
    /// operating system's values.
    pub interval: Option<(Duration, u32)>,
    /// A write fails if the peer's kernel does not acknowledge the sent data for this long. So a dead peer
    /// is noticed even while we read nothing.
    pub user_timeout: Duration,
}

/// Opens the stream. If a host name has several addresses, they are tried one after the other, as
/// in libpq, until one can be reached. Each attempt may take up to `connect_timeout`.
///
/// # Errors
/// `Unreachable`, `Tls`.
pub async fn open(target: &Target, liveness: Liveness) -> Result<Wire> {
    let host = match &target.host {
        Host::Unix(folder) => return within_connect_timeout(target, unix(folder, target)).await,
        Host::Tcp(host) => host,
    };
    let addresses = within_connect_timeout(target, addresses(host, target)).await?;
    first_of(&addresses, host, target, liveness).await
}

/// Opens a stream to the first address that can be reached.
async fn first_of(
    addresses: &[SocketAddr],
    host: &str,
    target: &Target,
    liveness: Liveness,
) -> Result<Wire> {
    let mut failed = unreachable(target);
    for &address in addresses {
        let opening = connect(host, address, target, liveness);
        match within_connect_timeout(target, opening).await {
            Err(error) if *error.kind() == ErrorKind::Unreachable => failed = error,
            opened => return opened,
        }
    }
    Err(failed)
}

/// Runs `step` and returns its result. `step` may take up to `connect_timeout`.
///
/// # Errors
/// `Unreachable` if `step` takes longer, and the errors of `step`.
pub async fn within_connect_timeout<T, E: From<ReplicationError>>(
    target: &Target,
    step: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    let limit = target.connect_timeout;
    match tokio::time::timeout(limit, step).await {
        Ok(done) => done,
        Err(_) => Err(unreachable(target)
            .caused_by(format!("no answer in {limit:?}"))
            .into()),
    }
}

async fn unix(folder: &Path, target: &Target) -> Result<Wire> {
    let path = folder.join(format!(".s.PGSQL.{}", target.port));
    let stream = UnixStream::connect(path).await;
    let stream = stream.map_err(|e| unreachable(target).caused_by(e))?;
    Ok(Wire::plain(stream))
}

/// Resolves the host's name to its addresses.
async fn addresses(host: &str, target: &Target) -> Result<Vec<SocketAddr>> {
    if let Some(address) = target.host_addr {
        return Ok(vec![(address, target.port).into()]);
    }
    let found = tokio::net::lookup_host((host, target.port)).await;
    Ok(found
        .map_err(|e| unreachable(target).caused_by(e))?
        .collect())
}

async fn connect(
    host: &str,
    address: SocketAddr,
    target: &Target,
    liveness: Liveness,
) -> Result<Wire> {
    let unreachable = |e: io::Error| unreachable(target).caused_by(e);
    let connecting = || tcp(address, target, liveness);
    let stream = connecting().await.map_err(unreachable)?;
    if !target.may_use_tls() {
        return Ok(Wire::plain(stream));
    }
    // Read the TLS files before the handshake, so that an unreadable file is an error. If the file made the
    // handshake fail instead, the connection could fall back to plain text.
    let connector = TlsConnector::from(Arc::new(tls::client_config(target)?));
    let may_be_plain =
        target.ssl_mode == SslMode::Prefer && target.channel_binding != ChannelBinding::Require;
    match encrypt(stream, host, connector, target).await {
        // As in libpq, sslmode=prefer falls back to plain text if the TLS handshake fails.
        Err(error) if *error.kind() == ErrorKind::Tls && may_be_plain => {
            let why = error.with_cause();
            // The operator can look this code up: `postrider explain postgres-tls`.
            tracing::warn!(
                target: LOG_TARGET, code = "postgres-tls",
                "{why}; continuing without TLS, as sslmode=prefer allows"
            );
            Ok(Wire::plain(connecting().await.map_err(unreachable)?))
        }
        opened => opened,
    }
}

async fn tcp(address: SocketAddr, target: &Target, liveness: Liveness) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    keep_alive(&stream, target, liveness)?;
    Ok(stream)
}

fn keep_alive(stream: &TcpStream, target: &Target, liveness: Liveness) -> io::Result<()> {
    let socket = socket2::SockRef::from(stream);
    let asked = target.keepalives;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(asked.user_timeout.unwrap_or(liveness.user_timeout)))?;
    if !asked.enabled {
        return socket.set_keepalive(false);
    }
    let idle = asked.idle.unwrap_or(liveness.idle);
    let mut keepalive = socket2::TcpKeepalive::new().with_time(idle);
    let (interval, count) = liveness.interval.unzip();
    if let Some(interval) = asked.interval.or(interval) {
        keepalive = keepalive.with_interval(interval);
    }
    if let Some(count) = asked.count.or(count) {
        keepalive = keepalive.with_retries(count);
    }
    socket.set_tcp_keepalive(&keepalive)
}

/// Asks the server for TLS, and performs the TLS handshake (source: manual, "SSL Session
/// Encryption").
async fn encrypt(
    mut stream: TcpStream,
    host: &str,
    connector: TlsConnector,
    target: &Target,
) -> Result<Wire> {
    let mut request = BytesMut::new();
    frontend::ssl_request(&mut request);
    let answer = async {
        stream.write_all(&request).await?;
        stream.read_u8().await
    };
    match answer.await.map_err(|e| unreachable(target).caused_by(e))? {
        b'S' => {}
        b'N' if target.ssl_mode == SslMode::Prefer => return Ok(Wire::plain(stream)),
        b'N' => {
            return Err(tls::failed(target, "the server offers no TLS").hint(
                "turn on `ssl` in the server; on the same machine you can use sslmode=prefer",
            ));
        }
        // The server sends an ErrorResponse if it could not start a process for the session.
        b'E' => return Err(unreachable(target)),
        _ => return Err(tls::failed(target, "no PostgreSQL server answers")),
    }
    let name = tls::server_name(host, target)?;
    let stream = connector.connect(name, stream).await;
    let stream = stream.map_err(|e| match tls::of_io(&e) {
        Some(of_tls) => tls::explain(of_tls, target),
        None => unreachable(target).caused_by(e),
    })?;
    let certificates = stream.get_ref().1.peer_certificates();
    let end_point = certificates.and_then(|chain| end_point::of(chain.first()?));
    Ok(Wire {
        stream: Box::new(stream),
        end_point,
    })
}

/// Builds the error for a server that cannot be reached.
pub fn unreachable(target: &Target) -> ReplicationError {
    ReplicationError::new(
        ErrorKind::Unreachable,
        format!("cannot reach PostgreSQL as {target}"),
    )
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use tokio::net::TcpListener;

    use super::*;
    use crate::environment::Environment;

    const OURS: Liveness = Liveness {
        idle: Duration::from_secs(10),
        interval: Some((Duration::from_secs(5), 2)),
        user_timeout: Duration::from_secs(20),
    };

    fn target(url: &str) -> Target {
        let found = Target::from_settings(url, &Environment::default());
        found.unwrap().unwrap()
    }

    #[tokio::test]
    async fn keepalives_have_defaults_that_the_operator_can_override() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let base = format!("postgres://u@127.0.0.1:{port}/d");
        let asked = format!(
            "{base}?keepalives_idle=7&keepalives_interval=3&keepalives_count=4&tcp_user_timeout=9000"
        );
        for (url, idle, interval, count, user_timeout) in
            [(&base, 10, 5, 2, 20), (&asked, 7, 3, 4, 9)]
        {
            let address = listener.local_addr().unwrap();
            let stream = tcp(address, &target(url), OURS).await.unwrap();
            let socket = socket2::SockRef::from(&stream);
            let seconds = |n| Duration::from_secs(n);
            assert_eq!(socket.tcp_keepalive_time().unwrap(), seconds(idle));
            assert_eq!(socket.tcp_keepalive_interval().unwrap(), seconds(interval));
            assert_eq!(socket.tcp_keepalive_retries().unwrap(), count);
            #[cfg(target_os = "linux")]
            assert_eq!(
                socket.tcp_user_timeout().unwrap(),
                Some(seconds(user_timeout))
            );
        }
        let off = target(&format!("{base}?keepalives=0"));
        let address = listener.local_addr().unwrap();
        let stream = tcp(address, &off, OURS).await.unwrap();
        assert!(!socket2::SockRef::from(&stream).keepalive().unwrap());
    }

    #[tokio::test]
    async fn a_silent_address_leaves_the_next_one_its_whole_connect_timeout() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let slow = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addresses = [silent.local_addr().unwrap(), slow.local_addr().unwrap()];
        tokio::spawn(async move {
            let (mut stream, _) = slow.accept().await.unwrap();
            tokio::time::sleep(Duration::from_secs(1)).await;
            stream.write_all(b"N").await.unwrap();
            std::future::pending::<()>().await;
        });
        let target = target("postgres://u@localhost/d?connect_timeout=2&sslmode=prefer");
        let opened = first_of(&addresses, "localhost", &target, OURS).await;
        assert!(opened.is_ok());
        let opened = first_of(&addresses[..1], "localhost", &target, OURS).await;
        assert_eq!(opened.err().unwrap().kind(), &ErrorKind::Unreachable);
        let opened = first_of(&[], "localhost", &target, OURS).await;
        assert_eq!(opened.err().unwrap().kind(), &ErrorKind::Unreachable);
    }

    #[tokio::test]
    async fn connecting_to_a_silent_server_ends_after_connect_timeout() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let url = format!("postgres://u@127.0.0.1:{port}/d?connect_timeout=2");
        let began = Instant::now();
        let Err(error) = open(&target(&url), OURS).await else {
            panic!("nobody answers there");
        };
        assert_eq!(error.kind(), &ErrorKind::Unreachable);
        assert!((2..6).contains(&began.elapsed().as_secs()));
    }
}

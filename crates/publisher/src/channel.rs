//! A channel to Pub/Sub: a connection that is opened on first use, and opened again after it broke.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper_util::client::legacy::connect::HttpConnector;
use rustls::pki_types::ServerName;
use tokio::sync::Mutex;
use tokio_rustls::TlsConnector;
use tonic::Status;
use tonic::codegen::http::Uri;
use tonic::codegen::{Service, StdError};

use super::connection::PublishConnection;
use super::gathering::Gathering;

/// The protocol that we request in the TLS handshake, because Pub/Sub also speaks HTTP/1.1.
pub(super) const HTTP_2: &[u8] = b"h2";

/// The destination of a channel, and the way to connect to it.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) url: Uri,
    pub(super) tcp: HttpConnector,
    /// `None` for plain text.
    pub(super) tls: Option<Tls>,
    /// How long opening may take, including name resolution and TLS.
    pub(super) timeout: Duration,
}

/// The TLS configuration, and the name that the server's certificate must have.
pub(super) struct Tls {
    pub(super) connector: TlsConnector,
    pub(super) name: ServerName<'static>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Tls").field(&self.name).finish()
    }
}

/// A connection that is opened when it is needed. All clones share it.
#[derive(Debug, Clone)]
pub(super) struct Channel {
    peer: Arc<Peer>,
    state: Arc<Mutex<ChannelState>>,
}

#[derive(Debug, Default)]
struct ChannelState {
    connection: Option<PublishConnection>,
    /// When the last attempt to open a connection failed, and its error.
    failed: Option<(Instant, Status)>,
}

impl Channel {
    pub(super) fn new(peer: Peer) -> Self {
        Self {
            peer: Arc::new(peer),
            state: Arc::default(),
        }
    }

    /// Returns the connection, and opens it if necessary. Concurrent callers share one attempt to
    /// open it, and the result of that attempt. The attempt continues even if all callers give up.
    ///
    /// # Errors
    /// UNAVAILABLE if the connection cannot be opened.
    pub(super) async fn connection(&self) -> Result<PublishConnection, Status> {
        let asked_at = Instant::now();
        if let Some(known) = self.state.lock().await.known(asked_at).await {
            return known;
        }
        let channel = self.clone();
        let opening = tokio::spawn(async move { channel.open(asked_at).await });
        opening
            .await
            .unwrap_or_else(|e| Err(Status::from_error(e.into())))
    }

    async fn open(&self, asked_at: Instant) -> Result<PublishConnection, Status> {
        let mut state = self.state.lock().await;
        if let Some(known) = state.known(asked_at).await {
            return known;
        }
        match self.peer.open().await {
            Ok(connection) => Ok(state.connection.insert(connection).clone()),
            Err(status) => {
                state.failed = Some((Instant::now(), status.clone()));
                Err(status)
            }
        }
    }
}

impl ChannelState {
    /// Returns the connection if it is open, or the error of an attempt that failed after
    /// `asked_at`. `None` means that a new attempt is needed.
    async fn known(&mut self, asked_at: Instant) -> Option<Result<PublishConnection, Status>> {
        if let Some(connection) = &mut self.connection {
            if connection.is_open().await {
                return Some(Ok(connection.clone()));
            }
            self.connection = None;
        }
        let (at, status) = self.failed.as_ref()?;
        (*at >= asked_at).then(|| Err(status.clone()))
    }
}

impl Peer {
    async fn open(&self) -> Result<PublishConnection, Status> {
        match tokio::time::timeout(self.timeout, self.try_open()).await {
            Ok(Ok(connection)) => Ok(connection),
            Ok(Err(cause)) => Err(self.unavailable(cause)),
            Err(_) => {
                Err(self.unavailable(format!("not connected within {:?}", self.timeout).into()))
            }
        }
    }

    async fn try_open(&self) -> Result<PublishConnection, StdError> {
        // There is no need to poll for readiness, because the resolver is always ready.
        let tcp = self.tcp.clone().call(self.url.clone()).await?;
        let tcp = Gathering::new(tcp.into_inner());
        let origin = self.url.clone();
        let Some(Tls { connector, name }) = &self.tls else {
            return Ok(PublishConnection::start(tcp, origin).await?);
        };
        let tls = connector.connect(name.clone(), tcp).await?;
        if tls.get_ref().1.alpn_protocol() != Some(HTTP_2) {
            return Err("the server does not speak HTTP/2".into());
        }
        Ok(PublishConnection::start(tls, origin).await?)
    }

    fn unavailable(&self, cause: StdError) -> Status {
        let mut status = Status::unavailable(format!("cannot connect to {}", self.url));
        status.set_source(Arc::from(cause));
        status
    }
}

#[cfg(test)]
mod tests;

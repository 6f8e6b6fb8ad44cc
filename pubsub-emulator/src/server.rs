//! Starts and stops the emulator: one TCP listener and one server task.
//!
//! Clients use gRPC over HTTP/2, with or without gzip, and REST over HTTP/1.1 on the same port. There
//! is no TLS. A running emulator lives on the tokio runtime that started it, and ends when it is shut
//! down or dropped.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::Status;
use tonic::codec::CompressionEncoding;
use tonic::service::Routes;
use tonic::transport::Server;

use crate::faults::Faults;
use crate::iam::IamPolicyService;
use crate::journal::{Journal, Recording};
use crate::proto;
use crate::publisher::PublisherService;
use crate::registry::Registry;
use crate::rest;
use crate::services::i_a_m_policy_server::IAMPolicyServer;
use crate::services::publisher_server::PublisherServer;
use crate::services::subscriber_server::SubscriberServer;
use crate::subscriber::SubscriberService;

/// Maximum size of a gRPC message that the transport accepts. This limit is well above the 10 MB that a
/// request may have, so a request that is too large reaches the emulator's own check, which refuses it with
/// the service's wording.
const MAX_FRAME_BYTES: usize = 64 << 20;
/// Flow-control window of one HTTP/2 stream. The default window of 64 KiB would throttle large batches.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
/// Flow-control window of an HTTP/2 connection, enough for a few full batches in flight.
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// How long a shutdown waits for the server task to end after the connections were cut.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);

/// The entry point of this crate. To start an emulator, call [`Emulator::builder`], set options, and call
/// [`EmulatorBuilder::start`].
#[derive(Debug, Clone, Copy)]
pub struct Emulator;

impl Emulator {
    /// Creates a builder. By default the emulator listens on a free port of 127.0.0.1 and records
    /// every attempt.
    pub fn builder() -> EmulatorBuilder {
        EmulatorBuilder {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            recording: Recording::Attempts,
            max_connection_age: None,
        }
    }
}

/// The options of an emulator.
#[derive(Debug, Clone)]
#[must_use]
pub struct EmulatorBuilder {
    listen: SocketAddr,
    recording: Recording,
    max_connection_age: Option<Duration>,
}

/// Why the emulator did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Another process listens on the address.
    #[error(
        "cannot listen on {address}: it is in use; stop the process that holds it, or choose \
         another port (0 takes a free one)"
    )]
    InUse {
        /// The requested address.
        address: SocketAddr,
    },
    /// The emulator cannot listen on the address.
    #[error("cannot listen on {address}: {source}; choose an address of this machine")]
    Listen {
        /// The requested address.
        address: SocketAddr,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl EmulatorBuilder {
    /// Sets the address to listen on. Port 0 chooses a free port.
    pub fn listen(mut self, address: SocketAddr) -> Self {
        self.listen = address;
        self
    }

    /// Sets how much the journal keeps of each attempt.
    pub fn recording(mut self, recording: Recording) -> Self {
        self.recording = recording;
        self
    }

    /// Sends GOAWAY on each connection that reaches this age, like Google's front ends. Requests in
    /// flight are still answered, and the client has to reconnect.
    pub fn max_connection_age(mut self, age: Duration) -> Self {
        self.max_connection_age = Some(age);
        self
    }

    /// Starts to listen, and serves in a task of the current tokio runtime.
    pub async fn start(self) -> Result<RunningEmulator, StartError> {
        let address = self.listen;
        let refused = |source: io::Error| match source.kind() {
            io::ErrorKind::AddrInUse => StartError::InUse { address },
            _ => StartError::Listen { address, source },
        };
        let listener = TcpListener::bind(address).await.map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        let registry = Arc::new(Registry::new(self.recording));
        let (stop, stopped) = oneshot::channel();
        let served = serve(
            Arc::clone(&registry),
            listener,
            self.max_connection_age,
            stopped,
        );
        let server = tokio::spawn(served);
        Ok(RunningEmulator {
            address,
            registry,
            stop: Some(stop),
            server: Some(server),
        })
    }
}

async fn serve(
    registry: Arc<Registry>,
    listener: TcpListener,
    max_connection_age: Option<Duration>,
    stopped: oneshot::Receiver<()>,
) {
    let incoming = registry.faults.connections().accept(listener);
    let publisher = PublisherServer::new(PublisherService {
        registry: Arc::clone(&registry),
    })
    .accept_compressed(CompressionEncoding::Gzip)
    .max_decoding_message_size(MAX_FRAME_BYTES);
    let subscriber = SubscriberServer::new(SubscriberService {
        registry: Arc::clone(&registry),
    })
    .accept_compressed(CompressionEncoding::Gzip)
    .max_decoding_message_size(MAX_FRAME_BYTES);
    let stopped = async {
        // An error means that the sender is gone, so the signal can never come. The server stops in this case too.
        let _ = stopped.await;
    };
    let iam = IAMPolicyServer::new(IamPolicyService {
        registry: Arc::clone(&registry),
    });
    let mut routes = Routes::new(publisher)
        .add_service(subscriber)
        .add_service(iam);
    let router = std::mem::take(routes.axum_router_mut());
    *routes.axum_router_mut() = router.merge(rest::router(registry));
    let mut server = Server::builder();
    if let Some(age) = max_connection_age {
        server = server.max_connection_age(age);
    }
    let served = server
        .accept_http1(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .add_routes(routes)
        .serve_with_incoming_shutdown(incoming, stopped)
        .await;
    if let Err(error) = served {
        tracing::error!(
            error = &error as &dyn std::error::Error,
            "the Pub/Sub emulator stopped"
        );
    }
}

/// A running emulator. Dropping it stops the emulator.
#[derive(Debug)]
pub struct RunningEmulator {
    address: SocketAddr,
    registry: Arc<Registry>,
    stop: Option<oneshot::Sender<()>>,
    server: Option<JoinHandle<()>>,
}

impl RunningEmulator {
    /// The address on which the emulator listens, with the port that was chosen. This is the value
    /// for `PUBSUB_EMULATOR_HOST`.
    pub fn addr(&self) -> SocketAddr {
        self.address
    }

    /// The journal of this emulator.
    pub fn journal(&self) -> Journal {
        self.registry.journal.clone()
    }

    /// The faults of this emulator.
    pub fn faults(&self) -> Faults {
        self.registry.faults.clone()
    }

    /// Creates a topic, named `projects/{project}/topics/{topic}`. Returns an error with the status
    /// that a client would get.
    pub async fn create_topic(&self, name: &str) -> Result<(), Status> {
        let resource = proto::Topic {
            name: name.to_owned(),
            ..Default::default()
        };
        self.registry.create_topic(resource).map(drop)
    }

    /// Cuts all connections, closes the port and waits until the server has ended, for at most 5 s.
    pub async fn shutdown(mut self) {
        self.stop();
        if let Some(server) = self.server.take() {
            // The server closes the port as soon as it receives the order to stop. Only tasks of connections can
            // still run after the limit. They end by themselves, because their connections are cut.
            let _ = tokio::time::timeout(SHUTDOWN_LIMIT, server).await;
        }
    }

    fn stop(&mut self) {
        let connections = self.registry.faults.connections();
        connections.refuse(true);
        connections.reset();
        if let Some(stop) = self.stop.take() {
            // An error means that the server has already ended.
            let _ = stop.send(());
        }
    }
}

impl Drop for RunningEmulator {
    fn drop(&mut self) {
        self.stop();
    }
}

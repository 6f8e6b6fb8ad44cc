//! How connections to Pub/Sub are made.

use std::time::Duration;

use hyper_util::client::legacy::connect::HttpConnector;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint as Transport};

use super::gathering::Connector;
use crate::error::{Code, Error, Result};
use crate::settings::Endpoint;

/// HTTP/2 pings while requests are on their way, so that a dead connection is noticed.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// The window in which the server may keep us waiting for leave to send.
const WINDOW: u32 = 4 << 20;

/// A connection that opens at its first use, and again after each break.
///
/// # Errors
/// `pubsub-endpoint`.
pub(super) fn channel(endpoint: &Endpoint, timeout: Duration) -> Result<Channel> {
    let url = match endpoint {
        Endpoint::Emulator(host) => format!("http://{host}"),
        Endpoint::Service(url) => url.clone(),
    };
    let invalid = |e: tonic::transport::Error| {
        Error::new(Code::PubsubEndpoint, format!("cannot use {url}")).caused_by(e)
    };
    let mut transport = Transport::from_shared(url.clone())
        .map_err(invalid)?
        .user_agent(concat!("postrider/", env!("CARGO_PKG_VERSION")))
        .map_err(invalid)?
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW);
    if url.starts_with("https://") {
        let tls = ClientTlsConfig::new().with_native_roots().timeout(timeout);
        transport = transport.tls_config(tls).map_err(invalid)?;
    }
    let mut tcp = HttpConnector::new();
    // Whether there is TLS is decided above.
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(timeout));
    Ok(transport.connect_with_connector_lazy(Connector(tcp)))
}

/// Whether Pub/Sub keeps order there: only among publishes in one region.
pub(crate) fn is_global(endpoint: &Endpoint) -> bool {
    match endpoint {
        Endpoint::Emulator(_) => false,
        Endpoint::Service(url) => url.ends_with("//pubsub.googleapis.com"),
    }
}

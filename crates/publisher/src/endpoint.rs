//! Says where Pub/Sub is, and prepares connections to it: address, TCP and TLS.

use std::sync::Arc;
use std::time::Duration;

use hyper_util::client::legacy::connect::HttpConnector;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tonic::codegen::StdError;
use tonic::codegen::http::Uri;
use tonic::codegen::http::uri::Scheme;

use super::SetupError;
use super::channel::{Channel, HTTP_2, Peer, Tls};

/// The location of Pub/Sub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// An emulator at `host:port`, reached without TLS and without credentials.
    Emulator(String),
    /// The URL of the service, or of anything else that speaks its protocol.
    Service(String),
}

impl Endpoint {
    /// Whether this is the global endpoint. Pub/Sub keeps order only among publishes in one region,
    /// so it does not guarantee order at the global endpoint.
    pub fn is_global(&self) -> bool {
        match self {
            Self::Emulator(_) => false,
            Self::Service(url) => url.ends_with("//pubsub.googleapis.com"),
        }
    }
}

/// Prepares a channel: its connection is opened on first use, and opened again after it broke.
///
/// # Errors
/// [`SetupError::Endpoint`].
pub(super) fn channel(endpoint: &Endpoint, timeout: Duration) -> Result<Channel, SetupError> {
    let url = match endpoint {
        Endpoint::Emulator(host) => format!("http://{host}"),
        Endpoint::Service(url) => url.clone(),
    };
    match peer(&url, timeout) {
        Ok(peer) => Ok(Channel::new(peer)),
        Err(source) => Err(SetupError::Endpoint { url, source }),
    }
}

fn peer(url: &str, timeout: Duration) -> Result<Peer, StdError> {
    let url: Uri = url.parse()?;
    let host = url.host().ok_or("no host")?;
    let tls = if url.scheme() == Some(&Scheme::HTTPS) {
        Some(tls(host)?)
    } else {
        None
    };
    let mut tcp = HttpConnector::new();
    // Accept `https` URLs too, because TLS is added on top of this connector.
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(timeout));
    Ok(Peer {
        url,
        tcp,
        tls,
        // This limit is longer than the limit for TCP alone, because name resolution and TLS take time too.
        timeout: 2 * timeout,
    })
}

fn tls(host: &str) -> Result<Tls, StdError> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let why = found.errors.iter().map(ToString::to_string);
        let why: String = why.map(|why| format!(" ({why})")).collect();
        return Err(format!(
            "found no trusted certificate authority{why}; install the package ca-certificates"
        )
        .into());
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![HTTP_2.to_vec()];
    let name = host.trim_start_matches('[').trim_end_matches(']');
    Ok(Tls {
        connector: Arc::new(config).into(),
        name: ServerName::try_from(name.to_owned())?,
    })
}

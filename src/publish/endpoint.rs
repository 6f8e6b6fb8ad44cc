//! Turns the endpoint setting into a channel: address, TCP and TLS.

use std::sync::Arc;
use std::time::Duration;

use hyper_util::client::legacy::connect::HttpConnector;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tonic::codegen::StdError;
use tonic::codegen::http::Uri;
use tonic::codegen::http::uri::Scheme;

use super::channel::{Channel, HTTP_2, Peer, Tls};
use crate::error::{Code, Error, Result};
use crate::settings::Endpoint;

/// A connection that is opened on first use and reopened after a break.
///
/// # Errors
/// `pubsub-endpoint`.
pub(super) fn channel(endpoint: &Endpoint, timeout: Duration) -> Result<Channel> {
    let url = match endpoint {
        Endpoint::Emulator(host) => format!("http://{host}"),
        Endpoint::Service(url) => url.clone(),
    };
    let peer = peer(&url, timeout)
        .map_err(|e| Error::new(Code::PubsubEndpoint, format!("cannot use {url}")).caused_by(e))?;
    Ok(Channel::new(peer))
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
    // Accept `https` URLs too: TLS is added on top.
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(timeout));
    Ok(Peer {
        url,
        tcp,
        tls,
        // Name resolution and TLS take time too.
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

/// Whether this is the global endpoint, where Pub/Sub does not guarantee order: it keeps order only
/// among publishes in one region.
pub(crate) fn is_global(endpoint: &Endpoint) -> bool {
    match endpoint {
        Endpoint::Emulator(_) => false,
        Endpoint::Service(url) => url.ends_with("//pubsub.googleapis.com"),
    }
}

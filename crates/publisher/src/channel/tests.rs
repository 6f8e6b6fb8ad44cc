//! Tests the channel against local listeners.

use std::sync::Arc;

use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tonic::Code;

use super::super::Failure;
use super::*;

async fn listener() -> (TcpListener, Uri) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    (listener, url.parse().unwrap())
}

fn channel(url: Uri, tls: Option<Tls>) -> Channel {
    Channel::new(Peer {
        url,
        tcp: HttpConnector::new(),
        tls,
        timeout: Duration::from_secs(1),
    })
}

/// Builds a TLS configuration that trusts only this certificate, or no certificate.
fn tls(trusted: Option<CertificateDer<'static>>) -> Tls {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(trusted);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![HTTP_2.to_vec()];
    Tls {
        connector: Arc::new(config).into(),
        name: ServerName::try_from("localhost").unwrap(),
    }
}

#[tokio::test]
async fn all_requests_share_one_connection_until_it_breaks() {
    let (listener, url) = listener().await;
    let channel = channel(url, None);
    for _ in 0..2 {
        let mut connection = channel.connection().await.unwrap();
        let (server, _) = listener.accept().await.unwrap();
        channel.connection().await.unwrap();
        let another = tokio::time::timeout(Duration::from_millis(50), listener.accept());
        assert!(another.await.is_err(), "there are two connections");
        drop(server);
        let broken_at = Instant::now();
        while connection.is_open().await {
            assert!(broken_at.elapsed() < Duration::from_secs(20), "still open");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

#[tokio::test]
async fn requests_waiting_for_the_same_connection_fail_together() {
    let (listener, url) = listener().await;
    let channel = channel(url, Some(tls(None)));
    let waiting = (0..100).map(|_| {
        let channel = channel.clone();
        tokio::spawn(async move { channel.connection().await })
    });
    let waiting: Vec<_> = waiting.collect();
    // Accept the connection, but send nothing.
    let (_silent, _) = listener.accept().await.unwrap();
    for waiting in waiting {
        let status = waiting.await.unwrap().unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{status}");
        let text = Failure::from_status(&status).to_string();
        assert!(text.ends_with("not connected within 1s"), "{text}");
    }
    let another = tokio::time::timeout(Duration::from_millis(50), listener.accept());
    assert!(
        another.await.is_err(),
        "a request has made an attempt of its own"
    );
}

#[tokio::test]
async fn a_slow_connection_opens_even_if_every_request_gives_up_before() {
    let (listener, url) = listener().await;
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let certificate = made.cert.der().clone();
    let key = PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key)
        .unwrap();
    config.alpn_protocols = vec![HTTP_2.to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    tokio::spawn(async move {
        let mut open = Vec::new();
        loop {
            let (tcp, _) = listener.accept().await.unwrap();
            tokio::time::sleep(Duration::from_millis(300)).await;
            open.push(acceptor.accept(tcp).await);
        }
    });
    let channel = channel(url, Some(tls(Some(certificate))));
    let started = Instant::now();
    let given_up = Duration::from_millis(50);
    while tokio::time::timeout(given_up, channel.connection())
        .await
        .is_err()
    {
        assert!(started.elapsed() < Duration::from_secs(20), "never open");
    }
    assert!(channel.connection().await.unwrap().is_open().await);
}

#[tokio::test]
async fn a_connection_error_names_its_root_cause() {
    let (listener, url) = listener().await;
    drop(listener);
    let status = channel(url, None).connection().await.unwrap_err();
    let text = Failure::from_status(&status).to_string();
    assert!(text.contains("Connection refused"), "{text}");
}

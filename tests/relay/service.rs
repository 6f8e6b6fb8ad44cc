//! Tests of a relay that publishes to an endpoint with TLS and Application Default Credentials, as with
//! the real service. The endpoint is our emulator behind a TLS terminator. The relay uses a service
//! account and signs its tokens locally.

use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::PrivateKeyDer;
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tonic::body::Body;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

use crate::harness::{self, Database, Relay, eventually, insert_orders};

/// Creates an RSA key as PEM. Returns `None` if openssl is not installed.
pub(crate) fn rsa_key() -> Option<String> {
    let made = Command::new("openssl")
        .args([
            "genpkey",
            "-algorithm",
            "RSA",
            "-pkeyopt",
            "rsa_keygen_bits:2048",
        ])
        .stderr(Stdio::null())
        .output()
        .ok()?;
    made.status
        .success()
        .then(|| String::from_utf8(made.stdout).unwrap())
}

/// The key file of a service account.
pub(crate) fn service_account(private_key: &str) -> String {
    serde_json::json!({
        "type": "service_account", "project_id": "demo", "private_key_id": "1",
        "private_key": private_key, "client_email": "relay@demo.example", "client_id": "1",
        "token_uri": "http://127.0.0.1:9/token",
    })
    .to_string()
}

/// Starts a TLS terminator in front of `target`, with a certificate for `localhost`. Returns its port
/// and the PEM of the certificate authority.
pub(crate) async fn tls_in_front_of(target: String) -> (u16, String) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let ca_pem = params.self_signed(&key).unwrap().pem();
    let issuer = Issuer::new(params, key);
    let server_key = KeyPair::generate().unwrap();
    let names = vec!["localhost".to_owned()];
    let cert = CertificateParams::new(names)
        .unwrap()
        .signed_by(&server_key, &issuer)
        .unwrap();
    let private = PrivateKeyDer::try_from(server_key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], private)
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, target) = (acceptor.clone(), target.clone());
            tokio::spawn(async move {
                let mut plain = TcpStream::connect(target).await.unwrap();
                if let Ok(mut secure) = acceptor.accept(stream).await {
                    // Ignore an error, because the copy ends when either side closes its connection.
                    let _ = tokio::io::copy_bidirectional(&mut secure, &mut plain).await;
                }
            });
        }
    });
    (port, ca_pem)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tls_endpoint_with_application_default_credentials_is_published_to() {
    let Some(private_key) = rsa_key() else {
        eprintln!("SKIPPED: openssl is not installed, so no service account can be made");
        return;
    };
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let (port, ca_pem) = tls_in_front_of(emulator.addr().to_string()).await;
    let files = TempDir::new().unwrap();
    let ca = files.path().join("ca.pem").display().to_string();
    let account = files.path().join("account.json").display().to_string();
    std::fs::write(&ca, ca_pem).unwrap();
    std::fs::write(&account, service_account(&private_key)).unwrap();
    let endpoint = format!("https://localhost:{port}");
    insert_orders(&database, 100, 5).await;
    let environment = [
        ("PUBSUB_EMULATOR_HOST", ""),
        ("POSTRIDER_PUBSUB_ENDPOINT", endpoint.as_str()),
        ("GOOGLE_APPLICATION_CREDENTIALS", account.as_str()),
        ("SSL_CERT_FILE", ca.as_str()),
        ("RUST_LOG", "trace"),
    ];
    let relay = Relay::start_with(&database, "", &environment);
    database.wait_until_recorded().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
    let log = relay.log();
    assert!(
        !log.contains("PRIVATE KEY") && !log.contains("eyJ"),
        "a secret in the log"
    );
}

/// Starts a relay that publishes to `endpoint` with the service account in the file `account`. The
/// relay trusts the certificate authorities in the file `authorities`.
fn relay_to(database: &Database, endpoint: &str, account: &str, authorities: &str) -> Relay {
    let environment = [
        ("PUBSUB_EMULATOR_HOST", ""),
        ("POSTRIDER_PUBSUB_ENDPOINT", endpoint),
        ("GOOGLE_APPLICATION_CREDENTIALS", account),
        ("SSL_CERT_FILE", authorities),
    ];
    Relay::start_with(database, "", &environment)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_with_a_wrong_or_untrusted_certificate_gets_nothing() {
    let Some(private_key) = rsa_key() else {
        eprintln!("SKIPPED: openssl is not installed, so no service account can be made");
        return;
    };
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let (port, ca_pem) = tls_in_front_of(emulator.addr().to_string()).await;
    let (_, other_pem) = tls_in_front_of(emulator.addr().to_string()).await;
    let files = TempDir::new().unwrap();
    let write = |name: &str, text: String| {
        let path = files.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let account = write("account.json", service_account(&private_key));
    let (known, other) = (write("ca.pem", ca_pem), write("other.pem", other_pem));
    insert_orders(&database, 20, 5).await;
    // The certificate is valid for `localhost` only. The relay must refuse it if the authority is
    // unknown, and for another host.
    for (host, authorities) in [("localhost", &other), ("127.0.0.1", &known)] {
        let endpoint = format!("https://{host}:{port}");
        let relay = relay_to(&database, &endpoint, &account, authorities);
        relay.wait_for_log("pubsub-unreachable").await;
        let log = relay.log();
        assert!(
            log.contains("certificate"),
            "the log names the certificate: {log}"
        );
        relay.kill_9();
        assert_eq!(emulator.journal().counts().attempts, 0, "{log}");
        let recorded = "SELECT count(*) FROM outbox.dispatch";
        assert_eq!(database.number(recorded).await, 0, "{log}");
    }
    let endpoint = format!("https://localhost:{port}");
    let _relay = relay_to(&database, &endpoint, &account, &known);
    database.wait_until_recorded().await;
    let report = harness::check_streamed(&database, &emulator).await;
    let once = report.is_clean() && report.duplicates.is_empty();
    assert!(once, "{report}");
}

/// For each call, whether the call carried an `authorization` header.
type Calls = Arc<Mutex<Vec<bool>>>;

/// Starts a server that refuses every call as unauthenticated, and notes which calls carried
/// credentials.
async fn asks_for_credentials() -> (SocketAddr, Calls) {
    let calls = Calls::default();
    let noted = calls.clone();
    let answer = async move |headers: HeaderMap| {
        noted
            .lock()
            .unwrap()
            .push(headers.contains_key(AUTHORIZATION));
        tonic::Status::unauthenticated("who are you?").into_http::<Body>()
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let router = axum::Router::new().fallback(answer);
    let server = Server::builder().add_routes(Routes::from(router));
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    (addr, calls)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_never_sent_to_a_plain_text_endpoint_even_if_it_asks() {
    let Some(private_key) = rsa_key() else {
        eprintln!("SKIPPED: openssl is not installed, so no service account can be made");
        return;
    };
    let database = Database::start().await;
    let (addr, calls) = asks_for_credentials().await;
    // Use a second server for TLS, because calls of a killed relay may still reach the first server.
    let (behind_tls, calls_over_tls) = asks_for_credentials().await;
    let (tls_port, ca_pem) = tls_in_front_of(behind_tls.to_string()).await;
    let files = TempDir::new().unwrap();
    let ca = files.path().join("ca.pem").display().to_string();
    let account = files.path().join("account.json").display().to_string();
    std::fs::write(&ca, ca_pem).unwrap();
    std::fs::write(&account, service_account(&private_key)).unwrap();
    insert_orders(&database, 20, 5).await;
    let some_calls = async |calls: &Calls| {
        eventually("several calls have arrived", || async {
            let calls = calls.lock().unwrap();
            (calls.len() >= 3).then(|| calls.clone())
        })
        .await
    };
    for (emulator, endpoint) in [
        (String::new(), format!("http://{addr}")),
        (String::new(), format!("HTTP://{addr}/")),
        (addr.to_string(), String::new()),
    ] {
        let environment = [
            ("PUBSUB_EMULATOR_HOST", emulator.as_str()),
            ("POSTRIDER_PUBSUB_ENDPOINT", endpoint.as_str()),
            ("GOOGLE_APPLICATION_CREDENTIALS", account.as_str()),
        ];
        let relay = Relay::start_with(&database, "", &environment);
        let calls_without = some_calls(&calls).await;
        relay.kill_9();
        assert!(
            !calls_without.contains(&true),
            "{endpoint}: {calls_without:?}"
        );
        calls.lock().unwrap().clear();
    }
    // The second server gets the token, because the relay may send the token over TLS.
    let endpoint = format!("https://localhost:{tls_port}");
    let _relay = relay_to(&database, &endpoint, &account, &ca);
    let calls_with = some_calls(&calls_over_tls).await;
    assert!(!calls_with.contains(&false), "{calls_with:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_credentials_end_the_start_with_their_own_error() {
    let database = Database::start().await;
    let environment = [
        ("PUBSUB_EMULATOR_HOST", ""),
        ("POSTRIDER_PUBSUB_ENDPOINT", "https://localhost:9"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/account.json"),
    ];
    let relay = Relay::start_with(&database, "", &environment);
    relay.wait_for_error("credentials-missing").await;
    assert_eq!(relay.wait().await.code(), Some(4));
}

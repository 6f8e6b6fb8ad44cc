//! An endpoint with TLS and Application Default Credentials, as the service has them: our emulator
//! behind a TLS terminator, and a service account whose tokens are signed locally.

use std::process::{Command, Stdio};
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::PrivateKeyDer;
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use crate::harness::{self, Database, Relay, insert_orders};

/// An RSA key as PEM; `None` where openssl is not installed.
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

/// Terminates TLS for `target` as `localhost`; gives its port and the authority's PEM.
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
                    // Ends with either side.
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
        !log.contains("PRIVATE KEY") && !log.contains("Bearer ey"),
        "a secret in the log"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_credentials_are_named_before_anything_is_read() {
    let database = Database::start().await;
    let environment = [
        ("PUBSUB_EMULATOR_HOST", ""),
        ("POSTRIDER_PUBSUB_ENDPOINT", "https://localhost:9"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/account.json"),
    ];
    let relay = Relay::start_with(&database, "", &environment);
    relay.wait_for_log("error[credentials-missing]").await;
    assert_eq!(relay.wait().await.code(), Some(4));
}

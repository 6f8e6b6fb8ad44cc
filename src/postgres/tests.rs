//! Tests which servers each kind of session trusts, with real servers and TLS. Each kind of session is
//! tested separately. In the relay the SQL session always connects first, so it would hide lax checks of
//! the replication session.

use std::sync::Arc;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use replication::connection::CHANNEL_BINDING_HINT;
use replication::{Confirmable, Source, StreamOptions};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use scratch_postgres::{ScratchPostgres, Tls};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::{Target, connect};
use crate::environment::Environment;
use crate::error::{Code, Result};

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            issuer: Issuer::new(params, key),
            pem,
        }
    }

    /// Signs a certificate for `name`, valid from 2000 until the year `until`.
    fn sign(&self, name: &str, until: i32) -> Tls {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(until, 1, 1);
        let key = KeyPair::generate().unwrap();
        Tls {
            cert_pem: params.signed_by(&key, &self.issuer).unwrap().pem(),
            key_pem: key.serialize_pem(),
            client_ca_pem: None,
        }
    }
}

/// Starts a server with this certificate and a slot `s`.
async fn server(tls: Tls) -> ScratchPostgres {
    let server = ScratchPostgres::builder()
        .tls(tls)
        .setting("password_encryption", "scram-sha-256")
        .hba_line("host all relay 127.0.0.1/32 scram-sha-256")
        .hba_line("host all trusted 127.0.0.1/32 trust")
        .start()
        .unwrap();
    let sql = connect(
        &target(&server.socket_url("postgres")),
        "test",
        Duration::from_secs(10),
    )
    .await
    .unwrap();
    for statement in [
        "CREATE PUBLICATION p",
        "SELECT pg_create_logical_replication_slot('s', 'pgoutput')",
        "CREATE ROLE relay LOGIN REPLICATION PASSWORD 'secret'",
        "CREATE ROLE trusted LOGIN REPLICATION",
    ] {
        sql.batch_execute(statement).await.unwrap();
    }
    server
}

fn options(target: Target) -> StreamOptions {
    StreamOptions {
        target,
        slot: "s".into(),
        publication: "p".into(),
        application_name: "test".into(),
        wal_sender_timeout: Duration::from_secs(30),
        confirmed: Confirmable::by_slot("0/1".parse().unwrap()),
    }
}

/// Opens one session of each kind with `parameters`.
async fn both(server: &ScratchPostgres, parameters: &str) -> [(&'static str, Result<()>); 2] {
    let port = server.port();
    sessions(&format!(
        "postgres://postgres@localhost:{port}/postgres?{parameters}"
    ))
    .await
}

fn target(url: &str) -> Target {
    let target = Target::from_settings(url, &Environment::new()).unwrap();
    target.unwrap()
}

/// Opens one session of each kind.
async fn sessions(url: &str) -> [(&'static str, Result<()>); 2] {
    let target = target(url);
    let sql = connect(&target, "test", Duration::from_secs(10)).await;
    let replication = match Source::open(options(target), || {}).await {
        Ok(source) => {
            source.close().await;
            Ok(())
        }
        Err(error) => Err(error.into()),
    };
    [("SQL", sql.map(drop)), ("replication", replication)]
}

#[tokio::test(flavor = "multi_thread")]
async fn verify_full_accepts_only_the_right_certificate_in_both_kinds_of_session() {
    let authority = Authority::new();
    let files = TempDir::new().unwrap();
    let write = |name: &str, pem: &str| {
        let path = files.path().join(name);
        std::fs::write(&path, pem).unwrap();
        path.display().to_string()
    };
    let trusted = write("trusted.pem", &authority.pem);
    let other = write("other.pem", &Authority::new().pem);
    let cases = [
        (
            "the right certificate",
            authority.sign("localhost", 2100),
            &trusted,
            true,
        ),
        (
            "another name",
            authority.sign("db.example", 2100),
            &trusted,
            false,
        ),
        (
            "another authority",
            authority.sign("localhost", 2100),
            &other,
            false,
        ),
        (
            "an expired certificate",
            authority.sign("localhost", 2001),
            &trusted,
            false,
        ),
    ];
    for (what, certificate, roots, is_good) in cases {
        let server = server(certificate).await;
        let parameters = format!("sslmode=verify-full&sslrootcert={roots}");
        for (kind, opened) in both(&server, &parameters).await {
            match opened {
                Ok(()) => assert!(is_good, "{kind} session, {what}: was trusted"),
                Err(error) => {
                    assert!(!is_good, "{kind} session, {what}: {error}");
                    assert_eq!(error.code(), Code::PostgresTls, "{kind} session, {what}");
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn verify_ca_checks_everything_but_the_name_in_both_kinds_of_session() {
    let authority = Authority::new();
    let files = TempDir::new().unwrap();
    let trusted = files.path().join("trusted.pem");
    std::fs::write(&trusted, &authority.pem).unwrap();
    let parameters = format!("sslmode=verify-ca&sslrootcert={}", trusted.display());
    for (certificate, is_good) in [
        (authority.sign("db.example", 2100), true),
        (authority.sign("db.example", 2001), false),
        (Authority::new().sign("localhost", 2100), false),
    ] {
        let server = server(certificate).await;
        for (kind, opened) in both(&server, &parameters).await {
            assert_eq!(opened.is_ok(), is_good, "{kind} session: {opened:?}");
        }
    }
}

/// Accepts TLS from the client, opens TLS to the server, and passes bytes between the two.
async fn pass_on(
    mut client: TcpStream,
    acceptor: TlsAcceptor,
    server: (&'static str, u16),
    connector: TlsConnector,
) -> std::io::Result<()> {
    let mut ssl_request = [0; 8];
    client.read_exact(&mut ssl_request).await?;
    client.write_all(b"S").await?;
    let mut client = acceptor.accept(client).await?;
    let mut server = TcpStream::connect(server).await?;
    server.write_all(&ssl_request).await?;
    assert_eq!(server.read_u8().await?, b'S');
    let name = ServerName::try_from("localhost").unwrap();
    let mut server = connector.connect(name, server).await?;
    tokio::io::copy_bidirectional(&mut client, &mut server).await?;
    Ok(())
}

/// Starts a man in the middle, who terminates TLS on both sides and passes bytes between them. Returns
/// its port.
async fn man_in_the_middle(server: &ScratchPostgres, authority: &Authority) -> u16 {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let certificate = authority.sign("localhost", 2100);
    let chain = vec![CertificateDer::from_pem_slice(certificate.cert_pem.as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(certificate.key_pem.as_bytes()).unwrap();
    let config = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let server = ("127.0.0.1", server.port());
    let mut roots = RootCertStore::empty();
    let authority = CertificateDer::from_pem_slice(authority.pem.as_bytes()).unwrap();
    roots.add(authority).unwrap();
    let trusting = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = TlsConnector::from(Arc::new(trusting));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (client, _) = listener.accept().await.unwrap();
            // Ignore the result. If `pass_on` fails, it closes the connection, and the client under test gets an error.
            tokio::spawn(pass_on(client, acceptor.clone(), server, connector.clone()));
        }
    });
    port
}

#[tokio::test(flavor = "multi_thread")]
async fn a_login_is_bound_to_the_servers_certificate_in_both_kinds_of_session() {
    let authority = Authority::new();
    let server = server(authority.sign("localhost", 2100)).await;
    let between = man_in_the_middle(&server, &authority).await;
    for (user, port, parameters, is_good) in [
        (
            "relay:secret",
            server.port(),
            "sslmode=require&channel_binding=require",
            true,
        ),
        ("relay:secret", server.port(), "sslmode=require", true),
        ("relay:secret", server.port(), "sslmode=disable", true),
        (
            "relay:secret",
            server.port(),
            "sslmode=disable&channel_binding=require",
            false,
        ),
        ("trusted", server.port(), "sslmode=require", true),
        (
            "trusted",
            server.port(),
            "sslmode=require&channel_binding=require",
            false,
        ),
        (
            "relay:secret",
            between,
            "sslmode=require&channel_binding=disable",
            true,
        ),
        ("relay:secret", between, "sslmode=require", false),
        (
            "relay:secret",
            between,
            "sslmode=require&channel_binding=require",
            false,
        ),
    ] {
        let url = format!("postgres://{user}@127.0.0.1:{port}/postgres?{parameters}");
        for (kind, opened) in sessions(&url).await {
            let whose = if port == between {
                "the man in the middle"
            } else {
                "the server"
            };
            let what = format!("{kind} session, {user}, {whose}, {parameters}: {opened:?}");
            assert_eq!(opened.is_ok(), is_good, "{what}");
            if let Err(error) = opened {
                assert_eq!(error.code(), Code::PostgresAuthentication, "{what}");
                // Through the man in the middle, the server refuses the login, and the error has the server's
                // message. Otherwise the client gives up, and the error has our hint.
                let is_unbound = port != between;
                assert_eq!(
                    error.hint_text() == CHANNEL_BINDING_HINT,
                    is_unbound,
                    "{what}"
                );
            }
        }
    }
}

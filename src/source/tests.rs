//! Whom each kind of session trusts, and whom it waits for. Trust: both against real servers with TLS, each by itself, since in
//! the relay the SQL session always comes first and would hide a replication session that is lax.

use std::io::{Read, Write};
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use scratch_postgres::{ScratchPostgres, Tls};
use tempfile::TempDir;

use super::handshake::walsender_error;
use super::{Options, Source};
use crate::error::{Code, Result};
use crate::metrics::LastStatus;
use crate::postgres::{Target, connect};
use crate::settings::Environment;
use crate::watermark::Confirmable;

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

    /// A certificate for `name` that was good from 2000 until the year `until`.
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

/// A server with this certificate and a slot `s`.
async fn server(tls: Tls) -> ScratchPostgres {
    let server = ScratchPostgres::builder().tls(tls).start().unwrap();
    let url = server.socket_url("postgres");
    let target = Target::from_settings(&url, &Environment::new()).unwrap();
    let target = target.unwrap();
    let sql = connect(&target, "test", Duration::from_secs(10))
        .await
        .unwrap();
    for statement in [
        "CREATE PUBLICATION p",
        "SELECT pg_create_logical_replication_slot('s', 'pgoutput')",
    ] {
        sql.batch_execute(statement).await.unwrap();
    }
    server
}

fn options(target: Target) -> Options {
    Options {
        target,
        slot: "s".parse().unwrap(),
        publication: "p".into(),
        application_name: "test".into(),
        wal_sender_timeout: Duration::from_secs(30),
        confirmed: Confirmable::by_slot("0/1".parse().unwrap()),
    }
}

/// Opens one session of each kind with `parameters`.
async fn both(server: &ScratchPostgres, parameters: &str) -> [(&'static str, Result<()>); 2] {
    let port = server.port();
    let url = format!("postgres://postgres@localhost:{port}/postgres?{parameters}");
    let target = Target::from_settings(&url, &Environment::new()).unwrap();
    let target = target.unwrap();
    let sql = connect(&target, "test", Duration::from_secs(10)).await;
    let replication = match Source::open(options(target), LastStatus::default()).await {
        Ok(source) => {
            source.close().await;
            Ok(())
        }
        Err(error) => Err(error),
    };
    [("SQL", sql.map(drop)), ("replication", replication)]
}

#[tokio::test(flavor = "multi_thread")]
async fn verify_full_takes_the_right_certificate_alone_in_both_kinds_of_session() {
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
            "the right one",
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
            "an expired one",
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
async fn verify_ca_leaves_the_name_alone_and_nothing_else_in_both_kinds_of_session() {
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

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_cannot_start_a_process_is_not_there_yet() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 8]).unwrap();
        stream
            .write_all(b"Ecould not fork new process for connection\n\0")
            .unwrap();
    });
    let url = format!("postgres://postgres@127.0.0.1:{port}/postgres?sslmode=require");
    let target = Target::from_settings(&url, &Environment::new()).unwrap();
    let opened = Source::open(options(target.unwrap()), LastStatus::default()).await;
    assert_eq!(opened.unwrap_err().code(), Code::PostgresUnreachable);
}

#[test]
fn a_walsender_that_says_it_is_a_standbys_is_waited_for() {
    let error = walsender_error("0A000", "while in recovery", "cannot stream");
    assert_eq!(error.code(), Code::PostgresStandby);
}

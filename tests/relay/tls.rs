//! Tests of servers with unusual certificates and TLS settings. The modes `prefer` and `require` accept
//! any certificate, as in libpq. The modes `verify-ca` and `verify-full` report what is wrong with the
//! certificate. The tests run `postrider check`, which opens an SQL session and a replication session.

mod certificates;

use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, GeneralSubtree, NameConstraints};
use scratch_postgres::{ScratchPostgres, StopMode, Tls};
use tempfile::TempDir;

use self::certificates::{
    Authority, Certificate, P521, RSA, by_openssl, has_an_unknown_critical_extension, has_expired,
    is_authority, is_not_valid_yet, made, signed_with_p521,
};
use crate::harness::{self, postrider};

fn server(certificate: &Certificate, settings: &[(&str, &str)]) -> ScratchPostgres {
    let mut builder = ScratchPostgres::builder().tls(Tls {
        cert_pem: certificate.cert_pem.clone(),
        key_pem: certificate.key_pem.clone(),
        client_ca_pem: None,
    });
    for (name, value) in settings {
        builder = builder.setting(name, value);
    }
    builder.start().unwrap()
}

/// Runs `check --all`, which opens SQL sessions and a replication session. Returns stdout followed by stderr.
fn check(server: &ScratchPostgres, host: &str, parameters: &str) -> String {
    let port = server.port();
    let url = format!("postgres://postgres@{host}:{port}/postgres?{parameters}");
    let environment = [
        ("DATABASE_URL", url.as_str()),
        ("PUBSUB_PROJECT_ID", "demo"),
    ];
    let ran = postrider(&["check", "--all"], &environment)
        .output()
        .unwrap();
    String::from_utf8([ran.stdout, ran.stderr].concat()).unwrap()
}

fn is_let_in(said: &str) -> bool {
    said.contains("the server accepts a replication session") && !said.contains("postgres-tls")
}

#[tokio::test(flavor = "multi_thread")]
async fn without_verification_any_certificate_is_accepted() {
    let certificates = [
        ("expired", Some(made(&["localhost"], has_expired))),
        (
            "unknown critical extension",
            Some(made(&["localhost"], has_an_unknown_critical_extension)),
        ),
        ("common name only", Some(made(&[], |_| {}))),
        ("of an authority", Some(made(&["localhost"], is_authority))),
        ("another host", Some(made(&["db.example"], |_| {}))),
        ("P-521", by_openssl(&P521, &["-sha512"])),
        ("X.509 version 1", by_openssl(&RSA, &[])),
        ("Ed25519", by_openssl(&["-algorithm", "ED25519"], &[])),
        ("RSA-PSS", by_openssl(&["-algorithm", "RSA-PSS"], &[])),
    ];
    for (kind, certificate) in certificates {
        let Some(certificate) = certificate else {
            continue;
        };
        let server = server(&certificate, &[]);
        for mode in ["prefer", "require"] {
            let said = check(&server, "localhost", &format!("sslmode={mode}"));
            assert!(is_let_in(&said), "{kind}, {mode}:\n{said}");
            // Check that the relay did not fall back to a plain connection, which this server refuses with
            // `postgres-hba`.
            assert!(!said.contains("postgres-hba"), "{kind}, {mode}:\n{said}");
        }
    }
}

/// A server's certificate, the value of `sslmode`, the PEM in `sslrootcert`, and a part of the expected error. An
/// empty text means that no error is expected.
type Case = (Certificate, &'static str, String, &'static str);

/// Cases in which `sslrootcert` is the server's certificate itself.
fn listed_certificates() -> Vec<Case> {
    let own = |certificate: Certificate, mode, expected| {
        let root = certificate.cert_pem.clone();
        (certificate, mode, root, expected)
    };
    let mut cases = vec![
        own(
            made(&["localhost"], has_expired),
            "verify-ca",
            "has expired",
        ),
        own(
            made(&["db.example"], |_| {}),
            "verify-full",
            "is for another host",
        ),
        own(
            made(&[], |_| {}),
            "verify-full",
            "names no host in subjectAltName",
        ),
        own(made(&["localhost"], is_authority), "verify-full", ""),
        own(
            made(&["localhost"], has_an_unknown_critical_extension),
            "verify-ca",
            "has a critical extension that is not supported",
        ),
    ];
    if let Some(v1) = by_openssl(&RSA, &[]) {
        cases.push(own(v1, "verify-ca", "X.509 version 1"));
    }
    cases
}

/// Cases in which `sslrootcert` contains the certificate of an authority.
fn certificates_of_an_authority() -> Vec<Case> {
    let authority = Authority::new(|_| {});
    let namesake = Authority::new(|_| {});
    let narrow = Authority::new(|params| {
        params.name_constraints = Some(NameConstraints {
            permitted_subtrees: vec![GeneralSubtree::DnsName("example".into())],
            excluded_subtrees: Vec::new(),
        });
    });
    let case = |certificate, mode, expected| {
        let root = authority.cert_pem.clone();
        (certificate, mode, root, expected)
    };
    let signed = |change: fn(&mut CertificateParams), mode, expected| {
        case(authority.sign(change), mode, expected)
    };
    let mut cases = vec![
        case(
            made(&["localhost"], |_| {}),
            "verify-full",
            "signed by no authority in",
        ),
        case(
            made(&["localhost"], is_authority),
            "verify-ca",
            "is the certificate of an authority",
        ),
        case(
            namesake.sign(|_| {}),
            "verify-full",
            "although one has the name of its issuer",
        ),
        (
            narrow.sign(|_| {}),
            "verify-full",
            narrow.cert_pem.clone(),
            "breaks a constraint of an authority",
        ),
        signed(
            is_authority,
            "verify-full",
            "is the certificate of an authority",
        ),
        signed(
            has_an_unknown_critical_extension,
            "verify-full",
            "has a critical extension that is not supported",
        ),
        signed(is_not_valid_yet, "verify-ca", "is not valid yet"),
        signed(
            |params| params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth],
            "verify-ca",
            "is not meant for servers",
        ),
    ];
    if let Some(p521) = by_openssl(&P521, &["-sha512"]) {
        let expected = "no cipher, curve or signature algorithm in common";
        cases.push(case(p521, "verify-ca", expected));
    }
    if let Some((certificate, root)) = signed_with_p521() {
        let expected = "has a signature or key with an unsupported algorithm";
        cases.push((certificate, "verify-full", root, expected));
    }
    cases
}

fn says_what_is_wrong((certificate, mode, root, expected): &Case) {
    let server = server(certificate, &[]);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), root).unwrap();
    let root = file.path().display();
    let parameters = format!("sslmode={mode}&sslrootcert={root}");
    let said = check(&server, "localhost", &parameters);
    if expected.is_empty() {
        assert!(is_let_in(&said), "{mode}:\n{said}");
        return;
    }
    let flat = said.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in ["postgres-tls", expected, "->"] {
        assert!(flat.contains(part), "{part}:\n{said}");
    }
}

#[test]
fn the_verifying_modes_say_what_is_wrong_with_a_certificate() {
    let cases = [listed_certificates(), certificates_of_an_authority()].concat();
    for case in &cases {
        says_what_is_wrong(case);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tls_version_and_a_curve_that_are_not_supported_are_named() {
    let certificate = made(&["localhost"], |_| {});
    let old = [
        ("ssl_min_protocol_version", "TLSv1"),
        ("ssl_max_protocol_version", "TLSv1.1"),
    ];
    let old = server(&certificate, &old);
    let said = check(&old, "localhost", "sslmode=require");
    assert!(said.contains("no TLS version that is supported"), "{said}");
    let curve = server(&certificate, &[("ssl_ecdh_curve", "secp521r1")]);
    let said = check(&curve, "localhost", "sslmode=require");
    let flat = said.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        flat.contains("no cipher, curve or signature algorithm in common"),
        "{said}"
    );
    let new = server(&certificate, &[("ssl_min_protocol_version", "TLSv1.3")]);
    let said = check(
        &new,
        "localhost",
        "sslmode=require&ssl_max_protocol_version=TLSv1.2",
    );
    assert!(said.contains("no TLS version that is supported"), "{said}");
    let said = check(&new, "localhost", "sslmode=require&sslsni=0");
    assert!(is_let_in(&said), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn prefer_falls_back_to_no_encryption_when_tls_fails() {
    let certificate = made(&["localhost"], |_| {});
    let server = ScratchPostgres::builder()
        .tls(Tls {
            cert_pem: certificate.cert_pem,
            key_pem: certificate.key_pem,
            client_ca_pem: None,
        })
        .setting("ssl_ecdh_curve", "secp521r1")
        .hba_line("host all all 127.0.0.1/32 trust")
        .start()
        .unwrap();
    let said = check(&server, "localhost", "sslmode=prefer");
    assert!(is_let_in(&said), "{said}");
    let said = check(&server, "localhost", "sslmode=prefer&sslrootcert=system");
    assert!(said.contains("database-url-invalid"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn parameters_of_libpq_reach_both_kinds_of_session() {
    let certificate = made(&["db.example"], |_| {});
    let server = server(&certificate, &[]);
    let files = TempDir::new().unwrap();
    let root = files.path().join("root.pem");
    std::fs::write(&root, &certificate.cert_pem).unwrap();
    let root = root.display();
    // No resolver knows this host name, so `hostaddr` must give the address.
    let said = check(
        &server,
        "db.example",
        &format!(
            "hostaddr=127.0.0.1&sslmode=verify-full&sslrootcert={root}&connect_timeout=5\
             &keepalives_idle=7&keepalives_interval=3&keepalives_count=4&tcp_user_timeout=9000\
             &target_session_attrs=read-write&options=-c%20geqo%3Doff&channel_binding=prefer"
        ),
    );
    assert!(is_let_in(&said), "{said}");
    // The server refuses the unknown setting, which shows that it receives `options`.
    let said = check(
        &server,
        "127.0.0.1",
        "sslmode=require&options=-c%20no_such_setting%3Doff",
    );
    assert!(said.contains("no_such_setting"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_is_refused_when_a_primary_is_asked_for() {
    let mut primary = ScratchPostgres::builder().start().unwrap();
    primary.stop(StopMode::Fast, harness::PATIENCE).unwrap();
    let standby = ScratchPostgres::builder().standby_of(&primary);
    let standby = standby.start().unwrap();
    let say = |parameters: &str| {
        let url = format!("{}?{parameters}", standby.url("postgres"));
        let environment = [("DATABASE_URL", url.as_str())];
        let ran = postrider(&["slot", "list"], &environment).output().unwrap();
        String::from_utf8([ran.stdout, ran.stderr].concat()).unwrap()
    };
    let said = say("target_session_attrs=read-write");
    assert!(said.contains("error[postgres-standby]"), "{said}");
    assert!(said.contains("but a primary is needed"), "{said}");
    // With `any`, the client connects to the standby server, and the command itself refuses it.
    let said = say("target_session_attrs=any");
    assert!(said.contains("error[postgres-standby]"), "{said}");
    assert!(!said.contains("but a primary is needed"), "{said}");
    let said = say("target_session_attrs=standby");
    assert!(said.contains("error[database-url-invalid]"), "{said}");
}

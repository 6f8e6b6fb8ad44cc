//! Tests of servers with unusual certificates and TLS settings. The modes `prefer` and `require` accept
//! any certificate, as in libpq. The modes `verify-ca` and `verify-full` report what is wrong with the
//! certificate. The tests run `postrider check`, which opens an SQL session and a replication session.

use std::process::Command;

use rcgen::{
    BasicConstraints, CertificateParams, CustomExtension, DistinguishedName, DnType, IsCa, KeyPair,
    date_time_ymd,
};
use scratch_postgres::{ScratchPostgres, StopMode, Tls};
use tempfile::TempDir;

use crate::harness::{self, postrider};

/// A self-signed certificate and its key.
struct Certificate {
    cert_pem: String,
    key_pem: String,
}

fn made(names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Certificate {
    let names: Vec<String> = names.iter().map(|name| (*name).into()).collect();
    let mut params = CertificateParams::new(names).unwrap();
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, "localhost");
    params.distinguished_name = name;
    change(&mut params);
    let key = KeyPair::generate().unwrap();
    Certificate {
        cert_pem: params.self_signed(&key).unwrap().pem(),
        key_pem: key.serialize_pem(),
    }
}

/// Creates a self-signed certificate with a key or version that rcgen does not support. Returns `None`
/// if openssl is not installed.
fn by_openssl(key: &[&str], make: &[&str]) -> Option<Certificate> {
    let files = TempDir::new().unwrap();
    let run = |arguments: &[&str]| {
        let ran = Command::new("openssl")
            .args(arguments)
            .current_dir(files.path())
            .output();
        let Ok(ran) = ran else {
            eprintln!("SKIPPED: openssl is not installed");
            return None;
        };
        assert!(
            ran.status.success(),
            "{}",
            String::from_utf8_lossy(&ran.stderr)
        );
        Some(())
    };
    let genpkey = [&["genpkey", "-out", "key.pem"], key].concat();
    run(&genpkey)?;
    run(&[
        "req",
        "-new",
        "-key",
        "key.pem",
        "-subj",
        "/CN=localhost",
        "-out",
        "request.pem",
    ])?;
    let sign = [
        "x509",
        "-req",
        "-in",
        "request.pem",
        "-signkey",
        "key.pem",
        "-days",
        "30",
        "-out",
        "cert.pem",
    ];
    run(&[&sign, make].concat())?;
    let read = |name: &str| std::fs::read_to_string(files.path().join(name)).unwrap();
    Some(Certificate {
        cert_pem: read("cert.pem"),
        key_pem: read("key.pem"),
    })
}

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

/// Runs `check --all`, which opens both kinds of session. Returns stdout followed by stderr.
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
    let p521 = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-521"];
    let rsa = ["-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"];
    let certificates = [
        (
            "expired",
            Some(made(&["localhost"], |params| {
                params.not_before = date_time_ymd(2001, 1, 1);
                params.not_after = date_time_ymd(2002, 1, 1);
            })),
        ),
        (
            "unknown critical extension",
            Some(made(&["localhost"], |params| {
                let mut odd = CustomExtension::from_oid_content(&[1, 2, 3, 4], vec![5, 0]);
                odd.set_criticality(true);
                params.custom_extensions.push(odd);
            })),
        ),
        ("common name only", Some(made(&[], |_| {}))),
        (
            "of an authority",
            Some(made(&["localhost"], |params| {
                params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            })),
        ),
        ("another host", Some(made(&["db.example"], |_| {}))),
        ("P-521", by_openssl(&p521, &["-sha512"])),
        ("X.509 version 1", by_openssl(&rsa, &[])),
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
            // This server refuses plain connections, so a fallback to a plain connection would show
            // this error.
            assert!(!said.contains("postgres-hba"), "{kind}, {mode}:\n{said}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_verifying_modes_say_what_is_wrong_with_a_certificate() {
    let authority = made(&["authority"], |params| {
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    });
    let files = TempDir::new().unwrap();
    let write = |name: &str, text: &str| {
        let path = files.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let other = write("other.pem", &authority.cert_pem);
    let rsa = ["-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"];
    let p521 = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-521"];
    let good = made(&["localhost"], |_| {});
    let expired = made(&["localhost"], |params| {
        params.not_before = date_time_ymd(2001, 1, 1);
        params.not_after = date_time_ymd(2002, 1, 1);
    });
    let named = made(&["db.example"], |_| {});
    let unnamed = made(&[], |_| {});
    let of_authority = made(&["localhost"], |params| {
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    });
    let mut cases = vec![
        (good, "verify-full", None, "signed by no authority in"),
        (expired, "verify-ca", Some("expired.pem"), "has expired"),
        (
            named,
            "verify-full",
            Some("named.pem"),
            "is for another host",
        ),
        (
            unnamed,
            "verify-full",
            Some("unnamed.pem"),
            "names no host in subjectAltName",
        ),
        (of_authority, "verify-full", Some("authority.pem"), ""),
    ];
    if let Some(v1) = by_openssl(&rsa, &[]) {
        cases.push((v1, "verify-ca", None, "X.509 version 1"));
    }
    if let Some(p521) = by_openssl(&p521, &["-sha512"]) {
        cases.push((
            p521,
            "verify-ca",
            None,
            "no cipher, curve or signature algorithm in common",
        ));
    }
    for (certificate, mode, root, expected) in cases {
        let server = server(&certificate, &[]);
        let root = root.map_or(other.clone(), |name| write(name, &certificate.cert_pem));
        let said = check(
            &server,
            "localhost",
            &format!("sslmode={mode}&sslrootcert={root}"),
        );
        if expected.is_empty() {
            assert!(is_let_in(&said), "{mode}:\n{said}");
            continue;
        }
        let flat = said.split_whitespace().collect::<Vec<_>>().join(" ");
        for part in ["postgres-tls", expected, "->"] {
            assert!(flat.contains(part), "{part}:\n{said}");
        }
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
    // The server reads `options` of both sessions, and refuses unknown settings.
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
    // The connection is made. The command itself then refuses the standby server.
    let said = say("target_session_attrs=any");
    assert!(said.contains("error[postgres-standby]"), "{said}");
    assert!(!said.contains("but a primary is needed"), "{said}");
    let said = say("target_session_attrs=standby");
    assert!(said.contains("error[database-url-invalid]"), "{said}");
}

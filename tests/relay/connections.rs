//! Tests of a complete relay that connects with different values of libpq's `sslmode`. The relay must
//! never log a password. `src/postgres/tests.rs` tests each kind of session separately.

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
};
use scratch_postgres::{ScratchPostgres, Tls};
use tempfile::TempDir;

use crate::harness::{self, Database, Relay, insert_orders};

pub(crate) const PASSWORD: &str = "s3cret/%&word";
pub(crate) const PASSWORD_IN_URL: &str = "s3cret%2F%25%26word";

/// A certificate authority, and its own certificate as PEM.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params
            .distinguished_name
            .push(DnType::CommonName, "test authority");
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            issuer: Issuer::new(params, key),
            pem,
        }
    }

    /// Signs a certificate for the host names `names`. Returns the certificate and its key as PEM.
    fn sign(
        &self,
        common_name: &str,
        names: &[&str],
        usage: ExtendedKeyUsagePurpose,
    ) -> (String, String) {
        let names: Vec<String> = names.iter().map(|name| (*name).into()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params
            .distinguished_name
            .push(DnType::CommonName, common_name);
        params.extended_key_usages.push(usage);
        let key = KeyPair::generate().unwrap();
        (
            params.signed_by(&key, &self.issuer).unwrap().pem(),
            key.serialize_pem(),
        )
    }
}

/// A server on which the roles `relay` and `certified` must connect with TLS.
pub(crate) struct Secured {
    pub(crate) database: Database,
    authority: Authority,
    pub(crate) files: TempDir,
    port: u16,
    socket_dir: String,
}

impl Secured {
    /// Starts a server whose certificate is valid for the host names `names`.
    pub(crate) async fn start(names: &[&str]) -> Self {
        let authority = Authority::new();
        let (cert_pem, key_pem) =
            authority.sign("server", names, ExtendedKeyUsagePurpose::ServerAuth);
        let server = ScratchPostgres::builder()
            .setting("wal_level", "logical")
            .setting("password_encryption", "scram-sha-256")
            .tls(Tls {
                cert_pem,
                key_pem,
                client_ca_pem: Some(authority.pem.clone()),
            })
            .hba_line("hostssl all relay 127.0.0.1/32 scram-sha-256")
            .hba_line("hostssl all certified 127.0.0.1/32 cert")
            .start()
            .unwrap();
        let (port, socket_dir) = (server.port(), server.socket_dir().display().to_string());
        let database = Database::on(server).await;
        for role in ["relay", "certified"] {
            database
                .execute(&format!(
                    "CREATE ROLE {role} LOGIN REPLICATION PASSWORD '{PASSWORD}'; \
                     GRANT postrider_relay TO {role}"
                ))
                .await;
        }
        let secured = Self {
            database,
            authority,
            files: TempDir::new().unwrap(),
            port,
            socket_dir,
        };
        secured.write("ca.pem", &secured.authority.pem);
        secured
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> String {
        let path = self.files.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    }

    pub(crate) fn url(&self, host: &str, parameters: &str) -> String {
        let port = self.port;
        format!("postgres://relay:{PASSWORD_IN_URL}@{host}:{port}/postgres?{parameters}")
    }

    pub(crate) fn ca(&self) -> String {
        self.files.path().join("ca.pem").display().to_string()
    }

    /// Checks that a relay with the variables `environment` delivers, and logs no password. Returns
    /// its log, which contains the lines of all levels.
    async fn delivers(&self, environment: &[(&str, &str)]) -> String {
        let emulator = harness::emulator().await;
        self.database
            .execute("DELETE FROM outbox.events; DELETE FROM outbox.dispatch")
            .await;
        insert_orders(&self.database, 20, 3).await;
        let addr = emulator.addr().to_string();
        let mut all = vec![("RUST_LOG", "trace")];
        all.extend(environment);
        let relay = Relay::start_with(&self.database, &addr, &all);
        self.database.wait_until_recorded().await;
        let report = harness::check_streamed(&self.database, &emulator).await;
        assert!(
            report.is_clean(),
            "{environment:?}: {report}\n{}",
            relay.log()
        );
        let log = relay.log();
        assert!(
            log.contains("TRACE"),
            "the log contains the lines of all levels"
        );
        assert!(
            !log.contains(PASSWORD) && !log.contains(PASSWORD_IN_URL),
            "a password in the log"
        );
        relay.stop().await;
        log
    }

    /// Checks that a relay with the database URL `url` exits with the error `code` and exit status 3.
    async fn is_refused(&self, url: &str, code: &str) {
        let more = [("DATABASE_URL", url), ("POSTRIDER_START_TIMEOUT_S", "1")];
        let relay = Relay::start_with(&self.database, "127.0.0.1:9", &more);
        relay.wait_for_error(code).await;
        let log = relay.log();
        assert!(
            !log.contains(PASSWORD) && !log.contains("panicked"),
            "{log}"
        );
        assert_eq!(relay.wait().await.code(), Some(3), "{log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_with_the_right_name_serves_under_every_sslmode_with_tls() {
    let secured = Secured::start(&["localhost", "127.0.0.1"]).await;
    let ca = secured.ca();
    for (host, parameters) in [
        ("localhost", format!("sslmode=verify-full&sslrootcert={ca}")),
        ("127.0.0.1", format!("sslmode=verify-full&sslrootcert={ca}")),
        ("localhost", format!("sslmode=verify-ca&sslrootcert={ca}")),
        ("localhost", "sslmode=require".to_owned()),
        ("localhost", String::new()),
    ] {
        secured
            .delivers(&[("DATABASE_URL", &secured.url(host, &parameters))])
            .await;
    }
    secured
        .is_refused(&secured.url("localhost", "sslmode=disable"), "postgres-hba")
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_with_another_name_passes_verify_ca_and_fails_verify_full() {
    let secured = Secured::start(&["db.example"]).await;
    let ca = secured.ca();
    let url = secured.url("localhost", &format!("sslmode=verify-ca&sslrootcert={ca}"));
    secured.delivers(&[("DATABASE_URL", &url)]).await;
    let url = secured.url(
        "localhost",
        &format!("sslmode=verify-full&sslrootcert={ca}"),
    );
    secured.is_refused(&url, "postgres-tls").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_another_authority_and_a_wrong_password_are_refused() {
    let secured = Secured::start(&["localhost"]).await;
    let other = secured.write("other.pem", &Authority::new().pem);
    for mode in ["verify-full", "verify-ca", "require"] {
        let url = secured.url("localhost", &format!("sslmode={mode}&sslrootcert={other}"));
        secured.is_refused(&url, "postgres-tls").await;
    }
    let url = secured
        .url("localhost", "sslmode=require")
        .replace("s3cret", "guess");
    secured.is_refused(&url, "postgres-authentication").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_certificate_logs_in() {
    let secured = Secured::start(&["localhost"]).await;
    let (cert, key) = secured
        .authority
        .sign("certified", &[], ExtendedKeyUsagePurpose::ClientAuth);
    let (cert, key_file) = (
        secured.write("client.pem", &cert),
        secured.write("client.key", &key),
    );
    let port = secured.port;
    let ca = secured.ca();
    let url = format!(
        "postgres://certified@localhost:{port}/postgres\
         ?sslmode=verify-full&sslrootcert={ca}&sslcert={cert}&sslkey={key_file}"
    );
    let log = secured.delivers(&[("DATABASE_URL", &url)]).await;
    for line in key.lines() {
        assert!(!log.contains(line), "the client's key in the log: {line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_variables_of_libpq_and_a_unix_socket_are_enough() {
    let secured = Secured::start(&["localhost"]).await;
    let folder = secured.socket_dir.clone();
    let port = secured.port.to_string();
    secured
        .delivers(&[
            ("DATABASE_URL", ""),
            ("PGHOST", &folder),
            ("PGPORT", &port),
            ("PGUSER", "relay"),
            ("PGPASSWORD", PASSWORD),
            ("PGDATABASE", "postgres"),
        ])
        .await;
}

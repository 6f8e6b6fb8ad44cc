//! Tests that the relay's log contains no password, token, private key or payload, not even at trace
//! level with the lines of all libraries, and not even after errors.

use std::process::{Child, Stdio};
use std::time::Instant;

use pubsub_emulator::{Action, Fault, RunningEmulator};
use tempfile::NamedTempFile;
use tonic::Code;

use crate::connections::{PASSWORD, PASSWORD_IN_URL, Secured};
use crate::harness::{self, Database, PATIENCE, eventually};
use crate::service::{rsa_key, service_account, tls_in_front_of};

/// A secret text in every payload.
const PAYLOAD: &str = "tell-nobody-4711";
/// A secret text in a header of every event.
const HEADER: &str = "nor-this-0815";

/// The beginning of each access token. A token begins with a JSON object in base64.
const TOKEN: &str = "eyJ";

/// The event that Pub/Sub refuses at first.
const BAD: &str = "00000000-0000-4000-8000-00000000bad0";

/// A relay at log level `trace`, whose standard output and standard error go to one file.
struct Traced {
    child: Child,
    output: NamedTempFile,
}

impl Traced {
    fn start(environment: &[(&str, &str)]) -> Self {
        let output = NamedTempFile::new().unwrap();
        let all = [
            &[("RUST_LOG", "trace"), ("POSTRIDER_HTTP_ADDR", "off")],
            environment,
        ]
        .concat();
        let child = harness::postrider(&["run"], &all)
            .stdout(output.reopen().unwrap())
            // Use the same file description, so that both outputs share one position in the file.
            .stderr(Stdio::from(output.as_file().try_clone().unwrap()))
            .spawn()
            .unwrap();
        Self { child, output }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.output.path()).unwrap()).into_owned()
    }

    async fn wait_for(&self, what: &str) {
        eventually(&format!("the output contains {what:?}"), || async {
            self.text().contains(what).then_some(())
        })
        .await;
    }

    async fn ended(mut self) -> String {
        let deadline = Instant::now() + PATIENCE;
        while self.child.try_wait().unwrap().is_none() {
            assert!(
                Instant::now() < deadline,
                "the relay did not end:\n{}",
                self.text()
            );
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        self.text()
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The texts that the output must never contain: the passwords, each line of the private key, the
/// beginning of tokens, the payload and the header.
struct Secrets(Vec<String>);

impl Secrets {
    fn new(private_key: &str) -> Self {
        let key = private_key.lines().map(ToOwned::to_owned);
        let others = [
            PASSWORD,
            PASSWORD_IN_URL,
            PAYLOAD,
            HEADER,
            "Bearer ey",
            TOKEN,
        ];
        Self(key.chain(others.map(ToOwned::to_owned)).collect())
    }

    fn assert_unseen(&self, output: &str, when: &str) {
        // Search for the payload also in the form in which Rust's debug output shows bytes.
        let listed = PAYLOAD.bytes().map(|b| b.to_string()).collect::<Vec<_>>();
        let listed = listed.join(", ");
        for secret in self.0.iter().chain([&listed]) {
            if let Some(line) = output.lines().find(|line| line.contains(secret.as_str())) {
                panic!("{secret:?} was printed {when}:\n{line}");
            }
        }
    }
}

async fn insert(database: &Database, count: u32) {
    database
        .execute(&format!(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload, headers) \
             SELECT 'order', 'o-' || i % 3, 'OrderPlaced', '{{\"note\": \"{PAYLOAD}\"}}', \
                    '{{\"tenant\": \"{HEADER}\"}}' FROM generate_series(1, {count}) i"
        ))
        .await;
}

/// Inserts an event that cannot become a message, because an attribute is too long.
async fn insert_too_long(database: &Database) {
    database
        .execute(&format!(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload, headers) \
             VALUES ('order', 'o-1', 'OrderPlaced', '{{\"note\": \"{PAYLOAD}\"}}', \
                     jsonb_build_object('long', repeat('{HEADER}', 100)))"
        ))
        .await;
}

/// Parts of the lines that the libraries for HTTP/2, TLS and PostgreSQL log at the level `trace`.
const LIBRARY_LINES: [&str; 3] = [
    "TRACE Connection{peer=Client}",
    "ClientExtensions",
    "poll_flush",
];

async fn publish_attempts_and_the_walsender_fail(database: &Database, emulator: &RunningEmulator) {
    // Provoke failed publish attempts, some with an unknown outcome, and a terminated walsender.
    for action in [
        Action::Fail(Code::Unavailable),
        Action::StoreThenFail(Code::Internal),
    ] {
        emulator.faults().inject(Fault::new(action).times(3));
    }
    emulator.faults().reset_connections();
    insert(database, 30).await;
    database.wait_until_recorded().await;
    database
        .execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots")
        .await;
    insert(database, 30).await;
    database.wait_until_recorded().await;
}

/// Returns a wrong password and wrong keys. Each entry has a text for the failure messages of the test, the
/// URL of the database, the path of the key file, and the code of the expected error.
fn wrong_credentials(
    secured: &Secured,
    private_key: &str,
    (url, account): (&str, &str),
) -> [(&'static str, String, String, &'static str); 3] {
    let wrong_password = url.replace("s3cret", "s3cretguess");
    let broken_key = private_key.replacen("MII", "MII*", 1);
    let broken_account = secured.write("broken.json", &service_account(&broken_key));
    let half = service_account(private_key);
    let half_account = secured.write("half.json", &half[..half.len() / 2]);
    [
        (
            "after a wrong password",
            wrong_password,
            account.to_owned(),
            "postgres-authentication",
        ),
        (
            "after half a key file",
            url.to_owned(),
            half_account,
            "credentials-missing",
        ),
        (
            "after a broken key",
            url.to_owned(),
            broken_account,
            "credentials-unavailable",
        ),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn no_secret_is_printed_at_trace_level_when_things_go_wrong() {
    let Some(private_key) = rsa_key() else {
        eprintln!("SKIPPED: openssl is not installed, so no service account can be made");
        return;
    };
    let secrets = Secrets::new(&private_key);
    let secured = Secured::start(&["localhost"]).await;
    let database = &secured.database;
    let emulator = harness::emulator().await;
    let (port, ca_pem) = tls_in_front_of(emulator.addr().to_string()).await;
    let pubsub_ca = secured.write("pubsub-ca.pem", &ca_pem);
    let account = secured.write("account.json", &service_account(&private_key));
    let endpoint = format!("https://localhost:{port}");
    let parameters = format!("sslmode=verify-full&sslrootcert={}", secured.ca());
    let url = secured.url("localhost", &parameters);
    let environment = |url, account| {
        [
            ("DATABASE_URL", url),
            ("PUBSUB_PROJECT_ID", "demo"),
            ("POSTRIDER_PUBSUB_ENDPOINT", endpoint.as_str()),
            ("POSTRIDER_START_TIMEOUT_S", "1"),
            ("GOOGLE_APPLICATION_CREDENTIALS", account),
            ("SSL_CERT_FILE", pubsub_ca.as_str()),
        ]
    };

    let secrets = Secrets([secrets.0, vec!["guess".to_owned()]].concat());
    insert(database, 1).await;
    let wrong = wrong_credentials(&secured, &private_key, (&url, &account));
    for (when, url, account, code) in &wrong {
        let relay = Traced::start(&environment(url, account));
        relay.wait_for(code).await;
        secrets.assert_unseen(&relay.text(), when);
    }

    let relay = Traced::start(&environment(&url, &account));
    insert(database, 30).await;
    database.wait_until_recorded().await;
    publish_attempts_and_the_walsender_fail(database, &emulator).await;
    insert_too_long(database).await;
    relay.wait_for("event-invalid").await;
    let output = relay.text();
    for of_a_library in LIBRARY_LINES {
        assert!(
            output.contains(of_a_library),
            "the output contains the lines of all libraries"
        );
    }
    secrets.assert_unseen(&output, "while running");
}

/// Makes the running relay publish rows of a publication gap, and events that an operator releases from
/// quarantine.
async fn rows_are_audited_and_released(database: &Database, emulator: &RunningEmulator) {
    database.wait_until_audited().await;
    database
        .execute("ALTER PUBLICATION postrider DROP TABLE outbox.events")
        .await;
    insert(database, 30).await;
    insert_too_long(database).await;
    database
        .execute("ALTER PUBLICATION postrider ADD TABLE outbox.events")
        .await;
    database.wait_until_recorded().await;
    database
        .execute(&format!(
            "INSERT INTO outbox.events (id, aggregatetype, aggregateid, event_type, payload, headers) \
             VALUES ('{BAD}', 'order', 'o-2', 'Bad', '{{\"note\": \"{PAYLOAD}\"}}', \
                     '{{\"tenant\": \"{HEADER}\"}}')"
        ))
        .await;
    insert(database, 30).await;
    database.wait_until_recorded().await;
    emulator.faults().lift_all();
    let url = [("DATABASE_URL", database.url.as_str())];
    let release = harness::postrider(&["quarantine", "release", "--all"], &url).output();
    assert!(release.unwrap().status.success());
    // The quarantine never becomes empty, because the released event that is too long returns to it. So wait
    // only until no event is `released`, and no event of key o-2 is in quarantine.
    eventually("the releasable events are published", || async {
        let waiting = "SELECT count(*) FROM outbox.dispatch \
                       WHERE state = 'released' OR (state = 'quarantined' AND ordering_key = 'o-2')";
        (database.number(waiting).await == 0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_secret_is_printed_at_trace_level_for_rows_read_by_sql() {
    let secrets = Secrets::new("-----BEGIN PRIVATE KEY-----");
    let secured = Secured::start(&["localhost"]).await;
    let database = &secured.database;
    let emulator = harness::emulator().await;
    emulator
        .create_topic("projects/demo/topics/dead")
        .await
        .unwrap();
    // Refuse the event on its own topic only. Otherwise Pub/Sub would also refuse its dead letter, which has the
    // same event id.
    let event_id = BAD.to_owned();
    let poison = Fault::new(Action::Poison { event_id }).on_topic("order.events");
    emulator.faults().inject(poison);
    let (url, host) = (secured.url("localhost", ""), emulator.addr().to_string());
    let environment = [
        ("DATABASE_URL", url.as_str()),
        ("PUBSUB_EMULATOR_HOST", host.as_str()),
        ("PUBSUB_PROJECT_ID", "demo"),
        ("POSTRIDER_DEAD_LETTER_TOPIC", "dead"),
    ];
    let relay = Traced::start(&environment);
    insert(database, 30).await;
    rows_are_audited_and_released(database, &emulator).await;
    let output = relay.text();
    for code in ["publication-gap", "event-invalid"] {
        assert!(output.contains(code), "no {code}");
    }
    secrets.assert_unseen(&output, "by the audit and a release");
    drop(relay);

    database.drop_slot().await;
    insert(database, 30).await;
    insert_too_long(database).await;
    let relay = Traced::start(&environment);
    relay.wait_for("recovered").await;
    database.wait_until_recorded().await;
    let output = relay.text();
    assert!(output.contains("slot-missing"), "no recovery");
    secrets.assert_unseen(&output, "by a recovery");

    // These commands log nothing, so the loop checks only their output.
    let talkative = [&environment[..], &[("RUST_LOG", "trace")]].concat();
    for command in [
        &["check"][..],
        &["slot"],
        &["quarantine", "list"],
        &["quarantine", "show", BAD],
        &["recover", "--dry-run"],
        &["status"],
        &["event", BAD],
        &["audit"],
        &["prune", "--older-than", "1d", "--dry-run"],
        &["replay", "--since", "1h", "--dry-run"],
    ] {
        let output = harness::postrider(command, &talkative).output().unwrap();
        let printed = [output.stdout, output.stderr].concat();
        let printed = String::from_utf8_lossy(&printed);
        assert!(!printed.is_empty(), "{command:?}");
        secrets.assert_unseen(&printed, &format!("by {command:?}"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_in_a_settings_file_do_not_show_its_password() {
    let secrets = Secrets::new("-----BEGIN PRIVATE KEY-----");
    let url = format!("postgres://relay:{PASSWORD_IN_URL}@localhost:1/db");
    let files = tempfile::TempDir::new().unwrap();
    let file = |name: &str, text: String| {
        let path = files.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let cases = [
        (
            "POSTRIDER_CONFIG",
            file("unclosed", format!("database_url = \"{url}\nslot = 1")),
        ),
        (
            "POSTRIDER_CONFIG",
            file("two", format!("database_url = \"{url}\" \"{url}\"")),
        ),
        (
            "POSTRIDER_CONFIG",
            file("bare", format!("database_url = {url}")),
        ),
        (
            "POSTRIDER_CONFIG",
            file("format", format!("log_format = \"{PASSWORD}\"")),
        ),
        (
            "POSTRIDER_CONFIG",
            file("list", format!("database_url = [\"{url}\"]")),
        ),
        (
            "DATABASE_URL",
            url.replace("localhost:1", "localhost:notaport"),
        ),
        ("DATABASE_URL", url.replace("postgres://", "mysql://")),
        ("DATABASE_URL", format!("{url}?sslmode={PASSWORD_IN_URL}")),
        ("POSTRIDER_WAL_SENDER_TIMEOUT_S", PASSWORD.to_owned()),
        ("POSTRIDER_LOG_FORMAT", PASSWORD.to_owned()),
        ("POSTRIDER_HTTP_ADDR", url.clone()),
        (
            "POSTRIDER_PUBSUB_ENDPOINT",
            format!("ftp://x:{PASSWORD_IN_URL}@y"),
        ),
        ("PUBSUB_EMULATOR_HOST", url.clone()),
    ];
    for (variable, value) in cases {
        let output = Traced::start(&[(variable, value.as_str())]).ended().await;
        assert!(output.contains("error["), "{variable}={value}:\n{output}");
        secrets.assert_unseen(&output, &format!("for {variable}={value}"));
    }
}

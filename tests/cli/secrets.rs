//! Checks that no command prints any part of a secret. This must hold for all characters in the
//! secret, for all ways to pass the secret, for right and wrong secrets, and even at log level
//! `trace`.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use scratch_postgres::ScratchPostgres;
use tempfile::TempDir;
use tokio::sync::Semaphore;

use crate::support::{command, connect, execute};

/// Number of secrets that the test tries.
const SECRETS: u64 = 200;

/// The letters in secrets. Text that a command prints hardly ever has three of these letters within four
/// characters, so such a group in the output comes from a secret.
const LETTERS: [char; 10] = ['Q', 'X', 'Z', 'J', 'K', 'V', 'W', 'H', 'B', 'F'];

/// Characters that have a meaning in URLs, password files, TOML, SQL or shells.
const SPECIAL: [&str; 22] = [
    "@", ":", "/", "?", "#", "[", "]", "%", " ", "\"", "'", "\\", "\n", "&", "=", "+", "é", "漢",
    "%40", "://", "@@", "%zz",
];

/// A repeatable sequence of random numbers (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % end as u64) as usize
    }

    fn letters(&mut self) -> String {
        let count = 4 + self.below(4);
        (0..count)
            .map(|_| LETTERS[self.below(LETTERS.len())])
            .collect()
    }

    /// Draws a secret: groups of letters with special characters between them. Some secrets begin
    /// with a number that a parser could mistake for a port.
    fn secret(&mut self) -> String {
        let mut secret = match self.below(4) {
            0 => format!("{}", 10_000 + self.below(50_000)),
            _ => self.letters(),
        };
        for _ in 0..1 + self.below(3) {
            secret.push_str(SPECIAL[self.below(SPECIAL.len())]);
            secret.push_str(&self.letters());
        }
        secret
    }
}

/// Escapes every byte that is not a letter or digit.
fn percent_encoded(text: &str) -> String {
    text.bytes()
        .map(|byte| {
            if byte.is_ascii_alphanumeric() {
                char::from(byte).to_string()
            } else {
                format!("%{byte:02X}")
            }
        })
        .collect()
}

/// The four-character pieces of a secret that contain at least three of `LETTERS`.
fn fragments(secret: &str) -> Vec<String> {
    let characters: Vec<char> = secret.chars().collect();
    let windows = characters.windows(4);
    windows
        .filter(|window| window.iter().filter(|c| LETTERS.contains(c)).count() >= 3)
        .map(|window| window.iter().collect())
        .collect()
}

/// Number of ways to pass a secret to a command.
const WAYS: usize = 23;

fn private_file(path: PathBuf, text: &str) -> String {
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    path.display().to_string()
}

/// Returns the environment of one command. `way` selects how the command gets the secret.
fn environment(
    way: usize,
    secret: &str,
    role: &str,
    port: u16,
    files: &Path,
) -> Vec<(String, String)> {
    let encoded = percent_encoded(secret);
    let file = |name: &str, text: String| private_file(files.join(format!("{role}-{name}")), &text);
    let url = |password: &str| format!("postgres://{role}:{password}@127.0.0.1:{port}/postgres");
    let right = url(&encoded);
    let without = format!("postgres://{role}@127.0.0.1:{port}/postgres");
    let line = format!("database_url = \"{}\"", url(secret));
    let mut set: Vec<(&str, String)> = match way {
        0 => vec![("DATABASE_URL", right)],
        1 => vec![("DATABASE_URL", url(secret))],
        2 => vec![("DATABASE_URL", format!("{without}?password={secret}"))],
        3 => vec![("DATABASE_URL", format!("{without}?sslmode={encoded}"))],
        4 => vec![("DATABASE_URL", without), ("PGPASSWORD", secret.to_owned())],
        5 => vec![
            ("DATABASE_URL", without),
            ("PGPASSFILE", file("pgpass", format!("*:*:*:*:{secret}\n"))),
        ],
        6 => vec![("DATABASE_URL", without), ("PGPASSFILE", secret.to_owned())],
        7 => vec![("POSTRIDER_CONFIG", file("config.toml", line + "\n"))],
        8 => vec![(
            "POSTRIDER_CONFIG",
            file(
                "bare.toml",
                format!("slot = \"a\"\ndatabase_url = {}\n", url(secret)),
            ),
        )],
        9 => vec![("POSTRIDER_CONFIG", line)],
        10..=12 => vec![("DATABASE_URL", right), of_pubsub(way, secret, file)],
        13 => vec![
            ("DATABASE_URL", format!("{right}?sslmode=require")),
            ("PGSSLCERT", "client.pem".to_owned()),
            ("PGSSLKEY", format!("-----BEGIN PRIVATE KEY-----\n{secret}")),
        ],
        14 => vec![(
            "DATABASE_URL",
            format!("{right}?{secret}&{encoded}={encoded}"),
        )],
        15.. => forms_of_libpq(way, secret, role, port, file),
    };
    if !matches!(way, 10..=12) {
        set.push(("PUBSUB_EMULATOR_HOST", "127.0.0.1:1".to_owned()));
    }
    set.extend(COMMON.map(|(name, value)| (name, value.to_owned())));
    set.push(("POSTRIDER_SLOT", format!("of_{role}")));
    let owned = |(name, value): (&str, String)| (name.to_owned(), value);
    set.into_iter().map(owned).collect()
}

/// Returns the environment variable, as name and value, that passes the secret to the Pub/Sub client.
fn of_pubsub(
    way: usize,
    secret: &str,
    file: impl Fn(&str, String) -> String,
) -> (&'static str, String) {
    let account = format!("{{\"type\": \"service_account\", \"private_key\": \"{secret}\"}}");
    match way {
        10 => ("GOOGLE_APPLICATION_CREDENTIALS", account),
        11 => (
            "GOOGLE_APPLICATION_CREDENTIALS",
            file("account.json", account),
        ),
        _ => (
            "POSTRIDER_PUBSUB_ENDPOINT",
            format!("https://user:{secret}@localhost"),
        ),
    }
}

/// Returns the environment variables that pass the secret in one of these ways: in a connection string of
/// `name=value` pairs, in a URL with several hosts, or with a connection service file of libpq.
fn forms_of_libpq(
    way: usize,
    secret: &str,
    role: &str,
    port: u16,
    file: impl Fn(&str, String) -> String,
) -> Vec<(&'static str, String)> {
    let pairs = format!("host=127.0.0.1 port={port} user={role} dbname=postgres");
    let escaped = secret.replace('\\', "\\\\").replace('\'', "\\'");
    let hosts = format!("127.0.0.1:1,127.0.0.1:{port}");
    let service = |password: &str| {
        format!(
            "[shop]\nhost=127.0.0.1\nport={port}\nuser={role}\ndbname=postgres\npassword={password}\n"
        )
    };
    match way {
        15 => vec![("DATABASE_URL", format!("password='{escaped}' {pairs}"))],
        16 => vec![("DATABASE_URL", format!("password={secret} {pairs}"))],
        17 => vec![("DATABASE_URL", format!("{pairs} password='{secret}'"))],
        18 => vec![(
            "DATABASE_URL",
            format!(
                "postgres://{role}:{}@{hosts}/postgres",
                percent_encoded(secret)
            ),
        )],
        19 => vec![(
            "DATABASE_URL",
            format!("postgres://{role}:{secret}@{hosts}/postgres"),
        )],
        20 => vec![
            ("DATABASE_URL", "service=shop".to_owned()),
            ("PGSERVICEFILE", file("service.conf", service(secret))),
        ],
        21 => vec![
            ("PGSERVICE", secret.to_owned()),
            ("PGSERVICEFILE", file("other.conf", service("x"))),
        ],
        22 => vec![
            ("DATABASE_URL", "service=shop".to_owned()),
            ("PGSERVICEFILE", secret.to_owned()),
        ],
        _ => unreachable!("invariant: below WAYS"),
    }
}

/// Variables that every command gets in addition to the variables with the secret.
const COMMON: [(&str, &str); 4] = [
    ("PUBSUB_PROJECT_ID", "demo"),
    ("POSTRIDER_START_TIMEOUT_S", "1"),
    ("POSTRIDER_HTTP_ADDR", "off"),
    ("RUST_LOG", "trace"),
];

const COMMANDS: [&[&str]; 27] = [
    &["run"],
    &["check"],
    &["init", "--apply"],
    &["slot", "list"],
    &["slot", "show"],
    &["slot", "create"],
    &["slot", "drop", "--yes"],
    &["quarantine", "list"],
    &["quarantine", "release", "--all"],
    &["recover", "--dry-run"],
    &["check", "--json"],
    &["init"],
    &["check", "--offline"],
    &["status"],
    &["status", "--json"],
    &["slot", "advance", "--to", "0/1", "--yes"],
    &["event", "4711"],
    &["event", "--key", "o-1", "--json"],
    &["tail", "--since", "1h"],
    &["audit"],
    &["prune", "--older-than", "1d", "--dry-run"],
    &["prune", "--older-than", "1d", "--yes"],
    &["replay", "--since", "1h", "--dry-run"],
    &["quarantine", "show", "4711"],
    &["quarantine", "discard", "--all", "--yes"],
    &["recover", "--yes"],
    &["recover", "--adopt", "--yes"],
];

#[tokio::test(flavor = "multi_thread")]
async fn no_command_prints_part_of_a_secret_at_trace_level() {
    let server = ScratchPostgres::builder()
        .setting("max_connections", "60")
        .setting("max_replication_slots", "250")
        .hba_line("host all +secretive 127.0.0.1/32 scram-sha-256")
        .start()
        .unwrap();
    let admin = connect(&server.socket_url("postgres")).await;
    execute(&admin, "create role secretive").await;
    let files = TempDir::new().unwrap();
    let mut random = Random(20_261_126);
    let places = Arc::new(Semaphore::new(4));
    let mut running = tokio::task::JoinSet::new();
    for nth in 0..SECRETS {
        let secret = random.secret();
        let role = format!("role{nth}");
        let literal = format!("E'{}'", secret.replace('\\', "\\\\").replace('\'', "''"));
        execute(
            &admin,
            &format!("create role {role} login replication password {literal} in role secretive"),
        )
        .await;
        for way in 0..WAYS {
            let arguments = COMMANDS[(nth as usize + way) % COMMANDS.len()];
            let set = environment(way, &secret, &role, server.port(), files.path());
            let (secret, places) = (secret.clone(), places.clone());
            running.spawn(async move {
                let _place = places.acquire().await.unwrap();
                let env: Vec<(&str, &str)> =
                    set.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
                let child = command(arguments, &env).spawn().unwrap();
                // If the login succeeds, `run` does not exit on its own, so kill it after 2 s.
                let pid = child.id().unwrap().to_string();
                let ended = child.wait_with_output();
                let limit = std::time::Duration::from_secs(2);
                let mut ended = std::pin::pin!(ended);
                let output = match tokio::time::timeout(limit, &mut ended).await {
                    Ok(output) => output.unwrap(),
                    Err(_) => {
                        let _ = std::process::Command::new("kill")
                            .args(["-KILL", &pid])
                            .status();
                        ended.await.unwrap()
                    }
                };
                let printed = [output.stdout, output.stderr].concat();
                let printed = String::from_utf8_lossy(&printed);
                let encoded = percent_encoded(&secret);
                for fragment in fragments(&secret).iter().chain(&fragments(&encoded)) {
                    assert!(
                        !printed.contains(fragment.as_str()),
                        "{fragment:?} of {secret:?}, way {way}, {arguments:?}:\n{printed}"
                    );
                }
                assert!(
                    !printed.contains("panicked"),
                    "{secret:?}, way {way}:\n{printed}"
                );
            });
        }
    }
    while let Some(done) = running.join_next().await {
        done.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_url_that_is_not_utf8_is_refused_and_not_printed() {
    use std::os::unix::ffi::OsStringExt;
    let text = |prefix: &str| {
        let bytes = [prefix.as_bytes(), b"postgres://u:QXZJKV\xff@h/d"].concat();
        std::ffi::OsString::from_vec(bytes)
    };
    for (variable, flag, code) in [
        (Some("DATABASE_URL"), None, "error[setting-invalid]"),
        (Some("PGPASSWORD"), None, "error[setting-invalid]"),
        (None, Some("--database-url="), "invalid UTF-8"),
        (None, Some("--no-such-flag="), "error"),
        (None, Some(""), "error"),
    ] {
        let mut command = command(&["check"], &[]);
        if let Some(variable) = variable {
            command.env(variable, text(""));
        }
        if let Some(flag) = flag {
            command.arg(text(flag));
        }
        let ran = command.output().await.unwrap();
        let printed = [ran.stdout, ran.stderr].concat();
        let printed = String::from_utf8_lossy(&printed);
        assert!(printed.contains(code), "{variable:?} {flag:?}:\n{printed}");
        for part in ["QXZJKV", "panicked"] {
            assert!(!printed.contains(part), "{variable:?} {flag:?}:\n{printed}");
        }
        if let Some(variable) = variable {
            assert!(printed.contains(variable), "{printed}");
        }
    }
}

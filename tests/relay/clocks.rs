//! Tests in which the clock of the relay's machine and the clock of the server differ by an hour, or the
//! server's clock jumps. All ages must still be right.
//!
//! The tests change the clocks with libfaketime, which `make test` installs in CI (`apt-get install
//! faketime`). Without this library the tests are skipped.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use pubsub_emulator::{Action, Fault, RunningEmulator};
use scratch_postgres::ScratchPostgres;
use serde_json::Value;
use tonic::Code;

use crate::harness::{self, Database, Relay, eventually, insert_orders};
use crate::http::{free_addr, get, metric};

/// Maximum age of an event of these tests, in seconds, even on a busy machine. Far less than the hour by
/// which the clocks differ, so a mixture of the clocks is noticed.
const YOUNG: f64 = 600.0;

/// The library that changes the clock of a program; `None` if it is not installed.
fn library() -> Option<String> {
    let asked = Command::new("faketime")
        .args(["-f", "+0", "printenv", "LD_PRELOAD"])
        .output();
    let path = String::from_utf8(asked.ok()?.stdout).ok()?;
    let path = path.trim().to_owned();
    if path.is_empty() {
        return None;
    }
    Some(path)
}

fn skipped() {
    println!("SKIPPED: there is no faketime (apt-get install faketime)");
}

/// The command `postrider` with a clock that is wrong by `offset`, such as `+1h`.
fn postrider_at(offset: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Command {
    let mut command = harness::postrider(arguments, environment);
    let library = library().unwrap();
    command
        .env("LD_PRELOAD", library)
        .env("FAKETIME", offset)
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    command
}

/// Starts a relay with a clock that is wrong by `offset`. Also returns the address of its HTTP port.
fn relay_at(offset: &str, database: &Database, emulator: &RunningEmulator) -> (Relay, String) {
    let (addr, host) = (free_addr(), emulator.addr().to_string());
    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("PUBSUB_EMULATOR_HOST", &host),
        ("PUBSUB_PROJECT_ID", "demo"),
        ("POSTRIDER_HTTP_ADDR", &addr),
        ("POSTRIDER_SLOT", database.slot()),
    ];
    let command = postrider_at(offset, &["run"], &environment);
    (Relay::spawn(command), addr)
}

fn status_at(offset: &str, database: &Database) -> Value {
    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("POSTRIDER_SLOT", database.slot()),
    ];
    let ran = postrider_at(offset, &["status", "--json"], &environment).output();
    serde_json::from_slice(&ran.unwrap().stdout).unwrap()
}

fn assert_young(what: &str, seconds: &Value, all: &Value) {
    let age = seconds
        .as_f64()
        .unwrap_or_else(|| panic!("{what}: {all:#}"));
    assert!((0.0..YOUNG).contains(&age), "{what}: {age}\n{all:#}");
}

async fn status_of_port(addr: &str) -> Value {
    let (_, body) = get(addr, "/status").await.unwrap();
    serde_json::from_str(&body).unwrap()
}

/// Lets 20 events wait for a failing topic, and checks every age that the views show. Then lets them through.
async fn ages_of_waiting_events_are_right(
    database: &Database,
    emulator: &RunningEmulator,
    (relay, addr): (&Relay, &str),
    offset: &str,
) {
    let fault = Fault::new(Action::Fail(Code::NotFound)).on_topic("order.events");
    let fault = emulator.faults().inject(fault);
    insert_orders(database, 20, 5).await;
    let port = eventually("the topic is named, and its events wait", || async {
        let status = status_of_port(addr).await;
        let oldest = status["topics"][0]["oldest_seconds"].as_f64()?;
        (oldest > 1.0).then_some(status)
    })
    .await;
    assert_young("oldest", &port["topics"][0]["oldest_seconds"], &port);
    assert_young("for", &port["for_seconds"], &port);
    let shown = eventually("the commands name the topic", || async {
        let shown = status_at(offset, database);
        shown["condition"]["topics"][0]["oldest_seconds"]
            .is_f64()
            .then_some(shown)
    })
    .await;
    let condition = &shown["condition"];
    assert_young("oldest", &condition["topics"][0]["oldest_seconds"], &shown);
    assert_young("for", &condition["for_seconds"], &shown);
    assert_young("lag", &shown["slot"]["lag_seconds"], &shown);
    let key = &condition["topics"][0]["keys"][0];
    assert_young("key", &key["oldest_seconds"], &shown);
    let lag = metric(addr, "postrider_lag_seconds").await.unwrap();
    assert!((0.0..YOUNG).contains(&lag), "{lag}\n{}", relay.log());
    let oldest = metric(addr, "postrider_topic_oldest_seconds order.events").await;
    assert!(
        oldest.is_none_or(|age| (0.0..YOUNG).contains(&age)),
        "{oldest:?}"
    );
    emulator.faults().lift(fault);
    database.wait_until_recorded().await;
}

/// Checks that each event was published soon after its commit, according to the times in its dispatch row.
async fn recorded_times_are_right(database: &Database) {
    let wrong = format!(
        "SELECT count(*) FROM outbox.dispatch \
         WHERE dispatched_at - committed_at NOT BETWEEN '-1 s' AND '{YOUNG} s'"
    );
    assert_eq!(database.number(&wrong).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn all_ages_are_right_although_the_clock_of_the_relay_is_an_hour_wrong() {
    if library().is_none() {
        return skipped();
    }
    for offset in ["+1h", "-1h"] {
        let database = Database::start().await;
        let emulator = harness::emulator().await;
        let (relay, addr) = relay_at(offset, &database, &emulator);
        insert_orders(&database, 20, 5).await;
        database.wait_until_recorded().await;
        ages_of_waiting_events_are_right(&database, &emulator, (&relay, &addr), offset).await;
        let of_latency = |part| metric(&addr, part);
        let count = of_latency("postrider_commit_to_ack_seconds_count")
            .await
            .unwrap();
        let sum = of_latency("postrider_commit_to_ack_seconds_sum")
            .await
            .unwrap();
        assert!(sum < count * YOUNG, "{sum} s for {count} requests");
        recorded_times_are_right(&database).await;
        // In a recovery, the recorded times come from the rows in the table, so check these times too.
        relay.kill_9();
        database.drop_slot().await;
        insert_orders(&database, 20, 5).await;
        let (relay, _) = relay_at(offset, &database, &emulator);
        database.wait_until_recorded().await;
        recorded_times_are_right(&database).await;
        let report = harness::check(&database, &emulator).await;
        assert!(report.is_clean(), "{report}");
        relay.stop().await;
    }
}

/// A folder with `initdb` and a `postgres` that runs under libfaketime. The clock of this server is wrong by the
/// offset in the folder's file `offset`.
struct ClockedPrograms {
    folder: tempfile::TempDir,
}

impl ClockedPrograms {
    fn of(programs: &Path, library: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let everyone = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(folder.path(), everyone.clone()).unwrap();
        std::os::unix::fs::symlink(programs.join("initdb"), folder.path().join("initdb")).unwrap();
        let postgres = folder.path().join("postgres");
        let script = format!(
            "#!/bin/sh\nexport LD_PRELOAD='{library}' FAKETIME_TIMESTAMP_FILE={0}/offset FAKETIME_NO_CACHE=1 \
             FAKETIME_DONT_FAKE_MONOTONIC=1\nexec {1}/postgres \"$@\"\n",
            folder.path().display(),
            programs.display()
        );
        std::fs::write(&postgres, script).unwrap();
        std::fs::set_permissions(&postgres, everyone).unwrap();
        let clocked = Self { folder };
        clocked.set("+0");
        clocked
    }

    /// Sets the clock. Replaces the file atomically, so that no program reads an empty file.
    fn set(&self, offset: &str) {
        let (next, file) = (
            self.folder.path().join("next"),
            self.folder.path().join("offset"),
        );
        std::fs::write(&next, format!("{offset}\n")).unwrap();
        std::fs::rename(next, file).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ages_are_right_again_soon_after_the_clock_of_the_server_has_jumped() {
    let Some(library) = library() else {
        return skipped();
    };
    let plain = ScratchPostgres::builder().start().unwrap();
    let programs = ClockedPrograms::of(plain.programs(), &library);
    drop(plain);
    let server = ScratchPostgres::builder()
        .programs(programs.folder.path())
        .start()
        .unwrap();
    let database = Database::on(server).await;
    let emulator = harness::emulator().await;
    let (relay, addr) = relay_at("+0", &database, &emulator);
    insert_orders(&database, 20, 5).await;
    database.wait_until_recorded().await;
    for offset in ["+1h", "+0", "-1h"] {
        programs.set(offset);
        let jumped = format!(
            "SELECT abs(extract(epoch FROM clock_timestamp()) - {} - 3600 * ({}))::bigint",
            std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .unwrap()
                .as_secs(),
            offset.replace('h', "")
        );
        assert!(database.number(&jumped).await < 60, "{offset}");
        // The relay learns the new time from its next poll, and may report any age before this poll. Commit times from
        // before the jump would give wrong ages even afterwards, but no event from before the jump still waits.
        eventually("the relay knows the new time", || async {
            insert_orders(&database, 1, 1).await;
            database.wait_until_recorded().await;
            let last = "SELECT (dispatched_at - committed_at BETWEEN '-1 s' AND '600 s')::int::bigint \
                        FROM outbox.dispatch ORDER BY commit_lsn DESC, ordinal DESC LIMIT 1";
            (database.number(last).await == 1).then_some(())
        })
        .await;
        ages_of_waiting_events_are_right(&database, &emulator, (&relay, &addr), "+0").await;
    }
    relay.stop().await;
}

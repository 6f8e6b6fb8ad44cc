//! Tests in which the disk is full, so the relay cannot write dispatch rows. The relay does not
//! confirm unrecorded events, and continues automatically once there is room.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use pubsub_emulator::RunningEmulator;
use scratch_postgres::StopMode;

use crate::harness::{self, Database, Relay, eventually, insert_orders, postrider, signal};
use crate::http::{free_addr, get, metric};
use crate::load::{Load, wait_for_more};

/// A small file system in memory. It is unmounted on drop.
pub(crate) struct SmallDisk {
    folder: PathBuf,
    mib: usize,
}

impl SmallDisk {
    /// Mounts a file system of 16 MiB and gives it to the owner of the folder `like`. Returns `None` if the
    /// current user may not mount file systems.
    pub(crate) fn mount(like: &Path) -> Option<Self> {
        Self::mount_of(16, like)
    }

    fn mount_of(mib: usize, like: &Path) -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = format!("postrider-small-disk-{}-{count}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        let owner = std::fs::metadata(like).unwrap();
        std::fs::create_dir(&folder).unwrap();
        let disk = Self { folder, mib };
        let options = format!(
            "size={mib}m,mode=0700,uid={},gid={}",
            owner.uid(),
            owner.gid()
        );
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "tmpfs"])
            .arg(&disk.folder)
            .output();
        mounted
            .is_ok_and(|done| done.status.success())
            .then_some(disk)
    }

    /// Moves `outbox.dispatch` to the small disk.
    pub(crate) async fn hold_dispatch(&self, database: &Database) {
        let folder = self.folder.display();
        let create = format!("CREATE TABLESPACE small LOCATION '{folder}'");
        database.execute(&create).await;
        database
            .execute("ALTER TABLE outbox.dispatch SET TABLESPACE small")
            .await;
    }

    /// Moves a folder of the server to the small disk.
    fn hold(&self, folder: &Path) {
        let here = self.folder.join("folder");
        let copied = Command::new("cp").arg("-a").args([folder, &here]).status();
        assert!(copied.unwrap().success());
        std::fs::remove_dir_all(folder).unwrap();
        std::os::unix::fs::symlink(&here, folder).unwrap();
    }

    /// Fills the remaining space.
    pub(crate) fn fill(&self) {
        let filled = std::fs::write(self.ballast(), vec![0; (self.mib + 1) << 20]);
        assert_eq!(filled.unwrap_err().kind(), std::io::ErrorKind::StorageFull);
    }

    pub(crate) fn make_room(&self) {
        std::fs::remove_file(self.ballast()).unwrap();
    }

    fn ballast(&self) -> PathBuf {
        self.folder.join("ballast")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Use `-l` (lazy), because the server may still have open files on the small disk.
        let _ = Command::new("umount").arg("-l").arg(&self.folder).output();
        let _ = std::fs::remove_dir(&self.folder);
    }
}

/// The relay's log is on a full disk (every write to `/dev/full` fails), but the relay must still
/// deliver.
#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_cannot_be_written_does_not_stop_delivery() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    for format in ["text", "json", "cloud_logging"] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full");
        let settings = [("POSTRIDER_LOG_FORMAT", format)];
        let mut relay = Relay::command(&database, &host, &settings);
        let mut relay = relay.stderr(full.unwrap()).spawn().unwrap();
        insert_orders(&database, 10, 3).await;
        database.wait_until_recorded().await;
        signal("TERM", relay.id());
        let ended = tokio::task::spawn_blocking(move || relay.wait()).await;
        assert_eq!(ended.unwrap().unwrap().code(), Some(0), "{format}");
    }
}

/// Each session opens, but ends at once, because PostgreSQL cannot decode the first record. The relay must
/// not show such a session as streaming.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_fails_at_its_first_record_does_not_count_as_streaming() {
    let mut database = Database::private().await;
    let data = database.server().data_dir().to_owned();
    let Some(disk) = SmallDisk::mount(&data) else {
        eprintln!("SKIPPED: this user may not mount a small disk");
        return;
    };
    let emulator = harness::emulator().await;
    disk.hold(&data.join("pg_logical/snapshots"));
    disk.fill();
    insert_orders(&database, 3, 3).await;
    // A checkpoint writes a record to the WAL. When PostgreSQL decodes this record, it creates a file in
    // `pg_logical/snapshots`. The disk is full, so PostgreSQL cannot create the file, and the decoding fails.
    database.execute("CHECKPOINT").await;
    insert_orders(&database, 3, 3).await;
    let (addr, host) = (free_addr(), emulator.addr().to_string());
    let relay = Relay::start_with(&database, &host, &[("POSTRIDER_HTTP_ADDR", &addr)]);
    let status = async || -> serde_json::Value {
        let (_, body) = get(&addr, "/status").await.unwrap();
        serde_json::from_str(&body).unwrap()
    };
    // Wait for the second log line about a failed session. The first session may still make progress, because it
    // can confirm the WAL before the record that PostgreSQL cannot decode. Later sessions make no progress.
    //
    // The relay logs such a line at most every ten seconds, and says how many lines it has left out since the last
    // one. This number must be small, because the relay pauses ever longer between failed sessions.
    let unlogged = eventually("a second line about failed sessions", async || {
        let log = relay.log();
        let mut lines = log.lines().filter(|line| line.contains("session ended"));
        let (_, count) = lines.nth(1)?.rsplit_once("since_last=")?;
        Some(count.trim().parse::<u32>().unwrap())
    })
    .await;
    assert!((2..=20).contains(&unlogged), "{}", relay.log());
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(5) {
        let now = status().await;
        assert_eq!(now["state"], "blocked-on-database", "{now}");
        assert_eq!(now["code"], "disk-full", "{now}");
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    let lasts = status().await["for_seconds"].as_f64().unwrap();
    // The relay has been blocked for at least 5 s. Require only 3 s, because the state on the port may be a
    // second old.
    assert!(lasts >= 3.0, "{lasts}");
    disk.make_room();
    database.wait_until_recorded().await;
    eventually("the relay streams", async || {
        (status().await["state"] == "streaming").then_some(())
    })
    .await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
}

/// The server panics when it cannot write its WAL, and does not come up again until there is room.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_panics_because_its_wal_disk_is_full_loses_and_repeats_nothing() {
    let mut database = Database::private().await;
    let wal = database.server().data_dir().join("pg_wal");
    let Some(disk) = SmallDisk::mount_of(64, &wal) else {
        eprintln!("SKIPPED: this user may not mount a small disk");
        return;
    };
    let patience = Duration::from_secs(60);
    database.server().stop(StopMode::Fast, patience).unwrap();
    disk.hold(&wal);
    database.server().start_again().unwrap();
    database.reconnect().await;
    let emulator = harness::emulator().await;
    let (addr, host) = (free_addr(), emulator.addr().to_string());
    let relay = Relay::start_with(&database, &host, &[("POSTRIDER_HTTP_ADDR", &addr)]);
    insert_orders(&database, 20, 5).await;
    database.wait_until_recorded().await;
    database.execute("CREATE TABLE filler (text text)").await;
    disk.fill();
    let fill = "INSERT INTO filler SELECT repeat('x', 1000) FROM generate_series(1, 1000)";
    let mut panicked = database.client.batch_execute(fill).await;
    while panicked.is_ok() {
        panicked = database.client.batch_execute(fill).await;
    }
    let log = |database: &mut Database| database.server().log().unwrap();
    let began = Instant::now();
    while !log(&mut database).contains("due to startup process failure") {
        assert!(began.elapsed() < patience, "{}", log(&mut database));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    relay.wait_for_log("code=postgres-unreachable").await;
    let (_, status) = get(&addr, "/status").await.unwrap();
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["state"], "blocked-on-database", "{status}");
    assert_eq!(status["code"], "postgres-unreachable", "{status}");
    let gauge = metric(&addr, "postrider_condition blocked-on-database").await;
    assert_eq!(gauge, Some(1.0));
    for command in [&["status"][..], &["slot", "show"]] {
        let ran = postrider(command, &[("DATABASE_URL", &database.url)]).output();
        let ran = ran.unwrap();
        let error = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(3), "{command:?}: {error}");
        assert!(
            error.contains("postgres-unreachable"),
            "{command:?}: {error}"
        );
    }
    disk.make_room();
    let _ = database.server().kill_9();
    database.server().start_again().unwrap();
    database.reconnect().await;
    insert_orders(&database, 20, 5).await;
    database.wait_until_recorded().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}\n{}",
        relay.log()
    );
}

/// Checks that the relay records and confirms no new event until `repair` makes room, and then
/// delivers every event once.
async fn is_waited_out(
    database: &Database,
    emulator: &RunningEmulator,
    relay: &Relay,
    load: Load,
    repair: impl AsyncFnOnce(),
) {
    relay.wait_for_log("SQLSTATE 53100").await;
    // The relay must not confirm this position, because at least one unrecorded event was committed before
    // it.
    let bound = database.current_wal().await;
    let recorded = "SELECT count(*) FROM outbox.dispatch";
    let before = database.number(recorded).await;
    load.wait_for_rows(300).await;
    // Wait for longer than the relay may delay the report of a new position (250 ms).
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(database.number(recorded).await, before);
    let confirmed = database.confirmed().await;
    assert!(confirmed < bound, "unrecorded events are not confirmed");
    repair().await;
    wait_for_more(database, 50).await;
    load.stop().await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let report = harness::check_streamed(database, emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}\n{}",
        relay.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_relay_waits_out_a_full_disk_under_the_dispatch_table() {
    let mut database = Database::private().await;
    let Some(disk) = SmallDisk::mount(database.server().data_dir()) else {
        eprintln!("SKIPPED: this user may not mount a small disk");
        return;
    };
    let emulator = harness::emulator().await;
    disk.hold_dispatch(&database).await;
    let relay = Relay::start(&database, &emulator);
    let load = Load::start(&database);
    wait_for_more(&database, 50).await;
    disk.fill();
    let repair = async || disk.make_room();
    is_waited_out(&database, &emulator, &relay, load, repair).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_relay_waits_out_a_dispatch_table_without_room() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    let load = Load::start(&database);
    wait_for_more(&database, 50).await;
    // Raise the error that PostgreSQL raises when a statement needs a new page on a full disk.
    database
        .execute(
            "CREATE FUNCTION outbox.full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                 RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full'; END $$; \
             CREATE TRIGGER full_disk BEFORE INSERT ON outbox.dispatch \
                 FOR EACH STATEMENT EXECUTE FUNCTION outbox.full_disk()",
        )
        .await;
    let repair = async || {
        database
            .execute("DROP TRIGGER full_disk ON outbox.dispatch")
            .await;
    };
    is_waited_out(&database, &emulator, &relay, load, repair).await;
}

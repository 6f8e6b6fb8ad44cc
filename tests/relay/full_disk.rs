//! The disk is full, so the relay cannot write dispatch rows. The relay does not confirm unrecorded
//! events, and continues by itself once there is room.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use pubsub_emulator::RunningEmulator;

use crate::harness::{self, Database, Relay};
use crate::load::{Load, wait_for_more};

/// A file system of 16 MiB, in memory. It is unmounted on drop.
pub(crate) struct SmallDisk {
    folder: PathBuf,
}

impl SmallDisk {
    const MIB: usize = 16;

    /// Mounts the file system and gives it to the owner of the folder `like`. Returns `None` if the
    /// current user may not mount file systems.
    pub(crate) fn mount(like: &Path) -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = format!("postrider-small-disk-{}-{count}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        let owner = std::fs::metadata(like).unwrap();
        std::fs::create_dir(&folder).unwrap();
        let disk = Self { folder };
        let options = format!(
            "size={}m,mode=0700,uid={},gid={}",
            Self::MIB,
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

    /// Fills the remaining space.
    pub(crate) fn fill(&self) {
        let filled = std::fs::write(self.ballast(), vec![0; Self::MIB << 20]);
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
    // At least one unrecorded event was committed before this position.
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

//! Tests of commands while another session holds a lock on a captured table.

use tokio::time::Instant;

use crate::support::{Database, PATIENCE, assert_contains, connect, execute};

const EVENT: &str = "00000000-0000-4000-8000-000000000001";

/// How long a command may take. The command itself waits at most 5 s for the lock.
const LIMIT_SECONDS: u64 = PATIENCE.as_secs() / 2;

#[tokio::test]
async fn commands_name_the_session_that_holds_a_lock_on_a_captured_table() {
    let database = Database::initialised().await;
    database.emit(1).await;
    let migration = connect(&database.url).await;
    let lock = "set application_name = 'nightly-migration'; begin; \
                lock table outbox.events in access exclusive mode";
    execute(&migration, lock).await;
    let began = Instant::now();
    let of_table = format!("outbox.events:{EVENT}");
    let commands = [
        &["event", "--since", "1h"][..],
        &["event", EVENT],
        &["audit"],
        &["recover", "--dry-run"],
        &["replay", "--dry-run", EVENT],
        &["quarantine", "show", &of_table],
    ];
    let [of_time, of_id, audit, recover, replay, quarantine] =
        commands.map(|command| database.run(command));
    let (check, of_time, of_id, audit, recover, replay, quarantine) = tokio::join!(
        database.run(&["check", "--json"]),
        of_time,
        of_id,
        audit,
        recover,
        replay,
        quarantine,
    );
    let commands = [of_time, of_id, audit, recover, replay, quarantine];
    let took = began.elapsed().as_secs();
    assert!(took < LIMIT_SECONDS, "the commands took {took} s");
    let locked = check.finding("lock-wait");
    assert_eq!(check.json()["run"]["waits"][0], "lock-wait", "{check}");
    let errors = commands.iter().map(|ran| ran.stderr.as_str());
    for said in errors.chain([locked.to_string().as_str()]) {
        assert_contains(said, "waiting for a lock on outbox.events");
        assert_contains(said, "nightly-migration");
        assert_contains(said, "pg_terminate_backend(");
    }
    for ran in commands {
        ran.assert_error("lock-wait", 3);
    }
    execute(&migration, "commit").await;
    let check = database.run(&["check", "--json"]).await;
    assert!(!check.stdout.contains("lock-wait"), "{check}");
}

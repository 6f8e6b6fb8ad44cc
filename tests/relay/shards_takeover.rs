//! The moments in which one number of shards gives way to another: what the relays before still have
//! on its way, and what comes in between.

use std::time::Duration;

use pubsub_emulator::checks::Violation;
use pubsub_emulator::{Action, Answer, Fault, RunningEmulator};

use crate::harness::{self, Database, Relay, eventually, insert_orders};
use crate::shards::{prepare, start};
use crate::shards_change::unsharded;

const SERVING: &str = "\
    SELECT count(*) FROM outbox.relay r JOIN pg_replication_slots s ON s.slot_name = r.slot \
    WHERE s.active AND r.slot <> 'postrider' AND r.confirmed_lsn IS NOT NULL";

const RECORD_WAITS: &str = "\
    SELECT count(*) FROM pg_stat_activity \
    WHERE application_name = 'postrider dispatch postrider' AND wait_event_type = 'Lock'";

/// Relays that wait for the writer of the one before.
const WAIT_FOR_WRITER: &str = "\
    SELECT count(*) FROM pg_stat_activity WHERE pid <> pg_backend_pid() \
        AND application_name = 'postrider' \
        AND query LIKE 'select count(*) from pg_catalog.pg_stat_activity%'";

/// Kills the relay without shards while a record of what it has sent waits for the lock that the
/// returned session holds. Both shards are prepared; 110 events are stored, and 10 have a record.
async fn killed_while_it_records(
    database: &Database,
    emulator: &RunningEmulator,
) -> tokio_postgres::Client {
    let relay = start(database, emulator, "");
    insert_orders(database, 10, 5).await;
    database.wait_until_recorded().await;
    prepare(database, "0/2", &[]);
    prepare(database, "1/2", &[]);
    let blocker = harness::connect(&database.url).await;
    let lock = "BEGIN; LOCK TABLE outbox.dispatch IN SHARE MODE";
    blocker.batch_execute(lock).await.unwrap();
    insert_orders(database, 100, 5).await;
    eventually("everything is stored, and a record waits", || async {
        let stored = emulator.journal().counts().stored_messages == 110;
        (stored && database.number(RECORD_WAITS).await == 1).then_some(())
    })
    .await;
    relay.kill_9();
    nobody_reads(database).await;
    blocker
}

async fn nobody_reads(database: &Database) {
    eventually("nobody reads a slot", || async {
        let active = "SELECT count(*) FROM pg_replication_slots WHERE active";
        (database.number(active).await == 0).then_some(())
    })
    .await;
}

/// Ends the walsender of the relay that serves, and starts both shards before it is back.
async fn shards_take_over(database: &Database, emulator: &RunningEmulator) -> [Relay; 2] {
    database
        .execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
        .await;
    nobody_reads(database).await;
    ["0/2", "1/2"].map(|shard| start(database, emulator, shard))
}

#[tokio::test(flavor = "multi_thread")]
async fn another_number_of_shards_sends_nothing_while_the_last_one_is_still_recording() {
    let Some((database, emulator)) = unsharded().await else {
        return;
    };
    let blocker = killed_while_it_records(&database, &emulator).await;
    let relays = ["0/2", "1/2"].map(|shard| start(&database, &emulator, shard));
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(emulator.journal().counts().stored_messages, 110);
    }
    blocker.batch_execute("ROLLBACK").await.unwrap();
    for relay in &relays {
        relay.wait_for_log("recovered: everything").await;
    }
    database.wait_until_recorded().await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}");
}

/// A relay of a shard that waits for the writer of the one before has looked for others already.
/// What it then finds active is a slot in the making, which waits for a transaction.
#[tokio::test(flavor = "multi_thread")]
async fn a_relay_changes_nothing_when_another_number_of_shards_has_begun_since_it_looked() {
    let Some((database, emulator)) = unsharded().await else {
        return;
    };
    let blocker = killed_while_it_records(&database, &emulator).await;
    database.drop_slot().await;
    let relay = start(&database, &emulator, "0/2");
    eventually("the relay waits for the writer", || async {
        (database.number(WAIT_FOR_WRITER).await == 1).then_some(())
    })
    .await;
    let running = harness::connect(&database.url).await;
    let begin = "BEGIN; SELECT pg_current_xact_id()";
    running.batch_execute(begin).await.unwrap();
    let maker = harness::connect(&database.url).await;
    let making = tokio::spawn(async move {
        let make = "SELECT pg_create_logical_replication_slot('postrider', 'pgoutput')";
        maker.batch_execute(make).await
    });
    eventually("the other slot is active", || async {
        let active = "SELECT count(*) FROM pg_replication_slots WHERE active";
        (database.number(active).await == 1).then_some(())
    })
    .await;
    blocker.batch_execute("ROLLBACK").await.unwrap();
    relay.wait_for_log("shards-mixed").await;
    let changed = "SELECT (SELECT count(*) FROM outbox.relay WHERE slot <> 'postrider') \
                   + (SELECT count(*) FROM pg_replication_slots WHERE slot_name <> 'postrider')";
    assert_eq!(database.number(changed).await, 0, "{}", relay.log());
    running.batch_execute("ROLLBACK").await.unwrap();
    making.await.unwrap().unwrap();
    relay.wait_for_log("recovered: everything").await;
    let _other = start(&database, &emulator, "1/2");
    database.wait_until_recorded().await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}");
}

/// The walsender of the relay without shards is ended while its requests are on their way: it waits
/// for their answers, and two shards serve before they come.
#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_that_comes_after_another_number_of_shards_has_taken_over_is_not_recorded() {
    const RECORDS: &str = "SELECT count(*) FROM outbox.dispatch";
    let Some((database, emulator)) = unsharded().await else {
        return;
    };
    prepare(&database, "0/2", &[]);
    prepare(&database, "1/2", &[]);
    let old = start(&database, &emulator, "");
    old.wait_for_log("streaming").await;
    let late = Action::Delay(Duration::from_secs(9));
    emulator.faults().inject(Fault::new(late).times(3));
    let withheld = emulator.faults().inject(Fault::new(Action::NeverAnswer));
    insert_orders(&database, 3, 3).await;
    eventually("the old relay's requests are on their way", || async {
        (emulator.journal().counts().attempts == 3).then_some(())
    })
    .await;
    let relays = shards_take_over(&database, &emulator).await;
    eventually("both shards serve", || async {
        (database.number(SERVING).await == 2).then_some(())
    })
    .await;
    let answered = || {
        let attempts = emulator.journal().attempts();
        attempts.into_iter().take(3).map(|attempt| attempt.answer)
    };
    assert!(
        answered().all(|answer| answer == Answer::Pending),
        "the shards took over too late to show anything"
    );
    // It records what it has, and closes: only then it says so.
    old.wait_for_log("closing the session").await;
    assert!(
        answered().all(|answer| answer == Answer::MessageIds),
        "{}",
        old.log()
    );
    old.wait_for_log("shards-mixed").await;
    assert_eq!(database.number(RECORDS).await, 0, "{}", old.log());
    emulator.faults().lift(withheld);
    database.wait_until_recorded().await;
    assert_eq!(database.number(RECORDS).await, 3);
    let report = harness::check(&database, &emulator).await;
    // What was on its way when the walsender ended cannot be called back.
    let others = |found: &&Violation| !matches!(found, Violation::InFlightTogether { .. });
    assert_eq!(
        report.violations.iter().filter(others).count(),
        0,
        "{report}"
    );
    for relay in relays {
        relay.stop().await;
    }
}

/// Its walsender is ended while the record of a bad event waits for a lock: two shards have looked at
/// the quarantine before that record is there.
#[tokio::test(flavor = "multi_thread")]
async fn what_the_last_relay_sets_aside_while_it_ends_is_seen_before_anything_is_sent() {
    const BAD: &str = "00000000-0000-4000-8000-00000000bad0";
    const ASIDE: &str = "SELECT count(*) FROM outbox.dispatch WHERE state = 'quarantined'";
    let Some((database, emulator)) = unsharded().await else {
        return;
    };
    let old = start(&database, &emulator, "");
    insert_orders(&database, 10, 5).await;
    database.wait_until_recorded().await;
    prepare(&database, "0/2", &[]);
    prepare(&database, "1/2", &[]);
    let event_id = BAD.to_owned();
    let poison = Fault::new(Action::Poison { event_id });
    emulator.faults().inject(poison);
    let blocker = harness::connect(&database.url).await;
    let lock = "BEGIN; LOCK TABLE outbox.dispatch IN SHARE MODE";
    blocker.batch_execute(lock).await.unwrap();
    database
        .execute(&format!(
            "INSERT INTO outbox.events (id, aggregatetype, aggregateid, event_type) \
             VALUES ('{BAD}', 'order', 'o-1', 'Bad')"
        ))
        .await;
    eventually("its record waits", || async {
        (database.number(RECORD_WAITS).await == 1).then_some(())
    })
    .await;
    let relays = shards_take_over(&database, &emulator).await;
    eventually("both shards wait for the writer", || async {
        (database.number(WAIT_FOR_WRITER).await == 2).then_some(())
    })
    .await;
    blocker.batch_execute("ROLLBACK").await.unwrap();
    eventually("the bad event is set aside", || async {
        (database.number(ASIDE).await == 1).then_some(())
    })
    .await;
    old.kill_9();
    insert_orders(&database, 10, 5).await;
    for relay in &relays {
        relay.wait_for_log("shards-quarantine").await;
        let log = relay.log();
        assert!(!log.contains("recovered: everything"), "{log}");
    }
    assert_eq!(emulator.journal().counts().stored_messages, 10);
}

//! The number of shards changes, and nothing is lost with it: relays with another number begin with
//! a new slot, and with what has no record in the tables. Two numbers at once are refused.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pubsub_emulator::{Action, Fault, RunningEmulator};
use tokio::task::JoinHandle;

use crate::harness::{self, Database, Relay, eventually, insert_orders, postrider};
use crate::shards::{
    assert_once_and_in_order, has_row_filters, prepare, sharded, start, start_with,
};

const SHARDS: [&[&str]; 4] = [&[""], &["0/2", "1/2"], &["0/3", "1/3", "2/3"], &[""]];

/// A database with its usual slot, on a server of the test's own.
pub(crate) async fn unsharded() -> Option<(Database, RunningEmulator)> {
    let database = Database::private().await;
    if !has_row_filters(&database).await {
        eprintln!("SKIPPED shards: publications have no row filters before PostgreSQL 15");
        return None;
    }
    Some((database, harness::emulator().await))
}

/// A service that writes until it is told to stop: one row at a time, versions without end.
fn writer(database: &Database) -> (Arc<AtomicBool>, JoinHandle<()>) {
    let (url, stop) = (database.url.clone(), Arc::new(AtomicBool::new(false)));
    let told = stop.clone();
    let task = tokio::spawn(async move {
        let client = harness::connect(&url).await;
        let insert = "INSERT INTO outbox.events \
             (aggregatetype, aggregateid, event_type, version, payload, occurred_at) \
             VALUES ('order', 'o-' || $1::bigint % 50, 'OrderPlaced', $1, '{}', clock_timestamp())";
        for version in 1_i64.. {
            if told.load(Ordering::Relaxed) {
                break;
            }
            client.execute(insert, &[&version]).await.unwrap();
        }
    });
    (stop, task)
}

/// Waits until each relay streams, and has delivered something.
async fn wait_until_they_serve(database: &Database, slots: usize) {
    let serving = "\
        SELECT count(*) FROM outbox.relay r JOIN pg_replication_slots s ON s.slot_name = r.slot \
        WHERE s.active AND r.recovering IS NULL AND r.audited_at IS NOT NULL";
    eventually("all relays stream", || async {
        (database.number(serving).await == slots as i64).then_some(())
    })
    .await;
    wait_until_more_is_recorded(database, 500).await;
}

async fn wait_until_more_is_recorded(database: &Database, events: i64) {
    let recorded = async || {
        database
            .number("SELECT count(*) FROM outbox.dispatch")
            .await
    };
    let before = recorded().await;
    eventually("they deliver", || async {
        (recorded().await > before + events).then_some(())
    })
    .await;
}

/// Drops what is left of a layout, as docs/operations.md tells.
fn drop_slot(database: &Database, shard: &str) {
    let ran = postrider(
        &["slot", "drop", "--yes"],
        &[("DATABASE_URL", &database.url), ("POSTRIDER_SHARD", shard)],
    )
    .output()
    .unwrap();
    assert!(
        ran.status.success(),
        "{}",
        String::from_utf8_lossy(&ran.stderr)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_number_of_shards_changes_there_and_back_under_load_and_nothing_is_lost_or_repeated() {
    let Some((database, emulator)) = unsharded().await else {
        return;
    };
    let (stop, writing) = writer(&database);
    let mut before: &[&str] = &[];
    for shards in SHARDS {
        for shard in shards {
            prepare(&database, shard, &[]);
        }
        let relays: Vec<Relay> = shards
            .iter()
            .map(|shard| start(&database, &emulator, shard))
            .collect();
        wait_until_they_serve(&database, shards.len()).await;
        for shard in before {
            drop_slot(&database, shard);
        }
        for relay in relays {
            let follows = relay.log().contains("shards-changed");
            assert_eq!(follows, !before.is_empty(), "{}", relay.log());
            relay.stop().await;
        }
        before = shards;
    }
    stop.store(true, Ordering::Relaxed);
    writing.await.unwrap();
    let _relay = start(&database, &emulator, "");
    assert_once_and_in_order(&database, &emulator).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn relays_that_are_killed_while_the_number_changes_lose_nothing_and_swap_nothing() {
    let Some((database, emulator)) = unsharded().await else {
        return;
    };
    let (stop, writing) = writer(&database);
    // So that each recovery lasts for a while.
    emulator
        .faults()
        .inject(Fault::new(Action::Delay(Duration::from_millis(20))));
    for shards in SHARDS {
        for shard in shards {
            prepare(&database, shard, &[]);
        }
        // Killed in the middle of the recovery, and wherever they are the next time.
        for _ in 0..2 {
            let relays: Vec<Relay> = shards
                .iter()
                .map(|shard| start(&database, &emulator, shard))
                .collect();
            wait_until_more_is_recorded(&database, 200).await;
            for relay in relays {
                relay.kill_9();
            }
            harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
        }
    }
    emulator.faults().lift_all();
    stop.store(true, Ordering::Relaxed);
    writing.await.unwrap();
    let _relay = start(&database, &emulator, "");
    database.wait_until_recorded().await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_from_before_the_first_start_of_all_stay_left_out_when_the_number_changes() {
    let Some((database, emulator)) = unsharded().await else {
        return;
    };
    database.drop_slot().await;
    insert_orders(&database, 100, 10).await;
    let relay = start(&database, &emulator, "");
    relay.wait_for_log("are recorded as discarded").await;
    insert_orders(&database, 100, 10).await;
    database.wait_until_recorded().await;
    relay.stop().await;
    insert_orders(&database, 100, 10).await;
    for shard in ["0/2", "1/2"] {
        prepare(&database, shard, &[]);
    }
    let relays = ["0/2", "1/2"].map(|shard| start(&database, &emulator, shard));
    for relay in &relays {
        relay.wait_for_log("recovered: everything").await;
    }
    database.wait_until_recorded().await;
    assert_eq!(emulator.journal().counts().stored_messages, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn events_delivered_without_records_are_not_sent_again_when_shards_take_over() {
    let Some((database, emulator)) = unsharded().await else {
        return;
    };
    let exceptions = [("POSTRIDER_DISPATCH", "exceptions")];
    let relay = start_with(&database, &emulator, "", &exceptions);
    insert_orders(&database, 500, 20).await;
    eventually("the relay has vouched for them", || async {
        let old = "SELECT count(*) FROM outbox.events e, outbox.relay r \
                   WHERE age(e.xmin) > age((r.resolved_xid % 4294967296)::text::xid)";
        (database.number(old).await == 500).then_some(())
    })
    .await;
    relay.stop().await;
    insert_orders(&database, 100, 20).await;
    for shard in ["0/2", "1/2"] {
        prepare(&database, shard, &[]);
    }
    let relays = ["0/2", "1/2"].map(|shard| start(&database, &emulator, shard));
    for relay in &relays {
        relay.wait_for_log("recovered: everything").await;
    }
    insert_orders(&database, 100, 20).await;
    eventually("everything is delivered", || async {
        (emulator.journal().counts().stored_messages >= 700).then_some(())
    })
    .await;
    assert_eq!(emulator.journal().counts().stored_messages, 700);
    let modes = "SELECT count(*) FROM outbox.relay WHERE slot <> 'postrider' AND dispatch = 'full'";
    assert_eq!(database.number(modes).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_numbers_of_shards_at_once_are_refused_from_both_sides() {
    let Some((database, emulator)) = unsharded().await else {
        return;
    };
    for shard in ["0/2", "1/2", "0/3"] {
        prepare(&database, shard, &[]);
    }
    let single = start(&database, &emulator, "");
    insert_orders(&database, 100, 10).await;
    database.wait_until_recorded().await;
    let shard = start(&database, &emulator, "0/2");
    shard.wait_for_log("shards-mixed").await;
    assert!(
        shard.log().contains("slot \"postrider\""),
        "{}",
        shard.log()
    );
    let served = "SELECT count(*) FROM outbox.relay WHERE slot <> 'postrider'";
    assert_eq!(
        database.number(served).await,
        0,
        "nothing is changed before"
    );
    single.stop().await;
    shard.wait_for_log("recovered: everything").await;
    let single = start(&database, &emulator, "");
    single.wait_for_log("shards-mixed").await;
    let third = start(&database, &emulator, "0/3");
    third.wait_for_log("shards-mixed").await;
    let other = start(&database, &emulator, "1/2");
    insert_orders(&database, 100, 10).await;
    assert_once_and_in_order(&database, &emulator).await;
    assert!(!other.log().contains("shards-mixed"), "{}", other.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_knows_of_no_other_number_sees_it_once_its_own_slot_is_active() {
    let Some((database, emulator)) = sharded(&["0/2", "1/3"]).await else {
        return;
    };
    let first = start(&database, &emulator, "0/2");
    first.wait_for_log("streaming").await;
    // As if both had come to this point together: neither has found a word of the other.
    for (forgotten, late) in [("postrider_0of2", "1/3"), ("postrider_0of2", "")] {
        database
            .execute(&format!(
                "DELETE FROM outbox.relay WHERE slot = '{forgotten}'"
            ))
            .await;
        if late.is_empty() {
            prepare(&database, late, &[]);
        }
        let relay = start(&database, &emulator, late);
        relay.wait_for_log("shards-mixed").await;
        assert!(!relay.log().contains("recovering"), "{}", relay.log());
    }
    let served = "SELECT count(*) FROM outbox.relay";
    assert_eq!(
        database.number(served).await,
        0,
        "the late ones wrote nothing"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_number_may_not_change_while_something_is_in_quarantine() {
    let Some((database, emulator)) = unsharded().await else {
        return;
    };
    let bad = "00000000-0000-4000-8000-00000000bad0";
    let event_id = bad.to_owned();
    let fault = emulator
        .faults()
        .inject(Fault::new(Action::Poison { event_id }));
    let relay = start(&database, &emulator, "");
    database
        .execute(&format!(
            "INSERT INTO outbox.events \
                 (id, aggregatetype, aggregateid, event_type, version, occurred_at) \
             VALUES ('{bad}', 'order', 'o-3', 'Bad', 0, clock_timestamp())"
        ))
        .await;
    insert_orders(&database, 50, 10).await;
    database.wait_until_recorded().await;
    relay.stop().await;
    for shard in ["0/2", "1/2"] {
        prepare(&database, shard, &[]);
        let relay = start(&database, &emulator, shard);
        relay.wait_for_log("shards-quarantine").await;
        assert_eq!(relay.wait().await.code(), Some(5));
    }
    // The former relay goes on where it was, and releases.
    emulator.faults().lift(fault);
    let relay = start(&database, &emulator, "");
    let release = ["quarantine", "release", "--all"];
    let ran = postrider(&release, &[("DATABASE_URL", &database.url)]).output();
    assert!(ran.unwrap().status.success());
    eventually("nothing is in quarantine", || async {
        let aside = "SELECT count(*) FROM outbox.dispatch WHERE state <> 'published'";
        (database.number(aside).await == 0).then_some(())
    })
    .await;
    assert!(!relay.log().contains("recovering"), "{}", relay.log());
    relay.stop().await;
    // What one new shard sets aside does not keep the other from its start.
    let event_id = bad.replace("bad0", "bad1");
    let poison = Action::Poison { event_id };
    emulator.faults().inject(Fault::new(poison));
    let shards = ["0/2", "1/2"];
    for (n, shard) in shards.into_iter().enumerate() {
        let relay = start(&database, &emulator, shard);
        relay.wait_for_log("recovered: everything").await;
        if n == 0 {
            database
                .execute(&format!(
                    "INSERT INTO outbox.events \
                         (id, aggregatetype, event_type, version, occurred_at) \
                     VALUES ('{}', 'order', 'Bad', 0, clock_timestamp())",
                    bad.replace("bad0", "bad1")
                ))
                .await;
            eventually("it is set aside", || async {
                let aside = "SELECT count(*) FROM outbox.dispatch WHERE state = 'quarantined'";
                (database.number(aside).await == 1).then_some(())
            })
            .await;
        }
        relay.stop().await;
    }
}

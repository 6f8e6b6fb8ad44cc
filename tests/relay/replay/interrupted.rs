//! Replays that cannot send everything: rows that are gone, refused events, no records, and a replay that is
//! cancelled.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn an_event_whose_row_is_deleted_meanwhile_stays_published() {
    let (database, emulator, relay) = with_published_events(10, 1).await;
    relay.stop().await;
    let arguments = ["replay", "--key", "o-0", "--yes", "--name", "gone"];
    let mut command = postrider(&arguments, &environment(&database))
        .spawn()
        .unwrap();
    let released = "SELECT count(*) FROM outbox.dispatch WHERE state = 'released'";
    eventually("all events are released", || async {
        (database.number(released).await == 10).then_some(())
    })
    .await;
    database
        .execute("DELETE FROM outbox.events WHERE version IN (1, 5)")
        .await;
    let relay = Relay::start(&database, &emulator);
    let ran = command.wait().unwrap();
    assert_eq!(ran.code(), Some(1));
    let counts = "SELECT format('%s %s', sent, not_sent) FROM outbox.replay WHERE name = 'gone'";
    assert_eq!(database.text(counts).await, "8 2");
    let published = "SELECT count(*) FROM outbox.dispatch WHERE state = 'published'";
    assert_eq!(database.number(published).await, 10);
    assert_eq!(emulator.journal().counts().stored_messages, 18);
    let log = relay.log();
    assert!(log.contains("cannot replay an event"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_event_goes_into_quarantine_and_the_others_stay_published() {
    let (database, emulator, relay) = with_published_events(40, 2).await;
    let bad = database
        .text("SELECT id::text FROM outbox.events WHERE version = 5")
        .await;
    let event_id = bad.clone();
    let fault = emulator
        .faults()
        .inject(Fault::new(Action::Poison { event_id }));
    let report = replayed(
        &database,
        1,
        &["--topic", "order.events", "--yes", "--name", "r"],
    );
    // Version 5 is refused; before it come 1 and 3, and all of the other key.
    let sent = emulator.journal().counts().stored_messages - 40;
    assert_eq!(report["quarantined"], 1, "{report}\n{}", relay.log());
    assert_eq!(report["sent"], sent, "{report}");
    assert_eq!(report["not_sent"], 39 - sent, "{report}");
    assert!((22..=39).contains(&sent), "{report}");
    let aside = "SELECT count(*) FROM outbox.dispatch WHERE state <> 'published'";
    assert_eq!(database.number(aside).await, 1);
    // Its key is blocked, and a replay does not release what an operator has not released.
    insert_orders(&database, 4, 2).await;
    eventually("two events wait", || async {
        (database.number(aside).await == 3).then_some(())
    })
    .await;
    let left = replayed(
        &database,
        1,
        &["--topic", "order.events", "--yes", "--name", "r2"],
    );
    assert_eq!(left["finished"], false, "{left}");
    assert_eq!(
        (&left["sent"], &left["waiting"]),
        (&22.into(), &19.into()),
        "{left}"
    );
    assert_eq!(database.number(aside).await, 3);
    // After the release, the rest follows.
    emulator.faults().lift(fault);
    let release = postrider(&["quarantine", "release", &bad], &environment(&database))
        .output()
        .unwrap();
    assert!(release.status.success());
    eventually("nothing is in quarantine", || async {
        (database.number(aside).await == 0).then_some(())
    })
    .await;
    let rest = replayed(&database, 0, &["--resume", "r2"]);
    assert_eq!(
        (&rest["sent"], &rest["waiting"]),
        (&41.into(), &0.into()),
        "{rest}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_replay_sends_nothing_more() {
    let (database, emulator, relay) = with_published_events(3_000, 3_000).await;
    relay.stop().await;
    let arguments = [
        "replay", "--since", "1h", "--yes", "--name", "c", "--rate", "100000",
    ];
    let mut command = postrider(&arguments, &environment(&database))
        .spawn()
        .unwrap();
    let released = "SELECT count(*) FROM outbox.dispatch WHERE state = 'released'";
    eventually("as many events are released as may be", || async {
        (database.number(released).await == 2_000).then_some(())
    })
    .await;
    command.kill().unwrap();
    command.wait().unwrap();
    let cancelled = replayed(&database, 0, &["--cancel", "c"]);
    assert_eq!(cancelled["left_out"], 1_000);
    let relay = Relay::start(&database, &emulator);
    eventually("what was released is published", || async {
        (database.number(released).await == 0).then_some(())
    })
    .await;
    assert_eq!(emulator.journal().counts().stored_messages, 5_000);
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_records_a_replay_is_refused() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let settings = [("POSTRIDER_DISPATCH", "exceptions")];
    let relay = Relay::start_with(&database, &emulator.addr().to_string(), &settings);
    insert_orders(&database, 10, 2).await;
    database.wait_until_confirmed().await;
    let ran = replay(&database, &["--since", "1h", "--yes"]);
    let error = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(ran.status.code(), Some(2), "{error}");
    assert!(error.contains("dispatch = full"), "{error}");
    relay.stop().await;
}

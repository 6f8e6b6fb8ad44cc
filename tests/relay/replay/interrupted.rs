//! Tests of replays that cannot send all events, are cancelled or are refused. Also tests two
//! replays at the same time, and other changes while a replay runs.

use tonic::Code;

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
    // Pub/Sub refuses version 5. The replay sends at least the versions 1 and 3 of the same key, and
    // all 20 events of the other key.
    let sent = emulator.journal().counts().stored_messages - 40;
    assert_eq!(report["quarantined"], 1, "{report}\n{}", relay.log());
    assert_eq!(report["sent"], sent, "{report}");
    assert_eq!(report["not_sent"], 39 - sent, "{report}");
    assert!((22..=39).contains(&sent), "{report}");
    let aside = "SELECT count(*) FROM outbox.dispatch WHERE state <> 'published'";
    assert_eq!(database.number(aside).await, 1);
    // The key of the refused event is blocked. Only an operator can release the quarantined events
    // of the key. A replay never releases them.
    insert_orders(&database, 4, 2).await;
    eventually("two events wait", || async {
        (database.number(aside).await == 3).then_some(())
    })
    .await;
    database.wait_until_recorded().await;
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
    // Check that the resumed replay sends the remaining events after the release.
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
    let command = postrider(&arguments, &environment(&database))
        .spawn()
        .unwrap();
    let released = "SELECT count(*) FROM outbox.dispatch WHERE state = 'released'";
    // Each step has its own deadline, because a busy machine releases only some tens of keys per second.
    for step in [500, 1_000, 1_500, 2_000] {
        eventually("more events are released, up to the limit", || async {
            (database.number(released).await >= step).then_some(())
        })
        .await;
    }
    assert_eq!(database.number(released).await, 2_000);
    kill(&database, command).await;
    let relay = Relay::start(&database, &emulator);
    let cancelled = replayed(&database, 0, &["--cancel", "c"]);
    assert_eq!(
        (&cancelled["sent"], &cancelled["waiting"]),
        (&2_000.into(), &0.into())
    );
    assert_eq!(database.number(released).await, 0);
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

#[tokio::test(flavor = "multi_thread")]
async fn one_command_at_a_time_runs_a_replay_and_replays_of_one_key_run_in_turn() {
    let (database, emulator, relay) = with_published_events(2_000, 1).await;
    let name = ["replay", "--key", "o-0", "--yes", "--name"];
    let start = |n| {
        let arguments = [&name[..], &[n]].concat();
        postrider(&arguments, &environment(&database))
            .spawn()
            .unwrap()
    };
    let down = Fault::new(Action::Fail(Code::Unavailable));
    let down = emulator.faults().inject(down);
    let mut first = start("first");
    let released = "SELECT count(*) FROM outbox.dispatch WHERE state = 'released'";
    eventually("the first replay is under way", || async {
        (database.number(released).await > 0).then_some(())
    })
    .await;
    let twice = replay(&database, &["--resume", "first"]);
    let error = String::from_utf8_lossy(&twice.stderr).into_owned();
    assert!(
        error.contains("another command carries out the replay"),
        "{error}"
    );
    let mut second = start("second");
    // A replay gives up after ten seconds in which no key becomes free and the relay has nothing to publish. The
    // relay still has to publish the events of the first replay, so the second replay must wait for longer.
    tokio::time::sleep(Duration::from_secs(15)).await;
    assert!(second.try_wait().unwrap().is_none(), "{}", relay.log());
    emulator.faults().lift(down);
    assert!(first.wait().unwrap().success(), "{}", relay.log());
    assert!(second.wait().unwrap().success(), "{}", relay.log());
    let all = database.expected().await;
    let stored = &stored(&emulator)["o-0"];
    assert_eq!(stored.len(), 6_000);
    for copies in stored.chunks(2_000) {
        assert_eq!(copies, of_key(&all, "o-0"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_deleted_in_its_own_transaction_is_published_during_a_replay_of_its_key() {
    let (database, emulator, _relay) = with_published_events(500, 1).await;
    let slow = Fault::new(Action::Delay(Duration::from_millis(200)));
    let slow = emulator.faults().inject(slow);
    let arguments = ["replay", "--key", "o-0", "--yes"];
    let mut command = postrider(&arguments, &environment(&database))
        .spawn()
        .unwrap();
    let released = "SELECT count(*) FROM outbox.dispatch WHERE state = 'released'";
    eventually("the replay is under way", || async {
        let left = database.number(released).await;
        (left > 0 && left < 500).then_some(())
    })
    .await;
    database
        .execute(
            "WITH i AS (INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload) \
                 VALUES ('order', 'o-0', 'Short', '{}') RETURNING id) SELECT FROM i; \
             DELETE FROM outbox.events WHERE event_type = 'Short'",
        )
        .await;
    emulator.faults().lift(slow);
    assert!(command.wait().unwrap().success());
    let published = "SELECT count(*) FROM outbox.dispatch WHERE state = 'published'";
    eventually("the short-lived row is published", || async {
        (database.number(published).await == 501).then_some(())
    })
    .await;
    assert_eq!(emulator.journal().counts().stored_messages, 1_001);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_does_not_discard_replayed_events_with_the_quarantine() {
    let (database, _emulator, relay) = with_published_events(20, 1).await;
    relay.stop().await;
    let arguments = ["replay", "--key", "o-0", "--yes"];
    let command = postrider(&arguments, &environment(&database))
        .spawn()
        .unwrap();
    let released = "SELECT count(*) FROM outbox.dispatch WHERE state = 'released'";
    eventually("all events are released", || async {
        (database.number(released).await == 20).then_some(())
    })
    .await;
    kill(&database, command).await;
    for arguments in [
        ["quarantine", "discard", "--key", "o-0", "--yes"].as_slice(),
        &["quarantine", "release", "--all"],
    ] {
        let ran = postrider(arguments, &environment(&database))
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert!(error.contains("not-in-quarantine"), "{error}");
    }
    assert_eq!(database.number(released).await, 20);
}

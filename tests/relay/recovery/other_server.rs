//! Tests of a relay that connects to another server with the same tables: a promoted standby server, a
//! server on another timeline, or another cluster.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_promoted_standby_without_the_slot_is_served_from_its_tables() {
    let (mut database, emulator) = served_by(Database::private().await).await;
    insert(&database, 201, 300).await;
    database
        .server()
        .stop(StopMode::Fast, harness::PATIENCE)
        .unwrap();
    let standby = ScratchPostgres::builder()
        .standby_of(database.server())
        .start()
        .unwrap();
    let client = harness::connect(&standby.url("postgres")).await;
    client
        .batch_execute("SELECT pg_promote(true)")
        .await
        .unwrap();
    database.client = client;
    database.url = standby.url("postgres");
    insert(&database, 501, 200).await;
    let relay = Relay::start(&database, &emulator);
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
    let timeline = "SELECT timeline::bigint FROM outbox.relay";
    assert_eq!(database.number(timeline).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_another_timeline_that_has_the_slot_is_served_and_audited() {
    let (database, emulator) = served_and_stopped().await;
    database
        .execute("UPDATE outbox.relay SET timeline = 7")
        .await;
    insert(&database, 201, 200).await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("was promoted from a standby").await;
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
    assert!(!relay.log().contains("recovering"), "{}", relay.log());
    let timeline = "SELECT timeline::bigint FROM outbox.relay";
    assert_eq!(database.number(timeline).await, 1);
}

/// Copies the rows of the outbox tables to another cluster, as a dump and a restore would.
async fn migrate(from: &Database, to: &Database) {
    to.execute("DELETE FROM outbox.capture").await;
    let last = from.number("SELECT max(seq) FROM outbox.events").await;
    to.execute(&format!("SELECT setval('outbox.events_seq_seq', {last})"))
        .await;
    for table in [
        "outbox.events",
        "outbox.dispatch",
        "outbox.relay",
        "outbox.capture",
    ] {
        let rows = from
            .client
            .query(&format!("SELECT to_jsonb(t)::text FROM {table} t"), &[])
            .await
            .unwrap();
        for row in rows {
            let json: String = row.get(0);
            to.client
                .execute(
                    &format!(
                        "INSERT INTO {table} SELECT * \
                         FROM jsonb_populate_record(null::{table}, $1::text::jsonb)"
                    ),
                    &[&json],
                )
                .await
                .unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_cluster_is_refused_until_adopted_and_its_wal_collides_with_no_record() {
    let (old, emulator) = served_by(Database::private().await).await;
    insert(&old, 201, 100).await;
    let new = Database::private().await;
    // Insert a row with an `inserted_xid` that no cluster reaches, as if a service had set it. The adoption must
    // ignore this transaction id.
    old.execute(
        "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload, inserted_xid) \
         VALUES ('order', 'odd', 'OrderPlaced', '{}', '4611686018427387904')",
    )
    .await;
    migrate(&old, &new).await;
    // Move a record of the old cluster to an LSN that the WAL of the new cluster may reach, where the
    // relay could mistake it for the record of a new event.
    new.execute(
        "UPDATE outbox.dispatch SET commit_lsn = pg_current_wal_lsn() + (ordinal + 100000000) \
         WHERE event_id IN (SELECT event_id FROM outbox.dispatch LIMIT 1)",
    )
    .await;
    let relay = Relay::start(&new, &emulator);
    relay.wait_for_error("foreign-cluster").await;
    relay.wait_for_log("recover --adopt").await;
    assert_eq!(relay.wait().await.code(), Some(3));
    let environment = [
        ("DATABASE_URL", new.url.as_str()),
        ("POSTRIDER_SLOT", new.slot()),
    ];
    let recover = |arguments: &[&str]| {
        let mut all = vec!["recover"];
        all.extend(arguments);
        harness::postrider(&all, &environment).output().unwrap()
    };
    let refused = recover(&["--yes"]);
    assert_eq!(refused.status.code(), Some(3), "{refused:?}");
    let adopted = recover(&["--adopt", "--yes"]);
    assert!(adopted.status.success(), "{adopted:?}");
    let ahead = "SELECT count(*) FROM outbox.dispatch WHERE commit_lsn > pg_current_wal_lsn()";
    assert_eq!(new.number(ahead).await, 0);
    insert(&new, 301, 100).await;
    let relay = Relay::start(&new, &emulator);
    assert_nothing_is_lost_or_repeated(&new, &emulator, &relay).await;
    let again = recover(&["--adopt", "--yes"]);
    assert_eq!(again.status.code(), Some(2), "nothing to adopt: {again:?}");
}

//! Tests that columns of a domain behave like columns of its base type.

use super::World;
use crate::mapping::{Subscriber, attributes};

const TABLE: &str = "\
    CREATE DOMAIN uuid_1 AS uuid; CREATE DOMAIN uuid_2 AS uuid_1; \
    CREATE DOMAIN word AS text CHECK (value <> ''); \
    CREATE TYPE colour AS ENUM ('red', 'green'); CREATE DOMAIN shade AS colour; \
    CREATE DOMAIN numbers AS int[]; CREATE DOMAIN number AS bigint; \
    CREATE DOMAIN counter AS number; CREATE SEQUENCE d_seq; \
    CREATE DOMAIN body AS bytea; CREATE DOMAIN document AS jsonb; CREATE DOMAIN moment AS timestamptz; \
    CREATE TABLE d (id uuid_2 PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype word, \
        aggregateid word, event_type shade, version number, schema_version numbers, payload body, \
        headers document, occurred_at moment, \
        seq counter NOT NULL UNIQUE DEFAULT nextval('d_seq'))";

const SETTINGS: &str = "\
    [[tables]]\ntable = 'public.d'\ntopic = 'domains'\nenvelope = 'cloudevents-binary'\n";

const INSERT: &str = "\
    INSERT INTO d (aggregatetype, aggregateid, event_type, version, schema_version, payload, headers, \
                   occurred_at) \
    SELECT 'order', 'o-1', 'green', n, '{1,2}', '\\x00ff', '{\"tenant\": \"acme\"}', \
           '2026-03-29 02:30:00+01' FROM generate_series(1, 2) n";

#[tokio::test(flavor = "multi_thread")]
async fn rows_with_domains_are_sent_and_identified_like_rows_of_the_base_types() {
    let world = World::start(TABLE, &["d"], SETTINGS).await;
    let mut domains = Subscriber::new(&world.emulator, "domains").await;
    let relay = world.run();
    relay.wait_for_log("streaming").await;
    world.database.execute(INSERT).await;
    world.wait_until_recorded(2).await;
    world.lose_the_slot(relay).await;
    world.database.execute(INSERT).await;
    let relay = world.run();
    world.wait_until_recorded(4).await;
    world.database.wait_until_audited().await;
    assert_eq!(world.emulator.journal().counts().stored_messages, 4);
    for message in domains.take(4).await {
        assert_eq!(message.data.as_ref(), [0x00, 0xff], "{}", relay.log());
        let attributes = attributes(&message);
        for (name, value) in [
            ("event_type", "green"),
            ("schema_version", "{1,2}"),
            ("tenant", "acme"),
            ("occurred_at", "2026-03-29T01:30:00.000000Z"),
            ("ce-time", "2026-03-29T01:30:00.000000Z"),
            ("content-type", "application/octet-stream"),
        ] {
            assert_eq!(attributes.get(name), Some(&value), "{name}");
        }
        assert!(!attributes.contains_key("source_id"));
    }
    let by_themselves = "SELECT count(*) FROM d JOIN outbox.dispatch r ON r.event_id = d.id \
                         WHERE r.source_id IS NULL";
    assert_eq!(world.database.number(by_themselves).await, 4);
    let (found, status) = world.command(&["check", "--all"]);
    assert!(matches!(status, Some(0 | 1)), "{found}");
    assert!(found.contains("fit its columns and 4 sampled"), "{found}");
    assert!(!found.contains("seq-"), "{found}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_domain_may_be_created_while_the_relay_runs_and_dropped_before_its_rows_are_read() {
    let table = "CREATE TABLE d (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype text, \
                 aggregateid text, event_type text, payload bytea)";
    let world = World::start(table, &["d"], SETTINGS).await;
    let mut domains = Subscriber::new(&world.emulator, "domains").await;
    let relay = world.run();
    relay.wait_for_log("streaming").await;
    let insert = "INSERT INTO d (aggregatetype, aggregateid, event_type, payload) \
                  VALUES ('order', 'o-1', 'A', '\\x00ff')";
    world.database.execute(insert).await;
    world.wait_until_recorded(1).await;
    let change = "CREATE DOMAIN late AS uuid; CREATE DOMAIN body AS bytea; \
                  ALTER TABLE d ALTER COLUMN id TYPE late; ALTER TABLE d ALTER COLUMN payload TYPE body";
    world.database.execute(change).await;
    world.database.execute(insert).await;
    world.wait_until_recorded(2).await;
    world.database.wait_until_confirmed().await;
    relay.stop().await;
    world.database.execute(insert).await;
    let change = "ALTER TABLE d ALTER COLUMN id TYPE uuid; \
                  ALTER TABLE d ALTER COLUMN payload TYPE bytea; DROP DOMAIN late, body";
    world.database.execute(change).await;
    world.database.execute(insert).await;
    let relay = world.run();
    world.wait_until_recorded(4).await;
    let by_themselves = "SELECT count(*) FROM d JOIN outbox.dispatch r ON r.event_id = d.id \
                         WHERE r.source_id IS NULL";
    assert_eq!(
        world.database.number(by_themselves).await,
        4,
        "{}",
        relay.log()
    );
    for message in domains.take(4).await {
        assert_eq!(message.data.as_ref(), [0x00, 0xff], "{}", relay.log());
    }
    world.database.wait_until_audited().await;
    assert_eq!(world.emulator.journal().counts().stored_messages, 4);
}

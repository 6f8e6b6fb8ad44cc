//! Tests of generated columns, which PostgreSQL can publish from version 18 on.

use super::World;
use crate::mapping::{Subscriber, attributes};

const TABLE: &str = "\
    CREATE TABLE g (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype text, tenant int, \
        aggregateid text GENERATED ALWAYS AS ('t-' || tenant) STORED, event_type text, payload jsonb)";

const SETTINGS: &str = "[[tables]]\ntable = 'public.g'\ntopic = 'generated'\n";

const INSERT: &str = "\
    INSERT INTO g (aggregatetype, tenant, event_type, payload) VALUES ('order', 5, 'A', '{}')";

async fn major(world: &World) -> i64 {
    let version = "SELECT current_setting('server_version_num')::bigint / 10000";
    world.database.number(version).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_generated_key_is_refused_if_postgresql_cannot_publish_it() {
    let world = World::start(TABLE, &["g"], SETTINGS).await;
    if major(&world).await >= 18 {
        return;
    }
    let message = "column aggregateid of table public.g is generated: generated columns are not \
                   published before PostgreSQL 18";
    world.is_refused("column-missing", message).await;
    let (found, _) = world.command(&["check"]);
    let remedy = "alter table public.g alter column aggregateid drop expression";
    assert!(found.contains(remedy), "{found}");
    world
        .database
        .execute("ALTER TABLE g ALTER COLUMN aggregateid DROP EXPRESSION")
        .await;
    let relay = world.run();
    relay.wait_for_log("streaming").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stored_generated_key_works_if_postgresql_can_publish_it() {
    let world = World::start(TABLE, &["g"], SETTINGS).await;
    if major(&world).await < 18 {
        eprintln!("skipped: generated columns are published from PostgreSQL 18 on");
        return;
    }
    let remedy = "alter publication postrider set (publish_generated_columns = stored)";
    let (found, status) = world.command(&["check"]);
    assert_eq!(status, Some(2), "{found}");
    assert!(found.contains(remedy), "{found}");
    world.database.execute(remedy).await;
    let (found, status) = world.command(&["check"]);
    assert!(matches!(status, Some(0 | 1)), "{found}");
    let mut generated = Subscriber::new(&world.emulator, "generated").await;
    let relay = world.run();
    relay.wait_for_log("streaming").await;
    world.database.execute(INSERT).await;
    world.wait_until_recorded(1).await;
    world.database.wait_until_audited().await;
    world.lose_the_slot(relay).await;
    world.database.execute(INSERT).await;
    let relay = world.run();
    world.wait_until_recorded(2).await;
    for message in generated.take(2).await {
        assert_eq!(message.ordering_key, "t-5", "{}", relay.log());
        assert_eq!(attributes(&message)["aggregate_id"], "t-5");
    }
    assert!(!relay.log().contains("cannot compare"), "{}", relay.log());
    relay.stop().await;
    // PostgreSQL never publishes a virtual generated column, so the relay must refuse the table.
    world
        .database
        .execute(
            "ALTER TABLE g DROP COLUMN aggregateid; \
             ALTER TABLE g ADD aggregateid text GENERATED ALWAYS AS ('t-' || tenant) VIRTUAL",
        )
        .await;
    let message = "column aggregateid of table public.g is generated and not stored: such columns \
                   are never published";
    world.is_refused("column-missing", message).await;
}

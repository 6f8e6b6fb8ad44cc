//! Tests of records that come from a later state of the server, in which a table was recreated or renamed. An adoption
//! must give each table the identity under which its events were recorded. The later state is simulated: the tests
//! change the records as a later relay would have done.

use super::World;
use super::table::Kind;

/// Raises the floors above the next transaction, so that the records seem to come from a later state.
const LATE: &str = "\
    UPDATE outbox.capture SET floor = (pg_snapshot_xmax(pg_current_snapshot())::text::bigint + 1000000)::text::xid8";

impl World {
    /// Adopts the records, and starts the relay.
    async fn adopt(&self) -> crate::harness::Relay {
        let adopted = self.run(&["recover", "--adopt", "--yes"], &[]);
        assert_eq!(adopted.status.code(), Some(0), "{adopted:?}");
        self.streaming().await
    }
}

/// Without `inserted_xid`, the event ids depend on the suffix that `id_suffixes` contains for the table's OID.
#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_was_recreated_in_the_later_state_keeps_its_event_ids() {
    let world = World::new(Kind::Timed, 0).await;
    world
        .execute("ALTER TABLE TABLE_NAME DROP COLUMN inserted_xid")
        .await;
    let (mut world, relay) = world.serve(20).await;
    relay.stop().await;
    let recreated = "UPDATE outbox.capture SET table_oid = 999999, id_suffixes = \
         coalesce(id_suffixes, jsonb_build_object(table_oid::text, '')) || '{\"999999\": \"@999999\"}'";
    world.execute(recreated).await;
    world.execute(LATE).await;
    let relay = world.adopt().await;
    world.insert("after", 10).await;
    world.assert_published_once(relay).await;
}

/// In the later state, `public.another` was renamed away, `public.numbered` got its name, and a new table became
/// `public.numbered`.
#[tokio::test(flavor = "multi_thread")]
async fn tables_that_were_rotated_in_the_later_state_keep_their_event_ids() {
    let mut world = World::with_numbered(&["public.another"]).await;
    let relay = world.streaming().await;
    let both = [
        ("public.numbered", "public.numbered"),
        ("public.another", "public.another"),
    ];
    world.insert_equal_ids(&both, 1, 5).await;
    world.wait_until_published(&relay).await;
    world.wait_until_recorded().await;
    relay.stop().await;
    let rotated = "\
        CREATE TEMPORARY TABLE added AS SELECT * FROM outbox.capture WHERE identity = 'public.numbered'; \
        UPDATE added SET identity = 'public.numbered#2', table_oid = 999998, \
            id_suffixes = '{\"999998\": \"\"}', captured_at = now() + interval '1 second'; \
        UPDATE outbox.capture SET table_name = 'another', captured_at = now() + interval '1 second' \
            WHERE identity = 'public.numbered'; \
        INSERT INTO outbox.capture SELECT * FROM added";
    world.execute(rotated).await;
    world.execute(LATE).await;
    let relay = world.adopt().await;
    world.insert_equal_ids(&both, 101, 105).await;
    world.assert_exactly_published(&relay).await;
    relay.stop().await;
}

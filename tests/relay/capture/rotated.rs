//! Tests with two captured tables, of which one gets the name of the other. Every row is published, under the
//! settings of the table's present name.

use super::World;
use super::table::Kind;

impl World {
    /// Captures `public.other` as well. Its rows have a topic that does not exist.
    async fn with_other(self) -> Self {
        let create = "CREATE TABLE public.other (LIKE TABLE_NAME INCLUDING ALL); \
                      ALTER PUBLICATION postrider ADD TABLE public.other";
        self.execute(create).await;
        let settings = format!(
            "{}[[tables]]\ntable = \"public.other\"\ntopic = \"missing\"\n",
            self.kind.settings(&self.table)
        );
        std::fs::write(self.settings.path(), settings).unwrap();
        self
    }
}

/// Drops `public.other`, gives its name to the captured table, and creates a new captured table. Inserts rows
/// before the publication contains the new table.
async fn rotate(world: &mut World) {
    let rotate = "BEGIN; DROP TABLE public.other; ALTER TABLE TABLE_NAME RENAME TO other; \
                  CREATE TABLE TABLE_NAME (LIKE public.other INCLUDING ALL); COMMIT";
    world.execute(rotate).await;
    world.insert("gap", 10).await;
    world
        .execute("ALTER PUBLICATION postrider ADD TABLE TABLE_NAME")
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_that_are_rotated_under_a_running_relay_lose_nothing() {
    let world = World::new(Kind::Uuid, 20).await.with_other().await;
    let (mut world, relay) = world.serve(10).await;
    rotate(&mut world).await;
    // The stream contains no row of the new table, so the stream does not tell the relay that the table was replaced.
    world.note().await;
    world.wait_until_published(&relay).await;
    world.insert("after", 10).await;
    world.assert_published_once(relay).await;
}

/// With `dispatch = exceptions`, published events have no records. So no audit can find the rows that were
/// inserted before the publication contained the new table. The relay must recover to publish them.
#[tokio::test(flavor = "multi_thread")]
async fn tables_that_are_rotated_while_the_relay_is_down_lose_nothing_without_records() {
    let world = World::new(Kind::Uuid, 20).await.with_other().await;
    let (mut world, relay) = world.serve(10).await;
    relay.stop().await;
    let exceptions = ("POSTRIDER_DISPATCH", "exceptions".to_owned());
    world.more.push(exceptions);
    rotate(&mut world).await;
    let relay = world.relay();
    world.note().await;
    world.wait_until_published(&relay).await;
    relay.stop().await;
}

/// `init` has recorded that capturing of the earlier table begins without old rows (`start = new`). The rows of
/// the new table have a low `inserted_xid`, so they look older than the beginning. The relay must publish
/// them, because it is started with `start = all`.
#[tokio::test(flavor = "multi_thread")]
async fn a_first_start_with_all_publishes_the_old_rows_of_a_rotated_table() {
    let mut world = World::new(Kind::Uuid, 0).await.with_other().await;
    world.more.push(("POSTRIDER_START", "all".to_owned()));
    rotate(&mut world).await;
    world
        .execute("UPDATE TABLE_NAME SET inserted_xid = '10'")
        .await;
    let relay = world.relay();
    world.note().await;
    world.wait_until_published(&relay).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn three_tables_that_pass_their_names_round_under_a_running_relay_lose_nothing() {
    let world = World::new(Kind::Uuid, 0).await.with_other().await;
    let third = "CREATE TABLE public.third (LIKE TABLE_NAME INCLUDING ALL); \
                 ALTER PUBLICATION postrider ADD TABLE public.third";
    world.execute(third).await;
    let settings = std::fs::read_to_string(world.settings.path()).unwrap();
    let settings = format!("{settings}[[tables]]\ntable = \"public.third\"\ntopic = \"missing\"\n");
    std::fs::write(world.settings.path(), settings).unwrap();
    let (mut world, relay) = world.serve(10).await;
    let pass_round = "BEGIN; ALTER TABLE TABLE_NAME RENAME TO free; \
                      ALTER TABLE public.other RENAME TO plain; \
                      ALTER TABLE public.third RENAME TO other; \
                      ALTER TABLE public.free RENAME TO third; COMMIT";
    world.execute(pass_round).await;
    world.insert("passed", 10).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    relay.stop().await;
    world.insert("down", 10).await;
    world.execute(pass_round).await;
    world.insert("again", 10).await;
    let relay = world.relay();
    world.note().await;
    world.wait_until_published(&relay).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_that_swap_their_names_under_a_running_relay_swap_their_settings() {
    let world = World::new(Kind::Uuid, 0).await.with_other().await;
    let (mut world, relay) = world.serve(10).await;
    let swap = "BEGIN; ALTER TABLE TABLE_NAME RENAME TO third; ALTER TABLE public.other RENAME TO plain; \
                ALTER TABLE public.third RENAME TO other; COMMIT";
    world.execute(swap).await;
    world.insert("swapped", 10).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    world.wait_until_recorded().await;
    relay.stop().await;
}

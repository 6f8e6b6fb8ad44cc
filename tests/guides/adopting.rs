//! Follows docs/how-to/adopting.md with ids of the type `char(n)`. A cast to `text` removes the
//! blanks at the end of such ids.

use crate::guide::Guide;
use crate::playground::Playground;

const TABLE: &str = "
    CREATE TABLE public.outbox (id char(8) PRIMARY KEY, aggregatetype text NOT NULL, aggregateid text,
        event_type text, payload jsonb, processed_at timestamptz);
    INSERT INTO public.outbox
    SELECT 'id-' || n, 'order', '7', 'OrderPlaced', '{}', CASE WHEN n <= 3 THEN now() END
    FROM generate_series(1, 5) n";

#[tokio::test(flavor = "multi_thread")]
async fn the_records_of_a_poller_are_added_once_for_ids_of_any_type() {
    let page = Guide::read("how-to/adopting.md");
    let stage = Playground::open().await;
    stage
        .client
        .batch_execute(TABLE)
        .await
        .expect("the poller's table");
    let settings = page.block("toml", "public.outbox");
    std::fs::write(stage.folder.path().join("postrider.toml"), settings).expect("settings");
    stage.shell("postrider init --apply --config postrider.toml");

    let record = page.block("sql", "insert into outbox.dispatch");
    for _ in 0..2 {
        stage.client.batch_execute(&record).await.expect("records");
        let query = "SELECT count(*) FROM outbox.dispatch WHERE state = 'discarded'";
        stage.wait_for(query, 3).await;
    }
    let relay = stage.relay("postrider run --config postrider.toml");
    stage.wait_until_published(2).await;
    assert_eq!(stage.stored(), 2);
    relay.stop();
}

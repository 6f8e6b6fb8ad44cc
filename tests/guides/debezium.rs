//! Follows docs/how-to/move-from-debezium.md. The test does not run Debezium. It uses a plain slot
//! instead, because only Debezium's confirmed position matters.

use crate::guide::Guide;
use crate::playground::Playground;

const TABLE: &str = "
    CREATE TABLE public.outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype text NOT NULL,
        aggregateid text NOT NULL, type text, payload jsonb, tracingspancontext text);
    CREATE PUBLICATION dbz_publication FOR TABLE public.outbox;
    CREATE ROLE shop_relay LOGIN REPLICATION";

const SLOT: &str = "SELECT pg_create_logical_replication_slot('debezium', 'pgoutput')";

/// The WAL position in the examples of the page.
const EXAMPLE: &str = "0/1E0BD20";

impl Playground {
    async fn insert_order(&self, order: &str) {
        let sql = "INSERT INTO public.outbox (aggregatetype, aggregateid, type, payload)
                   VALUES ('order', $1, 'OrderPlaced', '{}')";
        self.client.execute(sql, &[&order]).await.expect("an order");
    }

    async fn text(&self, query: &str) -> String {
        let rows = self.client.simple_query(query).await.expect("an answer");
        let row = rows.iter().find_map(|message| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0),
            _ => None,
        });
        row.unwrap_or("no row").to_owned()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn postrider_continues_where_debezium_has_confirmed() {
    let page = Guide::read("how-to/move-from-debezium.md");
    let stage = Playground::open().await;
    stage
        .client
        .batch_execute(TABLE)
        .await
        .expect("Debezium's objects");
    stage.text(SLOT).await;
    let settings = page.block("toml", "public.outbox");
    std::fs::write(stage.folder.path().join("postrider.toml"), settings).expect("settings");
    stage.insert_order("before").await;

    // Do step 2 of the page. Then do steps 3 and 5 too early, before Debezium has confirmed the position: the
    // check returns false, and the copy of the slot returns no row.
    stage.shell(&page.block("sh", "postrider init"));
    let position = stage
        .text(&page.block("sql", "pg_current_wal_insert_lsn()"))
        .await;
    let confirmed = page
        .block("sql", "SELECT confirmed_flush_lsn >")
        .replace(EXAMPLE, &position);
    let copy = page
        .block("sql", "pg_copy_logical_replication_slot")
        .replace(EXAMPLE, &position);
    assert_eq!(stage.text(&confirmed).await, "f");
    assert_eq!(stage.text(&copy).await, "no row");

    // Debezium delivers and confirms one more event, and then stops.
    stage.insert_order("by-debezium").await;
    stage
        .text("SELECT pg_replication_slot_advance('debezium', pg_current_wal_lsn())")
        .await;
    assert_eq!(stage.text(&confirmed).await, "t");
    stage.insert_order("after").await;

    // Steps 5 and 6 of the page.
    assert!(stage.text(&copy).await.starts_with("(postrider,"));
    let relay = stage.relay("postrider run --config postrider.toml");
    stage.wait_until_published(1).await;
    let audit = stage.shell("postrider audit --config postrider.toml");
    assert!(
        audit.contains("committed before capturing began: never published"),
        "{audit}"
    );
    assert_eq!(stage.stored(), 1);

    // Step 7 of the page.
    for statement in page
        .block("sql", "pg_drop_replication_slot")
        .split_terminator(";\n")
    {
        stage.text(statement).await;
    }
    stage.insert_order("later").await;
    stage.wait_until_published(2).await;
    relay.stop();
}

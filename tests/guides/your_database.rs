//! Follows docs/tutorial/your-database.md and the part "Adopt it" of the README. The server and the emulator have
//! other ports than on the pages.

use scratch_postgres::StopMode;

use crate::guide::Guide;
use crate::playground::{Playground, connect};

#[tokio::test(flavor = "multi_thread")]
async fn an_event_from_a_new_database_reaches_a_subscriber() {
    let page = Guide::read("tutorial/your-database.md");
    let mut stage = Playground::open().await;
    if !stage
        .try_shell("command -v curl psql", &[])
        .status
        .success()
    {
        println!("SKIPPED: the tutorial needs curl and psql");
        return;
    }
    let (server, emulator) = (stage.server.port(), stage.emulator.addr());
    let url = format!("postgres://postgres@127.0.0.1:{server}/postgres");
    let here = |block: String| {
        block
            .replace("postgres://postgres@127.0.0.1:5432/shop", &url)
            .replace(
                "127.0.0.1:5432/shop",
                &format!("127.0.0.1:{server}/postgres"),
            )
            .replace("127.0.0.1:8085", &emulator.to_string())
    };
    let owner = here(page.block("sh", "export OWNER_URL"));
    stage.shell(&owner);
    stage
        .server
        .restart(StopMode::Fast)
        .expect("the server restarts");
    stage.client = connect(&stage.server).await;
    let with_owner = |block: String| format!("OWNER_URL={url}\n{}", here(block));
    stage.shell(&with_owner(page.block("sh", "postrider init")));

    let topic = page.block("sh", "pubsub-emulator --topic");
    let topic = topic.trim().rsplit(' ').next().expect("a topic");
    stage.emulator.create_topic(topic).await.expect("the topic");
    let subscribe = here(page.block("sh", "curl -X PUT"));
    assert!(stage.shell(&subscribe).contains("subscriptions/billing"));
    let run =
        here(page.block("sh", "postrider run")).replace("postrider run", "exec postrider run");
    let relay = stage.relay_from(&run);
    relay.wait_for_log("streaming").await;

    let receive = with_owner(page.block("sh", "billing:pull"));
    let answer = stage.shell(&format!("PUBSUB_EMULATOR_HOST={emulator}\n{receive}"));
    assert!(
        answer.contains("order-4711") && answer.contains("OrderPlaced"),
        "{answer}"
    );
    relay.stop();
    stage.shell(&page.block("sh", "postrider slot drop"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commands_of_the_readme_publish_an_event() {
    let page = Guide::read("../README.md");
    let stage = Playground::open().await;
    if !stage.try_shell("command -v psql", &[]).status.success() {
        println!("SKIPPED: the README needs psql");
        return;
    }
    let url = stage.server.url("postgres");
    let (_, address) = url.split_once('@').expect("a role in the URL");
    let topic = "projects/my-project/topics/order.events";
    stage.emulator.create_topic(topic).await.expect("the topic");
    let adopt = page.block("sh", "postrider check ");
    let (build, adopt) = adopt.split_once('\n').expect("two lines");
    let tutorial = Guide::read("tutorial/your-database.md");
    let with_emulator = tutorial.block("sh", "cargo build");
    let without = with_emulator.replace(" --package postrider --package pubsub-emulator", "");
    assert_eq!(build, without.trim());
    let adopt = adopt
        .replace("PASSWORD '...'", "PASSWORD 'secret'")
        .replace("shop_relay:...@", "shop_relay:secret@")
        .replace("db.example:5432/shop?sslmode=verify-full", address)
        .replace("postrider run", "exec postrider run");
    let relay = stage.relay_from(&format!(
        "unset POSTRIDER_CREATE_TOPICS\nOWNER_URL={url}\n{adopt}"
    ));
    relay.wait_for_log("streaming").await;
    let write = page.block("sql", "INSERT INTO outbox.events");
    stage.client.batch_execute(&write).await.expect("an event");
    stage.wait_until_published(1).await;
    assert_eq!(stage.stored(), 1);
    relay.stop();
}

//! Checks that the relay misses no row that is committed after `init --apply`.

use std::time::Instant;

use pubsub_emulator::Emulator;

use crate::support::{Database, PATIENCE, command};

#[tokio::test]
async fn every_row_inserted_between_init_and_the_first_run_is_delivered() {
    let database = Database::initialised().await;
    database.emit(250).await;
    let builder = Emulator::builder().listen("127.0.0.1:0".parse().unwrap());
    let emulator = builder.start().await.unwrap();
    let host = emulator.addr().to_string();
    let more = [
        ("PUBSUB_EMULATOR_HOST", host.as_str()),
        ("PUBSUB_PROJECT_ID", "demo"),
        ("POSTRIDER_CREATE_TOPICS", "true"),
        ("POSTRIDER_HTTP_ADDR", "off"),
    ];
    let env: Vec<_> = database.env().into_iter().chain(more).collect();
    let _relay = command(&["run"], &env).spawn().unwrap();
    let deadline = Instant::now() + PATIENCE;
    while database
        .number("select count(*) from outbox.dispatch")
        .await
        < 250
    {
        assert!(Instant::now() < deadline, "not delivered in {PATIENCE:?}");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    assert_eq!(emulator.journal().counts().stored_messages, 250);
    let shown = database.run(&["slot", "show", "--json"]).await;
    shown.assert_status(0);
    assert_eq!(shown.json()["state"], "streaming");
    assert_eq!(shown.json()["pending_events"], 0);
}

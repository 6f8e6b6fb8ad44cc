//! Tests the findings of `postrider check` about slots that nobody reads, about a database without the
//! tables of Postrider, and about what `postrider run` would do.

use std::time::{Duration, Instant};

use pubsub_emulator::Emulator;
use serde_json::json;

use crate::support::{Database, PATIENCE, Ran, assert_contains, command};

async fn check(database: &Database, more: &[(&str, &str)]) -> Ran {
    let env = [("PUBSUB_PROJECT_ID", "demo")];
    database
        .run_with(&["check", "--json"], &[&env[..], more].concat())
        .await
}

#[tokio::test]
async fn a_slot_of_a_renamed_setting_and_a_stray_slot_are_named() {
    let database = Database::initialised().await;
    let name = &database.name;
    let (renamed, stray) = (format!("{name}_renamed"), format!("{name}_stray"));
    let create = format!(
        "select pg_create_logical_replication_slot('{stray}', 'pgoutput'); \
         select pg_create_physical_replication_slot('{name}_physical')"
    );
    database.execute(&create).await;
    let ran = check(&database, &[]).await;
    let found = ran.finding("slot-unread");
    assert_eq!(found["severity"], "warning");
    assert_contains(&found["what"].to_string(), &stray);
    assert_contains(&found["remedy"].to_string(), &format!("--slot {stray}"));
    assert!(!ran.stdout.contains("_physical"), "{ran}");

    let ran = check(&database, &[("POSTRIDER_SLOT", &renamed)]).await;
    let found = ran.json()["findings"].as_array().unwrap().clone();
    let unread: Vec<String> = found
        .iter()
        .filter(|finding| finding["code"] == "slot-unread")
        .map(|finding| finding["what"].to_string())
        .collect();
    assert_eq!(unread.len(), 2, "{ran}");
    let of_a_relay = format!("a Postrider relay used slot {name},");
    assert!(
        unread.iter().any(|what| what.contains(&of_a_relay)),
        "{unread:?}"
    );
    assert_contains(&ran.json()["run"]["stops"].to_string(), "table-captured");
    assert!(!ran.stdout.contains("`postrider run` creates it"), "{ran}");

    // Run the command that the remedy suggests, which drops the slot.
    let drop = ["slot", "drop", "--slot", &stray, "--yes"];
    database.run(&drop).await.assert_status(0);
    let ran = check(&database, &[]).await;
    assert!(!ran.stdout.contains("slot-unread"), "{ran}");
}

#[tokio::test]
async fn before_init_the_missing_table_is_named_with_the_command_that_creates_it() {
    let database = Database::new().await;
    let ran = check(&database, &[]).await;
    ran.assert_status(2);
    let found = ran.json()["findings"].as_array().unwrap().clone();
    let table = found
        .iter()
        .find(|finding| finding["what"] == "table outbox.events does not exist");
    let table = table.unwrap_or_else(|| panic!("{ran}"));
    assert_eq!(table["code"], "schema-missing");
    for finding in [table, &ran.finding("publication-missing")] {
        assert_contains(&finding["remedy"].to_string(), "postrider init --apply");
    }
    let run = &ran.json()["run"];
    assert_contains(&run["stops"].to_string(), "schema-missing");
}

#[tokio::test]
async fn check_says_whether_the_relay_would_start_wait_recover_or_stop() {
    let database = Database::initialised().await;
    database.emit(1).await;
    let builder = Emulator::builder().listen("127.0.0.1:0".parse().unwrap());
    let emulator = builder.start().await.unwrap();
    let host = emulator.addr().to_string();
    let env = [
        ("PUBSUB_PROJECT_ID", "demo"),
        ("PUBSUB_EMULATOR_HOST", host.as_str()),
    ];
    let ran = database.run_with(&["check"], &env).await;
    ran.assert_status(2);
    let waits = "`postrider run` would start and wait until this is corrected: topic-missing.";
    assert_contains(&ran.stdout, waits);
    let ran = check(&database, &env[1..]).await;
    assert_eq!(ran.json()["run"]["waits"], json!(["topic-missing"]));

    let topic = "projects/demo/topics/order.events";
    emulator.create_topic(topic).await.unwrap();
    let served = format!(
        "insert into outbox.relay (slot, system_identifier, timeline, confirmed_lsn, instance) \
         select '{name}', system_identifier::text, 1, '0/1', 'test' from pg_control_system(); \
         select pg_drop_replication_slot('{name}')",
        name = database.name
    );
    database.execute(&served).await;
    let ran = database.run_with(&["check"], &env).await;
    assert_contains(
        &ran.stdout,
        "would start and recover automatically (slot-missing).",
    );
    let stops = [&env[..], &[("POSTRIDER_SLOT_ON_LOSS", "stop")]].concat();
    let ran = database.run_with(&["check"], &stops).await;
    let sentence = "`postrider run` would stop until this is corrected: slot-missing.";
    assert_contains(&ran.stdout, sentence);

    let fresh = Database::new().await;
    let init = ["init", "--apply", "--no-slot"];
    fresh.run(&init).await.assert_status(0);
    let ran = fresh.run_with(&["check"], &env).await;
    assert_contains(
        &ran.stdout,
        "`postrider run` would start and create the slot.",
    );
}

#[tokio::test]
async fn the_port_of_the_relay_itself_is_no_problem() {
    let database = Database::initialised().await;
    let builder = Emulator::builder().listen("127.0.0.1:0".parse().unwrap());
    let emulator = builder.start().await.unwrap();
    let host = emulator.addr().to_string();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = free.local_addr().unwrap().to_string();
    drop(free);
    let more = [
        ("PUBSUB_EMULATOR_HOST", host.as_str()),
        ("PUBSUB_PROJECT_ID", "demo"),
        ("POSTRIDER_HTTP_ADDR", addr.as_str()),
    ];
    let env: Vec<_> = database.env().into_iter().chain(more).collect();
    let _relay = command(&["run"], &env).spawn().unwrap();
    let deadline = Instant::now() + PATIENCE;
    let ran = loop {
        let ran = check(&database, &more).await;
        let run = &ran.json()["run"];
        if run["stands_by"] == true && run["needs_other_port"] == true {
            break ran;
        }
        assert!(Instant::now() < deadline, "{ran}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert_eq!(ran.finding("port-in-use")["severity"], "info");
    assert_eq!(ran.json()["run"]["stops"], json!([]));

    // A relay of another slot would not be a standby, so `check` predicts that it stops: the port is in use.
    let other = [&more[..], &[("POSTRIDER_SLOT", "another")]].concat();
    let ran = check(&database, &other).await;
    assert_contains(&ran.json()["run"]["stops"].to_string(), "port-in-use");
}

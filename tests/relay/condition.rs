//! Tests of how an operator learns that the relay cannot deliver: from the HTTP port, the metrics, the
//! relay's log, and the commands, which read only the database.

use std::process::Output;
use std::time::{Duration, Instant};

use pubsub_emulator::{Action, Fault, RunningEmulator};
use serde_json::Value;
use tonic::Code;

use crate::harness::{self, Database, Relay, eventually, insert_orders};
use crate::http::{free_addr, get, metric};

/// Starts a relay with an HTTP port, and waits until it has delivered ten events. Returns the port's
/// address too.
pub(crate) async fn delivering() -> (Database, RunningEmulator, String, Relay) {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let addr = free_addr();
    let host = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &host, &[("POSTRIDER_HTTP_ADDR", &addr)]);
    insert_orders(&database, 10, 5).await;
    database.wait_until_recorded().await;
    (database, emulator, addr, relay)
}

/// Runs a command with the relay's settings. Commands never use the relay's HTTP port.
pub(crate) fn command(database: &Database, arguments: &[&str]) -> Output {
    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("PUBSUB_PROJECT_ID", "demo"),
        ("POSTRIDER_SLOT", database.slot()),
    ];
    let ran = harness::postrider(arguments, &environment).output();
    ran.unwrap()
}

pub(crate) fn json(ran: &Output) -> Value {
    serde_json::from_slice(&ran.stdout).unwrap()
}

fn screen(ran: &Output) -> String {
    String::from_utf8(ran.stdout.clone()).unwrap()
}

pub(crate) async fn status(addr: &str) -> Option<Value> {
    let (_, body) = get(addr, "/status").await?;
    serde_json::from_str(&body).ok()
}

pub(crate) async fn wait_for_state(addr: &str, state: &str) -> Value {
    eventually(&format!("/status says {state}"), || async {
        status(addr).await.filter(|status| status["state"] == state)
    })
    .await
}

/// Waits until `postrider status` shows `state`, and returns its JSON output. The command reads the
/// state from the database, where the relay writes it within seconds.
pub(crate) async fn wait_for_command(database: &Database, state: &str) -> Output {
    eventually(&format!("the command says {state}"), || async {
        let ran = command(database, &["status", "--json"]);
        (json(&ran)["state"] == state).then_some(ran)
    })
    .await
}

/// Checks that the commands say that `order.events` is missing.
async fn the_commands_name_the_topic(database: &Database) {
    let ran = wait_for_command(database, "blocked-on-pubsub").await;
    assert!([Some(1), Some(2)].contains(&ran.status.code()), "{ran:?}");
    let shown = screen(&command(database, &["status"]));
    for part in [
        "BLOCKED ON PUBSUB",
        "order.events",
        "topic-missing",
        "create the topic",
    ] {
        assert!(shown.contains(part), "{part} in\n{shown}");
    }
    let ran = command(database, &["slot", "show", "--json"]);
    assert_eq!(json(&ran)["state"], "blocked-on-pubsub");
    assert_ne!(ran.status.code(), Some(0));
    let shown = screen(&command(database, &["slot", "show"]));
    assert!(
        shown.contains("BLOCKED ON PUBSUB") && !shown.contains("STREAMING"),
        "{shown}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_fails_is_named_on_every_screen_until_it_works_again() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let faults = emulator.faults();
    let missing = faults.inject(Fault::new(Action::Fail(Code::NotFound)).on_topic("order.events"));
    let addr = free_addr();
    let host = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &host, &[("POSTRIDER_HTTP_ADDR", &addr)]);
    insert_orders(&database, 50, 5).await;

    let blocked = wait_for_state(&addr, "blocked-on-pubsub").await;
    let topic = &blocked["topics"][0];
    assert_eq!(
        topic["topic"], "projects/demo/topics/order.events",
        "{blocked}"
    );
    assert_eq!(
        (&topic["code"], &blocked["failing_topics"]),
        (&"topic-missing".into(), &1.into())
    );
    assert!(
        topic["hint"].as_str().unwrap().contains("create the topic"),
        "{topic}"
    );
    assert_eq!(blocked["last_error"], "topic-missing");
    let waiting = eventually("all events of the topic wait", || async {
        let status = status(&addr).await?;
        (status["topics"][0]["waiting_events"] == 50).then_some(status)
    })
    .await;
    assert!(
        waiting["topics"][0]["oldest_seconds"].as_f64().unwrap() > 1.0,
        "{waiting}"
    );
    let gauge = metric(&addr, "postrider_condition blocked-on-pubsub").await;
    assert_eq!(gauge, Some(1.0));
    let waiting = metric(&addr, "postrider_topic_waiting_events order.events").await;
    assert_eq!(waiting, Some(50.0));
    let failed = metric(&addr, "postrider_topic_publish_failures_total order.events").await;
    assert!(failed.unwrap() >= 5.0);

    the_commands_name_the_topic(&database).await;

    faults.lift(missing);
    database.wait_until_recorded().await;
    relay.wait_for_log("works again").await;
    wait_for_state(&addr, "streaming").await;
    let ran = wait_for_command(&database, "streaming").await;
    assert_eq!(ran.status.code(), Some(0), "{ran:?}");
    let log = relay.log();
    let lines = |text: &str| log.lines().filter(|line| line.contains(text)).count();
    assert_eq!(lines("works again"), 1, "{log}");
    assert!(
        lines("code=\"topic-missing\"") <= 4,
        "at most one line per ten seconds:\n{log}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_session_knows_since_when_a_topic_fails() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let missing = Fault::new(Action::Fail(Code::NotFound)).on_topic("order.events");
    emulator.faults().inject(missing);
    let addr = free_addr();
    let host = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &host, &[("POSTRIDER_HTTP_ADDR", &addr)]);
    insert_orders(&database, 5, 5).await;
    wait_for_state(&addr, "blocked-on-pubsub").await;
    let began = Instant::now();
    let failed_since = async |failures: u64| {
        eventually("the topic fails more often", || async {
            let status = status(&addr).await?;
            let now = status["topics"][0]["failures"].as_u64()?;
            (now > failures).then_some(now)
        })
        .await
    };
    let mut failures = failed_since(5).await;
    for _ in 0..2 {
        let end_session = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots \
                           WHERE active AND database = current_database()";
        database.execute(end_session).await;
        failures = failed_since(failures).await;
    }
    let lasted = began.elapsed().as_secs_f64();
    let status = status(&addr).await.unwrap();
    assert!(
        status["topics"][0]["for_seconds"].as_f64().unwrap() >= lasted - 1.5,
        "{status}"
    );
    let log = relay.log();
    let lines = log.matches("code=\"topic-missing\"").count();
    assert!(
        lines as f64 <= lasted / 10.0 + 2.0,
        "{lines} lines in {lasted} s: {log}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_publishes_nothing_at_all_is_not_ready() {
    let (database, emulator, addr, _relay) = delivering().await;
    emulator.faults().refuse_connections(true);
    emulator.faults().reset_connections();
    insert_orders(&database, 500, 50).await;
    let body = crate::http::wait_for(&addr, "/readyz", 503).await;
    assert!(
        body.contains("blocked-on-pubsub") && body.contains("pubsub-unreachable"),
        "{body}"
    );
    assert_eq!(get(&addr, "/livez").await.unwrap().0, 200);
    emulator.faults().refuse_connections(false);
    crate::http::wait_for(&addr, "/readyz", 200).await;
    database.wait_until_recorded().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_without_its_publication_is_broken_and_not_merely_inactive() {
    let (database, _emulator, addr, _relay) = delivering().await;
    let ran = wait_for_command(&database, "streaming").await;
    assert_eq!(ran.status.code(), Some(0));

    database.execute("DROP PUBLICATION postrider").await;
    wait_for_state(&addr, "broken").await;
    let ran = wait_for_command(&database, "broken").await;
    assert_eq!(ran.status.code(), Some(2));
    let shown = screen(&command(&database, &["status"]));
    assert!(
        shown.contains("BROKEN") && shown.contains("CREATE PUBLICATION")
            || shown.contains("create publication"),
        "{shown}"
    );
    let slot = eventually("slot show reports the broken relay", || async {
        let ran = command(&database, &["slot", "show"]);
        let shown = screen(&ran);
        (shown.contains("BROKEN") && ran.status.code() == Some(2)).then_some(shown)
    })
    .await;
    assert!(!slot.contains("start the relay"), "{slot}");

    database
        .execute("CREATE PUBLICATION postrider FOR TABLE outbox.events WITH (publish = 'insert', publish_via_partition_root = true)")
        .await;
    wait_for_state(&addr, "streaming").await;
    wait_for_command(&database, "streaming").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outcomes_that_cannot_be_recorded_block_the_relay_on_the_database() {
    let (database, _emulator, addr, relay) = delivering().await;
    // Create a trigger that refuses all new dispatch rows, and counts how often.
    database
        .execute(
            "CREATE SEQUENCE public.refusals; \
             CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS \
             $$ BEGIN PERFORM nextval('public.refusals'); \
             RAISE EXCEPTION 'refused by a trigger' USING ERRCODE = 'disk_full'; END $$",
        )
        .await;
    let refuse = "CREATE TRIGGER refuse BEFORE INSERT ON outbox.dispatch \
                  FOR EACH ROW EXECUTE FUNCTION public.refuse()";
    let allow = "DROP TRIGGER refuse ON outbox.dispatch";
    database.execute(refuse).await;
    insert_orders(&database, 10, 5).await;
    wait_for_state(&addr, "blocked-on-database").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let log = relay.log();
    let lines = log
        .lines()
        .filter(|line| line.contains("cannot write outbox.dispatch"));
    assert!(
        lines.count() <= 2,
        "at most one line per ten seconds:\n{log}"
    );
    let blocked = json(&wait_for_command(&database, "blocked-on-database").await);
    let what = blocked["condition"]["what"].as_str().unwrap();
    assert!(what.contains("refused by a trigger"), "{blocked}");
    let (_, public) = get(&addr, "/status").await.unwrap();
    assert!(!public.contains("refused by a trigger"), "{public}");
    assert!(
        public.contains("PostgreSQL has no room on its disk"),
        "{public}"
    );
    database.execute(allow).await;
    relay.wait_for_log("outcomes are recorded again").await;
    wait_for_state(&addr, "streaming").await;
    database.wait_until_recorded().await;

    // The relay logs a failure of the writer at most once in ten seconds, so it may not log this second failure. Then
    // it must not log either that outcomes are recorded again.
    let refusals = "SELECT last_value FROM public.refusals";
    let before = database.number(refusals).await;
    database.execute(refuse).await;
    insert_orders(&database, 1, 1).await;
    eventually("a row is refused", || async {
        (database.number(refusals).await > before).then_some(())
    })
    .await;
    database.execute(allow).await;
    database.wait_until_recorded().await;
    relay.terminate();
    relay.wait_for_log("closing the session").await;
    let log = relay.log();
    let lines = |text: &str| log.lines().filter(|line| line.contains(text)).count();
    assert!(
        lines("outcomes are recorded again") <= lines("cannot write outbox.dispatch"),
        "{log}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_was_killed_while_it_was_blocked_is_down_and_not_blocked() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let refused = Fault::new(Action::Fail(Code::PermissionDenied)).on_topic("order.events");
    emulator.faults().inject(refused);
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 10, 5).await;
    wait_for_command(&database, "blocked-on-pubsub").await;
    relay.kill_9();
    let ran = wait_for_command(&database, "down").await;
    assert_eq!(json(&ran)["slot"]["state"], "down", "{ran:?}");
    assert!(screen(&command(&database, &["status"])).contains("start the relay"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_the_relay_fails_to_create_is_named() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let missing = Fault::new(Action::Fail(Code::NotFound)).on_topic("order.events");
    emulator.faults().inject(missing);
    let (addr, host) = (free_addr(), emulator.addr().to_string());
    let settings = [
        ("POSTRIDER_HTTP_ADDR", addr.as_str()),
        ("POSTRIDER_CREATE_TOPICS", "true"),
    ];
    let _relay = Relay::start_with(&database, &host, &settings);
    insert_orders(&database, 10, 5).await;
    let blocked = wait_for_state(&addr, "blocked-on-pubsub").await;
    assert_eq!(blocked["topics"][0]["code"], "topic-missing", "{blocked}");
}

#[tokio::test(flavor = "multi_thread")]
async fn on_an_older_schema_a_relay_stops_before_it_stands_by_and_the_commands_work() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let _relay = Relay::start(&database, &emulator);
    insert_orders(&database, 10, 5).await;
    database.wait_until_recorded().await;
    database
        .execute(
            "ALTER TABLE outbox.relay DROP COLUMN condition, DROP COLUMN condition_at, \
                 DROP COLUMN pruning, DROP COLUMN pruned_at; \
             ALTER TABLE outbox.capture DROP COLUMN since_lsn",
        )
        .await;
    let second = Relay::start(&database, &emulator);
    second.wait_for_error("schema-missing").await;
    for arguments in [&["status"][..], &["slot", "show"]] {
        let ran = command(&database, arguments);
        assert_eq!(ran.status.code(), Some(0), "{ran:?}");
    }
}

/// Only the newest column of `outbox.capture` is missing, as if the latest migration had not been applied. The second
/// relay must notice this before it becomes a standby. Otherwise it would stop only at its takeover.
#[tokio::test(flavor = "multi_thread")]
async fn a_relay_stops_before_it_stands_by_if_only_the_latest_migration_is_missing() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let _relay = Relay::start(&database, &emulator);
    insert_orders(&database, 10, 5).await;
    database.wait_until_recorded().await;
    let newest = database
        .text(
            "SELECT attname::text FROM pg_attribute WHERE attrelid = 'outbox.capture'::regclass \
             AND attnum > 0 ORDER BY attnum DESC LIMIT 1",
        )
        .await;
    database
        .execute(&format!("ALTER TABLE outbox.capture DROP COLUMN {newest}"))
        .await;
    let second = Relay::start(&database, &emulator);
    second.wait_for_error("schema-missing").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_that_stops_the_relay_is_still_known_after_its_end() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let settings = [("POSTRIDER_ON_BAD_EVENT", "halt")];
    let relay = Relay::start_with(&database, &emulator.addr().to_string(), &settings);
    insert_orders(&database, 10, 5).await;
    database.wait_until_recorded().await;
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, event_type, headers) \
             VALUES ('order', 'Bad', jsonb_build_object('x', repeat('y', 2000)))",
        )
        .await;
    relay.wait_for_error("event-invalid").await;
    let ran = wait_for_command(&database, "broken").await;
    assert_eq!(json(&ran)["condition"]["code"], "event-invalid", "{ran:?}");
}

//! Tests of `postrider check`.

use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::Subscription;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::subscriber_client::SubscriberClient;
use pubsub_emulator::{Action, Code, Emulator, Fault, RunningEmulator};
use tonic::transport::Endpoint;

use crate::support::{Database, Ran, assert_contains, postrider};

const TOPIC: &str = "projects/demo/topics/order.events";

pub(crate) async fn emulator() -> (RunningEmulator, String) {
    let builder = Emulator::builder().listen("127.0.0.1:0".parse().unwrap());
    let emulator = builder.start().await.unwrap();
    let host = emulator.addr().to_string();
    (emulator, host)
}

async fn subscribe(host: &str) {
    let endpoint = Endpoint::from_shared(format!("http://{host}")).unwrap();
    let mut client = SubscriberClient::new(endpoint.connect().await.unwrap());
    let subscription = Subscription {
        name: "projects/demo/subscriptions/orders".into(),
        topic: TOPIC.into(),
        ..Subscription::default()
    };
    client.create_subscription(subscription).await.unwrap();
}

pub(crate) async fn check(database: &Database, host: &str, more: &[(&str, &str)]) -> Ran {
    let env = [
        ("PUBSUB_EMULATOR_HOST", host),
        ("PUBSUB_PROJECT_ID", "demo"),
    ];
    database
        .run_with(&["check", "--json"], &[&env[..], more].concat())
        .await
}

#[tokio::test]
async fn a_ready_database_with_its_topics_gives_exit_code_0() {
    let database = Database::initialised().await;
    database.emit(10).await;
    let (emulator, host) = emulator().await;
    emulator.create_topic(TOPIC).await.unwrap();
    subscribe(&host).await;
    let ran = check(&database, &host, &[]).await;
    ran.assert_status(0);
    assert_contains(&ran.finding("topic")["what"].to_string(), TOPIC);
    assert_contains(
        &ran.finding("mapping")["what"].to_string(),
        "10 sampled events",
    );
    assert!(
        ["ok", "info"]
            .iter()
            .any(|worst| ran.json()["worst"] == *worst),
        "{ran}"
    );
}

#[tokio::test]
async fn a_missing_topic_of_sampled_events_is_an_error_unless_topics_are_created() {
    let database = Database::initialised().await;
    database.emit(1).await;
    let (emulator, host) = emulator().await;
    let ran = check(&database, &host, &[]).await;
    ran.assert_status(2);
    assert_eq!(ran.finding("topic-missing")["severity"], "error");
    let ran = check(&database, &host, &[("POSTRIDER_CREATE_TOPICS", "true")]).await;
    ran.assert_status(1);
    emulator.create_topic(TOPIC).await.unwrap();
    let ran = check(&database, &host, &[]).await;
    ran.assert_status(1);
    assert_contains(
        &ran.finding("topic-without-subscription")["what"].to_string(),
        TOPIC,
    );
}

#[tokio::test]
async fn check_finds_that_the_relay_may_not_publish_even_if_it_may_not_look_topics_up() {
    let database = Database::initialised().await;
    database.emit(1).await;
    let (emulator, host) = emulator().await;
    emulator.create_topic(TOPIC).await.unwrap();
    subscribe(&host).await;
    let denied = Fault::new(Action::Fail(Code::PermissionDenied)).on_topic(TOPIC);
    let denied = emulator.faults().inject(denied);
    for hidden in [false, true] {
        emulator.faults().hide_topics(hidden);
        let ran = check(&database, &host, &[]).await;
        ran.assert_status(2);
        let found = ran.finding("pubsub-permission");
        assert_contains(&found["what"].to_string(), TOPIC);
        assert_contains(&found["remedy"].to_string(), "add-iam-policy-binding");
    }
    emulator.faults().lift(denied);
    let ran = check(&database, &host, &[]).await;
    ran.assert_status(0);
    assert_contains(&ran.finding("topic")["what"].to_string(), "may publish");
}

#[tokio::test]
async fn check_tells_a_disabled_api_apart_from_a_missing_right() {
    let database = Database::initialised().await;
    let (emulator, host) = emulator().await;
    emulator.faults().inject(Fault::new(Action::FailWithReason {
        code: Code::PermissionDenied,
        domain: "googleapis.com",
        reason: "SERVICE_DISABLED",
    }));
    let ran = check(&database, &host, &[]).await;
    ran.assert_status(2);
    let found = ran.finding("pubsub-api-disabled");
    let command = "gcloud services enable pubsub.googleapis.com --project=demo";
    assert_contains(&found["remedy"].to_string(), command);
}

#[tokio::test]
async fn check_says_that_no_credentials_were_found_and_where_it_looked() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path().to_str().unwrap();
    let env = [
        ("HOME", home),
        ("GCE_METADATA_HOST", "127.0.0.1:1"),
        ("PUBSUB_PROJECT_ID", "demo"),
        ("POSTRIDER_PUBSUB_ENDPOINT", "https://localhost:1"),
    ];
    let ran = postrider(&["check", "--json"], &env).await;
    ran.assert_status(2);
    let found = ran.finding("credentials-unavailable");
    let what = found["what"].as_str().unwrap();
    assert_contains(
        what,
        ": no access token: error sending request for url (http://127.0.0.1:1/",
    );
    assert_contains(what, "Connection refused");
    for of_the_library in ["attempts", "might succeed", "transient"] {
        assert!(!what.contains(of_the_library), "{what}");
    }
    let remedy = found["remedy"].to_string();
    for tried in [
        "GOOGLE_APPLICATION_CREDENTIALS is not set",
        "application_default_credentials.json does not exist",
        "the metadata server 127.0.0.1:1 gave no token",
    ] {
        assert_contains(&remedy, tried);
    }
    for wrong in ["pubsub-unreachable", "\"credentials\""] {
        assert!(!ran.stdout.contains(wrong), "{ran}");
    }
}

#[tokio::test]
async fn a_fixed_topic_is_checked_even_without_events() {
    let database = Database::initialised().await;
    let (_emulator, host) = emulator().await;
    let ran = check(&database, &host, &[("POSTRIDER_TOPIC", "everything")]).await;
    ran.assert_status(2);
    let what = ran.finding("topic-missing")["what"].to_string();
    assert_contains(&what, "projects/demo/topics/everything");
}

#[tokio::test]
async fn check_finds_events_that_cannot_be_sent() {
    let database = Database::initialised().await;
    database
        .execute("select outbox.emit('no topic name', '1', 'Placed', '{}')")
        .await;
    let (_emulator, host) = emulator().await;
    let ran = check(&database, &host, &[]).await;
    ran.assert_status(1);
    let finding = ran.finding("event-invalid");
    assert_contains(&finding["what"].to_string(), "1 of 1 sampled events");
    assert_contains(&finding["remedy"].to_string(), "topic_rules");
}

#[tokio::test]
async fn check_warns_of_ids_without_a_unique_constraint() {
    let database = Database::initialised().await;
    let (_emulator, host) = emulator().await;
    let ran = check(&database, &host, &[]).await;
    assert!(!ran.stdout.contains("id-not-unique"), "{ran}");
    database
        .execute("alter table outbox.events drop constraint events_pkey")
        .await;
    let finding = check(&database, &host, &[]).await.finding("id-not-unique");
    assert_eq!(finding["severity"], "warning");
    database.execute(finding["remedy"].as_str().unwrap()).await;
    let ran = check(&database, &host, &[]).await;
    assert!(!ran.stdout.contains("id-not-unique"), "{ran}");
}

#[tokio::test]
async fn check_reports_a_capture_table_that_the_relay_could_not_use() {
    let database = Database::initialised().await;
    let (_emulator, host) = emulator().await;
    let role = format!("{}_relay", database.name);
    database
        .execute(&format!(
            "create role {role} login replication in role postrider_relay; \
             revoke update on outbox.capture from postrider_relay"
        ))
        .await;
    let url = database.url_as(&role);
    let ran = check(&database, &host, &[("DATABASE_URL", &url)]).await;
    let finding = ran.finding("privilege-missing");
    assert_eq!(finding["severity"], "error");
    database.execute(finding["remedy"].as_str().unwrap()).await;
    let ran = check(&database, &host, &[("DATABASE_URL", &url)]).await;
    assert_eq!(ran.finding("capture-table")["severity"], "ok");
    database
        .execute("alter table outbox.capture enable row level security")
        .await;
    let ran = check(&database, &host, &[("DATABASE_URL", &url)]).await;
    let what = ran.finding("privilege-missing")["what"].to_string();
    assert_contains(&what, "outbox.capture");
    database.execute("drop table outbox.capture").await;
    let ran = check(&database, &host, &[("DATABASE_URL", &url)]).await;
    assert_eq!(ran.finding("schema-missing")["severity"], "error");
}

#[tokio::test]
async fn errors_in_the_database_come_with_a_remedy() {
    let database = Database::new().await;
    let (_emulator, host) = emulator().await;
    let ran = check(&database, &host, &[]).await;
    ran.assert_status(2);
    assert_contains(
        &ran.finding("publication-missing")["remedy"].to_string(),
        "which creates publication postrider",
    );
    assert_contains(
        &ran.finding("schema-missing")["remedy"].to_string(),
        "init --apply",
    );

    database.run(&["init", "--apply"]).await.assert_status(0);
    database
        .execute("alter table outbox.events rename column aggregateid to key")
        .await;
    let ran = check(&database, &host, &[]).await;
    ran.assert_status(2);
    assert_contains(
        &ran.finding("column-missing")["what"].to_string(),
        "aggregateid",
    );
}

#[tokio::test]
async fn check_finds_tables_of_an_older_version() {
    let database = Database::initialised().await;
    let (_emulator, host) = emulator().await;
    database
        .execute("alter table outbox.relay drop column dispatch")
        .await;
    let ran = check(&database, &host, &[]).await;
    ran.assert_status(2);
    let finding = ran.finding("schema-missing");
    assert_contains(&finding["what"].to_string(), "older version");
    assert_contains(&finding["remedy"].to_string(), "init --apply");
}

#[tokio::test]
async fn check_names_the_rights_that_a_role_lacks() {
    let database = Database::initialised().await;
    let role = format!("{}_poor", database.name);
    database.execute(&format!("create role {role} login")).await;
    let (_emulator, host) = emulator().await;
    let as_role = [("DATABASE_URL", database.url_as(&role))];
    let as_role = as_role.each_ref().map(|(name, url)| (*name, url.as_str()));
    let ran = check(&database, &host, &as_role).await;
    ran.assert_status(2);
    assert_contains(
        &ran.finding("replication-right")["remedy"].to_string(),
        &role,
    );
    assert_contains(
        &ran.finding("privilege-missing")["remedy"].to_string(),
        "grant",
    );
    let sql = format!(
        "grant postrider_relay to {role}; \
         revoke execute on all functions in schema outbox from public, postrider_relay"
    );
    database.execute(&sql).await;
    let ran = check(&database, &host, &as_role).await;
    let functions = "GRANT EXECUTE ON FUNCTION outbox.event_uuid(text, text, xid8), \
                     outbox.utf8_md5(text) TO";
    assert_contains(
        &ran.finding("privilege-missing")["remedy"].to_string(),
        functions,
    );
}

#[tokio::test]
async fn unreachable_servers_are_findings() {
    let env = [
        ("DATABASE_URL", "postgres://u@127.0.0.1:1/d"),
        ("PUBSUB_EMULATOR_HOST", "127.0.0.1:1"),
        ("PUBSUB_PROJECT_ID", "demo"),
    ];
    let ran = postrider(&["check", "--json"], &env).await;
    ran.assert_status(2);
    ran.finding("postgres-unreachable");
    ran.finding("pubsub-unreachable");
    assert_eq!(ran.json()["worst"], "error");
}

#[tokio::test]
async fn check_warns_of_the_global_endpoint_if_events_are_ordered() {
    let ran = postrider(&["check", "--json"], &[]).await;
    assert_eq!(ran.finding("endpoint-global")["severity"], "warning");
    ran.finding("project-missing");
    let ran = postrider(&["check", "--json", "--ordering", "none"], &[]).await;
    assert!(!ran.stdout.contains("endpoint-global"), "{ran}");
}

#[tokio::test]
async fn the_text_shows_problems_and_a_verdict_and_all_checks_on_request() {
    let database = Database::initialised().await;
    let ran = database.run(&["check"]).await;
    ran.assert_status(2);
    assert!(!ran.stdout.contains("wal-level"), "{ran}");
    assert_contains(&ran.stdout, "checks passed (--all lists them)");
    assert_contains(&ran.stdout, "-> set PUBSUB_PROJECT_ID");
    assert_contains(
        &ran.stdout,
        "`postrider run` would stop until this is corrected: project-missing.",
    );
    let ran = database.run(&["check", "--all"]).await;
    ran.assert_status(2);
    assert_contains(&ran.stdout, "  ok       wal-level ");
    assert!(!ran.stdout.contains("--all"), "{ran}");
}

#[tokio::test]
async fn check_offline_checks_only_the_settings() {
    // No server listens at the address of this database, so `check --offline` must succeed without a
    // connection.
    let settings = [
        ("DATABASE_URL", "postgres://a@127.0.0.1:1/d"),
        ("PUBSUB_PROJECT_ID", "p"),
    ];
    let ran = postrider(&["check", "--offline"], &settings).await;
    ran.assert_status(0);
    assert_contains(&ran.stdout, "The settings are in order");
    let ran = postrider(&["check", "--offline", "--json"], &settings[..1]).await;
    ran.assert_status(2);
    assert_eq!(ran.json()["worst"], "error");
    let dead_letters = [("POSTRIDER_DEAD_LETTER_TOPIC", "no good")];
    let with_topic = [&settings[..], &dead_letters].concat();
    let ran = postrider(&["check", "--offline", "--json"], &with_topic).await;
    ran.assert_error("setting-invalid", 2);
    assert_contains(&ran.stderr, "dead_letter_topic");
    let ran = postrider(&["check", "--offline", "--orderin", "none"], &settings).await;
    ran.assert_status(2);
    assert_contains(&ran.stderr, "--ordering");
}

/// Checks that `check` exits with this status and reports this finding, and that `slot show`
/// reports the same state.
async fn assert_both(
    database: &Database,
    host: &str,
    more: &[(&str, &str)],
    code: &str,
    status: i32,
) {
    let checked = check(database, host, more).await;
    checked.assert_status(status);
    let severity = ["ok", "warning", "error"][usize::try_from(status).unwrap()];
    assert_eq!(checked.finding(code)["severity"], severity, "{checked}");
    let shown = database.run(&["slot", "show", "--json"]).await;
    assert_contains(&shown.stdout, code.trim_start_matches("slot-"));
}

#[tokio::test]
async fn check_and_slot_show_agree_on_a_missing_slot_and_on_a_copy() {
    let database = Database::initialised().await;
    let (emulator, host) = emulator().await;
    emulator.create_topic(TOPIC).await.unwrap();
    let name = &database.name;
    let served = format!(
        "insert into outbox.relay (slot, system_identifier, timeline, confirmed_lsn, instance) \
         select '{name}', system_identifier::text, 1, '0/1', 'test' from pg_control_system(); \
         select pg_drop_replication_slot('{name}')"
    );
    database.execute(&served).await;
    let stops = [("POSTRIDER_SLOT_ON_LOSS", "stop")];
    assert_both(&database, &host, &[], "slot-missing", 1).await;
    assert_both(&database, &host, &stops, "slot-missing", 2).await;
    for copied in ["database_oid = 1", "system_identifier = '0'"] {
        let sql = format!("update outbox.relay set {copied}");
        database.execute(&sql).await;
        assert_both(&database, &host, &[], "foreign-cluster", 2).await;
    }
}

//! Tests of `postrider quarantine` without a relay: what the commands read and write.

use crate::support::{Database, assert_contains};

const FIRST: &str = "00000000-0000-4000-8000-000000000001";
const SECOND: &str = "00000000-0000-4000-8000-000000000002";

/// A database with four events in quarantine (two of key o-1, one of key o-2, one without a topic
/// and key) and one published event.
async fn filled() -> Database {
    let database = Database::initialised().await;
    database
        .execute(
            "insert into outbox.dispatch (commit_lsn, committed_at, ordinal, attempts, event_id, \
                 state, topic, ordering_key, source_id, error) values \
             ('0/10', now() - interval '1 hour', 1, 11, '00000000-0000-4000-8000-000000000001', \
              'quarantined', 'projects/p/topics/order.events', 'o-1', null, \
              'event-refused: InvalidArgument: no'), \
             ('0/20', now(), 1, 0, '00000000-0000-4000-8000-000000000002', \
              'quarantined', 'projects/p/topics/order.events', 'o-1', null, 'waits for event 1'), \
             ('0/30', now(), 1, 1, md5('public.legacy:7')::uuid, \
              'quarantined', 'projects/p/topics/legacy', 'o-2', 'public.legacy:7', 'event-refused'), \
             ('0/40', now(), 1, 0, md5('outbox.events@0/40/1')::uuid, \
              'quarantined', null, null, 'outbox.events@0/40/1', 'event-invalid: no id'), \
             ('0/50', now(), 1, 1, '00000000-0000-4000-8000-000000000003', \
              'published', 'projects/p/topics/order.events', 'o-1', null, null)",
        )
        .await;
    database
}

async fn in_state(database: &Database, state: &str) -> i64 {
    let sql = format!("select count(*) from outbox.dispatch where state = '{state}'");
    database.number(&sql).await
}

#[tokio::test]
async fn no_control_character_from_a_row_reaches_the_terminal() {
    let database = Database::initialised().await;
    database
        .execute(
            "insert into outbox.dispatch (commit_lsn, committed_at, ordinal, attempts, event_id, \
                 state, topic, ordering_key, source_id, error) \
             select ('0/' || n)::pg_lsn, now(), 1, 0, md5('public.a:' || id)::uuid, 'quarantined', \
                 'projects/p/topics/a', E'ctl\\nx\\x1b[31mred', 'public.a:' || id, \
                 'event-invalid: ' || repeat('a long reason ', 30) || E'\\x1b]0;title\\x07end' \
             from unnest(array[E'7\\r\\x1b[2J', '8']) with ordinality t (id, n)",
        )
        .await;
    let id = "public.a:8";
    for arguments in [
        &["quarantine", "list"][..],
        &["quarantine", "show", id],
        &["quarantine", "release", id],
        &["quarantine", "show", "public.a:7\r\u{1b}[2J"],
        &["quarantine", "show", "nothing\u{1b}[2J"],
        &["quarantine", "release", "--key", "no such\u{1b}[2J"],
    ] {
        let ran = database.run(arguments).await;
        let said = format!("{}{}", ran.stdout, ran.stderr);
        let is_raw = |c: char| c.is_control() && c != '\n';
        assert!(!said.contains(is_raw), "{arguments:?}: {said:?}");
    }
    let ran = database.run(&["quarantine", "list"]).await;
    assert_contains(&ran.stdout, "ctl\\nx\\u{1b}[31mred  a  2 events");
    // A user cannot type this id, so the list shows the uuid instead.
    let uuid = database
        .text("select md5(E'public.a:7\\r\\x1b[2J')::uuid::text")
        .await;
    assert_contains(&ran.stdout, &uuid);
    let whole = format!("event-invalid: {}", "a long reason ".repeat(30));
    assert_contains(&ran.stdout, &whole);
    assert_contains(&ran.stdout, "\\u{7}end");
}

#[tokio::test]
async fn list_shows_for_each_key_how_many_events_wait_since_when_and_why() {
    let database = filled().await;
    let ran = database.run(&["quarantine", "list"]).await;
    ran.assert_status(0);
    for part in [
        "o-1  order.events  2 events waiting for 1 h",
        "event-refused: InvalidArgument: no",
        "public.legacy:7",
        "(no key)  (no topic)",
        "4 events of 3 keys",
    ] {
        assert_contains(&ran.stdout, part);
    }
    let json = database.run(&["quarantine", "list", "--json"]).await.json();
    assert_eq!(json["total_events"], 4);
    assert_eq!(json["keys"][0]["ordering_key"], "o-1");
    assert_eq!(json["keys"][0]["first_event"], FIRST);
    let one = database
        .run(&["quarantine", "list", "--topic", "legacy", "--json"])
        .await
        .json();
    assert_eq!(one["total_keys"], 1);
    let none = database.run(&["quarantine", "list", "--key", "x"]).await;
    assert_contains(&none.stdout, "Nothing is in quarantine");
}

#[tokio::test]
async fn a_topic_can_be_named_although_the_settings_list_tables() {
    let database = filled().await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "[[tables]]\ntable = 'outbox.events'\n").unwrap();
    let config = file.path().display().to_string();
    let run = async |action: &[&str]| {
        let arguments = ["quarantine"].iter().chain(action).copied();
        let arguments: Vec<&str> = arguments.chain(["--config", &config]).collect();
        let ran = database.run(&arguments).await;
        ran.assert_status(0);
        ran
    };
    let list = run(&["list", "--topic", "order.events", "--json"]).await;
    assert_eq!(list.json()["total_keys"], 1);
    run(&["release", "--key", "o-1", "--topic", "order.events"]).await;
    run(&[
        "discard",
        "--key",
        "o-1",
        "--topic",
        "order.events",
        "--yes",
    ])
    .await;
}

/// Quarantines an event whose id is not a uuid. The database computes the event's uuid as the relay
/// does.
async fn with_numbered(database: &Database, lsn: u32, id: &str, inserted_xid: u32) -> String {
    let id = id.replace('\'', "''");
    let sql = format!(
        "insert into outbox.dispatch (commit_lsn, committed_at, ordinal, attempts, event_id, \
             state, topic, ordering_key, source_id, error) \
         select '0/{lsn}', now(), 1, 0, outbox.event_uuid('public.a', '{id}', '{inserted_xid}'), \
             'quarantined', 'projects/p/topics/a', 'k-{lsn}', 'public.a:{id}', 'event-invalid'"
    );
    database.execute(&sql).await;
    let sql = format!("select event_id::text from outbox.dispatch where commit_lsn = '0/{lsn}'");
    database.text(&sql).await
}

#[tokio::test]
async fn every_command_takes_the_names_that_list_shows() {
    let database = Database::initialised().await;
    let long = "y".repeat(20_000);
    for (lsn, id) in (10..).zip(["7", "8\r\u{1b}[2J", "with 'quotes' and spaces", &long]) {
        let uuid = with_numbered(&database, lsn, id, 900 + lsn).await;
        let key = format!("k-{lsn}");
        let list = ["quarantine", "list", "--key", &key, "--json"];
        let json = database.run(&list).await.json();
        let name = json["keys"][0]["first_event"].as_str().unwrap().to_owned();
        assert!(name.len() <= 137, "{} bytes", name.len());
        assert!(!name.contains(char::is_control), "{name:?}");
        for name in [&name, &uuid] {
            let show = ["quarantine", "show", name, "--json"];
            let json = database.run(&show).await.json();
            assert_eq!(json["uuid"], uuid.as_str());
            assert_eq!(json["event_id"], format!("public.a:{id}"));
        }
        let ran = database.run(&["quarantine", "show", &uuid]).await;
        assert!(ran.stdout.len() < 1_000, "{}", ran.stdout);
        database
            .run(&["quarantine", "release", &name])
            .await
            .assert_status(0);
        database
            .run(&["quarantine", "discard", &name, "--yes"])
            .await
            .assert_status(0);
    }
    assert_eq!(in_state(&database, "discarded").await, 4);
}

#[tokio::test]
async fn an_id_of_two_events_is_refused_as_ambiguous() {
    let database = Database::initialised().await;
    // The table was recreated between the two events, so the id 1 was assigned twice.
    let first = with_numbered(&database, 10, "1", 700).await;
    let second = with_numbered(&database, 20, "1", 900).await;
    assert_ne!(first, second);
    for command in [
        &["quarantine", "show", "public.a:1"][..],
        &["quarantine", "release", "public.a:1"],
        &["quarantine", "discard", "public.a:1", "--yes"],
    ] {
        let ran = database.run(command).await;
        ran.assert_error("setting-invalid", 2);
        assert_contains(&ran.stderr, &first);
        assert_contains(&ran.stderr, &second);
    }
    assert_eq!(in_state(&database, "quarantined").await, 2);
    database
        .run(&["quarantine", "discard", &first, "--yes"])
        .await
        .assert_status(0);
    // The id now identifies only the remaining event, although the discarded event still has a
    // record.
    database
        .run(&["quarantine", "release", "public.a:1"])
        .await
        .assert_status(0);
    let sql = format!("select state from outbox.dispatch where event_id = '{second}'");
    assert_eq!(database.text(&sql).await, "released");
}

#[tokio::test]
async fn show_prints_the_whole_record_of_an_event_for_either_of_its_names() {
    let database = filled().await;
    let ran = database.run(&["quarantine", "show", SECOND]).await;
    ran.assert_status(0);
    assert_contains(
        &ran.stdout,
        "1 event before it in quarantine, 0 events behind it",
    );
    let json = database
        .run(&["quarantine", "show", "public.legacy:7", "--json"])
        .await
        .json();
    assert_eq!(json["ordering_key"], "o-2");
    assert_eq!(json["commit_lsn"], "0/30");
    let published = "00000000-0000-4000-8000-000000000003";
    let ran = database.run(&["quarantine", "show", published]).await;
    assert_contains(&ran.stdout, "published");
    database
        .run(&["quarantine", "show", "nothing"])
        .await
        .assert_error("not-in-quarantine", 2);
}

#[tokio::test]
async fn release_of_an_event_behind_others_releases_its_whole_key_and_says_so() {
    let database = filled().await;
    let ran = database.run(&["quarantine", "release", SECOND]).await;
    ran.assert_status(0);
    assert_contains(&ran.stdout, "Released 2 events");
    assert_contains(&ran.stdout, "whole key o-1");
    assert_eq!(in_state(&database, "released").await, 2);
    let listed = database.run(&["quarantine", "list", "--key", "o-1"]).await;
    assert_contains(&listed.stdout, "being released");
    let ran = database
        .run(&["quarantine", "release", "--all", "--json"])
        .await;
    assert_eq!(ran.json()["released"], 4);
    database
        .run(&["quarantine", "release", "--key", "o-9"])
        .await
        .assert_error("not-in-quarantine", 2);
}

#[tokio::test]
async fn under_quarantine_event_release_takes_only_the_named_event() {
    let database = filled().await;
    let policy = [("POSTRIDER_ON_BAD_EVENT", "quarantine_event")];
    let ran = database
        .run_with(&["quarantine", "release", FIRST, "--json"], &policy)
        .await;
    assert_eq!(
        ran.json(),
        serde_json::json!({"released": 1, "whole_key": false})
    );
    assert_eq!(in_state(&database, "released").await, 1);
}

#[tokio::test]
async fn discard_needs_yes_and_never_touches_published_events() {
    let database = filled().await;
    let ran = database.run(&["quarantine", "discard", "--all"]).await;
    ran.assert_error("confirmation-missing", 2);
    assert_contains(&ran.stderr, "4 events");
    assert_eq!(in_state(&database, "discarded").await, 0);
    let ran = database
        .run(&["quarantine", "discard", FIRST, "--yes"])
        .await;
    ran.assert_status(0);
    assert_contains(&ran.stdout, "3 more events are in quarantine");
    let error = "select count(*) from outbox.dispatch where state = 'discarded' \
        and error like 'event-refused%'";
    assert_eq!(database.number(error).await, 1, "the row says why");
    let ran = database
        .run(&["quarantine", "discard", "--all", "--yes", "--json"])
        .await;
    assert_eq!(ran.json()["discarded"], 3);
    assert_eq!(in_state(&database, "published").await, 1);
    database
        .run(&["quarantine", "discard", FIRST, "--yes"])
        .await
        .assert_error("not-in-quarantine", 2);
}

#[tokio::test]
async fn the_relays_own_role_may_run_all_quarantine_commands() {
    let database = filled().await;
    let role = format!("{}_operator", database.name);
    database
        .execute(&format!(
            "create role {role} login; grant postrider_relay to {role}"
        ))
        .await;
    let url = database.url_as(&role);
    let as_role = [("DATABASE_URL", url.as_str())];
    for args in [
        &["quarantine", "list"][..],
        &["quarantine", "show", FIRST],
        &["quarantine", "release", FIRST],
        &["quarantine", "discard", SECOND, "--yes"],
    ] {
        database.run_with(args, &as_role).await.assert_status(0);
    }
}

#[tokio::test]
async fn events_are_named_by_id_key_or_all_and_one_of_these_is_required() {
    let database = filled().await;
    for args in [
        &["quarantine", "release"][..],
        &["quarantine", "release", FIRST, "--all"],
        &["quarantine", "discard", "--topic", "order.events", "--yes"],
    ] {
        database.run(args).await.assert_status(2);
    }
    assert_eq!(in_state(&database, "quarantined").await, 4);
}

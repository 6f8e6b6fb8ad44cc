//! Tests of `postrider event` without a relay: what the command reads, and its exit codes.

use tokio::io::{AsyncBufReadExt, BufReader};

use crate::support::{Database, PATIENCE, assert_contains, command};

const FIRST: &str = "00000000-0000-4000-8000-000000000001";
const SECOND: &str = "00000000-0000-4000-8000-000000000002";
const THIRD: &str = "00000000-0000-4000-8000-000000000003";

/// A database with three events of key o-1: one is published, one is in quarantine, one has no
/// record.
async fn filled() -> Database {
    let database = Database::initialised().await;
    for id in [FIRST, SECOND, THIRD] {
        database
            .execute(&format!(
                "insert into outbox.events (id, aggregatetype, aggregateid, event_type, payload) \
                 values ('{id}', 'order', 'o-1', 'OrderPlaced', '{{}}')"
            ))
            .await;
    }
    database
        .execute(&format!(
            "insert into outbox.dispatch (commit_lsn, committed_at, dispatched_at, ordinal, attempts, \
                 event_id, state, topic, ordering_key, message_id, error) values \
             ('0/10', now() - interval '1 hour', now() - interval '1 hour' + interval '40 ms', 1, 1, \
              '{FIRST}', 'published', 'projects/p/topics/order.events', 'o-1', '17', null), \
             ('0/20', now(), now(), 1, 11, '{SECOND}', 'quarantined', \
              'projects/p/topics/order.events', 'o-1', null, 'event-refused: InvalidArgument: no')"
        ))
        .await;
    database
}

#[tokio::test]
async fn a_replay_without_a_relay_says_what_it_waits_for_and_event_says_that_it_is_replayed() {
    let database = filled().await;
    database
        .execute(&format!(
            "delete from outbox.dispatch where event_id = '{SECOND}'"
        ))
        .await;
    let env = database.env();
    let mut replay = command(&["replay", FIRST, "--yes"], &env).spawn().unwrap();
    let mut lines = BufReader::new(replay.stderr.take().unwrap()).lines();
    let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
    let line = line.unwrap().unwrap().unwrap();
    assert_contains(&line, "0 of 1 events published again; waiting for a relay");
    replay.kill().await.unwrap();
    let ran = database.run(&["event", FIRST]).await;
    ran.assert_status(0);
    assert_contains(&ran.stdout, "has asked to publish it again");
    assert!(!ran.stdout.contains("quarantine"), "{ran}");
}

#[tokio::test]
async fn an_event_is_shown_from_its_row_to_its_message() {
    let database = filled().await;
    let ran = database.run(&["event", FIRST]).await;
    ran.assert_status(0);
    for part in [
        "published as message 17 at ",
        ", 40 ms after its commit",
        "topic      projects/p/topics/order.events",
        "key        o-1",
        "position   commit 0/10, ordinal 1",
        "row        outbox.events, seq 1, transaction ",
    ] {
        assert_contains(&ran.stdout, part);
    }
    let json = database.run(&["event", FIRST, "--json"]).await.json();
    let event = &json["events"][0];
    assert_eq!(event["state"], "published");
    assert_eq!(event["message_id"], "17");
    assert_eq!(event["record"]["attempts"], 1);
    assert_eq!(event["row"]["table"], "outbox.events");
    // Delete the row, as `prune` does. The record stays.
    database
        .execute(&format!("delete from outbox.events where id = '{FIRST}'"))
        .await;
    let ran = database.run(&["event", FIRST]).await;
    ran.assert_status(0);
    assert_contains(&ran.stdout, "its row is not in the outbox any longer");
}

#[tokio::test]
async fn an_event_in_quarantine_and_one_without_a_record_say_what_to_do() {
    let database = filled().await;
    let ran = database.run(&["event", SECOND]).await;
    ran.assert_status(0);
    assert_contains(&ran.stdout, "in quarantine since ");
    assert_contains(&ran.stdout, "`postrider quarantine release`");
    assert_contains(&ran.stdout, "error      event-refused: InvalidArgument: no");
    let json = database.run(&["event", SECOND, "--json"]).await.json();
    assert_eq!(json["events"][0]["record"]["error_code"], "event-refused");

    let ran = database
        .run_with(&["event", THIRD], &[("PUBSUB_PROJECT_ID", "p")])
        .await;
    ran.assert_status(0);
    assert_contains(&ran.stdout, "state      waiting");
    assert_contains(&ran.stdout, "is sent once more");
    assert_contains(&ran.stdout, "topic      projects/p/topics/order.events");
    assert_contains(&ran.stdout, "key        o-1");
}

#[tokio::test]
async fn without_records_an_event_that_the_slot_has_passed_counts_as_published() {
    let database = filled().await;
    let mode = [("POSTRIDER_DISPATCH", "exceptions")];
    let ran = database.run_with(&["event", THIRD], &mode).await;
    assert_contains(&ran.stdout, "state      waiting-or-published");
    // The command reports that the slot has passed the event only while the slot is at the end of the
    // WAL. Other tests write to the same WAL, so try again until the slot is at the end.
    let passed = async |env: &[(&str, &str)]| loop {
        let advance = "select pg_replication_slot_advance($1::text::name, pg_current_wal_lsn())";
        database
            .client
            .query(advance, &[&database.name])
            .await
            .unwrap();
        let ran = database.run_with(&["event", THIRD], env).await;
        ran.assert_status(0);
        if !ran.stdout.contains("state      waiting") {
            break ran;
        }
    };
    let ran = passed(&mode).await;
    assert_contains(
        &ran.stdout,
        "the slot has passed this one, so it was published",
    );
    // With `dispatch = full` every published event has a record. So without the setting `exceptions`, the
    // command reports the event as missing.
    let missing = passed(&[]).await;
    assert_contains(&missing.stdout, "state      missing");
    assert_contains(&missing.stdout, "publishes them within minutes");
    // No audit looks at rows below the floor.
    let floor = "update outbox.capture set floor = pg_current_xact_id(), partitions = \
                 (select string_agg(oid::text, ',') from pg_class where relname like 'events%')";
    database.execute(floor).await;
    let below = passed(&[]).await;
    assert_contains(&below.stdout, "state      missing");
    assert_contains(&below.stdout, "insert it again as a new event");
}

#[tokio::test]
async fn an_event_from_before_capturing_is_never_published() {
    let database = Database::new().await;
    for file in ["0001_events", "0002_dispatch", "0003_publication"] {
        let path = format!("{}/migrations/{file}.sql", env!("CARGO_MANIFEST_DIR"));
        let sql = std::fs::read_to_string(path).unwrap();
        database.execute(&format!("begin; {sql}; commit")).await;
    }
    database.emit(1).await;
    database.run(&["init", "--apply"]).await.assert_status(0);
    let id = database.text("select id::text from outbox.events").await;
    let ran = database.run(&["event", &id]).await;
    ran.assert_status(0);
    assert_contains(&ran.stdout, "state      not-captured");
}

/// A database with the table `public.legacy`, whose ids are numbers. Two of its three events are
/// recorded.
async fn numbered() -> Database {
    let database = Database::new().await;
    database
        .execute(
            "create table public.legacy (id bigserial primary key, aggregatetype text not null, \
                 aggregateid text, event_type text not null, payload jsonb)",
        )
        .await;
    let ran = database.run_with(&["init", "--apply"], &LEGACY).await;
    ran.assert_status(0);
    database
        .execute(
            "insert into public.legacy (aggregatetype, aggregateid, event_type, payload) \
                 select 'order', 'o-' || i, 'OrderPlaced', '{}' from generate_series(1, 3) i; \
             insert into outbox.dispatch (commit_lsn, committed_at, ordinal, attempts, event_id, \
                 state, topic, ordering_key, source_id, message_id) \
             select '0/10', now(), id, 1, \
                 outbox.event_uuid('public.legacy', id::text, inserted_xid), 'published', \
                 'projects/p/topics/order.events', aggregateid, 'public.legacy:' || id, 'm-' || id \
             from public.legacy where id < 3",
        )
        .await;
    database
}

const LEGACY: [(&str, &str); 1] = [("POSTRIDER_TABLE", "public.legacy")];

#[tokio::test]
async fn a_numbered_id_is_found_with_and_without_its_table_and_by_its_uuid() {
    let database = numbered().await;
    let uuid = "select event_id::text from outbox.dispatch where ordinal = 2";
    let uuid = database.text(uuid).await;
    for id in ["2", "public.legacy:2", &uuid] {
        let json = database.run_with(&["event", id, "--json"], &LEGACY).await;
        json.assert_status(0);
        let json = json.json();
        assert_eq!(json["events"].as_array().unwrap().len(), 1, "{id}: {json}");
        assert_eq!(json["events"][0]["message_id"], "m-2", "{id}");
        assert_eq!(json["events"][0]["row"]["table"], "public.legacy", "{id}");
    }
    // The row no longer exists, so the command searches outbox.dispatch for its source id.
    database
        .execute("delete from public.legacy where id = 1")
        .await;
    let json = database.run_with(&["event", "1", "--json"], &LEGACY).await;
    let json = json.json();
    assert_eq!(json["events"][0]["message_id"], "m-1");
    assert!(json["events"][0]["row"].is_null());
    let waiting = database.run_with(&["event", "3"], &LEGACY).await;
    assert_contains(&waiting.stdout, "event      public.legacy:3");
    assert_contains(&waiting.stdout, "state      waiting");
}

#[tokio::test]
async fn an_unknown_id_exits_with_1_and_prints_no_control_characters() {
    let database = numbered().await;
    for id in [
        "99",
        "no\x1b[2Jthing",
        "00000000-0000-4000-8000-00000000dead",
    ] {
        let ran = database.run_with(&["event", id], &LEGACY).await;
        ran.assert_status(1);
        assert_contains(&ran.stdout, "No event ");
        assert_contains(&ran.stdout, "`postrider event --key KEY` lists");
        assert!(!ran.stdout.contains('\x1b'), "{ran}");
    }
    let ran = database
        .run_with(&["event", "--key", "nobody"], &LEGACY)
        .await;
    ran.assert_status(1);
    assert_contains(&ran.stdout, "No event matches");
}

#[tokio::test]
async fn the_newest_events_of_a_key_are_listed_and_those_that_wait_come_first() {
    let database = filled().await;
    let ran = database.run(&["event", "--key", "o-1"]).await;
    ran.assert_status(0);
    let lines: Vec<&str> = ran.stdout.lines().collect();
    for (line, id) in lines[1..4].iter().zip([THIRD, SECOND, FIRST]) {
        assert!(line.ends_with(id), "{ran}");
    }
    let json = database
        .run(&["event", "--key", "o-1", "--limit", "2", "--json"])
        .await
        .json();
    let states = json["events"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| &e["state"]);
    assert_eq!(states.collect::<Vec<_>>(), ["waiting", "quarantined"]);

    let since = database
        .run(&[
            "event",
            "--since",
            "10min",
            "--topic",
            "order.events",
            "--json",
        ])
        .await
        .json();
    let ids = since["events"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| &e["event_id"]);
    assert_eq!(ids.collect::<Vec<_>>(), [THIRD, SECOND]);
    let none = database
        .run(&["event", "--since", "1s", "--topic", "x"])
        .await;
    none.assert_status(1);
    let wrong = database.run(&["event", "--since", "2026-13-45"]).await;
    wrong.assert_error("setting-invalid", 2);
}

#[tokio::test]
async fn event_finds_a_uuid_with_its_table_in_front_or_blanks_around_it() {
    let database = Database::initialised().await;
    database.emit(1).await;
    let id = database.text("select id::text from outbox.events").await;
    for wanted in [format!("outbox.events:{id}"), format!(" {id}\n")] {
        let ran = database.run(&["event", &wanted]).await;
        ran.assert_status(0);
        assert_contains(&ran.stdout, &id);
    }
}

#[tokio::test]
async fn without_a_choice_of_events_the_arguments_are_refused() {
    let database = Database::initialised().await;
    for command in [
        &["event"][..],
        &["replay", "--yes"],
        &["quarantine", "release"],
    ] {
        let ran = database.run(command).await;
        ran.assert_status(2);
        assert_contains(&ran.stderr, "choose the events: give the ID of one event");
    }
}

#[tokio::test]
async fn event_and_quarantine_commands_find_a_uuid_with_its_table_or_blanks() {
    let database = filled().await;
    for command in [&["event"][..], &["quarantine", "show"]] {
        for id in [
            format!("outbox.events:{SECOND}"),
            format!(" {SECOND}\n"),
            SECOND.to_owned(),
        ] {
            let ran = database.run(&[command, &[id.as_str()]].concat()).await;
            ran.assert_status(0);
            assert_contains(&ran.stdout, SECOND);
        }
    }
    let release = format!("outbox.events:{SECOND}");
    let ran = database.run(&["quarantine", "release", &release]).await;
    ran.assert_status(0);
}

#[tokio::test]
async fn a_text_that_the_encoding_of_the_database_lacks_is_refused_with_a_hint() {
    let database = Database::new().await;
    let name = database
        .text("select current_database() || '_win1252'")
        .await;
    let create = format!("create database {name} encoding 'WIN1252' template template0");
    database.execute(&create).await;
    let (server, _) = database.url.rsplit_once('/').unwrap();
    let url = format!("{server}/{name}");
    let url = [("DATABASE_URL", url.as_str())];
    let init = database
        .run_with(&["init", "--apply", "--no-slot"], &url)
        .await;
    init.assert_status(0);
    for command in [
        &["event"][..],
        &["quarantine", "list"],
        &["replay", "--dry-run"],
    ] {
        let ran = database
            .run_with(&[command, &["--key", "日本"]].concat(), &url)
            .await;
        ran.assert_error("postgres-statement", 3);
        assert_contains(
            &ran.stderr,
            "if it is in an argument of the command, no row contains it",
        );
    }
}

/// `--key ""` means the events without a key, as in the `quarantine` commands.
#[tokio::test]
async fn an_empty_key_lists_the_events_without_a_key() {
    let database = filled().await;
    let fill = format!(
        "update outbox.dispatch set ordering_key = null where event_id = '{FIRST}'; \
         update outbox.dispatch set ordering_key = '' where event_id = '{SECOND}'; \
         insert into outbox.events (id, aggregatetype, aggregateid, event_type) \
             values ('00000000-0000-4000-8000-000000000004', 'order', repeat('k', 2000), 'E')"
    );
    database.execute(&fill).await;
    let ran = database.run(&["event", "--key", "", "--json"]).await;
    ran.assert_status(0);
    let events = ran.json()["events"].as_array().unwrap().clone();
    let mut ids: Vec<&str> = events
        .iter()
        .map(|e| e["event_id"].as_str().unwrap())
        .collect();
    ids.sort_unstable();
    let unsendable = "00000000-0000-4000-8000-000000000004";
    assert_eq!(ids, [FIRST, SECOND, unsendable], "{ran}");
}

//! Tests of `postrider slot`.

use scratch_postgres::ScratchPostgres;
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::support::{Database, PATIENCE, assert_contains, command, connect, execute, postrider};

/// The JSON fields of `slot show` on which scripts may rely, so they must not disappear.
const CONTRACT: [&str; 10] = [
    "slot_name",
    "active",
    "active_pid",
    "wal_status",
    "confirmed_flush_lsn",
    "restart_lsn",
    "lag_bytes",
    "retained_bytes",
    "safe_wal_size",
    "state",
];

#[tokio::test]
async fn show_as_json_has_every_field_of_the_contract() {
    let database = Database::initialised().await;
    let ran = database.run(&["slot", "show", "--json"]).await;
    ran.assert_status(1); // nobody reads from the slot yet
    let json = ran.json();
    for field in CONTRACT {
        assert!(json.get(field).is_some(), "{field}: {ran}");
    }
    assert_eq!(json["slot_name"], database.name.as_str());
    assert_eq!(json["active"], false);
    assert_eq!(json["wal_status"], "reserved");
    assert_eq!(json["state"], "down");
    assert!(
        json["lag_bytes"].is_u64() && json["retained_bytes"].is_u64(),
        "{ran}"
    );
    assert_contains(json["confirmed_flush_lsn"].as_str().unwrap(), "/");
}

#[tokio::test]
async fn waiting_events_are_counted_and_old_ones_raise_an_alarm() {
    let server = ScratchPostgres::builder().start().unwrap();
    let database = Database::on(&server).await;
    database
        .run(&["init", "--apply", "--no-slot"])
        .await
        .assert_status(0);
    // These events are committed before the slot exists. They are never streamed, so they do not
    // count as pending.
    database.emit(5).await;
    database.run(&["slot", "create"]).await.assert_status(0);
    let idle = database.run(&["slot", "show", "--json"]).await.json();
    assert_eq!(
        (&idle["pending_events"], &idle["lag_seconds"]),
        (&0.into(), &0.0.into())
    );

    database.emit(2).await;
    let old = "insert into outbox.events (aggregatetype, event_type, occurred_at) \
               values ('order', 'Placed', now() - interval '1 hour')";
    database.execute(old).await;
    let ran = database.run(&["slot", "show", "--json"]).await;
    let json = ran.json();
    assert_eq!(json["pending_events"], 3);
    assert!(
        (3_600.0..3_700.0).contains(&json["lag_seconds"].as_f64().unwrap()),
        "{ran}"
    );
    // The status is critical, because no relay reads from the slot and an event has waited for longer
    // than five minutes.
    ran.assert_status(2);
    database.run(&["status"]).await.assert_status(2);
    let patient = ["slot", "show", "--critical-seconds", "7200"];
    database.run(&patient).await.assert_status(1);
    database
        .run(&[&patient[..], &["--critical-bytes", "1B"]].concat())
        .await
        .assert_status(2);
    let shown = database.run(&["slot"]).await;
    assert_contains(&shown.stdout, "3 events not recorded yet, the oldest 1 h");

    database
        .execute(
            "insert into outbox.dispatch (commit_lsn, committed_at, ordinal, attempts, event_id, state) \
             select pg_current_wal_lsn(), now(), row_number() over (), 1, id, 'published' \
             from outbox.events",
        )
        .await;
    let recorded = database.run(&["slot", "show", "--json"]).await.json();
    assert_eq!(recorded["pending_events"], 0);
}

#[tokio::test]
async fn show_prints_health_remedy_lag_reader_and_what_holds_wal_back() {
    let database = Database::initialised().await;
    let ran = database.run(&["slot", "show"]).await;
    ran.assert_status(1);
    for part in [
        "DOWN",
        "postrider run",
        "lag ",
        "WAL kept",
        "reader",
        "held by",
    ] {
        assert_contains(&ran.stdout, part);
    }
}

#[tokio::test]
async fn watch_prints_the_slot_repeatedly_with_rates() {
    let database = Database::initialised().await;
    let watch = ["slot", "show", "--watch", "1", "--json"];
    let mut watching = command(&watch, &database.env()).spawn().unwrap();
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    for look in 0..2 {
        let line = tokio::time::timeout(PATIENCE, lines.next_line())
            .await
            .unwrap();
        let json: serde_json::Value = serde_json::from_str(&line.unwrap().unwrap()).unwrap();
        assert_eq!(json["slot_name"], database.name.as_str());
        assert_eq!(
            json["written_bytes_per_second"].is_u64(),
            look == 1,
            "{json}"
        );
    }
}

#[tokio::test]
async fn slot_show_judges_the_publication_that_the_flag_names() {
    let database = Database::initialised().await;
    for command in [&["slot"][..], &["slot", "show"]] {
        let named = [command, &["--publication", "nosuch", "--json"]].concat();
        let json = database.run(&named).await.json();
        assert_eq!(json["state"], "broken", "{json}");
        assert_contains(&json["meaning"].to_string(), "nosuch");
    }
}

#[tokio::test]
async fn slot_show_reports_a_missing_slot_in_json_and_exits_with_3() {
    let database = Database::new().await;
    let ran = database.run(&["slot", "show", "--json"]).await;
    ran.assert_status(3);
    let json = ran.json();
    assert_eq!(json["slot_name"], database.name.as_str());
    assert_eq!(
        (&json["state"], &json["severity"]),
        (&"missing".into(), &"error".into())
    );
    assert_contains(&json["remedy"].to_string(), "init --apply");
    let shown = database.run(&["slot"]).await;
    shown.assert_status(3);
    assert_contains(&shown.stdout, "MISSING");
}

#[tokio::test]
async fn slot_show_reports_an_unreachable_server_as_unknown_and_as_an_error() {
    let env = [("DATABASE_URL", "postgres://u@127.0.0.1:1/d")];
    let ran = postrider(&["slot", "show", "--json"], &env).await;
    ran.assert_error("postgres-unreachable", 3);
    assert_eq!(ran.json()["state"], "unknown");
    assert_eq!(ran.json()["error"]["code"], "postgres-unreachable");
}

#[tokio::test]
async fn list_shows_every_slot_of_the_cluster() {
    let database = Database::initialised().await;
    let physical = format!("{}_physical", database.name);
    database
        .execute(&format!(
            "select pg_create_physical_replication_slot('{physical}')"
        ))
        .await;
    let ran = database.run(&["slot", "list"]).await;
    ran.assert_status(0);
    assert_contains(&ran.stdout, &physical);
    let json = database.run(&["slot", "list", "--json"]).await.json();
    let names: Vec<_> = json["slots"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| &s["slot_name"])
        .collect();
    assert!(names.contains(&&database.name.clone().into()), "{names:?}");
}

#[tokio::test]
async fn drop_and_advance_say_what_is_lost_and_need_yes() {
    let database = Database::initialised().await;
    let position = format!(
        "select (confirmed_flush_lsn - '0/0')::bigint from pg_replication_slots \
         where slot_name = '{}'",
        database.name
    );
    database.emit(4).await;
    let before = database.number(&position).await;
    for change in ["drop", "advance"] {
        let ran = database.run(&["slot", change]).await;
        ran.assert_error("confirmation-missing", 2);
        assert_contains(&ran.stderr, "4 events not recorded");
        assert_contains(&ran.stderr, "--yes");
    }
    assert_eq!(database.number(&position).await, before);

    let ran = database.run(&["slot", "advance", "--yes"]).await;
    ran.assert_status(0);
    assert_contains(&ran.stdout, "4 events not recorded");
    assert!(database.number(&position).await > before);
    let ran = database
        .run(&["slot", "advance", "--to", "0/1", "--yes"])
        .await;
    ran.assert_error("setting-invalid", 2);

    let ran = database.run(&["slot", "drop", "--yes", "--json"]).await;
    ran.assert_status(0);
    assert_eq!(ran.json()["slot_name"], database.name.as_str());
    database.run(&["slot", "show"]).await.assert_status(3);
    database
        .run(&["slot", "drop", "--yes"])
        .await
        .assert_error("slot-missing", 3);
}

#[tokio::test]
async fn a_slot_is_created_only_after_its_publication() {
    let database = Database::new().await;
    let ran = database.run(&["slot", "create"]).await;
    ran.assert_error("publication-missing", 3);
    assert_contains(&ran.stderr, "postrider init --apply");
    database
        .run(&["init", "--apply", "--no-slot"])
        .await
        .assert_status(0);
    let ran = database.run(&["slot", "create", "--json"]).await;
    ran.assert_status(0);
    assert_eq!(ran.json()["slot_name"], database.name.as_str());
    database
        .run(&["slot", "create"])
        .await
        .assert_error("slot-exists", 3);
}

#[tokio::test]
async fn a_slot_that_cannot_be_created_names_the_blocking_transaction() {
    let database = Database::new().await;
    database
        .run(&["init", "--apply", "--no-slot"])
        .await
        .assert_status(0);
    let other = connect(&database.url).await;
    execute(&other, "begin; select pg_current_xact_id()").await;
    let ran = database
        .run(&["slot", "create", "--wait-seconds", "1"])
        .await;
    ran.assert_error("slot-busy", 3);
    assert_contains(&ran.stderr, "server process");
}

#[tokio::test]
async fn a_slot_older_than_the_publication_is_reported_until_it_has_passed_the_publication() {
    const CODE: &str = "slot-before-publication";
    let server = ScratchPostgres::builder().start().unwrap();
    let database = Database::on(&server).await;
    let create = format!(
        "select pg_create_logical_replication_slot('{}', 'pgoutput')",
        database.name
    );
    database.execute(&create).await;
    let init = database.run(&["init", "--apply"]).await;
    assert_contains(&init.stdout, CODE);
    let again = database.run(&["init", "--apply"]).await;
    assert_contains(&again.stdout, CODE);
    // Add a table whose capturing began earlier. The finding must name only `outbox.events`, whose
    // capturing began later.
    let captured_before = "insert into outbox.capture (identity, schema_name, table_name, table_oid, slot, \
             floor, has_inserted_xid, instance, since_lsn) \
         select 'public.older', 'public', 'older', 1, slot, floor, true, instance, '0/1' from outbox.capture";
    database.execute(captured_before).await;
    let check = database.run(&["check", "--json"]).await;
    let finding = check.finding(CODE);
    assert_eq!(finding["severity"], "warning");
    let what = finding["what"].to_string();
    assert_contains(&what, "does not deliver rows of outbox.events that");
    assert!(!what.contains("public.older"), "{what}");
    // The finding names at most five tables, and groups them by the position at which their capturing began.
    let later = "insert into outbox.capture (identity, schema_name, table_name, table_oid, slot, floor, \
                     has_inserted_xid, instance, since_lsn) \
                 select 'public.t' || n, 'public', 't' || n, n, slot, floor, true, instance, \
                     ('7FFFFFFF/' || n / 2 || '0')::pg_lsn \
                 from outbox.capture, generate_series(2, 6) n where identity = 'outbox.events'";
    database.execute(later).await;
    let since = "select since_lsn::text from outbox.capture where identity = 'outbox.events'";
    let since = database.text(since).await;
    let check = database.run(&["check", "--json"]).await;
    let what = check.finding(CODE)["what"].to_string();
    let expected = format!(
        "the publication and capturing of outbox.events began at {since}, of public.t2, public.t3 at 7FFFFFFF/10, of \
         public.t4, public.t5 at 7FFFFFFF/20 and of 1 more table by 7FFFFFFF/30: the relay does not deliver rows of \
         these tables that"
    );
    assert_contains(&what, &expected);
    database
        .execute("delete from outbox.capture where since_lsn > '7FFFFFFF/0'")
        .await;
    for command in ["status", "slot show"] {
        let arguments: Vec<&str> = command.split(' ').collect();
        let shown = database.run(&arguments).await;
        assert_contains(&shown.stdout, CODE);
        let json = database.run(&[&arguments[..], &["--json"]].concat()).await;
        assert_contains(&json.stdout, CODE);
    }
    let pass = format!(
        "select pg_replication_slot_advance('{}', (select max(since_lsn) from outbox.capture))",
        database.name
    );
    database.execute(&pass).await;
    for command in ["check --json", "status --json", "slot show"] {
        let arguments: Vec<&str> = command.split(' ').collect();
        let shown = database.run(&arguments).await;
        assert!(!shown.stdout.contains(CODE), "{shown}");
    }
}

#[tokio::test]
async fn without_the_right_to_see_other_sessions_the_remedy_of_a_transaction_says_so() {
    let database = Database::initialised().await;
    let role = format!("blind_{}", database.name);
    let create = format!("create role {role} login replication; grant postrider_relay to {role}");
    database.execute(&create).await;
    let other = connect(&database.url).await;
    execute(&other, "begin; select pg_current_xact_id()").await;
    let pid = "select pg_backend_pid()";
    let pid: i32 = other.query_one(pid, &[]).await.unwrap().get(0);

    let url = database.url_as(&role);
    let environment = [
        ("DATABASE_URL", url.as_str()),
        ("POSTRIDER_SLOT", &database.name),
    ];
    let shown = postrider(&["slot", "show"], &environment).await.stdout;
    for part in [
        format!("transaction of server process {pid}"),
        format!("end it as a superuser: `select pg_terminate_backend({pid})`"),
        "`grant pg_read_all_stats to` our role".to_owned(),
    ] {
        assert_contains(&shown, &part);
    }
    assert!(!shown.contains("pg_cancel_backend"), "{shown}");
    // With this right, the command sees that the transaction is young, and does not mention it.
    database
        .execute(&format!("grant pg_read_all_stats to {role}"))
        .await;
    let shown = postrider(&["slot", "show"], &environment).await.stdout;
    assert!(!shown.contains(&pid.to_string()), "{shown}");
}

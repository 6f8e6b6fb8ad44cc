//! Commands with the setting `shard`.

use crate::support::{Database, Ran, assert_contains};

/// `None`, loudly, on PostgreSQL 14.
async fn database() -> Option<Database> {
    let database = Database::new().await;
    let version = "select current_setting('server_version_num')::bigint";
    if database.number(version).await < 150_000 {
        let ran = database.run_with(&["init", "--apply"], &[("POSTRIDER_SHARD", "0/2")]);
        ran.await.assert_error("postgres-version", 3);
        eprintln!("SKIPPED shards: publications have no row filters before PostgreSQL 15");
        return None;
    }
    Some(database)
}

async fn run(database: &Database, args: &[&str], shard: &str) -> Ran {
    database.run_with(args, &[("POSTRIDER_SHARD", shard)]).await
}

async fn init(database: &Database, shard: &str) {
    let ran = run(database, &["init", "--apply"], shard).await;
    ran.assert_status(0);
    let (index, of) = shard.split_once('/').unwrap();
    assert_contains(
        &ran.stdout,
        &format!("slot {}_{index}of{of} created at ", database.name),
    );
}

/// As if the relay of this slot had served.
async fn served(database: &Database, slot: &str) {
    database
        .execute(&format!(
            "insert into outbox.relay (slot, system_identifier, timeline, confirmed_lsn, instance) \
             select '{slot}', (system_identifier::numeric + case when system_identifier < 0 \
                 then 18446744073709551616 else 0 end)::text, 1, '0/1', 'x' \
             from pg_control_system()"
        ))
        .await;
}

fn codes(ran: &Ran) -> Vec<String> {
    let json = ran.json();
    let findings = json["findings"].as_array().unwrap().iter();
    findings
        .map(|finding| finding["code"].as_str().unwrap().to_owned())
        .collect()
}

#[tokio::test]
async fn init_makes_a_publication_with_its_share_of_the_rows_and_a_second_one_changes_nothing() {
    let Some(database) = database().await else {
        return;
    };
    init(&database, "0/2").await;
    init(&database, "1/2").await;
    let filter = |shard| {
        format!(
            "select count(*) from pg_publication_tables where pubname = 'postrider_{shard}of2' \
             and rowfilter = '(mod(int4and(COALESCE(hashtext(aggregateid), 0), 2147483647), 2) = {shard})'"
        )
    };
    for shard in 0..2 {
        assert_eq!(database.number(&filter(shard)).await, 1);
    }
    let again = run(&database, &["init", "--apply"], "1/2").await;
    again.assert_status(0);
    assert!(!again.stdout.contains("applied"), "{again}");
    let printed = run(&database, &["init", "--no-slot"], "1/2").await;
    printed.assert_status(0);
    database.execute(&printed.stdout).await;
    assert_eq!(database.number(&filter(1)).await, 1);
}

#[tokio::test]
async fn the_printed_script_shares_out_tables_of_every_kind_of_key() {
    let Some(database) = database().await else {
        return;
    };
    database
        .execute(
            "create table \"A%b\" (id uuid primary key, aggregatetype text, \"Key\" varchar(30), \
                 event_type text, payload json); \
             create table numbers (id bigint primary key, aggregatetype text, aggregateid int2, \
                 event_type text, payload json)",
        )
        .await;
    let file = tempfile::NamedTempFile::new().unwrap();
    let tables = "[[tables]]\ntable = 'public.\"A%b\"'\ncolumns = { aggregateid = 'Key' }\n\
                  [[tables]]\ntable = 'public.numbers'\n";
    std::fs::write(file.path(), tables).unwrap();
    let env = [
        ("POSTRIDER_SHARD", "2/3"),
        ("POSTRIDER_CONFIG", file.path().to_str().unwrap()),
    ];
    let printed = database.run_with(&["init", "--no-slot"], &env).await;
    database.execute(&printed.stdout).await;
    let applied = database.run_with(&["init", "--apply"], &env).await;
    applied.assert_status(0);
    assert_contains(&applied.stdout, "carries every captured table");
}

#[tokio::test]
async fn a_key_that_cannot_be_hashed_is_refused_before_anything_is_made_of_it() {
    let Some(database) = database().await else {
        return;
    };
    database
        .execute(
            "create table dated (id uuid primary key, aggregatetype text, aggregateid date, \
                 event_type text, payload json)",
        )
        .await;
    let env = [
        ("POSTRIDER_SHARD", "0/2"),
        ("POSTRIDER_TABLE", "public.dated"),
    ];
    let ran = database.run_with(&["init", "--apply"], &env).await;
    ran.assert_error("setting-invalid", 2);
    assert_contains(&ran.stderr, "bigint, uuid");
    let printed = database.run_with(&["init", "--no-slot"], &env).await;
    let refused = database.client.batch_execute(&printed.stdout).await;
    assert!(refused.is_err(), "{printed}");
    let ran = database.run_with(&["check", "--json"], &env).await;
    ran.assert_status(2);
}

#[tokio::test]
async fn check_and_list_name_shards_that_are_missing_and_leftovers_of_another_number() {
    let Some(database) = database().await else {
        return;
    };
    database.run(&["init", "--apply"]).await.assert_status(0);
    init(&database, "0/3").await;
    init(&database, "1/3").await;
    let check = run(&database, &["check", "--json"], "0/3").await;
    let leftover = check.finding("slot-of-other-shards");
    assert_contains(
        leftover["remedy"].as_str().unwrap(),
        "postrider slot drop --shard '' --yes",
    );
    let missing = check.finding("shard-missing")["what"].to_string();
    assert_contains(&missing, &format!("{}_2of3", database.name));
    let inactive = check.finding("shard-inactive")["what"].to_string();
    assert_contains(&inactive, &format!("{}_1of3", database.name));
    let listed = run(&database, &["slot", "list", "--json"], "0/3").await;
    let mut found = codes(&listed);
    found.sort_unstable();
    assert_eq!(
        found,
        ["shard-inactive", "shard-missing", "slot-of-other-shards"]
    );
    let text = run(&database, &["slot", "list"], "0/3").await;
    assert_contains(&text.stdout, "slot drop --shard '' --yes");
    // From the relay without shards those of the three are the leftovers.
    let single = database.run(&["slot", "list", "--json"]).await;
    assert_eq!(codes(&single), ["slot-of-other-shards"; 2]);
    // What the remedy says works.
    for shard in ["0/3", "1/3"] {
        let drop = ["slot", "drop", "--shard", shard, "--yes"];
        database.run(&drop).await.assert_status(0);
    }
    let single = database.run(&["slot", "list", "--json"]).await;
    assert!(codes(&single).is_empty(), "{single}");
}

#[tokio::test]
async fn init_leaves_the_slot_to_the_relay_where_another_number_of_shards_has_served() {
    let Some(database) = database().await else {
        return;
    };
    database.run(&["init", "--apply"]).await.assert_status(0);
    served(&database, &database.name).await;
    let ran = run(&database, &["init", "--apply"], "0/2").await;
    ran.assert_status(0);
    assert_contains(
        &ran.stdout,
        &format!("takes over from slot {}", database.name),
    );
    let slots = "select count(*) from pg_replication_slots where slot_name like '%\\_0of2' \
                 and database = current_database()";
    assert_eq!(database.number(slots).await, 0);
    let dry = database
        .run_with(
            &["recover", "--dry-run", "--json"],
            &[("POSTRIDER_SHARD", "0/2"), ("PUBSUB_PROJECT_ID", "demo")],
        )
        .await;
    dry.assert_status(0);
    assert_eq!(dry.json()["why"], "shards-changed");
}

#[tokio::test]
async fn a_dry_run_and_the_events_that_wait_are_of_the_share_alone() {
    let Some(database) = database().await else {
        return;
    };
    init(&database, "0/2").await;
    init(&database, "1/2").await;
    database.emit(70).await;
    let mut rows = 0;
    for shard in ["0/2", "1/2"] {
        let env = [("POSTRIDER_SHARD", shard), ("PUBSUB_PROJECT_ID", "demo")];
        let dry = database
            .run_with(&["recover", "--dry-run", "--json"], &env)
            .await;
        let found = dry.json()["tables"][0]["rows"].as_u64().unwrap();
        assert!((1..70).contains(&found), "{dry}");
        let shown = run(&database, &["slot", "show", "--json"], shard).await;
        assert_eq!(shown.json()["pending_events"], found, "{shown}");
        rows += found;
    }
    assert_eq!(rows, 70);
}

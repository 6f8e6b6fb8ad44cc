//! Tests of the columns and the index that `init` adds to the captured tables.

use super::*;

#[tokio::test]
async fn an_inserted_xid_that_may_be_null_or_chosen_is_not_used_and_the_remedy_helps() {
    for column in [
        "inserted_xid xid8 default pg_current_xact_id()",
        "inserted_xid xid8 not null",
        "inserted_xid xid8 not null default '7'",
        "inserted_xid bigint not null default 0",
        "inserted_xid text",
    ] {
        let own = Own::new(&format!(", {column}"), "").await;
        let ran = own.run(&INIT).await;
        ran.assert_status(1);
        let finding = ran.finding("inserted-xid-unfit");
        own.follow(&finding).await;
        let ran = own.run(&INIT).await;
        ran.assert_status(0);
        ran.finding("capture-columns");
    }
}

#[tokio::test]
async fn a_seq_of_another_type_is_reported_and_the_remedy_helps() {
    let own = Own::new(", seq numeric", "").await;
    let ran = own.run(&INIT).await;
    ran.assert_status(1);
    own.follow(&ran.finding("seq-missing")).await;
    let ran = own.run(&INIT).await;
    ran.assert_status(0);
    ran.finding("capture-columns");
}

#[tokio::test]
async fn no_seq_is_added_when_the_settings_name_another_column() {
    let settings = "[tables.columns]\nseq = \"place\"\n";
    let own = Own::new(", place bigserial", settings).await;
    own.run(&INIT).await.finding("seq-without-index");
    let sql = "select count(*) from pg_attribute where attrelid = 'public.own'::regclass \
               and attname = 'seq'";
    assert_eq!(own.database.number(sql).await, 0);
    own.database
        .execute("create index on public.own (place)")
        .await;
    own.run(&INIT).await.assert_status(0);
}

#[tokio::test]
async fn an_id_that_is_not_numbered_one_by_one_does_not_count_as_seq() {
    let own = Own::new("", "[tables.columns]\nid = \"n\"\n").await;
    own.database
        .execute(
            "create sequence by_50 increment by 50; \
             alter table public.own add n bigint not null unique default nextval('by_50')",
        )
        .await;
    let ran = own.run(&INIT).await;
    ran.assert_status(0);
    ran.finding("capture-columns");
}

/// `init` derives a table's identity from its name without quotes. The two names in this test become
/// the same text when the quotes are removed. Even then the two tables must get different identities.
#[tokio::test]
async fn tables_that_differ_only_in_their_quotes_get_identities_of_their_own() {
    let own = Own::new("", "").await;
    let names = ["\"a.b\".c", "a.\"b.c\""];
    own.database
        .execute("create schema \"a.b\"; create schema a")
        .await;
    let mut settings = String::new();
    for name in names {
        let create = format!("create table {name} (like public.own including defaults)");
        own.database.execute(&create).await;
        settings += &format!("[[tables]]\ntable = '{name}'\n");
    }
    std::fs::write(own.settings.path(), settings).unwrap();
    let ran = own.run(&["init", "--apply", "--json"]).await;
    assert!(ran.stderr.is_empty(), "{ran}");
    let identities = "select string_agg(identity, ' ' order by identity) from outbox.capture";
    let identities = own.database.text(identities).await;
    assert_eq!(identities, "a.b.c a.b.c#2");
}

/// A row that a subscription writes may have the `inserted_xid` of the sending server, and a recovery
/// may then mistake the row for an old one. So `init` must report such a table.
#[tokio::test]
async fn a_table_that_a_subscription_writes_into_is_reported() {
    let own = Own::new("", "").await;
    own.run(&INIT).await.assert_status(0);
    let sender = Database::new().await;
    sender
        .execute("create table own (id uuid primary key); create publication sent for table own")
        .await;
    let (_, server) = sender.url.split_once('@').unwrap();
    let subscribe = format!(
        "create subscription copied connection 'postgres://postgres@{server}' publication sent \
         with (create_slot = false, slot_name = none, enabled = false, copy_data = false)"
    );
    own.database.execute(&subscribe).await;
    own.run(&INIT).await.finding("table-subscribed");
    own.database.execute("drop subscription copied").await;
    own.run(&INIT).await.assert_status(0);
}

#[tokio::test]
async fn each_table_gets_an_index_even_if_its_name_is_taken_or_a_build_was_cut_off() {
    let long = "a".repeat(48);
    let own = Own::named(&format!("public.{long}_two"), "", "").await;
    // An index of another table already has the name that `init` would give to the index of the
    // captured table.
    own.database
        .execute(&format!(
            "create table public.{long}_one (seq bigint); \
             create index {long}_seq on public.{long}_one (seq); \
             alter table public.{long}_two add column seq bigint"
        ))
        .await;
    own.database
        .execute(&format!(
            "insert into public.{long}_two (seq) values (1), (1)"
        ))
        .await;
    let build = format!(
        "create unique index concurrently broken on public.{long}_two (seq) where seq is not null"
    );
    own.database.client.batch_execute(&build).await.unwrap_err();
    let invalid = "select count(*) from pg_index where not indisvalid";
    assert_eq!(own.database.number(invalid).await, 1);
    let ran = own.run(&INIT).await;
    assert!(!ran.stdout.contains("seq-without-index"), "{ran}");
    assert_eq!(own.database.number(invalid).await, 0);
    let valid = format!(
        "select count(*) from pg_index where indrelid = 'public.{long}_two'::regclass \
         and indkey[0] <> 1"
    );
    assert_eq!(own.database.number(&valid).await, 1);
}

#[tokio::test]
async fn while_init_waits_for_a_long_reader_it_delays_no_writer() {
    let own = Own::new("", "").await;
    let reader = connect(&own.database.url).await;
    execute(&reader, "begin; select count(*) from public.own").await;
    let row = reader.query_one("select pg_backend_pid()", &[]).await;
    let pid: i32 = row.unwrap().get(0);
    let writing = async {
        let mut longest = std::time::Duration::ZERO;
        for _ in 0..40 {
            let start = std::time::Instant::now();
            execute(
                &own.database.client,
                "insert into public.own default values",
            )
            .await;
            longest = longest.max(start.elapsed());
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        longest
    };
    let (ran, longest) = tokio::join!(own.run(&INIT), writing);
    ran.assert_error("postgres-timeout", 3);
    assert_contains(&ran.stderr, &format!("process {pid}, role postgres"));
    assert!(longest.as_secs() < 4, "{longest:?}");
    execute(&reader, "commit").await;
    own.run(&INIT).await.assert_status(0);
}

/// The table lacks `inserted_xid`, and the publication has a column list. If `init` added the column, the
/// publication would leave it out, and the relay could not continue. So `init` adds no column. It reports
/// statements that add the columns and extend the list in one transaction.
#[tokio::test]
async fn no_column_is_added_that_a_column_list_would_leave_out() {
    let own = Own::new("", "").await;
    if own
        .database
        .number("select current_setting('server_version_num')::bigint")
        .await
        < 150_000
    {
        eprintln!("SKIPPED: column lists need PostgreSQL 15");
        return;
    }
    let list = "id, aggregatetype, aggregateid, event_type, payload";
    let publish = format!("create publication postrider for table public.own ({list})");
    own.database.execute(&publish).await;
    let ran = own.run(&INIT).await;
    ran.assert_status(2);
    let finding = ran.finding("publication-drift");
    assert_contains(&finding.to_string(), "inserted_xid of public.own");
    let sql = "select count(*) from pg_attribute where attrelid = 'public.own'::regclass \
               and attname in ('inserted_xid', 'seq')";
    assert_eq!(own.database.number(sql).await, 0);
    let remedy = finding["remedy"].as_str().unwrap();
    let remedy = remedy.strip_prefix("in one transaction: ").unwrap();
    own.database.execute(remedy).await;
    own.run(&INIT).await.assert_status(0);
    assert_eq!(own.database.number(sql).await, 2);
}

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
async fn each_table_gets_an_index_even_if_its_name_is_taken_or_a_build_was_cut_off() {
    let long = "a".repeat(48);
    let own = Own::named(&format!("public.{long}_two"), "", "").await;
    // An index of another table takes the name that `init` would give to the index of the first
    // table.
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
async fn a_long_reader_makes_init_wait_but_no_writer() {
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

//! Tests what the catalogue says about captured tables and about the privileges on them.

use decoder::Oid;
use slot_manager::privileges::{self, TableNeed};
use slot_manager::publication::{self, CapturedTable};
use slot_manager::table_shape::{self, InsertedXid, ShapeColumns, TableShape};
use slot_manager::{QualifiedName, activity, column_types, statistics, table};
use tokio_postgres::Client;

use crate::support::{connect, new_database, run, shared_server};

fn events() -> QualifiedName {
    QualifiedName::new("shop", "Events")
}

async fn shape(client: &Client) -> Option<TableShape> {
    let columns = ShapeColumns {
        seq: &["seq", "id"],
        only_if_numbered: "id",
        version: "version",
    };
    table_shape::read(client, &events(), columns)
        .await
        .expect("look")
}

#[tokio::test]
async fn a_shape_says_which_columns_identify_and_order_the_rows() {
    let (_, client) = new_database().await;
    run(&client, "create schema shop").await;
    assert_eq!(shape(&client).await, None);

    run(
        &client,
        "create table shop.\"Events\" (id bigserial primary key, version int, inserted_xid xid8)",
    )
    .await;
    let by_id = shape(&client).await.expect("a table");
    assert_eq!(by_id.inserted_xid, InsertedXid::OtherValue);
    assert_eq!(by_id.partitions, by_id.oid.to_string());
    assert!(by_id.has_version && !by_id.has_column_seq && by_id.filled.is_empty());
    let id = by_id.seq.expect("a numbered id");
    assert!(id.column == "id" && id.is_steady && id.is_indexed && !id.is_nullable);

    run(
        &client,
        "alter table shop.\"Events\" drop inserted_xid, add seq bigint, \
             add inserted_xid xid8 not null default pg_current_xact_id(); \
         insert into shop.\"Events\" default values",
    )
    .await;
    let by_seq = shape(&client).await.expect("a table");
    assert_eq!(by_seq.inserted_xid, InsertedXid::FilledIn);
    assert!(by_seq.has_column_seq && by_seq.filled == [by_seq.oid] && by_seq.blocks == 1);
    let seq = by_seq.seq.expect("a column seq");
    assert!(seq.column == "seq" && !seq.is_steady && !seq.is_indexed && seq.is_nullable);
    assert_eq!(seq.numbering, None);

    // The relay reads the rows by ascending `seq`, NULLs last. An index with `desc nulls last` cannot return this
    // order, even if PostgreSQL reads the index backwards.
    for (order, is_indexed) in [("desc nulls last", false), ("desc", true)] {
        let index = format!("create index on shop.\"Events\" (seq {order})");
        run(&client, &index).await;
        let seq = shape(&client).await.expect("a table").seq.expect("seq");
        assert_eq!(seq.is_indexed, is_indexed, "{order}");
    }
}

/// A session that locks partitions without their parent can deadlock with a DROP of a partition, which locks the
/// parent first.
#[tokio::test]
async fn our_queries_wait_for_no_lock_on_a_partition_and_keep_none() {
    let (database, client) = new_database().await;
    run(
        &client,
        "create schema shop; \
         create table shop.\"Events\" (id int, seq bigint) partition by range (id); \
         create table shop.one partition of shop.\"Events\" for values from (0) to (9); \
         create table shop.rest partition of shop.\"Events\" default; \
         create publication p for table shop.\"Events\" with (publish_via_partition_root); \
         set statement_timeout = '10s'",
    )
    .await;
    let captured = CapturedTable {
        name: events(),
        columns: vec!["id".to_owned()],
        optional_columns: Vec::new(),
    };
    let locks = async || -> i64 {
        let count = "select count(*) from pg_locks l join pg_class c on c.oid = l.relation \
                     where l.pid = pg_backend_pid() and c.relnamespace = 'shop'::regnamespace";
        client.query_one(count, &[]).await.expect("locks").get(0)
    };
    let owner = connect(&shared_server().url(&database)).await;
    run(
        &owner,
        "begin; lock table only shop.one in access exclusive mode",
    )
    .await;
    run(&client, "begin").await;
    let state = publication::inspect(&client, "p", &[captured])
        .await
        .expect("publication");
    assert_eq!(state.problems(), []);
    statistics::inserted_rows(&client, &[events()])
        .await
        .expect("statistics");
    let holder = activity::table_lock_holder(&client, "shop.\"Events\"").await;
    assert!(holder.expect("locks").is_some());
    assert_eq!(locks().await, 0);
    // Release the owner's lock first: the following queries read the sizes of partitions, and would wait for it.
    run(&owner, "rollback").await;
    assert_eq!(shape(&client).await.expect("a table").below.len(), 2);
    table::size_of_partitions(&client, &events())
        .await
        .expect("size");
    assert_eq!(locks().await, 0);
}

#[tokio::test]
async fn columns_are_listed_as_they_are_streamed_and_a_domain_has_its_base_type() {
    let (_, client) = new_database().await;
    assert_eq!(
        table::streamed_columns(&client, &events())
            .await
            .expect("columns"),
        []
    );
    run(
        &client,
        "create schema shop; create domain shop.code as text; \
         create table shop.\"Events\" (id uuid, gone int, code shop.code, \
             twice int generated always as (1) stored); \
         alter table shop.\"Events\" drop gone",
    )
    .await;
    let columns = table::streamed_columns(&client, &events())
        .await
        .expect("columns");
    let names: Vec<&str> = columns.iter().map(|column| column.name.as_str()).collect();
    assert_eq!(names, ["id", "code"]);

    let asked = [(columns[1].type_oid, "code"), (Oid(99_999_999), "id")];
    let mut types = column_types::look_up(&client, &events(), &asked)
        .await
        .expect("types");
    types.sort_by_key(|found| found.named.0);
    let found: Vec<_> = types
        .iter()
        .map(|found| (found.named, found.base))
        .collect();
    assert_eq!(
        found,
        [(asked[0].0, Oid(25)), (asked[1].0, columns[0].type_oid)]
    );
    assert!(types[0].has_order && types[0].name == "shop.code");
    let name = events().to_string();
    let of_column = |column| table::type_of_column(&client, &name, column);
    assert_eq!(
        of_column("id").await.expect("type").as_deref(),
        Some("uuid")
    );
    assert_eq!(of_column("gone").await.expect("type"), None);
}

#[tokio::test]
async fn an_index_is_found_by_its_column() {
    let (_, client) = new_database().await;
    assert!(
        !table::exists(&client, "shop.\"Events\"")
            .await
            .expect("exists")
    );
    assert_eq!(
        table::is_unique(&client, &events(), "id")
            .await
            .expect("unique"),
        None
    );
    run(
        &client,
        "create schema shop; create table shop.\"Events\" (id int primary key, name text, seq int)",
    )
    .await;
    assert!(
        table::exists(&client, "shop.\"Events\"")
            .await
            .expect("exists")
    );
    let oid = shape(&client).await.expect("a table").oid;
    for (column, is_indexed) in [("id", true), ("name", false)] {
        let unique = table::is_unique(&client, &events(), column)
            .await
            .expect("unique");
        assert_eq!(unique, Some(is_indexed), "{column}");
        let found = table::lookup_column(&client, oid, column)
            .await
            .expect("column");
        assert_eq!(
            found.map(|found| found.is_indexed),
            Some(is_indexed),
            "{column}"
        );
    }
    assert_eq!(
        table::lookup_column(&client, oid, "none")
            .await
            .expect("column"),
        None
    );
}

#[tokio::test]
async fn an_invalid_index_on_seq_is_listed() {
    let (_, client) = new_database().await;
    run(
        &client,
        "create schema shop; create table shop.\"Events\" (seq int); \
         create index \"By Seq\" on shop.\"Events\" (seq) where seq is not null",
    )
    .await;
    assert_eq!(
        table::invalid_seq_indexes(&client, &events())
            .await
            .expect("indexes"),
        []
    );
    run(
        &client,
        "update pg_index set indisvalid = false where indexrelid = 'shop.\"By Seq\"'::regclass",
    )
    .await;
    assert_eq!(
        table::invalid_seq_indexes(&client, &events())
            .await
            .expect("indexes"),
        [QualifiedName::new("shop", "By Seq")]
    );
}

#[tokio::test]
async fn only_a_partitioned_table_has_a_size_of_partitions() {
    let (_, client) = new_database().await;
    run(
        &client,
        "create schema shop; create table shop.single as select 1; \
         create table shop.parted (id int) partition by range (id); \
         create table shop.part partition of shop.parted for values from (1) to (9); \
         insert into shop.parted values (1)",
    )
    .await;
    for (name, size) in [("parted", 8_192), ("single", 0), ("none", 0)] {
        let name = QualifiedName::new("shop", name);
        let found = table::size_of_partitions(&client, &name).await;
        assert_eq!(found.expect("size"), size, "{name}");
    }
}

#[tokio::test]
async fn privileges_are_those_of_the_current_role() {
    let (name, client) = new_database().await;
    let role = format!("reader_of_{name}");
    run(
        &client,
        &format!(
            "create schema shop; create table shop.\"Events\" (id int); \
             create role {role} login; grant usage on schema shop to {role}; \
             grant select on shop.\"Events\" to {role}; set role {role}"
        ),
    )
    .await;
    let needs = |privileges| {
        let tables = [events(), QualifiedName::new("shop", "none")];
        tables.map(|table| TableNeed { table, privileges })
    };
    let missing = async |privileges| {
        let missing = privileges::missing_grants(&client, &needs(privileges)).await;
        missing.expect("privileges")
    };
    assert_eq!(missing(&["SELECT"]).await, Vec::<String>::new());
    let grant = format!("GRANT INSERT, DELETE ON shop.\"Events\" TO {role}");
    assert_eq!(
        missing(&["SELECT", "INSERT", "DELETE"]).await,
        std::slice::from_ref(&grant)
    );
    run(
        &client,
        &format!(
            "reset role; {grant}; alter table shop.\"Events\" enable row level security; \
             revoke usage on schema shop from {role}; set role {role}"
        ),
    )
    .await;
    let remaining = [
        format!("GRANT USAGE ON SCHEMA shop TO {role}"),
        format!("ALTER ROLE {role} BYPASSRLS"),
    ];
    assert_eq!(missing(&["SELECT", "INSERT", "DELETE"]).await, remaining);

    let rights = privileges::of_role(&client, &role).await.expect("rights");
    let rights = rights.map(|rights| (rights.may_log_in, rights.may_replicate));
    assert_eq!(rights, Some((true, false)));
    assert_eq!(
        privileges::of_role(&client, "nobody")
            .await
            .expect("rights"),
        None
    );
}

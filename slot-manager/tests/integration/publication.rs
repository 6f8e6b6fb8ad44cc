//! Tests every problem that the check of a publication can find.

mod generated;

use slot_manager::QualifiedName;
use slot_manager::publication::{CapturedTable, Problem, PublicationState, inspect};
use tokio_postgres::Client;

use crate::support::{connect, major, new_database, run, shared_server, skipped};

fn captured(name: &str, columns: &[&str]) -> CapturedTable {
    CapturedTable {
        name: name.parse().expect("a name"),
        columns: columns.iter().map(|c| (*c).to_owned()).collect(),
        optional_columns: vec!["headers".to_owned()],
    }
}

async fn read(client: &Client, publication: &str, table: &CapturedTable) -> PublicationState {
    inspect(client, publication, std::slice::from_ref(table))
        .await
        .expect("inspect")
}

/// Runs the remedy for the only problem of the table, checks that no problem is left, and returns the problem.
async fn mended(client: &Client, publication: &str, table: &CapturedTable) -> Problem {
    let mut problems = read(client, publication, table).await.problems();
    assert_eq!(problems.len(), 1, "{problems:?}");
    let problem = problems.remove(0);
    let remedy = problem.remedy().replace("in one transaction: ", "");
    run(client, &remedy).await;
    assert_eq!(
        read(client, publication, table).await.problems(),
        [],
        "after {remedy}"
    );
    problem
}

#[tokio::test]
async fn a_publication_with_the_table_has_no_problem() {
    let (_, client) = new_database().await;
    run(
        &client,
        "create table t (id int primary key, x text); create publication p for table t",
    )
    .await;
    let table = captured("public.t", &["id", "x"]);
    let state = read(&client, "p", &table).await;
    assert_eq!(state.problems(), []);
    assert!(state.publication.expect("there").other_changes);
    assert!(!read(&client, "p", &table).await.has_changed_since(&state));
    let without_tables = inspect(&client, "p", &[]).await.expect("inspect");
    assert_eq!(without_tables.problems(), []);
    assert!(without_tables.publication.is_some());
}

#[tokio::test]
async fn a_publication_for_all_tables_carries_the_table() {
    let (_, client) = new_database().await;
    run(
        &client,
        "create table t (id int); create publication p for all tables",
    )
    .await;
    let state = read(&client, "p", &captured("public.t", &["id"])).await;
    assert_eq!(state.problems(), []);
    assert!(state.publication.expect("there").all_tables);
}

#[tokio::test]
async fn the_remedy_of_each_problem_fixes_it() {
    let (_, client) = new_database().await;
    run(
        &client,
        r#"create schema "Out"; create table "Out"."order" (id int, "X" text)"#,
    )
    .await;
    let table = captured(r#""Out"."order""#, &["id", "X"]);

    let problem = mended(&client, "My pub", &table).await;
    assert!(
        matches!(problem, Problem::PublicationMissing { .. }),
        "{problem}"
    );
    run(
        &client,
        r#"alter publication "My pub" set (publish = 'update, delete')"#,
    )
    .await;
    let problem = mended(&client, "My pub", &table).await;
    assert!(
        matches!(problem, Problem::InsertsNotPublished { .. }),
        "{problem}"
    );
    run(
        &client,
        r#"alter publication "My pub" drop table "Out"."order""#,
    )
    .await;
    let problem = mended(&client, "My pub", &table).await;
    assert!(
        matches!(problem, Problem::TableNotPublished { .. }),
        "{problem}"
    );
}

#[tokio::test]
async fn the_remedy_for_a_row_filter_and_a_column_list_fixes_it() {
    let (_, client) = new_database().await;
    if major(&client).await < 15 {
        return skipped(
            "row filters and column lists are seen",
            "they need PostgreSQL 15",
        );
    }
    run(
        &client,
        r#"create schema "Out"; create table "Out"."order" (id int, "X" text);
           create publication "My pub" for table "Out"."order" where (id > 7)"#,
    )
    .await;
    let table = captured(r#""Out"."order""#, &["id", "X"]);
    let problem = mended(&client, "My pub", &table).await;
    assert!(
        matches!(&problem, Problem::RowFilter { filter, .. } if filter == "(id > 7)"),
        "{problem}"
    );
    run(
        &client,
        r#"alter publication "My pub" set table "Out"."order" (id)"#,
    )
    .await;
    let problem = mended(&client, "My pub", &table).await;
    assert!(
        matches!(&problem, Problem::ColumnsNotPublished { columns, .. } if columns == &["X"]),
        "{problem}"
    );
    run(
        &client,
        r#"alter publication "My pub" set table "Out"."order" ("X", id)"#,
    )
    .await;
    assert_eq!(
        read(&client, "My pub", &table).await.problems(),
        [],
        "all needed columns are listed"
    );
    run(
        &client,
        r#"alter table "Out"."order" add column headers jsonb, add column other int"#,
    )
    .await;
    let problem = mended(&client, "My pub", &table).await;
    assert!(
        matches!(&problem, Problem::ColumnsNotPublished { columns, .. } if columns == &["headers"]),
        "{problem}"
    );
}

#[tokio::test]
async fn partitions_must_be_published_via_their_root() {
    let (_, client) = new_database().await;
    run(
        &client,
        "create table t (id int) partition by range (id);
         create table t_1 partition of t for values from (0) to (10);
         create publication p for table t with (publish = 'insert')",
    )
    .await;
    let problem = mended(&client, "p", &captured("public.t", &["id"])).await;
    assert!(
        matches!(problem, Problem::NotViaPartitionRoot { .. }),
        "{problem}"
    );
}

#[tokio::test]
async fn a_missing_table_or_column_is_reported() {
    let (_, client) = new_database().await;
    run(
        &client,
        "create table t (id int, gone int); alter table t drop gone",
    )
    .await;
    run(&client, "create publication p for table t").await;
    let tables = [
        captured("public.t", &["id", "gone"]),
        captured("public.u", &[]),
        captured("no.t", &[]),
    ];
    let problems = inspect(&client, "p", &tables)
        .await
        .expect("inspect")
        .problems();
    let table = QualifiedName::new("public", "t");
    assert_eq!(
        problems,
        [
            Problem::ColumnsMissing {
                table,
                columns: vec!["gone".to_owned()]
            },
            Problem::TableMissing {
                table: QualifiedName::new("public", "u")
            },
            Problem::TableMissing {
                table: QualifiedName::new("no", "t")
            },
        ]
    );
}

#[tokio::test]
async fn a_table_of_the_same_name_in_another_schema_does_not_count() {
    let (_, client) = new_database().await;
    run(
        &client,
        "create schema a; create table a.t (id int); create table t (id int)",
    )
    .await;
    run(&client, "create publication p for table t").await;
    let problems = read(&client, "p", &captured("a.t", &[])).await.problems();
    assert!(
        matches!(&problems[..], [Problem::TableNotPublished { .. }]),
        "{problems:?}"
    );
}

#[tokio::test]
async fn a_change_that_was_undone_between_two_checks_is_noticed() {
    let (_, client) = new_database().await;
    run(&client, "create table t (id int); create table u (id int)").await;
    run(&client, "create publication p for table t").await;
    let table = captured("public.t", &["id"]);
    for undone in [
        "alter publication p drop table t; alter publication p add table t",
        "alter publication p set (publish = 'update'); alter publication p set (publish = 'insert')",
        "drop publication p; create publication p for table t",
        "drop table t; create table t (id int); alter publication p add table t",
        "alter table t rename to v; alter table v rename to t",
        "alter schema public rename to elsewhere; alter schema elsewhere rename to public",
    ] {
        let before = read(&client, "p", &table).await;
        assert_eq!(before.problems(), []);
        run(&client, undone).await;
        let after = read(&client, "p", &table).await;
        assert_eq!(after.problems(), []);
        assert!(after.has_changed_since(&before), "{undone}");
    }
    let before = read(&client, "p", &table).await;
    run(
        &client,
        "alter publication p add table u; insert into t values (1); \
         alter table t add column more int; grant select on t to public",
    )
    .await;
    run(&client, "vacuum freeze pg_publication").await;
    run(&client, "vacuum full pg_publication_rel").await;
    let after = read(&client, "p", &table).await;
    assert!(
        !after.has_changed_since(&before),
        "a change to another table does not count"
    );
}

#[tokio::test]
async fn a_table_published_through_its_schema_can_leave_and_return_untraced() {
    let (_, client) = new_database().await;
    run(&client, "create table t (id int)").await;
    let table = captured("public.t", &["id"]);
    let row = client.query_one("show server_version_num", &[]).await;
    let version: String = row.unwrap().get(0);
    let mut kinds = vec![("for table t", false), ("for all tables", false)];
    if version.as_str() >= "150000" {
        kinds.push(("for tables in schema public", true));
    }
    for (what, is_untraced) in kinds {
        run(&client, &format!("create publication p {what}")).await;
        let state = read(&client, "p", &table).await;
        assert_eq!(state.problems(), []);
        assert_eq!(state.untraced().next().is_some(), is_untraced, "{what}");
        run(&client, "drop publication p").await;
    }
}

#[tokio::test]
async fn a_publication_dropped_and_created_again_all_the_time_is_read_without_an_error() {
    let (database, client) = new_database().await;
    run(&client, "create table t (id int primary key, x text)").await;
    let changing = connect(&shared_server().url(&database)).await;
    let changes = tokio::spawn(async move {
        for _ in 0..1_500 {
            run(&changing, "create publication p for table t").await;
            run(&changing, "drop publication p").await;
        }
    });
    let table = captured("public.t", &["id", "x"]);
    let mut seen = [0, 0];
    while !changes.is_finished() {
        let problems = read(&client, "p", &table).await.problems();
        seen[problems.len()] += 1;
    }
    changes.await.expect("changes");
    assert!(seen[0] > 0 && seen[1] > 0, "{seen:?}");
}

#[tokio::test]
async fn relations_whose_rows_are_never_streamed_are_refused_before_there_is_a_publication() {
    let (_, client) = new_database().await;
    run(
        &client,
        "create extension file_fdw; create server files foreign data wrapper file_fdw;
         create table good (id int);
         create view v as select 1 as id;
         create materialized view m as select 1 as id;
         create unlogged table u (id int);
         create foreign table f (id int) server files options (filename '/dev/null');
         create table p (id int) partition by range (id);
         create table p_1 partition of p for values from (0) to (10);
         create table p_2 partition of p for values from (10) to (20) partition by range (id);
         create unlogged table p_2_1 partition of p_2 for values from (10) to (20);
         create table q (id int) partition by range (id);
         create foreign table q_1 partition of q for values from (0) to (10)
             server files options (filename '/dev/null')",
    )
    .await;
    for (name, kind, part) in [
        ("v", "view", "v"),
        ("m", "materialized view", "m"),
        ("u", "unlogged table", "u"),
        ("f", "foreign table", "f"),
        ("p", "unlogged table", "p_2_1"),
        ("q", "foreign table", "q_1"),
    ] {
        let unfit = Problem::NotStreamed {
            table: QualifiedName::new("public", name),
            kind: kind.to_owned(),
            part: QualifiedName::new("public", part),
        };
        let table = captured(&format!("public.{name}"), &["id"]);
        let alone = read(&client, "none", &table).await.problems();
        assert_eq!(alone, std::slice::from_ref(&unfit));
        // Of the two tables, only `public.good` can be published. So the remedy for the missing publication
        // names only `public.good`.
        let both = [table.clone(), captured("public.good", &["id"])];
        let problems = inspect(&client, "pub", &both)
            .await
            .expect("inspect")
            .problems();
        assert_eq!(problems[0], unfit);
        run(&client, &problems[1].remedy()).await;
        let problems = inspect(&client, "pub", &both)
            .await
            .expect("inspect")
            .problems();
        assert_eq!(problems, [unfit]);
        run(&client, "drop publication pub").await;
    }
    run(
        &client,
        "create publication p for table p with (publish_via_partition_root)",
    )
    .await;
    let problem = mended(&client, "p", &captured("public.p", &["id"])).await;
    assert!(matches!(problem, Problem::NotStreamed { .. }), "{problem}");
}

#[tokio::test]
async fn capturing_a_partition_and_its_root_at_once_is_refused() {
    let (_, client) = new_database().await;
    run(
        &client,
        "create table p (id int) partition by range (id);
         create table p_1 partition of p for values from (0) to (10) partition by range (id);
         create table p_1_1 partition of p_1 for values from (0) to (10)",
    )
    .await;
    let both = [
        captured("public.p", &["id"]),
        captured("public.p_1_1", &["id"]),
    ];
    let state = inspect(&client, "p", &both).await.expect("inspect");
    let twice = Problem::CapturedTwice {
        table: QualifiedName::new("public", "p_1_1"),
        root: QualifiedName::new("public", "p"),
    };
    assert_eq!(state.unfit(), [twice]);
    let alone = inspect(&client, "p", &both[1..]).await.expect("inspect");
    assert_eq!(alone.unfit(), []);
}

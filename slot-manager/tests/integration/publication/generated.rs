//! Tests generated columns. Before version 18, PostgreSQL does not publish them. From 18 on, it
//! publishes stored generated columns if an option of the publication says so.

use super::*;

#[tokio::test]
async fn a_generated_column_is_refused_before_18() {
    let (_, client) = new_database().await;
    run(
        &client,
        "create table t (id int, \"Key\" text generated always as ('k-' || id) stored); \
         create publication p for table t",
    )
    .await;
    let table = captured("public.t", &["id", "Key"]);
    let not_needed = captured("public.t", &["id"]);
    assert_eq!(read(&client, "p", &not_needed).await.problems(), []);
    if major(&client).await >= 18 {
        return skipped(
            "generated columns are never published",
            "PostgreSQL 18 publishes them",
        );
    }
    let problems = read(&client, "p", &table).await.problems();
    let [problem] = &problems[..] else {
        panic!("{problems:?}")
    };
    assert_eq!(
        problem.to_string(),
        "column Key of table public.t is generated: generated columns are not published before \
         PostgreSQL 18"
    );
    let remedy = problem.remedy();
    let (statement, _) = remedy.split_once(", and let").expect("a statement first");
    run(&client, statement).await;
    assert_eq!(read(&client, "p", &table).await.problems(), []);
}

#[tokio::test]
async fn a_stored_generated_column_is_published_from_18_on_with_the_option() {
    let (_, client) = new_database().await;
    if major(&client).await < 18 {
        return skipped(
            "generated columns are published",
            "this needs PostgreSQL 18",
        );
    }
    run(
        &client,
        "create table t (id int, k text generated always as ('k-' || id) stored, \
                         v text generated always as ('v-' || id) virtual)",
    )
    .await;
    let table = captured("public.t", &["id", "k"]);
    let problem = mended(&client, "p", &table).await;
    assert!(
        matches!(problem, Problem::PublicationMissing { .. }),
        "{problem}"
    );
    run(
        &client,
        "alter publication p set (publish_generated_columns = none)",
    )
    .await;
    let problem = mended(&client, "p", &table).await;
    let remedy = "alter publication p set (publish_generated_columns = stored)";
    assert_eq!(problem.remedy(), remedy);
    // A column list overrides the option.
    run(
        &client,
        "alter publication p set (publish_generated_columns = none); \
         alter publication p set table t (id)",
    )
    .await;
    mended(&client, "p", &table).await;
    run(&client, "alter publication p set table t (id, k)").await;
    assert_eq!(read(&client, "p", &table).await.problems(), []);

    let table = captured("public.t", &["id", "v"]);
    let problems = read(&client, "p", &table).await.problems();
    assert!(
        matches!(&problems[..], [Problem::ColumnsGenerated { columns, .. }] if columns == &["v"]),
        "{problems:?}"
    );
    assert!(problems[0].to_string().contains("never published"));
}

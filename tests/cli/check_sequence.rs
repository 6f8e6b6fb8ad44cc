//! Tests that `check` and `init` report a sequence whose next value is not above the values in its column.

use crate::support::{Database, Ran, assert_contains};

const CODE: &str = "seq-behind";

async fn check(database: &Database, more: &[(&str, &str)]) -> Ran {
    let project = [("PUBSUB_PROJECT_ID", "demo")];
    let environment = [&project[..], more].concat();
    database.run_with(&["check", "--json"], &environment).await
}

fn has_finding(ran: &Ran) -> bool {
    let json = ran.json();
    let mut findings = json["findings"].as_array().unwrap().iter();
    findings.any(|finding| finding["code"] == CODE)
}

/// Returns the SQL statement that the remedy of the finding suggests.
fn statement(ran: &Ran) -> String {
    let finding = ran.finding(CODE);
    assert_eq!(finding["severity"], "warning");
    let remedy = finding["remedy"].as_str().unwrap();
    let (statement, _) = remedy.split_once(';').unwrap();
    statement.to_owned()
}

#[tokio::test]
async fn a_sequence_that_was_set_back_is_found_and_the_remedy_corrects_it() {
    let database = Database::initialised().await;
    assert!(!has_finding(&check(&database, &[]).await), "an empty table");
    database.emit(5).await;
    assert!(!has_finding(&check(&database, &[]).await));
    let set_back = "select setval('outbox.events_seq_seq', 1, false)";
    database.execute(set_back).await;
    let ran = check(&database, &[]).await;
    let remedy = statement(&ran);
    assert_eq!(
        remedy,
        "select setval('outbox.events_seq_seq', (select max(seq) from outbox.events))"
    );
    let what = ran.finding(CODE)["what"].to_string();
    assert_contains(&what, "the next number is 1, but a row has 5");
    let init = database.run(&["init", "--apply"]).await;
    assert_contains(&format!("{}{}", init.stdout, init.stderr), CODE);
    database.execute(&remedy).await;
    assert!(!has_finding(&check(&database, &[]).await));
    database.emit(1).await;
    let highest = "select max(seq) from outbox.events";
    assert_eq!(database.number(highest).await, 6);
}

#[tokio::test]
async fn a_sequence_is_behind_if_its_next_number_is_not_above_the_last_row() {
    let database = Database::initialised().await;
    database.emit(5).await;
    let set = |text: &str| format!("select setval('outbox.events_seq_seq', {text})");
    for (next, is_behind) in [
        ("4", true),
        ("5, false", true),
        ("5", false),
        ("6, false", false),
    ] {
        database.execute(&set(next)).await;
        assert_eq!(
            has_finding(&check(&database, &[]).await),
            is_behind,
            "{next}"
        );
    }
}

#[tokio::test]
async fn the_relays_role_finds_a_sequence_that_is_behind_once_a_row_was_inserted() {
    let database = Database::initialised().await;
    database.emit(5).await;
    let role = format!("relay_of_{}", database.name);
    let create = format!("create role {role} login replication in role postrider_relay");
    database.execute(&create).await;
    let set_back = "select setval('outbox.events_seq_seq', 1, false)";
    database.execute(set_back).await;
    database.emit(1).await;
    let url = database.url_as(&role);
    let ran = check(&database, &[("DATABASE_URL", &url)]).await;
    assert_contains(&statement(&ran), "outbox.events_seq_seq");
}

#[tokio::test]
async fn names_in_the_remedy_for_a_sequence_are_quoted() {
    let database = Database::new().await;
    database
        .execute(
            "create table public.\"It's\" (\"Id\" bigserial primary key, aggregatetype text not null, \
                 aggregateid text, event_type text not null, payload jsonb); \
             insert into public.\"It's\" (aggregatetype, event_type) select 'order', 'New' from generate_series(1, 5)",
        )
        .await;
    let file = tempfile::NamedTempFile::new().unwrap();
    let settings =
        "[[tables]]\ntable = \"public.\\\"It's\\\"\"\ncolumns = { id = \"Id\", seq = \"Id\" }\n";
    std::fs::write(file.path(), settings).unwrap();
    let path = file.path().display().to_string();
    let config = [("POSTRIDER_CONFIG", path.as_str())];
    database
        .run_with(&["init", "--apply"], &config)
        .await
        .assert_status(0);
    assert!(!has_finding(&check(&database, &config).await));
    let set_back = "select setval('public.\"It''s_Id_seq\"', 2)";
    database.execute(set_back).await;
    let remedy = statement(&check(&database, &config).await);
    database.execute(&remedy).await;
    assert!(!has_finding(&check(&database, &config).await), "{remedy}");
}

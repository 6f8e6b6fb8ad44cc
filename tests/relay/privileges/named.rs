//! Tests that errors name the exact GRANT that is missing.

use super::*;

/// The statements that take a right from the relay's role, and give it back.
fn revoke_and_grant(right: &str, table: &str) -> (String, String) {
    (
        format!("REVOKE {right} ON {table} FROM postrider_relay"),
        format!("GRANT {right} ON {table} TO postrider_relay"),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_right_that_is_revoked_while_the_relay_runs_is_named_in_the_log_and_in_status() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let url = login_role(&database).await;
    let environment = [("DATABASE_URL", url.as_str())];
    // The relay exits if one of these rights is missing. Without INSERT it cannot record outcomes. Without one of
    // the other rights it cannot begin its next session.
    for (right, table) in [
        ("INSERT", "outbox.dispatch"),
        ("SELECT", "outbox.relay"),
        ("USAGE", "SCHEMA outbox"),
    ] {
        let (revoke, restore) = revoke_and_grant(right, table);
        let relay = Relay::start_with(&database, &host, &environment);
        insert_orders(&database, 5, 5).await;
        database.wait_until_recorded().await;
        database.execute(&revoke).await;
        insert_orders(&database, 5, 5).await;
        relay.wait_for_error("privilege-missing").await;
        let log = relay.log();
        let named = restore.replace("postrider_relay", "shop_relay");
        assert!(log.contains(&named), "{revoke}:\n{log}");
        assert_eq!(relay.wait().await.code(), Some(3), "{revoke}:\n{log}");
        let shown = postrider(&["status", "--json"], &environment).output();
        let shown: serde_json::Value = serde_json::from_slice(&shown.unwrap().stdout).unwrap();
        let of = if table == "outbox.dispatch" {
            &shown["condition"]
        } else {
            &shown["error"]
        };
        assert_eq!(of["code"], "privilege-missing", "{shown:#}");
        let hint = of["hint"].as_str().unwrap();
        assert!(hint.contains(&named), "{shown:#}");
        database.execute(&restore).await;
    }
    // A running relay continues without these rights, so the missing right shows only in its log.
    // The first audit needs both rights: SELECT to compare the rows, and then UPDATE to raise the floor.
    let relay = Relay::start_with(&database, &host, &environment);
    for (right, table) in [("SELECT", "outbox.events"), ("UPDATE", "outbox.relay")] {
        insert_orders(&database, 5, 5).await;
        database.wait_until_recorded().await;
        let (revoke, restore) = revoke_and_grant(right, table);
        database.execute(&revoke).await;
        insert_orders(&database, 5, 5).await;
        database.wait_until_recorded().await;
        relay
            .wait_for_log(&restore.replace("postrider_relay", "shop_relay"))
            .await;
        database.execute(&restore).await;
    }
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn check_names_each_missing_right_with_the_statement_that_grants_it() {
    let database = Database::private().await;
    let url = login_role(&database).await;
    let environment = [
        ("DATABASE_URL", url.as_str()),
        ("PUBSUB_PROJECT_ID", "demo"),
    ];
    let missing = || {
        let checked = postrider(&["check", "--json"], &environment).output();
        let checked: serde_json::Value = serde_json::from_slice(&checked.unwrap().stdout).unwrap();
        let findings = checked["findings"].as_array().unwrap().iter();
        let mut remedies = findings
            .filter(|finding| finding["code"] == "privilege-missing")
            .map(|finding| finding["remedy"].as_str().unwrap().to_owned());
        (remedies.next(), remedies.next())
    };
    assert_eq!(missing(), (None, None));
    let own = [
        ("outbox.events", "SELECT"),
        ("outbox.dispatch", "SELECT INSERT UPDATE"),
        ("outbox.relay", "SELECT INSERT UPDATE"),
        ("outbox.capture", "SELECT INSERT UPDATE"),
        ("outbox.replay", "SELECT INSERT UPDATE"),
        ("outbox.replay_event", "SELECT INSERT UPDATE DELETE"),
    ];
    for (table, rights) in own {
        for right in rights.split(' ') {
            let (revoke, restore) = revoke_and_grant(right, table);
            database.execute(&revoke).await;
            let (Some(remedy), None) = missing() else {
                panic!("{revoke}: {:?}", missing());
            };
            let named = restore.replace("postrider_relay", "shop_relay");
            assert_eq!(remedy.to_lowercase(), named.to_lowercase());
            database.execute(&remedy).await;
            assert_eq!(missing(), (None, None), "{remedy}");
            database
                .execute(&format!(
                    "REVOKE {right} ON {table} FROM shop_relay; {restore}"
                ))
                .await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_without_a_right_names_only_the_grant_that_it_needs() {
    let database = Database::private().await;
    database
        .execute(
            "CREATE ROLE operator LOGIN; GRANT USAGE ON SCHEMA outbox TO operator; \
             GRANT SELECT ON outbox.events, outbox.dispatch, outbox.relay, outbox.capture TO operator",
        )
        .await;
    insert_orders(&database, 1, 1).await;
    database
        .execute(
            "INSERT INTO outbox.dispatch (commit_lsn, ordinal, event_id, state, attempts, committed_at) \
             SELECT '0/10', 1, id, 'quarantined', 0, now() FROM outbox.events",
        )
        .await;
    let url = database.url.replace("postgres@", "operator@");
    let environment = [("DATABASE_URL", url.as_str())];
    let error = |arguments: &[&str]| {
        let ran = postrider(arguments, &environment).output().unwrap();
        String::from_utf8_lossy(&ran.stderr).replace("\n         ", " ")
    };
    let of_quarantine = ["quarantine", "release", "--all"];
    let granted = "as the owner of the objects, run: GRANT UPDATE ON outbox.dispatch TO operator\n";
    let shown = error(&of_quarantine);
    assert!(shown.contains(granted), "{shown}");
    database
        .execute("REVOKE SELECT ON outbox.dispatch FROM operator")
        .await;
    let granted = "as the owner of the objects, run: GRANT SELECT ON outbox.dispatch TO operator\n";
    for command in [&["event", "1"][..], &["audit"], &["quarantine", "list"]] {
        let shown = error(command);
        assert!(shown.contains(granted), "{command:?}: {shown}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_revoked_right_is_named_in_the_error() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let url = login_role(&database).await;
    let of = |right: &str, table: &str| {
        let (revoke, restore) = revoke_and_grant(right, table);
        (revoke, restore, "privilege-missing")
    };
    let cases = [
        (
            "ALTER ROLE shop_relay NOREPLICATION".to_owned(),
            "ALTER ROLE shop_relay REPLICATION".to_owned(),
            "replication-right",
        ),
        of("USAGE", "SCHEMA outbox"),
        of("SELECT", "outbox.relay"),
        of("INSERT", "outbox.relay"),
        of("UPDATE", "outbox.relay"),
        of("SELECT", "outbox.dispatch"),
        of("INSERT", "outbox.dispatch"),
        of("SELECT", "outbox.capture"),
    ];
    for (revoke, restore, code) in cases {
        database.execute(&revoke).await;
        insert_orders(&database, 1, 1).await;
        let relay = Relay::start_with(&database, &host, &[("DATABASE_URL", url.as_str())]);
        relay.wait_for_error(code).await;
        let log = relay.log();
        let named = restore.replace("postrider_relay", "shop_relay");
        assert!(log.contains(&named), "{revoke}:\n{log}");
        assert_eq!(relay.wait().await.code(), Some(3), "{revoke}:\n{log}");
        database.execute(&restore).await;
    }
    let relay = Relay::start_with(&database, &host, &[("DATABASE_URL", url.as_str())]);
    database.wait_until_recorded().await;
    relay.stop().await;
}

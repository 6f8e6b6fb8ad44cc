//! Checks that no command prints a connection string that an operator has put into the wrong argument or
//! setting.

use crate::support::command;

#[tokio::test(flavor = "multi_thread")]
async fn a_misplaced_argument_is_not_printed() {
    for arguments in [
        &["run", "postgres://u:QXZJKV@h/d"][..],
        &["check", "--json", "host=h password=QXZJKV"],
        &["postgres://u:QXZJKV@h/d"],
        &["quarantine", "--state=postgres://u:QXZJKV@h/d"],
        &["slot", "--database-url=postgres://u:QX@ZJKV@h/d"],
        &["explain", "postgres://u:QXZJKV@h/d"],
        &["prune", "--older-than=postgres://u:QXZJKV@h/d"],
        &["replay", "--since=postgres://u:QXZJKV@h/d"],
        &["recover", "--adopt=postgres://u:QXZJKV@h/d"],
        &["run", "--slot=postgres://u:QXZJKV@h/d"],
        &["run", "--slot", "host=h password=QXZJKV"],
        &["check", "--table", "postgres://u:QXZJKV@h/d"],
        &["check", "--publication=host=h password='QX ZJKV'"],
        &["status", "--slot=postgres://u:QXZJKV"],
        &["init", "--topic=postgres://h/d?password=QXZJKV"],
    ] {
        let ran = command(arguments, &[]).output().await.unwrap();
        let printed = [ran.stdout, ran.stderr].concat();
        let printed = String::from_utf8_lossy(&printed);
        assert!(
            !printed.is_empty() && !printed.contains("ZJKV"),
            "{arguments:?}:\n{printed}"
        );
    }
}

/// Covers the variables of Postrider's settings, and those variables of libpq whose values appear in
/// messages.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_string_in_the_variable_of_another_setting_is_not_printed() {
    let variables = [
        "POSTRIDER_SLOT",
        "POSTRIDER_TABLE",
        "POSTRIDER_PUBLICATION",
        "POSTRIDER_TOPIC",
        "POSTRIDER_ORDERING",
        "POSTRIDER_PROJECT",
        "POSTRIDER_DEAD_LETTER_TOPIC",
        "POSTRIDER_HTTP_ADDR",
        "POSTRIDER_PRUNE_AFTER",
        "POSTRIDER_CONFIG",
        "PGDATABASE",
        "PGUSER",
        "PGHOST",
        "RUST_LOG",
    ];
    for variable in variables {
        for value in [
            "postgres://u:QXZJKV@127.0.0.1:1/d",
            "postgres://u:QX/ZJKV@127.0.0.1:1/d",
            "host=127.0.0.1 port=1 password=QXZJKV",
        ] {
            let mut env = vec![
                ("PUBSUB_EMULATOR_HOST", "127.0.0.1:1"),
                ("PUBSUB_PROJECT_ID", "demo"),
                ("USER", "u"),
                ("POSTRIDER_START_TIMEOUT_S", "1"),
            ];
            if !variable.starts_with("PG") {
                env.push(("DATABASE_URL", "postgres://u@127.0.0.1:1/d"));
            }
            env.push((variable, value));
            for arguments in [&["run"][..], &["check"], &["slot", "show", "--json"]] {
                let ran = command(arguments, &env).output().await.unwrap();
                let printed = [ran.stdout, ran.stderr].concat();
                let printed = String::from_utf8_lossy(&printed);
                assert!(
                    !ran.status.success(),
                    "{variable}, {arguments:?}:\n{printed}"
                );
                assert!(
                    !printed.contains("ZJKV"),
                    "{variable}, {arguments:?}:\n{printed}"
                );
            }
        }
    }
}

//! Commands and options that need no database.

use crate::support::{PATIENCE, assert_contains, command, postrider};

#[tokio::test]
async fn the_help_of_every_command_has_an_example() {
    for command in [
        &["init"][..],
        &["check"],
        &["slot"],
        &["slot", "show"],
        &["slot", "list"],
        &["slot", "create"],
        &["slot", "drop"],
        &["slot", "advance"],
        &["event"],
        &["audit"],
        &["prune"],
        &["quarantine"],
        &["quarantine", "list"],
        &["quarantine", "show"],
        &["quarantine", "release"],
        &["quarantine", "discard"],
    ] {
        let ran = postrider(&[command, &["--help"]].concat(), &[]).await;
        ran.assert_status(0);
        assert!(ran.stdout.contains("Example"), "{ran}");
    }
}

#[tokio::test]
async fn init_prints_the_whole_script_without_a_database() {
    let ran = postrider(
        &["init", "--slot", "mine", "--relay-user", "Shop Relay"],
        &[],
    )
    .await;
    ran.assert_status(0);
    let order: Vec<usize> = [
        "create table if not exists outbox.migrations",
        "create table if not exists outbox.events",
        "create table if not exists outbox.dispatch",
        "create publication postrider",
        "grant postrider_relay to \"Shop Relay\"",
        "slot_name => 'mine'",
    ]
    .map(|part| {
        ran.stdout
            .find(part)
            .unwrap_or_else(|| panic!("{part} is not in {ran}"))
    })
    .into();
    assert!(order.is_sorted(), "{order:?}");
}

#[tokio::test]
async fn output_to_a_pipe_has_no_colours() {
    let ran = postrider(&["check"], &[]).await;
    assert!(!ran.stdout.contains('\x1b'), "{ran}");
    assert_contains(&ran.stdout, "database-url-invalid");
}

#[tokio::test]
async fn a_pipe_that_is_closed_early_causes_no_crash() {
    for args in [&["explain"][..], &["init"], &["check"]] {
        let mut child = command(args, &[]).spawn().unwrap();
        drop(child.stdout.take());
        let output = tokio::time::timeout(PATIENCE, child.wait_with_output())
            .await
            .unwrap();
        let stderr = String::from_utf8(output.unwrap().stderr).unwrap();
        assert!(stderr.is_empty(), "{args:?}: {stderr}");
    }
}

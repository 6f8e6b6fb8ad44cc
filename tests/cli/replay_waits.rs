//! Tests that a replay names what it is waiting for.

use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;

use crate::support::{Database, PATIENCE, assert_contains, command};

const EVENT: &str = "00000000-0000-4000-8000-000000000001";

/// A database with a published event, and no relay.
async fn filled() -> Database {
    let database = Database::initialised().await;
    database
        .execute(&format!(
            "insert into outbox.events (id, aggregatetype, aggregateid, event_type, payload) \
             values ('{EVENT}', 'order', 'o-1', 'OrderPlaced', '{{}}'); \
             insert into outbox.dispatch (commit_lsn, committed_at, dispatched_at, ordinal, attempts, event_id, \
                 state, topic, ordering_key, message_id) \
             values ('0/10', now(), now(), 1, 1, '{EVENT}', 'published', \
                 'projects/p/topics/order.events', 'o-1', '17')"
        ))
        .await;
    database
}

fn replay(database: &Database, name: &str) -> Child {
    let arguments = ["replay", EVENT, "--name", name, "--yes"];
    let mut command = command(&arguments, &database.env());
    command.stderr(Stdio::piped()).kill_on_drop(true);
    command.spawn().unwrap()
}

#[tokio::test]
async fn a_replay_says_each_reason_for_which_it_waits() {
    let database = filled().await;
    // Another event of the key is released. Nobody publishes it, because no relay runs.
    let release = "insert into outbox.dispatch (commit_lsn, committed_at, dispatched_at, ordinal, attempts, event_id, \
                       state, topic, ordering_key, message_id, replay) \
                   values ('0/20', now(), now(), 1, 1, gen_random_uuid(), 'released', \
                       'projects/p/topics/order.events', 'o-1', '18', 'r1')";
    database.execute(release).await;
    let mut waiting = replay(&database, "r2");
    let mut lines = BufReader::new(waiting.stderr.take().unwrap()).lines();
    for (change, reason) in [
        (
            "select",
            "waiting until the relay has published the events of the same keys that the replay r1 released",
        ),
        (
            "update outbox.dispatch set replay = null, message_id = null where commit_lsn = '0/20'",
            "that `postrider quarantine release` released",
        ),
    ] {
        database.execute(change).await;
        let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
        let line = line.unwrap_or_else(|_| panic!("no line about {reason:?}"));
        let line = line.unwrap().unwrap();
        assert_contains(&line, "0 of 1 events published again; waiting");
        assert_contains(&line, reason);
    }
    waiting.kill().await.unwrap();
}

#[tokio::test]
async fn an_event_that_another_replay_has_released_can_be_replayed() {
    let database = filled().await;
    database
        .execute("update outbox.dispatch set state = 'released', replay = 'r1'")
        .await;
    let mut waiting = replay(&database, "r2");
    let mut lines = BufReader::new(waiting.stderr.take().unwrap()).lines();
    let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
    let line = line.expect("the replay waits").unwrap().unwrap();
    assert_contains(&line, "0 of 1 events published again; waiting");
    assert_contains(&line, "the replay r1 released");
    waiting.kill().await.unwrap();
}

//! Tests that a replay says for whom it waits.

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

/// The first line that the command writes to standard error.
async fn first_line(replay: &mut Child) -> String {
    let mut lines = BufReader::new(replay.stderr.take().unwrap()).lines();
    let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
    line.unwrap().unwrap().unwrap()
}

#[tokio::test]
async fn a_replay_says_that_it_waits_for_another_replay_or_for_the_quarantine() {
    let database = filled().await;
    for (other, released_by) in [
        ("replay = 'r1'", "that the replay r1 released"),
        (
            "replay = null, message_id = null",
            "that `postrider quarantine release` released",
        ),
    ] {
        // Another event of the key is released. Nobody publishes it, because no relay runs.
        let release = format!(
            "delete from outbox.dispatch where commit_lsn = '0/20'; \
             insert into outbox.dispatch (commit_lsn, committed_at, dispatched_at, ordinal, attempts, event_id, \
                 state, topic, ordering_key, message_id) \
             values ('0/20', now(), now(), 1, 1, gen_random_uuid(), 'released', \
                 'projects/p/topics/order.events', 'o-1', '18'); \
             update outbox.dispatch set {other} where commit_lsn = '0/20'"
        );
        database.execute(&release).await;
        let mut waiting = replay(&database, &format!("for-{}", other.len()));
        let line = first_line(&mut waiting).await;
        assert_contains(
            &line,
            "0 of 1 events published again; waiting until the relay",
        );
        assert_contains(&line, released_by);
        waiting.kill().await.unwrap();
    }
}

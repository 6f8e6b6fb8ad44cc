//! Commands and SQL that the tests with planted objects run.

use crate::harness::Database;

/// Commands that only read the database, and a replay as the last command.
pub(super) const READS: &[&[&str]] = &[
    &["status"],
    &["event", "--since", "1h"],
    &["event", "--key", "o-1"],
    &["tail", "--since", "1h", "--limit", "5"],
    &["tail", "--since", "1h", "--limit", "5", "--message"],
    &["audit"],
    &["prune", "--older-than", "1d", "--dry-run"],
    &["replay", "--since", "1h", "--dry-run"],
    &["replay", "--key", "o-2", "--yes"],
];

/// Makes the relay believe that the database has moved to another server, whose WAL has not reached the position
/// of every dispatch row.
pub(super) async fn pretend_to_have_moved(database: &Database) {
    database
        .execute(
            "UPDATE outbox.relay SET system_identifier = '1'; \
             UPDATE outbox.dispatch SET commit_lsn = pg_current_wal_lsn() + 100000000 \
             WHERE event_id IN (SELECT event_id FROM outbox.dispatch LIMIT 1)",
        )
        .await;
}

/// Inserts an event that cannot become a message.
pub(super) async fn insert_bad_event(database: &Database) {
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload, headers) \
             VALUES ('order', 'o-1', 'Bad', '{}', jsonb_build_object('long', repeat('x', 2000)))",
        )
        .await;
}

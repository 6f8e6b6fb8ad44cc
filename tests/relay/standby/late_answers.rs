//! Tests in which PostgreSQL terminates the first relay's walsender while requests of this relay are in
//! flight. The first relay waits for the answers. The second relay takes over the slot before the answers
//! arrive.

use std::collections::BTreeSet;
use std::time::Duration;

use pubsub_emulator::checks::Violation;
use pubsub_emulator::{Action, Answer, Fault, FaultId, RunningEmulator};

use super::with;
use crate::harness::{self, Database, Relay, eventually, insert_orders};

const RECORDS: &str = "SELECT count(*) FROM outbox.dispatch";

/// Publishes three events whose answers reach the first relay only after the second relay has taken
/// over the slot. The second relay gets no answer until the fault is lifted.
async fn taken_over_before_the_answers_come() -> (Database, RunningEmulator, Relay, Relay, FaultId)
{
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let first = Relay::start(&database, &emulator);
    first.wait_for_log("streaming").await;
    let host = emulator.addr().to_string();
    let second = Relay::start_with(&database, &host, &with(&[]));
    second.wait_for_log("standby").await;
    // Let the first relay still get its answers. The delay is shorter than the time that a relay waits for answers
    // after the end of its session.
    let late = Action::Delay(Duration::from_secs(9));
    emulator.faults().inject(Fault::new(late).times(3));
    let withheld = emulator.faults().inject(Fault::new(Action::NeverAnswer));
    insert_orders(&database, 3, 3).await;
    eventually("the first relay's requests are in flight", || async {
        (emulator.journal().counts().attempts == 3).then_some(())
    })
    .await;
    database
        .execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
        .await;
    second.wait_for_log("streaming").await;
    assert!(
        answers_of_first(&emulator)
            .iter()
            .all(|answer| *answer == Answer::Pending),
        "the second relay took over too late to show anything"
    );
    (database, emulator, first, second, withheld)
}

fn answers_of_first(emulator: &RunningEmulator) -> Vec<Answer> {
    let attempts = emulator.journal().attempts();
    let of_first = attempts.into_iter().take(3);
    of_first.map(|attempt| attempt.answer).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_that_arrives_after_another_relay_served_and_died_is_not_recorded() {
    let (database, emulator, first, second, _) = taken_over_before_the_answers_come().await;
    second.kill_9();
    // The relay logs this only after it has tried to record the outcomes.
    first.wait_for_log("closing the session").await;
    let answers = answers_of_first(&emulator);
    assert!(answers.iter().all(|answer| *answer == Answer::MessageIds));
    assert_eq!(database.number(RECORDS).await, 0, "{}", first.log());
    emulator.faults().lift_all();
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_that_arrives_after_a_takeover_is_not_recorded() {
    let (database, emulator, first, _second, withheld) = taken_over_before_the_answers_come().await;
    // The relay logs this only after it has tried to record the outcomes.
    first.wait_for_log("closing the session").await;
    let answers = answers_of_first(&emulator);
    assert!(
        answers.iter().all(|answer| *answer == Answer::MessageIds),
        "{}",
        first.log()
    );
    first
        .wait_for_log("another session has taken over the slot")
        .await;
    first.wait_for_log("standby").await;
    assert_eq!(database.number(RECORDS).await, 0, "{}", first.log());
    emulator.faults().lift(withheld);
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let late_ids = "SELECT count(*) FROM outbox.dispatch WHERE message_id = ANY($1)";
    let attempts = emulator.journal().attempts();
    let ids_of_first = attempts.iter().take(3).filter_map(|a| a.first_message_id);
    let ids_of_first: Vec<String> = ids_of_first.map(|id| id.to_string()).collect();
    let row = database.client.query_one(late_ids, &[&ids_of_first]).await;
    assert_eq!(row.unwrap().get::<_, i64>(0), 0);
    let report = harness::check_streamed(&database, &emulator).await;
    // The first relay cannot cancel requests that were in flight at the takeover, so allow that they
    // overlap with repeats.
    let others = |found: &&Violation| !matches!(found, Violation::InFlightTogether { .. });
    assert_eq!(
        report.violations.iter().filter(others).count(),
        0,
        "{report}"
    );
    let repeated = report.duplicates.iter().map(|found| &found.event_id);
    let repeated = BTreeSet::from_iter(repeated);
    assert_eq!(repeated.len(), 3, "each by the second relay");
}

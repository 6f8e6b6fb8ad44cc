//! Tests that a relay with `prune_after` drops old days. The relay logs in with its own role, which owns
//! no table.

use pubsub_emulator::checks;

use super::*;
use crate::background_pruning::written;
use crate::harness::{self, Relay};
use crate::privileges::login_role;

/// Days relative to today. The test adds a partition with old events for each of them, in this
/// order.
const DAYS: std::ops::Range<i32> = -9..-1;

/// Creates a trigger that copies the id of each inserted row to `public.written`, because the rows
/// themselves are deleted later.
async fn note_what_is_written(database: &Database) {
    database
        .execute(
            "CREATE TABLE public.written (id uuid, aggregateid text, seq bigint); \
             CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                 INSERT INTO public.written VALUES (NEW.id, NEW.aggregateid, NEW.seq); \
                 RETURN NULL; END $$; \
             CREATE TRIGGER note AFTER INSERT ON outbox.events FOR EACH ROW \
                 EXECUTE FUNCTION public.note()",
        )
        .await;
}

/// Number of stored messages whose keys begin with `old-`.
fn stored_old(emulator: &RunningEmulator) -> usize {
    let attempts = emulator.journal().attempts();
    let stored = attempts.iter().filter(|attempt| attempt.is_stored());
    let of_old = stored.filter(|attempt| attempt.ordering_key.starts_with("old-"));
    of_old.map(|attempt| attempt.event_ids.len()).sum()
}

/// Lets a relay drop past days while a service inserts events, and restarts the relay once. Checks that
/// every event is delivered, and that no insert was delayed for long.
async fn drop_days_while_events_flow(dispatch: &str) {
    let database = daily_database().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let url = login_role(&database).await;
    note_what_is_written(&database).await;
    let settings = [
        ("DATABASE_URL", url.as_str()),
        ("POSTRIDER_PRUNE_AFTER", "1s"),
        ("POSTRIDER_DISPATCH", dispatch),
    ];
    let run = || Relay::start_with(&database, &host, &settings);
    let relay = run();
    relay.wait_for_log("streaming").await;
    let service = TimedService::start(&database).await;
    let mut names = Vec::new();
    for days in DAYS {
        names.push(add_past_day(&database, days).await);
        insert(&database, 200, "old", days).await;
    }
    database
        .execute(&format!("DROP TABLE {}", day(&database, 7).await.0))
        .await;
    // Wait until the relay has sent all old events. With `dispatch = exceptions`, a relay that stops in the
    // middle of a transaction sends the whole transaction again after its restart.
    let old = "SELECT count(*) FROM public.written WHERE aggregateid LIKE 'old-%'";
    let old = usize::try_from(database.number(old).await).unwrap();
    eventually("the old events are stored", || async {
        (stored_old(&emulator) == old).then_some(())
    })
    .await;
    // Restart the relay: its first audit runs soon after the start and raises the floor.
    relay.stop().await;
    let relay = run();
    eventually("old days are dropped, and the records of their rows deleted", || async {
        // `prune` deletes only what lies below `restart_lsn`. A checkpoint writes the running transactions
        // to the WAL, which lets `restart_lsn` advance.
        database.execute("CHECKPOINT").await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        let mut left = 0;
        for name in &names {
            left += i32::from(exists(&database, name).await);
        }
        let records = "SELECT count(*) FROM outbox.dispatch d JOIN public.written w ON w.id = d.event_id \
                       WHERE w.aggregateid LIKE 'old-%'";
        (left == 0 && database.number(records).await == 0).then_some(())
    })
    .await;
    assert!(
        exists(&database, &day(&database, 7).await.0).await,
        "added ahead"
    );
    let slowest = service.stop().await;
    assert!(!relay.log().contains("publication-gap"), "{}", relay.log());
    relay.stop().await;
    let relay = run();
    let inserted = rows(&database, "public.written").await;
    eventually("everything is stored", || async {
        (i64::try_from(stored(&emulator).len()).unwrap() >= inserted).then_some(())
    })
    .await;
    assert!(!relay.log().contains("publication-gap"), "{}", relay.log());
    relay.stop().await;
    everything_is_delivered(&emulator, &database, dispatch).await;
    // Each drop may delay inserts by 0.1 s for each of its locks. The rest of this limit is for
    // slow machines.
    assert!(slowest < Duration::from_millis(1_500), "{slowest:?}");
}

async fn everything_is_delivered(emulator: &RunningEmulator, database: &Database, dispatch: &str) {
    let report = checks::check(&emulator.journal().attempts(), &written(database).await);
    assert!(report.is_clean(), "{report}");
    // With `dispatch = exceptions`, a clean stop may repeat the event that was in flight.
    let may_repeat = |key: &str| dispatch == "exceptions" && key == "live";
    let mut duplicates = report.duplicates.iter();
    assert!(
        duplicates.all(|duplicate| may_repeat(&duplicate.stream.ordering_key)),
        "{report}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_prunes_drops_old_days_while_events_flow() {
    drop_days_while_events_flow("full").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_records_a_relay_that_prunes_drops_old_days_while_events_flow() {
    drop_days_while_events_flow("exceptions").await;
}

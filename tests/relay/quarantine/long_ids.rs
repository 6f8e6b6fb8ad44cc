//! Tests a custom table with a row whose id has three million characters.

use super::*;
use crate::http::metric;

/// The size of the id in bytes, far more than a usual row takes in memory.
const ID: f64 = 3e6;

#[tokio::test(flavor = "multi_thread")]
async fn a_row_with_a_huge_id_counts_in_full_and_errors_shorten_the_id() {
    let database = Database::private().await;
    database
        .execute(
            "CREATE TABLE public.long_ids (LIKE outbox.events INCLUDING DEFAULTS); \
             ALTER TABLE public.long_ids ALTER id DROP DEFAULT, ALTER id TYPE text; \
             GRANT SELECT ON public.long_ids TO postrider_relay; \
             ALTER PUBLICATION postrider SET TABLE public.long_ids; \
             INSERT INTO public.long_ids (id, aggregatetype, aggregateid, event_type, payload) \
             SELECT CASE i WHEN 1 THEN repeat('x', 3000000) ELSE i::text END, \
                    'order', 'o-1', 'Placed', '{}' FROM generate_series(1, 500) i",
        )
        .await;
    let emulator = harness::emulator().await;
    let dead = "projects/demo/topics/dead";
    emulator.create_topic(dead).await.unwrap();
    let withheld = Fault::new(Action::NeverAnswer).on_topic(dead);
    let withheld = emulator.faults().inject(withheld);
    let http = free_addr();
    let settings = [
        ("POSTRIDER_TABLE", "public.long_ids"),
        ("POSTRIDER_DEAD_LETTER_TOPIC", "dead"),
        ("POSTRIDER_PUBLISH_TIMEOUT_S", "1"),
        ("POSTRIDER_HTTP_ADDR", &http),
    ];
    let relay = Relay::start_with(&database, &emulator.addr().to_string(), &settings);
    let in_flight = || metric(&http, "postrider_in_flight_bytes");
    wait_for_state(&database, "quarantined", 499).await;
    let bytes = in_flight().await.unwrap();
    assert!(
        bytes >= ID,
        "its dead letter waits, and {bytes} bytes are counted"
    );
    emulator.faults().lift(withheld);
    wait_for_state(&database, "quarantined", 500).await;
    eventually("nothing is left in memory", || async {
        (in_flight().await? == 0.0).then_some(())
    })
    .await;
    let longest = "SELECT max(length(error))::bigint FROM outbox.dispatch";
    assert!(database.number(longest).await < 700, "{longest}");
    let log = relay.log();
    assert!(!log.contains(&"x".repeat(200)), "the id is in the log");
}

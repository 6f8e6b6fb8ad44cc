//! Tests in which Pub/Sub or the network to Pub/Sub fails under load. Other topics and keys continue, no
//! event is lost, the order of each key holds, and the metrics show the failures.

mod topics;

use std::time::{Duration, Instant};

use fault_proxy::{Cut, FaultProxy, Flow};
use pubsub_emulator::checks::{Report, Violation};
use pubsub_emulator::{Action, Attempt, Emulator, Fault, RunningEmulator};
use tonic::Code;

use crate::harness::{self, Database, Relay, eventually};
use crate::http::{self, free_addr, get};
use crate::load::{Load, wait_for_more};

const RECORDED: &str = "SELECT count(*) FROM outbox.dispatch";

/// A relay under load, with a proxy between the relay and Pub/Sub.
struct World {
    database: Database,
    emulator: RunningEmulator,
    proxy: FaultProxy,
    relay: Relay,
    /// The address of the relay's HTTP port.
    port: String,
    load: Load,
}

impl World {
    async fn start(more: &[(&str, &str)]) -> Self {
        Self::with(harness::emulator().await, more).await
    }

    async fn with(emulator: RunningEmulator, more: &[(&str, &str)]) -> Self {
        let database = Database::start().await;
        let proxy = FaultProxy::start(emulator.addr()).await.unwrap();
        let port = free_addr();
        let mut environment = vec![
            ("POSTRIDER_HTTP_ADDR", port.as_str()),
            ("POSTRIDER_PUBLISH_TIMEOUT_S", "1"),
        ];
        environment.extend(more);
        let relay = Relay::start_with(&database, &proxy.addr().to_string(), &environment);
        let load = Load::start(&database);
        wait_for_more(&database, 50).await;
        Self {
            database,
            emulator,
            proxy,
            relay,
            port,
            load,
        }
    }

    async fn metric(&self, name: &str) -> Option<f64> {
        http::metric(&self.port, name).await
    }

    async fn wait_for_metric(&self, name: &str, holds: impl Fn(f64) -> bool) {
        eventually(&format!("{name} has the expected value"), || async {
            holds(self.metric(name).await.unwrap_or(0.0)).then_some(())
        })
        .await;
    }

    /// Ends the load, then checks that every event is delivered and confirmed, and that the relay
    /// never restarted its session. Returns the report and the relay's log.
    async fn ends_well(self) -> (Report, String) {
        self.ends_well_but_for(|_, _| false).await
    }

    /// Like `ends_well`, but allows that a request and its repeat were in flight together, if `excused` returns
    /// true for this pair.
    async fn ends_well_but_for(
        self,
        excused: impl Fn(&Attempt, &Attempt) -> bool,
    ) -> (Report, String) {
        wait_for_more(&self.database, 50).await;
        self.load.stop().await;
        self.database.wait_until_recorded().await;
        self.database.wait_until_confirmed().await;
        let mut report = harness::check_streamed(&self.database, &self.emulator).await;
        let attempts = self.emulator.journal().attempts();
        report.violations.retain(|violation| {
            let repeated = repeated_together(violation, &attempts);
            !repeated.is_some_and(|(first, second)| excused(first, second))
        });
        let log = self.relay.log();
        assert!(report.is_clean(), "{report}\n{log}");
        assert_eq!(log.matches("streaming").count(), 1, "one session:\n{log}");
        (report, log)
    }
}

/// Returns the two requests of an `InFlightTogether` violation, if the second request repeats the
/// first.
fn repeated_together<'a>(
    violation: &Violation,
    attempts: &'a [Attempt],
) -> Option<(&'a Attempt, &'a Attempt)> {
    let Violation::InFlightTogether { first, second, .. } = violation else {
        return None;
    };
    let attempt = |sequence| attempts.iter().find(|of| of.sequence == sequence);
    let (first, second) = (attempt(*first)?, attempt(*second)?);
    (first.event_ids == second.event_ids).then_some((first, second))
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_connections_only_add_lag_and_are_counted() {
    let world = World::start(&[]).await;
    world.proxy.refuse();
    world.proxy.cut(Cut::Reset);
    let failures = "postrider_publish_failures_total kind=\"pubsub-unreachable\"";
    world.wait_for_metric(failures, |n| n >= 3.0).await;
    tokio::time::sleep(Duration::from_secs(120)).await;
    let lag = world.metric("postrider_lag_seconds").await.unwrap();
    assert!(lag > 120.0, "{lag}");
    let (code, _) = get(&world.port, "/livez").await.unwrap();
    assert_eq!(code, 200);
    world.proxy.heal();
    world
        .wait_for_metric("postrider_lag_seconds", |n| n < 2.0)
        .await;
    world.ends_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_vanish_are_given_up_after_the_publish_timeout_and_retried() {
    let world = World::start(&[]).await;
    world.proxy.set_flow(Flow::Swallowed);
    world.relay.wait_for_log("pubsub-unreachable").await;
    world
        .wait_for_metric("postrider_lag_seconds", |n| n > 2.0)
        .await;
    world.proxy.heal();
    world.ends_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_dies_silently_is_replaced_while_the_others_continue() {
    let world = World::start(&[("POSTRIDER_PUBLISH_TIMEOUT_S", "3")]).await;
    eventually("all connections are open", async || {
        (world.proxy.ports().len() >= 4).then_some(())
    })
    .await;
    let (ports, connections) = (world.proxy.ports(), world.proxy.accepted());
    world.proxy.set_flow_of_one(ports[0], Flow::Swallowed);
    wait_for_more(&world.database, 50).await;
    assert_eq!(
        world.proxy.accepted(),
        connections,
        "the relay cannot notice the dead connection yet"
    );
    eventually("another connection is opened", async || {
        (world.proxy.accepted() > connections).then_some(())
    })
    .await;
    world.ends_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_arrive_late_after_a_stall_are_repeats_in_order() {
    // Use only one connection. With several connections, a delayed request may arrive after its own
    // retry, and even after the requests that follow the retry.
    let world = World::start(&[("POSTRIDER_PUBSUB_CHANNELS", "1")]).await;
    let mut ends = Vec::new();
    for _ in 0..2 {
        world.proxy.set_flow(Flow::Stalled);
        world
            .wait_for_metric("postrider_lag_seconds", |n| n > 2.0)
            .await;
        ends.push(world.emulator.journal().now());
        world.proxy.heal();
        world
            .wait_for_metric("postrider_lag_seconds", |n| n < 1.0)
            .await;
        wait_for_more(&world.database, 50).await;
    }
    // Allow that a request and its repeat arrive together at the end of a stall. The relay gave up the request
    // during the stall, and cannot prevent this overlap.
    let are_of_a_burst = |first: &Attempt, second: &Attempt| {
        let is_of = |end: &Duration, of: &Attempt| {
            (*end..*end + Duration::from_millis(500)).contains(&of.received)
        };
        let of_one = |end: &Duration| is_of(end, first) && is_of(end, second);
        ends.iter().any(of_one)
    };
    world.ends_well_but_for(are_of_a_burst).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_reset_during_a_request_lose_and_swap_nothing() {
    let world = World::start(&[]).await;
    world
        .emulator
        .faults()
        .inject(Fault::new(Action::Delay(Duration::from_millis(20))));
    let (mut cut, mut moments) = (0, Vec::new());
    for how in [Cut::Reset, Cut::Finish].repeat(6) {
        wait_for_more(&world.database, 20).await;
        cut += world.proxy.cut(how);
        moments.push(world.emulator.journal().now());
    }
    assert!(cut >= 12, "{cut} connections were cut");
    let log = world.relay.log();
    assert!(
        log.contains("pubsub-unreachable"),
        "no request was cut:\n{log}"
    );
    // The emulator may see the repeat before it sees the end of the first request's connection, so
    // allow an overlap of the two requests.
    let is_of_a_cut = |first: &Attempt, second: &Attempt| {
        let lies_between = |cut: &Duration| {
            let until = *cut + Duration::from_secs(1);
            first.peer != second.peer && first.received <= *cut && second.received < until
        };
        moments.iter().any(lies_between)
    };
    world.ends_well_but_for(is_of_a_cut).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn front_ends_that_keep_sending_goaway_lose_and_swap_nothing() {
    let emulator = Emulator::builder()
        .max_connection_age(Duration::from_millis(300))
        .start()
        .await
        .unwrap();
    emulator
        .create_topic("projects/demo/topics/order.events")
        .await
        .unwrap();
    let world = World::with(emulator, &[]).await;
    let connections = world.proxy.accepted();
    eventually("connections are replaced", || async {
        (world.proxy.accepted() >= connections + 20).then_some(())
    })
    .await;
    // A client that still writes to a connection while the front end closes it may lose the last
    // answers. The relay then logs a failure and sends these events again. So allow duplicates if the log
    // shows such a failure.
    let (report, log) = world.ends_well().await;
    let lost = report.unexplained_duplicates();
    let failed = log.contains("pubsub-unreachable");
    assert!(lost == 0 || failed, "{report}\n{log}");
}

/// A long publish timeout, for tests in which Pub/Sub answers every request. With a short timeout, the relay
/// would repeat a request if a busy machine delivers the answer late.
const PATIENT: (&str, &str) = ("POSTRIDER_PUBLISH_TIMEOUT_S", "10");

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_with_too_few_ids_fails_and_the_batch_is_retried() {
    let world = World::start(&[PATIENT]).await;
    world
        .emulator
        .faults()
        .inject(Fault::new(Action::FewerIds).times(8));
    world.relay.wait_for_log("message ids for").await;
    let (report, _) = world.ends_well().await;
    assert!(!report.duplicates.is_empty(), "{report}");
    assert_eq!(report.unexplained_duplicates(), 0, "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_keeps_failing_takes_neither_memory_nor_speed_from_the_others() {
    let world = World::start(&[("POSTRIDER_IN_FLIGHT_MIB", "2")]).await;
    let stuck = Fault::new(Action::Fail(Code::Unavailable)).on_ordering_key("o-0");
    let stuck = world.emulator.faults().inject(stuck);
    world.relay.wait_for_log("pubsub-unreachable").await;
    let others = format!("{RECORDED} WHERE ordering_key <> 'o-0'");
    let before = world.database.number(&others).await;
    let began = Instant::now();
    // Use keys that the load does not write. With two writing sessions per key, insertion order might not be
    // commit order.
    let of_their_own = harness::insert_orders_sql(3_000, 1_000).replace("'o-'", "'p-'");
    world.database.execute(&of_their_own).await;
    eventually("the other keys are recorded", || async {
        (world.database.number(&others).await >= before + 3_000).then_some(())
    })
    .await;
    println!("the others took {:?}", began.elapsed());
    let late = world
        .database
        .number(
            "SELECT count(*) FROM outbox.dispatch \
             WHERE ordering_key <> 'o-0' AND dispatched_at - committed_at > '10 s'",
        )
        .await;
    assert_eq!(late, 0, "events of other keys were held up");
    let used = world.metric("postrider_in_flight_bytes").await.unwrap();
    assert!(used < f64::from(2 << 20), "{used} bytes");
    world.emulator.faults().lift(stuck);
    world.ends_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_key_that_fills_the_memory_holds_up_all_keys_until_it_recovers() {
    let world = World::start(&[("POSTRIDER_IN_FLIGHT_MIB", "1")]).await;
    let stuck = Fault::new(Action::Fail(Code::Unavailable)).on_ordering_key("stuck");
    let stuck = world.emulator.faults().inject(stuck);
    world
        .database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
             SELECT 'order', 'stuck', 'OrderPlaced', n, \
                 jsonb_build_object('large', repeat('x', 2000)) \
             FROM generate_series(1, 2000) n",
        )
        .await;
    world
        .wait_for_metric("postrider_lag_seconds", |n| n > 3.0)
        .await;
    let used = world.metric("postrider_in_flight_bytes").await.unwrap();
    assert!(used < f64::from(2 << 20), "{used} bytes");
    let before = world.database.number(RECORDED).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let held_up = world.database.number(RECORDED).await - before;
    assert_eq!(held_up, 0, "the memory is full");
    world.emulator.faults().lift(stuck);
    world.ends_well().await;
}

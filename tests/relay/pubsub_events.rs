//! What happens to Pub/Sub and to the way there, under load: other topics and keys go on, nothing
//! is lost, order holds, and the metrics tell.

use std::time::{Duration, Instant};

use fault_proxy::{Cut, FaultProxy, Flow};
use pubsub_emulator::checks::{Report, Violation};
use pubsub_emulator::{Action, Attempt, Emulator, Fault, RunningEmulator};
use tonic::Code;

use crate::harness::{self, Database, Relay, eventually};
use crate::http::{self, free_addr, get};
use crate::load::{Load, wait_for_more};

const RECORDED: &str = "SELECT count(*) FROM outbox.dispatch";

/// A relay under load, with a proxy before Pub/Sub and its metrics at hand.
struct World {
    database: Database,
    emulator: RunningEmulator,
    proxy: FaultProxy,
    relay: Relay,
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
        eventually(&format!("{name} shows it"), || async {
            holds(self.metric(name).await.unwrap_or(0.0)).then_some(())
        })
        .await;
    }

    /// Ends the load; everything is delivered and confirmed, and the relay lived all the time.
    async fn ends_well(self) -> (Report, String) {
        self.ends_well_but_for(|_, _| false).await
    }

    /// The same where a request and its repeat may be under way together.
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

/// Two requests of a key under way together, if the second repeats the first.
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
async fn connections_that_are_refused_for_minutes_cost_lag_alone_and_are_counted() {
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
async fn a_black_hole_is_left_after_the_publish_timeout_and_everything_comes_again() {
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
async fn a_connection_that_dies_unseen_is_replaced_while_the_others_go_on() {
    let world = World::start(&[("POSTRIDER_PUBLISH_TIMEOUT_S", "3")]).await;
    eventually("all connections are open", async || {
        (world.proxy.ports().len() >= 4).then_some(())
    })
    .await;
    let (ports, connections) = (world.proxy.ports(), world.proxy.accepted());
    world.proxy.set_flow_of_one(ports[0], Flow::Swallowed);
    wait_for_more(&world.database, 50).await;
    assert_eq!(world.proxy.accepted(), connections, "too soon to know");
    eventually("another connection", async || {
        (world.proxy.accepted() > connections).then_some(())
    })
    .await;
    world.ends_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_arrive_late_after_a_stall_are_repeats_in_order() {
    // Over several connections a request may even arrive after those that follow its repeat.
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
    // A request that was given up in a stall arrives when that ends, at the same moment as its
    // repeat: the relay cannot prevent it.
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
async fn connections_that_are_reset_in_mid_request_lose_and_swap_nothing() {
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
    // The emulator may see the repeat before the end of the connection that brought the first.
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
async fn front_ends_that_say_goaway_all_the_time_lose_and_swap_nothing() {
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
    // What is handed to a connection at the moment of its end is refused unsent, and goes again. A
    // client that writes to a closed connection may lose the answers that came last.
    let (report, log) = world.ends_well().await;
    let lost = report.unexplained_duplicates();
    let failed = log.contains("pubsub-unreachable");
    assert!(lost == 0 || failed, "{report}\n{log}");
}

/// Where every answer comes: one that a busy machine reads late is no repeat.
const PATIENT: (&str, &str) = ("POSTRIDER_PUBLISH_TIMEOUT_S", "10");

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_with_too_few_ids_is_no_answer_and_the_batch_comes_again() {
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

/// Inserts payments, which go to a topic of their own.
async fn insert_payments(database: &Database, count: u32) {
    database
        .execute(&harness::insert_orders_sql(count, 5).replace("'order'", "'payment'"))
        .await;
}

/// Payments that are recorded, while orders are in trouble.
async fn payments_go_on(world: &World) {
    insert_payments(&world.database, 200).await;
    let recorded = format!("{RECORDED} WHERE topic LIKE '%/payment.events'");
    let before = world.database.number(&recorded).await;
    eventually("the other topic goes on", || async {
        (world.database.number(&recorded).await >= before.max(200)).then_some(())
    })
    .await;
}

async fn world_with_payments() -> World {
    let emulator = harness::emulator().await;
    emulator
        .create_topic("projects/demo/topics/payment.events")
        .await
        .unwrap();
    World::with(emulator, &[PATIENT]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_of_resource_exhausted_on_one_topic_slows_that_one_and_passes() {
    let world = world_with_payments().await;
    let storm = Fault::new(Action::Fail(Code::ResourceExhausted)).on_topic("order.events");
    let storm = world.emulator.faults().inject(storm);
    let throttled = "postrider_publish_failures_total kind=\"pubsub-throttled\"";
    world.wait_for_metric(throttled, |n| n >= 20.0).await;
    payments_go_on(&world).await;
    let attempts = world.emulator.journal().counts().attempts;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let more = world.emulator.journal().counts().attempts - attempts;
    assert!(more < 200, "{more} attempts in two seconds of throttling");
    world.emulator.faults().lift(storm);
    world.ends_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_is_deleted_and_restored_holds_up_itself_alone() {
    let world = world_with_payments().await;
    let topic = "projects/demo/topics/order.events";
    world.emulator.faults().remove_topic(topic);
    world.relay.wait_for_log("topic-missing").await;
    assert!(world.relay.log().contains(topic));
    payments_go_on(&world).await;
    let missing = "postrider_publish_failures_total kind=\"topic-missing\"";
    world.wait_for_metric(missing, |n| n >= 1.0).await;
    assert!(world.emulator.faults().restore_topic(topic));
    world.ends_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_right_that_is_revoked_and_granted_again_holds_up_its_topic_alone() {
    a_refusal_holds_up_its_topic_alone(
        Code::PermissionDenied,
        "pubsub-permission",
        "roles/pubsub.publisher",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_whose_condition_is_not_met_for_a_while_holds_up_itself_alone() {
    // As when the key that encrypts it is not at hand.
    let hint = "roles/pubsub.publisher";
    a_refusal_holds_up_its_topic_alone(Code::FailedPrecondition, "pubsub-permission", hint).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_answers_unavailable_for_a_while_holds_up_itself_alone() {
    let hint = "no action needed";
    a_refusal_holds_up_its_topic_alone(Code::Unavailable, "pubsub-unreachable", hint).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_that_pubsub_refuses_for_a_while_are_waited_out_and_named() {
    a_refusal_holds_up_its_topic_alone(
        Code::Unauthenticated,
        "pubsub-unauthenticated",
        "GOOGLE_APPLICATION_CREDENTIALS",
    )
    .await;
}

/// Loud, with what to do, and over as soon as it is mended.
async fn a_refusal_holds_up_its_topic_alone(code: Code, name: &str, hint: &str) {
    let world = world_with_payments().await;
    let refusal = Fault::new(Action::Fail(code)).on_topic("order.events");
    let refusal = world.emulator.faults().inject(refusal);
    world.relay.wait_for_log(name).await;
    let log = world.relay.log();
    assert!(log.contains(hint), "{log}");
    payments_go_on(&world).await;
    world.emulator.faults().lift(refusal);
    let (report, _) = world.ends_well().await;
    assert!(report.duplicates.is_empty(), "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_key_that_fails_for_ever_takes_no_room_and_no_speed_from_the_others() {
    let world = World::start(&[("POSTRIDER_IN_FLIGHT_MIB", "2")]).await;
    let stuck = Fault::new(Action::Fail(Code::Unavailable)).on_ordering_key("o-0");
    let stuck = world.emulator.faults().inject(stuck);
    world.relay.wait_for_log("pubsub-unreachable").await;
    let others = format!("{RECORDED} WHERE ordering_key <> 'o-0'");
    let before = world.database.number(&others).await;
    let began = Instant::now();
    // Keys that the load does not write: of each key one session decides the order.
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
async fn a_key_that_fails_until_its_events_fill_the_memory_holds_up_all_and_all_go_on_with_it() {
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
    assert_eq!(held_up, 0, "the room is full");
    world.emulator.faults().lift(stuck);
    world.ends_well().await;
}

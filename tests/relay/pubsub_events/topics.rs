//! Tests that a topic which Pub/Sub refuses or throttles holds up only its own events.

use super::*;

/// Inserts payments, whose topic is `payment.events`.
async fn insert_payments(database: &Database, count: u32) {
    database
        .execute(&harness::insert_orders_sql(count, 5).replace("'order'", "'payment'"))
        .await;
}

/// Checks that the relay records payments while it cannot deliver orders.
async fn payments_continue(world: &World) {
    insert_payments(&world.database, 200).await;
    let recorded = format!("{RECORDED} WHERE topic LIKE '%/payment.events'");
    let before = world.database.number(&recorded).await;
    eventually("the other topic continues", || async {
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
async fn a_storm_of_resource_exhausted_slows_down_only_its_topic() {
    let world = world_with_payments().await;
    let storm = Fault::new(Action::Fail(Code::ResourceExhausted)).on_topic("order.events");
    let storm = world.emulator.faults().inject(storm);
    let throttled = "postrider_publish_failures_total kind=\"pubsub-throttled\"";
    world.wait_for_metric(throttled, |n| n >= 20.0).await;
    payments_continue(&world).await;
    let attempts = world.emulator.journal().counts().attempts;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let more = world.emulator.journal().counts().attempts - attempts;
    assert!(more < 200, "{more} attempts in two seconds of throttling");
    world.emulator.faults().lift(storm);
    world.ends_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_is_deleted_and_restored_holds_up_only_itself() {
    let world = world_with_payments().await;
    let topic = "projects/demo/topics/order.events";
    world.emulator.faults().remove_topic(topic);
    world.relay.wait_for_log("topic-missing").await;
    assert!(world.relay.log().contains(topic));
    payments_continue(&world).await;
    let missing = "postrider_publish_failures_total kind=\"topic-missing\"";
    world.wait_for_metric(missing, |n| n >= 1.0).await;
    assert!(world.emulator.faults().restore_topic(topic));
    world.ends_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_right_that_is_revoked_and_granted_again_holds_up_only_its_topic() {
    a_refusal_holds_up_only_its_topic(
        Code::PermissionDenied,
        "pubsub-permission",
        "roles/pubsub.publisher",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_fails_a_precondition_for_a_while_holds_up_only_itself() {
    // Pub/Sub answers with this code, for example, while the key that encrypts the topic is unavailable.
    let hint = "check the topic's encryption key and its message storage policy";
    a_refusal_holds_up_only_its_topic(Code::FailedPrecondition, "pubsub-precondition", hint).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn internal_errors_of_a_topic_are_named_and_hold_up_only_this_topic() {
    let hint = "look at https://status.cloud.google.com";
    a_refusal_holds_up_only_its_topic(Code::Internal, "pubsub-internal", hint).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disabled_api_is_told_apart_from_a_missing_right() {
    let hint = "gcloud services enable pubsub.googleapis.com --project=demo";
    let refusal = infrastructure("SERVICE_DISABLED");
    holds_up_only_its_topic(refusal, "pubsub-api-disabled", hint).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_project_without_billing_is_told_apart_from_a_missing_right() {
    let refusal = infrastructure("BILLING_DISABLED");
    holds_up_only_its_topic(refusal, "pubsub-billing-disabled", "billing account").await;
}

/// The answer of Google's service infrastructure when it refuses a request in place of Pub/Sub. `reason` is the
/// reason in the error details, for example `SERVICE_DISABLED`.
fn infrastructure(reason: &'static str) -> Action {
    Action::FailWithReason {
        code: Code::PermissionDenied,
        domain: "googleapis.com",
        reason,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_answers_unavailable_for_a_while_holds_up_only_itself() {
    let hint = "no action needed";
    a_refusal_holds_up_only_its_topic(Code::Unavailable, "pubsub-unreachable", hint).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_that_pubsub_refuses_for_a_while_are_named_and_retried() {
    a_refusal_holds_up_only_its_topic(
        Code::Unauthenticated,
        "pubsub-unauthenticated",
        "GOOGLE_APPLICATION_CREDENTIALS",
    )
    .await;
}

async fn a_refusal_holds_up_only_its_topic(code: Code, name: &str, hint: &str) {
    holds_up_only_its_topic(Action::Fail(code), name, hint).await;
}

/// Makes Pub/Sub refuse all orders. Checks that the relay logs the error `name` with `hint`, that
/// payments continue, and that all orders are delivered once the refusal is lifted.
async fn holds_up_only_its_topic(refusal: Action, name: &str, hint: &str) {
    let world = world_with_payments().await;
    let refusal = Fault::new(refusal).on_topic("order.events");
    let refusal = world.emulator.faults().inject(refusal);
    world.relay.wait_for_log(name).await;
    let log = world.relay.log();
    assert!(log.contains(hint), "{log}");
    payments_continue(&world).await;
    world.emulator.faults().lift(refusal);
    let (report, _) = world.ends_well().await;
    assert!(report.duplicates.is_empty(), "{report}");
}

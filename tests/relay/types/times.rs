//! Tests of times without a time zone, infinite times, and years before Christ or with more than four
//! digits.

use super::World;
use crate::mapping::{Subscriber, attributes};

fn table(time: &str) -> String {
    format!(
        "CREATE TABLE t (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype text, \
             aggregateid text, event_type text, payload jsonb, created_at {time}); \
         DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET timezone = ''Europe/Berlin''', \
                                    current_database()); END $$"
    )
}

fn settings(more: &str) -> String {
    format!(
        "[[tables]]\ntable = 'public.t'\ntopic = 'times'\nenvelope = 'cloudevents-binary'\n\
         columns = {{ occurred_at = 'created_at' }}\n{more}\n"
    )
}

fn insert(times: &[&str]) -> String {
    let insert = |time: &&str| {
        format!(
            "INSERT INTO t (aggregatetype, aggregateid, event_type, payload, created_at) \
             VALUES ('order', 'o-1', '{time}', '{{}}', '{time}'); "
        )
    };
    times.iter().map(insert).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timestamp_without_time_zone_is_refused_until_the_settings_name_a_zone() {
    for time in ["timestamp", "local_time"] {
        let domain = "CREATE DOMAIN local_time AS timestamp(3) without time zone; ";
        let tables = format!("{domain}{}", table(time));
        let world = World::start(&tables, &["t"], &settings("")).await;
        let message = "`columns.occurred_at` is column \"created_at\" of type timestamp without time \
                       zone, and `time_zone` does not say what its values mean";
        world.is_refused("setting-invalid", message).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timestamp_without_time_zone_is_sent_as_utc_or_local_from_stream_and_table() {
    // In Berlin, the first of these local times does not exist, and the second exists twice.
    let (never, twice) = ("2026-03-29 02:30:00", "2026-10-25 02:30:00.25");
    for (zone, expected) in [
        (
            "UTC",
            ["2026-03-29T02:30:00.000000Z", "2026-10-25T02:30:00.250000Z"],
        ),
        ("local", [never, twice]),
    ] {
        let toml = settings(&format!("time_zone = '{zone}'"));
        let world = World::start(&table("timestamp"), &["t"], &toml).await;
        let mut times = Subscriber::new(&world.emulator, "times").await;
        let relay = world.run();
        relay.wait_for_log("streaming").await;
        world.database.execute(&insert(&[never, twice])).await;
        world.wait_until_recorded(2).await;
        world.lose_the_slot(relay).await;
        world.database.execute(&insert(&[never, twice])).await;
        let relay = world.run();
        world.wait_until_recorded(4).await;
        let mut sent = Vec::new();
        for message in times.take(4).await {
            let attributes = attributes(&message);
            sent.push(attributes["occurred_at"].to_owned());
            let is_point = attributes["ce-time"] == attributes["occurred_at"];
            assert_eq!(is_point, zone == "UTC", "{attributes:?}");
            assert!(attributes["ce-time"].ends_with('Z'));
        }
        sent.sort();
        let [never, twice] = expected;
        assert_eq!(sent, [never, never, twice, twice], "{}", relay.log());
    }
}

const FAR: [&str; 6] = [
    "infinity",
    "-infinity",
    "294276-12-31 23:59:59.999999",
    "4713-01-01 00:00:00 BC",
    "10000-01-01 00:00:00",
    "2026-11-26 12:00:00",
];

#[tokio::test(flavor = "multi_thread")]
async fn infinite_and_far_times_are_delivered_and_break_no_command() {
    for (time, more) in [
        ("timestamptz", ""),
        ("timestamp", "time_zone = 'UTC'"),
        ("timestamp", "time_zone = 'local'"),
        ("date", ""),
    ] {
        let world = World::start(&table(time), &["t"], &settings(more)).await;
        let relay = world.run();
        relay.wait_for_log("streaming").await;
        world.database.execute(&insert(&FAR)).await;
        world.wait_until_recorded(6).await;
        world.database.wait_until_confirmed().await;
        relay.stop().await;
        // No relay runs now, so `slot show` computes the age of waiting events from these rows.
        for far in FAR {
            world.database.execute(&insert(&[far])).await;
            let (shown, status) = world.command(&["slot", "show"]);
            assert!(matches!(status, Some(0..=2)), "{far}: {shown}");
            assert!(shown.contains("not recorded yet"), "{far}: {shown}");
            assert!(!shown.contains("error["), "{far}: {shown}");
            let (shown, _) = world.command(&["slot", "show", "--json"]);
            serde_json::from_str::<serde_json::Value>(&shown).unwrap();
        }
        // Add rows that cannot become messages.
        let key = "repeat('k', 2000)";
        let bad = format!(
            "INSERT INTO t (aggregatetype, aggregateid, event_type, created_at) \
             SELECT 'order', {key}, 'Bad', created_at FROM t WHERE event_type IN ('infinity', \
             '294276-12-31 23:59:59.999999')"
        );
        world.database.execute(&bad).await;
        world.database.drop_slot().await;
        let (shown, _) = world.command(&["recover", "--dry-run"]);
        assert!(shown.contains("10 rows"), "{shown}");
        let relay = world.run();
        world.wait_until_recorded(12).await;
        world.database.wait_until_audited().await;
        let (shown, status) = world.command(&["quarantine", "list"]);
        assert_eq!(status, Some(0), "{shown}");
        assert!(shown.contains("4 events"), "{shown}\n{}", relay.log());
        let id = "SELECT event_id::text FROM outbox.dispatch WHERE state = 'quarantined' LIMIT 1";
        let id = world.database.text(id).await;
        for screen in [
            &["quarantine", "show", &id][..],
            &["status"],
            &["status", "--json"],
            &["event", &id],
            &["event", "--since", "1h"],
            &["audit"],
            &["prune", "--older-than", "1d", "--dry-run"],
            &["replay", "--since", "1h", "--dry-run"],
        ] {
            let (shown, status) = world.command(screen);
            assert!(matches!(status, Some(0..=2)), "{screen:?}: {shown}");
            assert!(!shown.contains("error["), "{screen:?}: {shown}");
        }
    }
}

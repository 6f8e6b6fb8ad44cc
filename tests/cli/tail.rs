//! Tests of `postrider tail` without a relay: the test writes dispatch rows, and the command must
//! show each row once.

use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout};
use tokio::time::timeout;

use crate::support::{Database, PATIENCE, assert_contains, command};

/// A running `tail`, and the lines of its output.
struct Tailing {
    lines: Lines<BufReader<ChildStdout>>,
    child: Child,
}

impl Tailing {
    /// Starts the command, and waits for the header of its table.
    async fn start(database: &Database, arguments: &[&str]) -> Self {
        let arguments = [&["tail"], arguments].concat();
        let mut child = command(&arguments, &database.env()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut tailing = Self { lines, child };
        assert_contains(&tailing.line().await, "RECORDED");
        tailing
    }

    async fn line(&mut self) -> String {
        let line = timeout(PATIENCE, self.lines.next_line()).await;
        line.expect("a line appears").unwrap().expect("it runs")
    }

    async fn ended(mut self) -> Option<i32> {
        assert_eq!(self.lines.next_line().await.unwrap(), None);
        self.child.wait().await.unwrap().code()
    }
}

fn id(number: u32) -> String {
    format!("00000000-0000-4000-8000-{number:012}")
}

/// Writes a dispatch row for the position (`commit_lsn`, `ordinal`). The slot of these tests never
/// reaches `FFFF/0`, so events above that position count as not confirmed.
async fn record(database: &Database, commit_lsn: &str, ordinal: u32, number: u32, key: &str) {
    record_in(database, commit_lsn, ordinal, number, key, "order.events").await;
}

async fn record_in(
    database: &Database,
    commit_lsn: &str,
    ordinal: u32,
    number: u32,
    key: &str,
    topic: &str,
) {
    let id = id(number);
    let insert = format!(
        "insert into outbox.dispatch (commit_lsn, committed_at, ordinal, attempts, event_id, state, \
             topic, ordering_key, message_id) \
         values ('{commit_lsn}', now(), {ordinal}, 1, '{id}', 'published', 'projects/p/topics/{topic}', \
             '{key}', '{number}')"
    );
    database.execute(&insert).await;
}

#[tokio::test]
async fn each_record_is_shown_once_whatever_the_order_in_which_they_appear() {
    let database = Database::initialised().await;
    record(&database, "FFFF/10", 1, 1, "a").await;
    let mut tailing = Tailing::start(&database, &["--limit", "5"]).await;
    record(&database, "FFFF/40", 2, 4, "a").await;
    let line = tailing.line().await;
    assert_contains(&line, &id(4));
    assert_contains(&line, "  order.events    a ");
    assert!(line.chars().count() <= 80, "{line}");
    // Events of a slow key may be recorded after later events of other keys, so `tail` must also show earlier
    // positions: first an earlier event of the same commit, then an event of an earlier commit.
    record(&database, "FFFF/40", 1, 2, "b\u{1b}[31m").await;
    let line = tailing.line().await;
    assert_contains(&line, &id(2));
    assert_contains(&line, "  b\\u{1b}[31m ");
    record(&database, "FFFF/30", 1, 3, "a").await;
    assert_contains(&tailing.line().await, &id(3));
    // The event gets another outcome, which `tail` must show. Then the event gets the same outcome again,
    // which `tail` must show too.
    let set_aside = format!(
        "update outbox.dispatch set state = 'quarantined', error = 'event-refused: no', \
             dispatched_at = now() \
         where event_id = '{}'",
        id(2)
    );
    for _ in 0..2 {
        database.execute(&set_aside).await;
        assert_contains(&tailing.line().await, &id(2));
        assert_contains(&tailing.line().await, "    in quarantine since ");
    }
    assert_eq!(tailing.ended().await, Some(0));
}

#[tokio::test]
async fn tail_shows_no_record_below_the_confirmed_position_and_applies_filters() {
    let database = Database::initialised().await;
    let arguments = ["--key", "a", "--topic", "order.events", "--limit", "2"];
    let mut tailing = Tailing::start(&database, &arguments).await;
    // Record the event before the slot confirms the event's position, as a relay does.
    let next = "select (pg_current_wal_lsn() + 1000000)::text";
    record(&database, &database.text(next).await, 1, 1, "a").await;
    assert_contains(&tailing.line().await, &id(1));
    let fill = "create table filler as select repeat('x', 100) from generate_series(1, 20000); \
                select pg_switch_wal()";
    database.execute(fill).await;
    let advance = "select pg_replication_slot_advance($1::text::name, pg_current_wal_lsn())";
    let slot = &database.name;
    database.client.query(advance, &[slot]).await.unwrap();
    // The stream cannot deliver an event below the confirmed position, so `tail` does not show this
    // record.
    record(&database, "0/10", 1, 5, "a").await;
    record(&database, "FFFF/10", 1, 2, "b").await;
    record_in(&database, "FFFF/18", 1, 4, "a", "other.events").await;
    record(&database, "FFFF/20", 1, 3, "a").await;
    assert_contains(&tailing.line().await, &id(3));
    assert_eq!(tailing.ended().await, Some(0));
}

#[tokio::test]
async fn since_shows_earlier_records_and_message_shows_what_was_sent() {
    let database = Database::initialised().await;
    let insert = format!(
        "insert into outbox.events (id, aggregatetype, aggregateid, event_type, payload) \
         values ('{}', 'order', 'a', 'OrderPlaced', '{{\"total\": 17}}')",
        id(1)
    );
    database.execute(&insert).await;
    record(&database, "FFFF/8", 1, 9, "a").await;
    database
        .execute("update outbox.dispatch set committed_at = now() - interval '2 hours'")
        .await;
    record(&database, "FFFF/10", 1, 1, "a").await;
    record(&database, "FFFF/20", 1, 2, "a").await;
    let arguments = ["tail", "--since", "1h", "--message", "--limit", "2"];
    let ran = database.run(&[&arguments[..], &["--json"]].concat()).await;
    ran.assert_status(0);
    let lines: Vec<serde_json::Value> = ran
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines[0]["event_id"], id(1));
    assert_eq!(lines[0]["message_id"], "1");
    assert_eq!(lines[0]["message"]["data"], "{\"total\": 17}");
    let attributes = &lines[0]["message"]["attributes"];
    assert_eq!(attributes["event_type"], "OrderPlaced");
    assert_eq!(attributes["event_id"], id(1));
    // The second record has no row in the outbox, so the command has no message to show.
    assert_eq!(lines[1]["event_id"], id(2));
    assert_eq!(lines[1].get("message"), Some(&serde_json::Value::Null));

    let ran = database.run(&arguments).await;
    assert_contains(&ran.stdout, "    event_type: OrderPlaced\n");
    assert_contains(&ran.stdout, "    {\"total\": 17}\n");
    assert_contains(
        &ran.stdout,
        "(no message: the row was deleted, or cannot be mapped)",
    );
}

#[tokio::test]
async fn tail_says_why_some_or_all_records_do_not_appear() {
    let database = Database::initialised().await;
    let fill = "insert into outbox.dispatch (commit_lsn, committed_at, ordinal, attempts, event_id, \
                    state, message_id) \
                select 'FFFF/10', now(), i, 1, gen_random_uuid(), 'published', i::text \
                from generate_series(1, 10001) i";
    database.execute(fill).await;
    record(&database, "FFFF/20", 1, 1, "a").await;
    let arguments = ["tail", "--since", "1h", "--limit", "10002", "--json"];
    let ran = database.run(&arguments).await;
    ran.assert_status(0);
    assert_eq!(ran.stdout.lines().count(), 10_002);
    let arguments = [
        ("POSTRIDER_DISPATCH", "exceptions"),
        ("POSTRIDER_SLOT", "another"),
    ];
    let args = ["tail", "--since", "1h", "--limit", "1"];
    let ran = database.run_with(&args, &arguments).await;
    assert_contains(&ran.stderr, "only events that were quarantined appear");
    assert_contains(&ran.stderr, "this server does not have the relay's slot");
    // The slot never reaches the positions of these records, as if an undelivered event held it back. `tail` must
    // say how many records wait for the slot.
    let mut tailing = Tailing::start(&database, &["--limit", "1"]).await;
    record(&database, "FFFF/10", 10_002, 3, "a").await;
    assert_contains(&tailing.line().await, &id(3));
    let stderr = tailing.child.stderr.take();
    assert_eq!(tailing.ended().await, Some(0));
    let mut noted = String::new();
    stderr.unwrap().read_to_string(&mut noted).await.unwrap();
    assert_contains(&noted, "more than 10,000 records wait for the slot");
    assert!(!noted.contains("are skipped"), "{noted}");
    // Insert more records than one poll of `tail` reads.
    let mut tailing = Tailing::start(&database, &["--limit", "10000"]).await;
    database.execute(&fill.replace("FFFF/10", "FFFF/40")).await;
    let stderr = tailing.child.stderr.take();
    for _ in 0..10_000 {
        tailing.line().await;
    }
    assert_eq!(tailing.ended().await, Some(0));
    let mut noted = String::new();
    stderr.unwrap().read_to_string(&mut noted).await.unwrap();
    assert_contains(&noted, "the oldest are skipped");
}

#[tokio::test]
async fn a_lost_connection_shows_no_record_twice_and_misses_none() {
    const LOSE: &str = "select count(pg_terminate_backend(pid)) from pg_stat_activity \
                        where application_name = 'postrider tail' and datname = current_database()";
    let database = Database::initialised().await;
    let mut tailing = Tailing::start(&database, &["--message", "--limit", "22"]).await;
    record(&database, "FFFF/10", 1, 1, "a").await;
    assert_contains(&tailing.line().await, &id(1));
    for round in 0..3_u32 {
        // Pause for different times, so that in some rounds the connection is lost between two
        // polls.
        tokio::time::sleep(Duration::from_millis(u64::from(round) * 170)).await;
        let first = 2 + round * 7;
        for number in first..first + 7 {
            if number == first + 3 {
                assert!(database.number(LOSE).await > 0);
            }
            record(&database, "FFFF/20", number, number, "a").await;
        }
        for number in first..first + 7 {
            let mut line = tailing.line().await;
            while line.contains("(no message") {
                line = tailing.line().await;
            }
            assert_contains(&line, &id(number));
        }
    }
    let stderr = tailing.child.stderr.take();
    assert_contains(&tailing.line().await, "(no message");
    assert_eq!(tailing.ended().await, Some(0));
    let mut told = String::new();
    stderr.unwrap().read_to_string(&mut told).await.unwrap();
    assert_eq!(told.lines().count(), 3, "{told}");
    assert!(
        told.lines().all(|line| line.contains("reconnecting")),
        "{told}"
    );
}

//! Tests the HTTP port in three cases: the relay streams, Pub/Sub has an outage, or the relay is a
//! standby.

use std::sync::atomic::{AtomicU32, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::harness::{self, Database, Relay, eventually, insert_orders};
use crate::page::ask;

/// A free address for a relay's HTTP port, a different address on each call. The port is outside the
/// range from which the system assigns ports automatically.
pub(crate) fn free_addr() -> String {
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    let addrs = std::iter::repeat_with(|| {
        let next = std::process::id() * 97 + GIVEN.fetch_add(1, Ordering::Relaxed);
        format!("127.0.0.1:{}", 10_000 + next % 5_000)
    });
    let is_free = |addr: &String| std::net::TcpListener::bind(addr).is_ok();
    addrs.take(5_000).find(is_free).unwrap()
}

/// Returns the status code and the body of a GET. Returns `None` if the server does not answer.
pub(crate) async fn get(addr: &str, path: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(addr).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await.ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
}

/// Returns the value of a metric in `/metrics`. `name` is the name of the metric, optionally followed
/// by a space and a text that its labels must contain. Returns `None` if no line matches.
pub(crate) async fn metric(addr: &str, name: &str) -> Option<f64> {
    let (name, label) = name.split_once(' ').unwrap_or((name, ""));
    let (_, text) = get(addr, "/metrics").await?;
    let name = format!("{name}{{");
    let mut lines = text.lines();
    let line = lines.find(|line| line.starts_with(&name) && line.contains(label))?;
    line.rsplit(' ').next()?.parse().ok()
}

pub(crate) async fn wait_for(addr: &str, path: &str, code: u16) -> String {
    eventually(&format!("{path} answers {code}"), || async {
        get(addr, path)
            .await
            .filter(|(found, _)| *found == code)
            .map(|(_, body)| body)
    })
    .await
}

/// Accept headers, and whether the answer to each is in the OpenMetrics format. The first one is that of
/// Prometheus.
const ACCEPT: [(&str, bool); 10] = [
    (
        "Accept: application/openmetrics-text;version=1.0.0;q=0.5,\
         application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2\r\n",
        true,
    ),
    ("", false),
    ("Accept: */*\r\n", false),
    ("Accept: text/plain\r\n", false),
    ("Accept: Application/OpenMetrics-Text, text/plain\r\n", true),
    (
        "Accept: application/openmetrics-text;q=0.5, text/plain;q=0.6\r\n",
        false,
    ),
    (
        "Accept: application/openmetrics-text; Q=0.5, text/plain; Q=0.6\r\n",
        false,
    ),
    ("Accept: application/openmetrics-text;q=0\r\n", false),
    (
        "Accept: text/plain;q=0.1\r\nAccept: application/openmetrics-text;q=0.2\r\n",
        true,
    ),
    (
        "Accept: application/openmetrics-text-2, text/html\r\n",
        false,
    ),
];

#[tokio::test(flavor = "multi_thread")]
async fn the_port_shows_phase_lag_and_counts_and_a_pubsub_outage_leaves_the_relay_alive() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let (addr, host) = (free_addr(), emulator.addr().to_string());
    let relay = Relay::start_with(&database, &host, &[("POSTRIDER_HTTP_ADDR", &addr)]);
    wait_for(&addr, "/readyz", 200).await;
    insert_orders(&database, 50, 5).await;
    database.wait_until_recorded().await;
    let metrics = wait_for(&addr, "/metrics", 200).await;
    let (as_text, as_openmetrics) = (
        "# TYPE postrider_events_published_total counter\n",
        "# TYPE postrider_events_published counter\n",
    );
    assert!(metrics.contains(as_text) && !metrics.contains("# EOF"));
    for (accept, is_openmetrics) in ACCEPT {
        let (_, answer) = ask(&addr, "/metrics", &format!("Host: x\r\n{accept}")).await;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let (content_type, part) = if is_openmetrics {
            (
                "application/openmetrics-text; version=1.0.0",
                as_openmetrics,
            )
        } else {
            ("text/plain; version=0.0.4", as_text)
        };
        assert!(head.contains(&format!("content-type: {content_type}; charset=utf-8")));
        assert!(body.contains(part), "{accept}: {answer}");
        assert_eq!(body.ends_with("# EOF\n"), is_openmetrics, "{accept}");
    }
    let slot = database.slot();
    for (name, value) in [("events_published_total", 50), ("holds_slot", 1)] {
        let line = format!("postrider_{name}{{slot=\"{slot}\"}} {value}\n");
        assert!(metrics.contains(&line), "{line} in\n{metrics}");
    }
    // The relay learns only a little later that its records are durable, so the port shows them
    // with a delay.
    let status = eventually("the port shows the records", || async {
        let (_, body) = get(&addr, "/status").await?;
        let status: serde_json::Value = serde_json::from_str(&body).ok()?;
        (status["events_recorded"] == 50 && status["lag_seconds"] == 0.0).then_some(status)
    })
    .await;
    assert_eq!(status["state"], "streaming");
    let batches = metric(&addr, "postrider_publish_batch_events_sum").await;
    assert_eq!(batches, Some(50.0), "every event is in a request");

    emulator.faults().refuse_connections(true);
    emulator.faults().reset_connections();
    insert_orders(&database, 10, 5).await;
    relay.wait_for_log("pubsub-unreachable").await;
    assert_eq!(
        get(&addr, "/livez").await.unwrap().0,
        200,
        "an outage is no reason to restart"
    );
    assert_eq!(get(&addr, "/readyz").await.unwrap().0, 200);
    eventually("the lag grows", || async {
        let (_, body) = get(&addr, "/status").await?;
        let status: serde_json::Value = serde_json::from_str(&body).ok()?;
        (status["lag_seconds"].as_f64()? > 0.5).then_some(())
    })
    .await;

    let standby_addr = free_addr();
    let _standby = Relay::start_with(&database, &host, &[("POSTRIDER_HTTP_ADDR", &standby_addr)]);
    let body = eventually("the second relay is on standby", || async {
        let (code, body) = get(&standby_addr, "/readyz").await?;
        (code == 200 && body.contains("standby")).then_some(body)
    })
    .await;
    assert!(body.contains("held by"), "{body}");
    assert_eq!(get(&addr, "/nothing").await.unwrap().0, 404);
}

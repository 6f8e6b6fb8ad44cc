//! Tests in which hostile clients connect to the HTTP port. The port reveals no secrets, and keeps
//! answering probes no matter what clients send or leave out.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::harness::{self, Database, Relay};
use crate::http::{free_addr, get, wait_for};

/// The longest time that a probe may wait for its answer. Generous, because machines are shared.
const PROMPT: Duration = Duration::from_secs(3);
/// Maximum number of connections of the HTTP port. The same value as in src/http/listener.rs.
const CONNECTIONS_MAX: usize = 64;
/// Time after which the HTTP port closes a connection. The same value as in src/http/listener.rs.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// Starts a relay and waits until it is ready. Also returns the address of its HTTP port.
async fn relay(database: &Database, emulator: &str) -> (Relay, String) {
    let addr = free_addr();
    let relay = Relay::start_with(database, emulator, &[("POSTRIDER_HTTP_ADDR", &addr)]);
    wait_for(&addr, "/readyz", 200).await;
    (relay, addr)
}

/// Checks that the HTTP port answers a liveness probe in time.
async fn assert_alive(addr: &str, after: &str) {
    let began = Instant::now();
    let answer = tokio::time::timeout(PROMPT, get(addr, "/livez")).await;
    let (code, _) = answer
        .unwrap_or_else(|_| panic!("no answer within {PROMPT:?} after {after}"))
        .unwrap_or_else(|| panic!("no answer after {after}"));
    assert_eq!(code, 200, "after {after}, in {:?}", began.elapsed());
}

/// Sends `bytes` and reads the answer until the server closes the connection.
async fn send(addr: &str, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    // Ignore an error, because the server is allowed to close the connection while we are still writing.
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    let reading = stream.read_to_end(&mut answer);
    let _ = tokio::time::timeout(CONNECTION_TIMEOUT + PROMPT, reading)
        .await
        .expect("the server closes the connection");
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_is_refused_and_the_next_request_is_answered() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let (_relay, addr) = relay(&database, &emulator.addr().to_string()).await;
    let head = |headers: &str| format!("GET /livez HTTP/1.1\r\nHost: x\r\n{headers}\r\n");
    let long_path = format!("GET /{} HTTP/1.1\r\nHost: x\r\n\r\n", "a".repeat(1 << 20));
    let cases: [(&str, Vec<u8>); 12] = [
        ("zeroes", vec![0; 100_000]),
        ("every byte", (0..=255).cycle().take(100_000).collect()),
        (
            "a TLS handshake",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".repeat(50),
        ),
        (
            "HTTP/2",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec(),
        ),
        ("an endless path", long_path.into_bytes()),
        (
            "a huge header",
            head(&format!("x: {}\r\n", "y".repeat(1 << 20))).into(),
        ),
        ("many headers", head(&"x: y\r\n".repeat(10_000)).into()),
        (
            "two lengths",
            head("Content-Length: 1\r\nContent-Length: 2\r\n").into(),
        ),
        ("a negative length", head("Content-Length: -1\r\n").into()),
        (
            "a broken chunk",
            head("Transfer-Encoding: chunked\r\n\r\nZZ\r\n").into(),
        ),
        ("line feeds", b"\n".repeat(100_000)),
        (
            "a huge body",
            [
                head("Content-Length: 10000000\r\n").into(),
                vec![b'z'; 10_000_000],
            ]
            .concat(),
        ),
    ];
    for (what, bytes) in cases {
        let answer = String::from_utf8_lossy(&send(&addr, &bytes).await).into_owned();
        let is_answer = answer.is_empty() || answer.starts_with("HTTP/1.1 ");
        assert!(is_answer, "{what}: {answer:?}");
        assert!(!answer.contains("HTTP/1.1 5"), "{what}: {answer}");
        assert_alive(&addr, what).await;
    }
    let refused = send(&addr, head(&"x: y\r\n".repeat(200)).as_bytes()).await;
    assert!(
        refused.starts_with(b"HTTP/1.1 431"),
        "{}",
        String::from_utf8_lossy(&refused)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_clients_lose_their_connections_and_keep_nobody_out() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let (relay, addr) = relay(&database, &emulator.addr().to_string()).await;
    let before = relay.open_files();
    let mut slow = Vec::new();
    for n in 0..5 * CONNECTIONS_MAX {
        let mut stream = TcpStream::connect(&addr).await.unwrap();
        // Half of the clients send nothing. The others begin a request and never end it.
        if n % 2 == 0 {
            let _ = stream.write_all(b"GET /status HTTP/1.1\r\nHost: ").await;
        }
        slow.push(stream);
        if n % CONNECTIONS_MAX == CONNECTIONS_MAX - 1 {
            assert_alive(&addr, &format!("{n} slow connections")).await;
        }
    }
    // The server closes the old connections that newer ones have replaced, but only after a short delay.
    let bound = before + CONNECTIONS_MAX + 8;
    harness::eventually("the oldest connections are closed", || async {
        (relay.open_files() <= bound).then_some(())
    })
    .await;
    // No newer connection has replaced this one. The server closes it at the timeout, although its client
    // keeps sending.
    let mut youngest = slow.pop().unwrap();
    let began = Instant::now();
    let mut answer = Vec::new();
    loop {
        let reading = youngest.read_buf(&mut answer);
        match tokio::time::timeout(Duration::from_millis(500), reading).await {
            Ok(Ok(0) | Err(_)) => break,
            Ok(Ok(_)) => {}
            Err(_) => {
                let _ = youngest.write_all(b"a").await;
            }
        }
        assert!(
            began.elapsed() < CONNECTION_TIMEOUT + PROMPT,
            "a slow client is still there"
        );
    }
    drop(slow);
    assert_alive(&addr, "the slow clients").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_port_shows_no_setting_role_key_or_payload() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    database
        .execute(
            "CREATE ROLE visible_role LOGIN REPLICATION PASSWORD 'visible_password' \
             IN ROLE postrider_relay",
        )
        .await;
    let url = database
        .url
        .replace("postgres@", "visible_role:visible_password@");
    let host = emulator.addr().to_string();
    let (addr, standby_addr) = (free_addr(), free_addr());
    let run = |addr: &str| {
        let more = [
            ("POSTRIDER_HTTP_ADDR", addr),
            ("DATABASE_URL", url.as_str()),
        ];
        Relay::start_with(&database, &host, &more)
    };
    let _relay = run(&addr);
    wait_for(&addr, "/readyz", 200).await;
    let _standby = run(&standby_addr);
    harness::eventually("the second relay is on standby", || async {
        let (_, body) = get(&standby_addr, "/readyz").await?;
        body.contains("standby").then_some(())
    })
    .await;
    database
        .execute(
            "SELECT outbox.emit('order', 'visible_key', 'VisibleType', \
                 '{\"visible\": \"visible_payload\"}', '{\"visible_header\": \"visible_value\"}')",
        )
        .await;
    database.wait_until_recorded().await;
    let secrets = [
        "visible",
        "Visible",
        "127.0.0.1",
        "localhost",
        "order.events",
        "outbox",
        env!("CARGO_PKG_VERSION"),
        "server:",
    ];
    for addr in [&addr, &standby_addr] {
        for path in [
            "/",
            "/livez",
            "/readyz",
            "/status",
            "/metrics",
            "/etc/passwd",
            "/%2e%2e/",
        ] {
            let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
            let answer = send(addr, request.as_bytes()).await;
            let answer = String::from_utf8(answer).unwrap();
            assert!(answer.starts_with("HTTP/1.1 "), "{path}");
            // The metric about the build may show the version, so leave it out.
            let lines = answer.lines();
            let lines = lines.filter(|line| !line.starts_with("postrider_build_info{"));
            let answer = lines.collect::<Vec<_>>().join("\n");
            for secret in secrets {
                assert!(!answer.contains(secret), "{path} shows {secret}:\n{answer}");
            }
        }
    }
}

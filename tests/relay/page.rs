//! Tests of the web page on the HTTP port: who may read its data, what a real browser shows, and how it looks
//! (`looks`).
//!
//! The browser is Chromium, found by the name `chromium` or by POSTRIDER_CHROMIUM; `make test` installs it
//! in CI. Without Chromium, the tests in a browser are skipped.

mod browser;
mod looks;

use std::ffi::OsString;
use std::path::Path;

use pubsub_emulator::{Action, Fault};
use scratch_postgres::ScratchPostgres;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::Code;

use crate::harness::{self, Database, Relay, eventually, insert_orders};
use crate::http::{free_addr, get, wait_for};
use browser::{Browser, Screen};

/// Returns the status code and the whole answer, with its headers, of a GET with `headers`.
pub(crate) async fn ask(addr: &str, path: &str, headers: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let code = text.split(' ').nth(1).and_then(|code| code.parse().ok());
    (code.unwrap(), text)
}

#[tokio::test(flavor = "multi_thread")]
async fn data_needs_a_local_host_name_or_the_token() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let (addr, host) = (free_addr(), emulator.addr().to_string());
    let relay = Relay::start_with(&database, &host, &[("POSTRIDER_HTTP_ADDR", &addr)]);
    wait_for(&addr, "/readyz", 200).await;
    for path in ["/history", "/overview", "/errors", "/events?id=1"] {
        assert_eq!(
            ask(&addr, path, "Host: localhost\r\n").await.0,
            200,
            "{path}"
        );
        assert_eq!(
            ask(&addr, path, "Host: evil.example\r\n").await.0,
            403,
            "{path}"
        );
    }
    let (_, page) = ask(&addr, "/", "Host: localhost\r\n").await;
    assert!(
        page.contains("content-security-policy: default-src 'none'"),
        "{page}"
    );
    relay.stop().await;

    let token = "s3cret-t0ken-of-16";
    let settings = [
        ("POSTRIDER_HTTP_ADDR", addr.as_str()),
        ("POSTRIDER_HTTP_TOKEN", token),
    ];
    let relay = Relay::start_with(&database, &host, &settings);
    wait_for(&addr, "/readyz", 200).await;
    let host_header = "Host: relay.example\r\n";
    for (given, code) in [("", 401), ("Authorization: Bearer wrong\r\n", 401)] {
        let headers = format!("{host_header}{given}");
        assert_eq!(ask(&addr, "/overview", &headers).await.0, code, "{given}");
    }
    assert_eq!(ask(&addr, "/events?id=1", host_header).await.0, 401);
    let headers = format!("{host_header}Authorization: Bearer {token}\r\n");
    assert_eq!(ask(&addr, "/overview", &headers).await.0, 200);
    let (code, found) = ask(&addr, "/events?id=1", &headers).await;
    assert!(code == 200 && found.ends_with("{\"events\":[]}"), "{found}");
    assert_eq!(ask(&addr, "/events?id=", &headers).await.0, 400);
    one_search_at_a_time(&database, &addr, &headers).await;
    assert!(!relay.log().contains(token));
    relay.stop().await;

    // On a port that listens on all addresses, everybody could read the page without a token. So the page
    // must be off there if no token is set, but probes must still work.
    let everywhere = addr.replace("127.0.0.1", "0.0.0.0");
    let _relay = Relay::start_with(&database, &host, &[("POSTRIDER_HTTP_ADDR", &everywhere)]);
    wait_for(&addr, "/readyz", 200).await;
    let (code, text) = get(&addr, "/").await.unwrap();
    assert!(code == 404 && text.contains("http_token"), "{code} {text}");
    for path in ["/overview", "/events?id=1"] {
        assert_eq!(get(&addr, path).await.unwrap().0, 404, "{path}");
    }
}

/// Checks that the relay refuses other searches while one search hangs, and that the hanging search
/// ends with an error code.
async fn one_search_at_a_time(database: &Database, addr: &str, headers: &str) {
    let lock = "begin; lock table outbox.dispatch in access exclusive mode";
    database.client.batch_execute(lock).await.unwrap();
    let (one, other) = tokio::join!(
        ask(addr, "/events?key=a", headers),
        ask(addr, "/events?id=1", headers)
    );
    // The search that the relay receives first hangs, and the other search is refused.
    let (hanging, refused) = if one.0 == 429 {
        (other, one)
    } else {
        (one, other)
    };
    assert_eq!(refused.0, 429, "{}", refused.1);
    assert!(
        refused.1.contains("try again in a few seconds"),
        "{}",
        refused.1
    );
    assert_eq!(hanging.0, 200);
    assert!(
        hanging.1.contains("\"code\":\"postgres-timeout\""),
        "{}",
        hanging.1
    );
    database.client.batch_execute("rollback").await.unwrap();
    assert_eq!(ask(addr, "/events?key=a", headers).await.0, 200);
}

/// A text in the payload and in the headers of an event.
const PAYLOAD: &str = "s3cret-payload";

/// The Chromium executable.
fn program() -> OsString {
    std::env::var_os("POSTRIDER_CHROMIUM").unwrap_or_else(|| "chromium".into())
}

/// Returns the path of a folder that does not exist yet, for the profile of a browser.
fn profile_folder() -> std::path::PathBuf {
    let name = format!(
        "postrider-chromium-{}-{:?}",
        std::process::id(),
        std::time::Instant::now()
    );
    let name: String = name.chars().filter(char::is_ascii_alphanumeric).collect();
    std::env::temp_dir().join(name)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_browser_shows_state_graphs_topics_and_quarantine_without_running_what_rows_contain() {
    let server = ScratchPostgres::builder().setting("max_slot_wal_keep_size", "1GB");
    let database = Database::on(server.start().unwrap()).await;
    let emulator = harness::emulator().await;
    let (addr, host) = (free_addr(), emulator.addr().to_string());
    let _relay = Relay::start_with(&database, &host, &[("POSTRIDER_HTTP_ADDR", &addr)]);
    insert_orders(&database, 200, 5).await;
    database.wait_until_recorded().await;
    // Insert a bad event whose key is a script.
    let script = "<script>document.title=\"owned\"</script>";
    let bad = format!(
        "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload, headers) \
         VALUES ('order', '{script}', 'Bad', '\"{PAYLOAD}\"', \
             jsonb_build_object('x', '{PAYLOAD}' || repeat('y', 2000)))"
    );
    database.execute(&bad).await;
    let refused = Fault::new(Action::Fail(Code::PermissionDenied)).on_topic("order.events");
    database.wait_until_recorded().await;
    emulator.faults().inject(refused);
    insert_orders(&database, 30, 3).await;
    eventually("the relay is blocked", || async {
        let (_, body) = get(&addr, "/status").await?;
        body.contains("\"state\":\"blocked-on-pubsub\"")
            .then_some(())
    })
    .await;
    eventually("the overview shows the blocked relay", || async {
        let (_, body) = ask(&addr, "/overview", "Host: localhost\r\n").await;
        body.contains("\"state\":\"blocked-on-pubsub\"")
            .then_some(())
    })
    .await;
    // Write WAL until the relay can estimate when the slot is lost. The slot keeps this WAL, because the relay
    // is blocked.
    let fill = "SELECT pg_logical_emit_message(false, 'filler', repeat('x', 100000))";
    eventually("the time until the slot is lost is known", || async {
        database.execute(fill).await;
        let (_, body) = ask(&addr, "/history", "Host: localhost\r\n").await;
        (!body.contains("\"loss_in_seconds\":null")).then_some(())
    })
    .await;
    never_shows_payloads(&addr, script).await;
    let url = format!("http://{addr}/");
    let Some(mut browser) = Browser::start() else {
        println!("SKIPPED: there is no Chromium (apt-get install chromium)");
        return;
    };
    browser.open(&url, "document.readyState === 'complete'");
    let parts = [
        "blocked on pubsub</span>",
        "pubsub-permission for",
        "30 events waiting",
        "key o-1: 10 events, the oldest",
        "1 event, the oldest",
        "roles/pubsub.publisher",
        "&lt;script&gt;",
        "event-invalid",
        "<polyline",
        "WAL until the slot is lost",
        "Publication</dt><dd>covers all rows",
    ];
    wait_for_html(&mut browser, &parts);
    shows_errors_and_the_time_to_a_loss(&mut browser);
    if let Some(folder) = std::env::var_os("POSTRIDER_SCREENSHOTS") {
        screenshots(&mut browser, Path::new(&folder));
    }
    finds_events(&mut browser, &database, &url, script).await;
}

/// Checks that no answer of the port contains the payload or the headers of an event.
async fn never_shows_payloads(addr: &str, key: &str) {
    let key: String = key.bytes().map(|byte| format!("%{byte:02x}")).collect();
    let by_key = format!("/events?key={key}");
    let (_, found) = ask(addr, &by_key, "Host: localhost\r\n").await;
    let (_, rest) = found.split_once("\"event_id\":\"").expect("an event");
    let by_id = format!("/events?id={}", &rest[..36]);
    for path in [
        "/overview",
        "/errors",
        "/history",
        "/status",
        "/metrics",
        "/readyz",
        &by_key,
        &by_id,
    ] {
        let (code, answer) = ask(addr, path, "Host: localhost\r\n").await;
        assert!([200, 503].contains(&code), "{path}: {answer}");
        assert!(!answer.contains(PAYLOAD), "{path}: {answer}");
    }
    assert!(found.contains("event-invalid"), "{found}");
}

/// Waits until the page shows the recent error with its hint, and the estimated time until the slot is lost.
fn shows_errors_and_the_time_to_a_loss(browser: &mut Browser) {
    for (id, parts) in [
        (
            "errors",
            &["pubsub-permission, ", "grant roles/pubsub.publisher"][..],
        ),
        ("facts", &["MB, in about ", " at the present rate"]),
    ] {
        for part in parts {
            let part = serde_json::json!(part);
            browser.wait_for(&format!(
                "document.getElementById('{id}').innerText.includes({part})"
            ));
        }
    }
}

/// Waits until the HTML of the page contains each of `parts`, and checks that the page did not run a
/// script that is in the text of a key.
fn wait_for_html(browser: &mut Browser, parts: &[&str]) {
    for part in parts {
        browser.wait_for(&format!(
            "document.documentElement.outerHTML.includes({})",
            serde_json::json!(part)
        ));
    }
    let title = browser.value_of("document.title");
    assert_ne!(title, "owned", "a key was run as a script");
}

/// Checks that the page finds one event by its id, and the events of a key. The fragment of the URL
/// contains the search.
async fn finds_events(browser: &mut Browser, database: &Database, url: &str, script: &str) {
    let published =
        "select d.event_id::text from outbox.dispatch d where d.state = 'published' limit 1";
    let id = database.text(published).await;
    let key: String = script.bytes().map(|byte| format!("%{byte:02x}")).collect();
    let id_parts = [
        &format!("<p>{id}</p>"),
        "<p>published as message ",
        "order.events",
    ];
    let searches: [(String, &[&str]); 3] = [
        (format!("id={id}"), &id_parts),
        (format!("key={key}"), &["<p>in quarantine since "]),
        ("id=none".into(), &["No event found with this id."]),
    ];
    for (search, parts) in searches {
        // A change of the fragment alone does not load the page again, so open another page in between.
        browser.open("about:blank", "location.href === 'about:blank'");
        browser.open(&format!("{url}#{search}"), "location.protocol === 'http:'");
        wait_for_html(browser, parts);
    }
}

/// Writes the screenshots for the docs to `folder`.
fn screenshots(browser: &mut Browser, folder: &Path) {
    for (name, width, height, scheme) in [
        ("page-wide.png", 1280, 1400, "light"),
        ("page-dark.png", 1280, 1400, "dark"),
        ("page-phone.png", 500, 1800, "light"),
    ] {
        browser.prefer_scheme(scheme);
        browser.set_screen(Screen {
            width,
            height,
            is_phone: width < 700,
        });
        browser.screenshot(&folder.join(name));
    }
    browser.prefer_scheme("light");
}

//! Checks how the page looks in a real browser: on a phone, in both colour schemes, and with the keyboard
//! alone.

use pubsub_emulator::{Action, Fault};
use serde_json::{Value, json};
use tonic::Code;

use super::ask;
use super::browser::{Browser, Screen};
use crate::harness::{self, Database, Relay, eventually, insert_orders};
use crate::http::{free_addr, wait_for};

/// The JavaScript functions that the tests call on the page.
const FUNCTIONS: &str = include_str!("looks.js");

/// JavaScript expression that is true when the page shows all data of the relay: the graphs, a failing
/// topic and the quarantine.
const IS_FULL: &str = "document.querySelectorAll('figure').length === 6 && \
    document.querySelectorAll('#topics article').length > 0 && \
    document.querySelectorAll('#quarantine article').length > 0";

const DESK: Screen = Screen {
    width: 1280,
    height: 900,
    is_phone: false,
};

/// A relay with a failing topic, and with quarantined events whose keys are long. Dropping this value
/// stops the relay.
struct Troubled {
    database: Database,
    _emulator: pubsub_emulator::RunningEmulator,
    _relay: Relay,
    url: String,
}

impl Troubled {
    async fn start(settings: &[(&str, &str)]) -> Self {
        let database = Database::start().await;
        let emulator = harness::emulator().await;
        let (addr, host) = (free_addr(), emulator.addr().to_string());
        let settings = [&[("POSTRIDER_HTTP_ADDR", addr.as_str())], settings].concat();
        let relay = Relay::start_with(&database, &host, &settings);
        insert_orders(&database, 200, 5).await;
        let bad = "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, headers) \
                   SELECT 'order', repeat(letter, 900), 'Bad', jsonb_build_object('x', repeat('y', 2000)) \
                   FROM (VALUES ('k'), ('WW/')) keys (letter)";
        database.execute(bad).await;
        database.wait_until_recorded().await;
        let refused = Fault::new(Action::Fail(Code::PermissionDenied)).on_topic("order.events");
        emulator.faults().inject(refused);
        insert_orders(&database, 30, 3).await;
        eventually("the relay is blocked", || async {
            let (_, body) = ask(&addr, "/status", "Host: localhost\r\n").await;
            body.contains("\"state\":\"blocked-on-pubsub\"")
                .then_some(())
        })
        .await;
        wait_for(&addr, "/livez", 200).await;
        Self {
            database,
            _emulator: emulator,
            _relay: relay,
            url: format!("http://{addr}/"),
        }
    }
}

/// Starts a browser. Returns `None` if Chromium is not installed, and the test is then skipped.
fn browser() -> Option<Browser> {
    let browser = Browser::start();
    if browser.is_none() {
        println!("SKIPPED: there is no Chromium (apt-get install chromium)");
    }
    browser
}

/// Calls a function of `looks.js` on the page.
fn call(browser: &mut Browser, function: &str) -> Value {
    browser.value_of(&format!("{{ {FUNCTIONS}\n{function}() }}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_cut_off_on_a_phone() {
    let Some(mut browser) = browser() else { return };
    let relay = Troubled::start(&[]).await;
    for width in [320, 360, 430, 768, 1280] {
        browser.set_screen(Screen {
            width,
            height: 800,
            is_phone: width < 700,
        });
        browser.open(&relay.url, IS_FULL);
        assert_eq!(call(&mut browser, "clipped"), json!([]), "{width}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_text_can_be_read_in_the_light_and_in_the_dark() {
    let Some(mut browser) = browser() else { return };
    let relay = Troubled::start(&[]).await;
    let mut backs = Vec::new();
    for scheme in ["light", "dark"] {
        browser.prefer_scheme(scheme);
        browser.open(&relay.url, IS_FULL);
        // The colours depend on the severity, so show every severity.
        for severity in ["ok", "info", "warning", "error"] {
            let show = format!("document.getElementById('word').className = 'word {severity}'");
            browser.value_of(&show);
            assert_eq!(
                call(&mut browser, "faint"),
                json!([]),
                "{scheme} {severity}"
            );
        }
        let back = browser.value_of("getComputedStyle(document.body).backgroundColor");
        backs.push(back);
    }
    assert_ne!(backs[0], backs[1], "the page does not have two schemes");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_keyboard_reaches_every_control_and_searches() {
    let Some(mut browser) = browser() else { return };
    let relay = Troubled::start(&[]).await;
    browser.set_screen(DESK);
    for scheme in ["light", "dark"] {
        browser.prefer_scheme(scheme);
        browser.open(&relay.url, IS_FULL);
        let expected = call(&mut browser, "controls");
        assert!(expected.as_array().unwrap().len() >= 5, "{expected}");
        let mut reached = Vec::new();
        for _ in expected.as_array().unwrap() {
            browser.press("Tab");
            let focused = call(&mut browser, "focused");
            assert_eq!(focused["shows"], true, "no focus shows: {focused}");
            reached.push(focused["name"].clone());
        }
        assert_eq!(json!(reached), expected);
    }
    browser.open(&relay.url, IS_FULL);
    tab_to(&mut browser, "day");
    browser.press("Space");
    browser.wait_for("document.getElementById('day').getAttribute('aria-pressed') === 'true'");
    let id = "SELECT event_id::text FROM outbox.dispatch WHERE state = 'published' LIMIT 1";
    let id = relay.database.text(id).await;
    tab_to(&mut browser, "wanted");
    browser.write(&id);
    browser.press("Enter");
    let found = "document.getElementById('found').innerText";
    browser.wait_for(&format!("{found}.includes('published as message')"));
    assert_eq!(
        browser.value_of("location.hash"),
        json!(format!("#id={id}"))
    );
    // A user must be able to reach the search for a key by keyboard, too.
    tab_to(&mut browser, "Newest events of this key");
    browser.press("Enter");
    browser.wait_for(&format!("{found}.includes('No event with this key')"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_keyboard_opens_a_page_with_a_token() {
    let Some(mut browser) = browser() else { return };
    let relay = Troubled::start(&[("POSTRIDER_HTTP_TOKEN", "s3cret-t0ken-of-16-or-more")]).await;
    let asks = "document.getElementById('login')?.checkVisibility() === true";
    for scheme in ["light", "dark"] {
        browser.prefer_scheme(scheme);
        browser.set_screen(Screen {
            width: 320,
            height: 700,
            is_phone: true,
        });
        browser.open(&relay.url, asks);
        assert_eq!(call(&mut browser, "faint"), json!([]), "{scheme}");
        assert_eq!(call(&mut browser, "clipped"), json!([]), "{scheme}");
    }
    tab_to(&mut browser, "token");
    browser.write("s3cret-t0ken-of-16-or-more");
    browser.press("Enter");
    browser.wait_for(IS_FULL);
    assert_eq!(browser.value_of(asks), false);
}

/// Presses Tab until the control has the focus. Panics if 20 presses are not enough.
fn tab_to(browser: &mut Browser, control: &str) {
    for _ in 0..20 {
        if call(browser, "focused")["name"] == control {
            return;
        }
        browser.press("Tab");
    }
    panic!("Tab does not reach {control}");
}

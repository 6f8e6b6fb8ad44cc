//! Serves the page for operators: condition, graphs, failing topics, quarantine, recent errors, and a search
//! for events. The page is read-only, and its files are compiled into the program.
//!
//! The page shows more than `/metrics` and `/status`: names of keys and events, and messages of errors.
//! So the relay serves the data of the page only on a loopback address, or to those who know
//! `http_token`. On a loopback address without a token, the request must also name a loopback host.
//! Otherwise the owner of a foreign web site could read the data through a host name of that site (DNS
//! rebinding). The page never shows a payload.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Query, Request, State as Shared};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Json, Response};
use axum::routing::get;
use axum::{Router, middleware};
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;

use super::Port;
use super::history::HistoryJson;
use crate::error::{Code, Error, Result};
use crate::ops::event::{EventQuery, find, list};
use crate::ops::rights::{self, Purpose};
use crate::ops::since::Since;
use crate::ops::slot::VerdictJson;
use crate::ops::status::RelayStatus;
use crate::postgres::{connect, connect_patiently};
use crate::settings::Settings;

const HTML: &str = include_str!("page/page.html");
const SCRIPT: &str = include_str!("page/page.js");
const STYLE: &str = include_str!("page/page.css");

/// Allows only our own files, and images with a `data:` URL. Forbids inline scripts, anything from other sites,
/// and frames around the page.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// How long the relay answers `/overview` with the result of an earlier query. All visitors within this time cause
/// only one query.
const OVERVIEW_AGE: Duration = Duration::from_secs(5);

const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum length of an id or key in a search, in characters. Every ordering key fits, because it has at most 1,024
/// bytes.
const SEARCH_CHARS: usize = 1_100;

/// Maximum time for a search. The port closes every connection after 10 seconds, so this leaves 2 seconds to send
/// the answer.
const SEARCH_TIME: Duration = Duration::from_secs(8);

/// A search by key finds events that are at most this old. There is no index on the keys, so a search reads
/// every event of this period.
const KEY_SEARCH_AGE: Duration = Duration::from_secs(24 * 3600);

/// Maximum number of events that a search by key shows, newest first.
const EVENTS_SHOWN: usize = 20;

/// The last result for `/overview`, and when it was read.
pub(super) type Overview = Arc<Mutex<Option<(Instant, serde_json::Value)>>>;

/// Who may see the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    /// Everybody on this machine.
    Local,
    /// Those who know the token.
    Token,
    /// Nobody: the address is not local, and there is no token.
    Off,
}

fn access(addr: SocketAddr, settings: &Settings) -> Access {
    if settings.http_token.is_set() {
        Access::Token
    } else if addr.ip().is_loopback() {
        Access::Local
    } else {
        Access::Off
    }
}

/// The routes of the page, for a port on `addr`.
pub(super) fn routes(addr: SocketAddr, port: &Port) -> Router<Port> {
    let access = access(addr, &port.settings);
    if access == Access::Off {
        return Router::new().route("/", get(how_to_open));
    }
    let guard = middleware::from_fn_with_state((access, port.settings.clone()), guard);
    let data = Router::new()
        .route("/history", get(history))
        .route("/overview", get(overview))
        .route("/errors", get(errors))
        .route("/events", get(events))
        .route_layer(guard);
    Router::new()
        .route("/", get(|| file(HTML, "text/html; charset=utf-8")))
        .route(
            "/page.js",
            get(|| file(SCRIPT, "text/javascript; charset=utf-8")),
        )
        .route("/page.css", get(|| file(STYLE, "text/css; charset=utf-8")))
        .merge(data)
}

async fn file(text: &'static str, content_type: &'static str) -> impl IntoResponse {
    let headers = [
        (header::CONTENT_TYPE, content_type),
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, text)
}

async fn how_to_open() -> (StatusCode, &'static str) {
    (
        StatusCode::NOT_FOUND,
        "The page is off, because this port is not on a loopback address. Set http_token \
         (POSTRIDER_HTTP_TOKEN) to open it to those who know the token.\n",
    )
}

/// Refuses a request for data unless its sender may see the data.
async fn guard(
    Shared((access, settings)): Shared<(Access, Arc<Settings>)>,
    request: Request,
    next: Next,
) -> Response {
    let may_see = match access {
        Access::Local => {
            names_a_local_host(request.headers()) && !is_of_another_site(request.headers())
        }
        Access::Token => {
            bearer(request.headers()).is_some_and(|given| settings.http_token.is(given))
        }
        Access::Off => false,
    };
    if may_see {
        return next.run(request).await;
    }
    if access == Access::Local {
        let text = "open the page as http://localhost, or set http_token\n";
        return (StatusCode::FORBIDDEN, text).into_response();
    }
    let challenge = [(header::WWW_AUTHENTICATE, "Bearer")];
    let text = "send the token of the setting http_token as `Authorization: Bearer TOKEN`\n";
    (StatusCode::UNAUTHORIZED, challenge, text).into_response()
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let given = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = given.split_once(' ')?;
    scheme
        .eq_ignore_ascii_case("bearer")
        .then_some(token.trim())
}

fn names_a_local_host(headers: &HeaderMap) -> bool {
    let host = headers
        .get(header::HOST)
        .and_then(|host| host.to_str().ok());
    let host = host.and_then(|host| host.parse::<axum::http::uri::Authority>().ok());
    host.is_some_and(|host| match host.host().trim_matches(['[', ']']) {
        "localhost" => true,
        host => host
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback()),
    })
}

/// Whether a page of another origin (web site or port) sends the request. The browser would not show the answer to such
/// a page, but the request could still make the relay query the database.
fn is_of_another_site(headers: &HeaderMap) -> bool {
    let site = headers.get("sec-fetch-site");
    site.is_some_and(|site| site != "same-origin" && site != "none")
}

async fn history(Shared(port): Shared<Port>) -> Json<HistoryJson> {
    Json(port.history.json())
}

/// An error that began recently.
#[derive(Debug, Serialize)]
struct RecentError {
    seconds_ago: f64,
    code: &'static str,
    what: String,
    hint: String,
}

async fn errors(Shared(port): Shared<Port>) -> Json<Vec<RecentError>> {
    let recent = port.metrics.troubles.recent().into_iter().rev();
    let recent = recent.map(|trouble| RecentError {
        seconds_ago: trouble.since.elapsed().as_secs_f64(),
        code: trouble.code.name(),
        what: trouble.what,
        hint: trouble.hint,
    });
    Json(recent.collect())
}

/// Answers with the JSON of `postrider status --json` and two more members. `relay` is the state that this
/// relay shows. `topics` are the failing topics that this relay knows, with the keys that wait.
async fn overview(Shared(port): Shared<Port>) -> Json<serde_json::Value> {
    let (condition, verdict) = port.condition();
    let topics = serde_json::to_value(condition.topics).unwrap_or_default();
    let relay = serde_json::to_value(VerdictJson::of(&verdict)).unwrap_or_default();
    // Run the query in a separate task, so that it finishes even if the browser disconnects. The next visitor then
    // gets its result.
    let looking = tokio::spawn(async move { recent_status(&port).await });
    let mut overview = looking.await.unwrap_or_default();
    if let Some(overview) = overview.as_object_mut() {
        overview.insert("relay".to_owned(), relay);
        overview.insert("topics".to_owned(), topics);
    }
    Json(overview)
}

async fn recent_status(port: &Port) -> serde_json::Value {
    // Hold the lock during the query, so that only one query runs at a time, however many people have
    // the page open.
    let mut last = port.overview.lock().await;
    if let Some((at, json)) = &*last
        && at.elapsed() < OVERVIEW_AGE
    {
        return json.clone();
    }
    let json = match read_status(&port.settings).await {
        Ok(json) => json,
        Err(error) => error_json(&rights::named(error, &port.settings, Purpose::Read).await),
    };
    *last = Some((Instant::now(), json.clone()));
    json
}

async fn read_status(settings: &Settings) -> Result<serde_json::Value> {
    let sql = connect(settings.database()?, "postrider page", STATEMENT_TIMEOUT).await?;
    let status = RelayStatus::take(&sql, settings, None).await?;
    Ok(serde_json::to_value(status.json()).unwrap_or_default())
}

fn error_json(error: &Error) -> serde_json::Value {
    serde_json::json!({ "error": error.json() })
}

/// The query of `/events`: `id` finds one event, `key` finds the newest events of a key. If both are
/// given, `key` is ignored.
#[derive(Debug, Deserialize)]
struct EventSearch {
    id: Option<String>,
    key: Option<String>,
}

/// Answers with the JSON of `postrider event --json`, or with `{error}`.
async fn events(Shared(port): Shared<Port>, Query(search): Query<EventSearch>) -> Response {
    let fits = |text: &&str| !text.is_empty() && text.chars().nth(SEARCH_CHARS).is_none();
    let id = search.id.as_deref();
    let Some(wanted) = id.or(search.key.as_deref()).filter(fits) else {
        let text = "give ?id=ID or ?key=KEY\n";
        return (StatusCode::BAD_REQUEST, text).into_response();
    };
    // Only one search at a time, because it may read a large part of outbox.dispatch. The search ends when
    // its client disconnects.
    let Ok(_turn) = port.searching.try_lock() else {
        let text = "another search is running: try again in a few seconds\n";
        return (StatusCode::TOO_MANY_REQUESTS, text).into_response();
    };
    let searching = find_events(&port.settings, wanted, id.is_some());
    let found = tokio::time::timeout(SEARCH_TIME, searching).await;
    let json = match found {
        Ok(Ok(json)) => json,
        Ok(Err(error)) => error_json(&error),
        Err(_) => error_json(
            &Error::new(Code::PostgresTimeout, "the search took too long")
                .hint("search with `postrider event`, which has more time"),
        ),
    };
    ([(header::CACHE_CONTROL, "no-store")], Json(json)).into_response()
}

async fn find_events(settings: &Settings, wanted: &str, is_id: bool) -> Result<serde_json::Value> {
    let target = settings.database()?;
    let sql = connect_patiently(target, "postrider page", STATEMENT_TIMEOUT).await?;
    if is_id {
        let events = find::find(&sql, settings, wanted).await?;
        return Ok(serde_json::json!({ "events": events }));
    }
    let query = EventQuery {
        key: Some(wanted),
        topic: None,
        since: Some(&Since::Ago(KEY_SEARCH_AGE)),
    };
    let listing = list::list(&sql, settings, &query, EVENTS_SHOWN).await?;
    Ok(serde_json::to_value(listing).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    fn headers(name: header::HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn only_requests_to_a_local_host_pass_without_a_token() {
        for (host, passes) in [
            ("localhost:9464", true),
            ("127.0.0.1:9464", true),
            ("127.0.0.2", true),
            ("[::1]:9464", true),
            ("evil.example:9464", false),
            ("localhost.evil.example", false),
            ("10.0.0.7", false),
            ("", false),
        ] {
            assert_eq!(
                names_a_local_host(&headers(header::HOST, host)),
                passes,
                "{host}"
            );
        }
        assert!(!names_a_local_host(&HeaderMap::new()));
    }

    #[test]
    fn the_token_is_read_from_the_bearer_header_alone() {
        let given = |text: &str| {
            let headers = headers(header::AUTHORIZATION, text);
            bearer(&headers).map(str::to_owned)
        };
        assert_eq!(given("Bearer abc"), Some("abc".to_owned()));
        assert_eq!(given("bearer  abc "), Some("abc".to_owned()));
        assert_eq!(given("Basic abc"), None);
        assert_eq!(given("abc"), None);
    }
}

//! Serves the HTTP port: `/metrics`, `/livez`, `/readyz` and `/status`, and a page for operators
//! (`page`).
//!
//! Everything except the page is open to anyone, so it shows nothing that helps an intruder: no payload, key or
//! secret, and no role or address of the database. `listener` limits the resources that a client can use.

mod history;
mod listener;
mod page;

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::State as Shared;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Json};
use axum::routing::get;
use serde::Serialize;
use slot_manager::Severity;
use tokio::net::TcpListener;
use tokio::sync::Mutex;

use crate::condition::{Condition, Phase, PruneRun, RelayState, Verdict, general_hint};
use crate::error::{Error, Result};
use crate::metrics::{Metrics, OptionalGauge, prometheus_text};
use crate::settings::Settings;
use history::History;

#[derive(Debug, Clone)]
struct Port {
    metrics: Metrics,
    state: Arc<RelayState>,
    settings: Arc<Settings>,
    history: History,
    overview: page::Overview,
    /// Held during a search for events, so that only one search runs at a time.
    searching: Arc<Mutex<()>>,
}

impl Port {
    /// The relay's condition, and the state that all views show.
    fn condition(&self) -> (Condition, Verdict) {
        let condition = self.metrics.condition(&self.state);
        let verdict = self.metrics.verdict(&condition);
        (condition, verdict)
    }
}

/// Opens the port.
///
/// # Errors
/// `port-in-use`; `open-files-limit`.
pub async fn listen(addr: SocketAddr) -> Result<TcpListener> {
    let bound = TcpListener::bind(addr).await;
    bound.map_err(|error| Error::of_listening(addr, error))
}

/// Answers requests until the future is dropped.
pub async fn serve(
    listener: TcpListener,
    settings: Arc<Settings>,
    metrics: Metrics,
    state: Arc<RelayState>,
) {
    let history = History::default();
    let recording = history.clone().record(metrics.clone(), state.clone());
    let port = Port {
        metrics,
        state,
        settings,
        history,
        overview: page::Overview::default(),
        searching: Arc::default(),
    };
    let mut router = Router::new()
        .route("/metrics", get(metrics_page))
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/status", get(status));
    // If the address of the port is unknown, the page stays off, because we do not know who could reach
    // it.
    if let Ok(addr) = listener.local_addr() {
        router = router.merge(page::routes(addr, &port));
    }
    let served = listener::serve(listener, router.with_state(port));
    tokio::select! {
        () = recording => {}
        never = served => match never {},
    }
}

/// Answers as OpenMetrics if the Accept header prefers that format, as Prometheus' own header does. Otherwise
/// answers in Prometheus' older text format.
async fn metrics_page(Shared(port): Shared<Port>, headers: HeaderMap) -> impl IntoResponse {
    let accepted = headers.get_all(header::ACCEPT).into_iter();
    let accepted: Vec<&str> = accepted.filter_map(|value| value.to_str().ok()).collect();
    let slot = port.settings.slot.as_str();
    let Ok(text) = port.metrics.encode(slot, &port.condition().0) else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let (content_type, text) = if prefers_openmetrics(&accepted.join(",")) {
        (
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
            text,
        )
    } else {
        (
            "text/plain; version=0.0.4; charset=utf-8",
            prometheus_text(&text),
        )
    };
    let headers = [
        (header::CONTENT_TYPE, content_type),
        (header::VARY, "accept"),
    ];
    (headers, text).into_response()
}

/// Whether an Accept header gives OpenMetrics at least the weight of plain text.
fn prefers_openmetrics(accept: &str) -> bool {
    let weight = |wanted: &str| {
        let weights = accept.split(',').filter_map(|range| {
            let mut parts = range.split(';').map(str::trim);
            let is_wanted = parts.next()?.eq_ignore_ascii_case(wanted);
            let weight = parts.find_map(|part| {
                let (name, weight) = part.split_once('=')?;
                name.eq_ignore_ascii_case("q")
                    .then(|| weight.parse().ok())?
            });
            is_wanted.then(|| weight.unwrap_or(1.0))
        });
        weights.fold(0.0, f64::max)
    };
    let openmetrics = weight("application/openmetrics-text");
    openmetrics > 0.0 && openmetrics >= weight("text/plain")
}

/// Answers 503 if the session hangs, so that the orchestrator restarts the relay. A working session sends status
/// messages to PostgreSQL all the time, so a session hangs if its last message is older than `wal_sender_timeout`.
/// Answers 200 in all other cases, even in an outage of Pub/Sub or PostgreSQL, because a restart would not help.
async fn livez(Shared(port): Shared<Port>) -> (StatusCode, String) {
    let silent = port.metrics.last_status.age();
    match (port.state.phase(), silent) {
        (Phase::Streaming | Phase::Recovering, Some(silent))
            if silent > port.settings.wal_sender_timeout =>
        {
            (
                StatusCode::SERVICE_UNAVAILABLE,
                format!(
                    "no status message to PostgreSQL for {} s\n",
                    silent.as_secs()
                ),
            )
        }
        _ => {
            let (_, verdict) = port.condition();
            (StatusCode::OK, format!("{}\n", verdict.state.name()))
        }
    }
}

/// Answers 200 if the relay delivers to at least some topics, or is a standby for another relay.
async fn readyz(Shared(port): Shared<Port>) -> (StatusCode, String) {
    let (condition, verdict) = port.condition();
    let mut text = verdict.state.name().to_owned();
    if let Phase::Standby(holder) = port.state.phase() {
        text += &format!(": the slot is held by {holder}");
    }
    if let Some(code) = &condition.code {
        text += &format!(": {code}");
    }
    if let Some(time) = verdict.caught_up_in {
        text += &format!(": caught up in about {} s", time.as_secs());
    }
    let code = if condition.is_ready(port.metrics.last_published.age()) {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (code, text + "\n")
}

/// The JSON of `/status`. An unknown value is `null`.
#[derive(Debug, Serialize)]
struct Status {
    slot: String,
    severity: Severity,
    /// The state, and the reason if delivery is held up.
    #[serde(flatten)]
    condition: Condition,
    /// The same as the field `code` of the condition.
    last_error: Option<String>,
    /// The session that holds the slot while this relay is a standby.
    holder: Option<String>,
    lag_bytes: Option<u64>,
    retained_bytes: Option<u64>,
    lag_seconds: Option<f64>,
    publication_ok: Option<bool>,
    events_published: u64,
    events_recorded: u64,
    events_skipped: u64,
    in_flight_bytes: i64,
    in_flight_requests: i64,
    lanes: i64,
    lanes_waiting: i64,
    blocked_keys: Option<u64>,
    events_in_quarantine: Option<u64>,
    /// The relay's own pruning; `null` if `prune_after` is off.
    pruning: Option<PruningStatus>,
}

#[derive(Debug, Serialize)]
struct PruningStatus {
    prune_after_seconds: f64,
    /// How long ago the latest run ended; `null` if no run has ended.
    ended_seconds_ago: Option<f64>,
    /// Rows of the outbox tables that the latest run deleted.
    rows: u64,
    /// Rows of outbox.dispatch that the latest run deleted.
    records: u64,
    /// The code of the error that ended the run, if one did.
    code: Option<String>,
    /// What to do about this error.
    hint: Option<String>,
}

impl PruningStatus {
    fn of(port: &Port) -> Option<Self> {
        let prune_after = port.settings.prune_after?;
        let (run, age) = port.metrics.prune_runs.latest().unzip();
        let PruneRun {
            rows,
            records,
            code,
            ..
        } = run.unwrap_or_default();
        Some(Self {
            prune_after_seconds: prune_after.as_secs_f64(),
            ended_seconds_ago: age.map(|age| age.as_secs_f64()),
            rows,
            records,
            hint: general_hint(code.as_deref()),
            code,
        })
    }
}

async fn status(Shared(port): Shared<Port>) -> Json<Status> {
    let phase = port.state.phase();
    let metrics = &port.metrics;
    let (condition, verdict) = port.condition();
    let condition = verdict.public(condition);
    let whole = |value: &OptionalGauge| value.get().map(|value| value as u64);
    Json(Status {
        slot: port.settings.slot.to_string(),
        severity: verdict.severity,
        last_error: condition.code.clone(),
        condition,
        holder: match phase {
            Phase::Standby(holder) => Some(holder),
            Phase::Connecting
            | Phase::Recovering
            | Phase::Streaming
            | Phase::HeldByStranger(_)
            | Phase::Broken(_) => None,
        },
        lag_bytes: whole(&metrics.lag_bytes),
        retained_bytes: whole(&metrics.retained_bytes),
        lag_seconds: metrics.lag_seconds(),
        publication_ok: metrics.publication_ok.get().map(|is_ok| is_ok == 1.0),
        events_published: metrics.events_published.get(),
        events_recorded: metrics.events_recorded.get(),
        events_skipped: metrics.events_skipped.get(),
        in_flight_bytes: metrics.in_flight_bytes.get(),
        in_flight_requests: metrics.in_flight_requests.get(),
        lanes: metrics.lanes.get(),
        lanes_waiting: metrics.lanes_waiting.get(),
        blocked_keys: whole(&metrics.blocked_keys),
        events_in_quarantine: whole(&metrics.events_in_quarantine),
        pruning: PruningStatus::of(&port),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn openmetrics_is_sent_only_to_clients_that_prefer_it() {
        for (accept, is_preferred) in [
            ("", false),
            ("*/*", false),
            ("text/plain", false),
            ("application/openmetrics-text", true),
            ("Application/OpenMetrics-Text; version=1.0.0", true),
            ("application/openmetrics-text;q=0", false),
            ("text/plain, application/openmetrics-text;q=0.1", false),
            (
                "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;q=0.5,*/*;q=0.1",
                true,
            ),
        ] {
            assert_eq!(prefers_openmetrics(accept), is_preferred, "{accept}");
        }
    }
}

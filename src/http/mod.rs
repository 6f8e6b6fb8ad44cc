//! The HTTP port: `/metrics`, `/livez`, `/readyz` and `/status`.
//!
//! The port has no authentication, so it shows nothing that helps an intruder: no payload, key, secret
//! or setting, no version, and no role or address of the database. `listener` limits the resources
//! that a client can use.

mod listener;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State as Shared;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Json};
use axum::routing::get;
use serde::Serialize;
use tokio::net::TcpListener;

use crate::error::{Code, Error, Result};
use crate::metrics::Metrics;
use crate::state::{Phase, RelayState};

#[derive(Debug, Clone)]
struct Port {
    metrics: Metrics,
    state: Arc<RelayState>,
    wal_sender_timeout: Duration,
    slot: Arc<str>,
}

/// Opens the port.
///
/// # Errors
/// `port-in-use`.
pub async fn listen(addr: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(addr).await.map_err(|e| {
        Error::new(Code::PortInUse, format!("cannot listen on {addr} for HTTP")).caused_by(e)
    })
}

/// Answers requests until it is dropped.
pub async fn serve(
    listener: TcpListener,
    slot: &str,
    metrics: Metrics,
    state: Arc<RelayState>,
    wal_sender_timeout: Duration,
) {
    let port = Port {
        metrics,
        state,
        wal_sender_timeout,
        slot: slot.into(),
    };
    let router = Router::new()
        .route("/metrics", get(metrics_page))
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/status", get(status))
        .with_state(port);
    match listener::serve(listener, router).await {}
}

/// Prometheus' text format.
async fn metrics_page(Shared(port): Shared<Port>) -> impl IntoResponse {
    const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match port.metrics.encode(&port.slot) {
        Ok(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// 200 unless the session hangs: a session that streams sends status messages to PostgreSQL all the
/// time. An outage of Pub/Sub or PostgreSQL is no reason to restart the relay.
async fn livez(Shared(port): Shared<Port>) -> (StatusCode, String) {
    let silent = port.metrics.last_status.age();
    match (port.state.phase(), silent) {
        (Phase::Streaming | Phase::Recovering, Some(silent))
            if silent > port.wal_sender_timeout =>
        {
            (
                StatusCode::SERVICE_UNAVAILABLE,
                format!(
                    "no status message to PostgreSQL for {} s\n",
                    silent.as_secs()
                ),
            )
        }
        (phase, _) => (StatusCode::OK, format!("{}\n", phase.name())),
    }
}

/// 200 if the relay delivers, or is a standby for another relay that delivers.
async fn readyz(Shared(port): Shared<Port>) -> (StatusCode, String) {
    let phase = port.state.phase();
    let code = match &phase {
        Phase::Streaming | Phase::Recovering | Phase::Standby(_) => StatusCode::OK,
        Phase::Connecting | Phase::Broken(_) => StatusCode::SERVICE_UNAVAILABLE,
    };
    let text = match &phase {
        Phase::Standby(holder) => format!("standby: the slot is held by {holder}\n"),
        Phase::Broken(code) => format!("broken: {code}\n"),
        Phase::Streaming | Phase::Recovering | Phase::Connecting => format!("{}\n", phase.name()),
    };
    (code, text)
}

/// The JSON of `/status`. An unknown value is `null`.
#[derive(Debug, Serialize)]
struct Status {
    slot: String,
    phase: &'static str,
    /// The code of the error that ended the last session.
    last_error: Option<&'static str>,
    /// The session that holds the slot while this relay is a standby.
    holder: Option<String>,
    lag_bytes: Option<f64>,
    retained_bytes: Option<f64>,
    lag_seconds: Option<f64>,
    publication_ok: Option<bool>,
    events_published: u64,
    events_recorded: u64,
    events_skipped: u64,
    in_flight_bytes: i64,
    in_flight_requests: i64,
    lanes: i64,
    lanes_waiting: i64,
    blocked_keys: Option<i64>,
    events_in_quarantine: Option<f64>,
}

async fn status(Shared(port): Shared<Port>) -> Json<Status> {
    let phase = port.state.phase();
    let metrics = &port.metrics;
    Json(Status {
        slot: port.slot.to_string(),
        phase: phase.name(),
        last_error: match &phase {
            Phase::Broken(code) => Some(code.name()),
            Phase::Connecting | Phase::Standby(_) | Phase::Recovering | Phase::Streaming => None,
        },
        holder: match phase {
            Phase::Standby(holder) => Some(holder),
            Phase::Connecting | Phase::Recovering | Phase::Streaming | Phase::Broken(_) => None,
        },
        lag_bytes: metrics.lag_bytes.get(),
        retained_bytes: metrics.retained_bytes.get(),
        lag_seconds: metrics.oldest_pending.age_seconds(),
        publication_ok: metrics.publication_ok.get().map(|is_ok| is_ok == 1.0),
        events_published: metrics.events_published.get(),
        events_recorded: metrics.events_recorded.get(),
        events_skipped: metrics.events_skipped.get(),
        in_flight_bytes: metrics.in_flight_bytes.get(),
        in_flight_requests: metrics.in_flight_requests.get(),
        lanes: metrics.lanes.get(),
        lanes_waiting: metrics.lanes_waiting.get(),
        blocked_keys: metrics.blocked_keys.get().map(|keys| keys as i64),
        events_in_quarantine: metrics.events_in_quarantine.get(),
    })
}

//! `postrider run`: runs the relay as a process, with its signals and its HTTP port.

use std::process::ExitCode;
use std::sync::Arc;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;

use super::{logging, require_files, signals};
use crate::build_info;
use crate::condition::RelayState;
use crate::error::{Error, Result};
use crate::http;
use crate::metrics::Metrics;
use crate::ops::pruner;
use crate::session::SessionRunner;
use crate::settings::Settings;

/// Number of threads of the runtime. The replication stream has its own thread.
const WORKERS: usize = 2;

/// Minimum number of files that the relay must be able to open at once, for its connections and its runtime.
const FILES: usize = 32;

pub(super) fn run(settings: Settings) -> Result<ExitCode> {
    logging::start(settings.log_format)?;
    let runtime = runtime()?;
    // Watch for signals before the first log line, so that a signal after this line causes a graceful shutdown.
    let shutdown = runtime.block_on(async { signals::watch() })?;
    log_what_runs(&settings);
    runtime.block_on(relay(settings, shutdown))?;
    Ok(ExitCode::SUCCESS)
}

fn runtime() -> Result<Runtime> {
    require_files(FILES)?;
    Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .build()
        .map_err(|e| Error::of_system("cannot start a runtime", e))
}

/// Writes the first line of the relay's log: everything that is known before the first connection. The
/// session logs the server after it has connected.
fn log_what_runs(settings: &Settings) {
    let database = settings.database.as_ref().map(ToString::to_string);
    let tables = settings.tables.iter().map(|table| table.table.to_string());
    let tables: Vec<String> = tables.collect();
    let topics: Vec<String> = settings.configured_topics().into_iter().collect();
    let port = settings.http_addr.map(|addr| addr.to_string());
    tracing::info!(
        version = build_info::VERSION,
        commit = build_info::commit().unwrap_or("unknown"),
        database,
        slot = %settings.slot,
        publication = settings.publication,
        tables = tables.join(", "),
        project = settings.project,
        topics = topics.join(", "),
        http_addr = port.as_deref().unwrap_or("off"),
        "postrider starts"
    );
}

async fn relay(settings: Settings, shutdown: watch::Receiver<bool>) -> Result<()> {
    let metrics = Metrics::default();
    let state = Arc::new(RelayState::default());
    let listener = match settings.http_addr {
        Some(addr) => Some(http::listen(addr).await?),
        None => None,
    };
    let shared = Arc::new(settings.clone());
    let sessions = SessionRunner::new(settings, metrics.clone(), state.clone())?;
    let pruner = tokio::spawn(pruner::run(shared.clone(), metrics.clone(), state.clone()));
    let port = listener.map(|listener| {
        tokio::spawn(async move {
            http::serve(listener, shared, metrics, state).await;
        })
    });
    let ended = sessions.run(shutdown).await;
    pruner.abort();
    sessions.finish().await;
    if let Some(port) = port {
        port.abort();
    }
    ended
}

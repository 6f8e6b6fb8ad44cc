//! `postrider run`: the relay as a process, with its signals and its HTTP port.

use std::process::ExitCode;
use std::sync::Arc;

use super::{logging, signals};
use crate::condition::RelayState;
use crate::error::{Code, Error, Result};
use crate::http;
use crate::metrics::Metrics;
use crate::session::SessionRunner;
use crate::settings::Settings;

/// Threads for publishing; the replication stream has its own thread.
const WORKERS: usize = 2;

pub(super) fn run(settings: Settings) -> Result<ExitCode> {
    logging::start(settings.log_json);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .build()
        .map_err(|e| Error::new(Code::Internal, "cannot start a runtime").caused_by(e))?;
    runtime.block_on(relay(settings))?;
    Ok(ExitCode::SUCCESS)
}

async fn relay(settings: Settings) -> Result<()> {
    let shutdown = signals::watch()?;
    let metrics = Metrics::default();
    let state = Arc::new(RelayState::default());
    let listener = match settings.http_addr {
        Some(addr) => Some(http::listen(addr).await?),
        None => None,
    };
    let settings_of_port = Arc::new(settings.clone());
    let sessions = SessionRunner::new(settings, metrics.clone(), state.clone())?;
    let port = listener.map(|listener| {
        tokio::spawn(async move {
            http::serve(listener, settings_of_port, metrics, state).await;
        })
    });
    let ended = sessions.run(shutdown).await;
    if let Some(port) = port {
        port.abort();
    }
    ended
}

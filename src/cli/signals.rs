//! Handles SIGTERM and SIGINT: the first signal starts a graceful shutdown, the second ends the
//! process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::report;
use crate::error::{Error, Result};

/// The exit code after a second signal, as a shell reports it for a program that SIGINT has ended.
const INTERRUPTED: i32 = 130;

/// Returns a channel that turns true at the first SIGTERM or SIGINT. The second signal ends the process.
pub(super) fn watch() -> Result<watch::Receiver<bool>> {
    let cannot = |e| Error::of_system("cannot watch for signals", e);
    let mut terminate = signal(SignalKind::terminate()).map_err(cannot)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(cannot)?;
    let (sender, receiver) = watch::channel(false);
    tokio::spawn(async move {
        for last in [false, true] {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if last {
                tracing::warn!("second signal: exiting immediately");
                std::process::exit(INTERRUPTED);
            }
            tracing::info!(
                "stopping: finishing the events in flight; a second signal ends the program immediately"
            );
            // Sending fails only if the relay has already ended.
            let _ = sender.send(true);
        }
    });
    Ok(receiver)
}

/// Returns a flag that turns true at the first SIGINT or SIGTERM, for a command that works in steps. The
/// second signal ends the process.
pub(super) fn watch_steps() -> Result<Arc<AtomicBool>> {
    let cannot = |e| Error::of_system("cannot watch for signals", e);
    let mut terminate = signal(SignalKind::terminate()).map_err(cannot)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(cannot)?;
    let is_stopped = Arc::new(AtomicBool::new(false));
    let stop = is_stopped.clone();
    tokio::spawn(async move {
        for is_last in [false, true] {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if is_last {
                std::process::exit(INTERRUPTED);
            }
            report::write("stopping after this step; a second signal ends the program immediately");
            stop.store(true, Ordering::Relaxed);
        }
    });
    Ok(is_stopped)
}

//! SIGTERM and SIGINT: the first signal ends the demonstration, which then cleans up. The second
//! signal ends the process at once.

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::error::{Result, failed};

/// Returns a flag that becomes true at the first signal.
pub(crate) fn watch() -> Result<watch::Receiver<bool>> {
    let cannot = |e| failed("cannot watch for signals").caused_by(e);
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
                std::process::exit(1);
            }
            // An error means that the demonstration has ended.
            let _ = sender.send(true);
        }
    });
    Ok(receiver)
}

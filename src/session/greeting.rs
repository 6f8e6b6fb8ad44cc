//! Logs once per process to which server the relay is connected. What it runs with is in the first line of the
//! log, before any connection (`cli::run`).

use std::sync::Once;

use slot_manager::Cluster;

/// Remembers whether the line was logged.
#[derive(Debug)]
pub(super) struct Greeting(Once);

impl Greeting {
    pub(super) const fn new() -> Self {
        Self(Once::new())
    }

    /// Logs the server at `host`, unless this process has logged this line before.
    pub(super) fn log_once(&self, cluster: &Cluster, host: &str) {
        self.0.call_once(|| {
            tracing::info!(
                database = cluster.database,
                host,
                server = cluster.version(),
                "connected to PostgreSQL"
            );
        });
    }
}

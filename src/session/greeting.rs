//! Logs once per process to which server the relay is connected. The relay's version and settings are in an earlier
//! line, which `cli::run` logs before any connection.

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

//! Logs once per process which version runs, on which server, and with which settings. This happens after
//! the first connection, because the line contains the version of the server.

use std::collections::BTreeSet;
use std::sync::Once;

use slot_manager::Cluster;

use crate::build_info;
use crate::settings::Settings;

/// Remembers whether the line was logged.
#[derive(Debug)]
pub(super) struct Greeting(Once);

impl Greeting {
    pub(super) const fn new() -> Self {
        Self(Once::new())
    }

    /// Logs the version, the server at `host`, and the most important settings, unless this process has
    /// logged this line before.
    pub(super) fn log_once(&self, settings: &Settings, cluster: &Cluster, host: &str) {
        self.0.call_once(|| {
            let tables = settings.tables.iter().map(|table| table.table.to_string());
            let tables: Vec<String> = tables.collect();
            let topics: Vec<String> = topics(settings).into_iter().collect();
            let port = settings.http_addr.map(|addr| addr.to_string());
            tracing::info!(
                version = build_info::VERSION,
                commit = build_info::commit().unwrap_or("unknown"),
                database = cluster.database,
                host,
                server = cluster.version(),
                slot = %settings.slot,
                publication = settings.publication,
                tables = tables.join(", "),
                project = settings.project,
                topics = topics.join(", "),
                http_addr = port.as_deref().unwrap_or("off"),
                "connected to PostgreSQL"
            );
        });
    }
}

/// The topics as they are configured. A name in braces stands for the value of that column in the row.
fn topics(settings: &Settings) -> BTreeSet<String> {
    let of_tables = settings.tables.iter().flat_map(|table| {
        let rules = table.topic_rules.values().cloned();
        rules.chain([table.topic.to_string()])
    });
    let mut topics: BTreeSet<String> = of_tables.collect();
    if let Ok(Some(topic)) = settings.dead_letter_topic() {
        topics.insert(topic.to_string());
    }
    topics
}

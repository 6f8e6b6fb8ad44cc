//! Defines the table of all settings: name, kind, bound, default, reason.
//!
//! Each row defines the key in the TOML file, the environment variable `POSTRIDER_<NAME>`, the flag
//! `--<name>`, the help text and the entry in `docs/reference/settings.md`.

use strsim::levenshtein;

/// The values that a setting accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SettingKind {
    /// A text. The help shows this placeholder for the value.
    Text(&'static str),
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A whole number from the first number to the second, inclusive.
    Number(u64, u64),
    /// `true` or `false`.
    Switch,
}

impl SettingKind {
    /// Describes a valid value. The text follows "must be" in an error.
    pub fn wanted(self) -> String {
        match self {
            SettingKind::Text(_) => "a string".to_owned(),
            SettingKind::Choice(words) => one_of(words),
            SettingKind::Number(min, max) => format!("a whole number from {min} to {max}"),
            SettingKind::Switch => "true or false".to_owned(),
        }
    }
}

/// The words as part of a sentence: "`a`, `b` or `c`".
fn one_of(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
    match quoted.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => quoted.concat(),
    }
}

/// One setting.
#[derive(Debug)]
pub struct SettingKey {
    /// Name in the TOML file; ends with the unit, if any.
    pub name: &'static str,
    /// The values that the setting accepts.
    pub kind: SettingKind,
    /// The default, as a user writes it; empty if there is none.
    pub default: &'static str,
    /// What the setting does, and the reason for the default.
    pub reason: &'static str,
    /// Standard environment variables that are read if `POSTRIDER_<NAME>` is not set.
    pub aliases: &'static [&'static str],
}

impl SettingKey {
    /// The environment variable, `POSTRIDER_<NAME>`.
    pub fn variable(&self) -> String {
        format!("POSTRIDER_{}", self.name.to_uppercase())
    }

    /// What the setting does, in a few words for the short help: the beginning of the field `reason`.
    pub fn summary(&self) -> &'static str {
        let ends = [". ", ": ", "; ", " ("].iter();
        let end = ends.filter_map(|end| self.reason.find(end)).min();
        &self.reason[..end.unwrap_or(self.reason.len())]
    }

    /// The long flag without its dashes.
    pub fn flag(&self) -> String {
        self.name.replace('_', "-")
    }
}

const fn key(
    name: &'static str,
    kind: SettingKind,
    default: &'static str,
    aliases: &'static [&'static str],
    reason: &'static str,
) -> SettingKey {
    SettingKey {
        name,
        kind,
        default,
        reason,
        aliases,
    }
}

/// The names of the envelopes that the setting `envelope` accepts.
pub(super) const ENVELOPES: &[&str] = &[
    "raw",
    "cloudevents-binary",
    "cloudevents-structured",
    "protobuf",
];

/// The time zones that the setting `time_zone` accepts, for times without an offset.
pub(super) const TIME_ZONES: &[&str] = &["UTC", "local"];

/// Every setting with a plain value. The `[[tables]]` sections of the file are not in this list.
pub const KEYS: &[SettingKey] = &[
    key(
        "database_url",
        SettingKind::Text("URL"),
        "",
        &["DATABASE_URL"],
        "PostgreSQL to read from: postgres://user:password@host:5432/database?sslmode=verify-full, or any \
         other form that libpq takes. Without it PGHOST, PGUSER and the other variables of libpq are used",
    ),
    key(
        "password_command",
        SettingKind::Text("COMMAND"),
        "",
        &[],
        "Shell command that prints the password of PostgreSQL, run for each connection: for tokens that \
         expire, such as IAM tokens",
    ),
    key(
        "slot",
        SettingKind::Text("NAME"),
        "postrider",
        &[],
        "Replication slot; one per relay. Lower-case letters, digits and _, at most 63 characters",
    ),
    key(
        "publication",
        SettingKind::Text("NAME"),
        "postrider",
        &[],
        "Publication of the outbox tables, for inserts only",
    ),
    key(
        "slot_failover",
        SettingKind::Switch,
        "false",
        &[],
        "Create the slot with `failover`: PostgreSQL 17 and newer then copy it to standby servers",
    ),
    key(
        "start",
        SettingKind::Choice(&["new", "all"]),
        "new",
        &[],
        "What the first start on a database delivers. `new`: the rows committed after the slot is ready; \
         creating the slot waits for open transactions. `all`: also the unrecorded rows that are already in \
         the tables, and in each table that is added to the settings later. If `init` or `slot create` ran \
         with `all`, the first start delivers the old rows even if the setting is `new` by then. The default \
         is `new`, because a table that another program served before contains rows that were delivered long \
         ago",
    ),
    key(
        "slot_on_loss",
        SettingKind::Choice(&["recover", "stop"]),
        "recover",
        &[],
        "What to do about a lost slot (one that is missing, invalidated or recreated): `recover` (create a \
         new slot, and publish the unrecorded rows from the tables) or `stop` (exit with an error that \
         gives the reason). The default is `recover`, because it loses nothing and repeats only events \
         without a record",
    ),
    key(
        "dispatch",
        SettingKind::Choice(&["full", "exceptions"]),
        "full",
        &[],
        "Which events get a row in outbox.dispatch: `full` (all events; a recorded event is never \
         published again) or `exceptions` (only quarantined events: faster and with less WAL, but \
         after a crash all events since the last confirmed position are published again). The default \
         is `full`, because it repeats the fewest events and shows when each one was published",
    ),
    key(
        "table",
        SettingKind::Text("TABLE"),
        "outbox.events",
        &[],
        "Outbox table, if the file has no [[tables]]",
    ),
    key(
        "topic",
        SettingKind::Text("TEMPLATE"),
        "{aggregatetype}.events",
        &[],
        "Topic of an event: text with column names in braces",
    ),
    key(
        "ordering",
        SettingKind::Text("key|none|bucketed(N)"),
        "key",
        &[],
        "Ordering key: `key` (the aggregate id), `bucketed(n)` (one of n hash buckets of the aggregate \
         id: larger batches if there are very many aggregates, still in order for each) or `none`",
    ),
    key(
        "envelope",
        SettingKind::Choice(ENVELOPES),
        "raw",
        &[],
        "Format of a message: `raw` (the unchanged payload), `cloudevents-binary`, \
         `cloudevents-structured` or `protobuf`",
    ),
    key(
        "time_zone",
        SettingKind::Choice(TIME_ZONES),
        "",
        &[],
        "Meaning of times without an offset in column `occurred_at`: `UTC`, or `local` (published \
         unchanged). Required if the column is a timestamp without time zone",
    ),
    key(
        "project",
        SettingKind::Text("ID"),
        "",
        &["PUBSUB_PROJECT_ID", "GOOGLE_CLOUD_PROJECT"],
        "Google Cloud project of the topics",
    ),
    key(
        "pubsub_emulator_host",
        SettingKind::Text("HOST:PORT"),
        "",
        &["PUBSUB_EMULATOR_HOST"],
        "host:port of a Pub/Sub emulator: plain text, no credentials",
    ),
    key(
        "pubsub_endpoint",
        SettingKind::Text("URL"),
        "https://pubsub.googleapis.com",
        &[],
        "Pub/Sub endpoint. Use a regional endpoint, https://REGION-pubsub.googleapis.com: Pub/Sub keeps \
         the order of a key only among publishes in one region",
    ),
    key(
        "create_topics",
        SettingKind::Switch,
        "false",
        &[],
        "Create missing topics. Off by default, because a topic without a subscription keeps no \
         messages",
    ),
    key(
        "on_bad_event",
        SettingKind::Choice(&["quarantine_key", "quarantine_event", "halt"]),
        "quarantine_key",
        &[],
        "What to do with an event that can never be published: `quarantine_key` quarantines it and \
         all later events of its ordering key, in order, until an operator decides; \
         `quarantine_event` quarantines only this event; `halt` stops the relay",
    ),
    key(
        "dead_letter_topic",
        SettingKind::Text("TOPIC"),
        "",
        &[],
        "Topic that receives a copy of each quarantined bad event; its attributes give the reason",
    ),
    key(
        "prune_after",
        SettingKind::Text("TIME|off"),
        "off",
        &[],
        "Delete events this long after their outcome was recorded, such as `30d`. The relay then follows \
         the rules of `postrider prune`, and needs the right to delete. The default is `off`, because \
         deleted rows cannot be replayed",
    ),
    key(
        "pubsub_channels",
        SettingKind::Number(1, 32),
        "4",
        &[],
        "Connections to Pub/Sub. Four connections spread the load over several of its front ends",
    ),
    key(
        "publish_timeout_s",
        SettingKind::Number(1, 60),
        "10",
        &[],
        "Seconds that one publish attempt may take before the relay retries. Must be less than a \
         quarter of wal_sender_timeout_s, so that no attempt outlives the lease of the slot",
    ),
    key(
        "in_flight_requests",
        SettingKind::Number(1, 10_000),
        "512",
        &[],
        "Maximum number of publish requests in flight, over all ordering keys. 512 requests keep a \
         link busy if Pub/Sub answers within 20 ms",
    ),
    key(
        "in_flight_mib",
        SettingKind::Number(1, 4096),
        "24",
        &[],
        "MiB of events in memory, waiting or in flight. At this limit, reading from PostgreSQL pauses. The \
         relay needs 10 to 40 MiB more, for itself and for the buffers of its requests. Very large rows need \
         memory beyond this limit: up to three times the size of such a row as PostgreSQL sends it",
    ),
    key(
        "wal_sender_timeout_s",
        SettingKind::Number(5, 3600),
        "60",
        &[],
        "wal_sender_timeout of the replication session, in seconds. If three quarters of this time pass \
         without proof that the server receives the relay's reports, the relay ends the session",
    ),
    key(
        "start_timeout_s",
        SettingKind::Number(1, 3600),
        "10",
        &[],
        "Seconds that the relay waits at startup for PostgreSQL to answer. If no answer comes in this time, the \
         relay exits. Once PostgreSQL has answered, the relay retries without limit",
    ),
    key(
        "shutdown_timeout_s",
        SettingKind::Number(0, 600),
        "20",
        &[],
        "Seconds after SIGTERM to finish and record the events in flight",
    ),
    key(
        "http_addr",
        SettingKind::Text("ADDRESS:PORT|off"),
        "127.0.0.1:9464",
        &[],
        "Address of the HTTP port, which serves /metrics, /livez, /readyz, /status and a page with graphs. \
         `off` opens no port",
    ),
    key(
        "http_token",
        SettingKind::Text("TOKEN"),
        "",
        &[],
        "Whoever opens the page must know this token, of at least 16 characters. Without a token the page \
         is served on a loopback address only",
    ),
    key(
        "log_format",
        SettingKind::Choice(&["text", "json", "cloud_logging"]),
        "text",
        &[],
        "Format of the log: `text`, `json`, or `cloud_logging` (JSON with the field names of Google Cloud \
         Logging, so that it shows severities). RUST_LOG sets the level",
    ),
];

pub(super) fn find(name: &str) -> Option<&'static SettingKey> {
    KEYS.iter().find(|key| key.name == name)
}

/// Returns the name in `known` that is most similar to the misspelt `name`, if one is similar
/// enough.
pub(super) fn nearest<'k>(name: &str, known: impl Iterator<Item = &'k str>) -> Option<&'k str> {
    known
        .map(|key| (levenshtein(name, key), key))
        .filter(|(distance, key)| *distance <= 1 + key.len() / 4)
        .min()
        .map(|(_, key)| key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_name_finds_the_most_similar_setting() {
        let nearest = |name| nearest(name, KEYS.iter().map(|key| key.name));
        assert_eq!(nearest("publicaton"), Some("publication"));
        assert_eq!(nearest("in_flight_mb"), Some("in_flight_mib"));
        assert_eq!(nearest("colour"), None);
    }

    #[test]
    fn there_are_at_most_thirty_settings_with_unique_names() {
        let mut names: Vec<_> = KEYS.iter().map(|key| key.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), KEYS.len());
        assert!(KEYS.len() <= 30);
    }
}

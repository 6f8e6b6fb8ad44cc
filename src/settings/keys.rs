//! The table of all settings: name, kind, bound, default, reason.
//!
//! One row serves the TOML file, the environment variable `POSTRIDER_<NAME>`, the flag
//! `--<name>`, the help text and `docs/reference/settings.md`.

/// What values a setting takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Any text.
    Text,
    /// A whole number between the two, both included.
    Number(u64, u64),
    /// `true` or `false`.
    Switch,
}

/// One setting.
#[derive(Debug)]
pub struct Key {
    /// Name in the TOML file; a unit stands last in it.
    pub name: &'static str,
    /// What values it takes.
    pub kind: Kind,
    /// The value when nothing is set, as it would be written; empty when there is none.
    pub default: &'static str,
    /// What it does and why the default is what it is.
    pub reason: &'static str,
    /// Standard environment variables that are read when `POSTRIDER_<NAME>` is not set.
    pub aliases: &'static [&'static str],
}

impl Key {
    /// The environment variable, `POSTRIDER_<NAME>`.
    pub fn variable(&self) -> String {
        format!("POSTRIDER_{}", self.name.to_uppercase())
    }

    /// The long flag without its dashes.
    pub fn flag(&self) -> String {
        self.name.replace('_', "-")
    }
}

const fn key(
    name: &'static str,
    kind: Kind,
    default: &'static str,
    aliases: &'static [&'static str],
    reason: &'static str,
) -> Key {
    Key {
        name,
        kind,
        default,
        reason,
        aliases,
    }
}

/// Every setting that is a plain value; `[[tables]]` of the file comes on top.
pub const KEYS: &[Key] = &[
    key(
        "database_url",
        Kind::Text,
        "",
        &["DATABASE_URL"],
        "PostgreSQL to read from: postgres://user:password@host:5432/database?sslmode=verify-full. \
         Without it PGHOST, PGUSER and the other variables of libpq are used",
    ),
    key(
        "slot",
        Kind::Text,
        "postrider",
        &[],
        "Replication slot; one per relay. Lower-case letters, digits and _, at most 63",
    ),
    key(
        "publication",
        Kind::Text,
        "postrider",
        &[],
        "Publication that holds the outbox tables, for inserts only",
    ),
    key(
        "slot_failover",
        Kind::Switch,
        "false",
        &[],
        "Create the slot with `failover`, so that PostgreSQL 17 and newer copy it to standbys",
    ),
    key(
        "start",
        Kind::Text,
        "new",
        &[],
        "What the first start on a database delivers: `new` (rows committed from then on) or `all` \
         (also the rows that are in the tables and have no record; later on those of a table that is \
         added, too, with `dispatch = full`). `new`, since a table that was served by something else \
         before holds what was delivered long ago",
    ),
    key(
        "slot_on_loss",
        Kind::Text,
        "recover",
        &[],
        "When the slot is missing, lost or not the one that was left: `recover` (make a new one, \
         and deliver what has no record from the tables) or `stop` (leave with the reason). \
         `recover` loses nothing and repeats only what had no record",
    ),
    key(
        "dispatch",
        Kind::Text,
        "full",
        &[],
        "Which events get a row in outbox.dispatch: `full` (each one: what is recorded is never sent \
         again) or `exceptions` (what is in quarantine alone: faster and with less WAL, but after a \
         crash everything since the last confirmed position comes again). `full`, since it repeats \
         least and can say of each event when it was published",
    ),
    key(
        "table",
        Kind::Text,
        "outbox.events",
        &[],
        "Outbox table when the file has no [[tables]]",
    ),
    key(
        "topic",
        Kind::Text,
        "{aggregatetype}.events",
        &[],
        "Topic of an event: text with the names of columns in braces",
    ),
    key(
        "ordering",
        Kind::Text,
        "key",
        &[],
        "Ordering key: `key` (the aggregate id), `bucketed(n)` (its hash bucket: fuller batches \
         when there are very many aggregates, still in order for each) or `none`",
    ),
    key(
        "envelope",
        Kind::Text,
        "raw",
        &[],
        "Form of a message: `raw` (the payload as it is), `cloudevents-binary`, \
         `cloudevents-structured` or `protobuf`",
    ),
    key(
        "time_zone",
        Kind::Text,
        "",
        &[],
        "What times without an offset in the column `occurred_at` mean: `UTC`, or `local` (sent as \
         they are, without an offset); needed where that column is a timestamp without time zone",
    ),
    key(
        "project",
        Kind::Text,
        "",
        &["PUBSUB_PROJECT_ID", "GOOGLE_CLOUD_PROJECT"],
        "Google Cloud project of the topics",
    ),
    key(
        "pubsub_emulator_host",
        Kind::Text,
        "",
        &["PUBSUB_EMULATOR_HOST"],
        "host:port of a Pub/Sub emulator: plain text, no credentials",
    ),
    key(
        "pubsub_endpoint",
        Kind::Text,
        "https://pubsub.googleapis.com",
        &[],
        "Pub/Sub endpoint. Take a regional one, https://REGION-pubsub.googleapis.com: Pub/Sub \
         keeps order only among publishes in one region",
    ),
    key(
        "create_topics",
        Kind::Switch,
        "false",
        &[],
        "Create a topic when it is missing. Off, since a topic without subscription keeps nothing",
    ),
    key(
        "on_bad_event",
        Kind::Text,
        "quarantine_key",
        &[],
        "What to do with an event that can never be published: `quarantine_key` sets it and all \
         later events of its ordering key aside, in order, until an operator decides; \
         `quarantine_event` it alone; `halt` stops the relay",
    ),
    key(
        "dead_letter_topic",
        Kind::Text,
        "",
        &[],
        "Topic to which a copy of an event goes that is set aside, with the reason in its \
         attributes",
    ),
    key(
        "pubsub_channels",
        Kind::Number(1, 32),
        "4",
        &[],
        "Connections to Pub/Sub. Four spread the load over several of its front ends",
    ),
    key(
        "publish_timeout_s",
        Kind::Number(1, 60),
        "10",
        &[],
        "Seconds that one attempt to publish may take before it is made again. Must \
         be less than a quarter of wal_sender_timeout_s, so that no attempt outlives the right to the slot",
    ),
    key(
        "in_flight_requests",
        Kind::Number(1, 10_000),
        "512",
        &[],
        "Publish requests on their way at once, over all ordering keys. 512 fill a link whose \
         answers take 20 ms",
    ),
    key(
        "in_flight_mib",
        Kind::Number(1, 4096),
        "24",
        &[],
        "MiB of events in memory, waiting or on their way; when full, reading from PostgreSQL \
         pauses. The relay's memory is this and 10 to 40 MiB: its own, and what requests are read \
         and written through. Rows of many MiB come on top: up to three of them, as they were \
         read",
    ),
    key(
        "wal_sender_timeout_s",
        Kind::Number(5, 3600),
        "60",
        &[],
        "wal_sender_timeout of the replication session, seconds: after three quarters of it without \
         proof that the server hears the relay the session is given up",
    ),
    key(
        "start_timeout_s",
        Kind::Number(1, 3600),
        "10",
        &[],
        "Seconds to wait at the start for a PostgreSQL that does not answer; later on the relay \
         waits without end",
    ),
    key(
        "shutdown_timeout_s",
        Kind::Number(0, 600),
        "20",
        &[],
        "Seconds after SIGTERM in which events on their way are finished and recorded",
    ),
    key(
        "http_addr",
        Kind::Text,
        "127.0.0.1:9464",
        &[],
        "Address of /metrics, /livez, /readyz and /status; `off` opens no port",
    ),
    key(
        "log_format",
        Kind::Text,
        "text",
        &[],
        "`text` or `json`; RUST_LOG sets the level",
    ),
];

/// The key of that name.
pub(super) fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
}

/// The known name that is nearest to a misspelt one, if any is near.
pub(super) fn nearest(name: &str) -> Option<&'static str> {
    KEYS.iter()
        .map(|key| (edit_distance(name, key.name), key.name))
        .filter(|(distance, key)| *distance <= 1 + key.len() / 4)
        .min()
        .map(|(_, key)| key)
}

/// Levenshtein distance in bytes.
pub(crate) fn edit_distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_name_finds_its_neighbour() {
        assert_eq!(nearest("publicaton"), Some("publication"));
        assert_eq!(nearest("in_flight_mb"), Some("in_flight_mib"));
        assert_eq!(nearest("colour"), None);
    }

    #[test]
    fn there_are_at_most_thirty_settings_and_no_name_twice() {
        let mut names: Vec<_> = KEYS.iter().map(|key| key.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), KEYS.len());
        assert!(KEYS.len() <= 30);
    }
}

//! Builds one checked [`Settings`] from file, environment and flags.
//!
//! Flags win over the environment, the environment over the file, the file over the defaults.
//! Everything is read and checked before the runtime starts; nothing here connects anywhere. No error
//! shows the value of `database_url`, which may contain a password.

mod choices;
mod keys;
mod layers;

use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest, Sha256};
use slot_manager::SlotName;
use slot_manager::publication::CapturedTable;
use toml::{Table, Value};

pub use choices::{Dispatch, Endpoint, OnBadEvent, OnLoss, Start};
pub use keys::{KEYS, SettingKey, SettingKind};
pub(crate) use layers::environment_of as environment;

use crate::environment::Environment;
use crate::error::{Code, Error, Result};
use crate::mapping::TableSettings;
use crate::postgres::Target;

/// All settings, checked.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The database; `None` if neither a URL nor `PGHOST`/`PGDATABASE` names one.
    pub database: Option<Target>,
    /// Replication slot.
    pub slot: SlotName,
    /// Publication name, as PostgreSQL stores it.
    pub publication: String,
    /// Whether PostgreSQL copies a slot that the relay creates to standbys.
    pub slot_failover: bool,
    /// What the first start delivers.
    pub start: Start,
    /// What to do when the slot is lost.
    pub slot_on_loss: OnLoss,
    /// Which events get a row in `outbox.dispatch`.
    pub dispatch: Dispatch,
    /// The captured tables, at least one.
    pub tables: Vec<TableSettings>,
    /// Google Cloud project; empty when not set.
    pub project: String,
    /// Where Pub/Sub is.
    pub pubsub: Endpoint,
    /// Whether missing topics are created.
    pub create_topics: bool,
    /// What to do with an event that can never be published.
    pub on_bad_event: OnBadEvent,
    /// The topic for a copy of each such event; empty for none.
    pub dead_letter_topic: String,
    /// Connections to Pub/Sub.
    pub pubsub_channels: usize,
    /// Limit of one publish attempt.
    pub publish_timeout: Duration,
    /// Limit of publish requests in flight.
    pub in_flight_requests: usize,
    /// Limit of the bytes of events in memory.
    pub in_flight_bytes: usize,
    /// `wal_sender_timeout` of the replication session.
    pub wal_sender_timeout: Duration,
    /// How long to wait for PostgreSQL at startup.
    pub start_timeout: Duration,
    /// How long to drain after SIGTERM.
    pub shutdown_timeout: Duration,
    /// The address of the HTTP port; `None` if it is off.
    pub http_addr: Option<SocketAddr>,
    /// What a browser must know to see the page.
    pub http_token: AccessToken,
    /// Whether to log JSON.
    pub log_json: bool,
}

/// A shared secret. Its text is never shown.
#[derive(Clone, Default)]
pub struct AccessToken(String);

impl AccessToken {
    /// Whether a token is set.
    pub fn is_set(&self) -> bool {
        !self.0.is_empty()
    }

    /// Whether `given` is the token. Takes the same time wherever they differ.
    pub fn is(&self, given: &str) -> bool {
        let (ours, given) = (Sha256::digest(&self.0), Sha256::digest(given));
        let differences = ours.iter().zip(given).map(|(a, b)| a ^ b);
        differences.fold(0, |all, one| all | one) == 0
    }
}

impl std::fmt::Debug for AccessToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AccessToken")
    }
}

impl Settings {
    /// Reads the layers: `file` (TOML), `env`, and `flags` as (key name, text).
    ///
    /// # Errors
    /// `setting-unknown`, `setting-invalid`, `database-url-invalid`: each names the source.
    pub fn load(
        file: Option<&Path>,
        env: &Environment,
        flags: &[(String, String)],
    ) -> Result<Self> {
        let mut table = match file {
            Some(path) => layers::file(path)?,
            None => Table::new(),
        };
        layers::environment(&mut table, env)?;
        for (name, text) in flags {
            let key = keys::find(name).expect("invariant: flags are made from the table of keys");
            layers::flag(&mut table, key, text)?;
        }
        refuse_settings_of_one_table(&table)?;
        layers::defaults(&mut table)?;
        for key in KEYS {
            if let Some(value) = table.get(key.name) {
                layers::check(key, value, "settings file")?;
            }
        }
        Self::from_table(&table, env)
    }

    fn from_table(table: &Table, env: &Environment) -> Result<Self> {
        let text = |name: &str| table.get(name).and_then(Value::as_str).unwrap_or_default();
        let seconds = |name: &str| Duration::from_secs(number(table, name));
        let switch = |name: &str| table.get(name).and_then(Value::as_bool).unwrap_or_default();
        let settings = Settings {
            database: database(text("database_url"), text("password_command"), env)?,
            slot: text("slot")
                .parse()
                .map_err(|e| setting_invalid("slot").caused_by(e))?,
            publication: text("publication").to_owned(),
            slot_failover: switch("slot_failover"),
            start: match text("start") {
                "new" => Start::New,
                "all" => Start::All,
                _ => return Err(setting_invalid("start").hint("use `new` or `all`")),
            },
            slot_on_loss: match text("slot_on_loss") {
                "recover" => OnLoss::Recover,
                "stop" => OnLoss::Stop,
                _ => return Err(setting_invalid("slot_on_loss").hint("use `recover` or `stop`")),
            },
            dispatch: Dispatch::named(text("dispatch"))
                .ok_or_else(|| setting_invalid("dispatch").hint("use `full` or `exceptions`"))?,
            tables: tables(table)?,
            project: project(text("project"))?,
            pubsub: endpoint(text("pubsub_emulator_host"), text("pubsub_endpoint"))?,
            create_topics: switch("create_topics"),
            on_bad_event: match text("on_bad_event") {
                "quarantine_key" => OnBadEvent::QuarantineKey,
                "quarantine_event" => OnBadEvent::QuarantineEvent,
                "halt" => OnBadEvent::Halt,
                _ => {
                    return Err(setting_invalid("on_bad_event")
                        .hint("use `quarantine_key`, `quarantine_event` or `halt`"));
                }
            },
            dead_letter_topic: text("dead_letter_topic").to_owned(),
            pubsub_channels: number(table, "pubsub_channels") as usize,
            publish_timeout: seconds("publish_timeout_s"),
            in_flight_requests: number(table, "in_flight_requests") as usize,
            in_flight_bytes: (number(table, "in_flight_mib") as usize) << 20,
            wal_sender_timeout: seconds("wal_sender_timeout_s"),
            start_timeout: seconds("start_timeout_s"),
            shutdown_timeout: seconds("shutdown_timeout_s"),
            http_addr: http_addr(text("http_addr"))?,
            http_token: AccessToken(text("http_token").to_owned()),
            log_json: match text("log_format") {
                "json" => true,
                "text" => false,
                _ => return Err(setting_invalid("log_format").hint("use `text` or `json`")),
            },
        };
        if settings.publish_timeout * 4 >= settings.wal_sender_timeout {
            return Err(setting_invalid("publish_timeout_s")
                .hint("publish_timeout_s must be less than a quarter of wal_sender_timeout_s"));
        }
        Ok(settings)
    }

    /// The captured tables, with the columns that the publication must include.
    pub fn captured(&self) -> Vec<CapturedTable> {
        let captured = |table: &TableSettings| CapturedTable {
            name: table.table.clone(),
            columns: table.required_columns(),
        };
        self.tables.iter().map(captured).collect()
    }

    /// The database, or an error that says how to set it.
    pub fn database(&self) -> Result<&Target> {
        self.database
            .as_ref()
            .ok_or_else(|| Error::new(Code::DatabaseUrlInvalid, "no database is set"))
    }

    /// The project, or an error that says how to set it.
    pub fn project(&self) -> Result<&str> {
        if self.project.is_empty() {
            return Err(Error::new(
                Code::ProjectMissing,
                "no Google Cloud project is set",
            ));
        }
        Ok(&self.project)
    }
}

impl Settings {
    /// The full name of the dead-letter topic, if one is set.
    ///
    /// # Errors
    /// `project-missing`; `setting-invalid` for a name that Pub/Sub would refuse.
    pub fn dead_letter_topic(&self) -> Result<Option<Arc<str>>> {
        if self.dead_letter_topic.is_empty() {
            return Ok(None);
        }
        let name = crate::mapping::topic_name(self.project()?, &self.dead_letter_topic);
        name.map(Some)
            .map_err(|fault| setting_invalid("dead_letter_topic").caused_by(fault))
    }
}

fn number(table: &Table, name: &str) -> u64 {
    let value = table.get(name).and_then(Value::as_integer);
    u64::try_from(value.expect("invariant: numbers have a default")).expect("invariant: checked")
}

fn setting_invalid(name: &str) -> Error {
    Error::new(
        Code::SettingInvalid,
        format!("setting `{name}` is not valid"),
    )
}

/// The database, and the command that prints its password.
fn database(url: &str, password_command: &str, env: &Environment) -> Result<Option<Target>> {
    let mut target = Target::from_settings(url, env)?;
    if let Some(target) = target.as_mut().filter(|_| !password_command.is_empty()) {
        if target.password.is_some() {
            return Err(setting_invalid("password_command").hint(
                "remove the password from DATABASE_URL and PGPASSWORD, or remove password_command",
            ));
        }
        target.password_command = Some(password_command.to_owned());
    }
    Ok(target)
}

/// Settings of the single table that is captured if the file has no [[tables]].
const OF_ONE_TABLE: [&str; 5] = ["table", "topic", "ordering", "envelope", "time_zone"];

/// `[[tables]]` of the file, or the single table that the plain settings describe.
fn tables(table: &Table) -> Result<Vec<TableSettings>> {
    let invalid = |e: toml::de::Error| {
        Error::new(
            Code::SettingInvalid,
            format!("the settings of the tables: {}", e.message()),
        )
    };
    let tables: Vec<TableSettings> = match table.get("tables") {
        Some(list) => list.clone().try_into().map_err(invalid)?,
        None => {
            let mut one = Table::new();
            for name in OF_ONE_TABLE {
                if let Some(value) = table.get(name) {
                    one.insert(name.into(), value.clone());
                }
            }
            vec![one.try_into().map_err(invalid)?]
        }
    };
    if tables.is_empty() {
        return Err(setting_invalid("tables").hint("name at least one table in [[tables]]"));
    }
    let mut names = HashSet::new();
    match tables.iter().find(|table| !names.insert(&table.table)) {
        Some(twice) => Err(Error::new(
            Code::SettingInvalid,
            format!("[[tables]] names table {} twice", twice.table),
        )
        .hint("put all settings of a table into one [[tables]] section")),
        None => Ok(tables),
    }
}

/// Refuses the settings of a single table together with [[tables]], where they would have no effect.
fn refuse_settings_of_one_table(set: &Table) -> Result<()> {
    if !set.contains_key("tables") {
        return Ok(());
    }
    match OF_ONE_TABLE.into_iter().find(|name| set.contains_key(*name)) {
        Some(name) => Err(Error::new(
            Code::SettingInvalid,
            format!("setting `{name}` has no effect together with [[tables]]"),
        )
        .hint(format!(
            "set it in each [[tables]] section instead; remove `{name}` from the top of the file and \
             POSTRIDER_{} from the environment",
            name.to_uppercase()
        ))),
        None => Ok(()),
    }
}

/// Checks the project; empty if not set. Pub/Sub answers a malformed project in the same way as a bad
/// message, so without this check the relay would quarantine events for it.
fn project(text: &str) -> Result<String> {
    if text.is_empty() || crate::mapping::limits::is_project_id(text) {
        Ok(text.to_owned())
    } else {
        Err(setting_invalid("project").hint(
            "use the project's id, such as my-project-123: lower-case letters, digits, hyphens",
        ))
    }
}

fn endpoint(emulator: &str, service: &str) -> Result<Endpoint> {
    if !emulator.is_empty() {
        let host = emulator.trim_start_matches("http://").trim_end_matches('/');
        return match format!("http://{host}").parse::<tonic::codegen::http::Uri>() {
            Ok(uri) if uri.port().is_some() && !host.contains('@') => {
                Ok(Endpoint::Emulator(host.to_owned()))
            }
            _ => Err(setting_invalid("pubsub_emulator_host").hint("write it as host:port")),
        };
    }
    match service.parse::<tonic::codegen::http::Uri>() {
        // A user and password would have no effect, and would appear in messages.
        Ok(uri)
            if matches!(uri.scheme_str(), Some("http" | "https"))
                && uri.host().is_some()
                && !service.contains('@') =>
        {
            Ok(Endpoint::Service(service.trim_end_matches('/').to_owned()))
        }
        _ => Err(Error::new(
            Code::PubsubEndpoint,
            "setting `pubsub_endpoint` is not a URL",
        )),
    }
}

fn http_addr(text: &str) -> Result<Option<SocketAddr>> {
    if text == "off" {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|e| {
        setting_invalid("http_addr")
            .caused_by(e)
            .hint("write it as ADDRESS:PORT, or `off`")
    })
}

#[cfg(test)]
mod tests;

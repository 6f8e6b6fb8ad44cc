//! Builds one checked [`Settings`] from file, environment and flags.
//!
//! Flags win over the environment, the environment over the file, the file over the defaults. All
//! settings are read and checked before the runtime starts, without any connection. No error shows the
//! value of `database_url`, which may contain a password.

mod choices;
mod duration;
mod file;
mod keys;
mod layers;
mod table_keys;
mod tables;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use publisher::Endpoint;
use sha2::{Digest, Sha256};
use slot_manager::SlotName;
use slot_manager::publication::CapturedTable;

pub use choices::{Dispatch, LogFormat, OnBadEvent, OnLoss, Start};
pub(crate) use duration::parse_duration;
pub use keys::{KEYS, SettingKey, SettingKind};
pub(crate) use layers::environment_of as environment;
pub use table_keys::{COLUMN_KEYS, TABLE_KEYS, TableKey, TableKeyKind};

use crate::environment::Environment;
use crate::error::{Code, Error, Result};
use crate::mapping::TableSettings;
use crate::postgres::Servers;
use layers::Layers;
use tables::{refuse_settings_of_one_table, refuse_wrong_dead_letter_topic, tables};

/// OpenTelemetry's variable for the URL of a trace collector. The OpenTelemetry library reads the
/// other `OTEL_` variables.
pub(crate) const TRACES_VARIABLE: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";

/// All settings, checked.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The servers of the database; `None` if the settings and libpq's variables name none.
    pub database: Option<Servers>,
    /// Replication slot.
    pub slot: SlotName,
    /// Publication name, as PostgreSQL stores it.
    pub publication: String,
    /// Whether the relay creates its slot with `failover`, so that PostgreSQL copies it to standby
    /// servers.
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
    /// The Pub/Sub endpoint.
    pub pubsub: Endpoint,
    /// Whether the relay creates missing topics.
    pub create_topics: bool,
    /// What to do with an event that can never be published.
    pub on_bad_event: OnBadEvent,
    /// The topic for a copy of each bad event; empty for none.
    pub dead_letter_topic: String,
    /// The relay deletes events whose outcome is older than this; `None` if it deletes nothing.
    pub prune_after: Option<Duration>,
    /// Number of connections to Pub/Sub.
    pub pubsub_channels: usize,
    /// Time limit of one publish attempt.
    pub publish_timeout: Duration,
    /// Maximum number of publish requests in flight.
    pub in_flight_requests: usize,
    /// Maximum total size of events in memory, in bytes.
    pub in_flight_bytes: usize,
    /// `wal_sender_timeout` of the replication session.
    pub wal_sender_timeout: Duration,
    /// How long PostgreSQL may be unreachable at startup before the relay exits.
    pub start_timeout: Duration,
    /// How long to drain after SIGTERM.
    pub shutdown_timeout: Duration,
    /// The address of the HTTP port; `None` if it is off.
    pub http_addr: Option<SocketAddr>,
    /// The token that a browser must send to see the data of the page.
    pub http_token: AccessToken,
    /// The URL of the collector of spans; `None` if spans are off.
    pub traces_endpoint: Option<String>,
    /// The format of the relay's log.
    pub log_format: LogFormat,
}

/// A shared secret. No output shows its text.
#[derive(Clone, Default)]
pub struct AccessToken(String);

impl AccessToken {
    /// Whether a token is set.
    pub fn is_set(&self) -> bool {
        !self.0.is_empty()
    }

    /// Whether `given` is the token. Compares in constant time.
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
    /// `setting-unknown`, `setting-invalid`, `database-url-invalid` or `pubsub-endpoint`.
    pub fn load(
        file: Option<&Path>,
        env: &Environment,
        flags: &[(String, String)],
    ) -> Result<Self> {
        let mut layers = match file {
            Some(path) => file::read(path)?,
            None => Layers::default(),
        };
        layers.add_environment(env)?;
        for (name, text) in flags {
            layers.add_flag(name, text)?;
        }
        refuse_settings_of_one_table(&layers)?;
        layers.add_defaults();
        Self::from_layers(layers, env)
    }

    fn from_layers(mut layers: Layers, env: &Environment) -> Result<Self> {
        let tables = tables(&mut layers)?;
        refuse_wrong_dead_letter_topic(&layers)?;
        let seconds = |name: &str| Duration::from_secs(layers.number(name));
        let settings = Settings {
            database: database(&layers, env)?,
            slot: layers.parsed("slot")?,
            publication: layers.text("publication").to_owned(),
            slot_failover: layers.switch("slot_failover"),
            start: layers.choice("start"),
            slot_on_loss: layers.choice("slot_on_loss"),
            dispatch: layers.choice("dispatch"),
            tables,
            project: project(&layers)?,
            pubsub: endpoint(&layers)?,
            create_topics: layers.switch("create_topics"),
            on_bad_event: layers.choice("on_bad_event"),
            dead_letter_topic: layers.text("dead_letter_topic").to_owned(),
            prune_after: prune_after(&layers)?,
            pubsub_channels: layers.number("pubsub_channels") as usize,
            publish_timeout: seconds("publish_timeout_s"),
            in_flight_requests: layers.number("in_flight_requests") as usize,
            in_flight_bytes: (layers.number("in_flight_mib") as usize) << 20,
            wal_sender_timeout: seconds("wal_sender_timeout_s"),
            start_timeout: seconds("start_timeout_s"),
            shutdown_timeout: seconds("shutdown_timeout_s"),
            http_addr: http_addr(&layers)?,
            http_token: http_token(&layers)?,
            traces_endpoint: traces_endpoint(env)?,
            log_format: layers.choice("log_format"),
        };
        if settings.publish_timeout * 4 >= settings.wal_sender_timeout {
            return Err(layers
                .invalid("publish_timeout_s")
                .hint("publish_timeout_s must be less than a quarter of wal_sender_timeout_s"));
        }
        Ok(settings)
    }

    /// The captured tables, with the columns that the publication must include.
    pub fn captured(&self) -> Vec<CapturedTable> {
        let captured = |table: &TableSettings| CapturedTable {
            name: table.table.clone(),
            columns: table.required_columns(),
            optional_columns: table.optional_columns(),
        };
        self.tables.iter().map(captured).collect()
    }

    /// The database, or an error that says how to set it.
    pub fn database(&self) -> Result<&Servers> {
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
    /// The topics as they are configured. A name in braces stands for the value of that column in the row.
    pub fn configured_topics(&self) -> BTreeSet<String> {
        let of_tables = self.tables.iter().flat_map(|table| {
            let rules = table.topic_rules.values().cloned();
            rules.chain([table.topic.to_string()])
        });
        let mut topics: BTreeSet<String> = of_tables.collect();
        if let Ok(Some(topic)) = self.dead_letter_topic() {
            topics.insert(topic.to_string());
        }
        topics
    }

    /// The full name of the dead-letter topic, if one is set.
    ///
    /// # Errors
    /// `project-missing`.
    pub fn dead_letter_topic(&self) -> Result<Option<Arc<str>>> {
        if self.dead_letter_topic.is_empty() {
            return Ok(None);
        }
        let name = crate::mapping::topic_name(self.project()?, &self.dead_letter_topic);
        name.map(Some)
            .map_err(|fault| setting_invalid("dead_letter_topic").caused_by(fault))
    }
}

fn setting_invalid(name: &str) -> Error {
    Error::new(
        Code::SettingInvalid,
        format!("setting `{name}` is not valid"),
    )
}

/// The database, and the command that prints its password.
fn database(layers: &Layers, env: &Environment) -> Result<Option<Servers>> {
    const VARIABLE: &str = "DATABASE_URL";
    let servers = Servers::from_settings(layers.text("database_url"), env);
    let place = layers.place("database_url").unwrap_or(VARIABLE);
    let mut servers = servers.map_err(|error| Error::from(error).at_place(VARIABLE, place))?;
    let password_command = layers.text("password_command");
    if let Some(servers) = servers.as_mut().filter(|_| !password_command.is_empty()) {
        if servers.have_password() {
            return Err(layers.invalid("password_command").hint(
                "remove the password from DATABASE_URL and PGPASSWORD, or remove password_command",
            ));
        }
        servers.set_password_command(password_command);
    }
    Ok(servers)
}

/// Returns the project, or an empty text if none is set. Refuses a malformed project here. Pub/Sub would answer
/// with the same error as for a bad message, so the relay would quarantine good events.
fn project(layers: &Layers) -> Result<String> {
    let text = layers.text("project");
    if text.is_empty() || crate::mapping::limits::is_project_id(text) {
        Ok(text.to_owned())
    } else {
        Err(layers.invalid("project").hint(
            "use the project's id, such as my-project-123: lower-case letters, digits, hyphens",
        ))
    }
}

fn endpoint(layers: &Layers) -> Result<Endpoint> {
    let emulator = layers.text("pubsub_emulator_host");
    if !emulator.is_empty() {
        let host = emulator.trim_start_matches("http://").trim_end_matches('/');
        return match format!("http://{host}").parse::<hyper::Uri>() {
            Ok(uri) if uri.port().is_some() && !host.contains('@') => {
                Ok(Endpoint::Emulator(host.to_owned()))
            }
            _ => Err(layers
                .invalid("pubsub_emulator_host")
                .hint("write it as host:port")),
        };
    }
    let service = layers.text("pubsub_endpoint");
    match service.parse::<hyper::Uri>() {
        // Accept no user and password in the URL: they would have no effect, and would appear in error messages.
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

fn traces_endpoint(env: &Environment) -> Result<Option<String>> {
    let Some(text) = env.get(TRACES_VARIABLE).filter(|text| !text.is_empty()) else {
        return Ok(None);
    };
    let url = text.parse::<hyper::Uri>();
    if !url.is_ok_and(|url| matches!(url.scheme_str(), Some("http" | "https"))) {
        let what = format!("the environment variable {TRACES_VARIABLE} is not an HTTP URL");
        return Err(Error::new(Code::SettingInvalid, what)
            .hint("write a URL such as http://localhost:4318/v1/traces, or unset the variable"));
    }
    Ok(Some(text.clone()))
}

fn prune_after(layers: &Layers) -> Result<Option<Duration>> {
    match layers.text("prune_after") {
        "off" => Ok(None),
        text => parse_duration(text).map(Some).map_err(|why| {
            let hint = format!("write a number and a unit, such as 30d or 12h, or `off`: {why}");
            layers.invalid("prune_after").hint(hint)
        }),
    }
}

/// Minimum length of `http_token`, in characters. An attacker could try all tokens of a shorter length.
const TOKEN_CHARS: usize = 16;

fn http_token(layers: &Layers) -> Result<AccessToken> {
    let token = layers.text("http_token");
    if !token.is_empty() && token.chars().count() < TOKEN_CHARS {
        return Err(layers.invalid("http_token").hint(format!(
            "use at least {TOKEN_CHARS} characters that nobody can guess: `openssl rand -hex 16` makes some"
        )));
    }
    Ok(AccessToken(token.to_owned()))
}

fn http_addr(layers: &Layers) -> Result<Option<SocketAddr>> {
    if layers.text("http_addr") == "off" {
        return Ok(None);
    }
    layers
        .parsed("http_addr")
        .map(Some)
        .map_err(|error| error.hint("write it as ADDRESS:PORT, or `off`"))
}

#[cfg(test)]
mod tests;

//! The programs that drain a backlog, and how to start each program.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::backlog::Backlog;
use crate::database::Database;
use crate::peers;
use crate::process::{self, TOPIC};

/// The slot that every program reads.
pub(crate) const SLOT: &str = "postrider";

/// A program that drains a backlog.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contestant {
    /// PostgreSQL's own reader, `pg_recvlogical`, writing to /dev/null.
    Recvlogical(Link),
    /// The relay's source, decoder and mapper, without a publisher.
    Null(Link),
    /// A program that reads and counts events with the crate pgwire-replication.
    Pgwire(Link),
    /// The relay, with at most one setting changed from its default.
    Relay {
        setting: Option<(&'static str, &'static str)>,
        /// The delay of the emulator's answers, in milliseconds.
        delay_ms: u64,
        build: Build,
    },
    /// The relay's source, decoder and mapper, with Google's Publisher instead of ours.
    Official,
    /// A tonic client that sends messages from memory, one message per request, and does nothing
    /// else.
    Bare {
        /// The delay of the emulator's answers, in milliseconds.
        delay_ms: u64,
    },
}

/// A build of the relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Build {
    This,
    /// Another binary. A run with both builds shows the effect of a change.
    Other(&'static Path),
}

/// The connection to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Link {
    Tcp,
    Socket,
}

/// Describes the delay of the emulator's answers, for the report.
fn late(delay_ms: u64) -> String {
    match delay_ms {
        0 => String::new(),
        _ => format!(", answers after {delay_ms} ms"),
    }
}

impl Contestant {
    /// The relay with its default settings.
    pub(crate) const RELAY: Self = Self::Relay {
        setting: None,
        delay_ms: 0,
        build: Build::This,
    };

    /// The same relay in another build, or `None` for programs that are not the relay.
    pub(crate) fn of_build(self, binary: &'static Path) -> Option<Self> {
        match self {
            Self::Relay {
                setting, delay_ms, ..
            } => Some(Self::Relay {
                setting,
                delay_ms,
                build: Build::Other(binary),
            }),
            Self::Recvlogical(_)
            | Self::Null(_)
            | Self::Pgwire(_)
            | Self::Official
            | Self::Bare { .. } => None,
        }
    }

    pub(crate) fn describe(self) -> String {
        let over = |link| match link {
            Link::Tcp => "TCP",
            Link::Socket => "a Unix socket",
        };
        match self {
            Self::Recvlogical(link) => format!("pg_recvlogical over {}", over(link)),
            Self::Null(link) => format!("decode and map only over {}", over(link)),
            Self::Pgwire(link) => format!("pgwire-replication, reading only, over {}", over(link)),
            Self::Relay {
                setting,
                delay_ms,
                build,
            } => {
                let setting = setting.map(|(name, value)| format!(", {name}={value}"));
                let setting = setting.unwrap_or_default();
                let build = match build {
                    Build::This => String::new(),
                    Build::Other(binary) => format!(" {}", binary.display()),
                };
                format!("relay{build}{setting}{}", late(delay_ms))
            }
            Self::Official => "google-cloud-pubsub Publisher behind our reading".into(),
            Self::Bare { delay_ms } => {
                format!(
                    "bare tonic client, one message per request{}",
                    late(delay_ms)
                )
            }
        }
    }

    /// The build of the relay whose `init` creates the schema. Each build needs the schema of its
    /// own version.
    pub(crate) fn schema(self) -> PathBuf {
        match self {
            Self::Relay {
                build: Build::Other(binary),
                ..
            } => binary.to_owned(),
            _ => process::binary(),
        }
    }

    /// The delay of the emulator's answers, or `None` for programs that need no emulator.
    pub(crate) fn emulator_delay_ms(self) -> Option<u64> {
        match self {
            Self::Recvlogical(_) | Self::Null(_) | Self::Pgwire(_) => None,
            Self::Relay { delay_ms, .. } | Self::Bare { delay_ms } => Some(delay_ms),
            Self::Official => Some(0),
        }
    }

    /// Whether each event has a row in `outbox.dispatch` after a drain.
    pub(crate) fn records_all(self) -> bool {
        match self {
            Self::Relay { setting, .. } => setting.is_none_or(|(name, _)| name != DISPATCH.0),
            Self::Recvlogical(_)
            | Self::Null(_)
            | Self::Pgwire(_)
            | Self::Official
            | Self::Bare { .. } => false,
        }
    }

    /// Whether this is a relay with `start = all`, which starts without a slot and publishes the backlog
    /// from the table.
    pub(crate) fn reads_the_table(self) -> bool {
        matches!(
            self,
            Self::Relay {
                setting: Some(START_ALL),
                ..
            }
        )
    }

    /// Whether the program exits once it has drained the backlog. The relay keeps running.
    pub(crate) fn ends_by_itself(self) -> bool {
        !matches!(self, Self::Relay { .. })
    }

    /// The command that runs the program. A program that reads a slot and ends by itself reads up to the
    /// position `end`. A program that publishes uses the emulator at `host`.
    pub(crate) fn command(
        self,
        database: &Database,
        end: &str,
        host: &str,
        backlog: &Backlog,
    ) -> Result<Command, String> {
        let events = backlog.events.to_string();
        let url = match self {
            Self::Recvlogical(Link::Socket)
            | Self::Null(Link::Socket)
            | Self::Pgwire(Link::Socket) => database.socket_url(),
            _ => database.url(),
        };
        let mut command = match self {
            Self::Recvlogical(_) => {
                let mut command = recvlogical(&url, "/dev/null")?;
                command.args(["--endpos", end]);
                command
            }
            Self::Null(_) | Self::Pgwire(_) => {
                let peer = if matches!(self, Self::Null(_)) {
                    "null"
                } else {
                    "pgwire"
                };
                let mut command = Command::new(peers::binary());
                command.args([peer, "--until", end, "--events", &events]);
                command
            }
            Self::Official => {
                let mut command = Command::new(peers::binary());
                command.args(["official", "--until", end, "--emulator", host]);
                command.args(["--topic", TOPIC]);
                command
            }
            Self::Bare { .. } => {
                let mut command = Command::new(peers::binary());
                command.args(["bare", "--requests", &events, "--emulator", host]);
                command.args(["--topic", TOPIC]);
                command
            }
            Self::Relay { setting, build, .. } => {
                let mut command = match build {
                    Build::This => Command::new(process::binary()),
                    Build::Other(binary) => Command::new(binary),
                };
                command.arg("run").envs(setting);
                command
            }
        };
        command.envs(process::environment(&url, host));
        Ok(command)
    }
}

/// The setting with which the relay writes no dispatch row for a published event.
pub(crate) const DISPATCH: (&str, &str) = ("POSTRIDER_DISPATCH", "exceptions");

/// With this setting, and without a slot, the relay publishes the rows that are in the table.
pub(crate) const START_ALL: (&str, &str) = ("POSTRIDER_START", "all");

/// The command that runs `pg_recvlogical` on the slot and writes to `file`.
pub(crate) fn recvlogical(url: &str, file: &str) -> Result<Command, String> {
    let mut command = Command::new(pg_recvlogical()?);
    command
        .args(["--dbname", url, "--slot", SLOT, "--start"])
        .args(["-o", "proto_version=1", "-o", "publication_names=postrider"])
        .args(["--fsync-interval=0", "--status-interval=1", "--no-loop"])
        .args(["--file", file])
        .stdin(Stdio::null());
    Ok(command)
}

fn pg_recvlogical() -> Result<PathBuf, String> {
    if let Some(folder) = std::env::var_os(scratch_postgres::BIN_FOLDER_VARIABLE) {
        return Ok(PathBuf::from(folder).join("pg_recvlogical"));
    }
    let versions = std::fs::read_dir("/usr/lib/postgresql").map_err(|e| e.to_string())?;
    let found = versions
        .flatten()
        .map(|version| version.path().join("bin/pg_recvlogical"));
    found
        .filter(|path| path.exists())
        .max()
        .ok_or_else(|| "no pg_recvlogical".into())
}

//! One server of the database, and how to log in there.
//!
//! `sources.rs` gathers the parameters, `parameters.rs` lists the supported ones, `servers.rs`
//! interprets the lists of hosts, and this module interprets all other values. Its errors show no
//! value of a parameter, and no `Debug` output contains the password.
//!
//! Source: <https://www.postgresql.org/docs/current/libpq-connect.html>.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::channel_binding::ChannelBinding;

use super::parameters::{Parameters, invalid};
use super::session_settings::check_options;
use crate::error::{ReplicationError, Result};

/// How long each step of connecting may take if `connect_timeout` is not set.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// One PostgreSQL server, a database on it, and how to log in.
#[derive(Clone)]
pub struct Target {
    /// The address or name of the server, or the folder of its socket.
    pub host: Host,
    /// libpq's `hostaddr`: the address to connect to, instead of resolving `host`.
    pub host_addr: Option<IpAddr>,
    /// TCP port, or the number in the file name of the Unix socket.
    pub port: u16,
    /// The role to log in as.
    pub user: String,
    /// The password, if a connection parameter sets one.
    pub password: Option<String>,
    /// The command that prints the password (setting `password_command`). It runs at each login.
    pub password_command: Option<String>,
    /// The password file to read at each login if no password is set.
    pub password_file: Option<PathBuf>,
    /// The password file to read if neither a password nor `password_file` is set. A file that
    /// cannot be used is ignored.
    pub default_password_file: Option<PathBuf>,
    /// The database to connect to.
    pub database: String,
    /// libpq's `options`: the operator's settings for each session, sent before our own.
    pub options: Option<String>,
    /// Whether the server must be a primary (`target_session_attrs`).
    pub primary_only: bool,
    /// How long each step of connecting may take. Opening a stream to one address of the host is
    /// one step, and the login is another.
    pub connect_timeout: Duration,
    /// TCP keepalives of the connection.
    pub keepalives: Keepalives,
    /// libpq's `sslmode`.
    pub ssl_mode: SslMode,
    /// The TLS versions that may be used.
    pub tls_versions: TlsVersions,
    /// Whether to send the host name unencrypted in the TLS handshake (`sslsni`).
    pub ssl_sni: bool,
    /// libpq's `channel_binding`: whether the login is bound to the TLS channel.
    pub channel_binding: ChannelBinding,
    /// PEM file of the trusted authorities; `None` means the operating system's authorities. With
    /// `verify-ca` over TCP there is always a file.
    pub ssl_root_cert: Option<PathBuf>,
    /// PEM files of the client's certificate and key.
    pub ssl_client: Option<(PathBuf, PathBuf)>,
}

/// Where the server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Host {
    /// A host name or address.
    Tcp(String),
    /// The folder of a Unix socket.
    Unix(PathBuf),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) host: Host,
    pub(super) host_addr: Option<IpAddr>,
    pub(super) port: u16,
}

/// libpq's `keepalives` parameters. `None` means our own default, or the operating system's default
/// if we have none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keepalives {
    /// Whether keepalives are sent.
    pub enabled: bool,
    /// Idle time on the connection before the first keepalive.
    pub idle: Option<Duration>,
    /// Time between two keepalives.
    pub interval: Option<Duration>,
    /// Maximum number of unanswered keepalives before the connection counts as dead.
    pub count: Option<u32>,
    /// Maximum time for which sent data may stay unacknowledged.
    pub user_timeout: Option<Duration>,
}

/// The TLS versions to offer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TlsVersions {
    /// Whether to offer TLS 1.2.
    pub tls12: bool,
    /// Whether to offer TLS 1.3.
    pub tls13: bool,
}

/// libpq's `sslmode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SslMode {
    /// No TLS.
    Disable,
    /// TLS if the server offers it. The certificate is not verified.
    Prefer,
    /// Always TLS. The certificate is verified only if `sslrootcert` is set, as in libpq.
    Require,
    /// Always TLS, with a certificate from a trusted authority.
    VerifyCa,
    /// Like `VerifyCa`, and the certificate must name the host.
    VerifyFull,
}

impl FromStr for SslMode {
    type Err = ReplicationError;

    fn from_str(text: &str) -> Result<Self> {
        Ok(match text {
            "disable" => SslMode::Disable,
            "prefer" | "allow" => SslMode::Prefer,
            "require" => SslMode::Require,
            "verify-ca" => SslMode::VerifyCa,
            "verify-full" => SslMode::VerifyFull,
            _ => {
                return Err(invalid("sslmode has an unknown value")
                    .hint("use disable, prefer, require, verify-ca or verify-full"));
            }
        })
    }
}

impl Target {
    /// Builds the target for the server at `address` from the parameters in `found`.
    /// `prefers_primary` says whether the server must be a primary if `target_session_attrs` is not
    /// set.
    ///
    /// # Errors
    /// `InvalidTarget`. The error shows no value.
    pub(super) fn new(
        found: &Parameters,
        address: Address,
        user: &str,
        prefers_primary: bool,
    ) -> Result<Self> {
        let Address {
            host,
            host_addr,
            port,
        } = address;
        let text = |name| found.get(name).cloned();
        let path = |name| text(name).map(PathBuf::from);
        let options = text("options");
        options.as_deref().map(check_options).transpose()?;
        Ok(Target {
            ssl_mode: ssl_mode(found, &host)?,
            host_addr,
            host,
            port,
            database: text("dbname").unwrap_or_else(|| user.to_owned()),
            user: user.to_owned(),
            password: text("password"),
            password_command: None,
            password_file: path("passfile"),
            default_password_file: None,
            options,
            primary_only: primary_only(found)?.unwrap_or(prefers_primary),
            connect_timeout: connect_timeout(found)?,
            keepalives: keepalives(found)?,
            tls_versions: tls_versions(found)?,
            ssl_sni: ssl_sni(found)?,
            channel_binding: channel_binding(found)?,
            ssl_root_cert: path("sslrootcert").filter(|path| path.as_os_str() != "system"),
            ssl_client: client_certificate(path("sslcert"), path("sslkey"))?,
        })
    }

    /// `host:port`. For a Unix socket, `folder:port`: the socket is the file `.s.PGSQL.<port>` in this folder.
    pub fn address(&self) -> String {
        let host = match &self.host {
            Host::Tcp(name) if name.contains(':') => format!("[{name}]"),
            Host::Tcp(name) => name.clone(),
            Host::Unix(folder) => folder.display().to_string(),
        };
        format!("{host}:{}", self.port)
    }

    /// The path of the Unix socket, `.s.PGSQL.<port>` in the folder; `None` for TCP.
    pub fn socket_path(&self) -> Option<PathBuf> {
        match &self.host {
            Host::Unix(folder) => Some(folder.join(format!(".s.PGSQL.{}", self.port))),
            Host::Tcp(_) => None,
        }
    }

    /// Whether TLS may be used on the connection. Never on a Unix socket.
    pub fn may_use_tls(&self) -> bool {
        self.ssl_mode != SslMode::Disable && matches!(self.host, Host::Tcp(_))
    }
}

/// `user@host:port/database`, for messages. Never contains the password.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}/{}", self.user, self.address(), self.database)
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({self}, sslmode {:?})", self.ssl_mode)
    }
}

/// Whether `target_session_attrs` makes us refuse a standby server while connecting. `None` if the parameter
/// is not set. `read-write` and `primary` mean the same here, because our sessions turn
/// `default_transaction_read_only` off. The relay needs a primary even with `any`, and checks this itself
/// after connecting.
fn primary_only(found: &Parameters) -> Result<Option<bool>> {
    match found.get("target_session_attrs").map(String::as_str) {
        None => Ok(None),
        Some("any") => Ok(Some(false)),
        Some("read-write" | "primary") => Ok(Some(true)),
        Some("read-only" | "standby" | "prefer-standby") => {
            Err(invalid("target_session_attrs asks for a standby server")
                .hint("the program writes to the primary: use target_session_attrs=primary"))
        }
        Some(_) => Err(invalid("target_session_attrs has an unknown value")
            .hint("use any, read-write or primary")),
    }
}

/// Whether to name the host in the TLS handshake (`sslsni`).
fn ssl_sni(found: &Parameters) -> Result<bool> {
    match found.get("sslsni").map(String::as_str) {
        None | Some("1") => Ok(true),
        Some("0") => Ok(false),
        Some(_) => Err(invalid("sslsni is neither 0 nor 1")),
    }
}

fn connect_timeout(found: &Parameters) -> Result<Duration> {
    let seconds: Option<i32> = number(found, "connect_timeout")?;
    // 1 means 2, as in older versions of libpq. In libpq, 0 and negative numbers mean "no limit". We always need
    // a limit, so for these numbers we use our default.
    Ok(match seconds {
        None | Some(..=0) => CONNECT_TIMEOUT,
        Some(seconds) => Duration::from_secs(u64::from(seconds.unsigned_abs().max(2))),
    })
}

/// Reads libpq's keepalive parameters. As in libpq, 0 means the default: our own default if there is one,
/// otherwise the operating system's.
fn keepalives(found: &Parameters) -> Result<Keepalives> {
    let positive = |name| {
        let value: Option<u32> = number(found, name)?;
        Ok::<_, ReplicationError>(value.filter(|value| *value > 0))
    };
    let seconds = |name| {
        let value = positive(name)?;
        Ok::<_, ReplicationError>(value.map(|value| Duration::from_secs(u64::from(value))))
    };
    Ok(Keepalives {
        enabled: number::<i32>(found, "keepalives")?.is_none_or(|value| value != 0),
        idle: seconds("keepalives_idle")?,
        interval: seconds("keepalives_interval")?,
        count: positive("keepalives_count")?,
        user_timeout: positive("tcp_user_timeout")?.map(|ms| Duration::from_millis(u64::from(ms))),
    })
}

fn number<N: FromStr>(found: &Parameters, name: &'static str) -> Result<Option<N>> {
    let value = found.get(name).map(|text| text.trim().parse());
    value
        .transpose()
        .map_err(|_| invalid(format!("`{name}` is not a whole number")))
}

/// Reads `sslmode`. As in libpq, `sslrootcert=system` implies `verify-full` and allows nothing weaker.
///
/// The operating system trusts public authorities, which sign certificates for anybody. With them, only the
/// host's name in the certificate distinguishes the server from an impostor. So `verify-ca`, which ignores the
/// name, needs an `sslrootcert` file with other authorities.
fn ssl_mode(found: &Parameters, host: &Host) -> Result<SslMode> {
    let root = found.get("sslrootcert").map(String::as_str);
    let mode = found.get("sslmode").map(|mode| mode.parse()).transpose()?;
    match (root, mode, host) {
        (Some("system"), None | Some(SslMode::VerifyFull), _) => Ok(SslMode::VerifyFull),
        (Some("system"), Some(_), _) => {
            Err(invalid("sslrootcert=system needs sslmode=verify-full"))
        }
        (None, Some(SslMode::VerifyCa), Host::Tcp(_)) => Err(invalid(
            "sslmode=verify-ca needs sslrootcert: without it, a certificate of any public authority would be \
             accepted",
        )
        .hint(
            "set sslrootcert to the PEM file of the server's authority; or use sslmode=verify-full, \
             which also verifies the host's name",
        )),
        (_, mode, _) => Ok(mode.unwrap_or(SslMode::Prefer)),
    }
}

fn tls_versions(found: &Parameters) -> Result<TlsVersions> {
    let version = |name: &str, default: u8| match found
        .get(name)
        .map(|text| text.to_ascii_lowercase())
        .as_deref()
    {
        None => Ok(default),
        Some("tlsv1") => Ok(0),
        Some("tlsv1.1") => Ok(1),
        Some("tlsv1.2") => Ok(2),
        Some("tlsv1.3") => Ok(3),
        Some(_) => {
            Err(invalid(format!("`{name}` is not a TLS version")).hint("use TLSv1.2 or TLSv1.3"))
        }
    };
    let (min, max) = (
        version("ssl_min_protocol_version", 2)?,
        version("ssl_max_protocol_version", 3)?,
    );
    let range = min..=max;
    let versions = TlsVersions {
        tls12: range.contains(&2),
        tls13: range.contains(&3),
    };
    if versions.tls12 || versions.tls13 {
        Ok(versions)
    } else {
        Err(invalid(
            "ssl_min_protocol_version and ssl_max_protocol_version allow no supported TLS version",
        )
        .hint("TLSv1.2 and TLSv1.3 are supported"))
    }
}

fn channel_binding(found: &Parameters) -> Result<ChannelBinding> {
    match found.get("channel_binding").map(String::as_str) {
        Some("disable") => Ok(ChannelBinding::Disable),
        Some("prefer") | None => Ok(ChannelBinding::Prefer),
        Some("require") => Ok(ChannelBinding::Require),
        Some(_) => {
            Err(invalid("channel_binding has an unknown value")
                .hint("use disable, prefer or require"))
        }
    }
}

fn client_certificate(
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
) -> Result<Option<(PathBuf, PathBuf)>> {
    match (cert, key) {
        (None, None) => Ok(None),
        (Some(cert), Some(key)) => Ok(Some((cert, key))),
        _ => Err(invalid(
            "a client certificate needs both sslcert and sslkey",
        )),
    }
}

#[cfg(test)]
#[path = "target_tests.rs"] // Git ignores folders called target.
mod tests;

//! The database in the words of libpq: a URL, or `PGHOST` and its relatives.
//!
//! Source: <https://www.postgresql.org/docs/current/libpq-connect.html>. The password is kept out
//! of every `Debug` and error text.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

pub use tokio_postgres::config::ChannelBinding;

use crate::error::{Code, Error, Result};
use crate::settings::Environment;

/// One PostgreSQL database and how to log in.
#[derive(Clone)]
pub struct Target {
    /// Server.
    pub host: Host,
    /// TCP port, or the number in the name of the Unix socket.
    pub port: u16,
    /// Role to log in as.
    pub user: String,
    /// Password, if one is set.
    pub password: Option<String>,
    /// Where to look for it when none is set, at each login.
    pub password_file: Option<PathBuf>,
    /// Database.
    pub database: String,
    /// What is demanded of TLS.
    pub ssl_mode: SslMode,
    /// libpq's `channel_binding`: whether the login is bound to the TLS channel.
    pub channel_binding: ChannelBinding,
    /// PEM file of the authorities; `None` means those of the system.
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

/// libpq's `sslmode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SslMode {
    /// Never TLS.
    Disable,
    /// TLS when the server offers it, unverified.
    Prefer,
    /// TLS, unverified; verified against `sslrootcert` when that is set, as libpq does.
    Require,
    /// TLS with a certificate from a trusted authority.
    VerifyCa,
    /// The same, and the certificate must name the host.
    VerifyFull,
}

impl FromStr for SslMode {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Ok(match text {
            "disable" => SslMode::Disable,
            "prefer" | "allow" => SslMode::Prefer,
            "require" => SslMode::Require,
            "verify-ca" => SslMode::VerifyCa,
            "verify-full" => SslMode::VerifyFull,
            _ => {
                return Err(url_invalid("sslmode is not known")
                    .hint("sslmode is one of disable, prefer, require, verify-ca, verify-full"));
            }
        })
    }
}

/// The TLS parameters of a URL or of the environment.
#[derive(Default)]
struct Ssl {
    mode: Option<String>,
    root_cert: Option<String>,
    cert: Option<String>,
    key: Option<String>,
    channel_binding: Option<String>,
}

impl Ssl {
    /// As in libpq, `sslrootcert=system` means `verify-full` and allows nothing weaker.
    fn mode(&self) -> Result<SslMode> {
        let system = self.root_cert.as_deref() == Some("system");
        let mode = self.mode.as_deref().map(str::parse).transpose()?;
        match (system, mode) {
            (false, mode) => Ok(mode.unwrap_or(SslMode::Prefer)),
            (true, None | Some(SslMode::VerifyFull)) => Ok(SslMode::VerifyFull),
            (true, Some(_)) => Err(url_invalid("sslrootcert=system needs sslmode=verify-full")),
        }
    }

    fn channel_binding(&self) -> Result<ChannelBinding> {
        Ok(match self.channel_binding.as_deref() {
            Some("disable") => ChannelBinding::Disable,
            Some("prefer") | None => ChannelBinding::Prefer,
            Some("require") => ChannelBinding::Require,
            Some(_) => {
                return Err(url_invalid("channel_binding is not known")
                    .hint("channel_binding is one of disable, prefer, require"));
            }
        })
    }
}

impl Target {
    /// From a URL, with the environment filling in what it leaves out; `None` when neither names
    /// a database.
    ///
    /// # Errors
    /// `database-url-invalid`; the URL itself is never shown.
    pub fn from_settings(url: &str, env: &Environment) -> Result<Option<Self>> {
        let var = |name: &str| env.get(name).filter(|v| !v.is_empty()).cloned();
        if url.is_empty() && var("PGHOST").is_none() && var("PGDATABASE").is_none() {
            return Ok(None);
        }
        let (plain, mut ssl) = split_ssl(url)?;
        let config: tokio_postgres::Config =
            plain.parse().map_err(|e: tokio_postgres::Error| {
                url_invalid("DATABASE_URL cannot be read").caused_by(e)
            })?;
        if config.get_hosts().len() > 1 {
            return Err(url_invalid("DATABASE_URL names several hosts")
                .hint("name one host: the primary, or an address that follows it"));
        }
        ssl.mode = ssl.mode.or_else(|| var("PGSSLMODE"));
        ssl.root_cert = ssl.root_cert.or_else(|| var("PGSSLROOTCERT"));
        ssl.cert = ssl.cert.or_else(|| var("PGSSLCERT"));
        ssl.key = ssl.key.or_else(|| var("PGSSLKEY"));
        ssl.channel_binding = ssl.channel_binding.or_else(|| var("PGCHANNELBINDING"));
        let ssl_mode = ssl.mode()?;
        let host = match config.get_hosts().first() {
            Some(tokio_postgres::config::Host::Tcp(name)) => Host::Tcp(name.clone()),
            Some(tokio_postgres::config::Host::Unix(path)) => Host::Unix(path.clone()),
            None => host(&var("PGHOST").unwrap_or_else(|| "localhost".into())),
        };
        let port = match config.get_ports().first() {
            Some(port) => *port,
            None => match var("PGPORT") {
                Some(text) => text
                    .parse()
                    .map_err(|_| url_invalid("PGPORT is not a port number"))?,
                None => 5432,
            },
        };
        let user = (config.get_user().map(str::to_owned))
            .or_else(|| var("PGUSER"))
            .or_else(|| var("USER"))
            .ok_or_else(|| url_invalid("no user is set").hint("add the user to DATABASE_URL"))?;
        let password = match config.get_password() {
            Some(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
            None => var("PGPASSWORD"),
        };
        let database = (config.get_dbname().map(str::to_owned))
            .or_else(|| var("PGDATABASE"))
            .unwrap_or_else(|| user.clone());
        Ok(Some(Target {
            host,
            port,
            user,
            password,
            password_file: var("PGPASSFILE").map(PathBuf::from),
            database,
            ssl_mode,
            channel_binding: ssl.channel_binding()?,
            ssl_root_cert: ssl
                .root_cert
                .filter(|path| path != "system")
                .map(PathBuf::from),
            ssl_client: client_certificate(ssl.cert, ssl.key)?,
        }))
    }

    /// Where the Unix socket is, `.s.PGSQL.<port>` in the folder; `None` for TCP.
    pub fn socket_path(&self) -> Option<PathBuf> {
        match &self.host {
            Host::Unix(folder) => Some(folder.join(format!(".s.PGSQL.{}", self.port))),
            Host::Tcp(_) => None,
        }
    }

    /// Whether TLS is used at all on this way; never on a Unix socket.
    pub fn may_use_tls(&self) -> bool {
        self.ssl_mode != SslMode::Disable && matches!(self.host, Host::Tcp(_))
    }
}

/// `user@host:port/database`, for messages; never the password.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = match &self.host {
            Host::Tcp(name) => name.clone(),
            Host::Unix(folder) => folder.display().to_string(),
        };
        write!(f, "{}@{}:{}/{}", self.user, host, self.port, self.database)
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({self}, sslmode {:?})", self.ssl_mode)
    }
}

fn url_invalid(what: &str) -> Error {
    Error::new(Code::DatabaseUrlInvalid, what)
}

fn host(text: &str) -> Host {
    if text.starts_with('/') {
        Host::Unix(text.into())
    } else {
        Host::Tcp(text.to_owned())
    }
}

fn client_certificate(
    cert: Option<String>,
    key: Option<String>,
) -> Result<Option<(PathBuf, PathBuf)>> {
    match (cert, key) {
        (None, None) => Ok(None),
        (Some(cert), Some(key)) => Ok(Some((cert.into(), key.into()))),
        _ => Err(url_invalid(
            "a client certificate needs both sslcert and sslkey",
        )),
    }
}

/// Takes the TLS parameters out of a URL, since tokio-postgres does not know most of them.
fn split_ssl(url: &str) -> Result<(String, Ssl)> {
    let mut ssl = Ssl::default();
    if !url.is_empty() && !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
        return Err(url_invalid("DATABASE_URL does not start with postgres://"));
    }
    let Some((base, query)) = url.split_once('?') else {
        return Ok((url.into(), ssl));
    };
    let mut rest = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let slot = match name {
            "sslmode" => &mut ssl.mode,
            "sslrootcert" => &mut ssl.root_cert,
            "sslcert" => &mut ssl.cert,
            "sslkey" => &mut ssl.key,
            "channel_binding" => &mut ssl.channel_binding,
            _ => {
                rest.push(pair);
                continue;
            }
        };
        *slot = Some(percent_decode(value)?);
    }
    let joined = rest.join("&");
    Ok((
        if joined.is_empty() {
            base.into()
        } else {
            format!("{base}?{joined}")
        },
        ssl,
    ))
}

fn percent_decode(text: &str) -> Result<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let hex = rest.get(..2).and_then(|h| std::str::from_utf8(h).ok());
        let value = hex.and_then(|h| u8::from_str_radix(h, 16).ok());
        bytes.push(value.ok_or_else(|| url_invalid("DATABASE_URL has a broken %-escape"))?);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).map_err(|_| url_invalid("DATABASE_URL is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(url: &str, env: &[(&str, &str)]) -> Result<Option<Target>> {
        let env = env
            .iter()
            .map(|(k, v)| ((*k).into(), (*v).into()))
            .collect();
        Target::from_settings(url, &env)
    }

    #[test]
    fn a_url_with_tls_parameters_is_read_whole() {
        let url = "postgres://relay:s%40cret@db.example:6543/shop\
                   ?sslmode=verify-full&sslrootcert=%2Fetc%2Fca.pem&connect_timeout=3";
        let target = target(url, &[]).unwrap().unwrap();
        assert_eq!(target.to_string(), "relay@db.example:6543/shop");
        assert_eq!(target.password.as_deref(), Some("s@cret"));
        assert_eq!(target.ssl_mode, SslMode::VerifyFull);
        assert_eq!(target.ssl_root_cert, Some("/etc/ca.pem".into()));
    }

    #[test]
    fn the_environment_fills_in_what_the_url_leaves_out() {
        let env = [
            ("PGUSER", "relay"),
            ("PGPASSWORD", "p"),
            ("PGSSLMODE", "require"),
        ];
        let target = target("postgres://db/shop", &env).unwrap().unwrap();
        assert_eq!((target.user.as_str(), target.port), ("relay", 5432));
        assert_eq!(target.ssl_mode, SslMode::Require);
    }

    #[test]
    fn a_login_is_bound_to_its_channel_where_it_can_be_unless_more_or_less_is_asked_for() {
        let binding = |url, env| target(url, env).map(|found| found.unwrap().channel_binding);
        let asked = "postgres://u@h/d?channel_binding=require&sslmode=require";
        assert_eq!(binding(asked, &[]).unwrap(), ChannelBinding::Require);
        let env = [("PGCHANNELBINDING", "disable")];
        assert_eq!(binding(asked, &env).unwrap(), ChannelBinding::Require);
        let plain = "postgres://u@h/d";
        assert_eq!(binding(plain, &env).unwrap(), ChannelBinding::Disable);
        assert_eq!(binding(plain, &[]).unwrap(), ChannelBinding::Prefer);
        assert!(binding("postgres://u@h/d?channel_binding=on", &[]).is_err());
    }

    #[test]
    fn libpq_variables_alone_are_enough_and_a_folder_means_a_unix_socket() {
        let env = [
            ("PGHOST", "/run/postgresql"),
            ("PGPORT", "5433"),
            ("PGUSER", "relay"),
        ];
        let target = target("", &env).unwrap().unwrap();
        assert_eq!(
            target.socket_path(),
            Some("/run/postgresql/.s.PGSQL.5433".into())
        );
        assert_eq!(target.database, "relay");
        assert!(!target.may_use_tls());
    }

    #[test]
    fn the_authorities_of_the_system_are_never_used_without_full_verification() {
        let found = target("postgres://u@h/d?sslrootcert=system", &[])
            .unwrap()
            .unwrap();
        assert_eq!(found.ssl_mode, SslMode::VerifyFull);
        assert!(target("postgres://u@h/d?sslrootcert=system&sslmode=require", &[]).is_err());
    }

    #[test]
    fn without_any_setting_there_is_no_target() {
        assert!(target("", &[]).unwrap().is_none());
    }

    #[test]
    fn a_password_is_in_no_debug_output_and_in_no_error() {
        let good = target("postgres://u:hunter2@h/d", &[]).unwrap().unwrap();
        assert!(!format!("{good:?} {good}").contains("hunter2"));
        for bad in [
            "postgres://u:hunter2@h:port/d",
            "http://u:hunter2@h/d",
            "postgres://u:hunter2@h/d?sslmode=x",
        ] {
            let error = target(bad, &[]).unwrap_err();
            assert_eq!(error.code(), Code::DatabaseUrlInvalid);
            assert!(
                !format!("{error} {error:?}").contains("hunter2"),
                "{error:?}"
            );
        }
    }
}

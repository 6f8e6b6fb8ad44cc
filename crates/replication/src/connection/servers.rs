//! The configured servers of the database, in the order in which a session tries them.
//!
//! As in libpq, a session uses the first server that it can reach. If `target_session_attrs` requires a
//! primary, the session skips standby servers. A failed login ends the search, because an error of the next
//! server would hide why the login failed.
//!
//! Two things differ from libpq:
//!
//! - With several hosts, the default is `target_session_attrs=primary`, because this crate can do nothing on a
//!   standby server.
//! - A session also skips a server that closes the connection before the login.
//!
//! An SQL session chooses the server. A replication session is given the [`Target`] of an SQL
//! session, so both sessions use the same server.
//!
//! Source: <https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-MULTIPLE-HOSTS>

use std::fmt;
use std::net::IpAddr;

use printable::may_contain_password;

use super::parameters::{Parameters, invalid};
use super::service_file::in_folder;
use super::sources::gather;
use super::target::{Address, Host, Target};
use crate::environment::Environment;
use crate::error::Result;

const DEFAULT_HOST: &str = "localhost";
const DEFAULT_PORT: u16 = 5432;

/// The servers of one database. There is at least one.
#[derive(Debug, Clone)]
pub struct Servers(Vec<Target>);

impl Servers {
    /// Reads the servers from `text` (a URL, or `name=value` pairs; may be empty), a service file and the
    /// environment. `None` if `text` is empty, and neither the environment nor the service names a host, an
    /// address or a database.
    ///
    /// # Errors
    /// `InvalidTarget`. The error shows no value.
    pub fn from_settings(text: &str, env: &Environment) -> Result<Option<Self>> {
        let found = gather(text, env)?;
        let names_a_database = ["host", "hostaddr", "dbname"];
        if text.trim().is_empty() && !names_a_database.iter().any(|name| found.contains_key(name)) {
            return Ok(None);
        }
        let of_system = || env.get("USER").filter(|user| !user.is_empty());
        let user = found.get("user").or_else(of_system);
        let user = user
            .ok_or_else(|| invalid("no user is set").hint("add the user to DATABASE_URL"))?
            .clone();
        refuse_passwords(&found, &user)?;
        let addresses = addresses(&found)?;
        let are_several = addresses.len() > 1;
        let mut targets = Vec::new();
        for address in addresses {
            let mut target = Target::new(&found, address, &user, are_several)?;
            target.default_password_file = in_folder(env, "HOME", ".pgpass");
            targets.push(target);
        }
        Ok(Some(Self(targets)))
    }

    /// Whether the connection parameters contain a password. A password file or command does not
    /// count.
    pub fn have_password(&self) -> bool {
        self.0.iter().any(|target| target.password.is_some())
    }

    /// Sets the command that prints the password. It runs at each login.
    pub fn set_password_command(&mut self, command: &str) {
        for target in &mut self.0 {
            target.password_command = Some(command.to_owned());
        }
    }
}

impl AsRef<[Target]> for Servers {
    fn as_ref(&self) -> &[Target] {
        &self.0
    }
}

impl AsRef<[Target]> for Target {
    fn as_ref(&self) -> &[Target] {
        std::slice::from_ref(self)
    }
}

/// `user@host:port,host:port/database`, for messages. Never contains the password.
impl fmt::Display for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addresses: Vec<String> = self.0.iter().map(Target::address).collect();
        let Some(first) = self.0.first() else {
            return Ok(());
        };
        let (user, database) = (&first.user, &first.database);
        write!(f, "{user}@{}/{database}", addresses.join(","))
    }
}

/// Returns an error if the user, the database or the host looks like a connection string. Messages show these three
/// values, so they would also show the password in the connection string.
fn refuse_passwords(found: &Parameters, user: &str) -> Result<()> {
    let of = |name: &str| found.get(name).map_or("", String::as_str);
    let shown = [
        ("user", user),
        ("dbname", of("dbname")),
        ("host", of("host")),
    ];
    match shown.iter().find(|(_, value)| may_contain_password(value)) {
        Some((name, _)) => Err(
            invalid(format!("{name} looks like a connection string with a password"))
                .hint("put the connection string into DATABASE_URL, and only the name into the other settings"),
        ),
        None => Ok(()),
    }
}

/// The addresses in the lists `host`, `hostaddr` and `port`.
fn addresses(found: &Parameters) -> Result<Vec<Address>> {
    let list = |name| -> Option<Vec<&str>> {
        let text = found.get(name)?;
        Some(text.split(',').map(str::trim).collect())
    };
    let (hosts, host_addrs) = (list("host"), list("hostaddr"));
    let count = match (&hosts, &host_addrs) {
        (Some(hosts), Some(addrs)) if hosts.len() != addrs.len() => {
            return Err(
                invalid("host and hostaddr name different numbers of servers")
                    .hint("give each host its address, in the same order"),
            );
        }
        (Some(list), _) | (None, Some(list)) => list.len(),
        (None, None) => 1,
    };
    let ports = list("port").unwrap_or_default();
    if ports.len() > 1 && ports.len() != count {
        return Err(invalid("host and port have different numbers of entries")
            .hint("give one port for all hosts, or one for each host"));
    }
    let at = |list: &Option<Vec<&str>>, nth| {
        let entry: Option<&&str> = list.as_ref().and_then(|list| list.get(nth));
        entry
            .filter(|entry| !entry.is_empty())
            .map(|entry| (*entry).to_owned())
    };
    (0..count)
        .map(|nth| {
            let port = match ports.as_slice() {
                [one] => one,
                several => several.get(nth).copied().unwrap_or_default(),
            };
            address(at(&hosts, nth), at(&host_addrs, nth), port)
        })
        .collect()
}

fn address(host: Option<String>, host_addr: Option<String>, port: &str) -> Result<Address> {
    let host_addr: Option<IpAddr> =
        host_addr
            .map(|text| text.parse())
            .transpose()
            .map_err(|_| {
                invalid("hostaddr is not an IP address").hint("put a host name into `host`")
            })?;
    let host = match (host, host_addr) {
        (Some(host), _) => parse_host(host)?,
        (None, Some(address)) => Host::Tcp(address.to_string()),
        (None, None) => Host::Tcp(DEFAULT_HOST.into()),
    };
    if let (Host::Unix(_), Some(_)) = (&host, host_addr) {
        return Err(
            invalid("hostaddr is set, and the host is the folder of a Unix socket").hint(
                "remove hostaddr (PGHOSTADDR) to use the socket, or make the host a host name",
            ),
        );
    }
    let port = if port.is_empty() {
        DEFAULT_PORT
    } else {
        port.parse()
            .ok()
            .filter(|port| *port != 0)
            .ok_or_else(|| invalid("the port is not a number from 1 to 65535"))?
    };
    Ok(Address {
        host,
        host_addr,
        port,
    })
}

/// Accepts an absolute path (the folder of a Unix socket), or text that contains only characters of
/// host names. Refuses any other text and never shows it, because it can be an unencoded piece of
/// the password.
fn parse_host(text: String) -> Result<Host> {
    if text.starts_with('/') {
        return Ok(Host::Unix(text.into()));
    }
    let is_allowed = |c: char| c.is_alphanumeric() || "-._:%".contains(c);
    if text.chars().all(is_allowed) {
        Ok(Host::Tcp(text))
    } else {
        Err(invalid(
            "the host is not a host name, an address or a folder",
        ))
    }
}

impl Target {
    /// Reads the connection parameters of a single server. Otherwise like
    /// [`Servers::from_settings`].
    ///
    /// # Errors
    /// `InvalidTarget`, also if several servers are named.
    pub fn from_settings(text: &str, env: &Environment) -> Result<Option<Self>> {
        let Some(Servers(targets)) = Servers::from_settings(text, env)? else {
            return Ok(None);
        };
        match <[Target; 1]>::try_from(targets) {
            Ok([only]) => Ok(Some(only)),
            Err(_) => Err(invalid("several servers are named").hint("name one server")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn servers(text: &str) -> Result<Servers> {
        let found = Servers::from_settings(text, &Environment::new());
        found.map(|servers| servers.unwrap())
    }

    #[test]
    fn hosts_addresses_and_ports_are_lists() {
        for (text, shown) in [
            ("postgres://u@a:5432,b:5433/d", "u@a:5432,b:5433/d"),
            ("postgres://u@a,b:5433/d", "u@a:5432,b:5433/d"),
            ("postgres://u@/d?host=a,b&port=6000", "u@a:6000,b:6000/d"),
            (
                "host=a,,/run port=1,,3 user=u",
                "u@a:1,localhost:5432,/run:3/u",
            ),
            (
                "hostaddr=10.0.0.1,::1 user=u",
                "u@10.0.0.1:5432,[::1]:5432/u",
            ),
            ("host=a,b hostaddr=10.0.0.1, user=u", "u@a:5432,b:5432/u"),
            ("postgres://u@a/d", "u@a:5432/d"),
        ] {
            assert_eq!(servers(text).unwrap().to_string(), shown, "{text}");
        }
        let found = servers("host=a,b hostaddr=10.0.0.1, user=u").unwrap();
        let addresses: Vec<_> = found.0.iter().map(|target| target.host_addr).collect();
        assert_eq!(addresses, [Some([10, 0, 0, 1].into()), None]);
    }

    #[test]
    fn a_connection_string_in_another_setting_is_refused_and_not_shown() {
        let url = "postgres://relay:hunter2@db/shop";
        let pairs = "host=db password=hunter2";
        for value in [url, pairs] {
            for variable in ["PGDATABASE", "PGUSER", "PGHOST", "USER"] {
                let mut env = Environment::new();
                env.insert("PGDATABASE".into(), "shop".into());
                env.insert(variable.into(), value.into());
                let error = Servers::from_settings("", &env).unwrap_err();
                assert_eq!(error.kind(), &ErrorKind::InvalidTarget, "{variable}");
                assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
            }
            let mut encoded = String::new();
            for byte in value.bytes() {
                encoded += &format!("%{byte:02X}");
            }
            let error = servers(&format!("postgres://u@h/d?dbname={encoded}")).unwrap_err();
            assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
        }
        let quoted = format!("host=h user=u dbname='{pairs}'");
        let error = servers(&quoted).unwrap_err();
        assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
    }

    #[test]
    fn lists_of_different_lengths_are_refused() {
        for text in [
            "postgres://u@a,b,c/d?port=1,2",
            "host=a port=1,2 user=u",
            "host=a,b hostaddr=10.0.0.1 user=u",
            "host=/run,b hostaddr=10.0.0.1,10.0.0.2 user=u",
        ] {
            let error = servers(text).unwrap_err();
            assert_eq!(error.kind(), &ErrorKind::InvalidTarget, "{text}");
        }
    }

    #[test]
    fn several_servers_must_be_primaries_unless_the_settings_say_otherwise() {
        for (text, is_refused) in [
            ("postgres://u@a/d", false),
            ("postgres://u@a/d?target_session_attrs=read-write", true),
            ("postgres://u@a,b/d", true),
            ("postgres://u@a,b/d?target_session_attrs=primary", true),
            ("postgres://u@a,b/d?target_session_attrs=any", false),
        ] {
            let found = servers(text).unwrap();
            assert!(
                found
                    .0
                    .iter()
                    .all(|target| target.primary_only == is_refused),
                "{text}"
            );
        }
        for wrong in ["read-only", "standby", "prefer-standby"] {
            let error = servers(&format!("host=a,b user=u target_session_attrs={wrong}"));
            let error = error.unwrap_err();
            assert!(error.to_string().contains("asks for a standby"), "{error}");
            assert!(error.hint_text().contains("primary"), "{error:?}");
        }
    }
}

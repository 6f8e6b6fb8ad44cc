//! The description of a scratch server: settings, access rules, TLS, and the source of its data.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::account::Account;
use crate::binaries::Binaries;
use crate::folder::Folder;
use crate::{Error, ScratchPostgres, process};

/// Settings of every scratch server. [`Builder::setting`] overrides any of them.
const DEFAULT_SETTINGS: [(&str, &str); 13] = [
    ("listen_addresses", "127.0.0.1"),
    ("wal_level", "logical"),
    ("max_wal_senders", "20"),
    ("max_replication_slots", "20"),
    ("max_prepared_transactions", "5"),
    ("shared_buffers", "32MB"),
    // Shared memory is a file in the data folder, so that a crash leaves nothing behind in
    // /dev/shm.
    ("dynamic_shared_memory_type", "mmap"),
    // Without fsync, only a crash of the machine loses data. Killing a process loses none.
    ("fsync", "off"),
    ("full_page_writes", "off"),
    ("wal_retrieve_retry_interval", "200ms"),
    ("lc_messages", "C"),
    ("timezone", "UTC"),
    ("log_timezone", "UTC"),
];

/// Describes a server. [`Builder::start`] creates and starts it.
#[derive(Debug, Clone, Default)]
pub struct Builder {
    settings: Vec<(String, String)>,
    initdb_args: Vec<String>,
    hba_lines: Vec<String>,
    tls: Option<Tls>,
    data: Data,
    programs: Option<PathBuf>,
}

/// The source of the data folder.
#[derive(Debug, Clone, Default)]
enum Data {
    #[default]
    Initdb,
    CopyOf(PathBuf),
    StandbyOf {
        data_dir: PathBuf,
        conninfo: String,
    },
    UpgradeOf {
        data_dir: PathBuf,
        programs: PathBuf,
    },
}

/// A server certificate for [`Builder::tls`]. Every field is PEM text.
#[derive(Clone)]
pub struct Tls {
    /// The server's certificate, with its chain if there is one.
    pub cert_pem: String,
    /// The private key of `cert_pem`.
    pub key_pem: String,
    /// The certificate authority that must have signed the client certificates. PostgreSQL needs it for
    /// `cert` rules (see [`Builder::hba_line`]). `None` if the server asks for no client certificates.
    pub client_ca_pem: Option<String>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls(..)") // do not print the key
    }
}

impl Builder {
    /// Sets a server setting, as in `postgresql.conf`. The value needs no quotes. If a setting is set
    /// twice, the last call wins.
    #[must_use]
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Adds an argument for `initdb`, such as `--wal-segsize=1`.
    #[must_use]
    pub fn initdb_arg(mut self, argument: &str) -> Self {
        self.initdb_args.push(argument.to_owned());
        self
    }

    /// Adds a line to `pg_hba.conf`, for example `host all alice 127.0.0.1/32 scram-sha-256`. The line
    /// comes before the default lines, which trust every local user, because the first match decides.
    #[must_use]
    pub fn hba_line(mut self, line: &str) -> Self {
        self.hba_lines.push(line.to_owned());
        self
    }

    /// Turns TLS on. The default rules then refuse TCP connections without TLS. Connections over the
    /// Unix socket still need no TLS.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Turns `fsync` and `full_page_writes` on, for realistic measurements.
    #[must_use]
    pub fn durable(self) -> Self {
        self.setting("fsync", "on")
            .setting("full_page_writes", "on")
    }

    /// Starts from a copy of a *stopped* server's data, with the same system identifier and the same
    /// slots.
    #[must_use]
    pub fn copy_of(mut self, server: &ScratchPostgres) -> Self {
        self.data = Data::CopyOf(server.data_dir().to_owned());
        self
    }

    /// Makes a hot standby server of a *stopped* server, which may be started again afterwards. The
    /// standby server gets none of the primary's slots.
    #[must_use]
    pub fn standby_of(mut self, primary: &ScratchPostgres) -> Self {
        let conninfo = format!(
            "host={} port={} user=postgres dbname=postgres",
            primary.host(),
            primary.port()
        );
        self.data = Data::StandbyOf {
            data_dir: primary.data_dir().to_owned(),
            conninfo,
        };
        self
    }

    /// Uses the server programs in this folder, and ignores `POSTRIDER_PG_BIN`.
    #[must_use]
    pub fn programs(mut self, folder: &Path) -> Self {
        self.programs = Some(folder.to_owned());
        self
    }

    /// Upgrades a *stopped* server of an older major version: `pg_upgrade` copies its data into a new
    /// cluster. The folder that is passed to [`programs`](Self::programs) must contain `pg_upgrade`.
    /// This folder and the program folder of the old server must contain the programs that `pg_upgrade` calls.
    #[must_use]
    pub fn upgrade_of(mut self, server: &ScratchPostgres) -> Self {
        self.data = Data::UpgradeOf {
            data_dir: server.data_dir().to_owned(),
            programs: server.programs().to_owned(),
        };
        self
    }

    /// Creates the data folder, starts the server and waits until it accepts connections.
    ///
    /// # Errors
    /// Fails if the server programs, an account for them or a usable temp folder is missing, or if the
    /// source server is running. Also fails if a helper program such as `initdb` fails, or if the server
    /// does not start. The error then contains the output of the program, or the end of the server's log.
    pub fn start(self) -> Result<ScratchPostgres, Error> {
        let binaries = match &self.programs {
            Some(folder) => Binaries::in_named_folder(folder)?,
            None => Binaries::find()?,
        };
        let account = Account::choose()?;
        let folder = Folder::create(account)?;
        let mut server = ScratchPostgres::new(binaries.clone(), account, folder.clone())?;
        self.make_data_folder(&binaries, account, &folder)?;
        self.write_files(account, &folder.data())?;
        self.upgrade(&binaries, account, &folder)?;
        server.start_first()?;
        Ok(server)
    }

    fn make_data_folder(
        &self,
        binaries: &Binaries,
        account: Account,
        folder: &Folder,
    ) -> Result<(), Error> {
        let source = match &self.data {
            Data::Initdb | Data::UpgradeOf { .. } => {
                return process::run(
                    account
                        .command(&binaries.initdb, folder.root())
                        .args(["--username=postgres", "--auth=trust", "--encoding=UTF8"])
                        .args(["--locale=C", "--no-sync", "--no-instructions"])
                        .args(&self.initdb_args)
                        .arg("--pgdata")
                        .arg(folder.data()),
                );
            }
            Data::CopyOf(source)
            | Data::StandbyOf {
                data_dir: source, ..
            } => source,
        };
        if source.join("postmaster.pid").exists() {
            return Err(Error::Running);
        }
        process::run(Command::new("cp").arg("-a").arg(source).arg(folder.data()))?;
        match &self.data {
            Data::Initdb | Data::CopyOf(_) | Data::UpgradeOf { .. } => Ok(()),
            // A standby server must not start with the primary's slots. It has its own slots, or copies
            // that it keeps in sync automatically.
            Data::StandbyOf { .. } => remove_slots(&folder.data()),
        }
    }

    /// Runs `pg_upgrade`. The settings must be written first, because the new server's
    /// `max_replication_slots` must leave room for the slots that `pg_upgrade` copies.
    fn upgrade(&self, binaries: &Binaries, account: Account, folder: &Folder) -> Result<(), Error> {
        let Data::UpgradeOf { data_dir, programs } = &self.data else {
            return Ok(());
        };
        process::run(
            account
                .command(binaries.folder().join("pg_upgrade"), folder.root())
                .args(["--username=postgres", "--no-sync", "--socketdir"])
                .arg(folder.root())
                .arg("--old-bindir")
                .arg(programs)
                .arg("--new-bindir")
                .arg(binaries.folder())
                .arg("--old-datadir")
                .arg(data_dir)
                .arg("--new-datadir")
                .arg(folder.data()),
        )
    }

    fn write_files(&self, account: Account, data: &Path) -> Result<(), Error> {
        let write = |name: &str, content: &str| write_file(account, &data.join(name), content);
        write("postgresql.conf", &self.postgresql_conf())?;
        write("pg_hba.conf", &self.pg_hba_conf())?;
        if let Some(tls) = &self.tls {
            write("server.crt", &tls.cert_pem)?;
            write("server.key", &tls.key_pem)?;
            write(
                "client-ca.crt",
                tls.client_ca_pem.as_deref().unwrap_or_default(),
            )?;
        }
        if matches!(self.data, Data::StandbyOf { .. }) {
            write("standby.signal", "")?;
        }
        Ok(())
    }

    fn postgresql_conf(&self) -> String {
        let mut settings: Vec<(&str, &str)> = DEFAULT_SETTINGS.to_vec();
        if let Some(tls) = &self.tls {
            settings.push(("ssl", "on"));
            if tls.client_ca_pem.is_some() {
                settings.push(("ssl_ca_file", "client-ca.crt"));
            }
        }
        if let Data::StandbyOf { conninfo, .. } = &self.data {
            settings.push(("primary_conninfo", conninfo));
        }
        settings.extend(self.settings.iter().map(|(n, v)| (n.as_str(), v.as_str())));
        settings
            .iter()
            .map(|(name, value)| setting_line(name, value))
            .collect()
    }

    fn pg_hba_conf(&self) -> String {
        let tcp = if self.tls.is_some() {
            "hostssl"
        } else {
            "host"
        };
        let mut lines = self.hba_lines.clone();
        for database in ["all", "replication"] {
            lines.push(format!("local {database} all trust"));
            lines.push(format!("{tcp} {database} all 127.0.0.1/32 trust"));
        }
        lines.join("\n") + "\n"
    }
}

/// Removes the replication slots from a data folder, as `pg_basebackup` does.
fn remove_slots(data: &Path) -> Result<(), Error> {
    let folder = data.join("pg_replslot");
    let failed = || Error::io(format!("removing the slots in {}", folder.display()));
    for slot in fs::read_dir(&folder).map_err(failed())? {
        let slot = slot.map_err(failed())?;
        fs::remove_dir_all(slot.path()).map_err(failed())?;
    }
    Ok(())
}

/// Formats one line of a configuration file, with the value in quotes.
pub(crate) fn setting_line(name: &str, value: &str) -> String {
    format!(
        "{name} = '{}'\n",
        value.replace('\\', "\\\\").replace('\'', "''")
    )
}

/// Writes a file that only the server's account can read, because PostgreSQL refuses a private key that other
/// accounts can read.
fn write_file(account: Account, path: &Path, content: &str) -> Result<(), Error> {
    fs::write(path, content)
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o600)))
        .and_then(|()| account.take(path))
        .map_err(Error::io(format!("writing {}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_overrides_the_default_by_coming_later_and_is_quoted() {
        let builder = Builder::default()
            .setting("wal_level", "replica")
            .setting("a.b", r"it's \ x");
        let conf = builder.postgresql_conf();
        assert!(conf.find("wal_level = 'logical'") < conf.find("wal_level = 'replica'"));
        assert!(conf.ends_with("a.b = 'it''s \\\\ x'\n"), "{conf}");
    }

    #[test]
    fn custom_access_rules_come_before_the_default_ones() {
        let conf = Builder::default()
            .hba_line("host all alice 127.0.0.1/32 md5")
            .pg_hba_conf();
        assert!(conf.starts_with("host all alice 127.0.0.1/32 md5\nlocal all all trust\n"));
    }
}

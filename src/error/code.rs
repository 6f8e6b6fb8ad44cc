//! Defines the error codes. For each code, a table has the relay's reaction, the exit status, and a hint
//! for the operator.
//!
//! The page `docs/reference/errors/<code>.md` explains the code; `postrider explain` shows it.

use std::fmt;
use std::str::FromStr;

/// How the relay reacts to an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disposition {
    /// The error may be temporary: open a new session after a pause, as often as needed.
    Retry,
    /// An operator must change something before a retry can succeed: exit with the exit status of the code.
    Stop,
    /// A bug in Postrider: exit, and ask the operator to report it.
    Bug,
}

macro_rules! codes {
    ($($variant:ident $name:literal $disposition:ident $exit:literal $hint:literal)*) => {
        /// A kind of failure, with a name that stays the same across versions.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[allow(missing_docs, reason = "each code has a page under docs/reference/errors")]
        pub enum Code { $($variant,)* }

        impl Code {
            /// Every code, in the order of the table.
            pub const ALL: &[Code] = &[$(Code::$variant,)*];

            /// The name of the code, in kebab case.
            pub fn name(self) -> &'static str {
                match self { $(Code::$variant => $name,)* }
            }

            /// How the relay reacts to an error with this code.
            pub fn disposition(self) -> Disposition {
                match self { $(Code::$variant => Disposition::$disposition,)* }
            }

            /// The exit status of the process: 1 unexpected, 2 settings or usage, 3 PostgreSQL, 4
            /// Pub/Sub, 5 an event that cannot be delivered.
            pub fn exit_status(self) -> u8 {
                match self { $(Code::$variant => $exit,)* }
            }

            /// The general hint for the code; an error may have a more specific one.
            pub fn hint(self) -> &'static str {
                match self { $(Code::$variant => $hint,)* }
            }

            /// The page of this code, in Markdown.
            pub fn page(self) -> &'static str {
                match self {
                    $(Code::$variant => include_str!(
                        concat!("../../docs/reference/errors/", $name, ".md")
                    ),)*
                }
            }
        }
    };
}

codes! {
    Internal "internal" Bug 1 "this is a bug in Postrider: please report it with the relay's log"
    SettingInvalid "setting-invalid" Stop 2 "correct the setting; `postrider run --help` lists all settings"
    SettingUnknown "setting-unknown" Stop 2 "remove the setting or correct its spelling; `postrider run --help` lists all settings"
    DatabaseUrlInvalid "database-url-invalid" Stop 2 "set DATABASE_URL=postgres://user:password@host:5432/database"
    ProjectMissing "project-missing" Stop 2 "set PUBSUB_PROJECT_ID to the Google Cloud project of the topics"
    CredentialsMissing "credentials-missing" Stop 4 "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS"
    CredentialsUnavailable "credentials-unavailable" Retry 4 "run `gcloud auth application-default login`, \
                                                              or set GOOGLE_APPLICATION_CREDENTIALS; the \
                                                              relay retries automatically"
    PortInUse "port-in-use" Stop 2 "set POSTRIDER_HTTP_ADDR to a free address, or stop the other process"
    OpenFilesLimit "open-files-limit" Retry 2 "raise the limit on open files of the process to at least 1024 (`ulimit -n 1024`, or LimitNOFILE=1024 in the systemd unit), and start it again"
    PostgresUnreachable "postgres-unreachable" Retry 3 "check that PostgreSQL is running, and that DATABASE_URL has the right host and port"
    PostgresAuthentication "postgres-authentication" Stop 3 "check the user and password in DATABASE_URL, and the server's pg_hba.conf"
    PasswordCommand "password-command" Retry 3 "run password_command by hand, as the user and in the \
                                                environment of the relay; the relay retries automatically"
    PostgresTls "postgres-tls" Stop 3 "check sslmode and sslrootcert; sslmode=verify-full needs the host name in the certificate"
    PostgresConnectionLost "postgres-connection-lost" Retry 3 "no action needed: the relay reconnects \
                                                               automatically"
    PostgresHba "postgres-hba" Stop 3 "add a line for this role, database and address to pg_hba.conf, and reload; `postrider explain postgres-hba` has an example"
    PostgresTooManyConnections "postgres-too-many-connections" Retry 3 "raise max_connections and restart \
                                                                        PostgreSQL, or close other sessions; \
                                                                        the relay retries automatically"
    RoleConnectionLimit "role-connection-limit" Retry 3 "ALTER ROLE <relay user> CONNECTION LIMIT 9, or -1 \
                                                         for none: a relay needs up to 6 connections, and a \
                                                         standby and a command up to 3 more; the relay \
                                                         retries automatically"
    DatabaseConnectionLimit "database-connection-limit" Retry 3 "ALTER DATABASE <database> CONNECTION LIMIT \
                                                                 with a higher number, or close other \
                                                                 sessions; the relay retries automatically"
    DatabaseClosed "database-closed" Retry 3 "ALTER DATABASE <database> ALLOW_CONNECTIONS true, once the maintenance has ended; the relay then continues automatically"
    WalSendersUsedUp "wal-senders-used-up" Retry 3 "raise max_wal_senders and restart PostgreSQL, or end a \
                                                    replication session that nobody needs; the relay retries \
                                                    automatically"
    ReplicationSlotsUsedUp "replication-slots-used-up" Retry 3 "drop a slot that nobody needs, or raise \
                                                                max_replication_slots and restart \
                                                                PostgreSQL; the relay retries automatically"
    PostgresTimeout "postgres-timeout" Retry 3 "no action needed: the relay retries; if it repeats, look for locks and high load in PostgreSQL"
    LockWait "lock-wait" Retry 3 "wait for the transaction that holds the lock, or end it; the relay \
                                  continues automatically"
    PostgresStopping "postgres-stopping" Retry 3 "no action needed: the relay reconnects when PostgreSQL is back"
    PostgresStandby "postgres-standby" Retry 3 "point DATABASE_URL at the primary; the relay waits for it"
    PostgresVersion "postgres-version" Stop 3 "postrider needs PostgreSQL 14 or newer"
    PostgresStatement "postgres-statement" Stop 3 "read the server's message above; `postrider check` looks for changed objects"
    DiskFull "disk-full" Retry 3 "make room on the disk of PostgreSQL (or raise the quota); the relay \
                                  retries automatically"
    StandbySlotsStalled "synchronized-standby-slots-stalled" Retry 3 "start the standby servers again, or remove their \
                                slots from synchronized_standby_slots and reload; the relay continues automatically"
    TracesNotSent "traces-not-sent" Retry 3 "check OTEL_EXPORTER_OTLP_TRACES_ENDPOINT and the collector; delivery is not affected"
    LeaseLost "lease-lost" Retry 3 "no action needed: the relay reconnects; if it repeats, look for network problems between the relay and PostgreSQL"
    ReplicationRight "replication-right" Stop 3 "ALTER ROLE <relay user> REPLICATION; on RDS: GRANT rds_replication TO <relay user>"
    WalLevel "wal-level" Stop 3 "ALTER SYSTEM SET wal_level = 'logical', then restart PostgreSQL"
    PrivilegeMissing "privilege-missing" Stop 3 "`postrider check` shows the GRANT that is missing; GRANT postrider_relay TO <relay user> gives all rights that `postrider init --apply` has set up, and row-level security needs ALTER ROLE <relay user> BYPASSRLS"
    SchemaMissing "schema-missing" Stop 3 "run `postrider init --apply` as the owner of the database"
    PublicationMissing "publication-missing" Stop 3 "run `postrider init --apply` as the owner of the tables"
    PublicationDrift "publication-drift" Stop 3 "`postrider check` shows the statement that corrects the publication"
    PublicationGap "publication-gap" Retry 3 "no action needed: the relay publishes these rows from the table; find out who altered the publication"
    TableCaptured "table-captured" Stop 3 "set POSTRIDER_SLOT to that slot, or detach the partition that it has captured; if its relay is gone for good: `postrider recover --adopt`"
    SlotMissing "slot-missing" Stop 3 "`postrider recover --dry-run` lists the undelivered rows; `postrider recover` requests their delivery"
    SlotStuck "slot-stuck" Stop 3 "run `postrider recover`, then start the relay"
    SlotHeld "slot-held" Retry 3 "no action needed: this relay is a standby until the other one stops"
    SlotExists "slot-exists" Stop 3 "`postrider slot show` shows the slot; `postrider run` uses it"
    SlotForeign "slot-foreign" Stop 3 "choose another name with POSTRIDER_SLOT"
    SlotLost "slot-lost" Stop 3 "`postrider recover --dry-run` lists the undelivered rows; `postrider recover` requests their delivery"
    SlotRecreated "slot-recreated" Stop 3 "`postrider recover --dry-run` lists the undelivered rows; `postrider recover` requests their delivery"
    SlotBusy "slot-busy" Retry 3 "end the transactions that block it, or retry later"
    ForeignCluster "foreign-cluster" Stop 3 "make sure that DATABASE_URL names the right server and database; if this one replaces the old one: `postrider recover --adopt`"
    ReplicationProtocol "replication-protocol" Stop 3 "make sure that PostgreSQL 14 or newer answers at this address, not a pooler or proxy"
    ColumnMissing "column-missing" Stop 5 "correct the table's columns in the settings (`= \"\"` means that the table has no such column), or alter the table"
    EventInvalid "event-invalid" Stop 5 "correct the settings of the table, or quarantine such events with on_bad_event = quarantine_key"
    EventTooLarge "event-too-large" Stop 5 "store large payloads elsewhere and send a reference, or quarantine such events with on_bad_event = quarantine_key"
    EventRefused "event-refused" Stop 5 "read Pub/Sub's message above, or quarantine such events with on_bad_event = quarantine_key"
    QuarantineFull "quarantine-full" Stop 5 "`postrider quarantine list` shows the errors; correct the cause, release the events, and start the relay"
    ConfirmationMissing "confirmation-missing" Stop 2 "read what the command would do; then add --yes"
    NotInQuarantine "not-in-quarantine" Stop 2 "`postrider quarantine list` shows the events in quarantine"
    TopicMissing "topic-missing" Retry 4 "create the topic, or run with POSTRIDER_CREATE_TOPICS=true"
    PubsubPermission "pubsub-permission" Retry 4 "grant roles/pubsub.publisher on the topic to the relay's service account"
    PubsubApiDisabled "pubsub-api-disabled" Retry 4 "run `gcloud services enable pubsub.googleapis.com`; the \
                                                     relay retries automatically"
    PubsubBillingDisabled "pubsub-billing-disabled" Retry 4 "link an active billing account to the project \
                                                             in the Google Cloud console; the relay retries \
                                                             automatically"
    PubsubPrecondition "pubsub-precondition" Retry 4 "read Pub/Sub's message above, and check the topic's \
                                                      encryption key and its message storage policy; the \
                                                      relay retries automatically"
    PubsubUnauthenticated "pubsub-unauthenticated" Retry 4 "check the credentials: GOOGLE_APPLICATION_CREDENTIALS or workload identity"
    PubsubUnreachable "pubsub-unreachable" Retry 4 "no action needed: publishing continues as soon as Pub/Sub answers"
    PubsubInternal "pubsub-internal" Retry 4 "if it lasts, look at https://status.cloud.google.com, and at proxies in front of Pub/Sub; the relay retries automatically"
    PubsubThrottled "pubsub-throttled" Retry 4 "the relay has slowed down; if it lasts, raise the Pub/Sub quota"
    PubsubEndpoint "pubsub-endpoint" Stop 2 "set POSTRIDER_PUBSUB_ENDPOINT to a URL such as https://europe-west1-pubsub.googleapis.com"
}

impl Code {
    /// The meaning of the code: the first paragraph of its page, on one line.
    pub fn meaning(self) -> String {
        let mut paragraphs = self.page().split("\n\n");
        let first = paragraphs.nth(1).unwrap_or_default();
        first.split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Code {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Code::ALL
            .iter()
            .copied()
            .find(|code| code.name() == name)
            .ok_or_else(|| format!("there is no error code `{name}`"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_a_page_that_names_it_and_says_what_to_do() {
        for code in Code::ALL {
            let page = code.page();
            assert!(
                page.starts_with(&format!("# {code}\n")),
                "docs/reference/errors/{code}.md"
            );
            let meaning = code.meaning();
            assert!(
                meaning.ends_with(['.', ':']) && meaning.len() > 20,
                "{code}: {meaning}"
            );
            assert!(
                page.contains("## What to do"),
                "docs/reference/errors/{code}.md"
            );
        }
    }

    #[test]
    fn every_code_parses_from_its_name() {
        for code in Code::ALL {
            assert_eq!(code.name().parse(), Ok(*code));
        }
        assert!("no-such-code".parse::<Code>().is_err());
    }
}

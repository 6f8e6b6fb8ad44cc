//! The table of error codes: what the program does about each, how it exits, what to do next.
//!
//! One row per code. `docs/errors/<code>.md` is its page, shown by `postrider explain`.

use std::fmt;
use std::str::FromStr;

/// What the relay does when it meets an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disposition {
    /// It may heal by itself: start again from the slot after a pause, without end.
    Retry,
    /// A person must change something first: leave with the code's exit status.
    Stop,
    /// Our own mistake: leave, and ask for a report.
    Bug,
}

macro_rules! codes {
    ($($variant:ident $name:literal $disposition:ident $exit:literal $hint:literal)*) => {
        /// A stable, documented kind of failure.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[allow(missing_docs, reason = "each code has a page under docs/errors")]
        pub enum Code { $($variant,)* }

        impl Code {
            /// Every code, in the order of the table.
            pub const ALL: &[Code] = &[$(Code::$variant,)*];

            /// The code as it is printed, in kebab case.
            pub fn name(self) -> &'static str {
                match self { $(Code::$variant => $name,)* }
            }

            /// What the relay does about it.
            pub fn disposition(self) -> Disposition {
                match self { $(Code::$variant => Disposition::$disposition,)* }
            }

            /// Exit status of the process: 1 unexpected, 2 settings or usage, 3 PostgreSQL,
            /// 4 Pub/Sub, 5 an event that cannot be delivered.
            pub fn exit_status(self) -> u8 {
                match self { $(Code::$variant => $exit,)* }
            }

            /// The general advice; an error may carry a more exact one.
            pub fn hint(self) -> &'static str {
                match self { $(Code::$variant => $hint,)* }
            }

            /// The page of this code, Markdown.
            pub fn page(self) -> &'static str {
                match self {
                    $(Code::$variant => include_str!(
                        concat!("../../docs/errors/", $name, ".md")
                    ),)*
                }
            }
        }
    };
}

codes! {
    Internal "internal" Bug 1 "this is a fault in postrider: please report it with the log"
    SettingInvalid "setting-invalid" Stop 2 "correct the setting; `postrider run --help` lists them all"
    SettingUnknown "setting-unknown" Stop 2 "remove it or correct its spelling; `postrider run --help` lists the settings"
    DatabaseUrlInvalid "database-url-invalid" Stop 2 "set DATABASE_URL=postgres://user:password@host:5432/database"
    ProjectMissing "project-missing" Stop 2 "set PUBSUB_PROJECT_ID to the Google Cloud project of the topics"
    CredentialsMissing "credentials-missing" Stop 4 "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS"
    PortInUse "port-in-use" Stop 2 "set POSTRIDER_HTTP_ADDR to a free address, or stop the other process"
    PostgresUnreachable "postgres-unreachable" Retry 3 "check that PostgreSQL runs and that host and port in DATABASE_URL are right"
    PostgresAuthentication "postgres-authentication" Stop 3 "check user and password in DATABASE_URL and the server's pg_hba.conf"
    PostgresTls "postgres-tls" Stop 3 "check sslmode and sslrootcert; sslmode=verify-full needs the host name in the certificate"
    PostgresConnectionLost "postgres-connection-lost" Retry 3 "no action needed: the relay connects again by itself"
    PostgresHba "postgres-hba" Stop 3 "add a line for this role, database and address to pg_hba.conf, and reload; `postrider explain postgres-hba` has an example"
    PostgresTooManyConnections "postgres-too-many-connections" Retry 3 "raise max_connections and restart PostgreSQL, or close other sessions; the relay goes on by itself"
    RoleConnectionLimit "role-connection-limit" Retry 3 "ALTER ROLE <relay user> CONNECTION LIMIT 8, or -1 for none: a relay needs up to 6 connections; the relay goes on by itself"
    DatabaseConnectionLimit "database-connection-limit" Retry 3 "ALTER DATABASE <database> CONNECTION LIMIT with a higher number, or close other sessions; the relay goes on by itself"
    WalSendersUsedUp "wal-senders-used-up" Retry 3 "raise max_wal_senders and restart PostgreSQL, or end a reader that is not needed; the relay goes on by itself"
    ReplicationSlotsUsedUp "replication-slots-used-up" Retry 3 "drop a slot that nobody needs, or raise max_replication_slots and restart PostgreSQL; the relay goes on by itself"
    PostgresTimeout "postgres-timeout" Retry 3 "no action needed: the relay tries again; if it repeats, look for locks and for load in PostgreSQL"
    PostgresStopping "postgres-stopping" Retry 3 "no action needed: the relay connects again when PostgreSQL is back"
    PostgresStandby "postgres-standby" Retry 3 "let DATABASE_URL lead to the primary; the relay waits for it"
    PostgresVersion "postgres-version" Stop 3 "postrider needs PostgreSQL 14 or newer"
    PostgresStatement "postgres-statement" Stop 3 "look at the server's message above"
    LeaseLost "lease-lost" Retry 3 "no action needed; if it repeats, look for network trouble between relay and PostgreSQL"
    ReplicationRight "replication-right" Stop 3 "ALTER ROLE <relay user> REPLICATION; on RDS: GRANT rds_replication TO <relay user>"
    WalLevel "wal-level" Stop 3 "ALTER SYSTEM SET wal_level = 'logical', then restart PostgreSQL"
    PrivilegeMissing "privilege-missing" Stop 3 "GRANT postrider_relay TO <relay user>, and with row-level security ALTER ROLE <relay user> BYPASSRLS; `postrider check` lists what is missing"
    SchemaMissing "schema-missing" Stop 3 "run `postrider init --apply` as the owner of the database"
    PublicationMissing "publication-missing" Stop 3 "run `postrider init --apply` as the owner of the tables"
    PublicationDrift "publication-drift" Stop 3 "`postrider check` names the statement that puts the publication right"
    PublicationGap "publication-gap" Retry 3 "no action needed: the relay delivers them from the table; find out who altered the publication"
    TableCaptured "table-captured" Stop 3 "let POSTRIDER_SLOT name that slot; if its relay is gone for good: `postrider recover --adopt`"
    SlotMissing "slot-missing" Stop 3 "`postrider recover --dry-run` shows what was not delivered; `postrider recover` delivers it"
    SlotStuck "slot-stuck" Stop 3 "run `postrider recover`, then start the relay"
    SlotHeld "slot-held" Retry 3 "no action needed: this relay is a standby until the holder leaves"
    SlotForeign "slot-foreign" Stop 3 "choose another name with POSTRIDER_SLOT"
    SlotLost "slot-lost" Stop 3 "`postrider recover --dry-run` shows what was not delivered; `postrider recover` delivers it"
    SlotRecreated "slot-recreated" Stop 3 "`postrider recover --dry-run` shows what was not delivered; `postrider recover` delivers it"
    SlotBusy "slot-busy" Retry 3 "end the transactions that it waits for, or try again later"
    ForeignCluster "foreign-cluster" Stop 3 "make sure that DATABASE_URL names the right server and database; if this one took the place of the old one: `postrider recover --adopt`"
    ReplicationProtocol "replication-protocol" Stop 3 "make sure that nothing but PostgreSQL 14 or newer answers there"
    ColumnMissing "column-missing" Stop 5 "correct the columns of this table in the settings, or the table"
    EventInvalid "event-invalid" Stop 5 "correct the settings of the table, or set on_bad_event to quarantine_key to set such events aside"
    EventTooLarge "event-too-large" Stop 5 "store large payloads elsewhere and send a reference, or set on_bad_event to quarantine_key to set such events aside"
    EventRefused "event-refused" Stop 5 "look at Pub/Sub's message above, or set on_bad_event to quarantine_key to set such events aside"
    QuarantineFull "quarantine-full" Stop 5 "`postrider quarantine list` shows what is wrong with them; mend that, release them, and start the relay again"
    NotInQuarantine "not-in-quarantine" Stop 2 "`postrider quarantine list` shows what is there"
    TopicMissing "topic-missing" Retry 4 "create the topic, or run with POSTRIDER_CREATE_TOPICS=true"
    PubsubPermission "pubsub-permission" Retry 4 "grant roles/pubsub.publisher on the topic to the relay's service account"
    PubsubUnauthenticated "pubsub-unauthenticated" Retry 4 "check the credentials: GOOGLE_APPLICATION_CREDENTIALS or workload identity"
    PubsubUnreachable "pubsub-unreachable" Retry 4 "no action needed: publishing goes on as soon as Pub/Sub answers again"
    PubsubThrottled "pubsub-throttled" Retry 4 "raise the Pub/Sub quota if it lasts; the relay has slowed down"
    PubsubEndpoint "pubsub-endpoint" Stop 2 "set POSTRIDER_PUBSUB_ENDPOINT to a URL such as https://europe-west1-pubsub.googleapis.com"
    DemoFailed "demo-failed" Stop 1 "look at the lines above; run again with --keep to look around"
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
                "docs/errors/{code}.md"
            );
            assert!(page.contains("## What to do"), "docs/errors/{code}.md");
        }
    }

    #[test]
    fn every_code_reads_back_from_its_name() {
        for code in Code::ALL {
            assert_eq!(code.name().parse(), Ok(*code));
        }
        assert!("no-such-code".parse::<Code>().is_err());
    }
}

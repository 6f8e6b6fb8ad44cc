//! Converts errors of the slot manager into errors for the operator.

use slot_manager::SlotError;
use slot_manager::publication::Problem;

use super::{Code, Error};

impl From<SlotError> for Error {
    fn from(error: SlotError) -> Self {
        let code = match &error {
            SlotError::Database { action, .. } => {
                let action = *action;
                let SlotError::Database { source, .. } = error else {
                    unreachable!("invariant: matched just now")
                };
                let inner = Error::from(source);
                let failed = Error::new(inner.code(), format!("{action} failed"));
                return failed.hint(inner.hint_text()).caused_by(inner);
            }
            SlotError::SlotMissing { .. } => Code::SlotMissing,
            SlotError::SlotInUse { .. } | SlotError::StillHeld { .. } => Code::SlotHeld,
            SlotError::PhysicalSlot { .. }
            | SlotError::OtherPlugin { .. }
            | SlotError::OtherDatabase { .. } => Code::SlotForeign,
            SlotError::SlotExists { .. } => Code::SlotExists,
            SlotError::SlotLost { .. } => Code::SlotLost,
            SlotError::CreationBlocked { .. } => Code::SlotBusy,
            SlotError::NoSlotLeft { .. } => Code::ReplicationSlotsUsedUp,
            SlotError::NoReplicationRight { .. } => Code::ReplicationRight,
            SlotError::WalLevel { .. } => Code::WalLevel,
            SlotError::FailoverUnsupported => Code::PostgresVersion,
            SlotError::Backwards { .. } => Code::SettingInvalid,
            _ => Code::PostgresStatement,
        };
        let own = Error::new(code, error.to_string());
        match error {
            // Only commands report this error. A relay that finds the slot in use waits as a standby.
            SlotError::SlotInUse { .. } => own.hint("stop that reader first"),
            SlotError::StillHeld { .. } => own.hint("stop that reader, or end its server process"),
            SlotError::OtherDatabase { database, .. } => own.hint(format!(
                "if the relay of database {database} still needs the slot, choose another name with POSTRIDER_SLOT; \
                 if this database replaces database {database}, stop the relay there and run `postrider slot drop` \
                 with the DATABASE_URL of that database, then run this again"
            )),
            SlotError::CreationBlocked { .. } => {
                own.hint("end those transactions or wait for them, then retry")
            }
            SlotError::FailoverUnsupported => own.hint("set POSTRIDER_SLOT_FAILOVER=false"),
            SlotError::UnknownWalStatus { .. } => own.hint("install a newer version of postrider"),
            SlotError::Backwards { .. } => own.hint("use a position beyond the confirmed one"),
            _ => own,
        }
    }
}

impl From<&Problem> for Error {
    fn from(problem: &Problem) -> Self {
        let code = problem.code().parse();
        let code: Code = code.expect("invariant: the codes of problems are in the table of codes");
        Error::new(code, problem.to_string()).hint(problem.remedy())
    }
}

#[cfg(test)]
mod tests {
    use std::str::FromStr;

    use slot_manager::{QualifiedName, SlotName};

    use super::*;

    #[test]
    fn an_error_says_what_happened_and_only_its_hint_says_what_to_do() {
        let slot = || SlotName::from_str("postrider").unwrap();
        let (plugin, database) = ("wal2json".to_owned(), "shop".to_owned());
        let name = || "postrider".to_owned();
        for error in [
            SlotError::SlotMissing { slot: slot() },
            SlotError::SlotExists { slot: slot() },
            SlotError::SlotInUse {
                slot: slot(),
                holder: None,
            },
            SlotError::PhysicalSlot { slot: name() },
            SlotError::OtherPlugin {
                slot: name(),
                plugin,
            },
            SlotError::OtherDatabase {
                slot: name(),
                database,
            },
            SlotError::SlotLost {
                slot: slot(),
                reason: "wal_removed".to_owned(),
            },
            SlotError::NoSlotLeft { slot: slot() },
            SlotError::NoReplicationRight { slot: slot() },
            SlotError::FailoverUnsupported,
        ] {
            let error = Error::from(error);
            for advice in [
                "stop ",
                "choose ",
                "use it",
                "drop ",
                "alter role",
                "create the",
            ] {
                assert!(!error.what().contains(advice), "{}", error.what());
            }
            assert!(!error.hint_text().is_empty());
        }
    }

    #[test]
    fn a_problem_keeps_its_code() {
        let table = QualifiedName::new("outbox", "events");
        let publication = || "postrider".to_owned();
        for problem in [
            Problem::TableMissing {
                table: table.clone(),
            },
            Problem::TableNotPublished {
                publication: publication(),
                table: table.clone(),
            },
        ] {
            assert_eq!(Error::from(&problem).code().name(), problem.code());
        }
    }
}

//! Checks of the server: its version, whether it is a primary, the privileges of the role, the
//! settings, free connections, and whether a pooler is in between.

use super::facts::Facts;
use super::{CONNECTIONS, NEWEST_MAJOR, OLDEST_MAJOR};
use crate::{Finding, SlotName, quoted_identifier};

/// Value of `max_slot_wal_keep_size`, in MB (the unit of `pg_settings`), below which we warn. A
/// server can write 10 to 100 MB of WAL a second, so with a smaller value one busy minute can lose
/// the slot.
const SMALL_KEEP_SIZE_MB: i64 = 1024;

pub(super) fn version(major: u32) -> Finding {
    if major < OLDEST_MAJOR {
        return Finding::error(
            "postgres-version",
            format!("the server is PostgreSQL {major}"),
            format!("upgrade it to PostgreSQL {OLDEST_MAJOR} or newer"),
        );
    }
    if major > NEWEST_MAJOR {
        return Finding::info(
            "server-untested",
            format!("the server is PostgreSQL {major}, which is newer than the tested versions"),
            format!(
                "look for a newer release; versions {OLDEST_MAJOR} to {NEWEST_MAJOR} are tested"
            ),
        );
    }
    Finding::ok(
        "server-version",
        format!("the server is PostgreSQL {major}"),
    )
}

pub(super) fn check(facts: &Facts, slot: &SlotName) -> Vec<Finding> {
    let mut findings = vec![
        standby(facts),
        wal_level(facts),
        replication_right(facts),
        statistics_right(facts),
        wal_senders(facts),
        replication_slots(facts),
        role_limit(facts),
        database_limit(facts),
        server_limit(facts),
        slot_wal_keep_size(facts),
        wal_sender_timeout(facts),
        pooler(&facts.backend_pids),
    ];
    findings.extend(idle_slot_timeout(facts));
    findings.extend(synchronized_standby_slots(facts, slot));
    findings
}

fn standby(facts: &Facts) -> Finding {
    if !facts.cluster.in_recovery {
        return Finding::ok("primary", "the server is a primary");
    }
    Finding::error(
        "postgres-standby",
        "the server is a standby server: outcomes cannot be recorded on it",
        "connect to the primary (libpq: target_session_attrs=read-write)",
    )
}

fn wal_level(facts: &Facts) -> Finding {
    let level = facts.settings.text("wal_level");
    if level == "logical" {
        return Finding::ok("wal-level", "wal_level is logical");
    }
    Finding::error(
        "wal-level",
        format!("wal_level is {level}"),
        "alter system set wal_level = 'logical', then restart the server (Amazon RDS: \
         rds.logical_replication = 1; Cloud SQL: flag cloudsql.logical_decoding = on)",
    )
}

fn replication_right(facts: &Facts) -> Finding {
    let code = "replication-right";
    let remedy = |role: &str| {
        let role = quoted_identifier(role);
        format!("alter role {role} with replication (Amazon RDS: grant rds_replication to {role})")
    };
    let (login, role) = (&facts.login_role, &facts.role);
    if !facts.may_replicate {
        let what = format!("role {login} may not replicate");
        return Finding::error(code, what, remedy(login));
    }
    if !facts.may_drop_slots {
        let what = format!(
            "role {login} may replicate, but works as role {role} (`ALTER ROLE ... SET role`), which may not \
             drop a slot: after the loss of its slot the relay could not create a new one"
        );
        return Finding::warning(code, what, remedy(role));
    }
    Finding::ok(code, format!("role {login} may replicate"))
}

/// Checks whether the relay has the privileges of `pg_read_all_stats`. Without them it cannot see which of its
/// status messages the server processed last, and might notice a lost slot late.
fn statistics_right(facts: &Facts) -> Finding {
    let role = &facts.role;
    if facts.may_read_stats {
        let what = format!("role {role} may see what walsenders have received");
        return Finding::ok("statistics-right", what);
    }
    Finding::info(
        "statistics-right-missing",
        format!(
            "role {role} cannot see what its walsender has received: behind a proxy that holds dead \
             connections open, a relay that reads nothing during an outage of Pub/Sub may notice \
             late that it has lost the slot"
        ),
        format!(
            "grant pg_read_all_stats to {} (optional)",
            quoted_identifier(role)
        ),
    )
}

fn wal_senders(facts: &Facts) -> Finding {
    let used = facts.wal_senders;
    let Some(limit) = facts.settings.number("max_wal_senders") else {
        return Finding::ok("wal-senders", format!("{used} walsenders are in use"));
    };
    let what = format!("{used} of {limit} walsenders are in use");
    let remedy = "raise max_wal_senders and restart the server, or end a reader that is not needed";
    match limit - used {
        // One of the walsenders in use is the relay's own, so the relay needs no other.
        _ if facts.is_read => Finding::ok("wal-senders", what),
        ..=0 => Finding::error("wal-senders-used-up", what, remedy),
        _ => Finding::ok("wal-senders", what),
    }
}

fn replication_slots(facts: &Facts) -> Finding {
    let used = facts.slot_count;
    let Some(limit) = facts.settings.number("max_replication_slots") else {
        return Finding::ok(
            "replication-slots",
            format!("{used} replication slots are in use"),
        );
    };
    let what = format!("{used} of {limit} replication slots are in use");
    let remedy =
        "raise max_replication_slots and restart the server, or drop a slot that is not needed";
    match limit - used {
        ..=0 => Finding::warning("replication-slots-used-up", what, remedy),
        _ => Finding::ok("replication-slots", what),
    }
}

fn role_limit(facts: &Facts) -> Finding {
    let connections = facts.connections;
    let role = &facts.login_role;
    let limit = if connections.is_superuser {
        -1
    } else {
        connections.role_limit
    };
    connections_left(
        "role-connection-limit",
        &format!("role {role}"),
        limit,
        connections.of_role,
        facts.is_read,
        format!(
            "alter role {} connection limit {}, or -1 for none",
            quoted_identifier(role),
            connections.of_role + CONNECTIONS
        ),
    )
}

fn database_limit(facts: &Facts) -> Finding {
    let connections = facts.connections;
    let limit = if connections.is_superuser {
        -1
    } else {
        connections.database_limit
    };
    let database = &facts.cluster.database;
    connections_left(
        "database-connection-limit",
        &format!("database {database}"),
        limit,
        connections.of_database,
        facts.is_read,
        format!(
            "alter database {} connection limit with a higher number, or -1 for none",
            quoted_identifier(database)
        ),
    )
}

fn server_limit(facts: &Facts) -> Finding {
    let setting = |name| facts.settings.number(name).unwrap_or_default();
    let reserved = if facts.connections.is_superuser {
        0
    } else {
        setting("superuser_reserved_connections") + setting("reserved_connections")
    };
    connections_left(
        "postgres-too-many-connections",
        "the server",
        setting("max_connections") - reserved,
        facts.connections.of_clients,
        facts.is_read,
        "raise max_connections and restart the server, or close other sessions".to_owned(),
    )
}

/// Checks whether a limit leaves enough connections for a relay. If `is_read`, the relay is running
/// and already has its connections.
fn connections_left(
    code: &'static str,
    whose: &str,
    limit: i64,
    used: i64,
    is_read: bool,
    remedy: String,
) -> Finding {
    if limit < 0 {
        return Finding::ok(code, format!("{whose} has no connection limit"));
    }
    let what = format!(
        "{whose}: {used} of {limit} connections are in use, and a relay needs up to {CONNECTIONS}"
    );
    match limit - used {
        _ if is_read => Finding::ok(code, what),
        ..=0 => Finding::error(code, what, remedy),
        1..CONNECTIONS => Finding::warning(code, what, remedy),
        _ => Finding::ok(code, what),
    }
}

fn slot_wal_keep_size(facts: &Facts) -> Finding {
    match facts.settings.number("max_slot_wal_keep_size") {
        None | Some(..0) => Finding::info(
            "slot-wal-unlimited",
            "max_slot_wal_keep_size is unlimited: while the relay is down, WAL can fill the disk",
            "watch retained_bytes (`postrider slot show`), or set a limit below the free disk \
             space; beyond the limit the slot is lost, and undelivered events are only in the outbox table",
        ),
        Some(mb @ 0..SMALL_KEEP_SIZE_MB) => Finding::warning(
            "slot-wal-limit-small",
            format!(
                "max_slot_wal_keep_size is {mb} MB: a short stop of the relay can lose the slot"
            ),
            "raise it to several hours of WAL (a reload suffices)",
        ),
        Some(mb) => Finding::ok(
            "slot-wal-limit",
            format!("max_slot_wal_keep_size is {mb} MB"),
        ),
    }
}

fn wal_sender_timeout(facts: &Facts) -> Finding {
    match facts.settings.number("wal_sender_timeout") {
        Some(0) => Finding::info(
            "wal-sender-timeout-off",
            "wal_sender_timeout is 0: the server never ends a reader that is silent",
            "set it to 60s; the relay sets its own timeout, but a dead reader can keep another slot in use",
        ),
        ms => Finding::ok(
            "wal-sender-timeout",
            format!("wal_sender_timeout is {} ms", ms.unwrap_or_default()),
        ),
    }
}

/// Checks `idle_replication_slot_timeout`. Returns no finding before PostgreSQL 18, which added this setting.
fn idle_slot_timeout(facts: &Facts) -> Option<Finding> {
    let setting = "idle_replication_slot_timeout";
    let seconds = facts.settings.number(setting)?;
    if seconds == 0 {
        return Some(Finding::ok(
            "idle-slot-timeout",
            format!("{setting} is off"),
        ));
    }
    Some(Finding::warning(
        "idle-slot-timeout-set",
        format!("{setting} is {seconds} s: a relay that is down for longer loses its slot"),
        format!("set {setting} to 0, or well above the longest stop of the relay"),
    ))
}

/// Checks `synchronized_standby_slots`, which names slots of standby servers (PostgreSQL 17 and newer). A
/// failover slot streams a change only after these standby servers have received it. Other slots do not wait.
/// After a promotion the setting often remains on the new primary, where nobody reads the named slots. The
/// stream then stalls, and only the server's own log says why.
fn synchronized_standby_slots(facts: &Facts, slot: &SlotName) -> Option<Finding> {
    let setting = "synchronized_standby_slots";
    let names: Vec<&str> = facts
        .settings
        .text(setting)
        .split(',')
        .map(|name| name.trim_matches([' ', '"']))
        .filter(|n| !n.is_empty())
        .collect();
    let slot = facts.slots.iter().find(|s| s.slot_name == slot.as_str());
    let is_without_failover = slot.is_some_and(|slot| slot.failover == Some(false));
    if names.is_empty() || is_without_failover {
        return None;
    }
    let stalled: Vec<&str> = names
        .iter()
        .copied()
        .filter(|name| !facts.slots.iter().any(|s| s.slot_name == *name && s.active))
        .collect();
    if stalled.is_empty() {
        let what = format!(
            "the standby servers of {setting} ({}) are connected",
            names.join(", ")
        );
        return Some(Finding::ok("synchronized-standby-slots", what));
    }
    Some(Finding::error(
        "synchronized-standby-slots-stalled",
        format!(
            "{setting} names {}, which no standby server reads: delivery waits for it",
            stalled.join(", ")
        ),
        format!("start the standby server again, or remove the name from {setting} and reload"),
    ))
}

/// Checks whether a pooler is between us and PostgreSQL. If several server processes answer, there is a pooler.
/// A single process proves nothing, because an idle pooler can use the same process each time.
fn pooler(backend_pids: &[i32]) -> Finding {
    if backend_pids.windows(2).all(|pair| pair[0] == pair[1]) {
        return Finding::ok(
            "direct-connection",
            "one server process answers this connection",
        );
    }
    Finding::error(
        "pooler-in-between",
        "several server processes answer this connection, so there is a pooler in between",
        "connect to PostgreSQL itself; a pooler in transaction mode cannot carry replication \
         (Supabase, Neon: use the direct endpoint)",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Severity;

    #[test]
    fn a_server_process_that_changes_between_statements_proves_a_pooler() {
        assert_eq!(pooler(&[7, 7, 7]).severity, Severity::Ok);
        assert_eq!(pooler(&[7, 7, 8]).code, "pooler-in-between");
    }

    #[test]
    fn only_versions_before_14_are_refused() {
        assert_eq!(version(13).severity, Severity::Error);
        assert_eq!(version(14).severity, Severity::Ok);
        assert_eq!(version(18).severity, Severity::Ok);
        assert_eq!(version(19).severity, Severity::Info);
    }
}

mod readers;
mod room;

use super::*;
use crate::Holder;
use crate::SystemIdentifier;

const HERE: DatabaseOrigin = DatabaseOrigin {
    system_identifier: SystemIdentifier::new(7),
    database_oid: Some(16_384),
};
const OTHER_CLUSTER: DatabaseOrigin = DatabaseOrigin {
    system_identifier: SystemIdentifier::new(8),
    ..HERE
};
const OTHER_DATABASE: DatabaseOrigin = DatabaseOrigin {
    database_oid: Some(16_999),
    ..HERE
};

fn slot() -> Slot {
    Slot {
        slot_name: "postrider".to_owned(),
        plugin: Some("pgoutput".to_owned()),
        slot_type: "logical".to_owned(),
        database: Some("shop".to_owned()),
        in_this_database: true,
        temporary: false,
        active: true,
        active_pid: Some(42),
        wal_status: Some(WalStatus::Reserved),
        safe_wal_size: None,
        two_phase: false,
        confirmed_flush_lsn: Some(Lsn::new(900)),
        restart_lsn: Some(Lsn::new(800)),
        catalog_xmin: Some(730),
        xmin: None,
        conflicting: None,
        invalidation_reason: None,
        inactive_since: None,
        inactive_for: None,
        failover: None,
        synced: None,
        server_lsn: Some(Lsn::new(1000)),
        lag_bytes: Some(100),
        retained_bytes: Some(200),
        holder: None,
    }
}

fn seen(slot: &Slot) -> Observation<'_> {
    Observation {
        slot: Some(slot),
        viewer: Viewer::Outside,
        time_lag: None,
        origin: HERE,
        recorded: None,
    }
}

fn judged(observation: &Observation<'_>) -> Health {
    judge(observation, &Thresholds::default())
}

fn recorded(lsn: u64, is_final: bool) -> RecordedPosition {
    RecordedPosition {
        origin: HERE,
        confirmed_lsn: Some(Lsn::new(lsn)),
        is_final,
    }
}

#[test]
fn a_slot_that_is_read_and_up_to_date_is_active() {
    let health = judged(&seen(&slot()));
    assert_eq!(health, Health::Active);
    assert_eq!((health.severity(), health.remedy()), (Severity::Ok, None));
}

#[test]
fn an_extended_slot_without_a_wal_limit_is_active() {
    let slot = Slot {
        wal_status: Some(WalStatus::Extended),
        ..slot()
    };
    assert_eq!(judged(&seen(&slot)), Health::Active);
}

#[test]
fn a_waiting_relay_sees_the_reader_that_it_stands_by_for() {
    let holder = Holder {
        pid: 42,
        application_name: Some("postrider@a".to_owned()),
        client_addr: None,
        user: None,
        since: None,
        silent: None,
    };
    let slot = Slot {
        holder: Some(holder.clone()),
        ..slot()
    };
    let observation = Observation {
        viewer: Viewer::Waiting,
        ..seen(&slot)
    };
    assert_eq!(
        judged(&observation),
        Health::StandbyHeld {
            holder: Some(holder)
        }
    );
    let observation = Observation {
        viewer: Viewer::Streaming,
        ..seen(&slot)
    };
    assert_eq!(judged(&observation), Health::Active);
}

#[test]
fn a_slot_without_a_reader_is_inactive_and_at_least_a_warning() {
    let quiet = Slot {
        active: false,
        active_pid: None,
        ..slot()
    };
    assert_eq!(judged(&seen(&quiet)).severity(), Severity::Warning);
    let thresholds = Thresholds {
        error_lag_bytes: Some(50),
        ..Thresholds::default()
    };
    let health = judge(&seen(&quiet), &thresholds);
    assert_eq!(
        (health.name(), health.severity()),
        ("inactive", Severity::Error)
    );
}

#[test]
fn lag_is_judged_by_bytes_and_by_time() {
    let behind = Slot {
        lag_bytes: Some(256 << 20),
        ..slot()
    };
    assert_eq!(judged(&seen(&behind)).name(), "lagging");
    let slot = slot();
    let late = Observation {
        time_lag: Some(Duration::from_secs(300)),
        ..seen(&slot)
    };
    assert_eq!(judged(&late).name(), "lagging");
    let thresholds = Thresholds {
        error_lag: Some(Duration::from_secs(200)),
        ..Thresholds::default()
    };
    assert_eq!(judge(&late, &thresholds).severity(), Severity::Error);
    let fresh = Observation {
        time_lag: Some(Duration::from_secs(299)),
        ..seen(&slot)
    };
    assert_eq!(judged(&fresh), Health::Active);
}

#[test]
fn removed_wal_means_lost_on_every_major_version() {
    let until_15 = Slot {
        wal_status: Some(WalStatus::Lost),
        restart_lsn: None,
        ..slot()
    };
    let on_16 = Slot {
        conflicting: Some(true),
        ..until_15.clone()
    };
    let reason = Some("wal_removed".to_owned());
    let since_17 = Slot {
        invalidation_reason: reason,
        conflicting: Some(false),
        ..until_15.clone()
    };
    for slot in [until_15, on_16, since_17] {
        assert_eq!(judged(&seen(&slot)), Health::Lost);
    }
}

#[test]
fn other_causes_of_invalidation_are_named() {
    for (reason, cause) in [
        ("rows_removed", InvalidationCause::RowsRemoved),
        (
            "wal_level_insufficient",
            InvalidationCause::WalLevelInsufficient,
        ),
        ("idle_timeout", InvalidationCause::IdleTimeout),
        ("flood", InvalidationCause::Other("flood".to_owned())),
    ] {
        let slot = Slot {
            wal_status: Some(WalStatus::Lost),
            invalidation_reason: Some(reason.to_owned()),
            ..slot()
        };
        assert_eq!(judged(&seen(&slot)), Health::Invalidated { cause });
    }
    let on_16 = Slot {
        conflicting: Some(true),
        wal_status: Some(WalStatus::Lost),
        ..slot()
    };
    let cause = InvalidationCause::Conflict;
    assert_eq!(judged(&seen(&on_16)), Health::Invalidated { cause });
}

#[test]
fn a_slot_ahead_of_the_final_recorded_position_counts_as_recreated() {
    let slot = slot();
    let record = recorded(899, true);
    let health = judged(&Observation {
        recorded: Some(&record),
        ..seen(&slot)
    });
    let (recorded, found) = (Lsn::new(899), Lsn::new(900));
    assert_eq!(health, Health::Recreated { recorded, found });
}

#[test]
fn a_slot_behind_the_recorded_position_or_ahead_of_one_not_final_is_active() {
    let slot = slot();
    for record in [
        recorded(901, true),
        recorded(900, true),
        recorded(10, false),
    ] {
        let health = judged(&Observation {
            recorded: Some(&record),
            ..seen(&slot)
        });
        assert_eq!(health, Health::Active, "{record:?}");
    }
}

#[test]
fn another_cluster_is_reported_before_any_other_state() {
    let record = recorded(900, true);
    let slot = Slot {
        wal_status: Some(WalStatus::Lost),
        ..slot()
    };
    for (found, slot) in [
        (OTHER_CLUSTER, Some(&slot)),
        (OTHER_CLUSTER, None),
        (OTHER_DATABASE, None),
    ] {
        let foreign = Observation {
            slot,
            recorded: Some(&record),
            origin: found,
            viewer: Viewer::Outside,
            time_lag: None,
        };
        let expected = HERE;
        assert_eq!(judged(&foreign), Health::ForeignCluster { expected, found });
    }
}

#[test]
fn a_record_without_a_database_matches_every_database_of_its_cluster() {
    let of_an_older_version = DatabaseOrigin {
        database_oid: None,
        ..HERE
    };
    assert!(of_an_older_version.matches(HERE));
    assert!(!of_an_older_version.matches(OTHER_CLUSTER));
}

#[test]
fn a_slot_that_does_not_exist_is_missing() {
    let slot = slot();
    assert_eq!(
        judged(&Observation {
            slot: None,
            ..seen(&slot)
        }),
        Health::Missing
    );
}

#[test]
fn every_state_from_warning_upwards_has_a_remedy() {
    let lag = Lag {
        bytes: 1,
        time: None,
        severity: Severity::Ok,
    };
    let room = Headroom {
        bytes: None,
        kept: None,
        is_read: true,
        lag: Severity::Ok,
    };
    let (recorded, found) = (Lsn::new(1), Lsn::new(2));
    for health in [
        Health::Lagging(lag),
        Health::Inactive(lag),
        Health::Reserved(room),
        Health::Extended(room),
        Health::Unreserved(room),
        Health::Lost,
        Health::Invalidated {
            cause: InvalidationCause::IdleTimeout,
        },
        Health::Missing,
        Health::Recreated { recorded, found },
        Health::ForeignCluster {
            expected: HERE,
            found: OTHER_CLUSTER,
        },
    ] {
        assert!(health.severity() >= Severity::Warning, "{health:?}");
        assert!(health.remedy().is_some(), "{health:?}");
    }
}

#[test]
fn time_lag_is_none_until_known_and_zero_when_idle() {
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(100);
    let lag = |pending, bytes| time_lag(pending, bytes, 64, now);
    assert_eq!(lag(PendingSince::Unknown, 0), None);
    assert_eq!(lag(PendingSince::Nothing, 64), Some(Duration::ZERO));
    assert_eq!(lag(PendingSince::Nothing, 65), None);
    let since =
        |seconds| PendingSince::Since(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
    assert_eq!(lag(since(97), 0), Some(Duration::from_secs(3)));
    assert_eq!(
        lag(since(101), 0),
        Some(Duration::ZERO),
        "a server clock ahead of ours"
    );
}

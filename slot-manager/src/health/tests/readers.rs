//! Tests of a slot that no working relay reads: the slot is still being created, nobody reads it, another
//! program reads it, or the relay that holds it has stopped polling.

use super::*;

#[test]
fn a_slot_that_is_being_created_is_not_read() {
    let slot = Slot {
        confirmed_flush_lsn: None,
        lag_bytes: None,
        ..slot()
    };
    assert_eq!(judged(&seen(&slot)).name(), "inactive");
    let waiting = Observation {
        viewer: Viewer::Waiting,
        ..seen(&slot)
    };
    assert_eq!(judged(&waiting).name(), "standby-held");
}

#[test]
fn a_slot_that_nobody_has_read_for_long_is_an_error_if_the_age_of_its_events_is_unknown() {
    let unread = |seconds| Slot {
        active: false,
        inactive_for: Some(Duration::from_secs(seconds)),
        ..slot()
    };
    assert_eq!(judged(&seen(&unread(299))).severity(), Severity::Warning);
    let slot = unread(300);
    assert_eq!(judged(&seen(&slot)).severity(), Severity::Error);
    let without_events = Observation {
        time_lag: Some(Duration::ZERO),
        ..seen(&slot)
    };
    assert_eq!(judged(&without_events).severity(), Severity::Warning);
}

#[test]
fn a_slot_that_another_program_reads_is_not_read_by_a_relay() {
    let read_by = |name: &str| Slot {
        holder: Some(Holder {
            pid: 42,
            application_name: Some(name.to_owned()),
            client_addr: None,
            user: None,
            since: None,
            silent: None,
        }),
        ..slot()
    };
    for viewer in [Viewer::Outside, Viewer::Waiting] {
        let slot = read_by("pg_recvlogical");
        let observation = Observation {
            viewer,
            time_lag: Some(Duration::from_secs(10_000)),
            ..seen(&slot)
        };
        let health = judged(&observation);
        assert!(
            matches!(health, Health::ReadByStranger { .. }),
            "{health:?}"
        );
        assert_eq!(health.severity(), Severity::Error);
        assert!(
            health
                .remedy()
                .unwrap()
                .contains("pg_terminate_backend(42)")
        );
    }
    let short = Slot {
        safe_wal_size: Some(20),
        retained_bytes: Some(100),
        wal_status: Some(WalStatus::Reserved),
        ..read_by("pg_recvlogical")
    };
    match judged(&seen(&short)) {
        Health::Reserved(room) => assert!(!room.is_read),
        other => panic!("{other:?}"),
    }
    // A reader without a known application name might be a relay, so it does not count as another program.
    for name in ["postrider a/1:2", ""] {
        assert_eq!(judged(&seen(&read_by(name))), Health::Active, "{name}");
    }
}

#[test]
fn a_relay_that_has_not_polled_for_long_does_not_read_its_slot() {
    let silent_for = |seconds| Slot {
        holder: Some(Holder {
            pid: 42,
            application_name: Some("postrider a/1:2".to_owned()),
            client_addr: None,
            user: None,
            since: None,
            silent: Some(Duration::from_secs(seconds)),
        }),
        ..slot()
    };
    assert_eq!(judged(&seen(&silent_for(14))), Health::Active);
    for viewer in [Viewer::Outside, Viewer::Waiting] {
        let slot = silent_for(15);
        let observation = Observation {
            viewer,
            time_lag: Some(Duration::from_secs(301)),
            ..seen(&slot)
        };
        let health = judged(&observation);
        assert_eq!(health.name(), "held-by-silent-relay");
        assert_eq!(health.severity(), Severity::Error);
        assert!(health.remedy().unwrap().contains("wal_sender_timeout"));
    }
    let short = Slot {
        safe_wal_size: Some(20),
        retained_bytes: Some(100),
        wal_status: Some(WalStatus::Reserved),
        ..silent_for(15)
    };
    match judged(&seen(&short)) {
        Health::Reserved(room) => assert!(!room.is_read),
        other => panic!("{other:?}"),
    }
}

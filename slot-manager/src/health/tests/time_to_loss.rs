//! Tests the estimate of how long PostgreSQL still keeps the WAL that the slot needs, which is
//! computed from the rate at which the room shrinks.

use super::*;

#[test]
fn time_to_loss_is_computed_from_the_rate_at_which_the_room_shrinks() {
    let before = Slot {
        safe_wal_size: Some(1000),
        ..slot()
    };
    let now = Slot {
        safe_wal_size: Some(600),
        wal_status: Some(WalStatus::Extended),
        ..slot()
    };
    let earlier = Some(SlotObservation {
        slot: &before,
        ago: Duration::from_secs(4),
    });
    let room = Headroom {
        bytes: Some(600),
        time_to_loss: Some(Duration::from_secs(6)),
        is_read: true,
    };
    assert_eq!(headroom(&now, earlier), room);
    assert_eq!(
        judged(&Observation {
            earlier,
            ..seen(&now)
        }),
        Health::Extended(room)
    );
    let reserved = Slot {
        wal_status: Some(WalStatus::Reserved),
        ..now
    };
    assert_eq!(
        judged(&Observation {
            earlier,
            ..seen(&reserved)
        }),
        Health::Reserved(room)
    );
}

#[test]
fn room_that_grows_or_lasts_for_hours_is_not_reported() {
    let slot = Slot {
        safe_wal_size: Some(1 << 40),
        ..slot()
    };
    let less = Slot {
        safe_wal_size: Some((1 << 40) - 1),
        ..slot.clone()
    };
    let ago = Duration::from_secs(1);
    let growing = Observation {
        earlier: Some(SlotObservation { slot: &less, ago }),
        ..seen(&slot)
    };
    assert_eq!(judged(&growing), Health::Active);
    let slow = Observation {
        earlier: Some(SlotObservation { slot: &slot, ago }),
        ..seen(&less)
    };
    assert_eq!(judged(&slow), Health::Active);
}

#[test]
fn unreserved_is_an_error_even_without_a_rate() {
    let slot = Slot {
        wal_status: Some(WalStatus::Unreserved),
        safe_wal_size: Some(-5),
        ..slot()
    };
    let health = judged(&seen(&slot));
    let room = Headroom {
        bytes: Some(-5),
        time_to_loss: None,
        is_read: true,
    };
    assert_eq!(health, Health::Unreserved(room));
    assert_eq!(health.severity(), Severity::Error);
}

//! Tests the severity of a slot that is close to its WAL limit, and the estimate of when the slot will be lost.

use super::*;

fn with_room(left: i64, kept: u64) -> Slot {
    Slot {
        safe_wal_size: Some(left),
        retained_bytes: Some(kept),
        ..slot()
    }
}

#[test]
fn time_to_loss_is_computed_from_the_rate_at_which_the_room_shrinks() {
    let (before, now) = (with_room(1000, 0), with_room(600, 400));
    let observed = |slot, seconds| SlotObservation {
        slot,
        ago: Duration::from_secs(seconds),
    };
    let left = time_to_loss(&now, observed(&before, 4));
    assert_eq!(left, Some(Duration::from_secs(6)));
    assert_eq!(time_to_loss(&before, observed(&now, 4)), None, "it grows");
    assert_eq!(time_to_loss(&now, observed(&before, 0)), None);
    assert_eq!(time_to_loss(&slot(), observed(&before, 4)), None);
    let slow = time_to_loss(&now, observed(&before, 100 * 86_400));
    assert_eq!(slow, None, "more than 90 days");
}

#[test]
fn a_slot_near_its_limit_is_a_warning_and_then_an_error_however_small_the_limit_is() {
    for limit in [3 << 20, 48 << 20, 1 << 30, 1 << 44] {
        let part = limit / 100;
        let left = |percent: i64| {
            let kept = u64::try_from(part * (100 - percent)).expect("positive");
            judged(&seen(&with_room(part * percent, kept)))
        };
        assert_eq!(left(26), Health::Active, "{limit}");
        for (percent, severity) in [(24, Severity::Warning), (11, Severity::Warning)] {
            let health = left(percent);
            assert_eq!((health.name(), health.severity()), ("reserved", severity));
        }
        assert_eq!(left(9).severity(), Severity::Error, "{limit}");
        assert_eq!(left(0).severity(), Severity::Error, "{limit}");
    }
    let extended = Slot {
        wal_status: Some(WalStatus::Extended),
        ..with_room(20, 80)
    };
    assert_eq!(judged(&seen(&extended)).name(), "extended");
}

#[test]
fn an_unreserved_slot_is_an_error() {
    let slot = Slot {
        wal_status: Some(WalStatus::Unreserved),
        ..with_room(-5, 200)
    };
    let health = judged(&seen(&slot));
    let room = Headroom {
        bytes: Some(-5),
        kept: Some(200),
        is_read: true,
        lag: Severity::Ok,
    };
    assert_eq!(health, Health::Unreserved(room));
    assert_eq!(health.severity(), Severity::Error);
}

#[test]
fn a_nearly_full_slot_without_a_reader_is_an_error_when_events_have_waited_for_long() {
    let slot = Slot {
        active: false,
        ..with_room(20, 100)
    };
    let waiting = |seconds| Observation {
        time_lag: Some(Duration::from_secs(seconds)),
        ..seen(&slot)
    };
    let severity = |seconds| judged(&waiting(seconds)).severity();
    assert_eq!(severity(10), Severity::Warning);
    assert_eq!(severity(10_000), Severity::Error);
}

#[test]
fn without_a_reader_waiting_events_are_an_error_already_at_the_warning_limit() {
    let slot = Slot {
        active: false,
        ..slot()
    };
    let waiting = |seconds| Observation {
        time_lag: Some(Duration::from_secs(seconds)),
        ..seen(&slot)
    };
    assert_eq!(judged(&waiting(299)).severity(), Severity::Warning);
    assert_eq!(judged(&waiting(300)).severity(), Severity::Error);
    assert_eq!(judged(&waiting(0)).severity(), Severity::Warning);
    let of_unknown_age = Slot {
        lag_bytes: Some(256 << 20),
        ..slot.clone()
    };
    let health = judged(&seen(&of_unknown_age));
    assert_eq!(health.severity(), Severity::Error);
    let without_events = Observation {
        time_lag: Some(Duration::ZERO),
        ..seen(&of_unknown_age)
    };
    assert_eq!(judged(&without_events).severity(), Severity::Warning);
    let patient = Thresholds {
        error_lag: Some(Duration::from_secs(1000)),
        ..Thresholds::default()
    };
    assert_eq!(
        judge(&waiting(300), &patient).severity(),
        Severity::Warning,
        "a limit that was given counts"
    );
}

//! Tests which verdict follows from the slot, the earlier session and the server.

use slot_manager::{DatabaseOrigin, SystemIdentifier, WalStatus};

use super::*;
use crate::settings::Dispatch;

pub(crate) fn slot(confirmed: u64) -> Slot {
    Slot {
        slot_name: "postrider".to_owned(),
        plugin: Some("pgoutput".to_owned()),
        slot_type: "logical".to_owned(),
        database: Some("shop".to_owned()),
        in_this_database: true,
        temporary: false,
        active: false,
        active_pid: None,
        wal_status: Some(WalStatus::Reserved),
        safe_wal_size: None,
        two_phase: false,
        confirmed_flush_lsn: Some(Lsn::new(confirmed)),
        restart_lsn: Some(Lsn::new(confirmed)),
        catalog_xmin: Some(730),
        xmin: None,
        conflicting: None,
        invalidation_reason: None,
        inactive_since: None,
        inactive_for: None,
        failover: None,
        synced: None,
        server_lsn: Some(Lsn::new(1_000)),
        lag_bytes: Some(0),
        retained_bytes: Some(0),
        holder: None,
    }
}

/// The row of a relay that last confirmed LSN 500 on the slot.
pub(crate) fn left(is_final: bool) -> EarlierSession {
    EarlierSession {
        origin: DatabaseOrigin {
            system_identifier: SystemIdentifier::new(7),
            database_oid: Some(5),
        },
        timeline: 1,
        confirmed_lsn: Some(Lsn::new(500)),
        confirmed_is_final: is_final,
        recovering: None,
        unfinished: None,
        dispatch: Dispatch::Full,
        publication: Some("p1".to_owned()),
    }
}

pub(crate) fn cluster(timeline: u32) -> Cluster {
    Cluster {
        system_identifier: SystemIdentifier::new(7),
        timeline,
        version_num: 150_013,
        in_recovery: false,
        database: "shop".to_owned(),
        database_oid: 5,
    }
}

fn judged(
    earlier: Option<&EarlierSession>,
    slot: Option<&Slot>,
    start: Start,
    timeline: u32,
) -> SlotVerdict {
    SlotVerdict::of(OpeningFacts {
        earlier,
        slot,
        cluster: &cluster(timeline),
        server_lsn: Lsn::new(1_000),
        start,
        records: RecordKeeping::of(Dispatch::Full, earlier),
        publication: "p2",
        has_new_table: false,
        has_other_table: false,
        since_lsn: Some(Lsn::new(500)),
        can_continue: true,
    })
}

fn again(earlier: &EarlierSession, slot: Option<&Slot>) -> SlotVerdict {
    judged(Some(earlier), slot, Start::New, 1)
}

fn streams(confirmed: u64, audit: Audit) -> SlotVerdict {
    let confirmed = Lsn::new(confirmed);
    SlotVerdict::Stream { confirmed, audit }
}

/// Operators read these texts in the log, in `check` and in `status`.
#[test]
fn each_cause_says_what_happened_to_the_slot() {
    let (recorded, found) = (Lsn::new(500), Lsn::new(600));
    for (cause, text) in [
        (
            RecoveryCause::SlotMissing,
            "the slot was in use before and no longer exists",
        ),
        (
            RecoveryCause::FirstStart(Start::New),
            "first start: there is no slot yet",
        ),
        (
            RecoveryCause::SlotRecreated { recorded, found },
            "the slot's position is 0/258, but the relay left it at 0/1F4: somebody has recreated or advanced it",
        ),
    ] {
        assert_eq!(cause.to_string(), text);
    }
}

#[test]
fn a_slot_at_the_recorded_position_is_streamed() {
    let expected = streams(500, Audit::Continue);
    assert_eq!(again(&left(true), Some(&slot(500))), expected);
    assert_eq!(again(&left(false), Some(&slot(500))), expected);
}

#[test]
fn a_slot_behind_the_recorded_position_is_streamed() {
    let expected = streams(400, Audit::Continue);
    assert_eq!(again(&left(true), Some(&slot(400))), expected);
}

#[test]
fn a_slot_ahead_is_recovered_if_the_recorded_position_is_final_else_audited() {
    let recreated = RecoveryCause::SlotRecreated {
        recorded: Lsn::new(500),
        found: Lsn::new(600),
    };
    assert_eq!(
        again(&left(true), Some(&slot(600))),
        SlotVerdict::Recover(recreated)
    );
    assert_eq!(
        again(&left(false), Some(&slot(600))),
        streams(600, Audit::Everything)
    );
}

#[test]
fn a_missing_or_lost_slot_is_recovered() {
    let missing = SlotVerdict::Recover(RecoveryCause::SlotMissing);
    assert_eq!(again(&left(false), None), missing);
    let lost = Slot {
        wal_status: Some(WalStatus::Lost),
        ..slot(500)
    };
    let expected = SlotVerdict::Recover(RecoveryCause::SlotLost(Health::Lost));
    assert_eq!(again(&left(true), Some(&lost)), expected);
}

#[test]
fn a_server_whose_wal_ends_before_the_confirmed_position_was_rolled_back() {
    let earlier = EarlierSession {
        confirmed_lsn: Some(Lsn::new(1_500)),
        ..left(true)
    };
    let rolled_back = RecoveryCause::WalMissing {
        recorded: Lsn::new(1_500),
        server: Lsn::new(1_000),
    };
    assert_eq!(
        again(&earlier, Some(&slot(900))),
        SlotVerdict::Recover(rolled_back)
    );
}

#[test]
fn after_a_failover_that_kept_the_slot_everything_is_audited() {
    let verdict = judged(Some(&left(true)), Some(&slot(500)), Start::New, 2);
    assert_eq!(verdict, streams(500, Audit::Everything));
}

#[test]
fn an_unfinished_recovery_comes_first_and_runs_even_if_slot_on_loss_is_stop() {
    let earlier = EarlierSession {
        recovering: Some("slot-lost".to_owned()),
        ..left(true)
    };
    let SlotVerdict::Recover(reason) = again(&earlier, Some(&slot(500))) else {
        panic!("the mark was not seen");
    };
    assert_eq!(reason, RecoveryCause::Unfinished("slot-lost".to_owned()));
    assert!(reason.stops(&"postrider".parse().unwrap()).is_none());
}

/// The row of a relay that has not finished a recovery: it has created the slot and confirmed LSN 500.
fn unfinished() -> EarlierSession {
    EarlierSession {
        recovering: Some("slot-lost".to_owned()),
        unfinished: Some(Unfinished {
            consistent_point: Lsn::new(400),
            snapshot: "100:110:103".parse().unwrap(),
            repeated_before: None,
        }),
        ..left(false)
    }
}

/// A slot with this confirmed position that keeps WAL from `restart` on.
fn keeps(restart: u64, confirmed: u64) -> Slot {
    Slot {
        restart_lsn: Some(Lsn::new(restart)),
        ..slot(confirmed)
    }
}

fn repeats_the_recovery() -> SlotVerdict {
    SlotVerdict::Recover(RecoveryCause::Unfinished("slot-lost".to_owned()))
}

#[test]
fn an_unfinished_recovery_continues_with_its_slot() {
    let earlier = unfinished();
    for (restart, confirmed, audit) in [
        (500, 500, Audit::Continue),
        (400, 500, Audit::Continue),
        (400, 520, Audit::Everything),
    ] {
        let verdict = again(&earlier, Some(&keeps(restart, confirmed)));
        let continues = SlotVerdict::Continue {
            confirmed: Lsn::new(confirmed),
            audit,
            unfinished: earlier.unfinished.clone().unwrap(),
        };
        assert_eq!(verdict, continues, "{restart} {confirmed}");
    }
}

fn repeats_with_the_slot(confirmed: u64) -> SlotVerdict {
    SlotVerdict::Keep {
        confirmed: Lsn::new(confirmed),
        reason: RecoveryCause::Unfinished("slot-lost".to_owned()),
    }
}

#[test]
fn an_unfinished_recovery_takes_a_new_snapshot_unless_its_slot_is_proven() {
    let earlier = unfinished();
    let recreated = keeps(510, 520);
    assert_eq!(
        again(&earlier, Some(&recreated)),
        repeats_with_the_slot(520)
    );
    let promoted = judged(Some(&earlier), Some(&keeps(400, 500)), Start::New, 2);
    assert_eq!(promoted, repeats_with_the_slot(500));
}

#[test]
fn an_unfinished_recovery_begins_again_with_a_new_slot_if_its_slot_is_lost() {
    let earlier = unfinished();
    let lost = Slot {
        wal_status: Some(WalStatus::Lost),
        ..slot(500)
    };
    for slot in [None, Some(&lost)] {
        assert_eq!(again(&earlier, slot), repeats_the_recovery(), "{slot:?}");
    }
    let rolled_back = EarlierSession {
        confirmed_lsn: Some(Lsn::new(1_100)),
        confirmed_is_final: true,
        ..earlier
    };
    let verdict = again(&rolled_back, Some(&keeps(400, 500)));
    assert_eq!(verdict, repeats_the_recovery());
}

#[test]
fn a_first_start_publishes_existing_rows_only_with_start_all() {
    let begins = |start| SlotVerdict::Recover(RecoveryCause::FirstStart(start));
    let all = begins(Start::All);
    assert_eq!(judged(None, None, Start::All, 1), all);
    assert_eq!(judged(None, Some(&slot(500)), Start::All, 1), all);
    assert_eq!(judged(None, None, Start::New, 1), begins(Start::New));
    assert_eq!(
        judged(None, Some(&slot(500)), Start::New, 1),
        streams(500, Audit::Continue)
    );
}

#[test]
fn a_first_start_does_not_use_a_slot_that_begins_after_capturing_began() {
    let first = |confirmed| judged(None, Some(&slot(confirmed)), Start::New, 1);
    assert_eq!(first(400), streams(400, Audit::Continue));
    let beyond = RecoveryCause::SlotRecreated {
        recorded: Lsn::new(500),
        found: Lsn::new(501),
    };
    assert_eq!(first(501), SlotVerdict::Recover(beyond));
    // Once a relay has confirmed a position, the position at which capturing began no longer matters.
    let earlier = left(false);
    assert_eq!(
        again(&earlier, Some(&slot(501))),
        streams(501, Audit::Everything)
    );
}

/// Judges with `dispatch = exceptions`. The publication is `p1`, as in the row that [`left`] returns.
fn without_records(earlier: &EarlierSession, slot: &Slot, timeline: u32) -> SlotVerdict {
    SlotVerdict::of(OpeningFacts {
        earlier: Some(earlier),
        slot: Some(slot),
        cluster: &cluster(timeline),
        server_lsn: Lsn::new(1_000),
        start: Start::New,
        records: RecordKeeping::of(Dispatch::Exceptions, Some(earlier)),
        publication: "p1",
        has_new_table: false,
        has_other_table: false,
        since_lsn: None,
        can_continue: true,
    })
}

#[test]
fn with_dispatch_exceptions_a_slot_ahead_must_be_proven_to_be_the_same() {
    let ahead = |restart| Slot {
        restart_lsn: Some(Lsn::new(restart)),
        ..slot(600)
    };
    let verdict = |restart, timeline| without_records(&left(false), &ahead(restart), timeline);
    let unproven = SlotVerdict::Keep {
        confirmed: Lsn::new(600),
        reason: RecoveryCause::SlotUnproven {
            recorded: Lsn::new(500),
            found: Lsn::new(600),
        },
    };
    assert_eq!(verdict(499, 1), streams(600, Audit::Continue));
    assert_eq!(verdict(500, 1), unproven);
    assert_eq!(verdict(499, 2), unproven);
    let recreated = RecoveryCause::SlotRecreated {
        recorded: Lsn::new(500),
        found: Lsn::new(600),
    };
    let after_a_clean_stop = without_records(&left(true), &ahead(499), 1);
    assert_eq!(after_a_clean_stop, SlotVerdict::Recover(recreated));
}

#[test]
fn a_changed_publication_is_recovered_with_exceptions_and_audited_otherwise() {
    let changed = SlotVerdict::Keep {
        confirmed: Lsn::new(500),
        reason: RecoveryCause::PublicationChanged,
    };
    for publication in [None, Some("p0".to_owned())] {
        let earlier = EarlierSession {
            publication,
            ..left(true)
        };
        assert_eq!(without_records(&earlier, &slot(500), 1), changed);
        assert_eq!(
            again(&earlier, Some(&slot(500))),
            streams(500, Audit::Continue)
        );
        let before = EarlierSession {
            dispatch: Dispatch::Exceptions,
            ..earlier
        };
        assert_eq!(again(&before, Some(&slot(500))), changed);
    }
}

/// `init` has captured a table, and then the settings name another table of the same partition tree.
#[test]
fn a_first_start_with_another_table_of_the_tree_recovers_and_keeps_the_slot() {
    let slot = slot(500);
    let facts = OpeningFacts {
        earlier: None,
        slot: Some(&slot),
        cluster: &cluster(1),
        server_lsn: Lsn::new(1_000),
        start: Start::New,
        records: RecordKeeping::COMPLETE,
        publication: "p1",
        has_new_table: false,
        has_other_table: true,
        since_lsn: Some(Lsn::new(500)),
        can_continue: false,
    };
    let confirmed = Lsn::new(500);
    let reason = RecoveryCause::OtherTable;
    assert_eq!(
        SlotVerdict::of(facts),
        SlotVerdict::Keep { confirmed, reason }
    );
}

use super::*;
use crate::capture::window::tests::captured;
use crate::store::relay_row::Recorded;
use slot_manager::{DatabaseOrigin, SystemIdentifier};

fn interrupted(dispatch: Dispatch) -> Recorded {
    Recorded {
        origin: DatabaseOrigin {
            system_identifier: SystemIdentifier::new(7),
            database_oid: None,
        },
        timeline: 1,
        confirmed_lsn: Some(Lsn::new(500)),
        confirmed_is_final: false,
        recovering: Some("slot-missing".to_owned()),
        unfinished: Some(Unfinished {
            consistent_point: Lsn::new(400),
            snapshot: "100:110:".parse().unwrap(),
        }),
        dispatch,
        publication: None,
    }
}

fn continues(earlier: &Recorded, dispatch: Dispatch, table: &Captured) -> bool {
    let found = FoundTable {
        table: table.record.table.clone(),
        shape: table.shape.clone(),
    };
    can_continue(Some(earlier), dispatch, &[found], &[Some(&table.record)])
}

#[test]
fn a_recovery_is_continued_only_if_all_outcomes_have_records() {
    use Dispatch::{Exceptions, Full};
    let table = captured(true, None);
    assert!(continues(&interrupted(Full), Full, &table));
    assert!(!continues(&interrupted(Exceptions), Full, &table));
    assert!(!continues(&interrupted(Full), Exceptions, &table));
    let no_slot_yet = Recorded {
        unfinished: None,
        ..interrupted(Full)
    };
    assert!(!continues(&no_slot_yet, Full, &table));
}

/// A row that is older than the column is found by its `xmin`, which an update changes.
#[test]
fn a_recovery_is_continued_only_if_its_rows_can_still_be_found() {
    let earlier = interrupted(Dispatch::Full);
    let is_ok = |table: &Captured| continues(&earlier, Dispatch::Full, table);
    assert!(!is_ok(&captured(false, None)));
    // The floor of this table is 90.
    for (added, expected) in [(89, true), (90, false)] {
        let mut table = captured(true, None);
        table.record.added_xids = vec![added];
        assert_eq!(is_ok(&table), expected, "{added}");
        let mut again = captured(true, None);
        again.shape.missing_xids = vec![added];
        assert_eq!(is_ok(&again), expected, "{added}");
    }
}

#[test]
fn a_recovery_is_not_continued_when_a_table_is_new() {
    let table = captured(true, None);
    let found = FoundTable {
        table: table.record.table.clone(),
        shape: table.shape.clone(),
    };
    let earlier = interrupted(Dispatch::Full);
    assert!(!can_continue(
        Some(&earlier),
        Dispatch::Full,
        &[found],
        &[None]
    ));
}

//! Tests how a session begins, with a table of cases. Each case has facts, settings and the expected
//! decision.

use super::*;
use crate::capture::claim::Captured;
use crate::capture::window::tests::captured;
use crate::recovery::slot_verdict::tests::{left, slot};
use crate::settings::Dispatch;
use crate::store::relay_row::Unfinished;
use slot_manager::{DatabaseOrigin, SystemIdentifier};

fn cluster() -> Cluster {
    Cluster {
        system_identifier: SystemIdentifier::new(7),
        timeline: 1,
        version_num: 150_013,
        in_recovery: false,
        database: "shop".to_owned(),
        database_oid: 5,
    }
}

fn settings(given: Given) -> Settings {
    let database = ("DATABASE_URL", "postgres://relay@localhost/shop");
    let pairs = given.iter().chain([&database]);
    let env = pairs.map(|(name, value)| ((*name).into(), (*value).into()));
    Settings::load(None, &env.collect(), &[]).unwrap()
}

/// Decides how the session begins, and describes the decision in a few words.
fn begins(facts: &SlotFacts<'_>, settings: &Settings) -> String {
    let decision = match decide(facts, settings) {
        Ok(decision) => decision,
        Err(error) => return format!("refuse: {}", error.code()),
    };
    let begin = match (decision.begin, decision.stop) {
        (SlotVerdict::Stream { audit, .. }, None) => format!("stream, audit {audit:?}"),
        (SlotVerdict::Continue { audit, .. }, None) => format!("continue, audit {audit:?}"),
        (SlotVerdict::Keep { confirmed, reason }, None) => {
            assert_eq!(confirmed, Lsn::new(500));
            format!("keep: {}", reason.name())
        }
        (SlotVerdict::Recover(reason), None) => format!("recover: {}", reason.name()),
        (SlotVerdict::Recover(_), Some(error)) => format!("stop: {}", error.code()),
        (begin, Some(_)) => panic!("stops without a reason: {begin:?}"),
    };
    let repeats = if decision.records.may_lack_records() {
        ", repeats"
    } else {
        ""
    };
    let first = if decision.is_first { ", first" } else { "" };
    format!("{begin}{repeats}{first}")
}

/// Changes the default facts of a case. By default, an earlier session confirmed LSN 500 on this slot,
/// and the relay captures one table.
type Change = fn(&mut SlotFacts<'_>);

/// Settings, as environment variables.
type Given = &'static [(&'static str, &'static str)];

const STOP: Given = &[("POSTRIDER_SLOT_ON_LOSS", "stop")];
const ALL: Given = &[("POSTRIDER_START", "all")];
const EXCEPTIONS: Given = &[("POSTRIDER_DISPATCH", "exceptions")];
const EXCEPTIONS_AND_STOP: Given = &[
    ("POSTRIDER_DISPATCH", "exceptions"),
    ("POSTRIDER_SLOT_ON_LOSS", "stop"),
];

const CASES: [(&str, Change, Given, &str); 27] = [
    ("nothing has changed", |_| {}, &[], "stream, audit Continue"),
    (
        "the server was promoted",
        |facts| facts.earlier.as_mut().unwrap().timeline = 0,
        &[],
        "stream, audit Everything",
    ),
    (
        "the slot is gone",
        |facts| facts.slot = None,
        &[],
        "recover: slot-missing",
    ),
    (
        "the slot is gone, and the relay may not recover",
        |facts| facts.slot = None,
        STOP,
        "stop: slot-missing",
    ),
    (
        "the server was rolled back, and the relay had not stopped cleanly",
        |facts| facts.server_lsn = Lsn::new(499),
        &[],
        "recover: wal-missing",
    ),
    (
        "the server was rolled back, and the relay may not recover",
        |facts| {
            facts.server_lsn = Lsn::new(400);
            facts.earlier.as_mut().unwrap().confirmed_is_final = true;
        },
        STOP,
        "stop: slot-recreated",
    ),
    (
        "an operator has requested a recovery, and the relay may not recover automatically",
        |facts| facts.earlier.as_mut().unwrap().recovering = Some("requested".into()),
        STOP,
        "recover: recovery-unfinished",
    ),
    (
        "no relay has ever used the slot",
        |facts| {
            facts.earlier = None;
            facts.slot = None;
        },
        &[],
        "recover: first-start, first",
    ),
    (
        "a first start may not recover, but nothing is lost",
        |facts| {
            facts.earlier = None;
            facts.slot = None;
        },
        STOP,
        "recover: first-start, first",
    ),
    (
        "a first start finds the slot that `slot create` has made",
        |facts| facts.earlier = None,
        &[],
        "stream, audit Continue, first",
    ),
    (
        "the slot of `slot create` exists, but `init` has recorded that old rows are wanted",
        |facts| {
            facts.earlier = None;
            facts.records[0].since = None;
        },
        &[],
        "recover: first-start, first",
    ),
    (
        "a first start was interrupted before it had a slot",
        |facts| {
            let earlier = facts.earlier.as_mut().unwrap();
            earlier.confirmed_lsn = None;
            earlier.recovering = Some("first-start".into());
            facts.slot = None;
        },
        &[],
        "recover: first-start, first",
    ),
    (
        "the settings name the partitioned table to which the captured table was attached",
        |facts| {
            facts.found[0].table = "a.root".parse().unwrap();
            facts.found[0].shape.below = vec![facts.records[0].oid];
            facts.found[0].shape.oid = 99;
        },
        &[],
        "keep: other-table",
    ),
    (
        "a recovery was interrupted after it had created its slot",
        |facts| facts.earlier = Some(interrupted(Dispatch::Full)),
        &[],
        "continue, audit Continue",
    ),
    (
        "a recovery was interrupted, and its table had no inserted_xid",
        |facts| {
            facts.earlier = Some(interrupted(Dispatch::Full));
            facts.records[0].has_inserted_xid = false;
        },
        &[],
        "keep: recovery-unfinished",
    ),
    (
        "a table is new, and only its new rows are wanted",
        |facts| facts.records.clear(),
        &[],
        "stream, audit Continue",
    ),
    (
        "a table is new, and its old rows are wanted",
        |facts| facts.records.clear(),
        ALL,
        "keep: table-added",
    ),
    (
        "with dispatch = exceptions, a change of the publication counts as a reason",
        |facts| facts.publication = "p2",
        EXCEPTIONS,
        "keep: publication-changed, repeats",
    ),
    (
        "the publication has changed, and the relay may not recover, but the slot is not lost",
        |facts| facts.publication = "p2",
        EXCEPTIONS_AND_STOP,
        "keep: publication-changed, repeats",
    ),
    (
        "the publication has changed, and the slot is beyond the end of the WAL",
        |facts| {
            facts.publication = "p2";
            facts.server_lsn = Lsn::new(499);
            facts.earlier.as_mut().unwrap().confirmed_lsn = Some(Lsn::new(400));
        },
        EXCEPTIONS,
        "recover: publication-changed, repeats",
    ),
    (
        "with dispatch = exceptions, a table is new, and its old rows are wanted",
        |facts| facts.records.clear(),
        &[
            ("POSTRIDER_DISPATCH", "exceptions"),
            ("POSTRIDER_START", "all"),
        ],
        "keep: table-added, repeats",
    ),
    (
        "a recovery was interrupted that has kept the slot",
        |facts| facts.earlier.as_mut().unwrap().recovering = Some("publication-changed".into()),
        EXCEPTIONS,
        "keep: recovery-unfinished, repeats",
    ),
    (
        "with dispatch = exceptions, a recovery was interrupted after it had created its slot",
        |facts| facts.earlier = Some(interrupted(Dispatch::Exceptions)),
        EXCEPTIONS,
        "keep: recovery-unfinished, repeats",
    ),
    (
        "with dispatch = exceptions, a recovery was interrupted, and its slot is gone",
        |facts| {
            facts.earlier = Some(interrupted(Dispatch::Exceptions));
            facts.slot = None;
        },
        EXCEPTIONS,
        "recover: recovery-unfinished, repeats",
    ),
    (
        "the stream of a kept slot got stuck",
        |facts| facts.earlier.as_mut().unwrap().recovering = Some("slot-stuck".into()),
        EXCEPTIONS,
        "recover: recovery-unfinished, repeats",
    ),
    (
        "with dispatch = exceptions, an operator has requested a recovery",
        |facts| facts.earlier.as_mut().unwrap().recovering = Some("requested".into()),
        EXCEPTIONS,
        "recover: recovery-unfinished, repeats",
    ),
    (
        "another slot captures the table, so not even a lost slot is recovered",
        |facts| {
            facts.slot = None;
            facts.records[0].slot = "another".into();
        },
        &[],
        "refuse: table-captured",
    ),
];

#[test]
fn how_a_session_begins_follows_from_the_facts_and_the_settings() {
    let (cluster, slot, table) = (cluster(), slot(500), captured(true, Some("90:90:")));
    for (case, change, given, expected) in CASES {
        let mut facts = SlotFacts {
            cluster: &cluster,
            slot: Some(&slot),
            publication: "p1",
            earlier: Some(left(false)),
            server_lsn: Lsn::new(1_000),
            found: vec![FoundTable {
                table: table.record.table.clone(),
                shape: table.shape.clone(),
            }],
            records: vec![table.record.clone()],
        };
        change(&mut facts);
        assert_eq!(begins(&facts, &settings(given)), expected, "{case}");
    }
}

fn interrupted(dispatch: Dispatch) -> EarlierSession {
    EarlierSession {
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
            repeated_before: None,
        }),
        dispatch,
        publication: None,
    }
}

fn continues(earlier: &EarlierSession, dispatch: Dispatch, table: &Captured) -> bool {
    let found = FoundTable {
        table: table.record.table.clone(),
        shape: table.shape.clone(),
    };
    let records = RecordKeeping::of(dispatch, Some(earlier));
    can_continue(Some(earlier), records, &[found], &[Some(&table.record)])
}

#[test]
fn a_recovery_is_continued_only_if_all_outcomes_have_records() {
    use Dispatch::{Exceptions, Full};
    let table = captured(true, None);
    assert!(continues(&interrupted(Full), Full, &table));
    assert!(!continues(&interrupted(Exceptions), Full, &table));
    assert!(!continues(&interrupted(Full), Exceptions, &table));
    let no_slot_yet = EarlierSession {
        unfinished: None,
        ..interrupted(Full)
    };
    assert!(!continues(&no_slot_yet, Full, &table));
}

/// For a row that is older than the column `inserted_xid`, a recovery uses the row's `xmin`. An update
/// changes the `xmin`, so a continued recovery could miss the row.
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
        RecordKeeping::COMPLETE,
        &[found],
        &[None]
    ));
}

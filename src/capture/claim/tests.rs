//! Tests how tables and records are matched, and which slot may claim a table.

use std::collections::HashMap;

use outbox_event::{EventUuids, TableIdentity};
use proptest::prelude::*;

use super::new_record::identity;
use super::*;
use crate::capture::shape::Shape;
use crate::store::capture_record::IdSuffixes;

pub(crate) fn record(identity: &str, table: &str, oid: u32) -> CaptureRecord {
    CaptureRecord {
        identity: identity.into(),
        table: table.parse().unwrap(),
        oid,
        slot: "postrider".into(),
        since: None,
        floor: 0,
        floor_seq: None,
        numbering: None,
        partitions: None,
        has_inserted_xid: true,
        added_xids: Vec::new(),
        recorded_from: 0,
        publication: None,
        since_lsn: None,
        id_suffixes: IdSuffixes::first(1),
        detached: Vec::new(),
        unread: std::collections::BTreeMap::new(),
        recovery_progress: None,
        uncaptured: std::collections::BTreeMap::new(),
        settled: std::collections::BTreeMap::new(),
        is_adopted: false,
    }
}

pub(crate) fn found(table: &str, oid: u32) -> FoundTable {
    FoundTable {
        table: table.parse().unwrap(),
        shape: Shape {
            oid,
            has_inserted_xid: true,
            unfit_inserted_xid: None,
            is_subscribed: false,
            has_column_seq: false,
            missing_xids: Vec::new(),
            partitions: String::new(),
            filled: Vec::new(),
            below: Vec::new(),
            above: Vec::new(),
            files: String::new(),
            attached: String::new(),
            blocks: 0,
            seq: None,
            version: None,
        },
    }
}

fn identities(found: &[FoundTable], records: &[CaptureRecord]) -> Vec<Option<String>> {
    let known = matched(found, records, &"postrider".parse().unwrap());
    known
        .iter()
        .map(|known| known.map(|known| known.identity.clone()))
        .collect()
}

fn some(identity: &str) -> Option<String> {
    Some(identity.to_owned())
}

#[test]
fn a_table_is_recognised_by_its_oid_or_otherwise_by_its_name() {
    let records = [record("a.x", "a.x", 1)];
    assert_eq!(identities(&[found("a.x", 1)], &records), [some("a.x")]);
    assert_eq!(
        identities(&[found("b.y", 1)], &records),
        [some("a.x")],
        "renamed"
    );
    assert_eq!(
        identities(&[found("a.x", 9)], &records),
        [some("a.x")],
        "created again"
    );
    assert_eq!(identities(&[found("b.y", 9)], &records), [None]);
}

#[test]
fn a_table_takes_over_the_record_of_an_earlier_table_of_its_partition_tree() {
    let slot = "postrider".parse().unwrap();
    let earlier = |record: CaptureRecord, found: FoundTable| {
        let records = [record];
        refuse_others(std::slice::from_ref(&found), &records, &slot).unwrap();
        identities(&[found], &records)
    };
    let new = |change: fn(&mut Shape)| {
        let mut new = found("a.new", 9);
        new.shape.partitions = "9".to_owned();
        change(&mut new.shape);
        new
    };
    let record = record("a.x", "a.x", 1);
    let with_partition = CaptureRecord {
        partitions: Some("7,9".to_owned()),
        ..record.clone()
    };
    let with_former = CaptureRecord {
        detached: vec![7],
        ..record.clone()
    };
    let taken = [some("a.x")];
    let below = |shape: &mut Shape| shape.below = vec![1];
    assert_eq!(earlier(record.clone(), new(below)), taken, "to the root");
    let above = |shape: &mut Shape| shape.above = vec![5, 1];
    assert_eq!(earlier(record.clone(), new(above)), taken, "to a partition");
    let same = |_: &mut Shape| {};
    assert_eq!(earlier(with_partition, new(same)), taken, "detached");
    let leaf = |shape: &mut Shape| shape.partitions = "7,8".to_owned();
    assert_eq!(earlier(with_former, new(leaf)), taken, "by a partition");
    assert_eq!(earlier(record.clone(), new(same)), [None], "no such rows");
    // The new table does not take over the record of a table that is still in the settings.
    let both = [found("a.x", 1), new(below)];
    let records = [record];
    assert_eq!(identities(&both, &records), [some("a.x"), None]);
}

/// The new table has the rows of two earlier tables, but can have only one record. The record of one earlier
/// table would be wrong for the rows of the other.
#[test]
fn a_table_with_the_rows_of_several_earlier_tables_is_refused() {
    let slot = "postrider".parse().unwrap();
    let mut new = found("a.new", 9);
    new.shape.below = vec![1, 2];
    let records = [record("a.x", "a.x", 1), record("a.y", "a.y", 2)];
    let refused = refuse_others(std::slice::from_ref(&new), &records, &slot).unwrap_err();
    assert_eq!(refused.code(), Code::TableCaptured);
    assert!(refused.what().contains("a.x and a.y"), "{refused}");
    let both = [new, found("a.x", 1)];
    refuse_others(&both, &records, &slot).unwrap();
}

#[test]
fn partitions_added_since_the_floor_was_raised_are_new() {
    let mut captured = Captured {
        record: record("a.x", "a.x", 1),
        shape: found("a.x", 1).shape,
    };
    captured.shape.partitions = "7,8,12,123".into();
    captured.shape.filled = vec![7, 12, 123];
    assert!(
        captured.new_partitions().is_empty(),
        "no partitions recorded"
    );
    captured.record.partitions = Some("12,9".into());
    assert_eq!(captured.new_partitions(), ["7", "123"]);
}

#[test]
fn two_tables_that_swap_their_names_keep_their_identities() {
    let records = [record("a.x", "a.x", 1), record("a.y", "a.y", 2)];
    let swapped = [found("a.x", 2), found("a.y", 1)];
    assert_eq!(identities(&swapped, &records), [some("a.y"), some("a.x")]);
}

proptest! {
    /// Covers tables with and without the column `inserted_xid`, and recreated tables without it (suffix `@17`).
    #[test]
    fn different_rows_of_different_tables_have_different_event_ids(
        names in proptest::collection::vec("[ab]\\.[ab]?[:@#%.]?[1b]?[:@]?[17]?", 2..5),
        ids in proptest::collection::vec("[1b]?[:@.]?[17b]?[:@]?[17]", 2..5),
        xid in 1..3_u64,
        has_xid in proptest::bool::ANY,
    ) {
        let mut records: Vec<CaptureRecord> = Vec::new();
        let mut seen: HashMap<uuid::Uuid, (usize, usize, String)> = HashMap::new();
        for (n, name) in names.iter().enumerate() {
            let (schema, name) = name.split_once('.').unwrap();
            let table = QualifiedName { schema: schema.into(), name: name.into() };
            let identity = identity(&table, &records);
            records.push(CaptureRecord { identity: identity.clone(), ..record("x", "a.x", 1) });
            let xid = has_xid.then(|| xid.to_string());
            for suffix in if has_xid { ["", ""] } else { ["", "@17"] } {
                let of = TableIdentity::new(&identity).with_suffix(suffix);
                let uuids = EventUuids::new(&of);
                for (m, id) in ids.iter().enumerate().filter(|(m, id)| !ids[..*m].contains(id)) {
                    let uuid = uuids.event_uuid(id, xid.as_deref());
                    let row = (n, m, suffix.to_owned());
                    let earlier = seen.insert(uuid, row.clone());
                    prop_assert!(earlier.as_ref().is_none_or(|earlier| *earlier == row), "{earlier:?} {row:?}");
                }
            }
        }
    }
}

#[test]
fn a_new_table_under_the_old_name_of_a_renamed_one_gets_its_own_identity() {
    let records = [record("a.x", "a.x", 1)];
    let both = [found("a.x_old", 1), found("a.x", 9)];
    assert_eq!(identities(&both, &records), [some("a.x"), None]);
    assert_eq!(identity(&"a.x".parse().unwrap(), &records), "a.x#2");
    assert_eq!(identity(&"a.z".parse().unwrap(), &records), "a.z");
}

/// Rows of the dropped table a.y may still be in the WAL, and have the identity a.y. The table that is called a.y now
/// may have been captured under another name at the same time. So it gets another identity.
#[test]
fn a_table_that_may_have_had_another_captured_name_does_not_get_the_identity_of_its_present_name() {
    let records = [
        record("a.x", "a.x", 2),
        record("a.y", "a.y", 3),
        record("a.z", "a.z", 4),
    ];
    // Table 2 was renamed from a.x to a.z. Then table 10 was created as a.x and renamed to a.y. Table 11 is a.x now.
    let rotated = [found("a.x", 11), found("a.y", 10), found("a.z", 2)];
    assert_eq!(identities(&rotated, &records), [None, None, some("a.x")]);
    let replaced = [found("a.x", 2), found("a.y", 10), found("a.z", 11)];
    let expected = [some("a.x"), some("a.y"), some("a.z")];
    assert_eq!(identities(&replaced, &records), expected);
    // The table a.y was a partition of a.x.
    let [x, y, _] = &records;
    let with_partition = CaptureRecord {
        partitions: Some("7,9".to_owned()),
        ..x.clone()
    };
    let detached = [found("a.x", 2), found("a.y", 7)];
    let known = [with_partition.clone(), y.clone()];
    assert_eq!(identities(&detached, &known), [some("a.x"), None]);
    // The record with the name a.y belongs to another slot. It still counts as the record of the table a.y, so the relay
    // refuses to capture this table.
    let of_another = CaptureRecord {
        slot: "another".into(),
        ..y.clone()
    };
    let known = [with_partition, of_another];
    assert_eq!(identities(&detached, &known), [some("a.x"), some("a.y")]);
}

#[test]
fn a_new_table_under_a_captured_name_continues_the_record_of_that_name() {
    let slot = "postrider".parse().unwrap();
    let now = "500:500:".parse().unwrap();
    let of_name = |identity: &str, floor| CaptureRecord {
        since: Some("100:100:".parse().unwrap()),
        floor,
        recorded_from: 40,
        ..record(identity, "a.x", 1)
    };
    // The table a.x was rotated before, so an old record has this name too.
    let records = [of_name("a.x", 200), of_name("a.x#2", 300)];
    let new = |name, start| new_record::new_record(&found(name, 9), &records, &slot, start, &now);
    let continued = new("a.x", Start::New);
    assert_eq!(continued.identity, "a.x#3");
    assert_eq!(
        continued.since, records[1].since,
        "no row in it counts as old"
    );
    assert_eq!((continued.floor, continued.recorded_from), (300, 40));
    assert_eq!(new("a.x", Start::All).since, records[1].since);
    let other = new("a.y", Start::New);
    assert_eq!((other.since, other.floor), (Some(now.clone()), 500));
    let anothers = "another".parse().unwrap();
    let of_another =
        new_record::new_record(&found("a.x", 9), &records, &anothers, Start::New, &now);
    assert_eq!(of_another.since, Some(now.clone()));
}

#[test]
fn a_table_of_another_slot_is_refused_and_the_slot_is_named() {
    let records = [record("a.x", "a.x", 1)];
    let found = [found("a.x", 1)];
    assert!(refuse_others(&found, &records, &"postrider".parse().unwrap()).is_ok());
    let error = refuse_others(&found, &records, &"other".parse().unwrap()).unwrap_err();
    assert_eq!(error.code(), Code::TableCaptured);
    assert!(error.what().contains("\"postrider\""), "{}", error.what());
}

/// A partitioned table a.x with the partition a.x_1.
fn tree() -> [FoundTable; 2] {
    let (mut root, mut partition) = (found("a.x", 1), found("a.x_1", 2));
    root.shape.below = vec![2];
    partition.shape.above = vec![1];
    [root, partition]
}

#[test]
fn a_partition_of_another_slots_table_is_refused_and_cannot_be_adopted() {
    let [_, partition] = tree();
    let found = [found("a.y", 4), partition];
    let records = [record("a.x", "a.x", 1), record("a.z", "a.z", 3)];
    assert!(refuse_others(&found, &records, &"postrider".parse().unwrap()).is_ok());
    for refuse in [refuse_others, refuse_partial_overlap] {
        let error = refuse(&found, &records, &"other".parse().unwrap()).unwrap_err();
        assert_eq!(error.code(), Code::TableCaptured);
        let what = error.what();
        assert!(
            what.contains("a.x is captured through slot \"postrider\""),
            "{what}"
        );
        assert!(what.contains("shares rows with a.x_1"), "{what}");
    }
}

#[test]
fn a_partition_of_another_slot_can_be_adopted_only_if_its_root_has_a_record() {
    let [root, _] = tree();
    let (found, slot) = ([root], "other".parse().unwrap());
    let mut records = vec![record("a.x_1", "a.x_1", 2)];
    assert!(refuse_others(&found, &records, &slot).is_err());
    assert!(refuse_partial_overlap(&found, &records, &slot).is_err());
    let ours = CaptureRecord {
        slot: "other".into(),
        ..record("a.x", "a.x", 1)
    };
    records.push(ours);
    assert!(refuse_others(&found, &records, &slot).is_err());
    assert!(refuse_partial_overlap(&found, &records, &slot).is_ok());
    let owned = with_partitions(&found, &records, &"postrider".parse().unwrap());
    let identities = owned.iter().map(|record| record.identity.as_str());
    assert_eq!(identities.collect::<Vec<_>>(), ["a.x", "a.x_1"]);
}

#[test]
fn a_partition_that_belongs_to_our_slot_stays_ours_when_another_slot_captures_the_root() {
    let [_, partition] = tree();
    let (found, slot) = ([partition], "postrider".parse().unwrap());
    let root = CaptureRecord {
        slot: "other".into(),
        ..record("a.x", "a.x", 1)
    };
    let ours = record("a.x_1", "a.x_1", 2);
    assert!(refuse_others(&found, &[root.clone(), ours.clone()], &slot).is_ok());
    let anothers = CaptureRecord {
        slot: "third".into(),
        ..ours
    };
    for refuse in [refuse_others, refuse_partial_overlap] {
        let records = [root.clone(), anothers.clone()];
        assert!(refuse(&found, &records, &slot).is_err());
    }
}

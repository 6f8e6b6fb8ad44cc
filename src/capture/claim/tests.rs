//! Tests how tables and records are matched, and which slot may claim a table.

use super::*;
use crate::capture::shape::Shape;

fn record(identity: &str, table: &str, oid: u32) -> CaptureRecord {
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
    }
}

fn found(table: &str, oid: u32) -> FoundTable {
    FoundTable {
        table: table.parse().unwrap(),
        shape: Shape {
            oid,
            has_inserted_xid: true,
            unfit_inserted_xid: None,
            has_column_seq: false,
            missing_xids: Vec::new(),
            partitions: String::new(),
            filled: Vec::new(),
            below: Vec::new(),
            above: Vec::new(),
            files: String::new(),
            blocks: 0,
            seq: None,
            version: None,
        },
    }
}

fn identities(found: &[FoundTable], records: &[CaptureRecord]) -> Vec<Option<String>> {
    let known = matched(found, records);
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

#[test]
fn a_new_table_under_the_old_name_of_a_renamed_one_gets_its_own_identity() {
    let records = [record("a.x", "a.x", 1)];
    let both = [found("a.x_old", 1), found("a.x", 9)];
    assert_eq!(identities(&both, &records), [some("a.x"), None]);
    assert_eq!(identity(&"a.x".parse().unwrap(), &records), "a.x#2");
    assert_eq!(identity(&"a.z".parse().unwrap(), &records), "a.z");
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
fn a_table_with_a_partition_of_another_slot_is_refused_and_adopts_it_if_it_has_a_record() {
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
    let owned = with_partitions(&found, &records);
    let identities = owned.iter().map(|record| record.identity.as_str());
    assert_eq!(identities.collect::<Vec<_>>(), ["a.x", "a.x_1"]);
}

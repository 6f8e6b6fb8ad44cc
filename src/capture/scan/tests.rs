use super::super::window::tests::captured;
use super::*;
use crate::settings::Dispatch;
use crate::store::capture_record::RecoveryProgress;
use crate::store::relay_row::RecordKeeping;

#[test]
fn a_ctid_is_a_block_and_a_line() {
    assert_eq!(block_and_line("(4294967295,17)"), (u32::MAX, 17));
}

#[test]
fn a_recovery_with_a_new_slot_skips_resolved_rows_of_a_table_without_seq() {
    let mut captured = captured(true, None);
    captured.record.recovery_progress = Some(RecoveryProgress {
        below: 95,
        seq: None,
        column: None,
        numbering: None,
        partitions: "1".into(),
    });
    let records = RecordKeeping::of(Dispatch::Exceptions, None);
    let statement = |without_recovered| {
        let scan = Scan {
            window: ScanWindow {
                without_recovered,
                ..ScanWindow::unresolved(&captured, records)
            },
            wanted: Wanted::Unresolved,
            set_aside: None,
            rows: "a.x e where true".into(),
            check: "select true".into(),
            event_id: "e.id".into(),
            walk: Walk::Unnumbered(None),
        };
        scan.range_sql("true", None)
    };
    let recovered = "and not (e.tableoid = any ('{1}'::oid[])";
    assert!(statement(true).contains(recovered), "{}", statement(true));
    assert!(!statement(false).contains(recovered));
}

#[test]
fn ranges_of_blocks_cover_a_table_of_any_size() {
    let ranges = |blocks| block_ranges(blocks).collect::<Vec<_>>();
    assert_eq!(ranges(2_047), ["e.ctid >= '(0,0)'"]);
    assert_eq!(
        ranges(2_048),
        [
            "e.ctid >= '(0,0)' and e.ctid < '(2048,0)'",
            "e.ctid >= '(2048,0)'"
        ]
    );
    let last = block_ranges(u32::MAX).last();
    assert_eq!(last.unwrap(), "e.ctid >= '(4294965248,0)'");
}

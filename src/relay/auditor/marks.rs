//! How far each table is compared, in blocks: an append-only table grows at its end.
//!
//! Pure; the marks are kept in outbox.relay.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Blocks before the end that are compared again the next time: sessions fill several blocks at
/// once, and rows that were not committed yet are not seen.
const OVERLAP: u32 = 1_024;

/// A table with rows of its own: a captured table, or a partition of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Leaf {
    /// Which of the captured tables it is, or belongs to.
    pub(super) table: usize,
    pub(super) oid: u32,
    /// Another one means that the table was rewritten: VACUUM FULL, CLUSTER.
    pub(super) file: u32,
    pub(super) blocks: u32,
    /// Rows inserted since the statistics were reset: another number means that there are new
    /// ones, perhaps in the last block.
    pub(super) inserted: i64,
    /// As SQL takes it.
    pub(super) name: String,
}

/// Blocks to compare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Range {
    /// The leaf's name, as SQL takes it.
    pub(super) leaf: String,
    pub(super) from: u32,
    pub(super) to: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    file: u32,
    blocks: u32,
    inserted: i64,
}

impl Mark {
    fn of(leaf: &Leaf) -> Self {
        Self {
            file: leaf.file,
            blocks: leaf.blocks,
            inserted: leaf.inserted,
        }
    }
}

/// The marks by the oid of the leaf.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Marks(BTreeMap<u32, Mark>);

impl Marks {
    /// Everything that is there is compared.
    pub(super) fn at_the_end(leaves: &[Leaf]) -> Self {
        let mut marks = Self::default();
        leaves.iter().for_each(|leaf| marks.done(leaf));
        marks
    }

    /// Remembers captured tables themselves, which may be partitioned.
    pub(super) fn and_tables(mut self, oids: &[u32]) -> Self {
        for oid in oids {
            let itself = Mark {
                file: 0,
                blocks: 0,
                inserted: 0,
            };
            self.0.entry(*oid).or_insert(itself);
        }
        self
    }

    /// Whether a table is captured only since the last whole comparison. Without one nothing is
    /// known.
    pub(super) fn is_new(&self, table: u32) -> bool {
        !self.0.is_empty() && !self.0.contains_key(&table)
    }

    /// What of `leaf` is to be compared; `None` when nothing has been added.
    pub(super) fn due(&self, leaf: &Leaf) -> Option<Range> {
        let done = match self.0.get(&leaf.oid) {
            Some(mark) if *mark == Mark::of(leaf) => return None,
            Some(mark) if mark.file == leaf.file => mark.blocks.min(leaf.blocks),
            Some(_) | None => 0,
        };
        Some(Range {
            leaf: leaf.name.clone(),
            from: done.saturating_sub(OVERLAP),
            to: leaf.blocks,
        })
    }

    /// `leaf` is compared as far as it reached when it was looked at.
    pub(super) fn done(&mut self, leaf: &Leaf) {
        self.0.insert(leaf.oid, Mark::of(leaf));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(file: u32, blocks: u32) -> Leaf {
        Leaf {
            table: 0,
            oid: 7,
            file,
            blocks,
            inserted: i64::from(blocks) * 50,
            name: "outbox.events".into(),
        }
    }

    fn due(marks: &Marks, leaf: &Leaf) -> Option<(u32, u32)> {
        marks.due(leaf).map(|range| (range.from, range.to))
    }

    #[test]
    fn only_what_was_appended_is_compared_with_some_overlap() {
        let mut marks = Marks::default();
        assert_eq!(due(&marks, &leaf(1, 5_000)), Some((0, 5_000)));
        marks.done(&leaf(1, 5_000));
        assert_eq!(due(&marks, &leaf(1, 5_000)), None);
        assert_eq!(due(&marks, &leaf(1, 6_000)), Some((5_000 - OVERLAP, 6_000)));
    }

    #[test]
    fn a_table_that_is_captured_later_is_new_and_without_marks_none_is() {
        assert!(!Marks::default().is_new(7));
        let marks = Marks::at_the_end(&[leaf(1, 1)]).and_tables(&[9]);
        assert!(!marks.is_new(7) && !marks.is_new(9));
        assert!(marks.is_new(8));
    }

    #[test]
    fn a_new_row_in_the_last_block_is_due() {
        let marks = Marks::at_the_end(&[leaf(1, 1)]);
        let grown = Leaf {
            inserted: 51,
            ..leaf(1, 1)
        };
        assert_eq!(due(&marks, &grown), Some((0, 1)));
    }

    #[test]
    fn a_rewritten_table_is_compared_from_its_beginning() {
        let marks = Marks::at_the_end(&[leaf(1, 5_000)]);
        assert_eq!(due(&marks, &leaf(2, 3_000)), Some((0, 3_000)));
    }

    #[test]
    fn a_truncated_tail_is_no_reason_to_skip_what_comes_next() {
        let marks = Marks::at_the_end(&[leaf(1, 5_000)]);
        assert_eq!(due(&marks, &leaf(1, 3_000)), Some((3_000 - OVERLAP, 3_000)));
    }
}

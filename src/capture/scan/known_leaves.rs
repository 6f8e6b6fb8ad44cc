//! Checks that the rows of a scan come from the scanned table. The scan names the table in each statement, and another
//! table may get this name between two statements. The rows of the other table would get wrong event ids, so consumers
//! could not recognise events that were published before.

use std::collections::BTreeSet;

use slot_manager::QualifiedName;
use slot_manager::table;

use crate::capture::shape::Shape;
use crate::error::{Code, Error, Result};
use crate::postgres::Sql;

/// The OIDs in which rows of the scanned table may be found: its partitions, or the table itself if it has none.
#[derive(Debug)]
pub(super) struct KnownLeaves {
    table: u32,
    known: BTreeSet<u32>,
}

impl KnownLeaves {
    pub(super) fn of(shape: &Shape) -> Self {
        Self {
            table: shape.oid,
            known: shape.leaves().collect(),
        }
    }

    /// Refuses rows of other tables. Looks up an unknown OID, because it may be a partition that was attached after the
    /// scan began.
    ///
    /// # Errors
    /// `slot-busy` when a row is in another table; database errors.
    pub(super) async fn check(
        &mut self,
        sql: &Sql,
        found: impl Iterator<Item = u32>,
    ) -> Result<()> {
        let new: BTreeSet<u32> = found.filter(|leaf| !self.known.contains(leaf)).collect();
        if new.is_empty() {
            return Ok(());
        }
        let oids: Vec<u32> = new.iter().copied().collect();
        let tables = table::former_partitions(sql, &oids).await?;
        let attached = tables
            .iter()
            .filter(|found| found.within.contains(&self.table));
        self.known.extend(attached.map(|found| found.oid));
        match oids.iter().find(|leaf| !self.known.contains(leaf)) {
            None => Ok(()),
            Some(other) => {
                let name = tables.iter().find(|found| found.oid == *other);
                Err(other_table(name.map(|found| &found.name)))
            }
        }
    }
}

fn other_table(name: Option<&QualifiedName>) -> Error {
    let name = name.map_or_else(String::new, |name| format!(" ({name})"));
    let what = format!("another table{name} took the name of a captured table during a scan");
    Error::new(Code::SlotBusy, what).hint(
        "no action needed: the relay scans the table again; if a command failed, run it again",
    )
}

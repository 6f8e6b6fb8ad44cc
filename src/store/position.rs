//! Converts positions of events between Rust and the columns `commit_lsn` and `ordinal`.

use decoder::Lsn;
use replication::CommitLsn;
use tokio_postgres::Row;
use tokio_postgres::types::PgLsn;

use crate::event::EventPosition;

/// Returns the values of the columns `commit_lsn` and `ordinal` for a position.
pub(crate) fn columns(position: EventPosition) -> (PgLsn, i32) {
    (
        PgLsn::from(position.commit.lsn().as_u64()),
        position.ordinal.cast_signed(),
    )
}

/// Reads a position from `column` (commit LSN) and the column after it (ordinal).
pub(crate) fn read(row: &Row, column: usize) -> EventPosition {
    let commit: PgLsn = row.get(column);
    let ordinal: i32 = row.get(column + 1);
    EventPosition {
        commit: CommitLsn::new(Lsn::new(commit.into())),
        ordinal: ordinal.cast_unsigned(),
    }
}

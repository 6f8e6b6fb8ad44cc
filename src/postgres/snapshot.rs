//! Parses PostgreSQL's `pg_snapshot`, which says which transactions had ended at one moment.

use std::fmt;
use std::str::FromStr;

use tokio_postgres::GenericClient;

use crate::error::{Code, Error, Result};

/// A snapshot of 64-bit transaction ids, as `pg_current_snapshot()` prints it: `xmin:xmax:running`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Snapshot {
    xmin: u64,
    xmax: u64,
    /// Transactions from `xmin` to `xmax` that had not ended, in ascending order.
    running: Vec<u64>,
}

impl Snapshot {
    /// The lower bound of the snapshot: all transactions before this one had ended.
    pub(crate) fn xmin(&self) -> u64 {
        self.xmin
    }

    /// The upper bound of the snapshot: this transaction and all later ones had not ended.
    pub(crate) fn xmax(&self) -> u64 {
        self.xmax
    }

    /// Whether the transaction had ended, as in `pg_visible_in_snapshot`.
    pub(crate) fn shows(&self, xid: u64) -> bool {
        xid < self.xmin || xid < self.xmax && self.running.binary_search(&xid).is_err()
    }

    /// The snapshot that shows exactly the transactions below `xid`.
    pub(crate) fn of_all_below(xid: u64) -> Self {
        Self {
            xmin: xid,
            xmax: xid,
            running: Vec::new(),
        }
    }

    /// Like [`shows`](Self::shows), for a transaction of which only the lower 32 bits are known. The
    /// transaction must be less than 2^31 transactions before or after this snapshot.
    pub(crate) fn shows_recent(&self, xid: u32) -> bool {
        let distance = i64::from(xid.wrapping_sub(self.xmax as u32).cast_signed());
        self.shows(self.xmax.saturating_add_signed(distance))
    }

    /// Whether some transaction has ended according to this snapshot, but is still running according to
    /// `now`. This happens with the snapshot of a new slot. PostgreSQL makes that snapshot from the WAL, and
    /// the WAL contains a commit a moment before other sessions see the transaction's changes.
    pub(crate) fn is_ahead_of(&self, now: &Snapshot) -> bool {
        now.running.iter().any(|xid| self.shows(*xid))
            || (now.xmax..self.xmax).any(|xid| self.shows(xid))
    }
}

impl FromStr for Snapshot {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        parse(text).ok_or_else(|| {
            let what = format!("cannot parse {text:?}, which PostgreSQL returned as a snapshot");
            Error::new(Code::PostgresStatement, what)
        })
    }
}

fn parse(text: &str) -> Option<Snapshot> {
    let mut parts = text.splitn(3, ':');
    let xmin: u64 = parts.next()?.parse().ok()?;
    let xmax: u64 = parts.next()?.parse().ok()?;
    let running = parts.next()?.split(',').filter(|xid| !xid.is_empty());
    let mut running: Vec<u64> = running.map(|xid| xid.parse().ok()).collect::<Option<_>>()?;
    running.sort_unstable();
    // In the snapshot of a new slot, `xmax` can be below `xmin`. PostgreSQL prints such a snapshot, but
    // refuses its text as input. PostgreSQL compares with `xmin` first, so raising `xmax` to `xmin` does
    // not change which transactions are visible.
    let xmax = xmax.max(xmin);
    Some(Snapshot {
        xmin,
        xmax,
        running,
    })
}

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:", self.xmin, self.xmax)?;
        for (n, xid) in self.running.iter().enumerate() {
            let comma = if n > 0 { "," } else { "" };
            write!(f, "{comma}{xid}")?;
        }
        Ok(())
    }
}

/// Returns the id of a new transaction, which has already ended. Every transaction that already had an id when this
/// function was called has a lower id.
///
/// # Errors
/// Database errors.
pub(crate) async fn own_transaction_id(sql: &impl GenericClient) -> Result<u64> {
    const STATEMENT: &str = "SELECT pg_catalog.pg_current_xact_id()::text";
    let row = sql.query_one(STATEMENT, &[]).await?;
    let xid: &str = row.get(0);
    xid.parse().map_err(|e| {
        let what = format!("the server returned {xid:?} as a transaction id");
        Error::new(Code::Internal, what).caused_by(e)
    })
}

/// Returns the current snapshot.
///
/// # Errors
/// Database errors.
pub(crate) async fn current_snapshot(sql: &impl GenericClient) -> Result<Snapshot> {
    const STATEMENT: &str = "SELECT pg_catalog.pg_current_snapshot()::text";
    sql.query_one(STATEMENT, &[])
        .await?
        .get::<_, &str>(0)
        .parse()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(text: &str) -> Snapshot {
        text.parse().unwrap()
    }

    #[test]
    fn a_snapshot_shows_exactly_the_transactions_that_had_ended() {
        let s = snapshot("100:110:103,105");
        assert!(s.shows(99) && s.shows(100) && s.shows(104) && s.shows(109));
        assert!(!s.shows(103) && !s.shows(105) && !s.shows(110) && !s.shows(u64::MAX));
        assert_eq!(s.to_string(), "100:110:103,105");
        assert_eq!(snapshot("7:7:").to_string(), "7:7:");
    }

    #[test]
    fn transaction_ids_beyond_32_bits_are_compared_in_full() {
        let s = snapshot("4294967290:4294967300:4294967296");
        assert!(s.shows(4_294_967_299) && !s.shows(4_294_967_296) && s.shows(3));
    }

    #[test]
    fn the_lower_half_of_a_transaction_id_is_enough_near_the_snapshot() {
        let s = snapshot("4294967290:4294967300:4294967296");
        assert!(s.shows_recent(3) && !s.shows_recent(0) && !s.shows_recent(4));
        assert!(s.shows_recent(4_294_967_200) && !s.shows_recent(1_000));
        assert!(snapshot("5:5:").shows_recent(4) && !snapshot("5:5:").shows_recent(5));
    }

    #[test]
    fn a_new_slots_snapshot_with_xmax_below_xmin_is_accepted() {
        let s = snapshot("20:15:");
        assert!(s.shows(19) && !s.shows(20));
        assert_eq!(s.to_string(), "20:20:");
    }

    #[test]
    fn a_snapshot_is_ahead_if_it_shows_a_transaction_that_still_runs_in_the_other() {
        let slot = snapshot("10:20:12");
        assert!(slot.is_ahead_of(&snapshot("11:20:11")));
        assert!(!slot.is_ahead_of(&snapshot("12:20:12")));
        assert!(slot.is_ahead_of(&snapshot("12:19:12")), "19 has not ended");
    }

    #[test]
    fn a_text_that_is_not_a_snapshot_is_an_error() {
        for text in ["", "1", "1:2", "a:2:", "1:2:x", "-1:2:"] {
            assert!(text.parse::<Snapshot>().is_err(), "{text:?}");
        }
    }
}

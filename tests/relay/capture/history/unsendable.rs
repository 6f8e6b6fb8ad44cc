//! Steps of a history that insert rows with bytes that cannot be converted to UTF-8. PostgreSQL cannot
//! send such a row in the stream, so the relay publishes the other rows from the table, and puts the bad
//! row into quarantine.

use super::History;
use crate::harness::eventually;

/// An encoding in which PostgreSQL accepts bytes that it cannot convert to UTF-8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoding {
    Win1252,
    SqlAscii,
}

impl Encoding {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Win1252 => "WIN1252",
            Self::SqlAscii => "SQL_ASCII",
        }
    }

    /// Returns SQL for a text that PostgreSQL cannot convert to UTF-8.
    fn text(self) -> &'static str {
        match self {
            Self::Win1252 => "convert_from('\\x81', 'WIN1252')",
            Self::SqlAscii => "convert_from('\\xff', 'SQL_ASCII')",
        }
    }
}

impl History {
    /// Commits a transaction with three rows of different keys. PostgreSQL cannot send the second row;
    /// the relay must publish the other two. Does nothing if the encoding of the database is UTF-8.
    pub(super) async fn insert_unsendable(&mut self) {
        let Some(encoding) = self.encoding else {
            return;
        };
        self.say("insert a row that is not UTF-8");
        let before = self.world.row_sql(&format!("{}-3", self.keys));
        let bad = format!(
            "INSERT INTO {} (aggregatetype, aggregateid, event_type, payload) SELECT 'order', 'bad{}', 'Bad', \
             jsonb_build_object('n', {}, 'text', {})",
            self.world.table,
            self.step,
            self.world.next,
            encoding.text()
        );
        self.world.next += 1;
        let after = self.world.row_sql(&format!("{}-4", self.keys));
        let sql = format!("BEGIN; {before}; {bad}; {after}; COMMIT");
        self.world.execute(&sql).await;
    }

    /// Waits until every row that cannot be sent is in quarantine.
    pub(super) async fn wait_until_unsendable_rows_are_set_aside(&self) {
        let waiting = format!(
            "SELECT count(*) FROM {} e WHERE event_type = 'Bad' AND NOT EXISTS \
                 (SELECT FROM outbox.dispatch d WHERE d.event_id = {} AND d.state = 'quarantined')",
            self.world.table, self.world.event_id
        );
        eventually("the rows that are not UTF-8 are in quarantine", || async {
            (self.world.database.number(&waiting).await == 0).then_some(())
        })
        .await;
    }
}

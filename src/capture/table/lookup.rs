//! Writes SQL for the event id of a row, and for statements that read rows of a captured table without mapping
//! them to messages. These statements select the row whose id an operator has typed, return the name and the
//! time of a row's event, or read rows to compare them with their records.

use slot_manager::quoted_literal;
use tokio_postgres::SimpleQueryRow;

use super::TableReader;
use crate::capture::captured::Captured;
use crate::capture::shape::xids_sql;
use crate::mapping::{INSERTED_XID, TimeKind};

impl TableReader {
    /// Returns the condition that a row of `e` has this id. `id` is the text of the id as PostgreSQL
    /// prints it. The condition can use an index on the id column if the type has an order. PostgreSQL
    /// refuses the statement if the text does not fit the type, for example `x` for a number.
    pub(crate) fn has_id_sql(&self, id: &str) -> String {
        let (column, id) = (&self.id, quoted_literal(id));
        match (&self.source_prefix, self.id_has_order) {
            (None, _) => format!("{column} = {id}::uuid"),
            // Some types have equal values with different texts, such as 1.0 and 1.00, so compare the texts
            // too.
            (Some(_), true) => format!("{column} = {id} and format('%s', {column}) = {id}"),
            (Some(_), false) => format!("format('%s', {column}) = {id}"),
        }
    }

    /// Returns the condition that the id of a row of `e` equals one of these ids, even if it is written
    /// differently. The condition can use an index on the id column. The type of the column must have an
    /// order, so call [`finds_ids_by_index`](Self::finds_ids_by_index) first.
    pub(crate) fn has_any_id_sql(&self, ids: &[&str]) -> String {
        let ids: Vec<String> = ids.iter().map(|id| quoted_literal(id)).collect();
        format!("{} in ({})", self.id, ids.join(", "))
    }

    /// Whether the conditions on ids can use an index on the id column, if there is one.
    pub(crate) fn finds_ids_by_index(&self) -> bool {
        self.source_prefix.is_none() || self.id_has_order
    }

    /// Returns the id in a source id `schema.table:id`. Returns `None` if the source id belongs to
    /// another table, or if the ids of this table are uuids.
    pub(crate) fn id_in<'s>(&self, source_id: &'s str) -> Option<&'s str> {
        source_id.strip_prefix(self.source_prefix.as_deref()?)
    }

    /// The prefix `schema.table:` in source ids of this table; `None` if the table's ids are uuids.
    pub(crate) fn source_prefix(&self) -> Option<&str> {
        self.source_prefix.as_deref()
    }

    /// The name of the column with the ids.
    pub(crate) fn id_column(&self) -> &str {
        self.mapper.table_columns().id
    }

    /// The expression for the name of a row's event: its uuid, or `schema.table:id`.
    pub(crate) fn name_sql(&self) -> String {
        match &self.source_prefix {
            None => format!("{}::text", self.id),
            Some(prefix) => format!("{} || format('%s', {})", quoted_literal(prefix), self.id),
        }
    }

    /// Returns `select … from table e`, which reads rows to compare them with their records. Returns `None` if no
    /// column of the table gives the time of an event. The caller adds a condition, and runs the statement as a
    /// simple query.
    ///
    /// The statement returns the columns of [`select_sql`](Self::select_sql), and as last column the time of the
    /// row's event. Columns that the comparison does not need are null:
    ///
    /// - the payload;
    /// - the commit time;
    /// - the name of the column whose value is too large;
    /// - the `ctid`.
    pub(crate) fn sample_sql(&self) -> Option<String> {
        let time = self.happened_at_sql()?;
        let payload = self.mapper.payload_position();
        let values = self.columns.iter().enumerate().map(|(n, column)| {
            if n == payload {
                "null"
            } else {
                column.value.as_str()
            }
        });
        Some(format!(
            "select {}, null, null, {}, {}, null, coalesce(to_char({time} at time zone 'UTC', \
                 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"'), '') from {}",
            values.collect::<Vec<_>>().join(", "),
            self.event_id,
            self.seq.as_deref().unwrap_or("null"),
            self.rows
        ))
    }

    /// The time of the event of a row that [`sample_sql`](Self::sample_sql) returned: RFC 3339 in UTC with
    /// milliseconds, or empty.
    pub(crate) fn sampled_time_of<'r>(&self, row: &'r SimpleQueryRow) -> Option<&'r str> {
        row.try_get(self.columns.len() + 5).ok().flatten()
    }

    /// The expression for the time when a row's event happened, as a timestamp with time zone. `None`
    /// when no column of the table gives that point in time.
    pub(crate) fn happened_at_sql(&self) -> Option<String> {
        let column = format!(
            "e.{}",
            slot_manager::quoted_identifier(&self.columns[self.occurred_at?].name)
        );
        match self.mapper.table_columns().time_kind {
            TimeKind::Instant => Some(column),
            TimeKind::Utc => Some(format!("{column} at time zone 'UTC'")),
            TimeKind::Unknown => None,
        }
    }
}

/// The expression for the column `inserted_xid` of a row of `e`, as text; null without the column.
pub(crate) fn inserted_xid_text(captured: &Captured) -> String {
    if captured.shape.has_inserted_xid {
        format!("e.{INSERTED_XID}::text")
    } else {
        "null::text".to_owned()
    }
}

/// The expression for the event id of a row of `e` whose id is not a uuid; null for a row without an id.
pub(super) fn hashed_id_sql(id: &str, captured: &Captured) -> String {
    let Captured { record, shape } = captured;
    let xid = match (shape.has_xid_in_ids(), record.added_xids.as_slice()) {
        (false, _) => None,
        (true, []) => Some(format!("e.{INSERTED_XID}")),
        (true, added) => Some(format!(
            "case when e.inserted_xid = any ({}) then null else e.inserted_xid end",
            xids_sql(added)
        )),
    };
    let identity = quoted_literal(&record.identity);
    let suffix = record.id_suffixes.of(shape.oid);
    let without_xid = quoted_literal(&format!("{}{suffix}", record.identity));
    let (name, xid) = match xid {
        None => (without_xid, "null::xid8".to_owned()),
        Some(xid) if suffix.is_empty() => (identity, xid),
        Some(xid) => (
            format!("case when ({xid}) is null then {without_xid} else {identity} end"),
            xid,
        ),
    };
    // Use `format`, which prints a value as the stream does: a cast to text prints some types differently. Use
    // `is distinct from null`, because `is not null` is false for a composite value that contains a null.
    format!(
        "case when {id} is distinct from null then outbox.event_uuid({name}, format('%s', {id}), {xid}) end"
    )
}

/// SQL aggregates for the age in seconds of the oldest event among the rows, by the server's clock.
#[derive(Debug)]
pub(crate) struct OldestAgeSql {
    /// Null if the server does not know the commit times of all rows.
    pub(crate) since_commit: String,
    /// Null if the table does not record when events happened. Infinite times are ignored.
    pub(crate) since_occurred_at: String,
}

/// `happened` is the column with the time at which an event happened.
pub(super) fn oldest_age(
    commit_time: Option<&str>,
    happened: Option<(String, TimeKind)>,
) -> OldestAgeSql {
    // Subtract numbers, because an interval between very distant times would overflow.
    let since = |time: &str, filter: &str| {
        format!(
            "(extract(epoch from clock_timestamp()) - extract(epoch from min({time}){filter}))::float8"
        )
    };
    // Return null if any row has no commit time, because that row may be the oldest: the server does not know
    // the commit times of transactions from before it began to record them.
    let by_commit = commit_time.map(|time| {
        let age = since(time, "");
        format!("case when count({time}) = count(*) then {age} end")
    });
    let by_event = happened.and_then(|(column, kind)| {
        let time = match kind {
            TimeKind::Instant => column.clone(),
            TimeKind::Utc => format!("{column} at time zone 'UTC'"),
            TimeKind::Unknown => return None,
        };
        Some(since(&time, &format!(" filter (where isfinite({column}))")))
    });
    let or_null = |age: Option<String>| age.unwrap_or_else(|| "null::float8".to_owned());
    OldestAgeSql {
        since_commit: or_null(by_commit),
        since_occurred_at: or_null(by_event),
    }
}

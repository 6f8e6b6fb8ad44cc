//! Selects and holds the values of a row that is read over SQL. The relay reads a row as a whole, or
//! column by column to work around a value that PostgreSQL cannot send. It never reads a value that is
//! too large for any message.

use decoder::{Oid, OwnedColumn};
use slot_manager::quoted_identifier;
use tokio_postgres::SimpleQueryRow;
use tokio_postgres::error::Error as PgError;

use super::TableReader;
use crate::mapping::{EventFault, limits};

/// Maximum size in bytes of a value that is read. A larger value does not fit into any message. The limit is
/// twice the limit of a request, because PostgreSQL may return a text with escapes, and the message contains
/// the shorter text without the escapes.
const LARGEST_BYTES: usize = 2 * limits::REQUEST_BYTES;

/// A value up to this stored size counts as small enough without a further check. Even if it is stored
/// compressed, it has at most about 16 MB when uncompressed, which is less than [`LARGEST_BYTES`].
const SMALL_BYTES: usize = 64 << 10;

/// OID of the type `bytea`.
const BYTEA: u32 = 17;

/// OIDs of types whose values are always small: bool, int8, int2, int4, oid, float4, float8, date, time,
/// timestamp, timestamptz, uuid, xid8.
const FIXED_SIZE: [u32; 13] = [
    16, 20, 21, 23, 26, 700, 701, 1082, 1083, 1114, 1184, 2950, 5069,
];

/// A column as it is selected over SQL.
#[derive(Debug)]
pub(super) struct SelectedColumn {
    pub(super) name: String,
    /// The expression for the column's value, which is null when the value is too large for any message.
    pub(super) value: String,
    /// The condition that the value is not too large. `None` for a type whose values are always small,
    /// and for a column that no message needs.
    pub(super) fits: Option<String>,
}

impl SelectedColumn {
    /// Selects null instead of the value of a column that no message needs, because the value may have
    /// any size.
    pub(super) fn new(column: &OwnedColumn, base_type: Oid, is_used: bool) -> Self {
        let name = column.name.clone();
        let value = format!("e.{}", quoted_identifier(&name));
        if !is_used {
            return Self {
                name,
                value: "null".to_owned(),
                fits: None,
            };
        }
        let bytes = match base_type {
            Oid(BYTEA) => format!("octet_length({value})"),
            Oid(oid) if FIXED_SIZE.contains(&oid) => {
                return Self {
                    name,
                    value,
                    fits: None,
                };
            }
            // Compute the uncompressed size only when the stored size is not small. Do not cast the value to text:
            // the owner of the type can define a cast function, which would run with the relay's rights. `format`
            // calls the type's output function, which only a superuser can define.
            _ => format!(
                "case when pg_column_size({value}) <= {SMALL_BYTES} then 0 \
                 else octet_length(format('%s', {value})) end"
            ),
        };
        let fits = format!("{bytes} <= {LARGEST_BYTES}");
        Self {
            name,
            value: format!("case when {fits} then {value} end"),
            fits: Some(fits),
        }
    }
}

/// A row's values, read by [`TableReader::select_sql`] or column by column.
#[derive(Debug)]
pub(crate) enum RowValues {
    /// Read as one row.
    Whole(SimpleQueryRow),
    /// The columns that PostgreSQL could send, and the fault of the first column that it could not send.
    Parts(Vec<Option<SimpleQueryRow>>, Option<EventFault>),
}

impl RowValues {
    /// Returns a row of which no column has been read yet.
    pub(crate) fn empty(reader: &TableReader) -> Self {
        let parts = reader.columns().map(|_| None);
        Self::Parts(parts.collect(), None)
    }

    /// Stores the answer to [`TableReader::column_sql`].
    pub(crate) fn take(&mut self, column: usize, row: SimpleQueryRow) {
        if let Self::Parts(parts, _) = self {
            parts[column] = Some(row);
        }
    }

    /// Notes that PostgreSQL cannot send the value of this column.
    pub(crate) fn unreadable(&mut self, column: usize, reader: &TableReader, error: &PgError) {
        if let Self::Parts(_, fault) = self {
            let column = reader.columns.get(column).map(|column| column.name.clone());
            let problem = error.as_db_error();
            fault.get_or_insert(EventFault::Unreadable {
                column: column.unwrap_or_default(),
                problem: problem.map_or_else(|| error.to_string(), |e| e.message().to_owned()),
            });
        }
    }

    /// Returns the text of a column. `None` if the value is null or was not read.
    ///
    /// # Errors
    /// The text is not UTF-8.
    pub(super) fn text(&self, column: usize) -> Result<Option<&str>, tokio_postgres::Error> {
        match self {
            Self::Whole(row) => row.try_get(column),
            Self::Parts(parts, _) => match &parts[column] {
                Some(row) => row.try_get(0),
                None => Ok(None),
            },
        }
    }
}

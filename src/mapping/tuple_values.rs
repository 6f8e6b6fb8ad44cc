//! Splits a row from the replication stream into its column values. Several parts of the relay need the values, so
//! the row is split only once for all of them.

use decoder::{Tuple, Value};

/// A row with at most this many columns is split without an allocation. `outbox.events` has eleven columns.
const INLINE_COLUMNS: usize = 16;

/// The values of one row, in the order of the table's description.
#[derive(Debug, Clone)]
pub struct TupleValues<'a> {
    inline: [Value<'a>; INLINE_COLUMNS],
    columns: usize,
    /// All values of a row that has more columns than `inline` has room for.
    many: Vec<Value<'a>>,
}

impl<'a> TupleValues<'a> {
    /// Splits a row into its values.
    #[inline]
    pub fn of(tuple: &Tuple<'a>) -> Self {
        let mut row = Self {
            inline: [Value::Null; INLINE_COLUMNS],
            columns: tuple.len(),
            many: Vec::new(),
        };
        if row.columns > INLINE_COLUMNS {
            row.many = tuple.iter().collect();
        } else {
            for (entry, value) in row.inline.iter_mut().zip(tuple) {
                *entry = value;
            }
        }
        row
    }

    /// The values, in the order of the table's description.
    #[inline]
    pub fn as_slice(&self) -> &[Value<'a>] {
        if self.columns > INLINE_COLUMNS {
            &self.many
        } else {
            &self.inline[..self.columns]
        }
    }
}

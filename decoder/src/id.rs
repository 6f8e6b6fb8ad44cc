//! The server's identifiers of objects and of transactions.
//!
//! They are newtypes, so the compiler does not let us confuse them with each other or with a count.

use std::fmt;

/// The identifier of a relation (`pg_class.oid`) or of a data type (`pg_type.oid`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Oid(pub u32);

impl fmt::Display for Oid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A transaction identifier without its epoch. It wraps around after 2^32 transactions, so it is
/// good for displaying and finding a transaction, but cannot be used for ordering.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Xid(pub u32);

impl fmt::Display for Xid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

//! The server's numbers for things: object identifiers and transaction identifiers.
//!
//! Newtypes, so that neither can be taken for the other, or for a count.

use std::fmt;

/// An object identifier: of a relation (`pg_class.oid`) or of a data type (`pg_type.oid`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Oid(pub u32);

impl fmt::Display for Oid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A transaction identifier, without its epoch: it wraps around after 2^32 transactions, so it
/// names a transaction for people and logs, and orders nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Xid(pub u32);

impl fmt::Display for Xid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

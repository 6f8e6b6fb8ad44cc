//! The ordinals of a relay's events: how several relays record what they make of one transaction.
//!
//! A place in outbox.dispatch is a commit and an ordinal. Each shard sees other rows of a
//! transaction and counts them from 1, so it keeps to ordinals of its own.

use slot_manager::Shard;

use crate::error::{Code, Error, Result};

/// How one relay numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Places(Option<Shard>);

impl Places {
    pub(crate) fn of(shard: Option<Shard>) -> Self {
        Self(shard)
    }

    /// The ordinal of the `nth` event, from 1.
    ///
    /// # Errors
    /// `setting-invalid`: it does not fit into the column.
    pub(crate) fn nth(self, nth: u32) -> Result<u32> {
        match self.0 {
            None => Ok(nth),
            Some(shard) => shard.ordinal(nth).ok_or_else(|| full(shard)),
        }
    }

    /// The number of the first event whose ordinal is beyond `last`, whoever has given that one.
    pub(crate) fn nth_after(self, last: u32) -> u32 {
        self.0.map_or(last + 1, |shard| shard.nth_after(last))
    }
}

#[cold]
fn full(shard: Shard) -> Error {
    Error::new(
        Code::SettingInvalid,
        format!("shard {shard} has more rows at one place of the log than can be numbered"),
    )
    .hint("write smaller transactions, or take fewer shards")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(shard: &str) -> Places {
        Places::of(Some(shard.parse().unwrap()))
    }

    #[test]
    fn the_only_relay_counts_from_one_and_shards_keep_apart() {
        assert_eq!(Places::default().nth(7).unwrap(), 7);
        assert_eq!(Places::default().nth_after(7), 8);
        assert_eq!(places("1/4").nth(1).unwrap(), 5);
        assert_eq!(places("2/4").nth(1).unwrap(), 6);
        assert_eq!(places("2/4").nth(places("2/4").nth_after(6)).unwrap(), 10);
    }

    #[test]
    fn an_ordinal_that_does_not_fit_is_an_error_and_never_wraps() {
        let error = places("0/16").nth(u32::MAX / 16).unwrap_err();
        assert_eq!(error.code(), Code::SettingInvalid);
    }
}

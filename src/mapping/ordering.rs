//! Computes the ordering key of an event from its aggregate id.
//!
//! Pub/Sub keeps order among the messages of one key, and all messages of a request must have the same key. So with
//! very many aggregates and few events for each, every request would have only a few messages. `bucketed(n)` avoids
//! this: it hashes the aggregate ids to n keys. Requests then have many messages, and each aggregate still keeps its
//! order.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use super::error::{EventFault, Limit};
use super::limits;
use crate::event::OrderingKey;

/// Maximum number of buckets for `bucketed(n)`. Each bucket is a lane. With more buckets, requests would be about as
/// small as with one key per aggregate.
pub const BUCKETS_MAX: u32 = 10_000;

/// How the ordering key of a message is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ordering {
    /// The aggregate id is the key.
    #[default]
    Key,
    /// The key is `bucket-<i>`, where i is the hash of the aggregate id modulo this number (1 to
    /// [`BUCKETS_MAX`]). The hash is FNV-1a with 64 bits over the UTF-8 bytes. A different number moves
    /// aggregates to other keys, so change the number only while nothing is in flight.
    Bucketed(u32),
    /// No key, so Pub/Sub keeps no order.
    None,
}

/// The error for a text that is not an [`Ordering`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{input:?} is not an ordering: write key, none, or bucketed(n) with n from 1 to {BUCKETS_MAX}"
)]
pub struct ParseOrderingError {
    /// The text as it was given.
    pub input: String,
}

impl FromStr for Ordering {
    type Err = ParseOrderingError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refused = || ParseOrderingError {
            input: text.to_owned(),
        };
        match text {
            "key" => Ok(Self::Key),
            "none" => Ok(Self::None),
            _ => text
                .strip_prefix("bucketed(")
                .and_then(|rest| rest.strip_suffix(')')?.parse().ok())
                .filter(|buckets| (1..=BUCKETS_MAX).contains(buckets))
                .map(Self::Bucketed)
                .ok_or_else(refused),
        }
    }
}

impl fmt::Display for Ordering {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key => f.write_str("key"),
            Self::Bucketed(buckets) => write!(f, "bucketed({buckets})"),
            Self::None => f.write_str("none"),
        }
    }
}

/// Makes the ordering keys of one table.
#[derive(Debug, Clone)]
pub(super) enum OrderingKeys {
    Key,
    /// The keys of all buckets, created once.
    Bucketed(Box<[OrderingKey]>),
    None,
}

impl OrderingKeys {
    pub(super) fn new(ordering: Ordering) -> Self {
        match ordering {
            Ordering::Key => Self::Key,
            Ordering::Bucketed(buckets) => {
                let key = |i: u32| OrderingKey::from(format!("bucket-{i}").as_str());
                Self::Bucketed((0..buckets.max(1)).map(key).collect())
            }
            Ordering::None => Self::None,
        }
    }

    /// The key of an aggregate. An event without an aggregate id is unordered.
    pub(super) fn key(&self, aggregate_id: Option<&str>) -> Result<OrderingKey, EventFault> {
        let Some(aggregate_id) = aggregate_id.filter(|id| !id.is_empty()) else {
            return Ok(OrderingKey::UNORDERED);
        };
        match self {
            Self::None => Ok(OrderingKey::UNORDERED),
            Self::Key if aggregate_id.len() > limits::ORDERING_KEY_BYTES => {
                Err(EventFault::OverLimit {
                    limit: Limit::OrderingKey,
                    found: aggregate_id.len(),
                })
            }
            Self::Key => Ok(OrderingKey::from(aggregate_id)),
            Self::Bucketed(keys) => {
                let bucket = fnv1a_64(aggregate_id.as_bytes()) % keys.len() as u64;
                Ok(keys[bucket as usize].clone())
            }
        }
    }
}

/// The hash FNV-1a with 64 bits (<http://www.isthe.com/chongo/tech/comp/fnv/>). Consumers can compute it in any
/// language. It must not change between versions of the relay.
pub(crate) fn fnv1a_64(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_matches_the_published_values_of_fnv_1a() {
        assert_eq!(fnv1a_64(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a_64(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a_64(b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn the_key_is_the_aggregate_id() {
        let key = OrderingKeys::new(Ordering::Key)
            .key(Some("order-7"))
            .unwrap();
        assert_eq!(key.as_str(), "order-7");
        assert!(!key.is_unordered());
    }

    #[test]
    fn null_and_empty_aggregate_ids_are_unordered_in_every_mode() {
        for ordering in [Ordering::Key, Ordering::Bucketed(8), Ordering::None] {
            for id in [None, Some("")] {
                assert!(OrderingKeys::new(ordering).key(id).unwrap().is_unordered());
            }
        }
        assert!(
            OrderingKeys::new(Ordering::None)
                .key(Some("7"))
                .unwrap()
                .is_unordered()
        );
    }

    #[test]
    fn a_key_of_1024_bytes_is_accepted_and_a_longer_one_is_refused() {
        let keys = OrderingKeys::new(Ordering::Key);
        assert!(keys.key(Some(&"é".repeat(512))).is_ok());
        let refused = keys.key(Some(&"k".repeat(1_025))).unwrap_err();
        assert_eq!(
            refused,
            EventFault::OverLimit {
                limit: Limit::OrderingKey,
                found: 1_025
            }
        );
        assert!(
            OrderingKeys::new(Ordering::Bucketed(2))
                .key(Some(&"k".repeat(1_025)))
                .is_ok()
        );
    }

    #[test]
    fn an_aggregate_stays_in_its_bucket_and_aggregates_spread_evenly() {
        let keys = OrderingKeys::new(Ordering::Bucketed(16));
        let mut counts = std::collections::HashMap::new();
        for i in 0..16_000 {
            let id = format!("order-{i}");
            let key = keys.key(Some(&id)).unwrap();
            assert_eq!(keys.key(Some(&id)).unwrap(), key);
            *counts.entry(key).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 16);
        assert!(
            counts.values().all(|count| (800..1_200).contains(count)),
            "{counts:?}"
        );
        // With a different hash, an upgrade would move aggregates to other keys while their events are in
        // flight, so later events could overtake earlier ones.
        assert_eq!(keys.key(Some("foobar")).unwrap().as_str(), "bucket-8");
    }

    #[test]
    fn orderings_survive_a_round_trip_through_text_and_bad_ones_are_refused() {
        for text in ["key", "none", "bucketed(1)", "bucketed(10000)"] {
            assert_eq!(text.parse::<Ordering>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "Key",
            "bucketed",
            "bucketed()",
            "bucketed(0)",
            "bucketed(10001)",
        ] {
            assert_eq!(text.parse::<Ordering>().unwrap_err().input, text);
        }
    }
}

//! Collects the attributes of a message, and writes them in wire format as they are added.
//!
//! This module checks Pub/Sub's limits on attributes. No value is truncated. If a value is too long, the
//! mapping refuses the row. The exception is a value of Debezium's trace context, which the mapping leaves out.
//! If two attributes have the same name, the first one wins. The caller adds the fixed attributes first, so no
//! header can replace them.

use std::ops::Range;

use outbox_event::attribute::{FIXED, TRACE_ALIASES};

use super::columns::OutboxRow;
use super::error::{EventFault, Limit};
use super::headers::Headers;
use super::{limits, trace_context, wire};

/// A set of attributes of [`FIXED`], with one bit for each.
type FixedSet = u16;
const _: () = assert!(FIXED.len() <= FixedSet::BITS as usize);

/// The attributes of one message. The buffers are reused for the next message.
#[derive(Debug, Clone, Default)]
pub(super) struct Attributes {
    wire: Vec<u8>,
    /// The attributes that [`add_fixed`](Self::add_fixed) has added.
    fixed: FixedSet,
    /// All other attributes. An entry may have the name of a fixed attribute if the row has no value for that
    /// fixed attribute.
    entries: Vec<Entry>,
}

/// The byte ranges of an attribute's name and value in the buffer `wire`.
#[derive(Debug, Clone)]
struct Entry {
    key: Range<usize>,
    value: Range<usize>,
}

impl Attributes {
    pub(super) fn clear(&mut self) {
        self.wire.clear();
        self.fixed = 0;
        self.entries.clear();
    }

    /// All attributes, encoded as field 2 of a `PubsubMessage`.
    pub(super) fn wire(&self) -> &[u8] {
        &self.wire
    }

    /// Returns the value of the attribute `key`. Does not find attributes that [`add_fixed`](Self::add_fixed)
    /// has added.
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        let entry = self.entry(key)?;
        std::str::from_utf8(&self.wire[entry.value.clone()]).ok()
    }

    /// Adds an attribute, unless there is already one with this name.
    pub(super) fn add(&mut self, key: &str, value: &str) -> Result<(), EventFault> {
        if self.contains(key) {
            return Ok(());
        }
        self.check(key, value.len())?;
        self.put_key(key, value.len());
        self.wire.extend_from_slice(value.as_bytes());
        Ok(())
    }

    /// Writes the name of an attribute. The caller must write its value next.
    fn put_key(&mut self, key: &str, value_len: usize) {
        let key_start = wire::put_attribute_key(&mut self.wire, key.as_bytes(), value_len);
        let value_start = self.wire.len();
        self.entries.push(Entry {
            key: key_start..key_start + key.len(),
            value: value_start..value_start + value_len,
        });
    }

    /// Adds the fixed attributes. Must be called before any other attribute is added. `event_id`,
    /// `source_id` and `occurred_at` are separate parameters, because their values may differ from the
    /// row's columns.
    pub(super) fn add_fixed(
        &mut self,
        event_id: &str,
        source_id: Option<&str>,
        row: &OutboxRow<'_>,
        occurred_at: Option<&str>,
    ) -> Result<(), EventFault> {
        // Make a separate call for each attribute. Then the compiler knows the length of each name, so it can
        // inline the copy.
        self.put_fixed(0, Some(event_id))?;
        self.put_fixed(1, source_id)?;
        self.put_fixed(2, row.event_type)?;
        self.put_fixed(3, row.aggregate_type)?;
        self.put_fixed(4, row.aggregate_id)?;
        self.put_fixed(5, row.version)?;
        self.put_fixed(6, row.schema_version)?;
        self.put_fixed(7, occurred_at)
    }

    #[inline(always)]
    fn put_fixed(&mut self, n: usize, value: Option<&str>) -> Result<(), EventFault> {
        let Some(value) = value else { return Ok(()) };
        check_value(FIXED[n], value.len())?;
        wire::put_fixed_attribute_key(&mut self.wire, FIXED[n], value.len());
        self.wire.extend_from_slice(value.as_bytes());
        self.fixed |= 1 << n;
        Ok(())
    }

    /// Adds the headers. Leaves out a header if an attribute already has its name.
    pub(super) fn add_headers(&mut self, headers: &Headers) -> Result<(), EventFault> {
        headers
            .iter()
            .try_for_each(|(key, value)| self.add(key, value))
    }

    /// Adds the trace context from Debezium's column, unless there is already an attribute `traceparent`.
    /// Never refuses the event. Leaves out the whole trace context if there is no room for it. Leaves out a
    /// single value that is too long.
    pub(super) fn add_trace_context(&mut self, text: &str) {
        let [(traceparent, _), (tracestate, _)] = TRACE_ALIASES;
        // Require room for four attributes: `traceparent`, `tracestate`, and an alias of each.
        let has_room = self.len() + 4 <= limits::ATTRIBUTES;
        if self.contains(traceparent) || !has_room {
            return;
        }
        for name in [traceparent, tracestate] {
            if let Some(value) = trace_context::value(text, name) {
                // `add` refuses a value that is too long. Ignore this error: the event is sent without the value.
                let _ = self.add(name, &value);
            }
        }
    }

    /// Adds the trace context again under the names that Google's client libraries read.
    pub(super) fn add_trace_aliases(&mut self) -> Result<(), EventFault> {
        for (key, alias) in TRACE_ALIASES {
            let value = self.entry(key).map(|entry| entry.value.clone());
            let Some(value) = value.filter(|_| !self.contains(alias)) else {
                continue;
            };
            self.check(alias, value.len())?;
            self.put_key(alias, value.len());
            self.wire.extend_from_within(value);
        }
        Ok(())
    }

    fn len(&self) -> usize {
        self.entries.len() + self.fixed.count_ones() as usize
    }

    fn contains(&self, key: &str) -> bool {
        let fixed = FIXED.iter().position(|name| *name == key);
        fixed.is_some_and(|n| self.fixed & 1 << n != 0) || self.entry(key).is_some()
    }

    fn entry(&self, key: &str) -> Option<&Entry> {
        self.entries
            .iter()
            .find(|entry| &self.wire[entry.key.clone()] == key.as_bytes())
    }

    fn check(&self, key: &str, value_len: usize) -> Result<(), EventFault> {
        let over = |limit, found| Err(EventFault::OverLimit { limit, found });
        if self.len() == limits::ATTRIBUTES {
            return over(Limit::Attributes, limits::ATTRIBUTES + 1);
        }
        if key.len() > limits::ATTRIBUTE_KEY_BYTES {
            return over(
                Limit::AttributeKey(key.chars().take(32).collect()),
                key.len(),
            );
        }
        check_value(key, value_len)?;
        if limits::is_reserved_attribute(key) {
            return Err(EventFault::AttributeReserved {
                key: key.to_owned(),
            });
        }
        Ok(())
    }
}

fn check_value(key: &str, len: usize) -> Result<(), EventFault> {
    if len <= limits::ATTRIBUTE_VALUE_BYTES {
        return Ok(());
    }
    Err(EventFault::OverLimit {
        limit: Limit::AttributeValue(key.to_owned()),
        found: len,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(key: &str, value: &str) -> EventFault {
        Attributes::default().add(key, value).unwrap_err()
    }

    #[test]
    fn the_first_attribute_of_a_name_wins() {
        let mut attributes = Attributes::default();
        attributes.add("event_id", "7").unwrap();
        attributes.add("event_id", "8").unwrap();
        assert_eq!(attributes.get("event_id"), Some("7"));
        assert_eq!(attributes.get("event"), None);
        assert_eq!(attributes.entries.len(), 1);
    }

    #[test]
    fn the_limits_of_name_and_value_are_exact() {
        let mut attributes = Attributes::default();
        attributes
            .add(&"k".repeat(256), &"v".repeat(1_024))
            .unwrap();
        let start = "k".repeat(32);
        assert_eq!(
            refused(&"k".repeat(257), ""),
            EventFault::OverLimit {
                limit: Limit::AttributeKey(start),
                found: 257
            }
        );
        assert_eq!(
            refused("key", &"v".repeat(1_025)),
            EventFault::OverLimit {
                limit: Limit::AttributeValue("key".to_owned()),
                found: 1_025
            }
        );
    }

    #[test]
    fn a_hundred_attributes_are_accepted_and_one_more_is_refused() {
        let mut attributes = Attributes::default();
        for i in 0..100 {
            attributes.add(&format!("k{i}"), "").unwrap();
        }
        attributes.add("k7", "again").unwrap();
        let refused = attributes.add("k100", "").unwrap_err();
        assert_eq!(
            refused,
            EventFault::OverLimit {
                limit: Limit::Attributes,
                found: 101
            }
        );
    }

    #[test]
    fn a_reserved_attribute_name_is_refused() {
        assert_eq!(
            refused("google_x", "v"),
            EventFault::AttributeReserved {
                key: "google_x".to_owned()
            }
        );
    }

    #[test]
    fn the_trace_context_is_sent_under_both_names() {
        let mut headers = Headers::default();
        headers
            .read(Some(r#"{"traceparent":"00-a","tracestate":"k=v"}"#))
            .unwrap();
        let mut attributes = Attributes::default();
        attributes.add_headers(&headers).unwrap();
        attributes.add_trace_aliases().unwrap();
        assert_eq!(attributes.get("traceparent"), Some("00-a"));
        assert_eq!(attributes.get("googclient_traceparent"), Some("00-a"));
        assert_eq!(attributes.get("googclient_tracestate"), Some("k=v"));
    }

    #[test]
    fn a_googclient_header_from_the_producer_is_kept() {
        let mut attributes = Attributes::default();
        attributes.add("traceparent", "a").unwrap();
        attributes.add("googclient_traceparent", "b").unwrap();
        attributes.add_trace_aliases().unwrap();
        assert_eq!(attributes.get("googclient_traceparent"), Some("b"));
    }
}

//! Judges schedules with `ordering = bucketed(n)`: a request contains events of several aggregates,
//! and each aggregate must keep its order.

use std::collections::HashMap;
use std::sync::Arc;

use pubsub_emulator::Attempt;

use super::{Event, Evidence};

/// The ordering key under which the events of an aggregate are published
/// (docs/reference/mapping.md).
pub(super) fn key(aggregate: &str, buckets: u64) -> String {
    const FNV_OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const FNV_PRIME: u64 = 0x0100_0000_01b3;
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(FNV_PRIME);
    let hash = aggregate.bytes().fold(FNV_OFFSET_BASIS, step);
    format!("bucket-{}", hash % buckets)
}

/// Splits each request into parts wherever the aggregate changes. The key of a part is its aggregate, so the judges
/// can check the order of each aggregate.
///
/// An event with an unexpected ordering key gets into a part with the key `sent as <ordering key>`. The judges expect
/// no events under such a key, so they report the event.
pub(super) fn apart(evidence: &Evidence, attempts: &[Attempt]) -> Vec<Attempt> {
    let events = evidence.events.iter();
    let events: HashMap<&str, &Event> = events.map(|event| (event.id.as_str(), event)).collect();
    let mut runs = Vec::new();
    for attempt in attempts {
        let stream = |id: &Option<Box<str>>| -> Arc<str> {
            let event = id.as_deref().and_then(|id| events.get(id));
            match event {
                Some(event) if evidence.ordering_key(event) == *attempt.ordering_key => {
                    event.key.as_str().into()
                }
                _ => format!("sent as {}", attempt.ordering_key).into(),
            }
        };
        let mut first = 0;
        for run in attempt.event_ids.chunk_by(|a, b| stream(a) == stream(b)) {
            runs.push(Attempt {
                ordering_key: stream(&run[0]),
                event_ids: run.into(),
                first_message_id: attempt.first_message_id.map(|id| id + first),
                ..attempt.clone()
            });
            first += run.len() as u64;
        }
    }
    runs
}

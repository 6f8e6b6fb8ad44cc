//! Measures the cost of the hot path per event, part by part: decoder, mapping, lanes, watermark.
//!
//! `cargo bench --bench hot_path` prints the time of a round of 1,000 events. With the name of a part and
//! a number of rounds, it runs only that part, for that many rounds, and prints nothing. `cargo xtask
//! instructions` counts the instructions of such a run. Unlike the time, this count does not depend on
//! how busy the machine is.
//!
//! Not here: the whole pipeline with PostgreSQL and Pub/Sub. `cargo xtask bench` measures that.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use bytes::{BufMut, Bytes, BytesMut};
use decoder::frame::{Frame, decode_frame};
use decoder::{
    Lsn, Message, Oid, OwnedColumn, OwnedRelation, PgTimestamp, ReplicaIdentity, decode,
};
use divan::Bencher;
use divan::counter::ItemsCount;
use postrider::event::{CommittedAt, Event, EventId, EventPosition, EventRef, OrderingKey};
use postrider::lanes::{Lanes, Serve};
use postrider::mapping::{ColumnTypes, Mapper, TableSettings, TupleValues};
use replication::{CommitLsn, Confirmable, Watermark};

/// Number of events in one round.
const EVENTS: u32 = 1_000;

/// Number of ordering keys of these events.
const KEYS: u32 = 50;

/// A part of the hot path: its name, and a function that prepares the input and returns a closure. Each call of the
/// closure runs one round.
type Part = (&'static str, fn() -> Box<dyn FnMut()>);

const PARTS: [Part; 4] = [
    ("decoder", decoding),
    ("mapping", mapping),
    ("lanes", lanes),
    ("watermark", watermark),
];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let rounds = arguments.get(1).and_then(|n| n.parse().ok());
    let wanted = PARTS
        .iter()
        .find(|(name, _)| arguments.first().is_some_and(|a| a == name));
    match (wanted, rounds) {
        (Some((_, part)), Some(rounds)) => repeat(&mut part(), rounds),
        (Some(_) | None, _) => divan::main(),
    }
}

fn repeat(round: &mut Box<dyn FnMut()>, rounds: u32) {
    for _ in 0..rounds {
        round();
    }
}

#[divan::bench(args = PARTS.map(|(name, _)| name))]
fn round(bencher: Bencher<'_, '_>, wanted: &str) {
    let part = PARTS.iter().find(|(name, _)| *name == wanted);
    let (_, part) = part.expect("invariant: the arguments are the names");
    bencher.counter(ItemsCount::new(EVENTS)).bench_local(part());
}

const COLUMNS: [(&str, u32); 9] = [
    ("id", 2950),
    ("aggregatetype", 25),
    ("aggregateid", 25),
    ("event_type", 25),
    ("version", 20),
    ("schema_version", 23),
    ("payload", 3802),
    ("headers", 3802),
    ("occurred_at", 1184),
];

/// A row of `outbox.events` as text, with about 150 bytes of payload.
fn row(n: u32) -> [String; 9] {
    [
        format!("0af76519-16cd-43dd-8448-eb21{n:08x}"),
        "order".into(),
        format!("order-{}", n % KEYS),
        "OrderPlaced".into(),
        n.to_string(),
        "1".into(),
        format!("{{\"order\": {n}, \"note\": \"{}\"}}", "x".repeat(120)),
        "{\"tenant\": \"acme\"}".into(),
        "2026-11-21 11:40:44.123456+00".into(),
    ]
}

/// Encodes XLogData frames with one Insert each. Source: PostgreSQL manual, "Logical Replication Message
/// Formats" and "Streaming Replication Protocol".
fn frames() -> Vec<Bytes> {
    let frame = |n| {
        let mut frame = BytesMut::new();
        frame.put_u8(b'w');
        frame.put_u64(0x1000);
        frame.put_u64(0x1000);
        frame.put_i64(0);
        frame.put_slice(b"I");
        frame.put_u32(16_384);
        frame.put_slice(b"N");
        frame.put_i16(COLUMNS.len() as i16);
        for text in row(n) {
            frame.put_u8(b't');
            frame.put_i32(text.len() as i32);
            frame.put_slice(text.as_bytes());
        }
        frame.freeze()
    };
    (0..EVENTS).map(frame).collect()
}

fn insert_of(frame: &[u8]) -> decoder::Insert<'_> {
    let Ok(Frame::XLogData { payload, .. }) = decode_frame(frame) else {
        panic!("not XLogData")
    };
    let Ok(Message::Insert(insert)) = decode(payload) else {
        panic!("not an Insert")
    };
    insert
}

fn decoding() -> Box<dyn FnMut()> {
    let frames = frames();
    Box::new(move || {
        for frame in &frames {
            black_box(insert_of(black_box(frame)).tuple.iter().count());
        }
    })
}

fn mapping() -> Box<dyn FnMut()> {
    let column = |&(name, oid): &(&str, u32)| OwnedColumn {
        is_key: false,
        name: name.to_owned(),
        type_oid: Oid(oid),
        type_modifier: -1,
    };
    let relation = OwnedRelation {
        oid: Oid(16_384),
        namespace: "outbox".to_owned(),
        name: "events".to_owned(),
        replica_identity: ReplicaIdentity::Default,
        columns: COLUMNS.iter().map(column).collect(),
    };
    let settings = TableSettings::default();
    let (types, identity) = (ColumnTypes::default(), settings.identity());
    let mut mapper = Mapper::resolve(&relation, &types, &settings, &identity, "demo")
        .expect("the usual table has every column");
    let frames = frames();
    Box::new(move || {
        for (n, frame) in frames.iter().enumerate() {
            let row = TupleValues::of(&insert_of(frame).tuple);
            let mapped = mapper.map_row(row.as_slice(), committed_at(n));
            black_box(mapped.expect("a usual row"));
        }
    })
}

fn committed_at(n: usize) -> CommittedAt {
    let commit = CommitLsn::new(Lsn::new(n as u64));
    CommittedAt {
        position: EventPosition { commit, ordinal: 1 },
        ..CommittedAt::default()
    }
}

fn event(n: u32) -> Event {
    let event_id = EventId {
        uuid: [7; 16],
        source_id: None,
    };
    Event {
        origin: EventRef::new(committed_at(n as usize), event_id),
        message: Bytes::from_static(b"a message, encoded"),
    }
}

fn lanes() -> Box<dyn FnMut()> {
    let mut lanes = Lanes::new(KEYS as usize);
    let topic: Arc<str> = "projects/demo/topics/order.events".into();
    let key = |n| OrderingKey::from(format!("order-{n}").as_str());
    let keys: Vec<OrderingKey> = (0..KEYS).map(key).collect();
    let now = Instant::now();
    Box::new(move || {
        for n in 0..EVENTS {
            let key = keys[(n % KEYS) as usize].clone();
            lanes.push(topic.clone(), key, event(n));
        }
        let requests = std::iter::from_fn(|| lanes.next_request(now, Serve::All));
        for request in requests.collect::<Vec<_>>() {
            lanes.finished(&request);
        }
        assert!(lanes.is_empty(), "one request per key takes all events");
    })
}

fn watermark() -> Box<dyn FnMut()> {
    let mut watermark = Watermark::new(Confirmable::by_slot(Lsn::new(1)));
    let mut position = 8;
    Box::new(move || {
        let began = position;
        for _ in 0..EVENTS {
            watermark.begin(
                CommitLsn::new(Lsn::new(position)),
                PgTimestamp::from_micros(0),
                position as u32,
            );
            watermark.add_event();
            watermark.commit(Lsn::new(position + 4));
            position += 8;
        }
        for commit in (began..position).step_by(8) {
            watermark.resolve(CommitLsn::new(Lsn::new(commit)), 1);
        }
        assert_eq!(watermark.confirmable().lsn(), Lsn::new(position - 4));
    })
}

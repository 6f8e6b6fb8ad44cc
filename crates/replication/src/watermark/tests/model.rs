//! Compares the confirmable position after every step with a simple model, which keeps the whole
//! stream in a list. The steps contain long open transactions, outcomes that arrive before the
//! Commit and in any order, several outcomes at once, and keepalives.

use proptest::prelude::*;
use proptest::sample::Index;

use super::*;

#[derive(Debug, Clone)]
enum Step {
    /// A whole transaction; ignored while another one is open.
    Transaction {
        events: u64,
    },
    /// A Begin; ignored while a transaction is open.
    Begin,
    Event,
    Commit,
    Keepalive,
    /// Outcomes of up to `up_to` events of one transaction.
    Resolve {
        which: Index,
        up_to: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0u64..4).prop_map(|events| Step::Transaction { events }),
        2 => Just(Step::Begin),
        4 => Just(Step::Event),
        2 => Just(Step::Commit),
        1 => Just(Step::Keepalive),
        4 => (any::<Index>(), 1u64..4).prop_map(|(which, up_to)| Step::Resolve { which, up_to }),
    ]
}

/// A transaction of the stream.
#[derive(Debug)]
struct Sent {
    name: u64,
    /// Position of the Commit's end; `None` until the Commit has arrived.
    end: Option<u64>,
    unresolved: u64,
}

impl Sent {
    fn is_done(&self) -> bool {
        self.end.is_some() && self.unresolved == 0
    }
}

/// Everything that the server has sent, in order.
#[derive(Debug, Default)]
struct Stream {
    transactions: Vec<Sent>,
    /// Each position of the stream, with the number of transactions that began before it.
    positions: Vec<(u64, usize)>,
}

impl Stream {
    fn open(&mut self) -> Option<&mut Sent> {
        self.transactions.last_mut().filter(|t| t.end.is_none())
    }

    /// The last position before which every transaction is done.
    fn safe(&self) -> u64 {
        let done = self.transactions.iter().take_while(|t| t.is_done()).count();
        let safe = self.positions.iter().filter(|(_, begun)| *begun <= done);
        safe.map(|(position, _)| *position).max().unwrap_or(0)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn the_watermark_never_passes_unresolved_events_or_waits_for_resolved_ones(
        steps in prop::collection::vec(step(), 0..200),
    ) {
        let mut watermark = started_at(1);
        let mut stream = Stream { positions: vec![(1, 0)], ..Stream::default() };
        let (mut clock, mut last) = (1u64, 1u64);
        for step in steps {
            clock += 10;
            match step {
                Step::Transaction { events } if stream.open().is_none() => {
                    let end = clock + 5;
                    transaction(&mut watermark, clock, end, events);
                    stream.transactions.push(Sent { name: clock, end: Some(end), unresolved: events });
                    stream.positions.push((end, stream.transactions.len()));
                }
                Step::Begin if stream.open().is_none() => {
                    watermark.begin(CommitLsn::new(lsn(clock)), PgTimestamp::from_micros(clock as i64), 0);
                    stream.transactions.push(Sent { name: clock, end: None, unresolved: 0 });
                }
                Step::Event => if let Some(open) = stream.open() {
                    watermark.add_event();
                    open.unresolved += 1;
                },
                Step::Commit => if let Some(open) = stream.open() {
                    watermark.commit(lsn(clock));
                    open.end = Some(clock);
                    stream.positions.push((clock, stream.transactions.len()));
                },
                Step::Keepalive => {
                    watermark.keepalive(lsn(clock));
                    if stream.open().is_none() {
                        stream.positions.push((clock, stream.transactions.len()));
                    }
                }
                Step::Resolve { which, up_to } => {
                    let mut with_work: Vec<_> =
                        stream.transactions.iter_mut().filter(|t| t.unresolved > 0).collect();
                    if !with_work.is_empty() {
                        let chosen = which.index(with_work.len());
                        let sent = &mut with_work[chosen];
                        let events = up_to.min(sent.unresolved);
                        sent.unresolved -= events;
                        watermark.resolve(CommitLsn::new(lsn(sent.name)), events);
                    }
                }
                Step::Transaction { .. } | Step::Begin => {}
            }
            let confirmable = watermark.confirmable().lsn().as_u64();
            prop_assert_eq!(confirmable, stream.safe());
            prop_assert!(confirmable >= last, "moved back");
            last = confirmable;
            let first = stream.transactions.iter().find(|t| !t.is_done());
            prop_assert!(first.is_none_or(|t| confirmable < t.name), "passed an unresolved transaction");
            prop_assert_eq!(
                watermark.oldest_pending().map(PgTimestamp::as_micros),
                first.map(|t| t.name as i64)
            );
            let pending = stream.transactions.iter().filter(|t| !t.is_done()).count();
            prop_assert_eq!(watermark.pending_transactions(), pending);
        }
    }
}

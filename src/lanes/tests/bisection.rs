//! Tests the bisection of refused requests: it must find exactly the events that the test has declared bad.

use super::*;

/// The outcomes of one key's events.
#[derive(Debug, Default, PartialEq)]
struct Outcomes {
    stored: Vec<u32>,
    bad: Vec<u32>,
}

#[derive(Debug, Clone)]
enum Turn {
    Push {
        key: u8,
        bad: bool,
    },
    Send {
        worthwhile: bool,
    },
    /// Pub/Sub stores a request, or refuses it if it contains a bad event.
    Judge(prop::sample::Index),
    /// A request fails for another reason.
    Fail(prop::sample::Index),
    Wait,
}

fn turn() -> impl Strategy<Value = Turn> {
    prop_oneof![
        6 => (0u8..3, prop::bool::weighted(0.1)).prop_map(|(key, bad)| Turn::Push { key, bad }),
        2 => any::<bool>().prop_map(|worthwhile| Turn::Send { worthwhile }),
        2 => any::<prop::sample::Index>().prop_map(Turn::Judge),
        1 => any::<prop::sample::Index>().prop_map(Turn::Fail),
        1 => Just(Turn::Wait),
    ]
}

proptest! {
    #[test]
    fn bisection_finds_exactly_the_bad_events_and_stores_the_good_ones_once_in_order(
        turns in prop::collection::vec(turn(), 0..400), limit in 1usize..4,
    ) {
        let mut now = Instant::now();
        let mut lanes = Lanes::new(limit);
        let mut bad: Vec<u32> = Vec::new();
        let mut expected: HashMap<String, Outcomes> = HashMap::new();
        let mut found: HashMap<String, Outcomes> = HashMap::new();
        let mut on_their_way: Vec<Request> = Vec::new();
        let (mut pushed, mut judged) = (0usize, 0usize);
        let mut judge = |lanes: &mut Lanes, request: Request, bad: &[u32]| {
            judged += 1;
            let of_key = found.entry(request.key.ordering_key.to_string()).or_default();
            if ordinals(&request).iter().any(|n| bad.contains(n)) {
                of_key.bad.extend(lanes.refused(request).map(|event| event.origin.position.ordinal));
            } else {
                of_key.stored.extend(ordinals(&request));
                lanes.finished(&request);
            }
        };
        for (n, turn) in (0u32..).zip(turns) {
            match turn {
                Turn::Push { key, bad: is_bad } => {
                    let key = format!("k{key}");
                    push(&mut lanes, &key, n);
                    pushed += 1;
                    let of_key = expected.entry(key).or_default();
                    if is_bad {
                        bad.push(n);
                        of_key.bad.push(n);
                    } else {
                        of_key.stored.push(n);
                    }
                }
                Turn::Send { worthwhile } => {
                    let serve = if worthwhile { Serve::Worthwhile } else { Serve::All };
                    on_their_way.extend(lanes.next_request(now, serve));
                }
                Turn::Judge(which) if !on_their_way.is_empty() => {
                    let request = on_their_way.swap_remove(which.index(on_their_way.len()));
                    judge(&mut lanes, request, &bad);
                }
                Turn::Fail(which) if !on_their_way.is_empty() => {
                    let request = on_their_way.swap_remove(which.index(on_their_way.len()));
                    let load = if n % 2 == 0 { Load::ReduceTopic } else { Load::Reduce };
                    lanes.failed(request, now + Duration::from_millis(u64::from(n % 50)), load);
                }
                Turn::Wait => now += Duration::from_millis(20),
                Turn::Judge(_) | Turn::Fail(_) => {}
            }
            prop_assert_eq!(lanes.in_flight(), on_their_way.len());
        }
        now += Duration::from_secs(10);
        loop {
            if let Some(request) = on_their_way.pop() {
                judge(&mut lanes, request, &bad);
            } else if let Some(request) = lanes.next_request(now, Serve::All) {
                on_their_way.push(request);
            } else {
                break;
            }
        }
        // Without bad events, there is at most one request per event. Each bad event adds at most two requests per
        // halving, plus the first and the last request of its bisection.
        let most = pushed + bad.len() * (2 * (pushed.max(2).ilog2() as usize + 1) + 2);
        prop_assert!(judged <= most, "{} requests, {} at most", judged, most);
        prop_assert_eq!(found, expected);
        prop_assert!(lanes.is_empty() && lanes.waiting() == 0);
    }
}

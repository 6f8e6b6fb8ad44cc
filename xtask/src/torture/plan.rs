//! What happens in one schedule, all of it decided by the seed before anything starts.
//!
//! A plan is plain data: what is written, how the relay is set, and the faults with their moments.
//! That makes a schedule replayable as far as a test with processes can be: the same faults in the
//! same order at the same moments, the same transactions; how threads interleave is up to the
//! machine.

use std::fmt;
use std::time::Duration;

use pubsub_emulator::{Action, Code};

use super::fault::{Fault, Outage, Side, Trouble};
use super::random::Random;

/// Kinds of aggregates; each has a topic of its own.
pub(super) const KINDS: [&str; 3] = ["order", "invoice", "parcel"];

/// Codes that leave open whether the messages were stored.
const UNKNOWN_OUTCOME: [Code; 6] = [
    Code::Unavailable,
    Code::Internal,
    Code::Unknown,
    Code::Aborted,
    Code::DeadlineExceeded,
    Code::Cancelled,
];

/// Everything about one schedule.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) index: u64,
    pub(super) temper: Temper,
    pub(super) relay: RelayPlan,
    pub(super) workload: WorkloadPlan,
    /// The relay starts only when the writers have ended, and works a backlog off.
    pub(super) backlog: bool,
    /// Each answer of Pub/Sub takes so long, so that there is something to interrupt.
    pub(super) answer_delay: Duration,
    pub(super) steps: Vec<Step>,
    /// For the writers and everything else beside.
    pub(super) random: Random,
}

/// The family of faults of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Temper {
    /// Nothing that may repeat an event: duplicates are violations.
    Gentle,
    /// `kill -9` of the relay above all.
    Crashes,
    /// The relay's crashes, with a Pub/Sub that misbehaves.
    Pubsub,
    /// The relay's crashes, with a PostgreSQL that stops, crashes and cuts connections.
    Postgres,
    /// Two relays; the active one is killed, stopped, frozen or cut off from PostgreSQL.
    Standby,
    /// The relay's crashes, with networks that stall, swallow, delay and break.
    Network,
    /// All of it.
    Everything,
}

/// How the relay is set.
#[derive(Debug, Clone)]
pub(super) struct RelayPlan {
    pub(super) count: usize,
    pub(super) in_flight_requests: u64,
    pub(super) in_flight_mib: u64,
    pub(super) channels: u64,
    pub(super) publish_timeout: Duration,
    pub(super) wal_sender_timeout: Duration,
}

/// What is written.
#[derive(Debug, Clone)]
pub(super) struct WorkloadPlan {
    pub(super) writers: u64,
    /// Transactions of each writer.
    pub(super) transactions: u64,
    /// Longest pause of a writer between two transactions, milliseconds.
    pub(super) pause_ms: u64,
    pub(super) hot_keys: u64,
    pub(super) ddl: bool,
    pub(super) noise: bool,
    pub(super) large_rows: bool,
    /// `logical_decoding_work_mem` of the walsender, kB: small ones make it spill.
    pub(super) decoding_work_mem_kb: u64,
}

/// A fault and its moment.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub(super) when: When,
    pub(super) fault: Fault,
}

/// A moment, counted from the end of the step before.
#[derive(Debug, Clone, Copy)]
pub(super) enum When {
    After(Duration),
    /// When so many more messages are stored.
    Stored(u64),
}

impl Plan {
    /// The plan of schedule `index` of `seed`.
    pub(super) fn draw(seed: u64, index: u64) -> Self {
        let mut random = Random::of_schedule(seed, index);
        let temper = random.weighted(&[
            (8, Temper::Gentle),
            (36, Temper::Crashes),
            (20, Temper::Pubsub),
            (10, Temper::Postgres),
            (8, Temper::Standby),
            (8, Temper::Network),
            (10, Temper::Everything),
        ]);
        let steps = draw_steps(temper, &mut random);
        let backlog = random.per_mille(250);
        Self {
            index,
            temper,
            relay: RelayPlan::draw(temper, &steps, &mut random),
            workload: WorkloadPlan::draw(&mut random),
            backlog,
            answer_delay: match backlog {
                true => random.millis(1..=8),
                false => random.pick(&[0, 0, 1, 3, 10].map(Duration::from_millis)),
            },
            steps,
            random,
        }
    }
}

impl Plan {
    /// Whether proxies have to stand between the relays and their peers.
    pub(super) fn needs_network(&self) -> bool {
        let is_network = |step: &Step| matches!(step.fault, Fault::Network(..));
        self.steps.iter().any(is_network)
    }
}

impl RelayPlan {
    fn draw(temper: Temper, steps: &[Step], random: &mut Random) -> Self {
        let has = |wanted: fn(&Fault) -> bool| steps.iter().any(|step| wanted(&step.fault));
        // Short where an answer or a session is to be waited out. Long elsewhere, so that a slow
        // machine is not taken for a fault. An attempt must be shorter than a quarter of the lease.
        let (publish, lease) = match () {
            () if has(Fault::tries_the_lease) => (1, 5),
            () if has(Fault::withholds_answers) => (1, 12),
            () => (10, 60),
        };
        Self {
            count: match temper {
                Temper::Standby => 2,
                Temper::Everything => random.pick(&[1, 2]),
                Temper::Network => random.pick(&[1, 1, 2]),
                Temper::Gentle | Temper::Crashes | Temper::Pubsub | Temper::Postgres => 1,
            },
            in_flight_requests: random.pick(&[1, 2, 8, 64, 512]),
            in_flight_mib: random.pick(&[1, 4, 24]),
            channels: random.pick(&[1, 2, 4]),
            publish_timeout: Duration::from_secs(publish),
            wal_sender_timeout: Duration::from_secs(lease),
        }
    }
}

impl WorkloadPlan {
    fn draw(random: &mut Random) -> Self {
        Self {
            writers: random.within(2..=5),
            transactions: random.within(10..=60),
            pause_ms: random.pick(&[0, 5, 20, 40]),
            hot_keys: random.pick(&[1, 2, 5, 20]),
            ddl: random.per_mille(250),
            noise: random.per_mille(400),
            large_rows: random.per_mille(40),
            decoding_work_mem_kb: random.pick(&[64, 64, 65_536]),
        }
    }
}

fn draw_steps(temper: Temper, random: &mut Random) -> Vec<Step> {
    let kills = match temper {
        Temper::Gentle => 0,
        Temper::Standby => random.within(1..=3),
        Temper::Crashes => random.within(2..=5),
        Temper::Pubsub | Temper::Postgres | Temper::Network | Temper::Everything => {
            random.within(1..=3)
        }
    };
    let others = match temper {
        Temper::Crashes => random.within(0..=1),
        _ => random.within(1..=4),
    };
    let mut faults: Vec<Fault> = Vec::new();
    for _ in 0..kills {
        faults.push(Fault::Kill(random.millis(0..=150)));
    }
    for _ in 0..others {
        let fault = draw_fault(temper, random);
        let place = random.within(0..=faults.len() as u64) as usize;
        faults.insert(place, fault);
    }
    let step = |fault| Step {
        when: match random.per_mille(500) {
            true => When::After(random.millis(5..=250)),
            false => When::Stored(random.within(1..=400)),
        },
        fault,
    };
    faults.into_iter().map(step).collect()
}

fn draw_fault(temper: Temper, random: &mut Random) -> Fault {
    let family = match temper {
        Temper::Gentle => random.pick(&[Family::Gentle, Family::Gentle, Family::Refusals]),
        Temper::Crashes => random.pick(&[Family::Gentle, Family::Gentle, Family::Refusals]),
        Temper::Pubsub => random.pick(&[Family::Refusals, Family::Unanswered, Family::Cuts]),
        Temper::Postgres => random.pick(&[Family::Server, Family::Server, Family::Gentle]),
        Temper::Standby => random.pick(&[Family::Lease, Family::Lease, Family::Gentle]),
        Temper::Network => random.pick(&[Family::Network, Family::Network, Family::Gentle]),
        Temper::Everything => random.pick(&[
            Family::Gentle,
            Family::Refusals,
            Family::Unanswered,
            Family::Cuts,
            Family::Network,
            Family::Server,
        ]),
    };
    match family {
        Family::Gentle => random.pick(&[
            Fault::Stop(random.clone().millis(0..=150)),
            Fault::TerminateWalsender,
            Fault::TerminateSql,
            Fault::LockDispatch(random.clone().millis(300..=900)),
        ]),
        Family::Refusals => draw_refusal(random),
        Family::Unanswered => draw_unanswered(random),
        Family::Cuts => match random.per_mille(700) {
            true => Fault::CutPubsub,
            false => Fault::RefusePubsub(random.millis(50..=500)),
        },
        Family::Server => Fault::Server(
            random.pick(&[Outage::Fast, Outage::Immediate, Outage::Kill9]),
            random.millis(0..=300),
        ),
        Family::Network => draw_network(random),
        Family::Lease => {
            // Sometimes so long that PostgreSQL gives the slot to the other relay.
            let span = match random.per_mille(300) {
                true => random.millis(5_500..=7_500),
                false => random.millis(50..=600),
            };
            match random.per_mille(500) {
                true => Fault::Freeze(span),
                false => {
                    let trouble = random.pick(&[Trouble::Stalled, Trouble::Swallowed]);
                    Fault::Network(Side::Postgres, trouble, span)
                }
            }
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Family {
    Gentle,
    Refusals,
    Unanswered,
    Cuts,
    Server,
    Network,
    Lease,
}

fn draw_network(random: &mut Random) -> Fault {
    let side = random.pick(&[Side::Postgres, Side::Pubsub]);
    let trouble = match random.within(0..=5) {
        0 => Trouble::Stalled,
        1 => Trouble::Swallowed,
        2 => Trouble::Delayed(random.millis(2..=40)),
        3 | 4 => Trouble::Reset,
        _ => Trouble::Finished,
    };
    Fault::Network(side, trouble, random.millis(50..=700))
}

/// Nothing is stored, and the relay is told so.
fn draw_refusal(random: &mut Random) -> Fault {
    // What waits for a person is asked for every few seconds: seldom, as it makes a schedule long.
    if random.per_mille(60) {
        let span = random.millis(50..=400);
        return match random.per_mille(500) {
            true => Fault::TopicGone(random.pick(&KINDS), span),
            false => Fault::PublishFor(Action::Fail(Code::PermissionDenied), span),
        };
    }
    match random.per_mille(250) {
        true => {
            let messages_per_second = random.pick(&[20, 200, 1_000]);
            let storm = Action::Throttle {
                messages_per_second,
            };
            Fault::PublishFor(storm, random.millis(100..=600))
        }
        false => {
            let code = match random.per_mille(200) {
                true => Code::ResourceExhausted,
                false => random.pick(&UNKNOWN_OUTCOME),
            };
            Fault::Publish(Action::Fail(code), random.within(1..=6))
        }
    }
}

/// Stored, or perhaps stored, and the relay cannot know.
fn draw_unanswered(random: &mut Random) -> Fault {
    let times = random.within(1..=4);
    match random.within(0..=9) {
        0..=4 => Fault::Publish(Action::StoreThenFail(random.pick(&UNKNOWN_OUTCOME)), times),
        5..=6 => Fault::Publish(Action::FewerIds, times),
        7 => Fault::Publish(Action::NeverAnswer, 1),
        8 => Fault::Publish(Action::StoreThenNeverAnswer, 1),
        _ => Fault::Publish(Action::Delay(random.millis(100..=900)), times),
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            relay, workload, ..
        } = self;
        writeln!(
            f,
            "{:?}, {} relay(s): {} requests and {} MiB in flight, {} channels, publish timeout \
             {:?}, lease {:?}{}; answers take {:?}",
            self.temper,
            relay.count,
            relay.in_flight_requests,
            relay.in_flight_mib,
            relay.channels,
            relay.publish_timeout,
            relay.wal_sender_timeout,
            if self.backlog { "; a backlog" } else { "" },
            self.answer_delay,
        )?;
        write!(f, "{workload:?}")?;
        for Step { when, fault } in &self.steps {
            match when {
                When::After(pause) => write!(f, "\n  after {pause:?}: {fault}")?,
                When::Stored(more) => write!(f, "\n  {more} messages later: {fault}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_replays_from_its_seed_and_differs_from_its_neighbours() {
        let text = |seed, index| Plan::draw(seed, index).to_string();
        assert_eq!(text(1, 17), text(1, 17));
        assert_ne!(text(1, 17), text(1, 18));
    }

    #[test]
    fn nearly_every_schedule_kills_the_relay_and_every_family_of_faults_comes() {
        let plans: Vec<Plan> = (0..3_000).map(|index| Plan::draw(3, index)).collect();
        let with = |wanted: fn(&Fault) -> bool| {
            let meets = |plan: &&Plan| plan.steps.iter().any(|step| wanted(&step.fault));
            plans.iter().filter(meets).count()
        };
        assert!(with(|fault| matches!(fault, Fault::Kill(_))) > 2_600);
        for count in [
            with(|fault| matches!(fault, Fault::Stop(_))),
            with(|fault| matches!(fault, Fault::Freeze(_))),
            with(|fault| matches!(fault, Fault::TerminateSql | Fault::TerminateWalsender)),
            with(|fault| matches!(fault, Fault::LockDispatch(_))),
            with(|fault| matches!(fault, Fault::Server(Outage::Kill9, _))),
            with(|fault| matches!(fault, Fault::Publish(Action::StoreThenFail(_), _))),
            with(|fault| matches!(fault, Fault::Publish(Action::FewerIds, _))),
            with(|fault| matches!(fault, Fault::PublishFor(..) | Fault::TopicGone(..))),
            with(|fault| matches!(fault, Fault::CutPubsub | Fault::RefusePubsub(_))),
            with(|fault| matches!(fault, Fault::Network(Side::Postgres, Trouble::Stalled, _))),
            with(|fault| matches!(fault, Fault::Network(Side::Pubsub, Trouble::Swallowed, _))),
        ] {
            assert!(count > 10, "{count}");
        }
    }

    #[test]
    fn a_publish_attempt_is_shorter_than_a_quarter_of_the_lease() {
        for index in 0..200 {
            let relay = Plan::draw(5, index).relay;
            assert!(relay.publish_timeout * 4 < relay.wal_sender_timeout);
        }
    }
}

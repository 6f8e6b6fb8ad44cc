//! The faults of a schedule, their order and their moments.

use pubsub_emulator::{Action, Code};

use super::{FaultFamily, KINDS, Release, Step, When};
use crate::fault::{Down, Fault, Loss, Outage, Replacement, Side, Trouble, Unpublished};
use crate::random::Random;

/// Codes after which the client does not know whether the messages were stored.
const UNKNOWN_OUTCOME: [Code; 6] = [
    Code::Unavailable,
    Code::Internal,
    Code::Unknown,
    Code::Aborted,
    Code::DeadlineExceeded,
    Code::Cancelled,
];

/// Draws the steps of a schedule. [`Fault::Release`] is one of the steps if `release` is
/// `UnderWay`.
pub(super) fn draw(fault_family: FaultFamily, release: Release, random: &mut Random) -> Vec<Step> {
    let kills = match fault_family {
        FaultFamily::Gentle => 0,
        FaultFamily::Publication | FaultFamily::Tables | FaultFamily::Bytes => random.within(0..=2),
        FaultFamily::Loss | FaultFamily::Standby => random.within(1..=3),
        FaultFamily::Crashes => random.within(2..=5),
        FaultFamily::Pubsub
        | FaultFamily::Postgres
        | FaultFamily::Network
        | FaultFamily::Everything => random.within(1..=3),
    };
    let others = match fault_family {
        FaultFamily::Crashes
        | FaultFamily::Loss
        | FaultFamily::Publication
        | FaultFamily::Tables
        | FaultFamily::Bytes => random.within(0..=1),
        _ => random.within(1..=4),
    };
    let mut faults: Vec<Fault> = Vec::new();
    for _ in 0..kills {
        faults.push(Fault::Kill(random.millis(0..=150)));
    }
    let mut beside: Vec<Fault> = (0..others)
        .map(|_| draw_fault(fault_family, random))
        .collect();
    match fault_family {
        FaultFamily::Loss => beside.extend(draw_losses(random)),
        FaultFamily::Publication => beside.push(draw_gap(random)),
        FaultFamily::Tables => beside.extend(draw_replacement(random)),
        FaultFamily::Bytes => {
            let rows = 1..=random.within(1..=3);
            beside.extend(rows.map(Fault::Undecodable));
        }
        _ => {}
    }
    if release == Release::UnderWay {
        beside.push(Fault::Release);
    }
    for fault in beside {
        let place = random.within(0..=faults.len() as u64) as usize;
        faults.insert(place, fault);
    }
    let step = |fault| Step {
        when: if random.per_mille(500) {
            When::After(random.millis(5..=250))
        } else {
            When::Stored(random.within(1..=400))
        },
        fault,
    };
    faults.into_iter().map(step).collect()
}

fn draw_fault(fault_family: FaultFamily, random: &mut Random) -> Fault {
    let family = match fault_family {
        FaultFamily::Gentle => random.pick(&[Family::Gentle, Family::Gentle, Family::Refusals]),
        FaultFamily::Crashes => random.pick(&[Family::Gentle, Family::Gentle, Family::Refusals]),
        FaultFamily::Pubsub => random.pick(&[Family::Refusals, Family::Unanswered, Family::Cuts]),
        FaultFamily::Postgres => random.pick(&[Family::Server, Family::Server, Family::Gentle]),
        FaultFamily::Standby => random.pick(&[Family::Lease, Family::Lease, Family::Gentle]),
        FaultFamily::Network => random.pick(&[Family::Network, Family::Network, Family::Gentle]),
        FaultFamily::Loss | FaultFamily::Publication | FaultFamily::Tables | FaultFamily::Bytes => {
            random.pick(&[Family::Gentle, Family::Refusals, Family::Unanswered])
        }
        FaultFamily::Everything => random.pick(&[
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
        Family::Cuts => {
            if random.per_mille(700) {
                Fault::CutPubsub
            } else {
                Fault::RefusePubsub(random.millis(50..=500))
            }
        }
        Family::Server => Fault::Server(
            random.pick(&[Outage::Fast, Outage::Immediate, Outage::Kill9]),
            random.millis(0..=300),
        ),
        Family::Network => draw_network(random),
        Family::Lease => {
            // Some of these faults last so long that the lease ends and PostgreSQL gives the slot
            // to the other relay.
            let span = if random.per_mille(300) {
                random.millis(5_500..=7_500)
            } else {
                random.millis(50..=600)
            };
            if random.per_mille(500) {
                Fault::Freeze(span)
            } else {
                let trouble = random.pick(&[Trouble::Stalled, Trouble::Swallowed]);
                Fault::Network(Side::Postgres, trouble, span)
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

/// Draws the faults in which the slot is lost.
///
/// There are two kinds of losses:
///
/// - The slot is recreated, and the relay may take the new slot for the old one. The new slot does not stream rows
///   that were committed before it was created. The relay finds these rows late, and publishes them after later rows
///   of their key. The judges can check the order of late rows only if the slot is lost once. So a schedule with such
///   a loss contains no other loss.
/// - The relay notices the loss before it streams (`noticed`). Such a loss leaves no late rows, so a schedule may
///   contain two.
fn draw_losses(random: &mut Random) -> Vec<Fault> {
    if random.per_mille(350) {
        let down = random.pick(&[Down::Running, Down::Killed]);
        return vec![Fault::SlotLost(down, Loss::Recreated)];
    }
    let noticed = [
        (Down::Running, Loss::Dropped),
        (Down::Running, Loss::Dropped),
        (Down::Killed, Loss::Dropped),
        (Down::Killed, Loss::Dropped),
        (Down::Stopped, Loss::Dropped),
        (Down::Stopped, Loss::Recreated),
        (Down::Killed, Loss::Invalidated),
        (Down::Stopped, Loss::Invalidated),
    ];
    let count = random.within(1..=2);
    let losses = (0..count).map(|_| random.pick(&noticed));
    losses
        .map(|(down, loss)| Fault::SlotLost(down, loss))
        .collect()
}

fn draw_replacement(random: &mut Random) -> Vec<Fault> {
    let down = random.weighted(&[(4, Down::Running), (1, Down::Killed), (1, Down::Stopped)]);
    let copied = Fault::Replaced(down, Replacement::Copied);
    match random.within(0..=9) {
        0..=1 => vec![copied],
        2..=5 => vec![Fault::Replaced(down, Replacement::Recreated)],
        6..=7 => vec![copied, Fault::SlotLost(Down::Killed, Loss::Dropped)],
        // Drawn rarely because it takes long: PostgreSQL decodes the long row twice before the
        // relay replaces the slot.
        _ => vec![Fault::TooLong],
    }
}

/// Makes every replaced table keep its rows. Schedules with `dispatch = exceptions` need this. In this mode a replaced
/// table leads to a recovery, which reads the new table. A row that was dropped with the old table before it was
/// published can then be read only from the stream. So the relay may publish the row after later rows of its key, or
/// not at all if the recovery creates a new slot (docs/adr/0041-recoveries-that-keep-the-slot.md).
pub(super) fn keep_undelivered_rows(steps: &mut [Step]) {
    for step in steps {
        if let Fault::Replaced(_, how) = &mut step.fault {
            *how = Replacement::Copied;
        }
    }
}

fn draw_gap(random: &mut Random) -> Fault {
    if random.per_mille(300) {
        let span = random.millis(30..=400);
        return Fault::Gap(Down::Stopped, Unpublished::NotInSettings, span);
    }
    let down = random.weighted(&[(4, Down::Running), (1, Down::Killed), (1, Down::Stopped)]);
    let what = random.pick(&[Unpublished::TableOut, Unpublished::PublicationDropped]);
    Fault::Gap(down, what, random.millis(30..=400))
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

/// Draws a fault in which Pub/Sub refuses requests with an error and stores nothing.
fn draw_refusal(random: &mut Random) -> Fault {
    // These two faults are drawn rarely, because they make a schedule long: after an error that an
    // operator has to fix, the relay waits several seconds between two attempts.
    if random.per_mille(60) {
        let span = random.millis(50..=400);
        return if random.per_mille(500) {
            Fault::TopicGone(random.pick(&KINDS), span)
        } else {
            Fault::PublishFor(Action::Fail(Code::PermissionDenied), span)
        };
    }
    if random.per_mille(250) {
        let messages_per_second = random.pick(&[20, 200, 1_000]);
        let storm = Action::Throttle {
            messages_per_second,
        };
        Fault::PublishFor(storm, random.millis(100..=600))
    } else {
        let code = if random.per_mille(200) {
            Code::ResourceExhausted
        } else {
            random.pick(&UNKNOWN_OUTCOME)
        };
        Fault::Publish(Action::Fail(code), random.within(1..=6))
    }
}

/// Draws a fault in which Pub/Sub answers late, wrongly or not at all. After most of these faults,
/// the relay cannot know whether the messages were stored.
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

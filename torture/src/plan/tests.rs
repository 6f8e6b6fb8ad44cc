//! Checks that the plans of a run together cover all faults and settings.

use std::collections::BTreeMap;

use pubsub_emulator::Action;

use super::*;
use crate::fault::{Down, Loss, Outage, Replacement, Side, Trouble, Unpublished};

#[test]
fn a_plan_replays_from_its_seed_and_differs_from_its_neighbours() {
    let text = |seed, index| Plan::draw(seed, index).to_string();
    assert_eq!(text(1, 17), text(1, 17));
    assert_ne!(text(1, 17), text(1, 18));
}

#[test]
fn nearly_every_schedule_kills_the_relay_and_every_family_of_faults_occurs() {
    let plans: Vec<Plan> = (0..3_000).map(|index| Plan::draw(3, index)).collect();
    let with = |wanted: fn(&Fault) -> bool| {
        let meets = |plan: &&Plan| plan.steps.iter().any(|step| wanted(&step.fault));
        plans.iter().filter(meets).count()
    };
    assert!(with(|fault| matches!(fault, Fault::Kill(_))) > 2_500);
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
        with(|fault| matches!(fault, Fault::SlotLost(Down::Running, Loss::Dropped))),
        with(|fault| matches!(fault, Fault::SlotLost(Down::Killed, Loss::Recreated))),
        with(|fault| matches!(fault, Fault::SlotLost(Down::Stopped, Loss::Recreated))),
        with(|fault| matches!(fault, Fault::SlotLost(_, Loss::Invalidated))),
        with(|fault| matches!(fault, Fault::Gap(_, Unpublished::TableOut, _))),
        with(|fault| matches!(fault, Fault::Gap(_, Unpublished::PublicationDropped, _))),
        with(|fault| matches!(fault, Fault::Gap(_, Unpublished::NotInSettings, _))),
        with(|fault| matches!(fault, Fault::Replaced(Down::Running, Replacement::Copied))),
        with(|fault| matches!(fault, Fault::Replaced(_, Replacement::Recreated))),
        with(|fault| matches!(fault, Fault::TooLong)),
        with(|fault| matches!(fault, Fault::Undecodable(_))),
        with(|fault| matches!(fault, Fault::Release)),
    ] {
        assert!(count > 10, "{count}");
    }
}

#[test]
fn the_schedules_of_ci_kill_a_relay_two_hundred_times() {
    let kills = |fault: &Fault| {
        matches!(
            fault,
            Fault::Kill(_)
                | Fault::SlotLost(Down::Killed, _)
                | Fault::Gap(Down::Killed, ..)
                | Fault::Replaced(Down::Killed, _)
        )
    };
    let plans = (0..240).map(|index| Plan::draw(1, index));
    let count = plans
        .filter(|plan| plan.steps.iter().any(|step| kills(&step.fault)))
        .count();
    assert!(count >= 200, "{count}");
}

#[test]
fn plans_with_bad_events_cover_both_quarantine_policies_and_every_release_time() {
    let plans: Vec<Plan> = (0..3_000).map(|index| Plan::draw(3, index)).collect();
    let with = |key, release| {
        let poisoned = plans.iter().filter(|plan| !plan.workload.poison.is_empty());
        let meets = |plan: &&Plan| (plan.relay.quarantines_key, plan.release) == (key, release);
        poisoned.filter(meets).count()
    };
    for count in [
        with(true, Release::Never),
        with(true, Release::AtTheEnd),
        with(true, Release::UnderWay),
        with(false, Release::Never),
        with(false, Release::AtTheEnd),
    ] {
        assert!(count > 30, "{count}");
    }
}

#[test]
fn a_third_of_the_schedules_of_each_family_records_only_exceptions() {
    let plans: Vec<Plan> = (0..3_000).map(|index| Plan::draw(8, index)).collect();
    for fault_family in [
        FaultFamily::Gentle,
        FaultFamily::Crashes,
        FaultFamily::Loss,
        FaultFamily::Publication,
        FaultFamily::Bytes,
    ] {
        let of_it = plans
            .iter()
            .filter(|plan| plan.fault_family == fault_family);
        let all = of_it.clone().count();
        let exceptions = of_it.filter(|plan| plan.relay.exceptions).count();
        assert!(
            (all / 4..all / 2).contains(&exceptions),
            "{exceptions} of {all}"
        );
    }
}

#[test]
fn a_fifth_of_the_schedules_of_each_family_has_goaway() {
    let mut counts: BTreeMap<String, (u32, u32)> = BTreeMap::new();
    for plan in (0..3_000).map(|index| Plan::draw(9, index)) {
        let (with, all) = counts
            .entry(format!("{:?}", plan.fault_family))
            .or_default();
        *with += u32::from(plan.goaway.is_some());
        *all += 1;
    }
    assert_eq!(counts.len(), 11);
    for (fault_family, (with, all)) in counts {
        assert!(
            with * 10 > all && with * 10 < all * 3,
            "{fault_family}: {with} of {all}"
        );
    }
}

#[test]
fn a_loss_that_makes_rows_late_is_the_only_loss_of_its_schedule() {
    for index in 0..3_000 {
        let plan = Plan::draw(4, index);
        let is_loss = |s: &&Step| matches!(s.fault, Fault::SlotLost(..) | Fault::Gap(..));
        let losses = plan.steps.iter().filter(is_loss).count();
        assert!(losses <= 1 || !plan.leaves_late_rows());
        assert!(losses == 0 || plan.loses_rows());
        assert!(
            losses > 0
                || !matches!(
                    plan.fault_family,
                    FaultFamily::Loss | FaultFamily::Publication
                )
        );
    }
}

#[test]
fn without_records_a_replaced_table_keeps_undelivered_rows() {
    for index in 0..3_000 {
        let plan = Plan::draw(7, index);
        let drops = |step: &Step| matches!(step.fault, Fault::Replaced(_, Replacement::Recreated));
        assert!(!plan.relay.exceptions || !plan.steps.iter().any(drops));
    }
}

#[test]
fn the_schedules_of_ci_have_tables_of_every_kind() {
    let plans: Vec<Plan> = (0..240).map(|index| Plan::draw(1, index)).collect();
    let with = |wanted: fn(&Plan) -> bool| plans.iter().filter(|plan| wanted(plan)).count();
    for count in [
        with(|plan| plan.table.history > 0 && plan.fault_family == FaultFamily::Loss),
        with(|plan| plan.table.history > 0 && plan.table.captured_by_relay),
        with(|plan| plan.table.history > 0 && plan.table.lagging_slot),
        with(|plan| plan.workload.moves_rows),
        with(|plan| plan.fault_family == FaultFamily::Tables && plan.relay.exceptions),
        with(|plan| {
            plan.steps
                .iter()
                .any(|step| matches!(step.fault, Fault::TooLong))
        }),
        with(|plan| {
            let recreated = Replacement::Recreated;
            (plan.steps.iter())
                .any(|step| matches!(step.fault, Fault::Replaced(_, how) if how == recreated))
        }),
    ] {
        assert!(count >= 2, "{count}");
    }
}

#[test]
fn schedules_that_recreate_the_slot_after_a_clean_stop_use_one_relay() {
    for index in 0..3_000 {
        let plan = Plan::draw(6, index);
        let clean = |step: &Step| step.fault.follows_a_clean_stop();
        assert!(plan.relay.count == 1 || !plan.steps.iter().any(clean));
    }
}

#[test]
fn a_publish_attempt_is_shorter_than_a_quarter_of_the_lease() {
    for index in 0..200 {
        let relay = Plan::draw(5, index).relay;
        assert!(relay.publish_timeout * 4 < relay.wal_sender_timeout);
    }
}

#[test]
fn buckets_occur_with_crashes_with_and_without_records() {
    let plans: Vec<Plan> = (0..240).map(|index| Plan::draw(1, index)).collect();
    let kills = |step: &Step| matches!(step.fault, Fault::Kill(_));
    for exceptions in [false, true] {
        let bucketed = plans
            .iter()
            .filter(|plan| plan.relay.buckets.is_some() && plan.relay.exceptions == exceptions)
            .filter(|plan| plan.steps.iter().any(kills));
        let count = bucketed.count();
        assert!(count >= 5, "{count}");
    }
}

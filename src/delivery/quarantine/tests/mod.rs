//! Tests the quarantine: single rules, and random steps against a model of its environment.

mod model;
mod rules;
mod steps;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::SystemTime;

use proptest::prelude::*;
use publisher::MessageIds;

use super::*;
use crate::event::Event;
use crate::event::Standing;

fn group() -> Group {
    Group {
        topic: "t".into(),
        ordering_key: OrderingKey::from("k"),
    }
}

fn event(n: u32, standing: Standing) -> Event {
    let mut event = Event::for_tests(n);
    event.origin.standing = standing;
    event
}

fn in_lane(group: &Group) -> InLane {
    InLane {
        group: group.clone(),
        bytes: 1,
        is_new: false,
    }
}

//! Tests the lanes. Some tests check a single rule. Property tests take random steps, and compare the lanes with a
//! simple model of what each key must publish.

mod bisection;
mod model;
mod outage;
mod rules;

use std::collections::HashMap;
use std::time::Duration;

use proptest::prelude::*;

use super::*;

fn event(n: u32) -> Event {
    Event::for_tests(n)
}

fn push(lanes: &mut Lanes, key: &str, n: u32) {
    lanes.push(
        "projects/p/topics/t".into(),
        OrderingKey::from(key),
        event(n),
    );
}

fn ordinals(request: &Request) -> Vec<u32> {
    request
        .events
        .iter()
        .map(|event| event.origin.position.ordinal)
        .collect()
}

//! The decoder against bytes: captured from real servers, made up by proptest, and damaged; and against
//! another decoder.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod captured;
mod damage;
mod differential;
mod encoder;
mod fixture;
mod made_up;
mod relation_cache_model;
mod rendering;
mod round_trips;

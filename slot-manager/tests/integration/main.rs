//! Claims about slots, publications and checks, each on a real server.
//!
//! `POSTRIDER_PG_BIN` chooses the major. What a major lacks is skipped with a line that says so.

mod cluster;
mod health;
mod preflight;
mod publication;
mod retention;
mod slots;
mod support;

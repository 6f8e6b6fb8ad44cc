//! Runs programs, mainly cargo, for the automation. This is a library because `torture/` and
//! `bench/` use it too.

pub mod step;

//! How the automation runs cargo. It is a library because `torture/` and `bench/` use it too.

pub mod step;

//! Logs on standard error, as text or JSON; `RUST_LOG` sets the level.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// The filter when `RUST_LOG` is not set: info from Postrider, warnings from other crates.
const DEFAULT_FILTER: &str = "warn,postrider=info";

pub(super) fn start(json: bool) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| DEFAULT_FILTER.into());
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    // An error means that a subscriber is already set, as in a test. It can stay.
    let _ = if json {
        builder.json().flatten_event(true).try_init()
    } else {
        builder
            .with_target(false)
            .with_ansi(std::io::stderr().is_terminal())
            .try_init()
    };
}

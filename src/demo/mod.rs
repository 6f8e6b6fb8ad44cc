//! The demonstration: real parts, a real SIGKILL, and a check that nothing was lost or swapped.
//!
//! `show` is the script, `world` the stage. `writers` commit business rows together with events,
//! `subscriber` receives them, `ledger` keeps what was seen and `verdict` compares it with the
//! database. `screen` makes text of it all.
//!
//! **Not here:** anything that a relay needs in earnest. What runs here as `postrider init` and
//! `postrider run` are the same commands that everybody uses.

mod figures;
mod ledger;
mod relay_process;
mod screen;
mod shop;
mod show;
mod subscriber;
mod summary;
mod verdict;
mod world;
mod writers;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use crate::error::{Code, Error, Report, Result};
use ledger::Ledger;
use show::Show;

/// What can be chosen.
#[derive(Debug, Clone)]
pub struct Options {
    /// How long the writers write, in seconds; at least 5.
    pub seconds: u64,
    /// Events per second that they aim at.
    pub rate: u32,
    /// Leave everything running afterwards, until told to stop.
    pub keep: bool,
    /// The summary as JSON on standard output, the rest on standard error.
    pub json: bool,
    /// For a terminal.
    pub colours: bool,
}

/// How it ended, if not with an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// All was shown, and all was as promised.
    Finished,
    /// It was told to stop before.
    Interrupted,
}

/// Plays the demonstration; `shutdown` turning true ends it early. Whatever it has started is gone
/// when this returns or is dropped.
///
/// # Errors
/// `demo-failed` when something was lost, swapped or delivered without a commit, or when a part
/// did not start or ended by itself.
pub async fn run(options: &Options, mut shutdown: watch::Receiver<bool>) -> Result<End> {
    let mut stop = async || {
        // An error means that the signals are not watched any more: stop as well.
        let _ = shutdown.wait_for(|stop| *stop).await;
    };
    let mut show = tokio::select! {
        biased;
        () = stop() => return Ok(End::Interrupted),
        show = Show::set_up(options) => show?,
    };
    let played = tokio::select! {
        biased;
        () = stop() => return Ok(End::Interrupted),
        played = show.play() => played,
    };
    if played.is_err() {
        show.print_relay_log()?;
    }
    if options.keep {
        if let Err(error) = &played {
            eprintln!("{}", Report(error));
        }
        show.open_playground()?;
        stop().await;
    }
    played.map(|()| End::Finished)
}

type SharedLedger = Arc<Mutex<Ledger>>;

fn lock(ledger: &SharedLedger) -> MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failed(what: impl Into<String>) -> Error {
    Error::new(Code::DemoFailed, what)
}

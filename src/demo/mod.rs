//! The demonstration: real parts, a real SIGKILL, and a check that nothing was lost or swapped.
//!
//! `show` is the script, and `world` starts the servers. `writers` commit business rows together
//! with events, `subscriber` receives the events, `ledger` records both, and `verdict` compares the
//! ledger with the database. `screen` formats the output.
//!
//! **Not here:** anything that a relay needs in production. The demonstration runs the same
//! `postrider init` and `postrider run` as everybody else.

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

/// The options of `postrider demo`.
#[derive(Debug, Clone)]
pub struct Options {
    /// How long the writers write, in seconds; at least 5.
    pub seconds: u64,
    /// Events per second that they aim at.
    pub rate: u32,
    /// Keep everything running afterwards, until the process is stopped.
    pub keep: bool,
    /// Print the summary as JSON on standard output, and everything else on standard error.
    pub json: bool,
    /// Use colours, for a terminal.
    pub colours: bool,
}

/// How the demonstration ended, if not with an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It ran to the end, and every promise was kept.
    Finished,
    /// It was stopped early.
    Interrupted,
}

/// Runs the demonstration. It ends early when `shutdown` turns true. All servers and processes that
/// it started are gone when this future returns or is dropped.
///
/// # Errors
/// `demo-failed` when an event was lost, swapped or delivered without a commit, or when a part did
/// not start or ended by itself.
pub async fn run(options: &Options, mut shutdown: watch::Receiver<bool>) -> Result<End> {
    let mut stop = async || {
        // An error means that nobody watches the signals, so stop as well.
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

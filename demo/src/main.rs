//! `postrider-demo`: runs real servers and a real relay, kills the relay by SIGKILL, and checks
//! that no event was lost or out of order.
//!
//! `show` is the script, and `world` starts the servers. `writers` commit business rows together
//! with events, `subscriber` receives the events, `ledger` records both, and `verdict` compares the
//! ledger with the database. `screen` formats the output. `program` finds the `postrider` that the
//! demonstration runs.
//!
//! **Not here:** any code of the relay. The demonstration runs `postrider init` and `postrider run`
//! as processes, so it shows and judges the program that users get.

mod args;
mod error;
mod figures;
mod ledger;
mod program;
mod relay_process;
mod screen;
mod session;
mod shop;
mod show;
mod signals;
mod subscriber;
mod summary;
mod verdict;
mod world;
mod writers;

use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use clap::Parser;
use tokio::sync::watch;

use args::Args;
use error::{Report, Result, failed};
use ledger::Ledger;
use show::Show;

/// Exit status after an interruption: 128 + SIGINT, as a shell reports it for a program ended by
/// Ctrl-C.
const INTERRUPTED: u8 = 130;

/// How the demonstration ended, if it did not end with an error.
enum End {
    /// The demonstration ran to the end and found no violation.
    Finished,
    /// The demonstration was stopped early.
    Interrupted,
}

fn main() -> ExitCode {
    let args = Args::parse();
    // Google's client uses the TLS provider of the process. An error means that a provider is
    // already installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match start(&args) {
        Ok(End::Finished) => ExitCode::SUCCESS,
        Ok(End::Interrupted) => {
            eprintln!("\nInterrupted; everything is cleaned up.");
            ExitCode::from(INTERRUPTED)
        }
        Err(error) => {
            eprintln!("{}", Report(&error));
            ExitCode::FAILURE
        }
    }
}

fn start(args: &Args) -> Result<End> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|e| failed("cannot start a runtime").caused_by(e))?;
    runtime.block_on(async {
        let shutdown = signals::watch()?;
        run(args, shutdown).await
    })
}

/// Runs the demonstration. It ends early if `shutdown` becomes true. When this future has returned
/// or is dropped, all servers and processes of the demonstration are gone.
///
/// # Errors
/// - An event was lost, arrived out of order, or was delivered although its transaction did not commit.
/// - A part of the demonstration, such as the relay, failed to start.
/// - A part of the demonstration ended although nobody stopped it.
async fn run(args: &Args, mut shutdown: watch::Receiver<bool>) -> Result<End> {
    let mut stop = async || {
        // `wait_for` fails if the task that watches the signals has ended. Stop then too, because a
        // signal could no longer stop the demonstration.
        let _ = shutdown.wait_for(|stop| *stop).await;
    };
    let mut show = tokio::select! {
        biased;
        () = stop() => return Ok(End::Interrupted),
        show = Show::set_up(args) => show?,
    };
    let played = tokio::select! {
        biased;
        () = stop() => return Ok(End::Interrupted),
        played = show.play() => played,
    };
    if played.is_err() {
        show.print_relay_log()?;
    }
    if args.keep {
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

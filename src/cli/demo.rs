//! `postrider demo`: its arguments, its signals and its exit code.

use std::io::IsTerminal;
use std::process::ExitCode;

use super::signals;
use crate::demo::{self, End, Options};
use crate::error::{Code, Error, Result};

/// 128 + SIGINT: the status that a shell reports for a program ended by Ctrl-C.
const INTERRUPTED: u8 = 130;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Seconds that the writers run; the relay is killed half-way
    #[arg(long, value_name = "N", default_value_t = 20,
          value_parser = clap::value_parser!(u64).range(5..=600))]
    seconds: u64,
    /// Events per second that the writers aim at
    #[arg(long, value_name = "N", default_value_t = 2_000,
          value_parser = clap::value_parser!(u32).range(10..=20_000))]
    rate: u32,
    /// Leave everything running at the end, to explore, until Ctrl-C
    #[arg(long)]
    keep: bool,
    /// Print the summary as one JSON object; the rest goes to standard error
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<ExitCode> {
    let shown_on_terminal = if args.json {
        std::io::stderr().is_terminal()
    } else {
        std::io::stdout().is_terminal()
    };
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let options = Options {
        seconds: args.seconds,
        rate: args.rate,
        keep: args.keep,
        json: args.json,
        colours: shown_on_terminal && !no_color,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::new(Code::Internal, "cannot start a runtime").caused_by(e))?;
    let end = runtime.block_on(async {
        let shutdown = signals::watch()?;
        demo::run(&options, shutdown).await
    })?;
    Ok(match end {
        End::Finished => ExitCode::SUCCESS,
        End::Interrupted => {
            eprintln!("\nInterrupted; everything is cleaned up.");
            ExitCode::from(INTERRUPTED)
        }
    })
}

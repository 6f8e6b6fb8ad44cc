//! The command line.

use std::io::IsTerminal;
use std::path::PathBuf;

use clap::Parser;

/// See Postrider work in half a minute, from a row to a message, through a kill -9
///
/// Starts a throw-away PostgreSQL, a Pub/Sub emulator, services that write, the relay and a
/// subscriber. Kills the relay half-way, restarts it, and checks against the database that no
/// event was lost, reordered or published without a commit. Needs only PostgreSQL's programs
/// (`make demo` installs them) and the program `postrider`. Leaves nothing behind.
#[derive(Debug, Parser)]
#[command(name = "postrider-demo", version, max_term_width = 100)]
pub(crate) struct Args {
    /// Seconds that the writers run; the relay is killed half-way
    #[arg(long, value_name = "N", default_value_t = 20,
          value_parser = clap::value_parser!(u64).range(5..=600))]
    pub(crate) seconds: u64,
    /// Events per second that the writers aim at
    #[arg(long, value_name = "N", default_value_t = 2_000,
          value_parser = clap::value_parser!(u32).range(10..=20_000))]
    pub(crate) rate: u32,
    /// At the end, keep everything running for you to explore, until you press Ctrl-C
    #[arg(long)]
    pub(crate) keep: bool,
    /// Print the summary as one JSON object; the rest goes to standard error
    #[arg(long)]
    pub(crate) json: bool,
    /// The program `postrider` to show; by default the one next to this program
    #[arg(long, value_name = "FILE")]
    pub(crate) postrider: Option<PathBuf>,
}

impl Args {
    /// Whether to use colours: only on a terminal, and only if `NO_COLOR` is unset or empty.
    pub(crate) fn colours(&self) -> bool {
        let on_terminal = if self.json {
            std::io::stderr().is_terminal()
        } else {
            std::io::stdout().is_terminal()
        };
        on_terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }
}

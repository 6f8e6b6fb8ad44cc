//! The `postrider` binary; `src/cli/mod.rs` has the commands.

use std::process::ExitCode;

fn main() -> ExitCode {
    postrider::cli::main()
}

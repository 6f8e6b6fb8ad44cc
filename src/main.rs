//! The `postrider` binary: reads its arguments and does what they say.

use std::process::ExitCode;

fn main() -> ExitCode {
    postrider::cli::main()
}

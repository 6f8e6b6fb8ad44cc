//! Writes the manual pages of all commands into a folder. `cargo xtask man` runs this program.
//!
//! This program is an example of the root package, so that `postrider` does not contain the generator.

use std::io;
use std::path::PathBuf;

fn main() -> io::Result<()> {
    let folder = std::env::args_os().nth(1).map(PathBuf::from);
    let folder = folder.ok_or_else(|| io::Error::other("name the folder for the pages"))?;
    std::fs::create_dir_all(&folder)?;
    clap_mangen::generate_to(postrider::cli::command(), folder)
}

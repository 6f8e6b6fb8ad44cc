//! `cargo xtask man`: writes the manual pages to `target/man`, where `cargo deb` finds them.
//!
//! An example program of the root package renders the pages, because it can access the definitions of the
//! commands.

use xtask::step;

pub(crate) fn run() -> Result<(), String> {
    // Remove old pages, so that no page of a removed command remains. An error means that the folder does
    // not exist yet.
    let _ = std::fs::remove_dir_all("target/man");
    // Build in release mode, because the example then shares most of its build with the released program.
    let example = step::cargo(&[
        "run",
        "--locked",
        "--release",
        "--package",
        "postrider",
        "--example",
        "man",
        "--",
        "target/man",
    ]);
    step::run(example)
}

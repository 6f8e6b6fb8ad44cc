//! `cargo xtask man`: writes the manual pages to `target/man`, where `cargo deb` finds them.
//!
//! An example of the root package renders them, because it knows the commands.

use xtask::step;

pub(crate) fn run() -> Result<(), String> {
    // Remove old pages, so that no page of a removed command stays. An error means that there is no folder
    // yet.
    let _ = std::fs::remove_dir_all("target/man");
    // In release mode it shares most of its build with the program.
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

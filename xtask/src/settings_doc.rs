//! `cargo xtask settings-doc`: writes or checks `docs/reference/settings.md`.
//!
//! The rendering is a test of the root package (`tests/docs.rs`), which has the table at hand; so
//! xtask need not build the whole program to check the formatting.

use crate::step;

/// Set for the test that is to write the page instead of comparing it.
const UPDATE_VARIABLE: &str = "UPDATE_DOCS";

pub(crate) fn run(check: bool) -> Result<(), String> {
    let mut test = step::cargo(&[
        "test",
        "--locked",
        "--package",
        "postrider",
        "--test",
        "docs",
    ]);
    if check {
        test.env_remove(UPDATE_VARIABLE);
    } else {
        test.args(["settings_page"]).env(UPDATE_VARIABLE, "1");
    }
    step::run(test)
}

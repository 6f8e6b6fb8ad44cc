//! `cargo xtask settings-doc`: writes or checks `docs/reference/settings.md`.
//!
//! The page is rendered by a test of the root package (`tests/docs.rs`), which can access the table
//! of settings. So xtask need not build the whole program just to check the formatting.

use xtask::step;

/// Makes that test write the page instead of comparing it.
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

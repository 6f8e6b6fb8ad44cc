//! `cargo xtask settings-doc`: writes or checks `docs/reference/settings.md` and
//! `docs/reference/settings.schema.json`.
//!
//! Tests of the root package (`tests/docs/settings.rs`) render both files, because they can access the
//! table of settings. So xtask does not depend on the program, and its other commands do not have to
//! build the program.

use xtask::step;

/// If this variable is set, the tests write the files instead of comparing them.
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
        test.args(["the_settings_"]).env(UPDATE_VARIABLE, "1");
    }
    step::run(test)
}

//! Checks that only few files name the mode of the setting `dispatch`. The other files ask
//! `RecordKeeping` about the consequences of the mode.

use regex_lite::Regex;

use crate::crates::product;
use crate::source::{modules_in, shown};

/// Maximum number of files whose code may match [`MODE`], apart from tests.
const FILES_MAX: usize = 8;

/// The file that defines `RecordKeeping`. Other files call its methods instead of naming the mode.
const HOME: &str = "src/store/relay_row/record_keeping.rs";

/// Matches code that names the mode: the type `Dispatch` of the setting, its variant `Exceptions`, or a
/// comparison with the word "exceptions".
const MODE: &str = r#"\b(?:Dispatch|Exceptions)\b|[!=]= "exceptions""#;

#[test]
fn few_files_name_the_mode_of_dispatch() {
    let mode = Regex::new(MODE).expect("a valid pattern");
    let files = product().into_iter().flat_map(|folder| modules_in(&folder));
    let naming = files.filter(|file| mode.is_match(&file.code));
    let naming: Vec<String> = naming.map(|file| shown(&file.path)).collect();
    assert!(naming.iter().any(|path| path == HOME), "{naming:?}");
    assert!(
        naming.len() <= FILES_MAX,
        "more than {FILES_MAX} files name the mode; add a question to {HOME} instead: {naming:#?}"
    );
}

#[test]
fn code_that_mentions_the_dispatch_mode_is_recognised() {
    let mode = Regex::new(MODE).expect("a valid pattern");
    for code in [
        "use crate::settings::{Dispatch, Settings};",
        "Some(Exceptions) => true,",
        "if report.dispatch == \"exceptions\" {",
    ] {
        assert!(mode.is_match(code), "{code}");
    }
    for code in [
        "let writer = DispatchWriter::start();",
        "RecordKeeping::of(settings.dispatch, earlier)",
        "\"with dispatch = exceptions published events have no record\"",
    ] {
        assert!(!mode.is_match(code), "{code}");
    }
}

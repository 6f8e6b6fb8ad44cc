//! Checks the manual pages: there is one for each command, with the flags of the command.

use std::collections::BTreeSet;
use std::path::Path;

fn pages_of(command: &clap::Command, name: &str, pages: &mut BTreeSet<String>) {
    pages.insert(format!("{name}.1"));
    for inner in command.get_subcommands() {
        pages_of(inner, &format!("{name}-{}", inner.get_name()), pages);
    }
}

#[test]
fn every_command_has_a_manual_page_with_its_settings() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let command = postrider::cli::command();
    clap_mangen::generate_to(command.clone(), folder.path()).expect("pages can be written");
    let mut expected = BTreeSet::new();
    pages_of(&command, "postrider", &mut expected);
    let entries = std::fs::read_dir(folder.path()).expect("the folder");
    let names = entries.map(|entry| entry.expect("an entry").file_name());
    let written: BTreeSet<String> = names.map(|name| name.to_string_lossy().into()).collect();
    assert_eq!(written, expected);
    assert!(written.len() > 20, "{written:?}");

    let read = |name: &str| {
        let page = std::fs::read_to_string(Path::new(folder.path()).join(name));
        page.unwrap_or_else(|e| panic!("{name}: {e}"))
    };
    let run = read("postrider-run.1");
    assert!(run.contains(".SH NAME"), "{run}");
    assert!(run.contains("in\\-flight\\-mib"), "{run}");
    let status = read("postrider-status.1");
    assert!(status.contains("postrider status \\-\\-watch"), "{status}");
    assert!(!status.contains("in\\-flight\\-mib"), "{status}");
}

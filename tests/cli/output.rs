//! Tests what a command does when it cannot write to standard output.

use std::fs::File;
use std::process::{Command, Stdio};

fn explain(arguments: &[&str], stdout: impl Into<Stdio>) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_postrider"));
    let ran = command.args(arguments).stdout(stdout).output().unwrap();
    (ran.status.code(), String::from_utf8(ran.stderr).unwrap())
}

#[test]
fn a_full_disk_under_the_output_is_an_error() {
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let (code, said) = explain(&["explain", "internal"], full());
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("cannot write the output: No space left"),
        "{said}"
    );
}

#[test]
fn a_closed_pipe_ends_the_command_silently() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    assert_eq!(
        explain(&["explain", "internal"], writer),
        (Some(141), String::new())
    );
}

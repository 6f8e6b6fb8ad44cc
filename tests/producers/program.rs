//! A program in examples/producers/ that needs packages of its language.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::page;
use crate::shop::Shop;

/// A program, and the shell commands that download its packages, build it and start it. The commands run
/// in the program's folder.
pub(crate) struct Program {
    /// The file with the snippet, below examples/producers/.
    pub(crate) file: &'static str,
    /// A tool that must be installed. If the tool is missing, the test is skipped.
    pub(crate) tool: &'static str,
    /// Downloads the packages. If this fails, the test is skipped.
    pub(crate) download: &'static str,
    pub(crate) build: &'static str,
    /// The command that starts the program. The name of the order is appended to it.
    pub(crate) start: &'static str,
}

/// A program that is ready to start.
pub(crate) struct ReadyProgram {
    folder: PathBuf,
    start: &'static str,
}

impl Program {
    /// Copies the program to the folder for build output, downloads its packages and builds it. Returns
    /// `None` if the test is skipped.
    pub(crate) fn prepare(&self) -> Option<ReadyProgram> {
        let (name, _) = self.file.split_once('/').expect("a folder");
        if std::env::var_os("CI").is_none() {
            println!("SKIPPED: {name}: it downloads packages, so it runs only if CI is set");
            return None;
        }
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("producers");
        std::fs::create_dir_all(&folder).expect("a folder for the program");
        let copied = Command::new("cp")
            .arg("-r")
            .arg(page::examples().join(name))
            .arg(&folder)
            .status();
        assert!(
            copied.is_ok_and(|status| status.success()),
            "cannot copy {name}"
        );
        let folder = folder.join(name);
        if !shell(&folder, &format!("command -v {}", self.tool))
            .status
            .success()
        {
            println!("SKIPPED: {name}: {} is not installed", self.tool);
            return None;
        }
        let got = shell(
            &folder,
            &format!("timeout 120 sh -c {}", quoted(self.download)),
        );
        if !got.status.success() {
            println!(
                "SKIPPED: {name}: cannot download its packages: {}",
                text(&got)
            );
            return None;
        }
        let built = shell(&folder, self.build);
        assert!(built.status.success(), "{}: {}", self.build, text(&built));
        Some(ReadyProgram {
            folder,
            start: self.start,
        })
    }
}

impl ReadyProgram {
    /// Runs the program. Returns the id of the event, which the program prints, or the program's error.
    pub(crate) fn place(&self, order: &str, shop: &Shop) -> Result<String, String> {
        let output = Command::new("sh")
            .args(["-c", &format!("{} {order}", self.start)])
            .current_dir(&self.folder)
            .env("DATABASE_URL", shop.service_url())
            .env("JDBC_URL", shop.service_jdbc_url())
            .stdin(Stdio::null())
            .output()
            .expect("a shell");
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        } else {
            Err(text(&output))
        }
    }
}

fn shell(folder: &Path, script: &str) -> Output {
    let mut command = Command::new("sh");
    command
        .args(["-c", script])
        .current_dir(folder)
        .stdin(Stdio::null());
    command.output().expect("a shell")
}

fn quoted(script: &str) -> String {
    format!("'{}'", script.replace('\'', r"'\''"))
}

fn text(output: &Output) -> String {
    let (out, err) = (&output.stdout, &output.stderr);
    format!(
        "{}{}",
        String::from_utf8_lossy(out),
        String::from_utf8_lossy(err)
    )
}

//! Gets the password of a session: from `password_command`, from the connection parameters, or from
//! libpq's password file (`PGPASSFILE`, by default `~/.pgpass`).
//!
//! Each login runs the command or reads the file again. So the relay keeps working after a password
//! was rotated, and with tokens that expire after an hour. Source:
//! <https://www.postgresql.org/docs/current/libpq-pgpass.html>

mod standard_error;

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use printable::shown_path;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};

use super::target::{Host, Target};

use crate::LOG_TARGET;
use crate::error::{ErrorKind, ReplicationError, Result};
use standard_error::while_logging;

/// Permission bits of the group and of all other users. Like libpq, we refuse a password file that
/// has any of these bits.
const OTHERS: u32 = 0o077;

/// How long the command may run. With a short `connect_timeout`, the limit is three quarters of that timeout
/// instead. So a command that hangs reaches its own limit first, and the error names the command as the cause.
const COMMAND_LIMIT: Duration = Duration::from_secs(8);

/// Maximum length in bytes of the first line that the command prints. Passwords and tokens are much
/// shorter.
const LINE_MAX: u64 = 64 << 10;

/// Returns the password to log in with; `None` if there is none.
///
/// # Errors
/// `PasswordCommand` if the command fails. `Authentication` if the configured password file cannot
/// be read, or if other users may access it.
pub async fn password(target: &Target) -> Result<Option<String>> {
    if let Some(command) = &target.password_command {
        let limit = COMMAND_LIMIT.min(target.connect_timeout * 3 / 4);
        return of_command(command, limit).await.map(Some);
    }
    if let Some(password) = &target.password {
        return Ok(Some(password.clone()));
    }
    if let Some(path) = &target.password_file {
        return Ok(of_file(&read(path)?, target));
    }
    let default = target.default_password_file.as_deref();
    Ok(default.and_then(|path| of_default_file(path, target)))
}

/// Returns a hint for a refused login: what to check about the source of the password. Returns `None` if the
/// password comes from the connection parameters.
#[must_use]
pub fn password_advice(target: &Target) -> Option<String> {
    if target.password_command.is_some() {
        return Some(format!(
            "check that password_command prints the present password of role {}, and check the server's pg_hba.conf",
            target.user
        ));
    }
    if target.password.is_some() {
        return None;
    }
    let default = target.default_password_file.as_deref();
    let file = target.password_file.as_deref();
    let Some(path) = file.or(default.filter(|path| path.exists())) else {
        return Some(
            "set the password, if the server wants one: in DATABASE_URL, in a password file (PGPASSFILE), or with \
             password_command; and check the user, and the server's pg_hba.conf"
                .to_owned(),
        );
    };
    let shown = shown_path(path);
    let found = read(path).ok().and_then(|text| of_file(&text, target));
    Some(match found {
        Some(_) => format!(
            "the password comes from the password file {shown}: check the first line that matches {target}, and the \
             server's pg_hba.conf"
        ),
        None => format!(
            "no line of the password file {shown} matches {target}: add one in the form \
             host:port:database:user:password, or set the password in another way"
        ),
    })
}

/// Runs the command and returns the first line that it prints. Errors show neither the command nor
/// its output, because both can contain secrets. The command's standard error goes to the relay's
/// log, or to our standard error if no log is set up.
async fn of_command(command: &str, limit: Duration) -> Result<String> {
    let failed = |what: &str| {
        ReplicationError::new(
            ErrorKind::PasswordCommand,
            format!("password_command {what}"),
        )
    };
    let mut child = Command::new("/bin/sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(if tracing::dispatcher::has_been_set() {
            Stdio::piped()
        } else {
            Stdio::inherit()
        })
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(|e| failed("cannot be started with /bin/sh").caused_by(e))?;
    let group = child.id();
    let stderr = child.stderr.take();
    let first_line = tokio::time::timeout(limit, first_line(&mut child));
    let ended = match while_logging(stderr, first_line).await {
        Ok(Ok(Some(ended))) => ended,
        Ok(Ok(None)) => {
            end_group(group);
            return Err(failed("has printed a line of more than 64 KiB"));
        }
        Ok(Err(error)) => return Err(failed("cannot be read").caused_by(error)),
        Err(_) => {
            end_group(group);
            return Err(failed(&format!("has not ended after {limit:?}")));
        }
    };
    let (status, line) = ended;
    if !status.success() {
        return Err(failed(&format!("failed ({status})")));
    }
    let line = String::from_utf8(line);
    let line = line.map_err(|_| failed("has printed something that is not UTF-8"))?;
    let password = line.trim_end_matches(['\r', '\n']);
    if password.is_empty() {
        return Err(failed("has printed nothing, or an empty first line"));
    }
    if password.contains('\0') {
        return Err(failed("has printed a NUL character"));
    }
    Ok(password.to_owned())
}

/// Waits until the command has ended, and returns its exit status and the first line that it
/// printed. Does not wait for programs that the command leaves in the background, which may keep
/// the pipe open. Returns `None`, even before the command has ended, if the line reaches [`LINE_MAX`].
async fn first_line(child: &mut Child) -> std::io::Result<Option<(ExitStatus, Vec<u8>)>> {
    let mut line = Vec::new();
    let Some(stdout) = child.stdout.take() else {
        return Ok(Some((child.wait().await?, line)));
    };
    let mut lines = BufReader::new(stdout);
    let mut start = (&mut lines).take(LINE_MAX);
    start.read_until(b'\n', &mut line).await?;
    if line.len() as u64 == LINE_MAX {
        return Ok(None);
    }
    // Read the rest of the output, so that the command does not fail with a broken pipe.
    let mut nowhere = tokio::io::sink();
    let status = tokio::select! {
        status = child.wait() => status?,
        rest = tokio::io::copy(&mut lines, &mut nowhere) => {
            rest?;
            child.wait().await?
        }
    };
    Ok(Some((status, line)))
}

/// Kills the command's process group, so that no program that it started is left behind.
fn end_group(group: Option<u32>) {
    if let Some(group) = group {
        // An error means that the group has no process left, so ignore it.
        let _ = std::process::Command::new("/bin/sh")
            .args(["-c", &format!("kill -9 -{group}")])
            .stderr(Stdio::null())
            .status();
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let failed = |what: &str| {
        ReplicationError::new(
            ErrorKind::Authentication,
            format!("the password file {}: {what}", shown_path(path)),
        )
    };
    let cannot = |e: std::io::Error| failed("it cannot be read").caused_by(e);
    let mut file = File::open(path).map_err(cannot)?;
    if file.metadata().map_err(cannot)?.permissions().mode() & OTHERS != 0 {
        let path = shown_path(path);
        return Err(failed("other users may access it")
            .hint(format!("allow only the owner to read it: chmod 600 {path}")));
    }
    let mut text = Vec::new();
    file.read_to_end(&mut text).map_err(cannot)?;
    Ok(text)
}

/// Reads the password from `~/.pgpass`. Like libpq, ignores a file that cannot be used, because
/// many logins need no password. Logs a warning about the first such failure only.
fn of_default_file(path: &Path, target: &Target) -> Option<String> {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !path.exists() {
        return None;
    }
    match read(path) {
        Ok(text) => of_file(&text, target),
        Err(error) => {
            if !WARNED.swap(true, Ordering::Relaxed) {
                tracing::warn!(target: LOG_TARGET, hint = error.hint_text(), "ignored: {}", error.with_cause());
            }
            None
        }
    }
}

/// Returns the password in the first line that matches the target. Skips lines that are not UTF-8.
fn of_file(text: &[u8], target: &Target) -> Option<String> {
    text.split(|byte| *byte == b'\n')
        .filter_map(|line| std::str::from_utf8(line).ok())
        .find_map(|line| of_line(line.trim_end_matches('\r'), target))
}

/// Returns the password in a line `host:port:database:user:password` if the line matches the target.
fn of_line(line: &str, target: &Target) -> Option<String> {
    if line.starts_with('#') {
        return None;
    }
    let mut rest = line;
    let mut is = |wanted: &[&str]| {
        let field = field(&mut rest)?;
        (field == "*" || wanted.contains(&field.as_str())).then_some(())
    };
    let port = target.port.to_string();
    match &target.host {
        Host::Tcp(name) => is(&[name])?,
        Host::Unix(folder) => is(&["localhost", &folder.to_string_lossy()])?,
    }
    is(&[&port])?;
    is(&[&target.database])?;
    is(&[&target.user])?;
    // The password is the rest of the line, so a colon in it needs no backslash.
    Some(unescaped(rest))
}

/// Takes the next field and its colon off the front of `rest`. `None` if there is no colon.
fn field(rest: &mut &str) -> Option<String> {
    let mut is_escaped = false;
    let end = rest.find(|c| {
        let ends = c == ':' && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        ends
    })?;
    let field = unescaped(&rest[..end]);
    *rest = &rest[end + 1..];
    Some(field)
}

fn unescaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        out.push(match c {
            '\\' => chars.next().unwrap_or('\\'),
            c => c,
        });
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::Environment;

    fn target(url: &str) -> Target {
        Target::from_settings(url, &Environment::default())
            .unwrap()
            .unwrap()
    }

    #[test]
    fn the_line_for_the_database_is_found_with_wildcards_and_backslashes() {
        let shop = target("postgres://relay@db.example:5433/shop");
        for (line, expected) in [
            ("db.example:5433:shop:relay:s3cret", Some("s3cret")),
            ("*:*:*:relay:a:b\\:c\\\\d", Some("a:b:c\\d")),
            ("# db.example:5433:shop:relay:s3cret", None),
            ("db.example:5432:shop:relay:s3cret", None),
            ("other:*:*:*:s3cret", None),
            ("db.example:5433:shop", None),
            ("", None),
        ] {
            assert_eq!(of_line(line, &shop).as_deref(), expected, "{line}");
        }
    }

    #[test]
    fn a_unix_socket_matches_its_folder_or_localhost() {
        let local = target("postgres://a%3Ab@%2Frun%2Fpg/shop");
        for host in ["/run/pg", "localhost"] {
            let line = format!("{host}:5432:shop:a\\:b:s3cret");
            assert_eq!(of_line(&line, &local).as_deref(), Some("s3cret"));
        }
    }

    #[tokio::test]
    async fn a_command_gives_a_new_password_each_time_and_its_errors_show_no_secret() {
        let of = async |command: &str| {
            let mut target = target("postgres://relay@db.example/shop");
            target.password_command = Some(command.to_owned());
            password(&target).await
        };
        assert_eq!(
            of("echo a token; sleep 0.1; echo more")
                .await
                .unwrap()
                .as_deref(),
            Some("a token")
        );
        assert_ne!(of("date +%N").await.unwrap(), of("date +%N").await.unwrap());
        for (command, told) in [
            ("echo s3cret; exit 7", "failed (exit status: 7)"),
            ("true s3cret", "has printed nothing"),
            ("printf '\\ns3cret'", "an empty first line"),
            ("printf 's3cret\\0more'", "a NUL character"),
            ("yes s3cret | tr -d '\\n'", "more than 64 KiB"),
            ("printf 's3cret\\377'", "not UTF-8"),
        ] {
            let error = of(command).await.unwrap_err();
            assert_eq!(error.kind(), &ErrorKind::PasswordCommand);
            assert!(error.to_string().contains(told), "{error}");
            assert!(!format!("{error:?}").contains("s3cret"), "{error:?}");
        }
    }

    #[tokio::test]
    async fn a_password_command_may_leave_a_process_running_but_is_killed_if_it_hangs() {
        let began = std::time::Instant::now();
        let second = Duration::from_secs(1);
        let helped = of_command("sleep 30 & printf 's3cret\\r\\n'", second).await;
        assert_eq!(helped.unwrap(), "s3cret");
        // Other test suites may run the same test at the same time, so the command contains our process id.
        let hangs = format!("sleep 31.{}1", std::process::id());
        let error = of_command(&format!("{hangs}; echo late"), second).await;
        let error = error.unwrap_err().to_string();
        assert!(error.contains("has not ended after 1s"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(20));
        let arguments: Vec<u8> = hangs.replace(' ', "\0").into_bytes();
        let runs = |command: &[u8]| command.starts_with(&arguments);
        let is_left = || {
            let mut processes = std::fs::read_dir("/proc").unwrap().flatten();
            processes.any(|p| std::fs::read(p.path().join("cmdline")).is_ok_and(|c| runs(&c)))
        };
        // On a busy machine, a killed process may take a moment to end.
        while is_left() {
            assert!(began.elapsed() < Duration::from_secs(20));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    #[tokio::test]
    async fn a_default_file_that_cannot_be_used_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(".pgpass");
        let mut target = target("postgres://relay@db.example/shop");
        target.default_password_file = Some(file.clone());
        assert_eq!(password(&target).await.unwrap(), None);
        std::fs::write(&file, b"other:*:*:*:\xFF\n*:*:*:*:s3cret\n").unwrap();
        for (mode, found) in [(0o644, None), (0o600, Some("s3cret"))] {
            std::fs::set_permissions(&file, PermissionsExt::from_mode(mode)).unwrap();
            assert_eq!(password(&target).await.unwrap().as_deref(), found);
        }
    }

    #[tokio::test]
    async fn a_file_that_others_may_read_is_refused_without_showing_its_content() {
        let folder = std::env::temp_dir().join(format!("passfile-{}", std::process::id()));
        std::fs::write(&folder, "*:*:*:*:s3cret").unwrap();
        let with = async |mode| {
            std::fs::set_permissions(&folder, PermissionsExt::from_mode(mode)).unwrap();
            let mut target = target("postgres://relay@db.example/shop");
            target.password_file = Some(folder.clone());
            password(&target).await
        };
        let refused = with(0o644).await.unwrap_err();
        assert!(refused.hint_text().contains("chmod 600"));
        assert!(!format!("{refused:?}").contains("s3cret"));
        assert_eq!(with(0o600).await.unwrap().as_deref(), Some("s3cret"));
        std::fs::remove_file(&folder).unwrap();
    }
}

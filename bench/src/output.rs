//! Reads the output of `pg_recvlogical`, and notes the arrival time of each row.
//!
//! The reader recognises rows by their ids, which the output contains as text, and decodes nothing
//! else.

use std::collections::HashMap;
use std::io::Read;
use std::process::Stdio;
use std::sync::mpsc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::contestant;
use crate::latency::ID_PREFIX;
use crate::process::{self, Running};

/// The length of an id, in bytes.
const ID: usize = 36;

/// A running `pg_recvlogical`.
pub(crate) struct Output {
    _running: Running,
    rows: mpsc::Receiver<(String, i64)>,
}

impl Output {
    pub(crate) fn start(url: &str) -> Result<Self, String> {
        let mut command = contestant::recvlogical(url, "-")?;
        let mut running = process::start(command.stdout(Stdio::piped()))?;
        let stdout = running.0.stdout.take();
        let stdout = stdout.expect("invariant: the output is a pipe");
        let (sender, rows) = mpsc::channel();
        // The thread ends together with the program, so nothing has to wait for it.
        std::thread::spawn(move || read(stdout, &sender));
        Ok(Self {
            _running: running,
            rows,
        })
    }

    /// Waits for `rows` rows. Returns the arrival time of each row by id, in microseconds since
    /// 1970.
    pub(crate) async fn arrivals(
        &mut self,
        rows: u64,
        limit: Duration,
    ) -> Result<HashMap<String, i64>, String> {
        let began = Instant::now();
        let mut arrivals = HashMap::new();
        loop {
            arrivals.extend(self.rows.try_iter());
            if arrivals.len() as u64 >= rows {
                return Ok(arrivals);
            }
            if began.elapsed() > limit {
                return Err(format!("{} of {rows} rows arrived", arrivals.len()));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

fn read(mut stdout: impl Read, rows: &mpsc::Sender<(String, i64)>) {
    let mut found = Finder::default();
    let mut buffer = vec![0; 64 << 10];
    while let Ok(length @ 1..) = stdout.read(&mut buffer) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let at = now.map_or(0, |now| i64::try_from(now.as_micros()).unwrap_or(0));
        for id in found.ids(&buffer[..length]) {
            if rows.send((id, at)).is_err() {
                return;
            }
        }
    }
}

/// Finds ids in bytes that arrive in pieces.
#[derive(Debug, Default)]
struct Finder {
    /// The last bytes of the earlier pieces, which may be the first part of an id.
    rest: Vec<u8>,
}

impl Finder {
    /// Takes the next piece. Returns the ids that end in this piece.
    fn ids(&mut self, piece: &[u8]) -> Vec<String> {
        self.rest.extend_from_slice(piece);
        let mut ids = Vec::new();
        let mut at = 0;
        while let Some(window) = self.rest.get(at..at + ID) {
            if window.starts_with(ID_PREFIX.as_bytes()) {
                ids.push(String::from_utf8_lossy(window).into_owned());
                at += ID;
            } else {
                at += 1;
            }
        }
        self.rest.drain(..at);
        ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_found_once_however_the_bytes_are_cut() {
        let ids = [
            format!("{ID_PREFIX}000000000001"),
            format!("{ID_PREFIX}000000000002"),
        ];
        let bytes = format!("I..t....{}rest of the row\nC....\nI..{}t", ids[0], ids[1]);
        for size in 1..bytes.len() {
            let mut finder = Finder::default();
            let found: Vec<_> = bytes
                .as_bytes()
                .chunks(size)
                .flat_map(|piece| finder.ids(piece))
                .collect();
            assert_eq!(found, ids, "{size}");
        }
    }
}

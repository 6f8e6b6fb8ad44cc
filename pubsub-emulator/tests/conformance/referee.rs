//! Starts Google's emulator as a separate process.

use super::*;

/// Reports a skipped test. Writes to standard error directly, because the test harness shows
/// captured output only for a failed test.
fn skipped(reason: &str) {
    let _ = writeln!(
        io::stderr(),
        "SKIPPED: Google's own Pub/Sub emulator: {reason}"
    );
}

/// Google's emulator in a separate process, which is killed when this value is dropped.
pub(super) struct Referee {
    process: Child,
    pub(super) address: SocketAddr,
}

impl Referee {
    /// How long the Java process may take to start. The limit is generous, because the machine can be busy.
    const START_LIMIT: Duration = Duration::from_secs(60);

    pub(super) fn start() -> Option<Self> {
        let Some(jar) = Self::jar() else {
            skipped("there is no jar of it");
            return None;
        };
        let address = Self::free_address();
        let process = Command::new("java")
            .arg("-jar")
            .arg(&jar)
            .args(["--host=127.0.0.1", &format!("--port={}", address.port())])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let process = match process {
            Ok(process) => process,
            Err(error) => {
                skipped(&format!("cannot run java: {error}"));
                return None;
            }
        };
        let mut referee = Self { process, address };
        let give_up = Instant::now() + Self::START_LIMIT;
        while TcpStream::connect(address).is_err() {
            let ended = referee.process.try_wait().expect("a child");
            assert!(ended.is_none(), "Google's emulator has ended: {ended:?}");
            assert!(
                Instant::now() < give_up,
                "Google's emulator does not listen on {address}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        Some(referee)
    }

    /// Returns an address whose port is outside the range from which the operating system assigns
    /// ports. The Java process takes a while to open the port, and no other process must get it in
    /// the meantime.
    fn free_address() -> SocketAddr {
        let first = std::process::id() % 5_000;
        let ports = (0..5_000).map(|next| 15_000 + ((first + next) % 5_000) as u16);
        let mut addresses = ports.map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let is_free = |address: &SocketAddr| TcpListener::bind(address).is_ok();
        addresses.find(is_free).expect("a free port")
    }

    fn jar() -> Option<PathBuf> {
        let listed = Command::new("dpkg")
            .args(["--listfiles", "google-cloud-cli-pubsub-emulator"])
            .stderr(Stdio::null())
            .output()
            .ok()?;
        let files = String::from_utf8(listed.stdout).ok()?;
        files
            .lines()
            .find(|file| file.ends_with(".jar"))
            .map(PathBuf::from)
    }
}

impl Drop for Referee {
    fn drop(&mut self) {
        // Errors are expected only if the process has already ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

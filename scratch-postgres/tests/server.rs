//! Tests of scratch servers. Each test starts real servers.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use scratch_postgres::{Error, ScratchPostgres, StopMode};

const PATIENCE: Duration = Duration::from_secs(30);

/// Environment variable that marks the process which acts as the owner and gets killed.
const OWNER_ROLE: &str = "SCRATCH_POSTGRES_TEST_OWNER";

fn started() -> ScratchPostgres {
    ScratchPostgres::builder().start().expect("start")
}

/// Asks the server for TLS (`SSLRequest`). Any answer shows that PostgreSQL listens on the port.
fn answers(server: &ScratchPostgres) -> Option<u8> {
    let mut stream = TcpStream::connect((server.host(), server.port())).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    stream.write_all(&[0, 0, 0, 8, 4, 210, 22, 47]).ok()?;
    let mut answer = [0];
    stream.read_exact(&mut answer).ok()?;
    Some(answer[0])
}

fn comes_true(mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if condition() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}

#[test]
fn a_started_server_accepts_connections_over_tcp_and_socket() {
    let server = started();
    assert_eq!(answers(&server), Some(b'N'), "no TLS unless asked for");
    let socket = server
        .socket_dir()
        .join(format!(".s.PGSQL.{}", server.port()));
    assert!(socket.as_os_str().len() < 107);
    std::os::unix::net::UnixStream::connect(socket).expect("connect to the socket");
    assert!(server.major_version().expect("version") >= 14);
    assert!(
        server
            .url("postgres")
            .starts_with("postgres://postgres@127.0.0.1:")
    );
    assert!(server.socket_url("postgres").contains("%2Fscratch-pg-"));
}

#[test]
fn two_servers_live_side_by_side() {
    let (one, two) = (started(), started());
    assert_ne!(one.port(), two.port());
    assert_ne!(system_identifier(&one), system_identifier(&two));
    assert!(answers(&one).is_some() && answers(&two).is_some());
}

#[test]
fn a_dropped_server_leaves_neither_folder_nor_listener() {
    let server = started();
    let (root, port) = (server.socket_dir().to_owned(), server.port());
    drop(server);
    assert!(!root.exists());
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
}

#[test]
fn a_restart_keeps_port_and_data() {
    let mut server = started();
    let (port, pid) = (server.port(), server.pid());
    let identifier = system_identifier(&server);
    server.restart(StopMode::Fast).expect("restart");
    assert_eq!(server.port(), port);
    assert_ne!(server.pid(), pid);
    assert_eq!(system_identifier(&server), identifier);
    assert!(answers(&server).is_some());
}

/// The first field of `pg_control`, which differs for each run of initdb.
fn system_identifier(server: &ScratchPostgres) -> Vec<u8> {
    let control = std::fs::read(server.data_dir().join("global/pg_control")).expect("control");
    control[..8].to_vec()
}

#[test]
fn after_kill_9_the_next_start_recovers() {
    let mut server = started();
    server.kill_9().expect("kill");
    assert!(answers(&server).is_none());
    assert!(matches!(server.reload(), Err(Error::NotRunning)));
    server.start_again().expect("start again");
    assert!(answers(&server).is_some());
    let log = server.log().expect("log");
    assert!(log.contains("automatic recovery in progress"), "{log}");
}

#[test]
fn a_smart_stop_delayed_by_a_client_is_reported_and_can_be_followed_by_a_fast_one() {
    let mut server = started();
    let _client = raw_session(&server);
    let error = server
        .stop(StopMode::Smart, Duration::from_millis(300))
        .expect_err("delayed");
    assert!(
        matches!(
            error,
            Error::StillRunning {
                mode: StopMode::Smart,
                ..
            }
        ),
        "{error}"
    );
    server.stop(StopMode::Fast, PATIENCE).expect("fast stop");
    assert!(matches!(
        server.stop(StopMode::Fast, PATIENCE),
        Err(Error::NotRunning)
    ));
}

/// Opens a session and waits for the answer to its start-up message. Such a session is enough to
/// delay a smart shutdown.
fn raw_session(server: &ScratchPostgres) -> TcpStream {
    let mut stream = TcpStream::connect((server.host(), server.port())).expect("connect");
    let body = b"\0\x03\0\0user\0postgres\0database\0postgres\0\0";
    let length = u32::try_from(body.len() + 4).expect("short").to_be_bytes();
    stream
        .write_all(&[&length[..], body].concat())
        .expect("write");
    let mut answer = [0];
    stream.read_exact(&mut answer).expect("read");
    assert_eq!(answer, [b'R'], "authentication is trusted");
    stream
}

#[test]
fn a_wrong_setting_is_reported_with_the_end_of_the_log() {
    let error = ScratchPostgres::builder()
        .setting("wal_level", "nonsense")
        .start()
        .expect_err("must not start");
    assert!(matches!(error, Error::DidNotStart { .. }));
    assert!(error.to_string().contains("wal_level"), "{error}");
}

#[test]
fn a_setting_written_later_takes_effect_after_a_reload() {
    let server = started();
    server.set("log_connections", "on").expect("set");
    server.reload().expect("reload");
    assert!(comes_true(|| {
        answers(&server);
        drop(raw_session(&server));
        server.log().expect("log").contains("connection authorized")
    }));
}

#[test]
fn a_copy_needs_a_stopped_server_and_keeps_its_identity() {
    let mut original = started();
    let error = ScratchPostgres::builder()
        .copy_of(&original)
        .start()
        .expect_err("running");
    assert!(matches!(error, Error::Running), "{error}");
    original.stop(StopMode::Fast, PATIENCE).expect("stop");
    let copy = ScratchPostgres::builder()
        .copy_of(&original)
        .start()
        .expect("copy");
    assert_eq!(system_identifier(&copy), system_identifier(&original));
    original.start_again().expect("both run at once");
}

#[test]
fn a_standby_follows_its_primary() {
    let mut primary = started();
    primary.stop(StopMode::Fast, PATIENCE).expect("stop");
    let standby = ScratchPostgres::builder()
        .standby_of(&primary)
        .start()
        .expect("standby");
    primary.start_again().expect("primary");
    assert!(comes_true(|| standby
        .log()
        .expect("log")
        .contains("started streaming WAL")));
    assert!(answers(&standby).is_some());
}

/// Not a test by itself: the next test starts this function as the owner process and kills it.
#[test]
fn owner_process_for_the_watchdog_test() {
    if std::env::var_os(OWNER_ROLE).is_none() {
        return;
    }
    let server = started();
    println!(
        "owned {} {}",
        server.pid().expect("runs"),
        server.socket_dir().display()
    );
    loop {
        std::thread::park();
    }
}

#[test]
fn the_server_of_a_killed_owner_is_stopped_and_its_folder_removed() {
    let mut owner = Command::new(std::env::current_exe().expect("own path"))
        .args([
            "--exact",
            "owner_process_for_the_watchdog_test",
            "--nocapture",
        ])
        .env(OWNER_ROLE, "1")
        .stdout(Stdio::piped())
        .spawn()
        .expect("spawn");
    let (pid, folder) = owned_server(owner.stdout.take().expect("piped"));
    assert!(folder.exists());
    owner.kill().expect("SIGKILL");
    owner.wait().expect("wait");
    assert!(comes_true(|| !folder.exists() && !runs(pid)));
}

fn owned_server(output: impl Read) -> (u32, PathBuf) {
    for line in BufReader::new(output).lines() {
        let line = line.expect("line");
        if let Some((_, rest)) = line.split_once("owned ") {
            let (pid, folder) = rest.split_once(' ').expect("two fields");
            return (pid.parse().expect("pid"), PathBuf::from(folder));
        }
    }
    panic!("the owner ended without starting a server");
}

/// Whether a process runs. A zombie does not count, because it has ended and only waits to be
/// reaped.
fn runs(pid: u32) -> bool {
    let proc = Path::new("/proc").join(pid.to_string());
    if Path::new("/proc/self").exists() {
        let stat = std::fs::read_to_string(proc.join("stat")).unwrap_or_default();
        return !stat.is_empty() && !stat.contains(") Z ");
    }
    let probe = Command::new("sh")
        .args(["-c", &format!("kill -0 {pid}")])
        .status();
    probe.expect("sh").success()
}

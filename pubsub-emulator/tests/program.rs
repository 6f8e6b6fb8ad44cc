//! Tests of the program `pubsub-emulator`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};

use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::GetTopicRequest;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::publisher_client::PublisherClient;
use tonic::transport::Endpoint;

const TOPIC: &str = "projects/p/topics/orders";

/// A running emulator process. It is killed when this value is dropped.
struct Program {
    child: Child,
    host: String,
}

impl Program {
    fn start(arguments: &[&str]) -> Self {
        let mut child = emulator(&[&["--listen", "127.0.0.1:0"], arguments].concat())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        let host = line
            .trim_end()
            .strip_prefix("Pub/Sub emulator: export PUBSUB_EMULATOR_HOST=")
            .unwrap_or_else(|| panic!("no address in {line:?}"))
            .to_owned();
        Self { child, host }
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id();
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("kill -s {name} {pid}")]);
        assert!(shell.status().unwrap().success());
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn emulator(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pubsub-emulator"));
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs the program with arguments that it must refuse. Returns its standard error.
fn refused(arguments: &[&str]) -> String {
    let Output { status, stderr, .. } = emulator(arguments).output().unwrap();
    assert_eq!(status.code(), Some(2));
    String::from_utf8(stderr).unwrap()
}

#[tokio::test]
async fn it_prints_the_address_where_clients_find_the_topics() {
    let program = Program::start(&["--topic", TOPIC]);
    let endpoint = Endpoint::new(format!("http://{}", program.host)).unwrap();
    let mut client = PublisherClient::new(endpoint.connect().await.unwrap());
    let request = GetTopicRequest {
        topic: TOPIC.into(),
    };
    let topic = client.get_topic(request).await.unwrap().into_inner();
    assert_eq!(topic.name, TOPIC);
}

#[test]
fn sigterm_and_sigint_end_it_with_success() {
    for signal in ["TERM", "INT"] {
        let mut program = Program::start(&[]);
        program.signal(signal);
        let status = program.child.wait().unwrap();
        let mut error = String::new();
        let stderr = program.child.stderr.as_mut().unwrap();
        stderr.read_to_string(&mut error).unwrap();
        assert!(status.success() && error.is_empty(), "{status}: {error}");
    }
}

#[test]
fn a_port_in_use_and_a_malformed_topic_are_refused_with_a_remedy() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let error = refused(&["--listen", &address]);
    let expected = format!("error: cannot listen on {address}: it is in use; stop the process");
    assert!(error.starts_with(&expected), "{error}");
    let error = refused(&["--listen", "127.0.0.1:0", "--topic", "orders"]);
    assert!(
        error.starts_with("error: cannot create topic orders: "),
        "{error}"
    );
    assert!(
        error.contains("write topics as projects/PROJECT/topics/TOPIC"),
        "{error}"
    );
}

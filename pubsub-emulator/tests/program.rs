//! Tests of the program `pubsub-emulator`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::publisher_client::PublisherClient;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::{
    GetTopicRequest, PublishRequest, PubsubMessage,
};
use tonic::transport::Endpoint;

const TOPIC: &str = "projects/p/topics/orders";

/// A running emulator process. Dropping this value kills the process.
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

/// Sends a request as curl does, and returns the JSON of the answer.
fn over_http(host: &str, method: &str, path: &str, body: &str) -> serde_json::Value {
    let mut stream = TcpStream::connect(host).unwrap();
    let length = body.len();
    let request = format!(
        "{method} /v1/projects/p/{path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\
         content-length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let Some((_, json)) = answer.split_once("\r\n\r\n") else {
        panic!("no body: {answer:?}");
    };
    serde_json::from_str(json).unwrap_or_else(|e| panic!("{e}: {answer}"))
}

#[tokio::test]
async fn a_message_can_be_pulled_and_acknowledged_over_http() {
    let program = Program::start(&["--topic", TOPIC]);
    let call = |path: &str, body: &str| over_http(&program.host, "POST", path, body);
    let wanted = format!(r#"{{"topic": "{TOPIC}", "enableMessageOrdering": true}}"#);
    over_http(&program.host, "PUT", "subscriptions/billing", &wanted);
    let endpoint = Endpoint::new(format!("http://{}", program.host)).unwrap();
    let mut client = PublisherClient::new(endpoint.connect().await.unwrap());
    let message = PubsubMessage {
        data: b"one".to_vec().into(),
        ordering_key: "k".into(),
        attributes: [("a".to_owned(), "b".to_owned())].into(),
        ..Default::default()
    };
    let request = PublishRequest {
        topic: TOPIC.into(),
        messages: vec![message],
    };
    client.publish(request).await.unwrap();

    let pulled = call("subscriptions/billing:pull", r#"{"maxMessages": 10}"#);
    let received = &pulled["receivedMessages"][0];
    assert_eq!(received["message"]["data"], "b25l", "{pulled}");
    assert_eq!(received["message"]["orderingKey"], "k");
    assert_eq!(received["message"]["attributes"]["a"], "b");
    let ids = serde_json::json!({ "ackIds": [received["ackId"]] }).to_string();
    assert_eq!(
        call("subscriptions/billing:acknowledge", &ids),
        serde_json::json!({})
    );
    let more = r#"{"maxMessages": 10, "returnImmediately": true}"#;
    let pulled = call("subscriptions/billing:pull", more);
    assert_eq!(pulled["receivedMessages"], serde_json::json!([]));

    let refused = call("subscriptions/billing:pull", "{}");
    assert_eq!(refused["error"]["status"], "INVALID_ARGUMENT");
    let refused = call("subscriptions/billing:seek", "{}");
    assert_eq!(refused["error"]["status"], "UNIMPLEMENTED");
}

/// Measures the fastest of several starts, because other tests can keep the machine busy.
#[test]
fn it_answers_within_20_ms_of_its_start() {
    let start = || {
        let began = Instant::now();
        let program = Program::start(&[]);
        let listed = over_http(&program.host, "GET", "topics", "");
        assert_eq!(listed["topics"], serde_json::json!([]));
        began.elapsed()
    };
    let fastest = (0..20).map(|_| start()).min().unwrap();
    assert!(fastest < Duration::from_millis(20), "{fastest:?}");
}

//! Tests the connection against a server from the `h2` crate, and against a server that is silent.

use std::time::Instant;

use h2::{RecvStream, server};
use prost::Message;
use tokio::io::DuplexStream;
use tokio::task::JoinHandle;
use tonic::codegen::http::{HeaderName, Response};

use super::super::{METHOD, MessageIds};
use super::*;

/// An answer with one message id, `7`.
const ANSWER: &[u8] = b"\0\0\0\0\x03\x0a\x017";

/// Creates a connection that pings after 100 ms and waits 200 ms for the answer. Also returns its
/// other end.
async fn connected() -> (PublishConnection, DuplexStream) {
    let (ours, theirs) = tokio::io::duplex(64 << 10);
    let origin = Uri::from_static("http://pubsub.test:80");
    let (after, timeout) = (Duration::from_millis(100), Duration::from_millis(200));
    let connection = PublishConnection::start_with(ours, origin, after, timeout).await;
    (connection.unwrap(), theirs)
}

async fn publish(connection: PublishConnection) -> Result<MessageIds, Status> {
    publish_one(connection, Bytes::from_static(b"message")).await
}

/// Makes a test fail instead of hanging.
async fn in_time<T>(what: impl Future<Output = T>) -> T {
    let limit = Duration::from_secs(20);
    tokio::time::timeout(limit, what).await.expect("it hangs")
}

/// Waits until the connection accepts no new requests.
async fn closed(connection: &mut PublishConnection) {
    in_time(async {
        while connection.is_open().await {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

async fn publish_one(connection: PublishConnection, message: Bytes) -> Result<MessageIds, Status> {
    let body = RequestBody::publish("projects/p/topics/t", [message].iter());
    let answer = connection.unary(METHOD, HeaderMap::new(), body);
    Ok(MessageIds::decode(in_time(answer).await?).unwrap())
}

/// Keeps the server running until its connection ends. The server sends nothing on its own.
fn go_on(mut server: server::Connection<DuplexStream, Bytes>) -> JoinHandle<()> {
    tokio::spawn(async move { while server.accept().await.is_some() {} })
}

/// Sends a request, and returns it together with the handle with which the server can answer it.
async fn asked() -> (
    JoinHandle<Result<MessageIds, Status>>,
    server::SendResponse<Bytes>,
) {
    let (connection, theirs) = connected().await;
    let publishing = tokio::spawn(publish(connection));
    let mut server = server::handshake(theirs).await.unwrap();
    let (_, answer) = server.accept().await.unwrap().unwrap();
    go_on(server);
    (publishing, answer)
}

fn header(name: &str, value: &'static str) -> (HeaderName, HeaderValue) {
    (name.parse().unwrap(), HeaderValue::from_static(value))
}

fn respond(mut to: server::SendResponse<Bytes>) {
    finish(to.send_response(Response::new(()), false).unwrap());
}

/// Sends the data and the trailers of a successful answer.
fn finish(mut body: SendStream<Bytes>) {
    body.send_data(ANSWER.into(), false).unwrap();
    let status = header("grpc-status", "0");
    body.send_trailers(HeaderMap::from_iter([status])).unwrap();
}

/// Reads a whole request.
async fn read(request: Request<RecvStream>) -> Vec<u8> {
    let mut body = request.into_body();
    let mut bytes = Vec::new();
    while let Some(data) = body.data().await {
        let data = data.unwrap();
        bytes.extend_from_slice(&data);
        body.flow_control().release_capacity(data.len()).unwrap();
    }
    bytes
}

#[tokio::test]
async fn a_message_and_the_end_of_its_stream_are_one_frame() {
    let (connection, theirs) = connected().await;
    let publishing = tokio::spawn(publish(connection));
    let mut server = server::handshake(theirs).await.unwrap();
    let (request, answer) = server.accept().await.unwrap().unwrap();
    let url = request.uri().to_string();
    assert_eq!(url, format!("http://pubsub.test:80{METHOD}"));
    let headers = request.headers();
    assert_eq!(headers["user-agent"], USER_AGENT);
    assert_eq!(headers["content-type"], "application/grpc");
    assert_eq!(headers["te"], "trailers");
    go_on(server);
    let mut body = request.into_body();
    let data = body.data().await.unwrap().unwrap();
    assert!(data.ends_with(b"message"));
    assert!(body.is_end_stream(), "another frame is to come");
    respond(answer);
    let ids = publishing.await.unwrap().unwrap();
    assert_eq!((ids.len(), ids.get(0)), (1, Some("7")));
}

#[tokio::test]
async fn a_closing_server_answers_its_requests_and_gets_no_new_ones() {
    let (mut connection, theirs) = connected().await;
    assert!(connection.is_open().await);
    let publishing = tokio::spawn(publish(connection.clone()));
    let mut server = server::handshake(theirs).await.unwrap();
    let (_, answer) = server.accept().await.unwrap().unwrap();
    server.graceful_shutdown();
    let serving = go_on(server);
    closed(&mut connection).await;
    respond(answer);
    assert_eq!(publishing.await.unwrap().unwrap().len(), 1);
    serving.await.unwrap();
    assert!(publish(connection).await.is_err());
}

/// Answers a request with these error details, in the trailers or in the headers. Returns the resulting
/// status.
async fn refused(details: &'static str, in_trailers: bool) -> Status {
    let (publishing, mut answer) = asked().await;
    let status = [
        header("grpc-status", "3"),
        header("grpc-status-details-bin", details),
    ];
    let mut head = Response::new(());
    if in_trailers {
        let mut body = answer.send_response(head, false).unwrap();
        body.send_trailers(HeaderMap::from_iter(status)).unwrap();
    } else {
        head.headers_mut().extend(status);
        answer.send_response(head, true).unwrap();
    }
    publishing.await.unwrap().unwrap_err()
}

#[tokio::test]
async fn error_details_that_are_not_base64_are_ignored() {
    for in_trailers in [true, false] {
        for (details, read) in [("AAE=", &[0, 1][..]), ("AAE", &[0, 1]), ("AAE=,AA==", &[])] {
            let status = refused(details, in_trailers).await;
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            assert_eq!(status.details(), read, "{details} {in_trailers}");
        }
    }
}

/// Returns the status that results from an answer with this HTTP code and without a gRPC status.
/// With `has_data`, the answer contains [`ANSWER`].
async fn without_status(http: StatusCode, has_data: bool) -> Status {
    let (publishing, mut answer) = asked().await;
    let mut head = Response::new(());
    *head.status_mut() = http;
    let mut body = answer.send_response(head, !has_data).unwrap();
    if has_data {
        body.send_data(ANSWER.into(), true).unwrap();
    }
    publishing.await.unwrap().unwrap_err()
}

#[tokio::test]
async fn an_answer_without_a_status_is_an_error_even_with_data() {
    for has_data in [true, false] {
        for (http, code) in [
            (StatusCode::OK, tonic::Code::Unknown),
            (StatusCode::BAD_GATEWAY, tonic::Code::Unavailable),
            (StatusCode::FORBIDDEN, tonic::Code::PermissionDenied),
        ] {
            let status = without_status(http, has_data).await;
            assert_eq!(status.code(), code, "{http} {has_data}");
        }
    }
}

#[tokio::test]
async fn success_without_a_message_is_an_error() {
    let (publishing, mut answer) = asked().await;
    let mut head = Response::new(());
    head.headers_mut().extend([header("grpc-status", "0")]);
    answer.send_response(head, true).unwrap();
    assert!(publishing.await.unwrap().is_err());
}

#[tokio::test]
async fn a_request_that_the_server_resets_has_an_unknown_outcome() {
    let (publishing, mut answer) = asked().await;
    answer.send_reset(h2::Reason::REFUSED_STREAM);
    let status = publishing.await.unwrap().unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unavailable);
}

#[tokio::test]
async fn a_request_on_a_dead_connection_fails() {
    let (mut connection, _theirs) = connected().await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert!(
        connection.is_open().await,
        "without requests, it is not pinged"
    );
    let started = Instant::now();
    assert!(publish(connection.clone()).await.is_err());
    assert!(started.elapsed() >= Duration::from_millis(200));
    assert!(!connection.is_open().await);
}

#[tokio::test]
async fn a_slow_answer_is_awaited_while_pings_are_answered() {
    let (connection, theirs) = connected().await;
    let publishing = tokio::spawn(publish(connection));
    let mut server = server::handshake(theirs).await.unwrap();
    let (_, answer) = server.accept().await.unwrap().unwrap();
    go_on(server);
    tokio::time::sleep(Duration::from_secs(1)).await;
    respond(answer);
    assert_eq!(publishing.await.unwrap().unwrap().len(), 1);
}

#[tokio::test]
async fn abandoned_requests_do_not_keep_a_dead_connection_open() {
    let (mut connection, _theirs) = connected().await;
    in_time(async {
        while connection.is_open().await {
            let given_up = publish(connection.clone());
            let _ = tokio::time::timeout(Duration::from_millis(20), given_up).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_connection_that_did_not_answer_its_last_request_is_found_dead() {
    let (mut connection, _theirs) = connected().await;
    let given_up = publish(connection.clone());
    let _ = tokio::time::timeout(Duration::from_millis(1), given_up).await;
    closed(&mut connection).await;
}

#[tokio::test]
async fn a_request_waits_until_the_server_has_room_for_it() {
    let (connection, theirs) = connected().await;
    let message = Bytes::from(vec![7; 1 << 20]);
    let publishing: Vec<_> = (0..3)
        .map(|_| tokio::spawn(publish_one(connection.clone(), message.clone())))
        .collect();
    let mut server = server::Builder::new();
    server.max_concurrent_streams(1);
    let mut server = server.handshake(theirs).await.unwrap();
    let serving = tokio::spawn(async move {
        while let Some(request) = server.accept().await {
            let (request, answer) = request.unwrap();
            tokio::spawn(async move {
                assert!(read(request).await.len() > 1 << 20);
                respond(answer);
            });
        }
    });
    for publishing in publishing {
        assert_eq!(publishing.await.unwrap().unwrap().len(), 1);
    }
    drop(connection);
    serving.await.unwrap();
}

#[tokio::test]
async fn messages_of_all_sizes_arrive_unchanged_through_small_windows() {
    let (connection, theirs) = connected().await;
    let lengths = [10, 5_000, 20, 1 << 20, 4_095, 4_096, 17_000, 0, 30];
    let messages: Vec<Bytes> = lengths.map(|len| vec![len as u8; len].into()).into();
    let body = RequestBody::publish("projects/p/topics/t", messages.iter());
    let publishing =
        tokio::spawn(async move { connection.unary(METHOD, HeaderMap::new(), body).await });
    let mut server = server::Builder::new();
    server
        .initial_window_size(10_000)
        .initial_connection_window_size(70_000);
    let mut server = server.handshake::<_, Bytes>(theirs).await.unwrap();
    let (request, answer) = server.accept().await.unwrap().unwrap();
    go_on(server);
    let bytes = in_time(read(request)).await;
    respond(answer);
    publishing.await.unwrap().unwrap();
    let mut whole = RequestBody::publish("projects/p/topics/t", messages.iter());
    assert!(bytes == whole.copy_to_bytes(whole.remaining()));
}

#[tokio::test]
async fn an_answer_that_ends_before_the_whole_request_is_sent_is_read() {
    let (connection, theirs) = connected().await;
    let message = Bytes::from(vec![7; 1 << 20]);
    let publishing = tokio::spawn(publish_one(connection, message));
    let mut server = server::handshake(theirs).await.unwrap();
    // Keep the request without reading it, so that the flow-control window stays full.
    let (_request, answer) = server.accept().await.unwrap().unwrap();
    go_on(server);
    respond(answer);
    assert_eq!(publishing.await.unwrap().unwrap().len(), 1);
}

#[tokio::test]
async fn an_answer_may_begin_before_the_whole_request_is_sent() {
    let (connection, theirs) = connected().await;
    let message = Bytes::from(vec![7; 1 << 20]);
    let publishing = tokio::spawn(publish_one(connection, message));
    let mut server = server::handshake(theirs).await.unwrap();
    let (request, mut answer) = server.accept().await.unwrap().unwrap();
    go_on(server);
    let body = answer.send_response(Response::new(()), false).unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(in_time(read(request)).await.len() > 1 << 20);
    finish(body);
    assert_eq!(publishing.await.unwrap().unwrap().len(), 1);
}

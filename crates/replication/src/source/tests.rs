//! Tests what a session reports, how the caller learns why the session ended, and that no server
//! can skip the login.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use decoder::Lsn;
use fault_proxy::{Cut, FaultProxy};
use scratch_postgres::ScratchPostgres;
use tokio_postgres::{Client, NoTls};

use super::buffers::READ_BUFFER;
use super::session::room;
use super::{CHUNKS, Source, StreamOptions};
use crate::connection::Target;
use crate::environment::Environment;
use crate::error::ErrorKind;
use crate::watermark::Confirmable;

fn target(url: &str) -> Target {
    let target = Target::from_settings(url, &Environment::new()).unwrap();
    target.unwrap()
}

fn options(target: Target) -> StreamOptions {
    StreamOptions {
        target,
        slot: "s".into(),
        publication: "p".into(),
        application_name: "test".into(),
        wal_sender_timeout: Duration::from_secs(30),
        confirmed: Confirmable::by_slot("0/1".parse().unwrap()),
    }
}

async fn sql(server: &ScratchPostgres) -> Client {
    let url = server.socket_url("postgres");
    let (client, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

#[tokio::test]
async fn a_large_frame_waits_until_the_channel_to_the_relay_is_empty() {
    let (sender, mut relay) = tokio::sync::mpsc::channel(CHUNKS);
    let in_time = |chunk| tokio::time::timeout(Duration::from_millis(20), room(&sender, chunk));
    let small = in_time(READ_BUFFER).await.unwrap().unwrap();
    small.send(bytes::Bytes::new());
    assert!(
        in_time(READ_BUFFER).await.is_ok(),
        "three more small ones fit"
    );
    assert!(in_time(READ_BUFFER + 1).await.is_err());
    relay.recv().await.unwrap();
    assert!(in_time(READ_BUFFER + 1).await.unwrap().is_some());
    relay.close();
    assert!(in_time(READ_BUFFER + 1).await.unwrap().is_none());
}

/// Opens a session and fills its channel, so that the session stops reading. A test can then call
/// [`LeaseProof::give_up`](super::LeaseProof::give_up) before the session has read why the server released the
/// slot. Also returns an SQL session on the same server.
async fn held_back(server: &ScratchPostgres, url: &str) -> (Source, Client) {
    let sql = sql(server).await;
    for statement in [
        "CREATE TABLE public.t (a int)",
        "CREATE PUBLICATION p FOR TABLE public.t",
        "SELECT pg_create_logical_replication_slot('s', 'pgoutput')",
    ] {
        sql.batch_execute(statement).await.unwrap();
    }
    let opened = Source::open(options(target(url)), || {}).await;
    let source = opened.unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut held_back = 0;
    while held_back < 5 {
        sql.batch_execute("INSERT INTO public.t VALUES (1)")
            .await
            .unwrap();
        tokio::time::sleep(Duration::from_millis(5)).await;
        held_back += u32::from(source.chunks.len() == CHUNKS);
        assert!(Instant::now() < deadline);
    }
    (source, sql)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_reason_for_the_end_is_found_behind_data_that_was_not_read_yet() {
    let server = ScratchPostgres::builder().start().unwrap();
    let (mut source, sql) = held_back(&server, &server.socket_url("postgres")).await;
    let (proof, walsender) = source.lease_proof();
    let ended = "SELECT pg_terminate_backend($1)";
    sql.query_one(ended, &[&walsender]).await.unwrap();
    proof.give_up();
    assert!(source.lease_is_over());
    let why = source.why_lease_is_over().await;
    let sqlstate = "57P01".to_owned();
    assert_eq!(why.kind(), &ErrorKind::StreamEnded { sqlstate }, "{why}");
    assert!(why.to_string().contains("administrator command"), "{why}");
}

/// An idle session checks its state only four times a second, but a new position wakes it up at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_confirmed_position_is_reported_at_once() {
    let server = ScratchPostgres::builder().start().unwrap();
    let url = server.socket_url("postgres");
    let slot = "SELECT pg_create_logical_replication_slot('s', 'pgoutput')";
    sql(&server).await.batch_execute(slot).await.unwrap();
    let last_status = Arc::new(Mutex::new(Instant::now()));
    let noted = last_status.clone();
    let on_status = move || *noted.lock().unwrap() = Instant::now();
    let opened = Source::open(options(target(&url)), on_status).await;
    let source = opened.unwrap();
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    let mut waits = Vec::new();
    for lsn in 2..10 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let began = Instant::now();
        source.confirm(Confirmable::by_slot(Lsn::new(lsn)));
        while *last_status.lock().unwrap() < began {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        waits.push(began.elapsed());
    }
    // Only the median has to be short, because a busy machine delays some of the reports.
    waits.sort_unstable();
    assert!(
        waits[waits.len() / 2] < Duration::from_millis(60),
        "{waits:?}"
    );
    source.close().await;
}

/// The proxy closes the connection without an error message, like a walsender that has not heard from us
/// for too long.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_was_released_without_a_reason_counts_as_lost_to_another_relay() {
    let server = ScratchPostgres::builder().start().unwrap();
    let at = SocketAddr::from(([127, 0, 0, 1], server.port()));
    let proxy = FaultProxy::start(at).await.unwrap();
    let url = format!("postgres://postgres@{}/postgres", proxy.addr());
    let (mut source, _sql) = held_back(&server, &url).await;
    proxy.cut(Cut::Finish);
    source.lease_proof().0.give_up();
    let why = source.why_lease_is_over().await;
    assert_eq!(why.kind(), &ErrorKind::LeaseLost, "{why}");
}

/// Starts a server without TLS that ignores the content of the messages, and answers each message with the next
/// element of `answers`. Returns the server's URL.
fn impostor(answers: &'static [&'static [u8]]) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        for (n, answer) in answers.iter().enumerate() {
            // The first message has no tag before its length field.
            let mut head = [0; 5];
            stream.read_exact(&mut head[usize::from(n == 0)..]).unwrap();
            let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
            stream
                .read_exact(&mut vec![0; length as usize - 4])
                .unwrap();
            stream.write_all(answer).unwrap();
        }
        // Keep the connection open until the other side closes it.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    format!("postgres://relay:secret@127.0.0.1:{port}/postgres?sslmode=disable")
}

#[tokio::test(flavor = "multi_thread")]
async fn no_server_can_skip_the_login() {
    const READY: &[u8] = b"Z\0\0\0\x05I";
    const SCRAM: &[u8] = b"R\0\0\0\x17\0\0\0\x0aSCRAM-SHA-256\0\0";
    const ACCEPTED: &[u8] = b"R\0\0\0\x08\0\0\0\0";
    let cases: [(&[&[u8]], ErrorKind); 4] = [
        (&[READY], ErrorKind::Protocol),
        (&[SCRAM, READY], ErrorKind::Protocol),
        (&[SCRAM, SCRAM], ErrorKind::Protocol),
        (&[SCRAM, ACCEPTED], ErrorKind::Authentication),
    ];
    for (answers, code) in cases {
        let options = options(target(&impostor(answers)));
        let opened = Source::open(options, || {}).await;
        assert_eq!(opened.unwrap_err().kind(), &code, "{answers:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_cannot_fork_counts_as_unreachable() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 8]).unwrap();
        stream
            .write_all(b"Ecould not fork new process for connection\n\0")
            .unwrap();
    });
    let url = format!("postgres://postgres@127.0.0.1:{port}/postgres?sslmode=require");
    let opened = Source::open(options(target(&url)), || {}).await;
    assert_eq!(opened.unwrap_err().kind(), &ErrorKind::Unreachable);
}

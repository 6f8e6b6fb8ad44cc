//! What a session reports, and what the relay learns about its end.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use decoder::Lsn;
use fault_proxy::{Cut, FaultProxy};
use scratch_postgres::ScratchPostgres;

use super::super::buffers::READ_BUFFER;
use super::super::session::room;
use super::super::{CHUNKS, Source};
use super::{options, target};
use crate::error::Code;
use crate::metrics::LastTime;
use crate::postgres::{Sql, connect};
use crate::watermark::Confirmable;

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

/// A session that is held back, so that it reads the reason for its end only after the slot was
/// found free; and an SQL session to the same server.
async fn held_back(server: &ScratchPostgres, url: &str) -> (Source, Sql) {
    let beside = target(&server.socket_url("postgres"));
    let sql = connect(&beside, "test", Duration::from_secs(10)).await;
    let sql = sql.unwrap();
    for statement in [
        "CREATE TABLE public.t (a int)",
        "CREATE PUBLICATION p FOR TABLE public.t",
        "SELECT pg_create_logical_replication_slot('s', 'pgoutput')",
    ] {
        sql.batch_execute(statement).await.unwrap();
    }
    let opened = Source::open(options(target(url)), LastTime::default()).await;
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
    assert_eq!(why.code(), Code::PostgresConnectionLost, "{why}");
    assert!(why.to_string().contains("administrator command"), "{why}");
}

/// Also in an idle session, which checks its lease only four times a second.
#[tokio::test(flavor = "multi_thread")]
async fn a_confirmed_position_is_reported_at_once() {
    let server = ScratchPostgres::builder().start().unwrap();
    let url = server.socket_url("postgres");
    let sql = connect(&target(&url), "test", Duration::from_secs(10)).await;
    let slot = "SELECT pg_create_logical_replication_slot('s', 'pgoutput')";
    sql.unwrap().batch_execute(slot).await.unwrap();
    let last_status = LastTime::default();
    let opened = Source::open(options(target(&url)), last_status.clone()).await;
    let source = opened.unwrap();
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    let mut waits = Vec::new();
    for lsn in 2..10 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let began = Instant::now();
        source.confirm(Confirmable::by_slot(Lsn::new(lsn)));
        while last_status.age().is_none_or(|age| age > began.elapsed()) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        waits.push(began.elapsed());
    }
    // Most of them: a busy machine delays some.
    waits.sort_unstable();
    assert!(
        waits[waits.len() / 2] < Duration::from_millis(60),
        "{waits:?}"
    );
    source.close().await;
}

/// This is how a walsender ends that has not heard from us for too long.
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
    assert_eq!(why.code(), Code::LeaseLost, "{why}");
}

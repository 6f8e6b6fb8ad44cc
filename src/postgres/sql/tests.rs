//! Tests the time limit for answers with a real PostgreSQL and the real client.

use std::sync::LazyLock;
use std::time::Instant;

use bytes::Bytes;
use fault_proxy::{FaultProxy, Flow, Target as ProxyTarget};
use futures_util::SinkExt;
use scratch_postgres::ScratchPostgres;
use tokio_postgres::CopyInSink;

use super::*;
use crate::environment::Environment;

static SERVER: LazyLock<ScratchPostgres> = LazyLock::new(|| {
    ScratchPostgres::builder()
        .start()
        .expect("PostgreSQL starts")
});

/// Time that is longer than the time limit for answers.
const TOO_LONG: Duration = Duration::from_secs(8);

/// Opens a session through a proxy, with a statement timeout of one second.
async fn session() -> (Sql, FaultProxy) {
    let address = format!("127.0.0.1:{}", SERVER.port());
    let proxy = FaultProxy::start(ProxyTarget::tcp(address)).await.unwrap();
    let url = format!("postgres://postgres@{}/postgres", proxy.addr());
    let target = Target::from_settings(&url, &Environment::new()).unwrap();
    let sql = connect(&target.unwrap(), "test", Duration::from_secs(1)).await;
    (sql.unwrap(), proxy)
}

/// The client closes the first statement and sends the second one without waiting for an answer. So the
/// server answers one request while another is outstanding.
#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_follows_another_one_does_not_wait_for_a_dead_server() {
    let ((sql, proxy), (locker, _other)) = (session().await, session().await);
    for statement in [
        "CREATE TABLE public.locked (n int)",
        "BEGIN; LOCK TABLE public.locked",
    ] {
        locker.batch_execute(statement).await.unwrap();
    }
    sql.query_one("SELECT 1", &[]).await.unwrap();
    let began = Instant::now();
    let asking = async {
        let asked = sql.query("SELECT n FROM public.locked", &[]).await;
        asked.expect_err("the server cannot be reached")
    };
    let stalling = async {
        // During this pause, the server answers the first request and begins to wait for the lock.
        tokio::time::sleep(Duration::from_millis(300)).await;
        proxy.set_flow(Flow::Stalled);
    };
    let both = async { tokio::join!(asking, stalling) };
    let (error, ()) = tokio::time::timeout(TOO_LONG * 2, both).await.unwrap();
    assert!(error.is_closed(), "{error}");
    assert!(began.elapsed() > Duration::from_secs(4));
}

async fn copy(sql: &Sql, statement: &str, rows: &'static [u8]) -> Result<u64> {
    let mut copying: std::pin::Pin<Box<CopyInSink<Bytes>>> =
        Box::pin(sql.copy_in(statement).await?);
    copying.send(Bytes::from_static(rows)).await?;
    Ok(copying.as_mut().finish().await?)
}

/// The messages that the server sends after a failed COPY depend on where the COPY failed, so this test makes it fail
/// in several places.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_may_be_idle_after_copies_and_errors_of_every_kind() {
    let (sql, _proxy) = session().await;
    sql.batch_execute("CREATE TEMP TABLE copied (n int CHECK (n < 9))")
        .await
        .unwrap();
    let into = "COPY copied FROM STDIN";
    assert_eq!(copy(&sql, into, b"1\n2\n").await.unwrap(), 2);
    for (statement, rows) in [(into, &b"not a number\n"[..]), (into, b"9\n")] {
        assert!(copy(&sql, statement, rows).await.is_err(), "{statement}");
        sql.batch_execute("SELECT 1").await.expect(statement);
    }
    // The client aborts in the middle of a COPY.
    drop(sql.copy_in::<_, Bytes>(into).await.unwrap());
    assert!(
        sql.batch_execute("SELECT 1; SELECT 1/0; SELECT 2")
            .await
            .is_err()
    );
    assert!(
        sql.query("SELECT 1/(n - 1) FROM copied", &[])
            .await
            .is_err()
    );
    tokio::time::sleep(TOO_LONG).await;
    let row = sql.query_one("SELECT count(*) FROM copied", &[]).await;
    assert_eq!(row.unwrap().get::<_, i64>(0), 2);
}

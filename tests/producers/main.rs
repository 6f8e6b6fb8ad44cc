//! Runs the snippets of docs/how-to/write-events.md against a real PostgreSQL. The SQL comes from the
//! page itself. The other snippets are parts of the programs in examples/producers/, and these tests run
//! those programs.
//!
//! Each snippet must store one order and its event in one transaction, and must store neither if one of
//! the two inserts fails.
//!
//! All snippets except SQL and tokio-postgres need packages of their languages, so their tests run only
//! if `CI` is set. If tools are missing or packages cannot be downloaded, a test is skipped and prints
//! the reason.

mod page;
mod program;
mod shop;

/// The program for tokio-postgres, compiled without changes.
#[path = "../../examples/producers/rust-tokio-postgres/src/main.rs"]
#[expect(
    dead_code,
    unreachable_pub,
    reason = "a program of its own, whose `main` we do not call"
)]
mod tokio_postgres_program;

use tokio_postgres::NoTls;

use program::Program;
use shop::{Counts, Shop};

#[tokio::test]
async fn sql_stores_an_order_and_its_event_together_or_neither() {
    let shop = Shop::open().await;
    let snippet = page::snippet("sql/place_order.sql");
    let place = async |order: &str| shop.psql(&snippet, order);
    assert_all_or_nothing(&shop, place).await;
}

#[tokio::test]
async fn emit_stores_an_event_with_the_trace_context_of_its_transaction() {
    let shop = Shop::open().await;
    let snippet = page::block_with("SELECT outbox.emit(");
    let both =
        format!("begin; insert into shop.orders values ('order-4711', 1); {snippet} commit;");
    let id = shop.psql(&both, "").expect("both are stored");
    let sql = "SELECT id::text || ' ' || (headers->>'traceparent') FROM outbox.events";
    let stored: String = shop
        .superuser
        .query_one(sql, &[])
        .await
        .expect("a row")
        .get(0);
    assert_eq!(
        stored,
        format!("{id} 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    );
    assert_eq!(shop.counts("order-4711").await, Counts::BOTH);
}

#[tokio::test]
async fn tokio_postgres_stores_an_order_and_its_event_together_or_neither() {
    page::assert_part_of_its_program("rust-tokio-postgres/src/main.rs");
    let shop = Shop::open().await;
    let connected = tokio_postgres::connect(&shop.service_url(), NoTls).await;
    let (mut client, connection) = connected.expect("the service can log in");
    tokio::spawn(connection);
    let place = async |order: &str| {
        let placed = tokio_postgres_program::place_order(&mut client, order, 9990).await;
        placed
            .map(|id| id.to_string())
            .map_err(|e| format!("{e:?}"))
    };
    assert_all_or_nothing(&shop, place).await;
}

#[tokio::test]
async fn sqlx_stores_an_order_and_its_event_together_or_neither() {
    run(&Program {
        file: "rust-sqlx/src/main.rs",
        tool: "cargo",
        download: "cargo fetch --quiet --locked",
        build: "cargo build --quiet --offline --locked --target-dir target",
        start: "exec target/debug/place-order-sqlx",
    })
    .await;
}

#[tokio::test]
async fn go_stores_an_order_and_its_event_together_or_neither() {
    run(&Program {
        file: "go/main.go",
        tool: "go",
        download: "go mod download",
        build: "go build -o place-order .",
        start: "exec ./place-order",
    })
    .await;
}

#[tokio::test]
async fn python_stores_an_order_and_its_event_together_or_neither() {
    run(&Program {
        file: "python/place_order.py",
        tool: "python3",
        download: "python3 -m venv .venv && .venv/bin/pip install -q --retries 1 -r requirements.txt",
        build: ".venv/bin/python -m compileall -q place_order.py",
        start: "exec .venv/bin/python place_order.py",
    })
    .await;
}

#[tokio::test]
async fn typescript_stores_an_order_and_its_event_together_or_neither() {
    run(&Program {
        file: "typescript/place-order.ts",
        tool: "npm",
        download: "npm ci --silent --no-audit --no-fund",
        build: "npm run --silent check",
        start: "exec npm start --silent --",
    })
    .await;
}

#[tokio::test]
async fn java_stores_an_order_and_its_event_together_or_neither() {
    run(&Program {
        file: "java/src/main/java/shop/PlaceOrder.java",
        tool: "mvn",
        download: "mvn -q -B dependency:copy-dependencies -DoutputDirectory=jars",
        build: "javac -d classes src/main/java/shop/PlaceOrder.java",
        start: "exec java -cp 'classes:jars/*' shop.PlaceOrder",
    })
    .await;
}

async fn run(program: &Program) {
    page::assert_part_of_its_program(program.file);
    let Some(ready) = program.prepare() else {
        return;
    };
    let shop = Shop::open().await;
    let place = async |order: &str| ready.place(order, &shop);
    assert_all_or_nothing(&shop, place).await;
}

/// Places orders with `place`, which returns the id of the event. Then checks as the database owner which
/// orders and events were stored.
async fn assert_all_or_nothing(
    shop: &Shop,
    mut place: impl AsyncFnMut(&str) -> Result<String, String>,
) {
    let id = place("order-1")
        .await
        .expect("the order and its event can be stored");
    assert_eq!(shop.counts("order-1").await, Counts::BOTH);
    assert_eq!(shop.event_ids("order-1").await, [id]);

    // The order exists, so its insert fails.
    let refused = place("order-1")
        .await
        .expect_err("the order exists already");
    assert!(refused.contains("orders_pkey"), "{refused}");
    assert_eq!(shop.counts("order-1").await, Counts::BOTH);

    // The order is new and is inserted first, but PostgreSQL refuses its event.
    place(shop::REFUSED)
        .await
        .expect_err("the event is refused");
    assert_eq!(shop.counts(shop::REFUSED).await, Counts::NEITHER);
}

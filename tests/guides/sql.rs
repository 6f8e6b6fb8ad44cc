//! Lets PostgreSQL check every SQL block in the README and in docs/, except in docs/adr/, without running
//! it. The test makes each block the body of a function. PostgreSQL parses the whole body, and looks up the
//! tables and columns of its queries.

use std::path::{Path, PathBuf};

use tokio_postgres::error::SqlState;

use crate::blocks::{Block, blocks};
use crate::playground::Playground;

/// The tables in the examples, as the pages describe them.
const TABLES: &str = "
    CREATE SCHEMA shop;
    CREATE TABLE shop.orders (id text PRIMARY KEY, cents bigint NOT NULL);
    CREATE TABLE public.outbox (id bigserial PRIMARY KEY, processed_at timestamptz, inserted_xid xid8);
    CREATE TABLE outbox.events_before (LIKE outbox.events);
    CREATE TABLE outbox.events_default (LIKE outbox.events)";

fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder of docs/") {
        let path = entry.expect("an entry").path();
        if path.is_dir() && !path.ends_with("adr") {
            pages(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

fn sql_blocks() -> Vec<Block> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = vec![root.join("README.md")];
    pages(&root.join("docs"), &mut found);
    let of_page = |page: PathBuf| blocks(&page, &std::fs::read_to_string(&page).expect("a page"));
    let all = found.into_iter().flat_map(of_page);
    all.filter(|block| block.language == "sql").collect()
}

/// Turns a block into the body of a function: removes commands that only psql knows, and turns a block that
/// is only part of a condition into a query.
fn body(sql: &str) -> String {
    let sql = sql.replace("\\gexec", ";").replace(":'order'", "'order-1'");
    if sql.starts_with("d.event_id") {
        format!("SELECT FROM outbox.events e, outbox.capture c, outbox.dispatch d WHERE {sql}")
    } else {
        sql
    }
}

#[tokio::test]
async fn postgresql_accepts_every_block_of_sql() {
    let stage = Playground::open().await;
    stage.shell("postrider init --apply");
    stage.client.batch_execute(TABLES).await.expect("tables");
    let all = sql_blocks();
    assert!(all.len() > 30, "only {} blocks were recognised", all.len());
    let mut refused = Vec::new();
    for block in all {
        let body = body(&block.text);
        let create = format!(
            "CREATE OR REPLACE FUNCTION f() RETURNS void LANGUAGE sql AS $body$ {body}\n; $body$"
        );
        let Err(error) = stage.client.batch_execute(&create).await else {
            continue;
        };
        // PostgreSQL checks last whether the final statement fits the function's result type. A block that
        // fails only this check is fine.
        let is_fine = error.code() == Some(&SqlState::INVALID_FUNCTION_DEFINITION);
        let place = format!("{}:{}", block.page.display(), block.line);
        if !is_fine {
            let error = error.as_db_error().map_or("", |error| error.message());
            refused.push(format!("{place}: {error}\n{}", block.text));
        }
    }
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}

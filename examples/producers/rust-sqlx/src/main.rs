//! Stores an order and its event in one transaction, with sqlx.

use serde_json::json;
use sqlx::PgPool;
use sqlx::types::{Json, Uuid};

async fn place_order(pool: &PgPool, order: &str, cents: i64) -> Result<Uuid, sqlx::Error> {
    let mut tx = pool.begin().await?;
    sqlx::query("INSERT INTO shop.orders (id, cents) VALUES ($1, $2)")
        .bind(order)
        .bind(cents)
        .execute(&mut *tx)
        .await?;
    let event_id = sqlx::query_scalar(
        "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload)
         VALUES ('order', $1, 'OrderPlaced', $2) RETURNING id",
    )
    .bind(order)
    .bind(Json(json!({ "cents": cents })))
    .fetch_one(&mut *tx)
    .await?;
    tx.commit().await?;
    Ok(event_id)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    let order = std::env::args().nth(1).unwrap_or("order-sqlx".into());
    println!("{}", place_order(&pool, &order, 9990).await?);
    Ok(())
}

//! Stores an order and its event in one transaction, with tokio-postgres.

use serde_json::json;
use tokio_postgres::types::Json;
use tokio_postgres::{Client, Error, NoTls};
use uuid::Uuid;

pub async fn place_order(client: &mut Client, order: &str, cents: i64) -> Result<Uuid, Error> {
    let tx = client.transaction().await?;
    tx.execute(
        "INSERT INTO shop.orders (id, cents) VALUES ($1, $2)",
        &[&order, &cents],
    )
    .await?;
    let event = tx
        .query_one(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload)
             VALUES ('order', $1, 'OrderPlaced', $2) RETURNING id",
            &[&order, &Json(json!({ "cents": cents }))],
        )
        .await?;
    tx.commit().await?;
    Ok(event.get("id"))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut client, connection) =
        tokio_postgres::connect(&std::env::var("DATABASE_URL")?, NoTls).await?;
    tokio::spawn(connection);
    let order = std::env::args().nth(1).unwrap_or("order-tokio".into());
    println!("{}", place_order(&mut client, &order, 9990).await?);
    Ok(())
}

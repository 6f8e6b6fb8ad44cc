// Stores an order and its event in one transaction, with pg (node-postgres).
import pg from "pg";

async function placeOrder(pool: pg.Pool, order: string, cents: number): Promise<string> {
  const client = await pool.connect(); // one connection for the whole transaction, not pool.query
  try {
    await client.query("BEGIN");
    await client.query(
      "INSERT INTO shop.orders (id, cents) VALUES ($1, $2)",
      [order, cents],
    );
    const event = await client.query<{ id: string }>(
      `INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload)
       VALUES ('order', $1, 'OrderPlaced', $2) RETURNING id`,
      [order, JSON.stringify({ cents })],
    );
    await client.query("COMMIT");
    return event.rows[0].id;
  } catch (error) {
    await client.query("ROLLBACK");
    throw error;
  } finally {
    client.release();
  }
}

const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL });
console.log(await placeOrder(pool, process.argv[2] ?? "order-typescript", 9990));
await pool.end();

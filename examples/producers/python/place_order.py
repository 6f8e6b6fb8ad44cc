"""Stores an order and its event in one transaction, with psycopg."""

import os
import sys
from uuid import UUID

import psycopg
from psycopg.types.json import Jsonb


def place_order(conn: psycopg.Connection, order: str, cents: int) -> UUID:
    with conn.transaction():
        conn.execute(
            "INSERT INTO shop.orders (id, cents) VALUES (%s, %s)",
            (order, cents),
        )
        (event_id,) = conn.execute(
            """INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload)
               VALUES ('order', %s, 'OrderPlaced', %s) RETURNING id""",
            (order, Jsonb({"cents": cents})),
        ).fetchone()
    return event_id


if __name__ == "__main__":
    order = sys.argv[1] if len(sys.argv) > 1 else "order-python"
    with psycopg.connect(os.environ["DATABASE_URL"]) as conn:
        print(place_order(conn, order, 9990))

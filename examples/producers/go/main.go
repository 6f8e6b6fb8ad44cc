// Stores an order and its event in one transaction, with pgx.
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/jackc/pgx/v5"
)

func placeOrder(ctx context.Context, conn *pgx.Conn, order string, cents int64) (eventID string, err error) {
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx,
			`INSERT INTO shop.orders (id, cents) VALUES ($1, $2)`, order, cents)
		if err != nil {
			return err
		}
		payload := map[string]any{"cents": cents}
		return tx.QueryRow(ctx,
			`INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload)
			 VALUES ('order', $1, 'OrderPlaced', $2) RETURNING id::text`, order, payload).Scan(&eventID)
	})
	return eventID, err
}

func main() {
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(ctx)
	order := "order-go"
	if len(os.Args) > 1 {
		order = os.Args[1]
	}
	eventID, err := placeOrder(ctx, conn, order, 9990)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(eventID)
}

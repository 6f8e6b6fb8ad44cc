package shop;

import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.SQLException;
import java.util.UUID;

/** Stores an order and its event in one transaction, with JDBC. */
public final class PlaceOrder {
    static UUID placeOrder(Connection connection, String order, long cents) throws SQLException {
        connection.setAutoCommit(false);
        try (var insertOrder = connection.prepareStatement(
                    "INSERT INTO shop.orders (id, cents) VALUES (?, ?)");
                var insertEvent = connection.prepareStatement("""
                    INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload)
                    VALUES ('order', ?, 'OrderPlaced', ?::jsonb) RETURNING id""")) {
            insertOrder.setString(1, order);
            insertOrder.setLong(2, cents);
            insertOrder.executeUpdate();
            insertEvent.setString(1, order);
            insertEvent.setString(2, "{\"cents\": " + cents + "}");
            try (var event = insertEvent.executeQuery()) {
                event.next();
                var eventId = event.getObject("id", UUID.class);
                connection.commit();
                return eventId;
            }
        } catch (SQLException e) {
            connection.rollback();
            throw e;
        }
    }

    public static void main(String[] args) throws SQLException {
        var order = args.length > 0 ? args[0] : "order-java";
        try (var connection = DriverManager.getConnection(System.getenv("JDBC_URL"))) {
            System.out.println(placeOrder(connection, order, 9990));
        }
    }
}

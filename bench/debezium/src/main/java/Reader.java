import io.debezium.embedded.Connect;
import io.debezium.engine.DebeziumEngine;
import java.io.File;
import java.net.URI;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import org.apache.kafka.connect.source.SourceRecord;

/**
 * Reads the slot `postrider` with Debezium's engine, counts the rows, and exits after as many rows as its argument
 * says. DATABASE_URL names the database. All settings that are not here keep Debezium's defaults.
 */
public final class Reader {
    public static void main(String[] arguments) throws Exception {
        long expected = Long.parseLong(arguments[0]);
        URI database = URI.create(System.getenv("DATABASE_URL"));
        File offsets = File.createTempFile("offsets", null);
        offsets.deleteOnExit();

        Properties settings = new Properties();
        settings.setProperty("name", "reader");
        settings.setProperty("topic.prefix", "bench");
        settings.setProperty("connector.class", "io.debezium.connector.postgresql.PostgresConnector");
        settings.setProperty("offset.storage", "org.apache.kafka.connect.storage.FileOffsetBackingStore");
        settings.setProperty("offset.storage.file.filename", offsets.getPath());
        settings.setProperty("database.hostname", database.getHost());
        settings.setProperty("database.port", String.valueOf(database.getPort()));
        settings.setProperty("database.user", database.getUserInfo());
        settings.setProperty("database.password", "unused");
        settings.setProperty("database.dbname", database.getPath().substring(1));
        settings.setProperty("plugin.name", "pgoutput");
        settings.setProperty("slot.name", "postrider");
        settings.setProperty("publication.name", "postrider");
        settings.setProperty("publication.autocreate.mode", "disabled");
        settings.setProperty("table.include.list", "outbox.events");
        settings.setProperty("snapshot.mode", "no_data");

        CountDownLatch finished = new CountDownLatch(1);
        long[] count = {0};
        DebeziumEngine<?> engine = DebeziumEngine.create(Connect.class)
            .using(settings)
            .notifying((records, committer) -> {
                for (var record : records) {
                    if (record.value().topic().equals("bench.outbox.events")) {
                        count[0]++;
                    }
                    committer.markProcessed(record);
                }
                committer.markBatchFinished();
                if (count[0] >= expected) {
                    finished.countDown();
                }
            })
            .using((success, message, error) -> {
                if (!success) {
                    System.err.println(message);
                    System.exit(1);
                }
            })
            .build();
        Thread thread = new Thread(engine::run);
        thread.start();
        finished.await();
        engine.close();
        thread.join();
        if (count[0] != expected) {
            System.err.println("read " + count[0] + " of " + expected + " rows");
            System.exit(1);
        }
        System.exit(0);
    }
}

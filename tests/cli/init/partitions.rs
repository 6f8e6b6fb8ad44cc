//! `postrider init --partition daily`.

use crate::support::{Database, Ran, assert_contains, connect, execute};

#[tokio::test]
async fn init_partitions_the_outbox_by_day_if_asked_when_it_creates_it() {
    let database = Database::new().await;
    let init = ["init", "--apply", "--partition", "daily"];
    database.run(&init).await.assert_status(0);
    let partitions = "select count(*) from pg_inherits where inhparent = 'outbox.events'::regclass";
    assert_eq!(
        database.number(partitions).await,
        5,
        "four days and the default"
    );
    let role = format!("{}_service", database.name);
    database
        .execute(&format!(
            "create role {role} login in role postrider_writer"
        ))
        .await;
    let service = connect(&database.url_as(&role)).await;
    let insert = "insert into outbox.events (aggregatetype, aggregateid, event_type, payload) \
                  values ('order', 'o', 'OrderPlaced', '{}') returning id";
    service.query_one(insert, &[]).await.unwrap();
    execute(
        &service,
        "select outbox.emit('order', 'o', 'OrderPlaced', '{}')",
    )
    .await;
    for refused in [
        "insert into outbox.events (aggregatetype, event_type, created_at) \
         values ('order', 'OrderPlaced', now() - interval '1 year')",
        "select outbox.add_partitions(3)",
        "select outbox.drop_partition('events_20200101')",
    ] {
        assert!(service.batch_execute(refused).await.is_err(), "{refused}");
    }
    let update = "update outbox.events set event_type = 'x'";
    let error = database.client.batch_execute(update).await.unwrap_err();
    assert_contains(&format!("{error:?}"), "the outbox is insert-only");
    database.run(&init).await.assert_status(0);
    database.run(&["init", "--apply"]).await.assert_status(0);
    assert_eq!(database.number(partitions).await, 5);
    let check = ["check", "--json"];
    let found = |ran: &Ran, code: &str| ran.stdout.contains(code);
    assert!(found(&database.run(&check).await, "partitions-ahead"));
    let tomorrow = "select 'outbox.events_' || \
                    to_char(now() at time zone 'UTC' + interval '1 day', 'YYYYMMDD')";
    let tomorrow = database.text(tomorrow).await;
    database.execute(&format!("drop table {tomorrow}")).await;
    assert!(found(&database.run(&check).await, "partitions-missing"));
}

#[tokio::test]
async fn init_says_that_an_existing_outbox_is_not_partitioned() {
    let database = Database::initialised().await;
    let ran = database
        .run(&["init", "--apply", "--partition", "daily", "--json"])
        .await;
    ran.assert_status(1);
    assert_eq!(ran.finding("partition")["severity"], "warning");
}

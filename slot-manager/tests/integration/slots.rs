//! Tests of creating, finding, dropping and advancing slots, and of waiting for a slot in use.

mod creation;

use std::time::{Duration, Instant};

use decoder::Lsn;
use slot_manager::slots::{self, CreateOptions};
use slot_manager::{SlotError, SlotName, WalStatus};
use tokio_postgres::Client;

use crate::support::{
    PATIENCE, Reader, builder, connect, eventually, major, new_database, run, shared_server,
    skipped, slot_name, superuser,
};

async fn create(client: &Client, name: &SlotName) -> Result<Lsn, SlotError> {
    slots::create(client, name, CreateOptions::default(), PATIENCE).await
}

#[tokio::test]
async fn a_created_slot_is_found_with_all_its_properties() {
    let (database, client) = new_database().await;
    let name = slot_name(&database);
    assert!(slots::find(&client, &name).await.expect("find").is_none());
    let consistent_point = create(&client, &name).await.expect("create");

    let slot = slots::find(&client, &name)
        .await
        .expect("find")
        .expect("there");
    assert_eq!(slot.slot_name, name.as_str());
    assert_eq!(slot.plugin.as_deref(), Some("pgoutput"));
    assert_eq!(slot.database.as_deref(), Some(database.as_str()));
    assert_eq!(slot.confirmed_flush_lsn, Some(consistent_point));
    assert_eq!(slot.wal_status, Some(WalStatus::Reserved));
    assert!(!slot.active && !slot.temporary && !slot.two_phase && slot.holder.is_none());
    assert!(slot.restart_lsn <= slot.confirmed_flush_lsn);
    assert!(slot.lag_bytes <= slot.retained_bytes && slot.retained_bytes > Some(0));
    slot.require_ours().expect("ours");
    let columns_of_17 = (slot.failover, slot.synced, slot.inactive_since.is_some());
    let expected = if major(&client).await >= 17 {
        (Some(false), Some(false), true)
    } else {
        (None, None, false)
    };
    assert_eq!(columns_of_17, expected);
}

#[tokio::test]
async fn the_json_of_a_slot_has_the_fields_that_scripts_rely_on() {
    let (database, client) = new_database().await;
    let name = slot_name(&database);
    create(&client, &name).await.expect("create");
    let slot = slots::find(&client, &name)
        .await
        .expect("find")
        .expect("there");
    let json = serde_json::to_value(&slot).expect("json");
    for field in [
        "slot_name",
        "active",
        "active_pid",
        "wal_status",
        "safe_wal_size",
    ] {
        assert!(json.get(field).is_some(), "{field} in {json}");
    }
    assert!(
        json["confirmed_flush_lsn"]
            .as_str()
            .expect("text")
            .parse::<Lsn>()
            .is_ok()
    );
    assert!(
        json["restart_lsn"]
            .as_str()
            .expect("text")
            .parse::<Lsn>()
            .is_ok()
    );
    assert!(json["lag_bytes"].is_u64() && json["retained_bytes"].is_u64());
    assert_eq!(json["wal_status"], "reserved");
}

#[tokio::test]
async fn lag_grows_with_the_wal_that_is_written() {
    let (database, client) = new_database().await;
    let name = slot_name(&database);
    create(&client, &name).await.expect("create");
    let lag = async || {
        slots::find(&client, &name)
            .await
            .expect("find")
            .expect("slot")
            .lag_bytes
    };
    let before = lag().await.expect("known");
    run(
        &client,
        "create table filler as select repeat('x', 500) from generate_series(1, 1000)",
    )
    .await;
    assert!(lag().await.expect("known") >= before + 500_000);
}

#[tokio::test]
async fn a_missing_slot_and_a_name_that_is_taken_have_errors_of_their_own() {
    let (database, client) = new_database().await;
    let name = slot_name(&database);
    let missing = slots::drop(&client, &name).await.expect_err("missing");
    assert!(
        matches!(missing, SlotError::SlotMissing { .. }),
        "{missing}"
    );
    let missing = slots::advance(&client, &name, Lsn::new(1))
        .await
        .expect_err("missing");
    assert!(
        matches!(missing, SlotError::SlotMissing { .. }),
        "{missing}"
    );
    create(&client, &name).await.expect("create");
    let taken = create(&client, &name).await.expect_err("taken");
    assert!(matches!(taken, SlotError::SlotExists { .. }), "{taken}");
    slots::drop(&client, &name).await.expect("drop");
    assert!(slots::find(&client, &name).await.expect("find").is_none());
}

#[tokio::test]
async fn a_slot_in_use_names_its_reader_and_refuses_drop_and_advance() {
    let (database, client) = new_database().await;
    let name = slot_name(&database);
    let at = create(&client, &name).await.expect("create");
    let reader = Reader::start(shared_server(), &database, &database);

    let slot = slots::find(&client, &name)
        .await
        .expect("find")
        .expect("there");
    let holder = slot.holder.clone().expect("held");
    assert!(slot.active);
    assert_eq!(slot.active_pid, Some(holder.pid));
    let application = format!("postrider reader of {database}");
    assert_eq!(
        holder.application_name.as_deref(),
        Some(application.as_str())
    );
    assert_eq!(holder.client_addr.as_deref(), Some("127.0.0.1"));
    assert!(holder.since.expect("known").ends_with('Z'));
    for error in [
        slots::drop(&client, &name).await.expect_err("in use"),
        slots::advance(&client, &name, at)
            .await
            .map(|_| ())
            .expect_err("in use"),
    ] {
        assert!(
            matches!(
                error,
                SlotError::SlotInUse {
                    holder: Some(_),
                    ..
                }
            ),
            "{error}"
        );
        assert!(error.to_string().contains(&application), "{error}");
    }
    drop(reader);
    slots::wait_until_free(&client, &name, Some(Instant::now() + PATIENCE), |_| {})
        .await
        .expect("free");
    slots::drop(&client, &name).await.expect("drop");
}

#[tokio::test]
async fn waiting_shows_the_holder_and_ends_when_it_disconnects() {
    let (database, client) = new_database().await;
    let name = slot_name(&database);
    create(&client, &name).await.expect("create");
    let mut reader = Some(Reader::start(shared_server(), &database, &database));
    let pid = slots::find(&client, &name)
        .await
        .expect("find")
        .expect("there")
        .active_pid;

    let deadline = Some(Instant::now() + Duration::from_millis(200));
    let error = slots::wait_until_free(&client, &name, deadline, |_| {})
        .await
        .expect_err("held");
    let SlotError::StillHeld { holder, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(Some(holder.pid), pid);

    let mut seen = Vec::new();
    let slot = slots::wait_until_free(&client, &name, None, |slot| {
        seen.push(slot.active_pid);
        reader = None; // disconnects at the first poll
    })
    .await
    .expect("free");
    assert!(!slot.active);
    assert_eq!(seen.first(), Some(&pid));
}

#[tokio::test]
async fn waiting_for_a_slot_that_is_dropped_ends_with_slot_missing() {
    let (database, client) = new_database().await;
    let name = slot_name(&database);
    let owner = connect(&shared_server().url(&database)).await;
    let sql = format!(
        "select pg_create_logical_replication_slot('{name}', 'pgoutput', temporary => true)"
    );
    run(&owner, &sql).await;
    let mut owner = Some(owner); // a temporary slot is dropped with its session
    let error = slots::wait_until_free(&client, &name, None, |_| owner = None)
        .await
        .expect_err("gone");
    assert!(matches!(error, SlotError::SlotMissing { .. }), "{error}");
}

#[tokio::test]
async fn advance_goes_forward_to_the_end_of_the_wal_and_never_back() {
    let (database, client) = new_database().await;
    let name = slot_name(&database);
    let start = create(&client, &name).await.expect("create");
    run(&client, "create table t as select 1 as x").await;
    let target = slots::find(&client, &name)
        .await
        .expect("find")
        .expect("there")
        .server_lsn;
    let target = target.expect("known");

    let reached = slots::advance(&client, &name, target)
        .await
        .expect("advance");
    assert!(reached > start && reached <= target);
    let slot = slots::find(&client, &name)
        .await
        .expect("find")
        .expect("there");
    assert_eq!(slot.confirmed_flush_lsn, Some(reached));

    let error = slots::advance(&client, &name, start)
        .await
        .expect_err("backwards");
    assert!(
        matches!(error, SlotError::Backwards { to, .. } if to == start),
        "{error}"
    );
    run(&client, "create table u as select 1 as x").await;
    let beyond = Lsn::new(u64::MAX >> 1);
    let reached = slots::advance(&client, &name, beyond)
        .await
        .expect("advance");
    assert!(reached > target && reached < beyond);
}

#[tokio::test]
async fn slots_that_the_relay_cannot_use_are_refused_by_kind() {
    let (database, client) = new_database().await;
    let (other_database, other_client) = new_database().await;
    let other = slot_name(&other_database);
    create(&other_client, &other).await.expect("create");
    let error = slots::drop(&client, &other)
        .await
        .expect_err("other database");
    assert!(
        matches!(&error, SlotError::OtherDatabase { database, .. } if *database == other_database),
        "{error}"
    );

    let physical = slot_name(&format!("{database}_physical"));
    run(
        &client,
        &format!("select pg_create_physical_replication_slot('{physical}')"),
    )
    .await;
    let error = slots::drop(&client, &physical).await.expect_err("physical");
    assert!(matches!(error, SlotError::PhysicalSlot { .. }), "{error}");

    let plugin = slot_name(&format!("{database}_plugin"));
    let sql = format!("select pg_create_logical_replication_slot('{plugin}', 'test_decoding')");
    if client.batch_execute(&sql).await.is_err() {
        return skipped(
            "a slot of another plugin is refused",
            "test_decoding is not installed",
        );
    }
    let error = slots::advance(&client, &plugin, Lsn::new(u64::MAX))
        .await
        .expect_err("plugin");
    assert!(
        matches!(&error, SlotError::OtherPlugin { plugin, .. } if plugin == "test_decoding"),
        "{error}"
    );
}

#[tokio::test]
async fn a_slot_of_a_standby_shows_the_received_position() {
    let mut primary = builder().start().expect("start");
    primary
        .stop(scratch_postgres::StopMode::Fast, PATIENCE)
        .expect("stop");
    let standby = builder().standby_of(&primary).start().expect("standby");
    primary.start_again().expect("primary");
    let client = superuser(&standby).await;
    run(
        &client,
        "select pg_create_physical_replication_slot('below', true)",
    )
    .await;
    run(
        &superuser(&primary).await,
        "create table t as select 1 as x",
    )
    .await;
    let position: tokio_postgres::types::PgLsn = superuser(&primary)
        .await
        .query_one_scalar("select pg_current_wal_flush_lsn()", &[])
        .await
        .expect("position");
    eventually("the standby's position reaches the primary's", async || {
        let slots = slots::list(&client).await.expect("list");
        let slot = slots
            .iter()
            .find(|slot| slot.slot_name == "below")
            .expect("there");
        (slot.server_lsn >= Some(Lsn::new(position.into()))).then_some(())
    })
    .await;
}

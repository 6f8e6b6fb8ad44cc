//! Tests that clusters are identified correctly.

use scratch_postgres::StopMode;
use slot_manager::cluster;

use crate::support::{PATIENCE, builder, eventually, run, superuser};

#[tokio::test]
async fn a_standby_has_its_primarys_identity_and_a_new_timeline_once_promoted() {
    let mut primary = builder().start().expect("start");
    let before = cluster::inspect(&superuser(&primary).await)
        .await
        .expect("inspect");
    assert_eq!(
        before.major_version(),
        primary.major_version().expect("version")
    );
    assert_eq!((before.in_recovery, before.timeline), (false, 1));
    assert_eq!(before.database, "postgres");

    primary.stop(StopMode::Fast, PATIENCE).expect("stop");
    let standby = builder().standby_of(&primary).start().expect("standby");
    let client = superuser(&standby).await;
    let following = cluster::inspect(&client).await.expect("inspect");
    assert_eq!(following.system_identifier, before.system_identifier);
    assert!(following.in_recovery);

    run(&client, "select pg_promote(false)").await;
    let promoted = eventually("the standby is promoted", async || {
        let cluster = cluster::inspect(&client).await.expect("inspect");
        (!cluster.in_recovery).then_some(cluster)
    })
    .await;
    assert_eq!(promoted.timeline, 2);
    assert_eq!(promoted.system_identifier, before.system_identifier);
}

#[tokio::test]
async fn two_clusters_differ_and_an_identifier_survives_a_round_trip_through_text() {
    let (one, two) = (
        builder().start().expect("start"),
        builder().start().expect("start"),
    );
    let one = cluster::inspect(&superuser(&one).await)
        .await
        .expect("inspect")
        .system_identifier;
    let two = cluster::inspect(&superuser(&two).await)
        .await
        .expect("inspect")
        .system_identifier;
    assert_ne!(one, two);
    assert_eq!(one.to_string().parse(), Ok(one));
}

use super::*;

const HERE: u64 = 7;

fn row(slot: &str, since: i64) -> Row {
    let family = SlotFamily {
        base: "p".parse().unwrap(),
        shard: None,
    };
    Row {
        slot: slot.to_owned(),
        shard: family.member(slot).unwrap(),
        system_identifier: SystemIdentifier::new(HERE).to_string(),
        since,
        has_served: true,
        places_from: None,
        legacy: Legacy {
            first_xid: 100 + since,
            resolved_xid: None,
            exceptions_xid: None,
            dispatch: Dispatch::Full,
        },
    }
}

fn seen(shard: &str, rows: &[Row]) -> Before {
    judge(shard.parse().ok(), rows, SystemIdentifier::new(HERE))
}

fn followed(shard: &str, rows: &[Row]) -> Followed {
    match seen(shard, rows) {
        Before::OtherLayout(followed) => *followed,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_first_layout_follows_nobody() {
    assert_eq!(seen("", &[]), Before::SameLayout);
    assert_eq!(seen("1/2", &[row("p_0of2", 5)]), Before::SameLayout);
    assert_eq!(seen("0/2", &[row("p_0of2", 5)]), Before::SameLayout);
}

#[test]
fn a_layout_that_has_served_since_is_followed_and_an_older_one_is_not() {
    let rows = [row("p", 5), row("p_0of2", 9), row("p_1of2", 8)];
    assert_eq!(followed("", &rows).last, "p_0of2");
    assert_eq!(seen("0/2", &rows), Before::SameLayout);
    assert_eq!(seen("1/2", &rows), Before::SameLayout);
    assert_eq!(followed("2/3", &rows).slots.len(), 3);
}

#[test]
fn a_relay_that_was_marked_and_has_not_served_follows_still_and_is_not_followed() {
    let marked = Row {
        has_served: false,
        ..row("p_0of2", 9)
    };
    let rows = [row("p", 5), marked];
    assert_eq!(followed("0/2", &rows).last, "p");
    assert_eq!(seen("", &rows), Before::SameLayout);
}

#[test]
fn the_first_transaction_of_all_is_taken_over() {
    let rows = [row("p", 5), row("p_0of2", 9), row("p_1of2", 8)];
    assert_eq!(followed("0/3", &rows).legacy.first_xid, 108);
    // A relay that never served leaves its share as older ones have left it.
    assert_eq!(followed("0/3", &rows[..2]).legacy.first_xid, 105);
}

#[test]
fn what_nobody_has_vouched_for_is_vouched_for_by_none_of_several() {
    let vouched = |slot, since, xid| {
        let mut row = row(slot, since);
        row.legacy.resolved_xid = xid;
        row
    };
    let both = [
        vouched("p_0of2", 5, Some(50)),
        vouched("p_1of2", 6, Some(40)),
    ];
    assert_eq!(followed("", &both).legacy.resolved_xid, Some(40));
    let one = [vouched("p_0of2", 5, Some(50)), vouched("p_1of2", 6, None)];
    assert_eq!(followed("", &one).legacy.resolved_xid, None);
}

#[test]
fn rows_delivered_without_a_record_stay_known_as_such() {
    let mut single = row("p", 5);
    single.legacy.dispatch = Dispatch::Exceptions;
    single.legacy.exceptions_xid = Some(30);
    let legacy = followed("0/2", &[single.clone()]).legacy;
    assert_eq!(legacy, single.legacy);
    // Of a whole layout after it alone that layout counts.
    let rows = [single, row("p_0of2", 8), row("p_1of2", 9)];
    assert_eq!(followed("0/3", &rows).legacy.dispatch, Dispatch::Full);
    assert_eq!(
        followed("0/3", &rows[..2]).legacy.dispatch,
        Dispatch::Exceptions
    );
}

#[test]
fn a_layout_begins_where_the_first_of_its_relays_has_begun() {
    let begun = |slot, since, from| Row {
        places_from: Some(Lsn::new(from)),
        ..row(slot, since)
    };
    let rows = [
        row("p", 5),
        begun("p_0of3", 8, 800),
        begun("p_1of3", 9, 900),
    ];
    assert_eq!(followed("2/3", &rows).places_from, Some(Lsn::new(800)));
    // Where the layout had begun when it served before, others have served since.
    let again = [
        begun("p_0of3", 3, 300),
        row("p", 5),
        begun("p_1of3", 9, 900),
    ];
    assert_eq!(followed("0/3", &again).places_from, Some(Lsn::new(900)));
    assert_eq!(followed("0/2", &rows).places_from, None);
}

#[test]
fn a_new_relay_on_a_copy_is_refused_and_one_that_was_adopted_is_not() {
    let elsewhere = Row {
        system_identifier: SystemIdentifier::new(8).to_string(),
        ..row("p", 5)
    };
    let foreign = Before::Foreign(SystemIdentifier::new(8));
    assert_eq!(seen("0/2", std::slice::from_ref(&elsewhere)), foreign);
    let adopted = Row {
        has_served: false,
        ..row("p_0of2", 3)
    };
    assert_eq!(seen("0/2", &[elsewhere, adopted]), Before::SameLayout);
}

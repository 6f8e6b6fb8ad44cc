//! Whether another relay serves in our place, which sends again what we have not recorded by now.
//!
//! It reads our slot, or one of another number of shards: such a relay begins only when nobody reads
//! ours. As long as our walsender has the slot nobody else serves, whatever is active for a moment:
//! what is recorded then is confirmed, so it must not be left out. A successor that is gone again has
//! left its name in outbox.relay, and may have sent what we would record.

use slot_manager::SlotFamily;

/// Asked once per batch: one row for each relay that is at work, as a rule. One without a slot if
/// another instance has begun to serve ours.
pub(super) const ACTIVE_SLOTS: &str = "\
    SELECT s.slot_name::text, s.active_pid FROM pg_catalog.pg_replication_slots s \
    WHERE s.active_pid IS NOT NULL \
      AND (s.slot_name = $1::text OR s.database = pg_catalog.current_database()) \
    UNION ALL \
    SELECT NULL, NULL FROM outbox.relay r WHERE r.slot = $1::text AND r.instance <> $2::text";

/// `active` are slots and who reads them, see [`ACTIVE_SLOTS`]; `walsender` is ours, 0 when it is not
/// known.
pub(super) fn is_there<'a>(
    active: impl Iterator<Item = (Option<&'a str>, Option<i32>)>,
    slot: &str,
    family: &SlotFamily,
    walsender: i32,
) -> bool {
    let mut is_there = false;
    for (name, pid) in active {
        is_there |= match name {
            Some(name) if name == slot => return walsender != 0 && pid != Some(walsender),
            Some(name) => family.is_other_layout(name),
            None => true,
        };
    }
    is_there
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_there_with(active: &[(&str, i32)], walsender: i32) -> bool {
        let family = SlotFamily {
            base: "p".parse().unwrap(),
            shard: "0/2".parse().ok(),
        };
        let active = active.iter().map(|(name, pid)| (Some(*name), Some(*pid)));
        is_there(active, "p_0of2", &family, walsender)
    }

    #[test]
    fn who_has_served_our_slot_meanwhile_counts_unless_it_is_ours_still() {
        let family = SlotFamily {
            base: "p".parse().unwrap(),
            shard: None,
        };
        let other = (None, None);
        assert!(is_there([other].into_iter(), "p", &family, 7));
        let ours = [other, (Some("p"), Some(7))];
        assert!(!is_there(ours.into_iter(), "p", &family, 7));
    }

    #[test]
    fn who_reads_our_slot_or_one_of_another_number_of_shards_is_a_successor() {
        assert!(is_there_with(&[("p_0of2", 8)], 7));
        assert!(is_there_with(&[("p_1of2", 9), ("p", 8)], 7));
        assert!(is_there_with(&[("p_0of3", 8)], 0));
    }

    #[test]
    fn siblings_and_strangers_are_none() {
        assert!(!is_there_with(&[], 7));
        assert!(!is_there_with(
            &[("p_1of2", 8), ("other", 9), ("p_x", 9)],
            7
        ));
    }

    #[test]
    fn while_our_walsender_has_the_slot_nobody_else_serves() {
        assert!(!is_there_with(&[("p", 8), ("p_0of2", 7)], 7));
        assert!(!is_there_with(&[("p_0of2", 8), ("p", 9)], 0));
    }
}

//! The slots of all shards of one base name: which belong together, and which are left over.

use crate::shard::layout;
use crate::{Finding, Shard, Slot, SlotName};

/// The slots of one base name, seen from one of their relays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotFamily {
    /// The slot without shards.
    pub base: SlotName,
    /// Which shard this relay is; `None` for the only relay.
    pub shard: Option<Shard>,
}

impl SlotFamily {
    /// Which shard the slot of this name belongs to (`Some(None)`: to the relay without shards);
    /// `None` when it is not of the family.
    #[must_use]
    pub fn member(&self, slot: &str) -> Option<Option<Shard>> {
        if slot == self.base.as_str() {
            return Some(None);
        }
        let (base, shard) = Shard::of_slot(slot)?;
        (base == self.base.as_str()).then_some(Some(shard))
    }

    /// Whether the slot of this name is of another layout of the family.
    #[must_use]
    pub fn is_other_layout(&self, slot: &str) -> bool {
        self.member(slot)
            .is_some_and(|shard| layout(shard) != layout(self.shard))
    }

    /// The names of all slots that [`is_other_layout`](Self::is_other_layout) tells, for a statement.
    #[must_use]
    pub fn other_layouts(&self) -> Vec<String> {
        let others = Shard::every().filter(|shard| layout(*shard) != layout(self.shard));
        let name = |shard: Option<Shard>| match shard {
            None => Some(self.base.clone()),
            Some(shard) => shard.slot(&self.base).ok(),
        };
        others
            .filter_map(name)
            .map(|name| name.to_string())
            .collect()
    }

    /// What the slots of the database say of the family: leftovers of another layout, and shards
    /// that do not run. Nothing when all is well.
    #[must_use]
    pub fn survey(&self, slots: &[Slot]) -> Vec<Finding> {
        let here = slots.iter().filter(|slot| slot.in_this_database);
        let others = here.filter(|slot| self.is_other_layout(&slot.slot_name));
        let others = others.map(|slot| self.other_layout(slot));
        let siblings = self.shard.into_iter().flat_map(Shard::all);
        let siblings = siblings.filter(|shard| Some(*shard) != self.shard);
        let siblings = siblings.filter_map(|shard| self.sibling(shard, slots));
        others.chain(siblings).collect()
    }

    fn other_layout(&self, slot: &Slot) -> Finding {
        let name = &slot.slot_name;
        if let Some(holder) = &slot.holder {
            return Finding::error(
                "shards-mixed",
                format!("slot {name} of another number of shards is read by {holder}"),
                "stop the relays of one of the two settings",
            );
        }
        let shard = match self.member(name).flatten() {
            Some(shard) => format!("--shard {shard}"),
            None => "--shard ''".to_owned(),
        };
        Finding::warning(
            "slot-of-other-shards",
            format!("slot {name} is of another number of shards: it only keeps WAL"),
            format!(
                "when the relays of the present setting run: `postrider slot drop {shard} --yes`"
            ),
        )
    }

    fn sibling(&self, shard: Shard, slots: &[Slot]) -> Option<Finding> {
        let name = shard.slot(&self.base).ok()?;
        let slot = slots.iter().find(|slot| slot.slot_name == name.as_str());
        match slot {
            None => Some(Finding::warning(
                "shard-missing",
                format!(
                    "shard {shard} has no slot {name}: its share of the events is not delivered"
                ),
                format!(
                    "run `postrider init --apply --shard {shard}`, and a relay with this setting; \
                     if it is its first start, with `--start all`, or what was committed since the \
                     other shards began is left out"
                ),
            )),
            Some(slot) if !slot.active => Some(Finding::info(
                "shard-inactive",
                format!("nobody reads slot {name}: the events of shard {shard} wait"),
                format!("start the relay of shard {shard}"),
            )),
            Some(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn family(text: Option<&str>) -> SlotFamily {
        SlotFamily {
            base: "postrider".parse().expect("a name"),
            shard: text.map(|text| text.parse().expect(text)),
        }
    }

    #[test]
    fn slots_of_another_number_of_shards_are_of_another_layout() {
        let two = family(Some("0/2"));
        assert!(two.is_other_layout("postrider") && two.is_other_layout("postrider_0of3"));
        assert!(!two.is_other_layout("postrider_1of2"));
        assert!(!two.is_other_layout("other_0of3") && !two.is_other_layout("postrider_x"));
        let one = family(None);
        assert!(one.is_other_layout("postrider_0of2") && !one.is_other_layout("postrider"));
    }

    #[test]
    fn the_names_of_other_layouts_are_all_that_are_told_as_such() {
        for (text, count) in [(None, 135), (Some("0/2"), 134), (Some("3/16"), 120)] {
            let family = family(text);
            let names = family.other_layouts();
            assert!(names.iter().all(|name| family.is_other_layout(name)));
            assert_eq!(names.len(), count, "{text:?}");
        }
    }
}

//! `shard`: which part of the events this relay delivers, and what its slot and publication are
//! called. Nowhere else are these names made.

use slot_manager::{Shard, SlotFamily, SlotName};

use super::{Dispatch, setting_invalid};
use crate::error::Result;

/// `NAMEDATALEN - 1` of every usual build.
const LONGEST_NAME_BYTES: usize = 63;

/// What the settings `slot` and `shard` say.
pub(super) fn family(slot: &str, shard: &str, dispatch: Dispatch) -> Result<SlotFamily> {
    let base: SlotName = slot
        .parse()
        .map_err(|e| setting_invalid("slot").caused_by(e))?;
    if let Some((base, shard)) = Shard::of_slot(base.as_str()) {
        return Err(setting_invalid("slot").hint(format!(
            "names that end like this are those of shards: take --slot {base} --shard {shard}; or, \
             when this is a relay without shards, another name with --start all, which sends again \
             nothing that has a record"
        )));
    }
    let shard = match shard {
        "" => None,
        shard => Some(
            shard
                .parse()
                .map_err(|e| setting_invalid("shard").caused_by(e))
                .map_err(|e| e.hint("write it as INDEX/NUMBER, such as 0/4 to 3/4"))?,
        ),
    };
    match (shard, dispatch) {
        (Some(_), Dispatch::Exceptions) => Err(setting_invalid("shard").hint(
            "take dispatch = full: without a record of each event several relays cannot be proven \
             to lose nothing",
        )),
        (_, Dispatch::Full) | (None, Dispatch::Exceptions) => Ok(SlotFamily { base, shard }),
    }
}

/// The slot of this relay.
pub(super) fn slot(SlotFamily { base, shard }: &SlotFamily) -> Result<SlotName> {
    let Some(shard) = shard else {
        return Ok(base.clone());
    };
    shard.slot(base).map_err(|e| {
        setting_invalid("slot")
            .caused_by(e)
            .hint("with `shard` take a name of at most 37 bytes")
    })
}

/// The publication of this relay.
pub(super) fn publication(family: &SlotFamily, name: &str) -> Result<String> {
    let Some(shard) = family.shard else {
        return Ok(name.to_owned());
    };
    let name = shard.publication(name);
    match name.len() <= LONGEST_NAME_BYTES {
        true => Ok(name),
        false => {
            Err(setting_invalid("publication").hint("with `shard` take a name of at most 56 bytes"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Environment, Settings};
    use super::*;
    use crate::error::Code;

    fn load(pairs: &[(&str, &str)]) -> Result<Settings> {
        let env: Environment = pairs
            .iter()
            .map(|(k, v)| ((*k).into(), (*v).into()))
            .collect();
        Settings::load(None, &env, &[])
    }

    fn refused(pairs: &[(&str, &str)]) -> String {
        let error = load(pairs).unwrap_err();
        assert_eq!(error.code(), Code::SettingInvalid, "{error}");
        error.hint_text().to_owned()
    }

    #[test]
    fn a_shard_has_a_slot_and_a_publication_of_its_own() {
        let settings = load(&[("POSTRIDER_SHARD", "1/4"), ("POSTRIDER_PUBLICATION", "pub")]);
        let settings = settings.unwrap();
        assert_eq!(settings.slot.as_str(), "postrider_1of4");
        assert_eq!(settings.publication, "pub_1of4");
        assert_eq!(settings.family.base.as_str(), "postrider");
        assert_eq!(settings.shard(), Some("1/4".parse().unwrap()));
        let share = settings.captured()[0].share.clone().unwrap();
        assert_eq!(share.key, "aggregateid");
    }

    #[test]
    fn without_a_shard_the_names_are_as_they_are_set() {
        let settings = load(&[("POSTRIDER_SHARD", "")]).unwrap();
        assert_eq!(settings.slot.as_str(), "postrider");
        assert_eq!(settings.publication, "postrider");
        assert!(settings.shard().is_none() && settings.captured()[0].share.is_none());
    }

    #[test]
    fn what_is_no_shard_is_refused() {
        for shard in ["0", "1/1", "4/4", "0/17", "a/b"] {
            assert!(
                refused(&[("POSTRIDER_SHARD", shard)]).contains("0/4"),
                "{shard}"
            );
        }
    }

    #[test]
    fn shards_without_records_are_refused_with_the_reason() {
        let both = [
            ("POSTRIDER_SHARD", "0/2"),
            ("POSTRIDER_DISPATCH", "exceptions"),
        ];
        assert!(refused(&both).contains("dispatch = full"));
    }

    #[test]
    fn a_slot_with_the_name_of_a_shard_is_refused() {
        let hint = refused(&[("POSTRIDER_SLOT", "mine_0of2")]);
        assert!(hint.contains("--slot mine --shard 0/2"), "{hint}");
    }

    #[test]
    fn names_that_would_be_too_long_are_refused() {
        let long = "x".repeat(60);
        for name in ["POSTRIDER_SLOT", "POSTRIDER_PUBLICATION"] {
            assert!(load(&[(name, &long)]).is_ok());
            let hint = refused(&[(name, &long), ("POSTRIDER_SHARD", "15/16")]);
            assert!(hint.contains("bytes"), "{hint}");
        }
    }
}

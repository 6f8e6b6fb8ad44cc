//! The only source of randomness: the same seed gives the same draws on every machine.
//!
//! SplitMix64 (Steele, Lea, Flood 2014): a counter and a mixing function. We need no statistical
//! quality, but a seed must give the same schedules even after dependencies are upgraded.

use std::ops::RangeInclusive;
use std::time::Duration;

const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// A sequence of random numbers.
#[derive(Debug, Clone)]
pub(crate) struct Random {
    state: u64,
}

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The random numbers of schedule `index` in a run with this seed. The numbers of neighbouring
    /// schedules are unrelated.
    pub(crate) fn of_schedule(seed: u64, index: u64) -> Self {
        let mixed = Self::new(seed).draw() ^ index.wrapping_mul(STEP);
        Self::new(Self::new(mixed).draw())
    }

    /// A separate sequence, for a task that runs concurrently.
    pub(crate) fn fork(&mut self) -> Self {
        Self::new(self.draw())
    }

    pub(crate) fn draw(&mut self) -> u64 {
        self.state = self.state.wrapping_add(STEP);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn within(&mut self, range: RangeInclusive<u64>) -> u64 {
        let (low, high) = (*range.start(), *range.end());
        low + self.draw() % (high - low + 1)
    }

    pub(crate) fn millis(&mut self, range: RangeInclusive<u64>) -> Duration {
        Duration::from_millis(self.within(range))
    }

    /// Returns true in `chance` of 1,000 cases, on average.
    pub(crate) fn per_mille(&mut self, chance: u64) -> bool {
        self.within(1..=1_000) <= chance
    }

    pub(crate) fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.within(0..=from.len() as u64 - 1) as usize].clone()
    }

    /// Draws one of the values. A value with twice the weight is drawn twice as often.
    pub(crate) fn weighted<T: Clone>(&mut self, from: &[(u64, T)]) -> T {
        let total: u64 = from.iter().map(|(weight, _)| weight).sum();
        let mut left = self.within(1..=total);
        for (weight, value) in from {
            if left <= *weight {
                return value.clone();
            }
            left -= weight;
        }
        unreachable!("invariant: the draw is at most the sum of the weights")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_and_an_index_always_give_the_same_draws() {
        let draws = |seed, index| {
            let mut random = Random::of_schedule(seed, index);
            [random.draw(), random.draw(), random.draw()]
        };
        assert_eq!(draws(7, 3), draws(7, 3));
        assert_ne!(draws(7, 3), draws(7, 4));
        assert_ne!(draws(7, 3), draws(8, 3));
        // The published test vector of SplitMix64.
        assert_eq!(Random::new(1_234_567).draw(), 6_457_827_717_110_365_317);
    }

    #[test]
    fn every_value_of_a_range_and_of_a_choice_occurs() {
        let mut random = Random::new(1);
        let mut seen = [0; 4];
        for _ in 0..400 {
            seen[random.within(2..=5) as usize - 2] += 1;
        }
        assert!(seen.iter().all(|count| *count > 50), "{seen:?}");
        let heavy = (0..400).filter(|_| random.weighted(&[(9, true), (1, false)]));
        assert!((320..400).contains(&heavy.count()));
        let hits = (0..10_000).filter(|_| random.per_mille(100)).count();
        assert!((800..1_200).contains(&hits), "{hits}");
    }
}

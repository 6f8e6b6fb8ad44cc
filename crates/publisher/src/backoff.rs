//! Computes the pauses between attempts: exponential backoff with full jitter. The number of
//! attempts is not limited.

use std::time::Duration;

use super::Class;

/// The ceiling of the first pause. This is Google's own value for `Publish`.
const FIRST: Duration = Duration::from_millis(100);
/// The factor by which the ceiling grows after each failed attempt. This is Google's own value for `Publish`.
const GROWTH: u32 = 4;

/// Maximum ceiling of a pause. Google's maximum is 60 s. Ours is shorter, because a waiting request blocks
/// its key. Short pauses are safe, because the caller limits the concurrent requests, and so the number of
/// attempts during an outage.
const LAST: Duration = Duration::from_secs(10);

/// Maximum pause after a failure that only an operator can fix. The minimum is half of it. This
/// pause does not grow.
const ENVIRONMENT: Duration = Duration::from_secs(5);

/// Computes pauses. The jitter comes from a small random number generator (xorshift64*; Vigna
/// 2016), which the caller seeds.
#[derive(Debug, Clone)]
pub struct Backoff {
    state: u64,
}

impl Backoff {
    /// Creates a `Backoff` whose jitter depends only on `seed`.
    pub fn new(seed: u64) -> Self {
        Self { state: seed | 1 }
    }

    /// Returns how long to wait after a failure of this class. `failed_attempts` counts all failed
    /// attempts so far, including this one, so it is at least 1.
    pub fn pause(&mut self, class: Class, failed_attempts: u32) -> Duration {
        match class {
            Class::Environment => ENVIRONMENT / 2 + self.jitter(ENVIRONMENT / 2),
            Class::UnknownOutcome | Class::Throttled | Class::Content => {
                self.jitter(ceiling(failed_attempts))
            }
        }
    }

    /// Returns a uniformly random duration between zero and `ceiling`.
    fn jitter(&mut self, ceiling: Duration) -> Duration {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        let random = self.state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11;
        ceiling.mul_f64(random as f64 / (1u64 << 53) as f64)
    }
}

fn ceiling(failed_attempts: u32) -> Duration {
    let growth = GROWTH.saturating_pow(failed_attempts.saturating_sub(1));
    FIRST.saturating_mul(growth).min(LAST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ceiling_grows_fourfold_up_to_ten_seconds_and_never_overflows() {
        let ceilings: Vec<u128> = [1, 2, 3, 4, 5, u32::MAX]
            .map(|n| ceiling(n).as_millis())
            .into();
        assert_eq!(ceilings, [100, 400, 1_600, 6_400, 10_000, 10_000]);
    }

    #[test]
    fn pauses_spread_over_the_whole_range() {
        let mut backoff = Backoff::new(7);
        let pauses: Vec<_> = (0..1_000)
            .map(|_| backoff.pause(Class::UnknownOutcome, 9))
            .collect();
        assert!(pauses.iter().all(|pause| *pause <= LAST));
        assert!(pauses.iter().any(|pause| *pause < LAST / 10));
        assert!(pauses.iter().any(|pause| *pause > LAST / 10 * 9));
    }
}

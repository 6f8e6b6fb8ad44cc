//! How many requests may be on their way: halved at each failure that is everybody's, doubled
//! back by success.
//!
//! During an outage this leaves one request at a time to ask whether Pub/Sub is back, instead of
//! a storm; a few answers later everything flows again.

#[derive(Debug, Clone, Copy)]
pub(super) struct Concurrency {
    limit: usize,
    max: usize,
}

impl Concurrency {
    pub(super) fn new(max: usize) -> Self {
        let max = max.max(1);
        Self { limit: max, max }
    }

    pub(super) fn limit(self) -> usize {
        self.limit
    }

    pub(super) fn max(self) -> usize {
        self.max
    }

    pub(super) fn succeeded(&mut self) {
        self.limit = (self.limit * 2).min(self.max);
    }

    pub(super) fn failed(&mut self) {
        self.limit = (self.limit / 2).max(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_leaves_one_probe_and_success_brings_all_back() {
        let mut concurrency = Concurrency::new(500);
        (0..100).for_each(|_| concurrency.failed());
        assert_eq!(concurrency.limit(), 1);
        (0..9).for_each(|_| concurrency.succeeded());
        assert_eq!(concurrency.limit(), 500);
    }
}

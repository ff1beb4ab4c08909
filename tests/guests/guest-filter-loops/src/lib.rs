//! Loops endlessly at the query `loop`, and for as many turns as a numeric query says. Drops repeated queries of a batch.

use querl_sdk::{Filter, Sample, SettingError, Settings, Verdict};
use std::collections::HashSet;

struct Guest {
    seen: HashSet<String>,
}

impl Filter for Guest {
    fn new(_: &Settings) -> Result<Self, SettingError> {
        Ok(Self { seen: HashSet::new() })
    }

    fn check(&mut self, sample: &Sample) -> Verdict {
        let n_turns = match sample.original_query.as_str() {
            "loop" => u64::MAX,
            query => query.parse().unwrap_or(0),
        };
        let mut turn = 0;
        while turn < n_turns {
            turn = std::hint::black_box(turn + 1);
        }
        match self.seen.insert(sample.original_query.clone()) {
            true => Verdict::Keep,
            false => Verdict::drop("duplicate", "seen before in this batch"),
        }
    }
}

querl_sdk::export!(filter: Guest);

//! Never returns for a sample whose query is `loop`; drops a sample whose query came before in the batch.

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
        if sample.original_query == "loop" {
            let mut turns = 0_u64;
            loop {
                turns = std::hint::black_box(turns.wrapping_add(1));
            }
        }
        match self.seen.insert(sample.original_query.clone()) {
            true => Verdict::Keep,
            false => Verdict::drop("duplicate", "seen before in this batch"),
        }
    }
}

querl_sdk::export!(filter: Guest);

//! Panics at a query with the word 蓝鲸海藻, and if the host does not segment the query.

use querl_sdk::{Filter, Sample, SettingError, Settings, Verdict, host};

struct Guest;

impl Filter for Guest {
    fn new(_: &Settings) -> Result<Self, SettingError> {
        Ok(Self)
    }

    fn check(&mut self, sample: &Sample) -> Verdict {
        let words = host::words(&sample.original_query).expect("the host segments words");
        assert!(!words.contains(&"蓝鲸海藻".to_owned()), "has the word 蓝鲸海藻");
        Verdict::Keep
    }
}

querl_sdk::export!(filter: Guest);

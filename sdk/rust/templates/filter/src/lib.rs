//! Drops samples whose rewrite is too long.

use querl_sdk::{Filter, Sample, SettingError, Settings, Verdict};

struct Length {
    max_chars: usize,
}

impl Filter for Length {
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        Ok(Self {
            max_chars: settings.integer("max_chars", 40, 1..=1000)? as usize,
        })
    }

    fn check(&mut self, sample: &Sample) -> Verdict {
        let n_chars = sample.rewritten_query.chars().count();
        if n_chars <= self.max_chars {
            return Verdict::Keep;
        }
        Verdict::drop(
            "too_long",
            format!("{n_chars} characters; at most {} allowed", self.max_chars),
        )
    }
}

querl_sdk::export!(filter: Length);

#[cfg(test)]
mod tests;

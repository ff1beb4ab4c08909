//! Filter of the training data: drops samples whose rewrite has more than `max_chars` characters.

use querl_sdk::{Filter, Sample, SettingError, Settings, Verdict};

/// The filter with its settings. querl makes one value per batch of samples.
struct Length {
    max_chars: usize,
}

impl Filter for Length {
    /// Reads all settings, each with its default and range. querl refuses a key that is not read.
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        Ok(Self {
            max_chars: settings.integer("max_chars", 40, 1..=1000)? as usize,
        })
    }

    /// The verdict on one sample. It may depend on earlier samples of the batch: for example, store
    /// their queries in `self` to find duplicates.
    fn check(&mut self, sample: &Sample) -> Verdict {
        let n_chars = sample.rewritten_query.chars().count();
        if n_chars <= self.max_chars {
            return Verdict::Keep;
        }
        // The code is counted in the report of the run; the sentence is for people.
        Verdict::drop(
            "too_long",
            format!("{n_chars} characters; at most {} allowed", self.max_chars),
        )
    }
}

querl_sdk::export!(filter: Length);

#[cfg(test)]
mod tests;

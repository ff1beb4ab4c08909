//! Whether rows fit a model: looked at before it trains or writes, with the row's place in the query table.

use crate::failure::Stop;
use querl_core::records::{DatasetRow, Split};

/// What bounds a row's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// `sft.max_length`.
    SftMaxLength(usize),
    /// Positions of the model, of which an answer may take `rl.max_new_tokens`.
    Written(usize),
    /// Positions of the model, the answer being known.
    Learned(usize),
}

/// Tokens of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowLength {
    /// Of the prompt.
    pub prompt: usize,
    /// Of the answer, or what it may take.
    pub answer: usize,
}

impl Limit {
    fn n_tokens(self) -> usize {
        match self {
            Self::SftMaxLength(n) | Self::Written(n) | Self::Learned(n) => n,
        }
    }

    fn advice(self) -> String {
        match self {
            Self::SftMaxLength(n) => format!("sft.max_length is {n}: shorten the row or raise the limit"),
            Self::Written(n) => format!("the model has {n} positions: shorten the row or lower rl.max_new_tokens"),
            Self::Learned(n) => format!("the model has {n} positions: shorten the row"),
        }
    }
}

/// Looks at every row of one split.
///
/// # Errors
/// A row exceeds a limit.
pub fn check<'a>(
    split: Split,
    rows: impl IntoIterator<Item = (&'a DatasetRow, RowLength)>,
    limits: &[Limit],
) -> Result<(), Stop> {
    for (row, length) in rows {
        let n_tokens = length.prompt + length.answer;
        if let Some(limit) = limits.iter().find(|limit| n_tokens > limit.n_tokens()) {
            let (row, RowLength { prompt, answer }) = (row.metadata.query.row, length);
            return Err(Stop::usage(format!(
                "row {row} of the query table ({} split) makes {n_tokens} tokens, {prompt} of prompt and {answer} of answer; {}",
                split.name(),
                limit.advice()
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::environment::testing::dataset_row;

    #[test]
    fn row_that_does_not_fit_is_named_as_the_spreadsheet_shows_it() {
        let row = dataset_row("a");
        let rows = || [(&row, RowLength { prompt: 90, answer: 11 })];
        check(Split::Train, rows(), &[Limit::SftMaxLength(101), Limit::Learned(101)]).unwrap();
        let refusal = |limit| check(Split::Train, rows(), &[limit]).unwrap_err().to_string();
        let place = "row 2 of the query table (train split) makes 101 tokens, 90 of prompt and 11 of answer; ";
        let advice = "sft.max_length is 100: shorten the row or raise the limit";
        assert_eq!(refusal(Limit::SftMaxLength(100)), format!("{place}{advice}"));
        let advice = "the model has 64 positions: shorten the row or lower rl.max_new_tokens";
        assert_eq!(refusal(Limit::Written(64)), format!("{place}{advice}"));
    }
}

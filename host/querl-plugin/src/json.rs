//! Batches as JSON: the encoding of `json-rewards.wit`, which is that of `episodes.jsonl`.

use crate::contract::ItemResult;
use crate::packed::FormError;
use crate::text::printable;
use querl_core::records::{EpisodeRef, Rejection, Reward};
use serde::Deserialize;

/// Encodes episodes as the argument of `score-json`.
pub(crate) fn batch(episodes: &[EpisodeRef<'_>]) -> Result<String, FormError> {
    serde_json::to_string(episodes).map_err(|error| FormError::Json(error.to_string()))
}

/// Decodes the result of `score-json`. Its size was limited before; serde_json limits the nesting.
pub(crate) fn results(text: &str) -> Result<Vec<ItemResult>, FormError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Outcome {
        Scored(Reward),
        Rejected(Rejection),
    }
    let outcomes: Vec<Outcome> =
        serde_json::from_str(text).map_err(|error| FormError::Json(printable(&error.to_string(), 200)))?;
    let result = |outcome| match outcome {
        Outcome::Scored(reward) => Ok(reward),
        Outcome::Rejected(rejection) => Err(rejection),
    };
    Ok(outcomes.into_iter().map(result).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_read_as_the_contract_writes_them() {
        let text = r#"[{"scored":{"total":0.5,"components":[{"name":"x","value":1}]}},{"rejected":{"code":"late","detail":"晚"}}]"#;
        let results = results(text).unwrap();
        let score = results[0].as_ref().unwrap();
        assert_eq!((score.total, score.components[0].name.as_str(), score.components[0].value), (0.5, "x", 1.0));
        assert_eq!(results[1].as_ref().unwrap_err().code, "late");
    }

    #[test]
    fn garbage_is_refused() {
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        for text in
            ["", "{}", "[NaN]", r#"[{"scored":{"total":NaN}}]"#, r#"[{"scored":{"total":1e999}}]"#, "[{}]", &deep]
        {
            let message = results(text).unwrap_err().to_string();
            assert!(message.starts_with("its JSON of results: "), "{message}");
        }
    }
}

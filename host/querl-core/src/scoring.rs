//! Scoring of responses for other trainers: the request that a reward function sends, and the service that answers it.

use crate::ports::{EnvironmentError, RewardRange};
use crate::records::{Columns, EpisodeRecord, Message, Split};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// A response to score.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RewardRequest {
    /// The query that the policy answered.
    pub query: RewardQuery,
    /// The decoded response without special tokens.
    pub response: String,
    /// Whether the finish reason is the token limit.
    #[serde(default)]
    pub truncated: bool,
    /// Number of generated tokens, end of sequence included; 0 where unknown.
    #[serde(default)]
    pub n_tokens: u32,
    /// The messages that the policy answered; `None` for the prompt of the query's row.
    pub prompt: Option<Vec<Message>>,
    /// Training step; `None` where unknown.
    pub step: Option<u64>,
    /// Episode id, unique in a batch; with `judge.sample_rate` below 1 it decides whether the response is judged. `None`: derived from
    /// step, query and sample index, or from the response.
    pub id: Option<String>,
    /// Group id, the same for all samples of one query in one batch; `None`: derived from step and query.
    pub group_id: Option<String>,
    /// Index among the samples of the group, from 0; `None`: in the order of the requests.
    pub sample_index: Option<u32>,
}

/// The query of a [`RewardRequest`]: the id of a query of the run, or a query that the request contains.
#[derive(Debug, Clone, PartialEq)]
pub enum RewardQuery {
    /// Id of a query of the run.
    Id(String),
    /// The query itself.
    Inline(Box<InlineQuery>),
}

/// A query that a [`RewardRequest`] contains, instead of the id of one of the run.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InlineQuery {
    /// The user's query.
    #[serde(deserialize_with = "not_blank")]
    pub query: String,
    /// User profile; may be empty.
    #[serde(default)]
    pub user_profile: String,
    /// Summary of the conversation; may be empty.
    #[serde(default)]
    pub history_summary: String,
    /// Ids of the passages that answer the query; empty if unknown.
    #[serde(default)]
    pub gold_ids: Vec<String>,
    /// Split of the query; `None` for `train`.
    pub split: Option<Split>,
    /// Further columns of the query's row, for rewards that read them.
    #[serde(default)]
    pub columns: Columns,
    /// The teacher's rewrite, for rewards that read it; `None` if there is none.
    pub baseline: Option<String>,
    /// What the edit `&` stands for; `None`: the query and its history summary.
    pub expansion: Option<String>,
}

fn not_blank<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let query = String::deserialize(deserializer)?;
    if query.trim().is_empty() {
        return Err(D::Error::custom("`query` is empty; expected the user's query"));
    }
    Ok(query)
}

impl RewardQuery {
    /// Parses the label of a row in another trainer's dataset: the id of a query, or an [`InlineQuery`] as a JSON object or as the text
    /// of one.
    /// Columns keep their order in a text; in a [`Value`] they are sorted by name.
    ///
    /// # Errors
    /// A sentence: the label is neither an id nor an object with `query`.
    pub fn of_label(label: &Value) -> Result<Self, String> {
        Self::deserialize(label).map_err(|error| error.to_string())
    }

    fn of_text(text: &str) -> Result<Self, serde_json::Error> {
        match text.trim_start().starts_with('{') {
            true => serde_json::from_str(text).map(|query| Self::Inline(Box::new(query))),
            false => Ok(Self::Id(text.to_owned())),
        }
    }
}

impl<'de> Deserialize<'de> for RewardQuery {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Label;

        impl<'de> Visitor<'de> for Label {
            type Value = RewardQuery;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("the id of a query of the run, or an object with `query`")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<RewardQuery, E> {
                RewardQuery::of_text(text).map_err(|error| {
                    E::custom(format!("{error}; expected the id of a query, or an object with `query`"))
                })
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<RewardQuery, A::Error> {
                let query = InlineQuery::deserialize(MapAccessDeserializer::new(map))?;
                Ok(RewardQuery::Inline(Box::new(query)))
            }
        }

        deserializer.deserialize_any(Label)
    }
}

/// Scores the responses of other trainers with the retrieval, judge and rewards of a configuration.
pub trait RewardService: Send + Sync {
    /// Parses, retrieves, judges and scores as in training; returns one record per request, in order. Requests of one `group_id` must be
    /// in one batch if a reward scores groups. Blocks on external services.
    ///
    /// # Errors
    /// A request names a query that the run does not have, or no request can be scored.
    fn score(&self, requests: &[RewardRequest]) -> Result<Vec<EpisodeRecord>, EnvironmentError>;

    /// The range of the total score.
    fn range(&self) -> RewardRange;
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn columns(query: &RewardQuery) -> Vec<&str> {
        match query {
            RewardQuery::Inline(query) => query.columns.0.iter().map(|(name, _)| name.as_str()).collect(),
            RewardQuery::Id(id) => panic!("{id}"),
        }
    }

    #[test]
    fn a_label_is_an_id_an_object_or_the_text_of_one() {
        assert_eq!(RewardQuery::of_label(&json!("4cf6")).unwrap(), RewardQuery::Id("4cf6".into()));
        let text = r#"{"query": "一天几粒", "columns": {"shop": "五家", "price": 2.5}}"#;
        assert_eq!(columns(&RewardQuery::of_label(&json!(text)).unwrap()), ["shop", "price"]);
        let request: RewardRequest =
            serde_json::from_str(&format!(r#"{{"query": {text}, "response": "鱼油"}}"#)).unwrap();
        assert_eq!(columns(&request.query), ["shop", "price"], "in the order of the text");
    }

    #[test]
    fn another_label_is_refused_with_what_is_expected() {
        for label in
            [json!(["4cf6"]), json!(7), json!(null), json!("{\"quer\": 1}"), json!({"query": 3}), json!({"query": " "})]
        {
            let refusal = RewardQuery::of_label(&label).unwrap_err();
            assert!(refusal.contains("expected"), "{label}: {refusal}");
        }
    }
}

//! What is said across the border, as JSON.

use crate::{Answered, Failure, Outcome};
use querl_core::ports::{PolicyResponse, ScoredResponses};
use querl_core::records::Split;
use querl_train::Metrics;
use serde::{Deserialize, Serialize};

/// What a library says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// Of the program that it was built with.
    pub version: String,
    /// The CUDA that it was built with, such as 13000 for 13.0; `None` of a library whose only device is the processor.
    pub cuda: Option<u32>,
    /// Compute capabilities that its kernels were compiled for, such as 90.
    pub capabilities: Vec<u32>,
}

/// What the library tells the host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// As [`Progress::update`](querl_core::ports::Progress::update).
    Update {
        /// Units done.
        n_done: u64,
        /// Of so many.
        n_total: u64,
        /// A short live figure.
        note: String,
    },
    /// One line that stays on screen.
    Line(String),
}

/// What the library asks of the host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// [`Host::record`](crate::Host::record).
    Record {
        /// `sft` or `rl`.
        stage: String,
        /// Which step.
        step: u64,
        /// Its figures, finite or not.
        #[serde(with = "figures")]
        metrics: Metrics,
    },
    /// [`Host::mark_metrics`](crate::Host::mark_metrics).
    MarkMetrics,
    /// [`Host::rewind_metrics`](crate::Host::rewind_metrics).
    RewindMetrics(u64),
    /// [`Host::score`](crate::Host::score).
    Score {
        /// Whose rows.
        split: Split,
        /// Under which the episodes are recorded.
        step: u64,
        /// What is scored.
        responses: Vec<PolicyResponse>,
    },
    /// [`Host::mark_episodes`](crate::Host::mark_episodes).
    MarkEpisodes(Split),
    /// [`Host::rewind_episodes`](crate::Host::rewind_episodes).
    RewindEpisodes {
        /// Whose log.
        split: Split,
        /// To where.
        mark: u64,
    },
    /// [`Host::take`](crate::Host::take).
    Take(Vec<Answered>),
}

/// What the host answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// It is done.
    Done,
    /// How far a log has come.
    Mark(u64),
    /// One record per response.
    Scored(ScoredResponses),
}

/// How a job ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// It is done.
    Done(Outcome),
    /// It failed by itself.
    Failed(Failure),
    /// The host could not do what it was asked for; it knows its error, and these are its words.
    OfHost(String),
}

/// Figures by name. JSON has no number for what is not finite, and a figure may be just that.
mod figures {
    use querl_train::Metrics;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
    use std::collections::BTreeMap;

    #[derive(Serialize, Deserialize)]
    #[serde(untagged)]
    enum Figure {
        Finite(f64),
        Other(String),
    }

    pub(super) fn serialize<S: Serializer>(metrics: &Metrics, serializer: S) -> Result<S::Ok, S::Error> {
        let figure =
            |value: f64| if value.is_finite() { Figure::Finite(value) } else { Figure::Other(value.to_string()) };
        serializer.collect_map(metrics.iter().map(|(name, value)| (name, figure(*value))))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Metrics, D::Error> {
        let figures = BTreeMap::<String, Figure>::deserialize(deserializer)?;
        let value = |figure| match figure {
            Figure::Finite(value) => Ok(value),
            Figure::Other(text) => text.parse().map_err(|_| D::Error::custom(format!("`{text}` is no number"))),
        };
        figures.into_iter().map(|(name, figure)| Ok((name, value(figure)?))).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn figures_cross_to_the_last_bit_and_infinite_ones_too() {
        let values = [0.1 + 0.2, -0.0, f64::MIN_POSITIVE, 1e300, f64::INFINITY, f64::NEG_INFINITY, 7.0];
        let metrics: Metrics = values.iter().enumerate().map(|(index, value)| (format!("v{index}"), *value)).collect();
        let sent = Request::Record { stage: "sft".into(), step: 3, metrics };
        let text = serde_json::to_string(&sent).unwrap();
        let got: Request = serde_json::from_str(&text).unwrap();
        let Request::Record { metrics, .. } = &got else { panic!("{got:?}") };
        let bits: Vec<u64> = metrics.values().map(|value| value.to_bits()).collect();
        assert_eq!(bits, values.map(f64::to_bits));
        let nan = Request::Record { stage: "rl".into(), step: 1, metrics: Metrics::from([("v".into(), f64::NAN)]) };
        let got: Request = serde_json::from_str(&serde_json::to_string(&nan).unwrap()).unwrap();
        let Request::Record { metrics, .. } = got else { panic!("no record") };
        assert!(metrics["v"].is_nan());
    }
}

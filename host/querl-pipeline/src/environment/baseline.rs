//! What the policy is compared with: the teacher's rewrites and what they found.

use querl_core::records::{CallFailure, FailureKind, Hit, ValidatedRecord};
use std::collections::HashMap;

/// The teacher's side for one query.
#[derive(Debug, Clone, PartialEq)]
pub enum Baseline {
    /// The teacher answered.
    Rewritten {
        /// Its rewrite.
        rewrite: String,
        /// What retrieval found with it earlier; `None` where that failed: it is asked again.
        hits: Option<Vec<Hit>>,
        /// Price of the rewrite; `None` where unknown.
        cost: Option<f64>,
        /// Time it took in milliseconds; `None` where unknown.
        latency_ms: Option<f64>,
    },
    /// The teacher gave no answer.
    Missing(CallFailure),
}

/// The teacher's side by query id.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Baselines(HashMap<String, Baseline>);

impl Baselines {
    /// From what the validate stage left. A rewrite that the filters dropped later is still what the teacher wrote.
    pub fn new(records: Vec<ValidatedRecord>) -> Self {
        let by_id = records.into_iter().map(|record| {
            let id = record.rewritten.query.id.clone();
            let baseline = match record.rewritten.rewrite {
                Err(failure) => Baseline::Missing(failure),
                Ok(completion) => Baseline::Rewritten {
                    rewrite: completion.text,
                    hits: record.retrieval.and_then(Result::ok),
                    cost: completion.cost,
                    latency_ms: completion.latency_ms,
                },
            };
            (id, baseline)
        });
        Self(by_id.collect())
    }

    /// The teacher's side for one query.
    pub fn of(&self, query_id: &str) -> Baseline {
        self.0.get(query_id).cloned().unwrap_or_else(|| {
            let message = "the teacher was never asked about this query".into();
            Baseline::Missing(CallFailure { kind: FailureKind::NotRecorded, message })
        })
    }
}

//! Costs of calls to embedding, reranking and retrieval services: the bound that is reserved before a call, and the charge of its response.

use crate::client::http::CostBound;
use crate::client::spend::Usage;
use querl_core::config::ServicePrice;
use serde_json::Value;

/// What one call is charged for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallCharge {
    pub(crate) n_calls: u64,
    pub(crate) n_tokens: u64,
    pub(crate) is_estimated: bool,
}

impl CallCharge {
    /// Of a service that charges calls and not tokens.
    pub(crate) const ONE_CALL: Self = Self { n_calls: 1, n_tokens: 0, is_estimated: false };

    /// `estimate`, with the counts that the response states instead.
    ///
    /// OpenAI, vLLM and Jina state `usage`, Cohere `meta.billed_units`.
    pub(crate) fn stated(response: &Value, estimate: Self) -> Self {
        let count = |pointers: &[&str]| pointers.iter().find_map(|pointer| response.pointer(pointer)?.as_u64());
        let n_tokens = count(&["/usage/prompt_tokens", "/usage/total_tokens", "/meta/billed_units/input_tokens"]);
        // A larger number is no count of the tokens of this call.
        let n_tokens = n_tokens.filter(|n_tokens| *n_tokens <= 1_000 + 8 * estimate.n_tokens);
        let n_calls = count(&["/meta/billed_units/search_units"]).filter(|n_calls| *n_calls <= 1_000);
        Self {
            n_calls: n_calls.unwrap_or(estimate.n_calls),
            n_tokens: n_tokens.unwrap_or(estimate.n_tokens),
            is_estimated: n_tokens.is_none() && estimate.is_estimated,
        }
    }

    pub(crate) fn bound(self, price: Option<ServicePrice>) -> CostBound {
        let max_cost = price.map_or(0.0, |price| self.cost(price));
        CostBound { n_tokens: self.n_tokens, max_cost }
    }

    pub(crate) fn usage(self, price: Option<ServicePrice>) -> Usage {
        let cost = price.map(|price| self.cost(price));
        Usage { prompt_tokens: self.n_tokens, completion_tokens: 0, is_estimated: self.is_estimated, cost }
    }

    fn cost(self, price: ServicePrice) -> f64 {
        price.cost(self.n_calls as f64, self.n_tokens as f64)
    }
}

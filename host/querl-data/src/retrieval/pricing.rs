//! Cost of calls to embedding, reranking and retrieval services: the upper bound that is reserved before a call, and the actual charge.

use crate::client::http::CostBound;
use crate::client::spend::Usage;
use querl_core::config::ServicePrice;
use serde_json::Value;

/// Tokens that a service adds to a text at most: special tokens, and an instruction.
const MAX_ADDED_TOKENS: u64 = 256;

/// Upper bound of the number of tokens of a text with `n_bytes` bytes of UTF-8, as each token has at least one byte.
pub(crate) fn max_tokens(n_bytes: usize) -> u64 {
    n_bytes as u64 + MAX_ADDED_TOKENS
}

/// The calls and tokens that a service charges for one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallCharge {
    pub(crate) n_calls: u64,
    pub(crate) n_tokens: u64,
    pub(crate) is_estimated: bool,
}

impl CallCharge {
    /// The charge of a service that is paid per call and not per token.
    pub(crate) const ONE_CALL: Self = Self { n_calls: 1, n_tokens: 0, is_estimated: false };

    /// The counts that the response reports, or those of `estimate` for counts that it does not report. A reported count of 0 or above
    /// `max_charge` is ignored.
    ///
    /// OpenAI, vLLM and Jina state `usage`, Cohere `meta.billed_units`.
    pub(crate) fn stated(response: &Value, estimate: Self, max_charge: Self) -> Self {
        let count = |pointers: &[&str], max: u64| {
            let mut stated = pointers.iter().filter_map(|pointer| response.pointer(pointer)?.as_u64());
            stated.find(|count| (1..=max).contains(count))
        };
        let of_tokens = ["/usage/prompt_tokens", "/usage/total_tokens", "/meta/billed_units/input_tokens"];
        let n_tokens = count(&of_tokens, max_charge.n_tokens);
        let n_calls = count(&["/meta/billed_units/search_units"], max_charge.n_calls);
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

//! Samples of trained models for pass@k: whether a gold passage would be found if a query were rewritten several times.

use crate::environment::Scorer;
use crate::interrupt;
use crate::training::LocalModel;
use querl_core::ports::{EnvironmentError, Progress};
use querl_core::records::{DatasetRow, EvalRecord, Hit, QueryRow, SampleCounts};
use querl_train::job::GeneratedResponse;

/// Queries per batch.
const N_ROWS_AT_ONCE: usize = 16;

/// Samples responses of a model to `rows` and adds their counts to `records`, the model's answers to the same rows in order. Queries without
/// gold passages are sampled for no count and left out.
///
/// # Errors
/// Generation, the prompt plugin or every retrieval fails.
pub(crate) fn add(
    model: &LocalModel<'_>,
    rows: &[DatasetRow],
    records: &mut [EvalRecord],
    scorer: &Scorer,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let places: Vec<usize> = (0..rows.len()).filter(|index| !rows[*index].metadata.query.gold_ids.is_empty()).collect();
    let sampled: Vec<DatasetRow> = places.iter().map(|index| rows[*index].clone()).collect();
    let mut counts: Vec<Option<SampleCounts>> = Vec::new();
    model.respond(&sampled, N_ROWS_AT_ONCE, &mut |responses| {
        // Calls in flight are paid for.
        let _at_safe_points = interrupt::at_safe_points();
        for responses in responses {
            let query = &sampled[counts.len()].metadata.query;
            counts.push(count(query, &responses, scorer)?);
        }
        progress.update(counts.len() as u64, sampled.len() as u64, "samples for pass@k");
        Ok(interrupt::check()?)
    })?;
    for (place, counts) in places.into_iter().zip(counts) {
        if let Ok(answer) = &mut records[place].outcome {
            answer.samples = counts;
        }
    }
    Ok(())
}

/// `None` for a service that returns no passage ids.
fn count(
    query: &QueryRow,
    responses: &[GeneratedResponse],
    scorer: &Scorer,
) -> Result<Option<SampleCounts>, EnvironmentError> {
    let parse = |response: &GeneratedResponse| Ok(scorer.read(&query.original_query, &response.text)?);
    let rewrites = responses.iter().map(parse).collect::<Result<Vec<String>, EnvironmentError>>()?;
    let searched: Vec<(&QueryRow, &str)> =
        rewrites.iter().filter(|rewrite| !rewrite.trim().is_empty()).map(|rewrite| (query, rewrite.as_str())).collect();
    let found: Vec<Vec<Hit>> = scorer.hits_of(&searched)?.into_iter().map(Result::unwrap_or_default).collect();
    if found.iter().flatten().any(|hit| hit.id.is_empty()) {
        return Ok(None);
    }
    let is_gold_first = |hits: &&Vec<Hit>| hits.first().is_some_and(|hit| query.gold_ids.contains(&hit.id));
    Ok(Some(SampleCounts { n: responses.len(), n_gold_first: found.iter().filter(is_gold_first).count() }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::environment::Services;
    use crate::environment::testing::{Shop, query};
    use querl_core::responses::ResponseForm;

    fn response(text: &str) -> GeneratedResponse {
        GeneratedResponse { text: text.into(), n_tokens: 2, truncated: false, latency_ms: None, mean_logprob: None }
    }

    /// The shop finds `p1` with every rewrite but `broken`; `garbage` is no rewrite.
    #[test]
    fn unreadable_samples_and_failed_retrievals_are_misses() {
        let mut query = query("a");
        query.gold_ids = vec!["p1".into()];
        let responses = ["good", "poor", "broken", "garbage"].map(response);
        let counts = count(&query, &responses, &Shop::default().scorer()).unwrap();
        assert_eq!(counts, Some(SampleCounts { n: 4, n_gold_first: 2 }));
        let response_form = ResponseForm { enable_thinking: Some(true), ..ResponseForm::default() };
        let shop = Shop::default();
        let thinking = shop.scorer_with(Services { response_form, ..shop.services() });
        let responses_of_thought = ["good", "<think>", "<think>?</think>\n\npoor", "</think>garbage"].map(response);
        let counts = count(&query, &responses_of_thought, &thinking).unwrap();
        assert_eq!(counts, Some(SampleCounts { n: 4, n_gold_first: 1 }));
        query.gold_ids = vec!["p2".into()];
        let counts = count(&query, &responses, &Shop::default().scorer()).unwrap();
        assert_eq!(counts, Some(SampleCounts { n: 4, n_gold_first: 0 }));
    }
}

//! Samples of trained models for pass@k: the probability that at least one of k sampled rewrites of a query retrieves a gold passage.

use crate::environment::Scorer;
use crate::interrupt;
use crate::training::LocalModel;
use querl_core::ports::{EnvironmentError, Progress};
use querl_core::records::{DatasetRow, EvalRecord, Hit, QueryRow, SampleCounts};
use querl_train::job::GeneratedResponse;

const N_ROWS_AT_ONCE: usize = 16;

/// Samples responses of a model to `rows` and adds the pass@k counts to `records`, the evaluation records of the same rows in the same
/// order. Queries without gold passages are left out. Returns the number of samples whose retrieval failed, which are not counted.
///
/// # Errors
/// Generation, the prompt plugin or every retrieval fails.
pub(crate) fn add(
    model: &LocalModel<'_>,
    rows: &[DatasetRow],
    records: &mut [EvalRecord],
    scorer: &Scorer,
    progress: &dyn Progress,
) -> anyhow::Result<u64> {
    let places: Vec<usize> = (0..rows.len()).filter(|index| !rows[*index].metadata.query.gold_ids.is_empty()).collect();
    let sampled: Vec<DatasetRow> = places.iter().map(|index| rows[*index].clone()).collect();
    let mut counts: Vec<Option<SampleCounts>> = Vec::new();
    let mut n_failed = 0;
    model.respond(&sampled, N_ROWS_AT_ONCE, &mut |responses| {
        // Calls in flight are paid for.
        let _at_safe_points = interrupt::at_safe_points();
        for responses in responses {
            let query = &sampled[counts.len()].metadata.query;
            let (counted, n_failed_samples) = count(query, &responses, scorer)?;
            counts.push(counted);
            n_failed += n_failed_samples as u64;
        }
        progress.update(counts.len() as u64, sampled.len() as u64, "samples for pass@k");
        Ok(interrupt::check()?)
    })?;
    for (place, counts) in places.into_iter().zip(counts) {
        if let Ok(answer) = &mut records[place].outcome {
            answer.samples = counts;
        }
    }
    Ok(n_failed)
}

/// Counts of the samples whose retrieval succeeded, and the number of the others. `None` without a sample that can be counted, or for a
/// service that returns no passage ids.
fn count(
    query: &QueryRow,
    responses: &[GeneratedResponse],
    scorer: &Scorer,
) -> Result<(Option<SampleCounts>, usize), EnvironmentError> {
    let parse = |response: &GeneratedResponse| Ok(scorer.read(query, &response.text)?);
    let rewrites = responses.iter().map(parse).collect::<Result<Vec<String>, EnvironmentError>>()?;
    let searched: Vec<(&QueryRow, &str)> =
        rewrites.iter().filter(|rewrite| !rewrite.trim().is_empty()).map(|rewrite| (query, rewrite.as_str())).collect();
    let n_searched = searched.len();
    let found: Vec<Vec<Hit>> = scorer.hits_of(&searched)?.into_iter().filter_map(Result::ok).collect();
    let n_failed = n_searched - found.len();
    let n = responses.len() - n_failed;
    if n == 0 || found.iter().flatten().any(|hit| hit.id.is_empty()) {
        return Ok((None, n_failed));
    }
    let is_gold_first = |hits: &&Vec<Hit>| hits.first().is_some_and(|hit| query.gold_ids.contains(&hit.id));
    Ok((Some(SampleCounts { n, n_gold_first: found.iter().filter(is_gold_first).count() }), n_failed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::Services;
    use crate::environment::testing::{Shop, query};
    use querl_core::responses::ResponseForm;

    fn response(text: &str) -> GeneratedResponse {
        GeneratedResponse { text: text.into(), n_tokens: 2, truncated: false, latency_ms: None, mean_logprob: None }
    }

    /// The fake retrieval returns `p1` for every rewrite but `broken`; `garbage` cannot be parsed.
    #[test]
    fn unreadable_samples_are_misses_and_failed_retrievals_are_not_counted() {
        let mut query = query("a");
        query.gold_ids = vec!["p1".into()];
        let responses = ["good", "poor", "broken", "garbage"].map(response);
        let counts = count(&query, &responses, &Shop::default().scorer()).unwrap();
        assert_eq!(counts, (Some(SampleCounts { n: 3, n_gold_first: 2 }), 1));
        let response_form = ResponseForm { enable_thinking: Some(true), ..ResponseForm::default() };
        let shop = Shop::default();
        let thinking = shop.scorer_with(Services { response_form, ..shop.services() });
        let responses_of_thought = ["good", "<think>", "<think>?</think>\n\npoor", "</think>garbage"].map(response);
        let counts = count(&query, &responses_of_thought, &thinking).unwrap();
        assert_eq!(counts, (Some(SampleCounts { n: 4, n_gold_first: 1 }), 0));
        query.gold_ids = vec!["p2".into()];
        let counts = count(&query, &responses, &Shop::default().scorer()).unwrap();
        assert_eq!(counts, (Some(SampleCounts { n: 3, n_gold_first: 0 }), 1));
        let broken = [response("broken")];
        assert_eq!(count(&query, &broken, &Shop::default().scorer()).unwrap(), (None, 1));
    }
}

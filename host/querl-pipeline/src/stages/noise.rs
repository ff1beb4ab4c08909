//! Check whether the model after SFT produces noise: whether it predicts the rewrites of the validation split hardly better than their
//! token frequencies do. A model that ended SFT with an eval loss of 5.6 nats repeated a single character, and RL found nothing to reward.

use crate::failure::Stop;
use crate::ledger::{Facts, Ledger, StageName};
use crate::run::Run;
use querl_core::config::{OnNoise, RewriteForm};
use querl_train::Example;
use std::collections::BTreeMap;

/// Name of the figure with the loss of the best checkpoint on the validation split, in nats per token.
pub(super) const EVAL_LOSS: &str = "eval loss";
/// Name of the figure with the [`unigram_loss`] of the validation split.
pub(super) const UNIGRAM_LOSS: &str = "unigram loss";

/// Name of the figure with the [`equal_share`] of the training targets, if it is at least a half.
pub(super) const EQUAL_TARGETS: &str = "equal targets";

/// Optimizer steps with the defaults (3 epochs, 16 rows per step) on 240 training rows, the expected minimum.
const FEW_STEPS: u64 = 45;

/// Share of the unigram model's loss above which a model uses none of the context, as for the base model in `querl plan`.
const MAX_SHARE: f64 = 0.9;

/// The same for edits: PPO improved two policies with shares of 0.93 and 0.95; a policy after a single step of SFT had 1.5.
const MAX_SHARE_OF_EDITS: f64 = 1.0;

const REMEDY: &str = "take a base model that knows the language of the texts (`querl plan CONFIG` reports its loss), or pretrain one on \
                      them (`querl model pretrain`)";

/// Loss, in nats per token, of a unigram model on the responses of `val`. The model has the token frequencies of the responses of `train`,
/// with add-one smoothing over the tokens of both splits. `None` without validation rows.
pub(super) fn unigram_loss(train: &[Example], val: &[Example]) -> Option<f64> {
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    for id in tokens(train) {
        *counts.entry(id).or_default() += 1;
    }
    let n_train: usize = counts.values().sum();
    for id in tokens(val) {
        counts.entry(id).or_default();
    }
    let total = (n_train + counts.len()) as f64;
    let nats: Vec<f64> = tokens(val).map(|id| (total / (counts[&id] + 1) as f64).ln()).collect();
    (!nats.is_empty()).then(|| nats.iter().sum::<f64>() / nats.len() as f64)
}

/// The most frequent target and its share of all; `None` below a half. A high share, such as of the edit `=` that keeps the query, makes
/// the loss of the unigram model low.
pub(crate) fn equal_share<T: Ord>(targets: impl IntoIterator<Item = T>) -> Option<(T, f64)> {
    let mut counts: BTreeMap<T, usize> = BTreeMap::new();
    targets.into_iter().for_each(|target| *counts.entry(target).or_default() += 1);
    let n_targets: usize = counts.values().sum();
    let (target, count) = counts.into_iter().max_by_key(|(_, count)| *count)?;
    let share = count as f64 / n_targets as f64;
    (share >= 0.5).then_some((target, share))
}

fn tokens(rows: &[Example]) -> impl Iterator<Item = u32> {
    rows.iter().flat_map(|row| row.response.iter().copied())
}

/// The problem of the model after SFT, from its figures, as part of a sentence.
fn finding(facts: &Facts, form: RewriteForm) -> Option<String> {
    let figure = |name: &str| facts.get(name)?.as_f64();
    let (loss, unigram) = (figure(EVAL_LOSS)?, figure(UNIGRAM_LOSS)?);
    let limit = unigram * if form == RewriteForm::Edit { MAX_SHARE_OF_EDITS } else { MAX_SHARE };
    // Values that are equal as printed are not a problem.
    (loss >= limit + 0.005).then(|| {
        let equal = figure(EQUAL_TARGETS).map(|share| {
            format!("; the limit is low because {:.0} % of the targets are one text", 100.0 * share)
        });
        format!(
            "the model is noise after sft: its eval loss is {loss:.2} nats per token, where the frequencies of the tokens alone give \
             {unigram:.2} (limit: {limit:.2}){}",
            equal.unwrap_or_default()
        )
    })
}

/// The warning about a model that produces noise, from the figures of SFT; `None` if it does not.
pub(super) fn warning(facts: &Facts, form: RewriteForm) -> Option<String> {
    let (steps, rows) = (facts.count("steps"), facts.count("rows"));
    let more = match steps {
        1..FEW_STEPS => format!(
            "take more SFT steps or rows ({steps} steps on {rows} rows so far: sft.max_steps, sft.epochs); if that does not help, "
        ),
        _ => String::new(),
    };
    let edits = match form {
        RewriteForm::Edit => ", or set data.rewrite_form = \"full\" if the base was pretrained on whole rewrites",
        RewriteForm::Full => "",
    };
    finding(facts, form).map(|finding| format!("{finding}; {more}{REMEDY}{edits}"))
}

/// Before RL, stops or warns, as `on_noise` says, if the model after SFT produces noise. The result of SFT is kept.
pub(super) fn before_rl(run: &Run, ledger: &Ledger, on_noise: OnNoise) -> Result<(), Stop> {
    let sft = ledger.entry(StageName::Sft);
    let form = run.config.data.rewrite_form;
    let Some(warning) = sft.and_then(|entry| warning(&entry.facts, form)) else { return Ok(()) };
    match on_noise {
        OnNoise::Stop => Err(Stop::limit(format!("{warning}, or set sft.on_noise = \"warn\""))),
        OnNoise::Warn => {
            run.reporter.message(&format!("warning: {warning}"));
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(response: &[u32]) -> Example {
        Example { prompt: vec![9, 9], response: response.to_vec() }
    }

    /// Training has 1 three times and 2 once; with 3 of the validation split there are three kinds: 4/7, 2/7 and 1/7.
    #[test]
    fn the_unigram_model_counts_training_tokens_and_expects_each_token_once_more() {
        let train = [row(&[1, 1, 2]), row(&[1])];
        let loss = unigram_loss(&train, &[row(&[1, 2]), row(&[3])]).unwrap();
        let expected = -((4.0_f64 / 7.0).ln() + (2.0_f64 / 7.0).ln() + (1.0_f64 / 7.0).ln()) / 3.0;
        assert!((loss - expected).abs() < 1e-12, "{loss}");
        assert_eq!(unigram_loss(&train, &[]), None);
        assert!((unigram_loss(&[], &[row(&[1, 2])]).unwrap() - 2.0_f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn a_model_near_the_token_frequencies_is_noise() {
        let of_form = |form, loss: Option<f64>, unigram: Option<f64>| {
            let mut facts = Facts::default();
            facts.add(EVAL_LOSS, loss).add(UNIGRAM_LOSS, unigram);
            warning(&facts, form)
        };
        let of = |loss, unigram| of_form(RewriteForm::Full, loss, unigram);
        let expected = "the model is noise after sft: its eval loss is 5.60 nats per token, where the frequencies of the tokens alone \
                        give 6.00 (limit: 5.40); take a base model";
        assert!(of(Some(5.6), Some(6.0)).unwrap().starts_with(expected));
        // Equal to the limit as printed.
        assert_eq!(of(Some(5.404), Some(6.0)), None);
        // The example, and a model that has learned a little.
        assert_eq!([of(Some(1.0), Some(5.0)), of(Some(5.3), Some(6.0))], [None, None]);
        // Without validation rows, and after SFT with a version that had no such figure.
        assert_eq!([of(None, None), of(Some(9.0), None)], [None, None]);
        let of_edits = |loss| of_form(RewriteForm::Edit, Some(loss), Some(6.0));
        assert!(of_edits(5.7).is_none() && of_edits(6.1).unwrap().contains("(limit: 6.00)"));
        assert!(of_edits(6.1).unwrap().ends_with("if the base was pretrained on whole rewrites"));
    }

    /// Regression: after 10 steps on targets that mostly keep the query, the base model was named as the cause.
    #[test]
    fn few_steps_and_equal_targets_are_named_before_the_base_model() {
        let keep = [row(&[1]), row(&[1]), row(&[1]), row(&[2, 3])];
        let share = |rows: &[Example]| equal_share(rows.iter().map(|row| &row.response)).map(|(_, share)| share);
        assert_eq!((share(&keep), share(&keep[2..]), share(&[])), (Some(0.75), Some(0.5), None));
        assert_eq!(share(&[row(&[1]), row(&[2]), row(&[3])]), None);
        let of = |steps: u64| {
            let mut facts = Facts::default();
            facts
                .add("rows", 64)
                .add("steps", steps)
                .add(EVAL_LOSS, 1.3)
                .add(UNIGRAM_LOSS, 1.34)
                .add(EQUAL_TARGETS, 0.75);
            warning(&facts, RewriteForm::Full).unwrap()
        };
        let expected = "(limit: 1.21); the limit is low because 75 % of the targets are one text; take more SFT \
                        steps or rows (10 steps on 64 rows so far: sft.max_steps, sft.epochs); if that does not help, take a base model";
        assert!(of(10).contains(expected), "{}", of(10));
        assert!(of(FEW_STEPS).contains("are one text; take a base model"), "{}", of(FEW_STEPS));
    }
}

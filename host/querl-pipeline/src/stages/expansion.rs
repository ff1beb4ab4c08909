//! Expansions of all queries (`data.expansion_terms`): a model of expansion terms is fitted on train, and used if its out-of-fold terms retrieve more
//! than the history.

use super::edit_targets::{hits_of, worth};
use crate::interrupt;
use crate::run::Run;
use futures::{StreamExt, TryStreamExt};
use querl_core::config::RewriteForm;
use querl_core::edits::EditParts;
use querl_core::ports::{Progress, Retriever};
use querl_core::records::{CallFailure, QueryRow, Split, ValidatedRecord};
use querl_data::{DataError, ExpansionForm, ExpansionModel, FittedExpansion, RowSplits, Titles, WordSegmenter};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Number of standard errors by which the terms must raise the mean reciprocal rank.
const N_STANDARD_ERRORS: f64 = 2.0;

/// The model of a run, and the expansions of its queries by id.
pub(super) struct Expansion {
    pub model: ExpansionModel,
    pub by_id: HashMap<String, String>,
}

/// Fits a model on the training rows that have gold ids. `None` if there are to be no terms, or if they do not retrieve more.
///
/// # Errors
/// The knowledge base cannot be read, retrieval cannot be opened, or a lookup failed for a reason for which every further lookup would fail.
pub(super) fn expansion(
    run: &Run,
    records: &[ValidatedRecord],
    progress: &dyn Progress,
) -> anyhow::Result<Option<Expansion>> {
    let config = &run.config;
    let has_terms = config.data.rewrite_form == RewriteForm::Edit && config.data.expansion_terms > 0;
    let knowledge_base = config.retrieval.knowledge_base.as_deref();
    let Some(knowledge_base) = knowledge_base.filter(|_| has_terms) else { return Ok(None) };
    let all: Vec<&QueryRow> = records.iter().map(|record| &record.rewritten.query).collect();
    let splits = RowSplits::of(all.iter().map(|row| Ok(row.group.clone())), &config.data)?;
    let is_fitted = |row: &&QueryRow| !row.gold_ids.is_empty() && splits.split_of(row) == Some(Split::Train);
    let rows: Vec<&QueryRow> = all.iter().copied().filter(is_fitted).collect();
    if rows.is_empty() {
        return Ok(None);
    }
    let gold_ids: HashSet<&str> = rows.iter().flat_map(|row| &row.gold_ids).map(String::as_str).collect();
    let segmenter = WordSegmenter::open(&config.retrieval)?;
    let titles = Titles::read(knowledge_base, &gold_ids, &segmenter)?;
    if titles.by_gold_id.is_empty() {
        progress.line("no expansion terms: the gold passages have no titles");
        return Ok(None);
    }
    let Some(fitted) = ExpansionModel::fit(&rows, &titles, &segmenter, config.data.expansion_terms) else {
        progress
            .line("no expansion terms: too few rows of train have gold passages with the same words in their titles");
        return Ok(None);
    };
    let FittedExpansion { model, out_of_fold } = fitted;
    let comparison = Comparison::of(&ranks(run, &rows, &model, &out_of_fold)?);
    progress.line(&format!("expansion terms: {comparison}"));
    if !comparison.shows_gain() {
        return Ok(None);
    }
    let model = model.with_form(comparison.best);
    let expansion = |row: &QueryRow| model.expansion(&row.original_query, &row.history_summary);
    let mut by_id: HashMap<String, String> = all.iter().map(|row| (row.id.clone(), expansion(row))).collect();
    let of_train = rows.iter().zip(&out_of_fold);
    by_id.extend(of_train.map(|(row, terms)| (row.id.clone(), text(&model, comparison.best, row, terms))));
    Ok(Some(Expansion { model, by_id }))
}

fn text(model: &ExpansionModel, form: ExpansionForm, row: &QueryRow, terms: &str) -> String {
    model.text(form, &row.original_query, &row.history_summary, terms)
}

/// Reciprocal ranks of the best gold passage of one row.
struct Ranks<'a> {
    group: &'a str,
    with_history: f64,
    /// In the order of [`ExpansionForm::ALL`].
    expanded: [f64; 3],
}

/// Looks up each row with its history, and its expansion in each form. Rows whose lookups fail are left out.
fn ranks<'a>(
    run: &Run,
    rows: &[&'a QueryRow],
    model: &ExpansionModel,
    terms: &[String],
) -> anyhow::Result<Vec<Ranks<'a>>> {
    let retriever = run.retriever_until(interrupt::flag())?;
    let rank = |(row, terms): (&&'a QueryRow, &String)| {
        let (row, retriever) = (*row, retriever.as_ref());
        let expansions = ExpansionForm::ALL.map(|form| text(model, form, row, terms));
        async move {
            match ranks_of(row, &expansions, retriever).await {
                Err(failure) if failure.kind.is_fatal() => Err(DataError::Service(failure)),
                found => Ok(found.ok()),
            }
        }
    };
    let n_calls = run.config.retrieval.max_concurrent.max(1);
    let ranking = futures::stream::iter(rows.iter().zip(terms).map(rank)).buffered(n_calls);
    let found: Result<Vec<Option<Ranks<'a>>>, DataError> = run.runtime.block_on(ranking.try_collect());
    // After an interrupt, retrieval fails.
    interrupt::check()?;
    Ok(found?.into_iter().flatten().collect())
}

async fn ranks_of<'a>(
    row: &'a QueryRow,
    expansions: &[String; 3],
    retriever: &dyn Retriever,
) -> Result<Ranks<'a>, CallFailure> {
    let mut known: Vec<(String, f64)> = Vec::new();
    let mut rank = async |text: &str| {
        if let Some((_, rank)) = known.iter().find(|(looked_up, _)| looked_up == text) {
            return Ok(*rank);
        }
        let rank = worth(row, &hits_of(retriever, row, text).await?);
        known.push((text.to_owned(), rank));
        Ok(rank)
    };
    let with_history = rank(&EditParts::from(row).expanded("")).await?;
    let [first, second, third] = expansions;
    let expanded = [rank(first).await?, rank(second).await?, rank(third).await?];
    Ok(Ranks { group: &row.group, with_history, expanded })
}

/// Mean reciprocal ranks with the history, and with the expansions.
struct Comparison {
    n_rows: usize,
    with_history: f64,
    /// In the order of [`ExpansionForm::ALL`].
    expanded: [f64; 3],
    best: ExpansionForm,
    /// Gain of the best expansion over the history.
    gain: f64,
    /// Standard error of the gain; rows of a group are not independent.
    standard_error: f64,
}

impl Comparison {
    fn of(ranks: &[Ranks<'_>]) -> Self {
        let (n_rows, n) = (ranks.len(), ranks.len().max(1) as f64);
        let mean = |of: &dyn Fn(&Ranks<'_>) -> f64| ranks.iter().map(of).sum::<f64>() / n;
        let with_history = mean(&|row| row.with_history);
        let expanded = [0, 1, 2].map(|form| mean(&|row| row.expanded[form]));
        // On ties the first form.
        let best = (1..expanded.len()).fold(0, |best, form| if expanded[form] > expanded[best] { form } else { best });
        let gain = expanded[best] - with_history;
        let mut by_group: BTreeMap<&str, f64> = BTreeMap::new();
        for row in ranks {
            *by_group.entry(row.group).or_default() += row.expanded[best] - row.with_history - gain;
        }
        let standard_error = by_group.values().map(|sum| sum * sum).sum::<f64>().sqrt() / n;
        Self { n_rows, with_history, expanded, best: ExpansionForm::ALL[best], gain, standard_error }
    }

    fn shows_gain(&self) -> bool {
        self.gain > N_STANDARD_ERRORS * self.standard_error
    }
}

impl std::fmt::Display for Comparison {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { n_rows, with_history, expanded: [history, query, words], gain, standard_error, .. } = self;
        let result = match (self.shows_gain(), self.best) {
            (false, _) => "not used, since a gain is not shown",
            (true, ExpansionForm::WithHistory) => "`&` is query, history and terms",
            (true, ExpansionForm::WithoutHistory) => "`&` is query and terms",
            (true, ExpansionForm::TitleWords) => "`&` is the title words of query and history, and terms",
        };
        write!(
            f,
            "MRR of {n_rows} rows of train {with_history:.3} with query and history; with out-of-fold terms too {history:.3}, without history \
             {query:.3}, with the title words of both alone {words:.3} (best gain {gain:+.3}, standard error {standard_error:.3}): {result}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(gains: &[(&'static str, f64)]) -> Vec<Ranks<'static>> {
        let of = |(group, gain): &(&'static str, f64)| Ranks {
            group,
            with_history: 0.25,
            expanded: [0.25 + gain, 0.25, 0.0],
        };
        gains.iter().map(of).collect()
    }

    #[test]
    fn a_gain_is_shown_from_two_standard_errors_between_groups() {
        let groups = ["a", "b", "c", "d"];
        let alike: Vec<_> = groups.iter().map(|group| (*group, 0.25)).collect();
        assert!(Comparison::of(&ranks(&alike)).shows_gain());
        // Gains 0.5, 0.5, 0.5 and -0.5: mean 0.25; deviations 0.25 three times and -0.75, whose root of the sum of squares is 0.866; / 4.
        let mixed = [("a", 0.5), ("b", 0.5), ("c", 0.5), ("d", -0.5)];
        let comparison = Comparison::of(&ranks(&mixed));
        assert!((comparison.standard_error - 0.75_f64.sqrt() / 4.0).abs() < 1e-12);
        assert!(!comparison.shows_gain());
        let text = "MRR of 4 rows of train 0.250 with query and history; with out-of-fold terms too 0.500, without history 0.250, with the title \
                    words of both alone 0.000 (best gain +0.250, standard error 0.217): not used, since a gain is not shown";
        assert_eq!(comparison.to_string(), text);
        // Four times the same row is no more evidence.
        let repeated: Vec<_> = mixed.iter().flat_map(|one| [*one; 4]).collect();
        assert!((Comparison::of(&ranks(&repeated)).standard_error - comparison.standard_error).abs() < 1e-12);
    }

    #[test]
    fn the_best_form_is_chosen() {
        let mut rows = ranks(&[("a", 0.25), ("b", 0.25)]);
        rows.iter_mut().for_each(|row| row.expanded[1] = 0.5);
        assert_eq!(Comparison::of(&rows).best, ExpansionForm::WithHistory, "the first of equal ones");
        rows.iter_mut().for_each(|row| row.expanded[2] = 0.75);
        let comparison = Comparison::of(&rows);
        assert_eq!((comparison.best, comparison.gain), (ExpansionForm::TitleWords, 0.5));
        assert!(
            comparison.to_string().ends_with("`&` is the title words of query and history, and terms"),
            "{comparison}"
        );
    }

    #[test]
    fn without_rows_no_gain_is_shown() {
        assert!(!Comparison::of(&[]).shows_gain());
    }
}

//! Expansions of all queries (`data.expansion_terms`): a model of weighted words and expansion terms is fitted on train, and used if its
//! out-of-fold expansions retrieve more than query and history.

use super::edit_targets::{hits_of, worth};
use super::stage::knowledge_base_of_expansions;
use crate::interrupt;
use crate::run::Run;
use futures::{StreamExt, TryStreamExt};
use querl_core::edits::EditParts;
use querl_core::ports::{Progress, Retriever};
use querl_core::records::{CallFailure, QueryRow, Split, ValidatedRecord};
use querl_data::{
    DataError, ExamplePassages, ExpansionForm, ExpansionModel, ExpansionParts, FittedExpansion, RowSplits,
    TermSelection, WordSegmenter,
};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Number of standard errors by which expansions must raise the mean reciprocal rank.
const N_STANDARD_ERRORS: f64 = 2.0;

const N_FORMS: usize = ExpansionForm::ALL.len();

/// Number of rows and passages from which a line is printed before the fit, which takes minutes for some thousands.
const MANY_EXAMPLES: usize = 1000;

/// Maximum number of lookups of a row: with the history, and in each form.
pub(crate) const MAX_LOOKUPS_OF_EXPANSIONS: usize = 1 + N_FORMS;

/// The expansions of a run.
#[derive(Default)]
pub(super) struct Expansion {
    /// `None` if there are to be no expansions, or if they do not retrieve more.
    pub used: Option<UsedExpansion>,
    /// Ids of the rows of train that are left out of the comparison because a lookup failed.
    pub failed: BTreeSet<String>,
}

/// The model of a run, and the expansions of its queries by id.
pub(super) struct UsedExpansion {
    pub model: ExpansionModel,
    pub by_id: HashMap<String, String>,
}

/// Fits a model on the rows of train and compares the expansions.
///
/// # Errors
/// The knowledge base cannot be read, retrieval cannot be opened, or a lookup failed for a reason for which every further lookup would fail.
pub(super) fn expansion(run: &Run, records: &[ValidatedRecord], progress: &dyn Progress) -> anyhow::Result<Expansion> {
    let config = &run.config;
    let Some(knowledge_base) = knowledge_base_of_expansions(config) else {
        return Ok(Expansion::default());
    };
    let all: Vec<&QueryRow> = records.iter().map(|record| &record.rewritten.query).collect();
    let splits = RowSplits::of(all.iter().map(|row| Ok(row.group.clone())), &config.data)?;
    let rows: Vec<&QueryRow> = all.iter().copied().filter(|row| splits.split_of(row) == Some(Split::Train)).collect();
    let gold_ids: HashSet<&str> = rows.iter().flat_map(|row| &row.gold_ids).map(String::as_str).collect();
    let segmenter = WordSegmenter::open(&config.retrieval)?;
    let passages = ExamplePassages::read(knowledge_base, &gold_ids)?;
    let n_passages = passages.n_examples();
    if rows.len() + n_passages >= MANY_EXAMPLES {
        progress.line(&format!("fitting expansions on {} rows of train and {n_passages} passages", rows.len()));
    }
    let fitted = ExpansionModel::fit(&rows, &passages, &segmenter, config.data.expansion_terms);
    let FittedExpansion { model, no_terms, out_of_fold, fitted } = match fitted {
        Ok(fitted) => fitted,
        Err(reason) => {
            progress.line(&format!("no expansions: {reason}"));
            return Ok(Expansion::default());
        }
    };
    if let Some(reason) = no_terms {
        progress.line(&format!("no expansion terms: {reason}"));
    }
    let compared: Vec<(&QueryRow, &ExpansionParts)> =
        fitted.iter().map(|row| (rows[*row], &out_of_fold[*row])).collect();
    let ranks = ranks(run, &compared)?;
    let looked_up: HashSet<&str> = ranks.iter().map(|ranks| ranks.id).collect();
    let ids = compared.iter().map(|(row, _)| row.id.as_str());
    let failed: BTreeSet<String> = ids.filter(|id| !looked_up.contains(id)).map(str::to_owned).collect();
    let comparison = Comparison::of(&ranks);
    progress.line(&format!("expansions: {comparison}"));
    if !failed.is_empty() {
        let n = failed.len();
        progress.line(&format!("{n} rows of train are left out of it because a lookup failed; run convert again"));
    }
    if !comparison.shows_gain() {
        return Ok(Expansion { used: None, failed });
    }
    let model = model.with_form(comparison.best);
    let expansion = |row: &QueryRow| model.expansion(&row.original_query, &row.history_summary);
    let mut by_id: HashMap<String, String> = all.iter().map(|row| (row.id.clone(), expansion(row))).collect();
    let of_train = rows.iter().zip(&out_of_fold);
    by_id.extend(of_train.map(|(row, parts)| (row.id.clone(), text(comparison.best, row, parts))));
    Ok(Expansion { used: Some(UsedExpansion { model, by_id }), failed })
}

fn text(form: ExpansionForm, row: &QueryRow, parts: &ExpansionParts) -> String {
    form.text(&row.original_query, &row.history_summary, parts)
}

/// Reciprocal ranks of the best gold passage of one row.
struct Ranks<'a> {
    id: &'a str,
    group: &'a str,
    with_history: f64,
    /// In the order of [`ExpansionForm::ALL`].
    expanded: [f64; N_FORMS],
}

/// Looks up each row with its history, and its expansion in each form, of these parts. Rows whose lookups fail are left out.
fn ranks<'a>(run: &Run, rows: &[(&'a QueryRow, &ExpansionParts)]) -> anyhow::Result<Vec<Ranks<'a>>> {
    let retriever = run.retriever_until(interrupt::flag())?;
    let rank = |(row, parts): &(&'a QueryRow, &ExpansionParts)| {
        let (row, retriever) = (*row, retriever.as_ref());
        let expansions = ExpansionForm::ALL.map(|form| text(form, row, parts));
        async move {
            match ranks_of(row, &expansions, retriever).await {
                Err(failure) if failure.kind.is_fatal() => Err(DataError::Service(failure)),
                found => Ok(found.ok()),
            }
        }
    };
    let n_calls = run.config.retrieval.max_concurrent.max(1);
    let ranking = futures::stream::iter(rows.iter().map(rank)).buffered(n_calls);
    let found: Result<Vec<Option<Ranks<'a>>>, DataError> = run.runtime.block_on(ranking.try_collect());
    // After an interrupt, retrieval fails.
    interrupt::check()?;
    Ok(found?.into_iter().flatten().collect())
}

async fn ranks_of<'a>(
    row: &'a QueryRow,
    expansions: &[String; N_FORMS],
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
    let mut expanded = [0.0; N_FORMS];
    for (expanded, text) in expanded.iter_mut().zip(expansions) {
        *expanded = rank(text).await?;
    }
    Ok(Ranks { id: &row.id, group: &row.group, with_history, expanded })
}

/// Mean reciprocal ranks with the history, and with the expansions.
struct Comparison {
    n_rows: usize,
    n_groups: usize,
    with_history: f64,
    /// In the order of [`ExpansionForm::ALL`].
    expanded: [f64; N_FORMS],
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
        let expanded = std::array::from_fn(|form| mean(&|row| row.expanded[form]));
        // On ties the first form.
        let best = (1..N_FORMS).fold(0, |best, form| if expanded[form] > expanded[best] { form } else { best });
        let gain = expanded[best] - with_history;
        let mut by_group: BTreeMap<&str, f64> = BTreeMap::new();
        for row in ranks {
            *by_group.entry(row.group).or_default() += row.expanded[best] - row.with_history - gain;
        }
        let standard_error = by_group.values().map(|sum| sum * sum).sum::<f64>().sqrt() / n;
        let n_groups = by_group.len();
        Self { n_rows, n_groups, with_history, expanded, best: ExpansionForm::ALL[best], gain, standard_error }
    }

    fn shows_gain(&self) -> bool {
        self.n_groups >= ExpansionModel::MIN_GROUPS && self.gain > N_STANDARD_ERRORS * self.standard_error
    }
}

impl std::fmt::Display for Comparison {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { n_rows, with_history, gain, standard_error, .. } = self;
        let of_forms = ExpansionForm::ALL.iter().zip(self.expanded);
        let ranks: Vec<String> = of_forms.map(|(form, rank)| format!("{} {rank:.3}", name(*form))).collect();
        let result = match self.shows_gain() {
            _ if self.n_groups < ExpansionModel::MIN_GROUPS => {
                "not used, since too few lookups succeeded to compare".into()
            }
            false => "not used, since a gain is not shown".into(),
            true => format!("`&` is {}", name(self.best)),
        };
        write!(
            f,
            "MRR of {n_rows} rows of train with query and history {with_history:.3}; out of fold: {} (best gain {gain:+.3}, standard error \
             {standard_error:.3}): {result}",
            ranks.join(", ")
        )
    }
}

fn name(form: ExpansionForm) -> &'static str {
    match (form.is_weighted, form.terms) {
        (false, TermSelection::None) => "query and history",
        (false, TermSelection::All) => "query, history and terms",
        (false, TermSelection::Likely) => "query, history and likely terms",
        (true, TermSelection::None) => "weighted query and history",
        (true, TermSelection::All) => "weighted query and history, and terms",
        (true, TermSelection::Likely) => "weighted query and history, and likely terms",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Five times as many groups with the same gains.
    fn ranks(gains: &[f64]) -> Vec<(String, f64)> {
        let gains = gains.iter().copied().cycle().take(5 * gains.len());
        gains.enumerate().map(|(number, gain)| (format!("g{number}"), gain)).collect()
    }

    fn compared(gains: &[(String, f64)]) -> Comparison {
        Comparison::of(&rows(gains))
    }

    fn rows(gains: &[(String, f64)]) -> Vec<Ranks<'_>> {
        gains
            .iter()
            .map(|(group, gain)| Ranks {
                id: group,
                group,
                with_history: 0.25,
                expanded: [0.25, 0.25 + gain, 0.25, 0.0, 0.0],
            })
            .collect()
    }

    #[test]
    fn a_gain_is_shown_from_two_standard_errors_between_groups() {
        assert!(compared(&ranks(&[0.25; 4])).shows_gain());
        // Gains 0.5, 0.5, 0.5 and -0.5 five times: mean 0.25; deviations 0.25 fifteen times and -0.75 five times, whose squares sum to 3.75.
        let mixed = ranks(&[0.5, 0.5, 0.5, -0.5]);
        let comparison = compared(&mixed);
        assert!((comparison.standard_error - 3.75_f64.sqrt() / 20.0).abs() < 1e-12);
        assert!(comparison.shows_gain(), "{comparison}");
        // Four rows of a group are one observation.
        let repeated: Vec<_> = mixed.iter().flat_map(|row| vec![row.clone(); 4]).collect();
        assert!((compared(&repeated).standard_error - comparison.standard_error).abs() < 1e-12);
        let weak = compared(&ranks(&[0.5, -0.5, 0.5, -0.25]));
        let text = "MRR of 20 rows of train with query and history 0.250; out of fold: query, history and terms 0.250, query, history and likely terms \
                    0.312, weighted query and history 0.250, weighted query and history, and terms 0.000, weighted query and history, and likely terms \
                    0.000 (best gain +0.062, standard error 0.100): not used, since a gain is not shown";
        assert_eq!(weak.to_string(), text);
    }

    /// Regression: the rows of one group, which were all whose lookups succeeded, had a standard error of 0.
    #[test]
    fn few_groups_show_no_gain() {
        let few = compared(&ranks(&[0.25; 3]));
        assert!(!few.shows_gain());
        assert!(few.to_string().ends_with("not used, since too few lookups succeeded to compare"), "{few}");
        assert!(!compared(&[]).shows_gain());
    }

    #[test]
    fn the_best_form_is_chosen() {
        let gains = ranks(&[0.25; 4]);
        let mut rows = rows(&gains);
        let mut best = |form: usize, rank: f64| {
            rows.iter_mut().for_each(|row| row.expanded[form] = rank);
            let comparison = Comparison::of(&rows);
            (comparison.best, comparison.gain, comparison.to_string())
        };
        let (form, gain, _) = best(0, 0.5);
        assert_eq!((form, gain), (ExpansionForm::ALL[0], 0.25), "the first of equal ones");
        for (form, rank, end) in [
            (1, 0.625, "`&` is query, history and likely terms"),
            (2, 0.75, "`&` is weighted query and history"),
            (3, 0.875, "`&` is weighted query and history, and terms"),
            (4, 1.0, "`&` is weighted query and history, and likely terms"),
        ] {
            let (best, gain, text) = best(form, rank);
            assert_eq!((best, gain), (ExpansionForm::ALL[form], rank - 0.25));
            assert!(text.ends_with(end), "{text}");
        }
    }
}

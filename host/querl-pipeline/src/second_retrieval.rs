//! The second retriever of the evaluation, which training did not use, and the words that rewrites share with gold passages.

use crate::retrieval::embedding_model;
use crate::run::Run;
use anyhow::Context;
use querl_core::config::{Config, EmbeddingKind, SecondRetrieval};
use querl_core::ports::{LocalModelError, Progress};
use querl_core::records::{EvalRecord, SecondHits};
use querl_data::{Passage, SecondRetriever, read_passages};
use querl_eval::new_gold_terms;
use std::collections::{BTreeMap, HashMap};

/// Maximum number of passages that `auto` indexes in memory: about 250 MB of postings.
const MOST_PASSAGES: usize = 100_000;

/// Adds to each evaluated rewrite the passages that the second retriever finds, and the share of new words from gold passages. Does nothing
/// if the knowledge base is not a file.
///
/// # Errors
/// The knowledge base cannot be read, or the embedding model cannot be opened or fails.
pub(crate) fn add(run: &Run, records: &mut [EvalRecord], progress: &dyn Progress) -> anyhow::Result<()> {
    let Some(path) = &run.config.retrieval.knowledge_base else { return Ok(()) };
    let passages = read_passages(path)?;
    add_gold_terms(&passages, records);
    if let Some(retriever) = open(run, &passages, progress)? {
        let name = if is_model_of_training(&run.config) { SecondHits::MODEL_OF_TRAINING } else { retriever.name() };
        add_hits(&retriever, name, run.config.retrieval.top_k, records).context("eval.second_retrieval")?;
    }
    Ok(())
}

/// Checks that the embedding model of a semantic second retriever can be opened.
///
/// # Errors
/// The embedding model cannot be opened.
pub(crate) fn check(config: &Config) -> anyhow::Result<()> {
    match config.second_embedding_path() {
        Some(path) if config.second_retrieval() == SecondRetrieval::Semantic => embedding_model(path).map(drop),
        _ => Ok(()),
    }
}

/// True if the second retriever uses the same embeddings as the retriever of training.
fn is_model_of_training(config: &Config) -> bool {
    let embedding = &config.retrieval.embedding;
    config.second_retrieval() == SecondRetrieval::Semantic
        && embedding.kind == EmbeddingKind::Local
        && config.second_embedding_path() == embedding.path.as_deref()
}

fn open(run: &Run, passages: &[Passage], progress: &dyn Progress) -> anyhow::Result<Option<SecondRetriever>> {
    let n_passages = passages.len();
    match run.config.second_retrieval() {
        SecondRetrieval::Lexical
            if n_passages > MOST_PASSAGES && run.config.eval.second_retrieval == SecondRetrieval::Auto =>
        {
            let why = format!("the knowledge base has {n_passages} passages, more than {MOST_PASSAGES}");
            progress.line(&format!("no second retriever: {why}; eval.second_retrieval = \"lexical\" indexes them all"));
            Ok(None)
        }
        SecondRetrieval::Lexical => Ok(Some(SecondRetriever::lexical(passages))),
        SecondRetrieval::Semantic => {
            let path = run.config.second_embedding_path().context("eval.embedding_path is not set")?;
            Ok(Some(SecondRetriever::semantic(passages, embedding_model(path)?)?))
        }
        SecondRetrieval::Auto | SecondRetrieval::None => Ok(None),
    }
}

fn add_hits(
    retriever: &SecondRetriever,
    name: &str,
    top_k: usize,
    records: &mut [EvalRecord],
) -> Result<(), LocalModelError> {
    let mut known: HashMap<String, Vec<String>> = HashMap::new();
    for answer in records.iter_mut().filter_map(|record| record.outcome.as_mut().ok()) {
        let rewrite = &answer.candidate.rewrite;
        let ids = match known.get(rewrite) {
            Some(ids) => ids.clone(),
            None => {
                let ids = retriever.search(rewrite, top_k)?;
                known.insert(rewrite.clone(), ids.clone());
                ids
            }
        };
        answer.second_retrieval = Some(SecondHits { retriever: name.to_owned(), ids });
    }
    Ok(())
}

fn add_gold_terms(passages: &[Passage], records: &mut [EvalRecord]) {
    let by_id: BTreeMap<&str, &Passage> = passages.iter().map(|passage| (passage.id.as_str(), passage)).collect();
    for record in records {
        let gold: Vec<String> =
            record.query.gold_ids.iter().filter_map(|id| Some(by_id.get(id.as_str())?.full_text())).collect();
        if let Ok(answer) = &mut record.outcome {
            answer.new_gold_terms = new_gold_terms(&record.query.original_query, &answer.candidate.rewrite, &gold);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::testing::query;
    use querl_core::records::{Candidate, Rejection, SystemAnswer};

    fn record(rewrite: &str) -> EvalRecord {
        let mut query = query("a");
        query.original_query = "鱼油吃几粒".into();
        query.gold_ids = vec!["oil".into()];
        let candidate = Candidate { rewrite: rewrite.into(), ..Candidate::default() };
        let answer = SystemAnswer { candidate, ..SystemAnswer::default() };
        EvalRecord { system: "rl".into(), query, outcome: Ok(answer) }
    }

    fn passages() -> Vec<Passage> {
        let passage = |id: &str, text: &str| Passage { id: id.into(), title: String::new(), text: text.into() };
        vec![passage("oil", "鱼油每日用量"), passage("powder", "蛋白粉冲泡方法")]
    }

    #[test]
    fn answers_get_the_hits_of_the_second_retriever_and_failed_ones_stay_failed() {
        let failed = EvalRecord { outcome: Err(Rejection::new("no_rewrite", "")), ..record("") };
        let mut records = [record("鱼油用量"), record(""), failed];
        add_hits(&SecondRetriever::lexical(&passages()), "lexical", 3, &mut records).unwrap();
        let found =
            |index: usize| records[index].outcome.as_ref().ok().and_then(|answer| answer.second_retrieval.clone());
        let hits = |ids: &[&str]| {
            let ids = ids.iter().map(|id| (*id).to_owned()).collect();
            Some(SecondHits { retriever: "lexical".into(), ids })
        };
        assert_eq!((found(0), found(1), found(2)), (hits(&["oil"]), hits(&[]), None));
    }

    #[test]
    fn new_words_of_the_gold_passage_are_counted_where_it_is_in_the_knowledge_base() {
        let mut unknown = record("鱼油用量");
        unknown.query.gold_ids = vec!["gone".into()];
        let mut records = [record("鱼油用量"), unknown];
        add_gold_terms(&passages(), &mut records);
        // Of 鱼油, 油用 and 用量 the last is new and in the passage.
        let shares = records.map(|record| record.outcome.unwrap().new_gold_terms);
        assert_eq!(shares, [Some(1.0 / 3.0), None]);
    }
}

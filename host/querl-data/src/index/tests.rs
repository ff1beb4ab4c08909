#![allow(clippy::unwrap_used)]

use crate::{EmbeddedRetriever, LocalModels, SearchLimits};
use querl_core::config::RetrievalConfig;
use querl_core::ports::{Embedder, LocalModelError, RetrievalRequest};
use querl_core::records::Context;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const LEXICON: &str =
    r#"{"products": [{"id": "a", "name": "鱼油"}], "intents": [{"id": "u", "name": "用法", "house": ["用法"]}]}"#;

/// A folder with a knowledge base of `texts`, whose ids are their positions.
fn config(folder: &Path, texts: &[&str]) -> RetrievalConfig {
    let (knowledge_base, lexicon) = (folder.join("kb.jsonl"), folder.join("lexicon.json"));
    std::fs::write(&lexicon, LEXICON).unwrap();
    let passages = texts.iter().enumerate().map(|(index, text)| json!({"id": index.to_string(), "text": text}));
    querl_core::fsx::write_jsonl(&knowledge_base, passages).unwrap();
    let index_dir = folder.join("indexes");
    let settings =
        json!({"kind": "embedded", "knowledge_base": knowledge_base, "lexicon": lexicon, "index_dir": index_dir});
    serde_json::from_value(settings).unwrap()
}

/// Ids found for a rewrite, in the order of ids.
fn found(config: &RetrievalConfig, models: &LocalModels, rewrite: &str) -> Vec<String> {
    let retriever = EmbeddedRetriever::open(config, models).unwrap();
    let context = Context::default();
    let request = RetrievalRequest { original_query: "鱼油", context: &context, rewritten_query: rewrite };
    let limits = SearchLimits { top_k: 2, score_threshold: 0.0 };
    let mut ids: Vec<String> = retriever.search_now(&request, limits).unwrap().into_iter().map(|hit| hit.id).collect();
    ids.sort();
    ids
}

fn plain(config: &RetrievalConfig, rewrite: &str) -> Vec<String> {
    found(config, &LocalModels::default(), rewrite)
}

fn indexes(config: &RetrievalConfig) -> Vec<PathBuf> {
    let base = config.index_dir.as_ref().unwrap();
    let mut paths: Vec<PathBuf> = std::fs::read_dir(base).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

fn changed_at(path: &Path) -> std::time::SystemTime {
    path.join("meta.json").metadata().unwrap().modified().unwrap()
}

#[test]
fn an_index_is_built_once_and_again_for_another_content() {
    let folder = tempfile::tempdir().unwrap();
    let first = config(folder.path(), &["甘油三酯偏高", "关节不适"]);
    assert_eq!(plain(&first, "甘油三酯"), ["0"]);
    let before = indexes(&first);
    let built_at = changed_at(&before[0]);
    assert_eq!(plain(&first, "关节"), ["1"]);
    assert_eq!((indexes(&first), changed_at(&before[0])), (before.clone(), built_at));
    let second = config(folder.path(), &["关节不适", "甘油三酯偏高"]);
    assert_eq!(plain(&second, "甘油三酯"), ["1"]);
    assert_eq!(indexes(&second).len(), 2);
    std::fs::write(second.lexicon.as_ref().unwrap(), LEXICON.replace("用法", "吃法")).unwrap();
    plain(&second, "关节");
    assert_eq!(indexes(&second).len(), 3);
}

#[test]
fn a_damaged_index_is_built_again() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &["甘油三酯偏高", "关节不适"]);
    assert_eq!(plain(&config, "关节"), ["1"]);
    let index = indexes(&config).remove(0);
    let store = std::fs::read_dir(&index).unwrap().map(|entry| entry.unwrap().path());
    let store = store.into_iter().find(|path| path.extension().is_some_and(|name| name == "store")).unwrap();
    let mut bytes = std::fs::read(&store).unwrap();
    bytes[10] ^= 1;
    std::fs::write(&store, bytes).unwrap();
    assert_eq!(plain(&config, "关节"), ["1"]);
    std::fs::write(index.join("meta.json"), "{").unwrap();
    assert_eq!(plain(&config, "关节"), ["1"]);
    assert_eq!(indexes(&config), [index]);
}

#[test]
fn a_place_that_cannot_be_written_costs_the_index_and_not_the_search() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path(), &["关节不适"]);
    config.index_dir = Some(folder.path().join("kb.jsonl").join("below-a-file"));
    assert_eq!(plain(&config, "关节"), ["0"]);
}

#[test]
fn a_synonym_finds_what_its_group_says() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path(), &["血脂偏高的人", "关节不适", "血压"]);
    assert!(plain(&config, "三高指标").is_empty());
    let synonyms = folder.path().join("synonyms.txt");
    std::fs::write(&synonyms, "三高指标, 血脂, 血压\n").unwrap();
    config.synonyms = Some(synonyms);
    assert_eq!(plain(&config, "三高指标"), ["0", "2"]);
    assert_eq!(plain(&config, "血压"), ["0", "2"]);
    assert_eq!(plain(&config, "关节"), ["1"]);
}

#[test]
fn a_word_of_the_tenant_is_found_whole() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path(), &["臻萃轻盈小绿瓶一盒", "绿瓶装的轻盈水"]);
    let dictionary = folder.path().join("words.txt");
    std::fs::write(&dictionary, "臻萃轻盈小绿瓶 100000\n").unwrap();
    config.user_dictionary = Some(dictionary);
    let retriever = EmbeddedRetriever::open(&config, &LocalModels::default()).unwrap();
    let context = Context::default();
    let rewritten_query = "臻萃轻盈小绿瓶";
    let request = RetrievalRequest { original_query: "问", context: &context, rewritten_query };
    let hits = retriever.search_now(&request, SearchLimits { top_k: 2, score_threshold: 0.0 }).unwrap();
    let bm25 = |id: &str| hits.iter().find(|hit| hit.id == id).map(|hit| hit.retrieval_score.unwrap());
    assert!(bm25("0").unwrap() > bm25("1").unwrap_or(0.0), "{hits:?}");
    std::fs::write(folder.path().join("words.txt"), "臻萃 x\n").unwrap();
    let error = EmbeddedRetriever::open(&config, &LocalModels::default()).err().unwrap().to_string();
    assert!(error.contains("words.txt: line 1 has the frequency `x`"), "{error}");
}

/// A vector for whether a text speaks of joints; counts the texts it was given.
#[derive(Default)]
struct OfJoints(AtomicUsize);

impl Embedder for OfJoints {
    fn embed(&self, texts: &[&str]) -> Result<Vec<Vec<f32>>, LocalModelError> {
        self.0.fetch_add(texts.len(), Ordering::SeqCst);
        let joints = |text: &&str| text.contains("关节") || text.contains("膝盖");
        Ok(texts.iter().map(|text| if joints(text) { vec![1.0, 0.0] } else { vec![0.0, 1.0] }).collect())
    }

    fn dimension(&self) -> usize {
        2
    }

    fn digest(&self) -> &str {
        "of joints"
    }
}

#[test]
fn vectors_find_what_words_do_not_and_are_made_once() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &["甘油三酯偏高", "关节不适", "甘油三酯正常"]);
    let model = Arc::new(OfJoints::default());
    let models = LocalModels { embedder: Some(model.clone()), ..LocalModels::default() };
    assert!(plain(&config, "膝盖疼").is_empty());
    // The first by its vector, the second as the earliest of those that are equally far.
    assert_eq!(found(&config, &models, "膝盖疼"), ["0", "1"]);
    assert_eq!(model.0.load(Ordering::SeqCst), 4);
    assert_eq!(found(&config, &models, "关节"), ["0", "1"]);
    assert_eq!(model.0.load(Ordering::SeqCst), 5);
    assert_eq!(indexes(&config).len(), 2);
    let vectors = indexes(&config).into_iter().map(|path| path.join("vectors.f32")).find(|path| path.exists()).unwrap();
    std::fs::write(vectors, [0; 24]).unwrap();
    assert_eq!(found(&config, &models, "关节"), ["0", "1"]);
    assert_eq!(model.0.load(Ordering::SeqCst), 9);
}

//! The embedded index, the lexicon reranker and the rubric judge.

use crate::retrieval::index::{ENCODER, FORM, INDEX_VERSION};
use crate::retrieval::lexicon_reranker::LexiconReranker;
use crate::retrieval::vocabulary::Segmenter;
use crate::{EmbeddedRetriever, Lexicon, LocalModels, Passage, RetrievalLimits, RubricJudge};
use querl_core::config::{Language, RerankKind, RetrievalConfig};
use querl_core::ports::{Embedder, Judge, JudgeRequest, LocalModelError, RetrievalRequest};
use querl_core::records::{Context, Hit};
use serde_json::{Value, json};
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const SMALL_LEXICON: &str =
    r#"{"products": [{"id": "a", "name": "鱼油"}], "intents": [{"id": "u", "name": "用法", "house": ["用法"]}]}"#;

fn write(folder: &Path, lexicon_text: &str, passages: impl IntoIterator<Item = Value>) -> RetrievalConfig {
    let (knowledge_base, lexicon) = (folder.join("kb.jsonl"), folder.join("lexicon.json"));
    std::fs::write(&lexicon, lexicon_text).unwrap();
    querl_core::fsx::write_jsonl(&knowledge_base, passages).unwrap();
    let index_dir = folder.join("indexes");
    let settings =
        json!({"kind": "embedded", "knowledge_base": knowledge_base, "lexicon": lexicon, "index_dir": index_dir});
    serde_json::from_value(settings).unwrap()
}

/// A folder with a knowledge base of `texts`, whose ids are their positions.
fn config(folder: &Path, texts: &[&str]) -> RetrievalConfig {
    let passages = texts.iter().enumerate().map(|(index, text)| json!({"id": index.to_string(), "text": text}));
    write(folder, SMALL_LEXICON, passages)
}

fn open(config: &RetrievalConfig) -> EmbeddedRetriever {
    EmbeddedRetriever::open(config, &LocalModels::default()).unwrap()
}

fn search(retriever: &EmbeddedRetriever, query: &str, context: &Context, rewrite: &str, top_k: usize) -> Vec<Hit> {
    let request = RetrievalRequest { original_query: query, context, rewritten_query: rewrite };
    retriever.search_now(&request, RetrievalLimits { top_k, score_threshold: 0.0 }).unwrap()
}

/// Ids found for a rewrite, in the order of ids.
fn found(config: &RetrievalConfig, models: &LocalModels, rewrite: &str) -> Vec<String> {
    let retriever = EmbeddedRetriever::open(config, models).unwrap();
    let hits = search(&retriever, "鱼油", &Context::default(), rewrite, 2);
    let mut ids: Vec<String> = hits.into_iter().map(|hit| hit.id).collect();
    ids.sort();
    ids
}

fn found_by_words(config: &RetrievalConfig, rewrite: &str) -> Vec<String> {
    found(config, &LocalModels::default(), rewrite)
}

fn indexes(config: &RetrievalConfig) -> Vec<PathBuf> {
    let base = config.index_dir.as_ref().unwrap();
    let entries = std::fs::read_dir(base).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<PathBuf> = entries.filter(|path| path.is_dir()).collect();
    paths.sort();
    paths
}

fn changed_at(path: &Path) -> std::time::SystemTime {
    path.join("meta.json").metadata().unwrap().modified().unwrap()
}

#[test]
fn an_index_is_built_once_and_again_for_other_content() {
    let folder = tempfile::tempdir().unwrap();
    let first = config(folder.path(), &["甘油三酯偏高", "关节不适"]);
    assert_eq!(found_by_words(&first, "甘油三酯"), ["0"]);
    let before = indexes(&first);
    let built_at = changed_at(&before[0]);
    assert_eq!(found_by_words(&first, "关节"), ["1"]);
    assert_eq!((indexes(&first), changed_at(&before[0])), (before.clone(), built_at));
    let second = config(folder.path(), &["关节不适", "甘油三酯偏高"]);
    assert_eq!(found_by_words(&second, "甘油三酯"), ["1"]);
    assert_eq!(indexes(&second).len(), 2);
}

/// Symptom: Traditional texts were segmented poorly, and Simplified queries did not find them.
#[test]
fn traditional_passages_are_found_in_both_forms_of_the_characters() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path(), &["信用卡遺失時的掛失與補發", "定期存款到期後的續存利率", "开户需要的证件"]);
    for (rewrite, id) in [("掛失", "0"), ("挂失", "0"), ("續存利率", "1"), ("续存利率", "1"), ("開戶證件", "2")]
    {
        assert_eq!(found_by_words(&config, rewrite), [id], "{rewrite}");
    }
    let synonyms = folder.path().join("synonyms.txt");
    std::fs::write(&synonyms, "報失,掛失\n").unwrap();
    config.synonyms = Some(synonyms);
    assert_eq!([found_by_words(&config, "報失"), found_by_words(&config, "报失")], [["0"], ["0"]]);
}

#[test]
fn every_input_file_is_part_of_the_digest_of_an_index() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path(), &["甘油三酯偏高", "关节不适"]);
    let (words, synonyms) = (folder.path().join("words.txt"), folder.path().join("synonyms.txt"));
    let mut n_indexes = 0;
    let mut other = |config: &RetrievalConfig, what: &str| {
        found_by_words(config, "关节");
        n_indexes += 1;
        assert_eq!(indexes(config).len(), n_indexes, "{what}");
    };
    other(&config, "the knowledge base");
    std::fs::write(config.lexicon.as_ref().unwrap(), SMALL_LEXICON.replace("用法", "吃法")).unwrap();
    other(&config, "the lexicon's content");
    for (text, what) in [("甘油三酯\n", "a user dictionary"), ("甘油三酯\n关节不适\n", "its content")] {
        std::fs::write(&words, text).unwrap();
        config.user_dictionary = Some(words.clone());
        other(&config, what);
    }
    for (text, what) in [("关节,膝盖\n", "synonyms"), ("关节,膝盖,腿\n", "their content")] {
        std::fs::write(&synonyms, text).unwrap();
        config.synonyms = Some(synonyms.clone());
        other(&config, what);
    }
    // The same file as synonyms instead of dictionary.
    (config.user_dictionary, config.synonyms) = (None, Some(words.clone()));
    std::fs::write(&words, "甲,乙\n").unwrap();
    other(&config, "synonyms alone");
    (config.user_dictionary, config.synonyms) = (Some(words), None);
    other(&config, "a dictionary of the same content");
}

/// Regression: an index with another segmentation was used. If this fails, texts are indexed in another way than before: increase
/// [`INDEX_VERSION`] and the number in [`FORM`], then put the new digest or words here.
#[test]
fn the_index_format_matches_how_texts_are_indexed() {
    let segmenter = Segmenter::default();
    let reranker = LexiconReranker::new(Arc::new(Lexicon::parse(SMALL_LEXICON).unwrap()));
    let texts = [
        "深海鱼油软胶囊 EPA１０００mg的食用方法，每日两粒。",
        "甘油三酯偏高的人怎么吃 café 𠮷",
        "鱼油 用法：餐后温水送服",
    ];
    let mut seen = String::new();
    for text in texts {
        let passage = Passage { id: "1".into(), title: String::new(), text: text.into() };
        let traits = serde_json::to_string(&reranker.traits(&passage)).unwrap();
        seen.push_str(&format!("{:?} {traits}\n", segmenter.tokens(&crate::text::fold(text))));
    }
    let digest = "1e76e2030a3e4e2cc22dc44d8e9f85e47221a3895b950e4ce0e659eb1d307a8e";
    // Languages with spaces: without a stemmer, whose release FORM names.
    let spaced = |text: &str, language| segmenter.clone().in_language(language).tokens(&crate::text::fold(text));
    let words = ["burger", "innen", "snake", "case", "hauser", "it's", "60cm"];
    assert_eq!(spaced("Bürger:innen snake_case Häuser it’s, 60cm", Language::Other), words);
    let german = spaced("Bürger innen snake case Häuser", Language::De);
    assert_eq!(spaced("Bürger:innen snake_case Häuser", Language::De), german);
    assert_eq!(INDEX_VERSION, 7);
    assert!(FORM.starts_with("querl index 6; "), "{FORM}");
    assert_eq!(querl_core::fsx::digest_hex(seen.as_bytes()), digest, "{seen}");
}

/// Regression: an index of another release of a library was used.
#[test]
fn the_index_format_names_the_releases_of_the_lock_file() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.lock");
    let lock = std::fs::read_to_string(path).unwrap();
    for release in FORM.split_once("; ").unwrap().1.split(", ").chain(ENCODER.split(", ")) {
        let (name, version) = release.split_once(' ').unwrap();
        let entry = format!("name = \"{name}\"\nversion = \"{version}\"\n");
        assert!(lock.contains(&entry), "{release}: put the version of Cargo.lock here");
    }
}

#[test]
fn a_damaged_index_is_built_again() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &["甘油三酯偏高", "关节不适"]);
    assert_eq!(found_by_words(&config, "关节"), ["1"]);
    let index = indexes(&config).remove(0);
    let store = std::fs::read_dir(&index).unwrap().map(|entry| entry.unwrap().path());
    let store = store.into_iter().find(|path| path.extension().is_some_and(|name| name == "store")).unwrap();
    let mut bytes = std::fs::read(&store).unwrap();
    bytes[10] ^= 1;
    std::fs::write(&store, bytes).unwrap();
    assert_eq!(found_by_words(&config, "关节"), ["1"]);
    std::fs::write(index.join("meta.json"), "{").unwrap();
    assert_eq!(found_by_words(&config, "关节"), ["1"]);
    assert_eq!(indexes(&config), [index]);
}

#[test]
fn search_works_without_a_writable_index_folder() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path(), &["关节不适"]);
    config.index_dir = Some(folder.path().join("kb.jsonl").join("below-a-file"));
    assert_eq!(found_by_words(&config, "关节"), ["0"]);
}

/// As root, who can write anywhere, the damaged index is built again in the same folder.
#[cfg(unix)]
#[test]
fn a_read_only_cache_is_used_and_a_damaged_index_in_it_is_built_elsewhere() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &["关节不适"]);
    found_by_words(&config, "关节");
    let index = indexes(&config).remove(0);
    let allow = |mode| {
        for path in [&index, config.index_dir.as_ref().unwrap()] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
    };
    let names = || {
        let names = std::fs::read_dir(&index).unwrap().map(|entry| entry.unwrap().file_name());
        names.collect::<BTreeSet<_>>()
    };
    let before = names();
    allow(0o555);
    assert_eq!(found_by_words(&config, "关节"), ["0"]);
    assert_eq!(names(), before, "reading leaves nothing behind");
    allow(0o755);
    std::fs::write(index.join("meta.json"), "{").unwrap();
    allow(0o555);
    assert_eq!(found_by_words(&config, "关节"), ["0"]);
    allow(0o755);
}

#[test]
fn other_folders_next_to_the_indexes_are_not_removed() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = config(folder.path(), &["关节不适"]);
    first.indexes_kept = 1;
    let base = first.index_dir.clone().unwrap();
    let foreign = ["notes", "0123456789abcdef", ".hidden"].map(|name| base.join(name));
    for path in &foreign {
        std::fs::create_dir_all(path).unwrap();
        std::fs::write(path.join("meta.json"), "{}").unwrap();
    }
    found_by_words(&first, "关节");
    let mut second = config(folder.path(), &["甘油三酯偏高"]);
    second.indexes_kept = 1;
    found_by_words(&second, "关节");
    assert!(foreign.iter().all(|path| path.join("meta.json").is_file()));
    assert_eq!(indexes(&second).len(), foreign.len() + 1, "only the second index is left");
}

#[test]
fn the_least_recently_used_index_is_removed_first() {
    let folder = tempfile::tempdir().unwrap();
    let ask = |text: &str| {
        let mut config = config(folder.path(), &[text]);
        config.indexes_kept = 2;
        found_by_words(&config, "关节");
        // Resolution of file times.
        std::thread::sleep(std::time::Duration::from_millis(20));
        indexes(&config)
    };
    let first = ask("一").remove(0);
    let both = ask("二");
    let second = both.into_iter().find(|path| *path != first).unwrap();
    ask("一");
    let left = ask("三");
    assert!(left.contains(&first) && !left.contains(&second) && left.len() == 2, "{left:?}");
}

#[test]
fn concurrent_users_of_an_index_build_it_once() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &["甘油三酯偏高", "关节不适"]);
    let model = Arc::new(JointsEmbedder::default());
    let models = LocalModels { embedder: Some(model.clone()), ..LocalModels::default() };
    for damage in [false, true] {
        if damage {
            std::fs::write(indexes(&config)[0].join("vectors.f32"), [0; 16]).unwrap();
        }
        let before = model.0.load(Ordering::SeqCst);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| EmbeddedRetriever::open(&config, &models).unwrap());
            }
        });
        assert_eq!(model.0.load(Ordering::SeqCst) - before, 2, "two passages, once");
        assert_eq!(indexes(&config).len(), 1);
    }
}

#[test]
fn a_change_of_files_while_an_index_is_built_is_an_error() {
    /// An embedder that changes the knowledge base while it computes vectors.
    struct Meddler(PathBuf);
    impl Embedder for Meddler {
        fn embed(&self, texts: &[&str]) -> Result<Vec<Vec<f32>>, LocalModelError> {
            std::fs::write(&self.0, "{\"id\": \"9\", \"text\": \"另一个\"}\n").unwrap();
            Ok(vec![vec![1.0]; texts.len()])
        }

        fn dimension(&self) -> usize {
            1
        }

        fn digest(&self) -> &str {
            "meddler"
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &["关节不适"]);
    let meddler = Meddler(config.knowledge_base.clone().unwrap());
    let models = LocalModels { embedder: Some(Arc::new(meddler)), ..LocalModels::default() };
    let error = EmbeddedRetriever::open(&config, &models).err().unwrap().to_string();
    assert!(error.contains("changed while its index was built"), "{error}");
    assert!(indexes(&config).is_empty());
}

#[test]
fn an_index_with_a_missing_file_is_built_again() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &["甘油三酯偏高", "关节不适"]);
    let models = LocalModels { embedder: Some(Arc::new(JointsEmbedder::default())), ..LocalModels::default() };
    found(&config, &models, "关节");
    let index = indexes(&config).remove(0);
    for file in ["vectors.f32", "meta.json", "files.json"] {
        std::fs::remove_file(index.join(file)).unwrap();
        assert_eq!(found(&config, &models, "关节"), ["0", "1"], "{file}");
        assert!(index.join(file).is_file(), "{file}");
    }
}

#[test]
fn a_synonym_finds_passages_of_its_group() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path(), &["血脂偏高的人", "关节不适", "血压"]);
    assert!(found_by_words(&config, "三高指标").is_empty());
    let synonyms = folder.path().join("synonyms.txt");
    std::fs::write(&synonyms, "三高指标, 血脂, 血压\n").unwrap();
    config.synonyms = Some(synonyms);
    assert_eq!(found_by_words(&config, "三高指标"), ["0", "2"]);
    assert_eq!(found_by_words(&config, "血压"), ["0", "2"]);
    assert_eq!(found_by_words(&config, "关节"), ["1"]);
}

#[test]
fn a_group_of_synonyms_counts_once_and_may_have_entries_of_several_words() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path(), &["维生素c的用法", "vitamin c daily", "vitamin e daily"]);
    config.language = Language::Zh;
    let synonyms = folder.path().join("synonyms.txt");
    std::fs::write(&synonyms, "维生素c,vitamin c\n").unwrap();
    config.synonyms = Some(synonyms);
    let retriever = open(&config);
    let ask = |rewrite: &str| {
        let hits = search(&retriever, "问", &Context::default(), rewrite, 3);
        let mut found: Vec<_> = hits.into_iter().map(|hit| (hit.id, hit.retrieval_score.unwrap())).collect();
        found.sort_by(|a, b| a.0.cmp(&b.0));
        found
    };
    let once = ask("vitamin c");
    assert_eq!(once.iter().map(|(id, _)| id.as_str()).collect::<Vec<_>>(), ["0", "1"], "{once:?}");
    assert_eq!(ask("vitamin c vitamin c"), once);
    // The parts of the longer word count in addition to the group.
    let both = ask("维生素c vitamin c");
    assert_eq!(both, ask("维生素c"));
    assert!(both[0].1 > once[0].1 && both[1] == once[1], "{both:?}");
}

/// Regression: spaces were deleted before words were compared, and passages of equal scores were ordered by id.
#[test]
fn english_passages_are_found_and_scored_by_stemmed_words() {
    let folder = tempfile::tempdir().unwrap();
    let passages = [
        ("Robot vacuum: filters", "Rinse the particulate filter with cold water."),
        ("Kettle: descaling", "Descaling removes limescale from the heating element."),
        ("Warranty", "The warranty covers every kettle and all vacuums for two years."),
    ];
    let passage =
        |(index, (title, text)): (usize, &(&str, &str))| json!({"id": index.to_string(), "title": title, "text": text});
    let mut config = write(folder.path(), SMALL_LEXICON, passages.iter().enumerate().map(passage));
    let lexicon = r#"{"products": [{"id": "k", "name": "Kettle", "aliases": ["water boiler"]}, {"id": "v", "name": "Robot vacuum"}],
        "intents": [{"id": "d", "name": "Descaling", "house": ["descaling"], "general": ["remove chalk"]}]}"#;
    let lexicon_path = folder.path().join("lexicon.json");
    std::fs::write(&lexicon_path, lexicon).unwrap();
    let best = |config: &RetrievalConfig, query: &str, rewrite: &str| {
        search(&open(config), query, &Context::default(), rewrite, 3).remove(0)
    };
    config.lexicon = Some(lexicon_path);
    let hit = best(&config, "How do I remove chalk from water boilers?", "descaled kettles filter");
    assert!(hit.id == "1" && hit.reranker_score > 0.8, "{hit:?}");
    config.lexicon = None;
    let hit = best(&config, "rinsing filters", "kettles descaled");
    assert_eq!((hit.id.as_str(), hit.reranker_score), ("1", 0.6), "in the order of the first stage");
    assert!(best(&config, "rinsing filters", "filter").reranker_score > 0.7);
}

#[test]
fn without_a_lexicon_scores_that_a_reranker_replaces_are_not_computed() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path(), &["the bottle cap", "a bottle cap and its warranty"]);
    let scores = |config: &RetrievalConfig| -> Vec<(String, f64)> {
        let hits = search(&open(config), "bottle warranty", &Context::default(), "bottle cap warranty", 2);
        hits.into_iter().map(|hit| (hit.id, hit.reranker_score)).collect()
    };
    let with_lexicon = scores(&config);
    config.rerank.kind = RerankKind::Tei;
    // First-stage scores order the candidates, and hits with equal reranker scores.
    assert_eq!(scores(&config), with_lexicon);
    config.lexicon = None;
    assert_eq!(scores(&config), [("1".to_owned(), 0.0), ("0".to_owned(), 0.0)]);
    config.rerank.kind = RerankKind::None;
    assert!(scores(&config).iter().all(|(_, score)| *score >= 0.6));
}

#[test]
fn a_user_word_is_found_as_one_word() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path(), &["臻萃轻盈小绿瓶一盒", "绿瓶装的轻盈水"]);
    let dictionary = folder.path().join("words.txt");
    std::fs::write(&dictionary, "臻萃轻盈小绿瓶 100000\n").unwrap();
    config.user_dictionary = Some(dictionary);
    let hits = search(&open(&config), "问", &Context::default(), "臻萃轻盈小绿瓶", 2);
    let bm25 = |id: &str| hits.iter().find(|hit| hit.id == id).map(|hit| hit.retrieval_score.unwrap());
    assert!(bm25("0").unwrap() > bm25("1").unwrap_or(0.0), "{hits:?}");
    std::fs::write(folder.path().join("words.txt"), "臻萃 99999999999999999999\n").unwrap();
    let error = EmbeddedRetriever::open(&config, &LocalModels::default()).err().unwrap().to_string();
    assert!(error.contains("words.txt: line 1 has the frequency `99999999999999999999`"), "{error}");
}

/// Embeds whether a text is about joints; counts texts.
#[derive(Default)]
struct JointsEmbedder(AtomicUsize);

impl Embedder for JointsEmbedder {
    fn embed(&self, texts: &[&str]) -> Result<Vec<Vec<f32>>, LocalModelError> {
        self.0.fetch_add(texts.len(), Ordering::SeqCst);
        let joints = |text: &&str| text.contains("关节") || text.contains("膝盖");
        Ok(texts.iter().map(|text| if joints(text) { vec![1.0, 0.0] } else { vec![0.0, 1.0] }).collect())
    }

    fn dimension(&self) -> usize {
        2
    }

    fn digest(&self) -> &str {
        "joints"
    }
}

/// Regression: passages with equal reranker scores were ordered by their ids, so that a knowledge base whose lexicon knows little lost the
/// order of BM25.
#[test]
fn of_equal_reranker_scores_the_order_of_the_first_stage_holds() {
    let folder = tempfile::tempdir().unwrap();
    let texts = ["the cap of the bottle", "bottle warranty and returns of a bottle", "warranty of the bottle cap"];
    let retriever = open(&config(folder.path(), &texts));
    let hits = search(&retriever, "opening hours", &Context::default(), "bottle cap warranty", 3);
    assert!(hits.iter().all(|hit| hit.reranker_score == hits[0].reranker_score), "{hits:?}");
    let by_first_score = |hits: &[Hit]| hits.is_sorted_by(|a, b| a.retrieval_score >= b.retrieval_score);
    assert!(by_first_score(&hits) && hits[0].id == "2", "{hits:?}");
}

#[test]
fn vectors_find_passages_without_common_words_and_are_computed_once() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &["甘油三酯偏高", "关节不适", "甘油三酯正常"]);
    let model = Arc::new(JointsEmbedder::default());
    let models = LocalModels { embedder: Some(model.clone()), ..LocalModels::default() };
    assert!(found_by_words(&config, "膝盖疼").is_empty());
    // Passage 1 by its vector, 0 as the first of those with equal scores.
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

const LEXICON: &str = r#"{
  "products": [
    {"id": "a", "name": "深海鱼油软胶囊", "aliases": ["鱼油"]},
    {"id": "b", "name": "藻油软胶囊", "aliases": ["藻油", "DHA"]},
    {"id": "c", "name": "维生素C泡腾片", "aliases": ["维C"]}
  ],
  "intents": [
    {"id": "usage", "name": "食用方法", "house": ["食用方法"], "general": ["怎么吃"], "cues": ["一天几粒"]},
    {"id": "price", "name": "规格售价", "house": ["建议零售价"], "general": ["多少钱"], "cues": ["贵"]}
  ],
  "synonyms": [["餐后", "饭后"]],
  "homophones": ["油由"]
}"#;

const PASSAGES: [[&str; 3]; 6] = [
    ["a-usage", "深海鱼油软胶囊 食用方法", "每日两粒，餐后温水送服。"],
    ["a-price", "深海鱼油软胶囊 建议零售价", "一瓶一百粒，129元。"],
    ["b-usage", "藻油软胶囊 食用方法", "每日一粒，早餐时服用。"],
    ["b-price", "藻油软胶囊 建议零售价", "一瓶六十粒，159元。"],
    ["c-usage", "维生素C泡腾片 食用方法", "每日一片，放进温水里溶化。"],
    ["c-price", "维生素C泡腾片 建议零售价", "一管二十片，39元。"],
];

fn retriever() -> EmbeddedRetriever {
    let folder = tempfile::tempdir().unwrap();
    let passages = PASSAGES.map(|[id, title, text]| json!({"id": id, "title": title, "text": text}));
    // The index is mapped into memory and outlives its folder.
    open(&write(folder.path(), LEXICON, passages))
}

fn history(text: &str) -> Context {
    Context { user_profile: String::new(), history_summary: text.into() }
}

fn scores(retriever: &EmbeddedRetriever, query: &str, context: &Context) -> HashMap<String, f64> {
    let query_intent = retriever.query_intent(query, context).unwrap();
    retriever.rank_all(&query_intent).unwrap().into_iter().map(|(passage, score)| (passage.id, score)).collect()
}

#[test]
fn scores_decrease_from_right_to_similar_to_wrong_passages() {
    let retriever = retriever();
    let found = scores(&retriever, "鱼由一天几粒，饭后行吗", &Context::default());
    assert!(found["a-usage"] > 0.8, "{found:?}");
    assert!((0.35..0.6).contains(&found["a-price"]), "{found:?}");
    assert!((0.25..0.55).contains(&found["b-usage"]), "{found:?}");
    assert!(found["c-price"] < 0.2, "{found:?}");
}

#[test]
fn without_a_product_in_the_query_the_last_of_the_history_counts() {
    let retriever = retriever();
    let context = history("先问了藻油的价格，后来改看鱼油");
    assert!(scores(&retriever, "怎么吃", &context)["a-usage"] > 0.8);
    assert!(scores(&retriever, "维C怎么吃", &context)["c-usage"] > 0.8);
    assert!(scores(&retriever, "它能和维C一起怎么吃", &context)["a-usage"] > 0.8);
}

#[test]
fn no_rewrite_moves_the_score_of_a_passage() {
    let retriever = retriever();
    let context = history("在看鱼油");
    let truth = scores(&retriever, "贵不贵", &context);
    let best = truth.values().copied().fold(0.0, f64::max);
    let tricks = [
        "深海鱼油软胶囊 建议零售价".to_owned(),
        "建议零售价 ".repeat(200),
        "深海鱼油软胶囊 藻油软胶囊 维生素C泡腾片 食用方法 建议零售价".to_owned(),
        "温水".to_owned(),
        "+text:* OR \"\" AND NOT (".to_owned(),
    ];
    for rewrite in &tricks {
        for hit in search(&retriever, "贵不贵", &context, rewrite, 5) {
            assert_eq!(hit.reranker_score, truth[hit.id.as_str()], "{rewrite}");
            assert!(hit.reranker_score <= best);
        }
    }
}

#[test]
fn empty_rewrite_finds_nothing() {
    let retriever = retriever();
    for rewrite in ["", " ，。！ "] {
        assert_eq!(search(&retriever, "鱼油怎么吃", &Context::default(), rewrite, 5), []);
    }
}

#[test]
fn a_repeated_word_counts_as_often_as_it_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let retriever = open(&config(folder.path(), &["refund of a ticket", "timetable of a ferry"]));
    let ask = |rewrite: &str| {
        let hits = search(&retriever, "when", &Context::default(), rewrite, 2);
        hits.into_iter().map(|hit| (hit.id, hit.retrieval_score.unwrap())).collect::<HashMap<_, _>>()
    };
    let (once, twice) = (ask("refund timetable"), ask("timetable refund timetable"));
    assert_eq!((twice["0"], twice["1"]), (once["0"], 2.0 * once["1"]));
}

#[test]
fn hits_are_in_the_order_of_the_reranker() {
    let hits = search(&retriever(), "鱼油怎么吃", &Context::default(), "鱼油 食用方法", 5);
    assert_eq!(hits.iter().map(|hit| hit.rank).collect::<Vec<_>>(), (1..=hits.len() as u32).collect::<Vec<_>>());
    assert!(hits.is_sorted_by(|a, b| a.reranker_score >= b.reranker_score));
}

#[test]
fn passages_below_the_threshold_are_left_out() {
    let (original_query, rewritten_query) = ("鱼油怎么吃", "深海鱼油软胶囊 食用方法");
    let request = RetrievalRequest { original_query, context: &Context::default(), rewritten_query };
    let limits = RetrievalLimits { top_k: 5, score_threshold: 0.7 };
    let hits = retriever().search_now(&request, limits).unwrap();
    assert_eq!(hits.iter().map(|hit| hit.id.as_str()).collect::<Vec<_>>(), ["a-usage"]);
    assert!(hits[0].text.starts_with("深海鱼油软胶囊 食用方法\n每日两粒"));
}

#[test]
fn invalid_files_are_named() {
    let (folder, path) = crate::scratch_file("lexicon.json");
    std::fs::write(&path, r#"{"products": [], "intents": []}"#).unwrap();
    let error = Lexicon::read(&path).unwrap_err().to_string();
    assert!(
        error.contains(
            "lexicon.json: not a lexicon: it needs at least one product and one intent; correct the file, or "
        ),
        "{error}"
    );
    let path = folder.path().join("kb.jsonl");
    std::fs::write(&path, "{\"id\": \"a\", \"text\": \"x\"}\n{\"id\": \"a\", \"text\": \"y\"}\n").unwrap();
    let error = crate::read_passages(&path).unwrap_err().to_string();
    let expected = "kb.jsonl:2: the id `a` occurs twice, first in line 1; give each passage its own";
    assert!(error.ends_with(expected), "{error}");
    // Symptom of the last four: they were accepted.
    let cases = r#"
{"id": "", "text": "x"} | the id is empty; give each passage its own
{"id": " ", "text": "x"} | the id is empty; give each passage its own
{"id": "\u200b", "text": "x"} | the id is empty; give each passage its own
{"id": "b", "text": "\n"} | the text of `b` is empty; write one, or remove the line
{"id": "b", "text": "\u200b \u2060\ufeff"} | the text of `b` is empty; write one, or remove the line
{"id": "b\u3000", "text": "x"} | the id "b\u{3000}" has the character '\u{3000}', which separates the ids in a list of gold ids; write the id without it
{"id": "b,c", "text": "x"} | the id "b,c" has the character ',', which separates the ids in a list of gold ids; write the id without it
{"id": "b\u200d", "text": "x"} | the id "b\u{200d}" has the character '\u{200d}', which is invisible; write the id without it
"#;
    for case in cases.trim().lines() {
        let (line, expected) = case.split_once(" | ").unwrap();
        std::fs::write(&path, format!("{{\"id\": \"a\", \"text\": \"x\"}}\n{line}\n")).unwrap();
        let error = crate::read_passages(&path).unwrap_err().to_string();
        assert!(error.ends_with(&format!("kb.jsonl:2: {expected}")), "{error}");
    }
}

/// Symptom: a knowledge base in csv, whose queries may be in csv, was "not JSON".
#[test]
fn a_knowledge_base_may_be_a_table() {
    let (folder, path) = crate::scratch_file("kb.csv");
    std::fs::write(&path, "text,source,id\n鱼油饭后吃,web,a\n,,\n\"一天, 两粒\",web,007\n").unwrap();
    let read = |path: &Path| crate::read_passages(path).map_err(|error| error.to_string());
    let passage = |id: &str, text: &str| Passage { id: id.into(), title: String::new(), text: text.into() };
    assert_eq!(read(&path), Ok(vec![passage("a", "鱼油饭后吃"), passage("007", "一天, 两粒")]));
    std::fs::write(&path, "id,text\na,x\na,y\n").unwrap();
    let error = read(&path).unwrap_err();
    assert!(
        error.ends_with("kb.csv:3: the id `a` occurs twice, first in line 2; give each passage its own"),
        "{error}"
    );
    let expected = "kb.csv: has no column `id`; it has the columns `nr`, `text`; retrieval.knowledge_base is a file of JSON lines, \
                    .csv, .tsv, .xlsx or .parquet, with id, text and optionally title";
    let separated = "kb.csv: has no column `id` and no column `text`; it has the columns `id;text`; save it with `,` instead of `;` \
                     between cells, or with tabs as .tsv";
    // Symptom of the repeated names: the first column was read.
    for (table, expected) in [
        ("nr,text\na,x\n", expected),
        ("id;text\na;x\n", separated),
        ("passages\nid,text\na,x\n", "; row 2 looks like the header: delete the rows above it"),
        ("id,text,text\na,x,y\n", "kb.csv: columns 2 and 3 are both called `text`; rename one of them"),
        ("id,id,text\na,b,x\n", "kb.csv: columns 1 and 2 are both called `id`; rename one of them"),
    ] {
        std::fs::write(&path, table).unwrap();
        let error = read(&path).unwrap_err();
        assert!(error.ends_with(expected), "{error}");
    }
    // By its name a file of JSON lines.
    let other = folder.path().join("kb.txt");
    std::fs::write(&other, "id,text\na,x\n").unwrap();
    assert!(read(&other).unwrap_err().contains("kb.txt:1: not JSON ("));
}

fn points(query: &str, context: &Context, rewrite: &str) -> f64 {
    let judge = RubricJudge::new(Lexicon::parse(LEXICON).unwrap());
    judge.score(&JudgeRequest { query, context, rewrite, messages: &[] }).0
}

#[test]
fn better_rewrites_get_more_rubric_points() {
    let context = history("在看鱼油");
    let rewrites = [
        "深海鱼油软胶囊 食用方法 饭后",
        "深海鱼油软胶囊 怎么吃 饭后",
        "鱼油 怎么吃 饭后",
        "深海鱼油软胶囊",
        "藻油软胶囊 食用方法",
        "",
    ];
    let given = rewrites.map(|rewrite| points("饭后一天几粒", &context, rewrite));
    assert!(given.is_sorted_by(|a, b| a > b), "{given:?}");
    assert!(given[0] > 4.5 && given[5] == 0.0, "{given:?}");
}

#[test]
fn tricks_do_not_pay() {
    let context = history("在看鱼油");
    let honest = points("一天几粒", &context, "深海鱼油软胶囊 食用方法");
    for trick in [
        "深海鱼油软胶囊 藻油软胶囊 维生素C泡腾片 食用方法".to_owned(),
        "深海鱼油软胶囊 食用方法 ".repeat(20),
        "一天几粒".to_owned(),
        "好".to_owned(),
    ] {
        assert!(points("一天几粒", &context, &trick) < honest - 0.4, "{trick}");
    }
}

#[tokio::test]
async fn rubric_judgements_are_in_the_form_that_tenants_parse() {
    let judge = RubricJudge::new(Lexicon::parse(LEXICON).unwrap());
    let context = Context::default();
    let request =
        JudgeRequest {
            query: "鱼油贵不贵", context: &context, rewrite: "深海鱼油软胶囊 建议零售价", messages: &[]
        };
    let text = judge.judge(request).await.unwrap().text;
    let parsed: Value = serde_json::from_str(&text).unwrap();
    assert!((0.0..=5.0).contains(&parsed["综合得分"].as_f64().unwrap()), "{text}");
    assert!(!parsed["评分理由"].as_str().unwrap().is_empty());
    assert_eq!(judge.name(), "rubric (stand-in)");
}

#![allow(clippy::unwrap_used)]

use crate::{EmbeddedRetriever, LocalModels, RetrievalLimits};
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
    let limits = RetrievalLimits { top_k: 2, score_threshold: 0.0 };
    let mut ids: Vec<String> = retriever.search_now(&request, limits).unwrap().into_iter().map(|hit| hit.id).collect();
    ids.sort();
    ids
}

fn plain(config: &RetrievalConfig, rewrite: &str) -> Vec<String> {
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
}

#[test]
fn every_file_that_decides_is_part_of_an_index_s_name() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path(), &["甘油三酯偏高", "关节不适"]);
    let (words, synonyms) = (folder.path().join("words.txt"), folder.path().join("synonyms.txt"));
    let mut n_indexes = 0;
    let mut other = |config: &RetrievalConfig, what: &str| {
        plain(config, "关节");
        n_indexes += 1;
        assert_eq!(indexes(config).len(), n_indexes, "{what}");
    };
    other(&config, "the knowledge base");
    std::fs::write(config.lexicon.as_ref().unwrap(), LEXICON.replace("用法", "吃法")).unwrap();
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
    // The same content in another role.
    (config.user_dictionary, config.synonyms) = (None, Some(words.clone()));
    std::fs::write(&words, "甲,乙\n").unwrap();
    other(&config, "synonyms alone");
    (config.user_dictionary, config.synonyms) = (Some(words), None);
    other(&config, "a dictionary of the same content");
}

/// Regression: an index of another way to cut or read texts, taken for this one's. If this fails, texts are cut or read otherwise than
/// before: another number in `sources::FORM`, then the digest that is found here.
#[test]
fn a_change_in_how_texts_are_cut_and_read_is_another_form() {
    let (segmenter, lexicon) =
        (crate::retrieval::segment::Segmenter::default(), tempfile::NamedTempFile::new().unwrap());
    std::fs::write(lexicon.path(), LEXICON).unwrap();
    let reranker = crate::retrieval::lexicon_reranker::LexiconReranker::new(Arc::new(
        crate::judge::lexicon::Lexicon::read(lexicon.path()).unwrap(),
    ));
    let texts = [
        "深海鱼油软胶囊 EPA１０００mg的食用方法，每日两粒。",
        "甘油三酯偏高的人怎么吃 café 𠮷",
        "鱼油 用法：餐后温水送服",
    ];
    let mut seen = String::new();
    for text in texts {
        let passage = crate::Passage { id: "1".into(), title: String::new(), text: text.into() };
        let traits = serde_json::to_string(&reranker.traits(&passage)).unwrap();
        seen.push_str(&format!("{:?} {traits}\n", segmenter.tokens(&crate::text::fold(text))));
    }
    let found =
        (crate::retrieval::passages::FORM.split(';').next().unwrap(), querl_core::fsx::digest_hex(seen.as_bytes()));
    assert_eq!(
        found,
        ("querl index 2", "1e76e2030a3e4e2cc22dc44d8e9f85e47221a3895b950e4ce0e659eb1d307a8e".to_owned()),
        "{seen}"
    );
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

/// Who may write anywhere (root) sees less of this test: the damaged index is built again in its place.
#[cfg(unix)]
#[test]
fn a_cache_that_cannot_be_written_is_read_and_a_damaged_index_in_it_is_built_elsewhere() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &["关节不适"]);
    plain(&config, "关节");
    let index = indexes(&config).remove(0);
    let allow = |mode| {
        for path in [&index, config.index_dir.as_ref().unwrap()] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
    };
    let names = || {
        let names = std::fs::read_dir(&index).unwrap().map(|entry| entry.unwrap().file_name());
        names.collect::<std::collections::BTreeSet<_>>()
    };
    let before = names();
    allow(0o555);
    assert_eq!(plain(&config, "关节"), ["0"]);
    assert_eq!(names(), before, "reading leaves nothing behind");
    allow(0o755);
    std::fs::write(index.join("meta.json"), "{").unwrap();
    allow(0o555);
    assert_eq!(plain(&config, "关节"), ["0"]);
    allow(0o755);
}

#[test]
fn what_others_keep_beside_the_indexes_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = config(folder.path(), &["关节不适"]);
    first.indexes_kept = 1;
    let base = first.index_dir.clone().unwrap();
    let foreign = ["notes", "0123456789abcdef", ".hidden"].map(|name| base.join(name));
    for path in &foreign {
        std::fs::create_dir_all(path).unwrap();
        std::fs::write(path.join("meta.json"), "{}").unwrap();
    }
    plain(&first, "关节");
    let mut second = config(folder.path(), &["甘油三酯偏高"]);
    second.indexes_kept = 1;
    plain(&second, "关节");
    assert!(foreign.iter().all(|path| path.join("meta.json").is_file()));
    assert_eq!(indexes(&second).len(), foreign.len() + 1, "the first index is gone, the second is there");
}

#[test]
fn the_index_that_was_not_used_for_the_longest_time_goes_first() {
    let folder = tempfile::tempdir().unwrap();
    let ask = |text: &str| {
        let mut config = config(folder.path(), &[text]);
        config.indexes_kept = 2;
        plain(&config, "关节");
        // Times of files may be as coarse as this.
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
fn two_that_want_one_index_at_once_build_it_once() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &["甘油三酯偏高", "关节不适"]);
    let model = Arc::new(OfJoints::default());
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
fn files_that_change_while_an_index_is_built_make_none() {
    /// Writes to the knowledge base while it makes vectors of it.
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
fn a_file_that_is_missing_from_an_index_is_built_again() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &["甘油三酯偏高", "关节不适"]);
    let models = LocalModels { embedder: Some(Arc::new(OfJoints::default())), ..LocalModels::default() };
    found(&config, &models, "关节");
    let index = indexes(&config).remove(0);
    for file in ["vectors.f32", "meta.json", "files.json"] {
        std::fs::remove_file(index.join(file)).unwrap();
        assert_eq!(found(&config, &models, "关节"), ["0", "1"], "{file}");
        assert!(index.join(file).is_file(), "{file}");
    }
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
fn a_group_of_synonyms_counts_once_and_may_have_entries_of_several_words() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path(), &["维生素c的用法", "vitamin c daily", "vitamin e daily"]);
    let synonyms = folder.path().join("synonyms.txt");
    std::fs::write(&synonyms, "维生素c,vitamin c\n").unwrap();
    config.synonyms = Some(synonyms);
    let retriever = EmbeddedRetriever::open(&config, &LocalModels::default()).unwrap();
    let context = Context::default();
    let ask = |rewritten_query: &str| {
        let request = RetrievalRequest { original_query: "问", context: &context, rewritten_query };
        let hits = retriever.search_now(&request, RetrievalLimits { top_k: 3, score_threshold: 0.0 }).unwrap();
        let mut found: Vec<_> = hits.into_iter().map(|hit| (hit.id, hit.retrieval_score.unwrap())).collect();
        found.sort_by(|a, b| a.0.cmp(&b.0));
        found
    };
    let once = ask("vitamin c");
    assert_eq!(once.iter().map(|(id, _)| id.as_str()).collect::<Vec<_>>(), ["0", "1"], "{once:?}");
    assert_eq!(ask("vitamin c vitamin c"), once);
    // In addition to the group, the parts of the longer word count as ever.
    let both = ask("维生素c vitamin c");
    assert_eq!(both, ask("维生素c"));
    assert!(both[0].1 > once[0].1 && both[1] == once[1], "{both:?}");
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
    let hits = retriever.search_now(&request, RetrievalLimits { top_k: 2, score_threshold: 0.0 }).unwrap();
    let bm25 = |id: &str| hits.iter().find(|hit| hit.id == id).map(|hit| hit.retrieval_score.unwrap());
    assert!(bm25("0").unwrap() > bm25("1").unwrap_or(0.0), "{hits:?}");
    std::fs::write(folder.path().join("words.txt"), "臻萃 99999999999999999999\n").unwrap();
    let error = EmbeddedRetriever::open(&config, &LocalModels::default()).err().unwrap().to_string();
    assert!(error.contains("words.txt: line 1 has the frequency `99999999999999999999`"), "{error}");
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

#![allow(clippy::unwrap_used)]

use crate::retrieval::embedded::EmbeddedRetriever;
use crate::retrieval::{LocalModels, RetrievalLimits};
use querl_core::config::RetrievalConfig;
use querl_core::ports::RetrievalRequest;
use querl_core::records::{Context, Hit};
use serde_json::json;
use std::collections::HashMap;

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

fn retriever(folder: &tempfile::TempDir) -> EmbeddedRetriever {
    let (knowledge_base, lexicon) = (folder.path().join("kb.jsonl"), folder.path().join("lexicon.json"));
    std::fs::write(&lexicon, LEXICON).unwrap();
    let passages = PASSAGES.map(|[id, title, text]| json!({"id": id, "title": title, "text": text}));
    querl_core::fsx::write_jsonl(&knowledge_base, passages).unwrap();
    let config: RetrievalConfig = serde_json::from_value(json!({
        "kind": "embedded", "knowledge_base": knowledge_base, "lexicon": lexicon,
        "index_dir": folder.path().join("indexes"),
    }))
    .unwrap();
    EmbeddedRetriever::open(&config, &LocalModels::default()).unwrap()
}

fn history(text: &str) -> Context {
    Context { user_profile: String::new(), history_summary: text.into() }
}

const ALL: RetrievalLimits = RetrievalLimits { top_k: 5, score_threshold: 0.0 };

fn search(retriever: &EmbeddedRetriever, query: &str, context: &Context, rewritten_query: &str) -> Vec<Hit> {
    retriever.search_now(&RetrievalRequest { original_query: query, context, rewritten_query }, ALL).unwrap()
}

/// The score of each passage for one need.
fn scores(retriever: &EmbeddedRetriever, query: &str, context: &Context) -> HashMap<String, f64> {
    let query_intent = retriever.query_intent(query, context).unwrap();
    retriever.rank_all(&query_intent).unwrap().into_iter().map(|(passage, score)| (passage.id, score)).collect()
}

#[test]
fn scores_fall_from_right_to_near_miss_to_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let retriever = retriever(&folder);
    let found = scores(&retriever, "鱼由一天几粒，饭后行吗", &Context::default());
    assert!(found["a-usage"] > 0.8, "{found:?}");
    assert!((0.35..0.6).contains(&found["a-price"]), "{found:?}");
    assert!((0.25..0.55).contains(&found["b-usage"]), "{found:?}");
    assert!(found["c-price"] < 0.2, "{found:?}");
}

#[test]
fn product_comes_from_the_end_of_the_history_where_the_query_names_none() {
    let folder = tempfile::tempdir().unwrap();
    let retriever = retriever(&folder);
    let context = history("先问了藻油的价格，后来改看鱼油");
    assert!(scores(&retriever, "怎么吃", &context)["a-usage"] > 0.8);
    assert!(scores(&retriever, "维C怎么吃", &context)["c-usage"] > 0.8);
    assert!(scores(&retriever, "它能和维C一起怎么吃", &context)["a-usage"] > 0.8);
}

#[test]
fn no_rewrite_moves_the_score_of_a_passage() {
    let folder = tempfile::tempdir().unwrap();
    let retriever = retriever(&folder);
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
        for hit in search(&retriever, "贵不贵", &context, rewrite) {
            assert_eq!(hit.reranker_score, truth[hit.id.as_str()], "{rewrite}");
            assert!(hit.reranker_score <= best);
        }
    }
}

#[test]
fn empty_rewrite_finds_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let retriever = retriever(&folder);
    for rewrite in ["", " ，。！ "] {
        assert_eq!(search(&retriever, "鱼油怎么吃", &Context::default(), rewrite), []);
    }
}

#[test]
fn repeated_words_find_the_same_candidates() {
    let folder = tempfile::tempdir().unwrap();
    let retriever = retriever(&folder);
    let once = search(&retriever, "鱼油怎么吃", &Context::default(), "鱼油 食用方法");
    assert_eq!(once, search(&retriever, "鱼油怎么吃", &Context::default(), &"鱼油 食用方法 ".repeat(9)));
    assert_eq!(once.iter().map(|hit| hit.rank).collect::<Vec<_>>(), (1..=once.len() as u32).collect::<Vec<_>>());
    assert!(once.is_sorted_by(|a, b| a.reranker_score >= b.reranker_score));
}

#[test]
fn passages_below_the_threshold_are_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let (original_query, rewritten_query) = ("鱼油怎么吃", "深海鱼油软胶囊 食用方法");
    let request = RetrievalRequest { original_query, context: &Context::default(), rewritten_query };
    let limits = RetrievalLimits { score_threshold: 0.7, ..ALL };
    let hits = retriever(&folder).search_now(&request, limits).unwrap();
    assert_eq!(hits.iter().map(|hit| hit.id.as_str()).collect::<Vec<_>>(), ["a-usage"]);
    assert!(hits[0].text.starts_with("深海鱼油软胶囊 食用方法\n每日两粒"));
}

#[test]
fn unusable_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lexicon.json");
    std::fs::write(&path, r#"{"products": [], "intents": []}"#).unwrap();
    let error = crate::Lexicon::read(&path).unwrap_err().to_string();
    assert!(error.ends_with("lexicon.json: not a lexicon: it needs at least one product and one intent"), "{error}");
    let path = folder.path().join("kb.jsonl");
    std::fs::write(&path, "{\"id\": \"a\", \"text\": \"x\"}\n{\"id\": \"a\", \"text\": \"y\"}\n").unwrap();
    let error = crate::read_passages(&path).unwrap_err().to_string();
    assert!(error.ends_with("kb.jsonl: the id `a` stands twice; give each passage its own"), "{error}");
}

mod rubric {
    use super::{Context, LEXICON, history};
    use crate::{Lexicon, RubricJudge};
    use querl_core::ports::{Judge, JudgeRequest};

    fn points(query: &str, context: &Context, rewrite: &str) -> f64 {
        let judge = RubricJudge::new(Lexicon::parse(LEXICON).unwrap());
        judge.score(&JudgeRequest { query, context, rewrite, messages: &[] }).0
    }

    #[test]
    fn better_rewrites_get_more_points() {
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
    async fn answer_is_in_the_form_that_tenants_parse() {
        let judge = RubricJudge::new(Lexicon::parse(LEXICON).unwrap());
        let context = Context::default();
        let request = JudgeRequest {
            query: "鱼油贵不贵",
            context: &context,
            rewrite: "深海鱼油软胶囊 建议零售价",
            messages: &[],
        };
        let text = judge.judge(request).await.unwrap().text;
        let parsed: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert!((0.0..=5.0).contains(&parsed["综合得分"].as_f64().unwrap()), "{text}");
        assert!(!parsed["评分理由"].as_str().unwrap().is_empty());
        assert_eq!(judge.name(), "rubric (stand-in)");
    }
}

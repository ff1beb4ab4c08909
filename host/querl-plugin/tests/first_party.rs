//! The plugins of this repository as components, through the ports.
#![allow(clippy::unwrap_used)]

mod common;

use common::{candidate, competition, episode, host, open, repository};
use querl_core::ports::{PromptInput, PromptTask};
use querl_core::records::{CallFailure, Columns, Context, Episode, FailureKind, Hit, Judgement, Sample, Verdict};
use querl_plugin::{PluginKind, PluginPort};

fn judged(id: &str) -> Episode {
    Episode {
        policy: candidate(&[0.9, 0.8, 0.7], Some(4.5)),
        baseline: Some(candidate(&[0.7, 0.6, 0.5], Some(4.0))),
        ..episode(id, "胶原咋吃")
    }
}

#[test]
fn competition_scores_as_computed_by_hand() {
    let reward = competition(&host());
    assert_eq!((reward.name(), reward.range().min, reward.range().max), ("reward-competition", -1.0, 1.0));
    let scored = reward.score_batch(&[judged("a"), episode("b", "胶原咋吃")]).unwrap();
    let total = |index: usize| scored[index].as_ref().unwrap().total;
    // 0.35 tanh(0.3) + 0.40 tanh(0.6) + 0.25 * 0.5, and (0.40 tanh(0.6) + 0.25 * 0.5) / 0.65
    assert!((total(0) - 0.441_779_241_157_271).abs() < 1e-12, "{}", total(0));
    assert!((total(1) - 0.522_799_733_537_253).abs() < 1e-12, "{}", total(1));
    let names: Vec<_> = scored[0].as_ref().unwrap().components.iter().map(|part| part.name.as_str()).collect();
    assert_eq!(names, ["judge", "retrieval", "win"]);
}

#[test]
fn failures_reach_the_plugin_and_come_back_as_rejections() {
    let reward = competition(&host());
    let failure = || CallFailure { kind: FailureKind::Timeout, message: "no answer within 30 s".into() };
    let mut lost = judged("a");
    lost.baseline.as_mut().unwrap().retrieval = Some(Err(failure()));
    let mut unjudged = judged("b");
    unjudged.policy.judgement = Judgement::Failed(failure());
    let scored = reward.score_batch(&[lost, judged("c"), unjudged]).unwrap();
    assert_eq!(scored[0].as_ref().unwrap_err().code, "baseline_retrieval_failed");
    assert!(scored[1].is_ok());
    assert_eq!(scored[2].as_ref().unwrap_err().code, "policy_judgement_failed");
}

#[test]
fn batch_equals_singles() {
    let reward = competition(&host());
    let batch: Vec<_> =
        (0..20).map(|n| Episode { policy: candidate(&[f64::from(n) / 20.0], None), ..judged("x") }).collect();
    let batch: Vec<_> = batch
        .into_iter()
        .map(|mut e| {
            e.policy.judgement = e.baseline.as_ref().unwrap().judgement.clone();
            e
        })
        .collect();
    let together = reward.score_batch(&batch).unwrap();
    for (one, expected) in batch.iter().zip(together) {
        assert_eq!(reward.score_batch(std::slice::from_ref(one)).unwrap().remove(0), expected);
    }
}

#[test]
fn filter_gives_codes_in_order() {
    let filter =
        open(&host(), "plugins/filter-quality", "key_terms = ['虾青素']\nmin_top1 = 0.5", PluginPort::filter())
            .unwrap();
    let sample = |id: &str, query: &str, rewrite: &str, top1: f64| Sample {
        id: id.into(),
        original_query: query.into(),
        rewritten_query: rewrite.into(),
        context: Context::default(),
        hits: vec![Hit { id: "kb".into(), text: "文".into(), reranker_score: top1, retrieval_score: None, rank: 1 }],
        columns: Columns::default(),
    };
    let samples = [
        sample("a", "胶原咋吃", "胶原蛋白肽的服用方法", 0.55),
        sample("b", "胶原咋吃!", "胶原蛋白肽的用法用量", 0.9),
        sample("c", "虾青素咋吃", "抗氧化产品的服用方法", 0.9),
        sample("d", "多少钱", "价格", 0.1),
    ];
    let code = |verdict: Verdict| match verdict {
        Verdict::Keep => "keep".to_owned(),
        Verdict::Drop { code, .. } => code,
    };
    let codes: Vec<_> = filter.check_batch(&samples).unwrap().into_iter().map(code).collect();
    assert_eq!(codes, ["keep", "duplicate", "lost_key_terms", "top1_below_threshold"]);
}

#[test]
fn tenants_make_prompts_and_read_answers() {
    for (folder, policy_system) in [
        ("plugins/tenant-fivedoctors", "你是保健品领域的Query改写专家。"),
        ("plugins/tenant-chengla", "你是教育培训领域的Query改写专家。"),
    ] {
        let prompts = open(&host(), folder, "", PluginPort::prompts()).unwrap();
        let context = Context { user_profile: "孕妇".into(), history_summary: String::new() };
        let input = PromptInput { query: "能吃吗", context: &context, rewrite: None };
        let messages = prompts.messages(PromptTask::PolicyRewrite, &input).unwrap();
        assert_eq!((messages[0].role.as_str(), messages[0].content.as_str()), ("system", policy_system));
        assert_eq!(messages[1].content, "原始查询: 能吃吗\n用户画像: 孕妇\n\n请改写。");
        let judge = PromptInput { rewrite: Some("孕妇能否服用"), ..input };
        assert!(prompts.messages(PromptTask::Judge, &judge).unwrap()[1].content.contains("改写后的查询: 孕妇能否服用"));
        assert_eq!(prompts.parse_rewrite("<think>想</think>“孕妇能否服用”").unwrap().unwrap(), "孕妇能否服用");
        assert_eq!(prompts.parse_rewrite(" ").unwrap().unwrap_err().code, "empty_rewrite");
        let judged =
            prompts.parse_judgement("```json\n{\"综合得分\": \"４.5\", \"评分理由\": \"好\"}\n```").unwrap().unwrap();
        assert_eq!((judged.score, judged.reason.as_str()), (4.5, "好"));
        assert_eq!(prompts.parse_judgement("好").unwrap().unwrap_err().code, "no_score");
    }
}

#[test]
fn refused_and_unknown_settings_are_named() {
    let message =
        |settings| open(&host(), "plugins/filter-quality", settings, PluginPort::filter()).err().unwrap().to_string();
    let expected = "plugin filter-quality 0.2.0: setting `min_top1`: expected a number from 0 to 1, got \"high\"";
    assert_eq!(message("min_top1 = 'high'"), expected);
    let expected =
        "plugin filter-quality 0.2.0: setting `min_top`: the plugin knows no such setting; did you mean `min_top1`?";
    assert_eq!(message("min_top = 0.5"), expected);
}

#[test]
fn a_plugin_of_another_kind_is_refused() {
    let host = host();
    assert_eq!(host.load(&repository().join("plugins/filter-quality")).unwrap().kinds(), [PluginKind::Filter]);
    let message = open(&host, "plugins/filter-quality", "", PluginPort::reward()).err().unwrap().to_string();
    assert_eq!(message, "plugin filter-quality 0.2.0: it is a filter plugin; expected a reward plugin");
}

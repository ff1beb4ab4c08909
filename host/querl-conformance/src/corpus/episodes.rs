//! Episodes for rewards.

use super::{FAILURES, Group, failure, falling_scores, hits, long_text, odd_texts};
use querl_core::records::{CallFailure, Candidate, Context, Episode, FailureKind, Hit, Judgement, StyleProbability};

const QUERIES: [(&str, &str, &str); 5] = [
    ("胶原咋吃", "胶原蛋白肽的服用方法与用量", "胶原蛋白肽 怎么吃"),
    ("孕妇能吃虾青素不", "孕妇是否适合服用虾青素软胶囊", "虾青素 孕妇 禁忌"),
    ("鱼油一天几粒啊", "深海鱼油每日推荐用量", "鱼油的食用量说明"),
    ("我的快递到哪了", "订单物流状态查询", "快递物流进度"),
    ("吃他汀还能吃辅酶吗", "辅酶Q10与他汀类药物同服的注意事项", "辅酶Q10 他汀"),
];

/// A candidate with `n_hits` hits and a judgement, without a style.
fn candidate(rewrite: &str, seed: usize, n_hits: usize) -> Candidate {
    Candidate {
        rewrite: rewrite.into(),
        retrieval: Ok(hits(&falling_scores(seed, n_hits))),
        judgement: scored((seed * 7 % 11) as f64 / 2.0, "意图完整，术语准确"),
        style: None,
        n_tokens: 12 + seed as u32 % 9,
        truncated: false,
    }
}

/// An episode in Chinese with five hits and a judgement on each side.
pub(crate) fn ordinary(id: impl Into<String>, seed: usize) -> Episode {
    let (query, policy, baseline) = QUERIES[seed % QUERIES.len()];
    Episode {
        id: id.into(),
        query: query.into(),
        context: Context {
            user_profile: "女，32岁，孕中期".into(),
            history_summary: "用户问过胶原蛋白肽的成分".into(),
        },
        gold_ids: vec!["kb-002".into()],
        policy: candidate(policy, seed, 5),
        baseline: candidate(baseline, seed + 3, 5),
    }
}

pub(crate) fn ordinary_batch(n: usize) -> Vec<Episode> {
    (0..n).map(|index| ordinary(format!("step-000001/{index:08}/0"), index)).collect()
}

/// `n` episodes with distinct ids, ordinary and odd ones mixed.
pub(crate) fn batch(n: usize) -> Vec<Episode> {
    let odd: Vec<_> = groups().into_iter().filter(|group| group.name != "long").flat_map(|group| group.items).collect();
    let mixed = (0..n).map(|index| match index % 2 {
        0 => ordinary(format!("batch/{index}"), index),
        _ => Episode { id: format!("batch/{index}"), ..odd[(index / 2 * 3) % odd.len()].clone() },
    });
    mixed.collect()
}

pub(crate) fn groups() -> Vec<Group<Episode>> {
    vec![
        Group { name: "texts", items: with_texts() },
        Group { name: "long", items: with_long_texts() },
        Group { name: "failures", items: failures() },
        Group { name: "judgements", items: judgements() },
        Group { name: "hits", items: with_hits() },
        Group { name: "particulars", items: particulars() },
    ]
}

fn scored(score: f64, reason: &str) -> Judgement {
    Judgement::Scored { score, reason: reason.into() }
}

/// An ordinary episode with one change.
fn changed(id: impl Into<String>, change: impl FnOnce(&mut Episode)) -> Episode {
    let mut episode = ordinary(id, 4);
    change(&mut episode);
    episode
}

fn with_texts() -> Vec<Episode> {
    let everywhere = |(name, text): (&str, &str)| {
        changed(name, |episode| {
            episode.query = text.into();
            episode.context = Context { user_profile: text.into(), history_summary: text.into() };
            episode.gold_ids = vec![text.into()];
            for candidate in [&mut episode.policy, &mut episode.baseline] {
                candidate.rewrite = text.into();
                candidate.judgement = scored(3.0, text);
                candidate.style = Some(vec![StyleProbability { label: text.into(), probability: 1.0 }]);
                for hit in candidate.retrieval.iter_mut().flatten() {
                    (hit.id, hit.text) = (text.into(), text.into());
                }
            }
        })
    };
    let policy_only = |(name, text): (&str, &str)| {
        changed(format!("policy-rewrite-{name}"), |episode| episode.policy.rewrite = text.into())
    };
    let odd = odd_texts();
    odd.iter().copied().map(everywhere).chain(odd.iter().copied().take(3).map(policy_only)).collect()
}

fn with_long_texts() -> Vec<Episode> {
    vec![
        changed("long-query", |episode| episode.query = long_text()),
        changed("long-history", |episode| episode.context.history_summary = long_text()),
        changed("long-policy-rewrite", |episode| episode.policy.rewrite = long_text()),
        changed("long-baseline-rewrite", |episode| episode.baseline.rewrite = long_text()),
        changed("long-passage", |episode| {
            episode.policy.retrieval.iter_mut().flatten().take(1).for_each(|hit| hit.text = long_text());
        }),
    ]
}

fn failures() -> Vec<Episode> {
    let of_policy = FAILURES.into_iter().map(|kind| {
        changed(format!("policy-retrieval-{kind}").replace(' ', "-"), |episode| {
            episode.policy.retrieval = Err(failure(kind));
        })
    });
    let timeout = || failure(FailureKind::Timeout);
    let others = [
        changed("baseline-retrieval-failed", |episode| episode.baseline.retrieval = Err(timeout())),
        changed("both-retrievals-failed", |episode| {
            (episode.policy.retrieval, episode.baseline.retrieval) = (Err(timeout()), Err(timeout()));
        }),
        changed("failed-without-a-message", |episode| {
            episode.policy.retrieval = Err(CallFailure { message: String::new(), ..timeout() });
        }),
        changed("policy-judgement-failed", |episode| episode.policy.judgement = Judgement::Failed(timeout())),
        changed("baseline-judgement-failed", |episode| episode.baseline.judgement = Judgement::Failed(timeout())),
        changed("everything-failed", |episode| {
            for candidate in [&mut episode.policy, &mut episode.baseline] {
                (candidate.retrieval, candidate.judgement) = (Err(timeout()), Judgement::Failed(timeout()));
            }
        }),
    ];
    of_policy.chain(others).collect()
}

fn judgements() -> Vec<Episode> {
    let judged = |id: &str, policy: Judgement, baseline: Judgement| {
        changed(id, |episode| (episode.policy.judgement, episode.baseline.judgement) = (policy, baseline))
    };
    vec![
        judged("not-judged", Judgement::NotSampled, Judgement::NotSampled),
        judged("policy-judged-only", scored(4.0, "好"), Judgement::NotSampled),
        judged("baseline-judged-only", Judgement::NotSampled, scored(4.0, "好")),
        judged("judged-0-and-5", scored(0.0, ""), scored(5.0, "")),
        judged("judged-5-and-0", scored(5.0, ""), scored(0.0, "")),
        judged("judged-between", scored(0.1 + 0.2, ""), scored(f64::MIN_POSITIVE, "")),
    ]
}

fn with_hits() -> Vec<Episode> {
    let found = |id: &str, policy: &[f64], baseline: &[f64]| {
        changed(id, |episode| {
            (episode.policy.retrieval, episode.baseline.retrieval) = (Ok(hits(policy)), Ok(hits(baseline)))
        })
    };
    let first_stage = |id: &str, score: Option<f64>| {
        changed(id, |episode| {
            episode.policy.retrieval.iter_mut().flatten().for_each(|hit| hit.retrieval_score = score);
        })
    };
    let five = [0.9, 0.8, 0.5, 0.5, 0.1];
    let (zeros, ones) = ([0.0; 5], [1.0; 5]);
    vec![
        found("policy-found-nothing", &[], &five),
        found("baseline-found-nothing", &five, &[]),
        found("nothing-found", &[], &[]),
        found("one-hit", &[0.7], &[0.4]),
        found("two-hits", &[0.7, 0.2], &[0.4, 0.4]),
        found("hundred-hits", &falling_scores(2, 100), &falling_scores(3, 100)),
        found("hundred-hits-and-none", &falling_scores(2, 100), &[]),
        found("equal-scores", &five, &five),
        found("all-0", &zeros, &zeros),
        found("all-1", &ones, &ones),
        found("1-against-0", &ones, &zeros),
        found("0-against-1", &zeros, &ones),
        found("smallest-scores", &[f64::MIN_POSITIVE, 5e-324], &[1.0 - f64::EPSILON / 2.0]),
        first_stage("no-first-stage-score", None),
        first_stage("first-stage-score-negative", Some(-3.5)),
        first_stage("first-stage-score-largest", Some(f64::MAX)),
        changed("same-passage-twice", |episode| {
            episode.policy.retrieval.iter_mut().flatten().for_each(|hit| hit.id = "kb-001".into());
        }),
    ]
}

fn particulars() -> Vec<Episode> {
    let style = |probabilities: &[f64]| {
        let class =
            |(label, probability): (&str, &f64)| StyleProbability { label: label.into(), probability: *probability };
        Some(["售前", "售后", "投诉", "闲聊", "其他"].into_iter().zip(probabilities).map(class).collect::<Vec<_>>())
    };
    let hit_ids = |hits: &[Hit]| hits.iter().map(|hit| hit.id.clone()).collect::<Vec<_>>();
    vec![
        changed("equal-sides", |episode| episode.baseline = episode.policy.clone()),
        changed("gold-unknown", |episode| episode.gold_ids.clear()),
        changed("gold-found-by-both", |episode| episode.gold_ids = vec!["kb-001".into()]),
        changed("gold-found-by-none", |episode| episode.gold_ids = vec!["kb-999".into()]),
        changed("all-hits-are-gold", |episode| {
            episode.gold_ids = hit_ids(episode.policy.retrieval.as_deref().unwrap_or_default());
        }),
        changed("hundred-gold-ids", |episode| episode.gold_ids = (0..100).map(|n| format!("kb-{n:03}")).collect()),
        changed("same-gold-id-twice", |episode| episode.gold_ids = vec!["kb-001".into(), "kb-001".into()]),
        changed("truncated", |episode| (episode.policy.truncated, episode.policy.n_tokens) = (true, 64)),
        changed("tokens-unknown", |episode| (episode.policy.n_tokens, episode.baseline.n_tokens) = (0, 0)),
        changed("tokens-largest", |episode| episode.policy.n_tokens = u32::MAX),
        changed("context-unknown", |episode| episode.context = Context::default()),
        changed("style-on-both-sides", |episode| {
            episode.policy.style = style(&[0.7, 0.1, 0.1, 0.05, 0.05]);
            episode.baseline.style = style(&[0.2; 5]);
        }),
        changed("style-on-one-side", |episode| episode.policy.style = style(&[1.0, 0.0, 0.0, 0.0, 0.0])),
    ]
}

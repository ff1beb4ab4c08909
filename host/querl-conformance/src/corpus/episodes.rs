//! Episodes for rewards.

use super::{Group, failure, falling_scores, hits, long_text, mixed, odd_texts};
use querl_core::records::{
    CallFailure, Candidate, ColumnValue, Columns, Context, Episode, FailureKind, FinishReason, Hit, Judgement, Message,
    Scalar, Split, StyleProbability,
};

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
        retrieval: Some(Ok(hits(&falling_scores(seed, n_hits)))),
        judgement: scored((seed * 7 % 11) as f64 / 2.0, "意图完整，术语准确"),
        style: None,
        n_tokens: 12 + seed as u32 % 9,
        finish_reason: Some(FinishReason::Stop),
    }
}

/// An episode in Chinese with five hits and a judgement on each side.
pub(crate) fn ordinary(id: impl Into<String>, seed: usize) -> Episode {
    let (query, policy, baseline) = QUERIES[seed % QUERIES.len()];
    let id = id.into();
    let (group_id, sample_index) = Episode::group_of(&id);
    Episode {
        group_id: group_id.to_owned(),
        sample_index,
        id,
        step: Some(1),
        split: Some(Split::Train),
        query: query.into(),
        context: Context {
            user_profile: "女，32岁，孕中期".into(),
            history_summary: "用户问过胶原蛋白肽的成分".into(),
        },
        gold_ids: vec!["kb-002".into()],
        columns: Columns(vec![
            ("类别".into(), ColumnValue::Text("保健".into())),
            ("价格".into(), ColumnValue::Number(199.0)),
            ("在售".into(), ColumnValue::Flag(true)),
            (
                "标签".into(),
                ColumnValue::Items(vec![Scalar::Text("孕妇".into()), Scalar::Number(2.5), Scalar::Flag(false)]),
            ),
        ]),
        prompt: Some(vec![
            Message { role: "system".into(), content: "你是改写专家。".into() },
            Message { role: "user".into(), content: query.into() },
        ]),
        response: Some(format!("改写后的查询：{policy}")),
        policy: candidate(policy, seed, 5),
        baseline: Some(candidate(baseline, seed + 3, 5)),
    }
}

/// The teacher's side, which ordinary episodes have.
fn baseline(episode: &mut Episode) -> &mut Candidate {
    episode.baseline.get_or_insert_default()
}

fn both(episode: &mut Episode) -> impl Iterator<Item = &mut Candidate> {
    std::iter::once(&mut episode.policy).chain(&mut episode.baseline)
}

fn hits_of(candidate: &mut Candidate) -> impl Iterator<Item = &mut Hit> {
    candidate.retrieval.iter_mut().flatten().flatten()
}

/// `n` samples of one query, in one group; every third repeats the rewrite of the first.
pub(crate) fn sample_group(group: &str, n: usize) -> Vec<Episode> {
    let sample = |index: usize| {
        let mut episode = ordinary(format!("{group}/{index}"), 2);
        if !index.is_multiple_of(3) {
            episode.policy = candidate(&format!("深海鱼油用量（{index}）"), index, 3);
            episode.response = Some(episode.policy.rewrite.clone());
        }
        episode
    };
    (0..n).map(sample).collect()
}

pub(crate) fn ordinary_batch(n: usize) -> Vec<Episode> {
    (0..n).map(|index| ordinary(format!("step-000001/{index:08}/0"), index)).collect()
}

/// `n` episodes with distinct ids, ordinary and odd ones mixed.
pub(crate) fn batch(n: usize) -> Vec<Episode> {
    mixed(n, groups(), ordinary, |id, odd| Episode { id, ..odd })
}

pub(crate) fn groups() -> Vec<Group<Episode>> {
    vec![
        Group { name: "texts", items: with_texts() },
        Group { name: "long", items: with_long_texts() },
        Group { name: "failures", items: failures() },
        Group { name: "judgements", items: judgements() },
        Group { name: "hits", items: with_hits() },
        Group { name: "particulars", items: particulars() },
        Group { name: "absent", items: absent() },
        Group { name: "columns", items: with_columns() },
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
            episode.response = Some(text.into());
            episode.columns = Columns(vec![("文".into(), ColumnValue::Text(text.into()))]);
            for candidate in both(episode) {
                // A rewrite is never blank: a response without a rewrite has an empty one.
                candidate.rewrite = if text.trim().is_empty() { String::new() } else { text.into() };
                candidate.judgement = scored(3.0, text);
                candidate.style = Some(vec![StyleProbability { label: text.into(), probability: 1.0 }]);
                hits_of(candidate).for_each(|hit| (hit.id, hit.text) = (text.into(), text.into()));
            }
        })
    };
    let policy_only = |(name, text): (&str, &str)| {
        changed(format!("policy-rewrite-{name}"), |episode| {
            episode.policy.rewrite = if text.trim().is_empty() { String::new() } else { text.into() };
        })
    };
    let odd = odd_texts();
    odd.iter().copied().map(everywhere).chain(odd.iter().copied().take(3).map(policy_only)).collect()
}

fn with_long_texts() -> Vec<Episode> {
    vec![
        changed("long-query", |episode| episode.query = long_text()),
        changed("long-history", |episode| episode.context.history_summary = long_text()),
        changed("long-policy-rewrite", |episode| episode.policy.rewrite = long_text()),
        changed("long-baseline-rewrite", |episode| baseline(episode).rewrite = long_text()),
        changed("long-passage", |episode| {
            hits_of(&mut episode.policy).take(1).for_each(|hit| hit.text = long_text());
        }),
        changed("long-response", |episode| episode.response = Some(long_text())),
        changed("long-column", |episode| {
            episode.columns = Columns(vec![("长".into(), ColumnValue::Text(long_text()))]);
        }),
    ]
}

fn failures() -> Vec<Episode> {
    let of_policy = FailureKind::ALL.into_iter().map(|kind| {
        changed(format!("policy-retrieval-{kind}").replace(' ', "-"), |episode| {
            episode.policy.retrieval = Some(Err(failure(kind)));
        })
    });
    let timeout = || failure(FailureKind::Timeout);
    let others = [
        changed("baseline-retrieval-failed", |episode| baseline(episode).retrieval = Some(Err(timeout()))),
        changed("both-retrievals-failed", |episode| {
            both(episode).for_each(|candidate| candidate.retrieval = Some(Err(timeout())));
        }),
        changed("failed-without-a-message", |episode| {
            episode.policy.retrieval = Some(Err(CallFailure { message: String::new(), ..timeout() }));
        }),
        changed("policy-judgement-failed", |episode| episode.policy.judgement = Judgement::Failed(timeout())),
        changed("baseline-judgement-failed", |episode| {
            baseline(episode).judgement = Judgement::Failed(timeout());
        }),
        changed("everything-failed", |episode| {
            for candidate in both(episode) {
                (candidate.retrieval, candidate.judgement) = (Some(Err(timeout())), Judgement::Failed(timeout()));
            }
        }),
    ];
    of_policy.chain(others).collect()
}

fn judgements() -> Vec<Episode> {
    let judged = |id: &str, of_policy: Judgement, of_baseline: Judgement| {
        changed(id, |episode| {
            episode.policy.judgement = of_policy;
            baseline(episode).judgement = of_baseline;
        })
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
    let found = |id: &str, policy: &[f64], of_baseline: &[f64]| {
        changed(id, |episode| {
            episode.policy.retrieval = Some(Ok(hits(policy)));
            baseline(episode).retrieval = Some(Ok(hits(of_baseline)));
        })
    };
    let first_stage = |id: &str, score: Option<f64>| {
        changed(id, |episode| {
            hits_of(&mut episode.policy).for_each(|hit| hit.retrieval_score = score);
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
            hits_of(&mut episode.policy).for_each(|hit| hit.id = "kb-001".into());
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
        changed("equal-sides", |episode| episode.baseline = Some(episode.policy.clone())),
        changed("gold-unknown", |episode| episode.gold_ids.clear()),
        changed("gold-found-by-both", |episode| episode.gold_ids = vec!["kb-001".into()]),
        changed("gold-found-by-none", |episode| episode.gold_ids = vec!["kb-999".into()]),
        changed("all-hits-are-gold", |episode| {
            episode.gold_ids = hit_ids(episode.policy.hits());
        }),
        changed("hundred-gold-ids", |episode| episode.gold_ids = (0..100).map(|n| format!("kb-{n:03}")).collect()),
        changed("same-gold-id-twice", |episode| episode.gold_ids = vec!["kb-001".into(), "kb-001".into()]),
        changed("truncated", |episode| {
            (episode.policy.finish_reason, episode.policy.n_tokens) = (Some(FinishReason::Length), 64);
        }),
        changed("another-end", |episode| {
            episode.policy.finish_reason = Some(FinishReason::Other("content_filter".into()))
        }),
        changed("tokens-unknown", |episode| both(episode).for_each(|candidate| candidate.n_tokens = 0)),
        changed("tokens-largest", |episode| episode.policy.n_tokens = u32::MAX),
        changed("context-unknown", |episode| episode.context = Context::default()),
        changed("style-on-both-sides", |episode| {
            episode.policy.style = style(&[0.7, 0.1, 0.1, 0.05, 0.05]);
            baseline(episode).style = style(&[0.2; 5]);
        }),
        changed("style-on-one-side", |episode| episode.policy.style = style(&[1.0, 0.0, 0.0, 0.0, 0.0])),
    ]
}

/// Parts that an episode may lack.
fn absent() -> Vec<Episode> {
    vec![
        changed("no-baseline", |episode| episode.baseline = None),
        changed("no-lookup", |episode| both(episode).for_each(|candidate| candidate.retrieval = None)),
        changed("no-rewrite", |episode| {
            episode.policy =
                Candidate { finish_reason: Some(FinishReason::Length), n_tokens: 64, ..Candidate::default() };
        }),
        changed("no-response", |episode| episode.response = None),
        changed("empty-response", |episode| episode.response = Some(String::new())),
        changed("no-prompt", |episode| episode.prompt = None),
        changed("outside-of-training", |episode| (episode.step, episode.split) = (None, None)),
        changed("query-alone", |episode| {
            let (id, group_id) = (std::mem::take(&mut episode.id), std::mem::take(&mut episode.group_id));
            *episode = Episode { id, group_id, query: "鱼油一天几粒啊".into(), ..Episode::default() };
        }),
    ]
}

fn with_columns() -> Vec<Episode> {
    let with =
        |id: &str, columns: Vec<(String, ColumnValue)>| changed(id, |episode| episode.columns = Columns(columns));
    let one = |value: ColumnValue| vec![("列".to_owned(), value)];
    let number = |index: usize| ColumnValue::Number(index as f64);
    vec![
        with("no-columns", Vec::new()),
        with("column-without-a-name", vec![(String::new(), ColumnValue::Flag(false))]),
        with("most-columns", (0..Columns::MAX).map(|index| (format!("列{index}"), number(index))).collect()),
        with("empty-list", one(ColumnValue::Items(Vec::new()))),
        with("longest-list", one(ColumnValue::Items(vec![Scalar::Text("鱼油".into()); Columns::MAX_ITEMS]))),
        with("largest-number", one(ColumnValue::Number(f64::MAX))),
        with("negative-zero", one(ColumnValue::Number(-0.0))),
    ]
}

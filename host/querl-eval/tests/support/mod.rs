//! Synthetic records from a seeded generator, with the shape of real ones, and the facts of their run.
#![allow(dead_code, reason = "each test binary uses its own part")]

use querl_core::records::{
    CallFailure, Candidate, EvalRecord, FailureKind, FinishReason, Hit, Judgement, QueryRow, Rejection, Reward,
    RewardComponent, SystemAnswer,
};
use querl_eval::{RunFacts, ServiceName};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

const QUERIES: [(&str, &str, &str, &str); 6] = [
    ("那个孕妇能吃不", "孕中期，28岁", "刚才在问深海鱼油", "五医生深海鱼油软胶囊孕妇是否可以服用，有哪些禁忌"),
    ("多少钱一瓶啊", "", "咨询氨糖软骨素", "五医生氨糖软骨素加钙片一瓶的价格是多少"),
    ("褪黑素吃了会不会上瘾", "长期失眠，45岁", "", "褪黑素维生素B6胶囊长期服用是否会产生依赖性"),
    ("发啥快递 几天到", "", "已下单蛋白粉", "蛋白粉订单使用哪家快递，预计几天送达"),
    (
        "跟我现在吃的降压药冲突吗",
        "高血压，62岁，服用氨氯地平",
        "在问辅酶Q10",
        "辅酶Q10软胶囊与氨氯地平等降压药同时服用是否有相互作用",
    ),
    ("小孩挑食能吃点啥", "宝妈，孩子5岁", "", "5岁儿童挑食适合服用哪些锌或益生菌产品"),
];

/// The facts of a run with a recorded teacher and the rubric as judge.
pub(crate) fn facts() -> RunFacts {
    RunFacts {
        tenant: "fivedoctors".to_owned(),
        model: "tiny-qwen3".to_owned(),
        teacher: ServiceName::from_port_name("recorded (stand-in)"),
        judge: Some(ServiceName::from_port_name("rubric (stand-in)")),
        retrieval: ServiceName::from_port_name("embedded"),
        plugins: vec!["reward reward-competition 0.1.0, weight 1".to_owned()],
        plugin_notes: Vec::new(),
    }
}

/// The query of row `row`; two adjacent rows form a group.
pub(crate) fn query(row: usize) -> QueryRow {
    let (text, profile, history, _) = QUERIES[row % QUERIES.len()];
    QueryRow {
        id: format!("q{row:04}"),
        row,
        original_query: text.to_owned(),
        user_profile: profile.to_owned(),
        history_summary: history.to_owned(),
        gold_ids: vec![format!("p{row:04}")],
        expansion: None,
        group: format!("g{:04}", row / 2),
    }
}

pub(crate) fn hit(id: &str, score: f64, rank: u32) -> Hit {
    let text = "五医生深海鱼油软胶囊：孕妇、哺乳期妇女及对鱼类过敏者不宜服用，服用抗凝血药物者请先咨询医生。本品不能代替药物，\
                建议每日两次，每次一粒，饭后温水送服；开封后请密封置于阴凉干燥处，并在六个月内用完。";
    Hit { id: id.to_owned(), text: text.to_owned(), reranker_score: score, retrieval_score: None, rank }
}

pub(crate) fn answer(rewrite: &str, hits: Vec<Hit>) -> SystemAnswer {
    SystemAnswer {
        candidate: Candidate {
            rewrite: rewrite.to_owned(),
            retrieval: Some(Ok(hits)),
            n_tokens: 20,
            finish_reason: Some(FinishReason::Stop),
            ..Candidate::default()
        },
        ..SystemAnswer::default()
    }
}

pub(crate) fn record(system: &str, row: usize, outcome: Result<SystemAnswer, Rejection>) -> EvalRecord {
    EvalRecord { system: system.to_owned(), query: query(row), outcome }
}

/// Records of four systems with increasing quality on `n` queries, with some failures.
pub(crate) fn invented_records(n: usize) -> Vec<EvalRecord> {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let mut records = Vec::new();
    for row in 2..n + 2 {
        let hardness = rng.random_range(-0.15..0.15);
        for (system, quality) in [("raw", 0.42), ("teacher", 0.68), ("sft", 0.61), ("rl", 0.74)] {
            let score: f64 = quality + hardness + rng.random_range(-0.12..0.12);
            records.push(record(system, row, outcome(system, row, score.clamp(0.02, 0.99), &mut rng)));
        }
    }
    records
}

fn outcome(system: &str, row: usize, score: f64, rng: &mut ChaCha8Rng) -> Result<SystemAnswer, Rejection> {
    if system == "sft" && row == 9 {
        return Err(Rejection::new("no_rewrite", "the answer holds only a think tag"));
    }
    let gold = format!("p{row:04}");
    let ids =
        if rng.random_bool(score) { [gold.as_str(), "p9001", "p9002"] } else { ["p9001", "p9002", gold.as_str()] };
    let hits = (1..).zip(ids).map(|(rank, id)| hit(id, score / f64::from(rank), rank)).collect();
    let (text, _, _, rewrite) = QUERIES[row % QUERIES.len()];
    let mut made = answer(if system == "raw" { text } else { rewrite }, hits);
    if system == "teacher" && row % 40 == 7 {
        let failure = CallFailure { kind: FailureKind::Timeout, message: "no answer within 5000 ms".into() };
        made.candidate.retrieval = Some(Err(failure));
        return Ok(made);
    }
    if rng.random_bool(0.6) {
        made.candidate.judgement = Judgement::Scored { score: (5.0 * score).min(5.0), reason: String::new() };
    }
    if system != "teacher" {
        let part = |name: &str, value: f64| RewardComponent { name: name.into(), value };
        let components = vec![part("judge", score - 0.66), part("retrieval", score - 0.68), part("win", score - 0.6)];
        let total = components.iter().map(|component| component.value / 3.0).sum();
        made.reward = Some(Reward { total, components });
        made.win = Some(if score > 0.7 {
            1.0
        } else if score > 0.6 {
            0.5
        } else {
            0.0
        });
    }
    made.latency_ms = (matches!(system, "sft" | "rl")).then(|| rng.random_range(60.0..140.0));
    made.cost = (system == "teacher").then_some(0.0021);
    Ok(made)
}

/// Lines of `metrics.jsonl` for a run of `n_steps` PPO steps after 120 steps of fine-tuning.
pub(crate) fn invented_metrics(n_steps: u64) -> Vec<Value> {
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    let mut rows = Vec::new();
    for step in 1..=120u64 {
        let loss = 0.4 + 3.0 * (-(step as f64) / 30.0).exp() + rng.random_range(-0.1..0.1);
        rows.push(json!({"stage": "sft", "step": step, "loss": loss, "actor/lr": 5e-5}));
        if step % 20 == 0 {
            rows.push(json!({"stage": "sft", "step": step, "eval_loss": loss + 0.15}));
        }
    }
    for step in 1..=n_steps {
        let way = step as f64 / n_steps as f64;
        let mut noise = |size: f64| rng.random_range(-size..size);
        let reward = -0.12 + 0.25 * way + noise(0.06);
        rows.push(json!({
            "stage": "rl", "step": step, "avg_reward": reward, "win_rate": 0.35 + 0.2 * way + noise(0.08),
            "avg_top1": 0.6 + 0.1 * way + noise(0.03), "avg_top1_teacher": 0.66 + noise(0.02),
            "kl": 0.06 * way + noise(0.004).abs(), "actor/ppo_kl": 0.002 + noise(0.001), "actor/pg_loss": noise(0.04),
            "critic/vf_loss": 0.2 * (-3.0 * way).exp() + 0.03 + noise(0.01), "actor/pg_clipfrac": 0.08 + noise(0.05),
            "critic/vf_clipfrac": 0.03 + noise(0.02), "actor/entropy": 1.1 - 0.5 * way + noise(0.05),
            "response_length/mean": 19.0 + 3.0 * way + noise(1.0), "actor/grad_norm": 0.5, "timing_s/step": 3.1,
        }));
        if step % 10 == 0 {
            rows.push(
                json!({"stage": "rl", "step": step, "val/reward": -0.1 + 0.2 * way, "val/win_rate": 0.36 + 0.15 * way}),
            );
        }
    }
    rows
}

//! The inputs of `querl plugin bench`: recorded or generated episodes, and samples and dialogues made from them.

use querl_core::episodes::{self, RecordedEpisode};
use querl_core::records::{
    Candidate, Context, Dialogue, Episode, FinishReason, Hit, Judgement, Message, Sample, Split,
};
use querl_pipeline::failure::Stop;
use querl_pipeline::host_functions::RecordedCalls;
use std::path::Path;

const N_GENERATED: usize = 256;

/// Number of generated samples (episodes) per query.
const N_SAMPLES: usize = 4;

/// Reads the episodes of a file, with their recorded calls of host functions.
pub(super) fn read(path: &Path) -> Result<(Vec<Episode>, RecordedCalls), Stop> {
    let recorded = episodes::read(path).map_err(Stop::usage)?;
    if recorded.is_empty() {
        return Err(Stop::usage(format!("{}: holds no episode; expected one JSON object a line", path.display())));
    }
    let mut recorded_calls = RecordedCalls::default();
    let episode = |RecordedEpisode { episode, calls, .. }| {
        recorded_calls.add_episode(&episode, calls);
        episode
    };
    Ok((recorded.into_iter().map(episode).collect(), recorded_calls))
}

/// Generates episodes with five hits and a judgement for policy and baseline each. Texts have the length of those in the example's
/// knowledge base.
pub(super) fn generated() -> Vec<Episode> {
    const QUERIES: [&str; 4] = ["一天几粒啊", "孕妇可以吃这个鱼油吗", "老人腿脚没力气吃哪个好", "和降压药能一起吃不"];
    const REWRITES: [&str; 4] = [
        "深海鱼油软胶囊 食用方法 每日食用量",
        "深海鱼油软胶囊 孕妇 禁忌人群",
        "氨糖软骨素钙片 适宜人群 中老年",
        "深海鱼油软胶囊 降压药 同服 注意事项",
    ];
    let episode = |index: usize| {
        let (query, rewrite) = (QUERIES[index % 4], REWRITES[index % 4]);
        Episode {
            id: format!("bench-{}/{}", index / N_SAMPLES, index % N_SAMPLES),
            group_id: format!("bench-{}", index / N_SAMPLES),
            sample_index: (index % N_SAMPLES) as u32,
            split: Some(Split::Train),
            query: query.into(),
            context: Context {
                user_profile: "58 岁，女，血压偏高".into(),
                history_summary: "咨询深海鱼油软胶囊".into(),
            },
            gold_ids: vec![format!("p{}", index % 7)],
            prompt: Some(vec![Message { role: "user".into(), content: format!("改写查询：{query}") }]),
            response: Some(format!("{rewrite} {}", index % 10)),
            policy: candidate(&format!("{rewrite} {}", index % 10), index),
            baseline: Some(candidate(rewrite, index + 3)),
            ..Episode::default()
        }
    };
    (0..N_GENERATED).map(episode).collect()
}

fn candidate(rewrite: &str, seed: usize) -> Candidate {
    let passage = "深海鱼油软胶囊每日食用量 2 粒，饭后温水送服；孕妇、哺乳期妇女及正在服用抗凝药物者请先询问医生。";
    let hit = |rank: usize| Hit {
        id: format!("p{}", (seed + rank) % 7),
        text: passage.into(),
        // Descending by rank, within 0 to 1, different for each episode.
        reranker_score: (100 - rank * 13 - seed % 31) as f64 / 100.0,
        retrieval_score: Some((40 - rank) as f64),
        rank: rank as u32 + 1,
    };
    Candidate {
        rewrite: rewrite.into(),
        retrieval: Some(Ok((0..5).map(hit).collect())),
        judgement: Judgement::Scored { score: (seed % 6) as f64, reason: "提到了产品和意图".into() },
        style: None,
        n_tokens: 24,
        finish_reason: Some(FinishReason::Stop),
    }
}

/// A sample for a filter, made from the teacher's rewrite of an episode, or from the policy's if there is no teacher's.
pub(super) fn sample(episode: &Episode) -> Sample {
    let rewritten = episode.baseline.as_ref().unwrap_or(&episode.policy);
    Sample {
        id: episode.id.clone(),
        original_query: episode.query.clone(),
        rewritten_query: rewritten.rewrite.clone(),
        context: episode.context.clone(),
        hits: rewritten.hits().to_vec(),
        columns: episode.columns.clone(),
    }
}

/// A dialogue for a style scorer: the query, and the policy's rewrite as the answer.
pub(super) fn dialogue(episode: &Episode) -> Dialogue {
    let turn = |role: &str, content: &str| Message { role: role.into(), content: content.into() };
    let turns = vec![turn("user", &episode.query), turn("assistant", &episode.policy.rewrite)];
    Dialogue { id: episode.id.clone(), turns }
}

//! Batches in one byte buffer: the guest gets the same episodes as with records, and gives the same scores.
#![allow(clippy::unwrap_used)]

mod common;

use common::{candidate, episode, host, load_guest, repository};
use querl_core::episodes::{RecordedEpisode, read};
use querl_core::ports::RewardModel;
use querl_core::records::{CallFailure, Episode, FailureKind};
use querl_plugin::{Plugin, PluginHost, PluginPort, PluginSettings};
use querl_sdk::Reward as _;
use std::io::Write;

/// Every field, every case of every variant, texts of every length.
const EPISODES: &str = r#"
{"format": 2, "episode": {"id": "bare", "query": "", "policy": {"rewrite": ""}, "baseline": {"rewrite": ""}}}
{"format": 2, "episode": {"id": "full", "query": "一天几粒啊🐟", "context": {"user_profile": "孕妇", "history_summary": "问过\n鱼油"}, "gold_ids": ["kb-7", "", "kb-2"], "policy": {"rewrite": "深海鱼油 每日用量", "retrieval": {"hits": [{"id": "kb-7", "text": "每日两粒", "reranker_score": 0.8, "retrieval_score": -3.5}, {"reranker_score": 0.1}]}, "judgement": {"scored": {"score": 4.5, "reason": "清楚"}}, "style": [{"label": "售前", "probability": 0.75}, {"label": "", "probability": 0.25}], "n_tokens": 4000000000, "truncated": true}, "baseline": {"rewrite": "鱼油", "style": [{"label": "售前", "probability": 1}], "judgement": "not_sampled"}}}
{"format": 2, "episode": {"id": "failed", "query": "x", "policy": {"rewrite": "x", "retrieval": {"failed": {"kind": "timeout", "message": "late"}}, "judgement": {"failed": {"kind": "unreachable", "message": ""}}}, "baseline": {"rewrite": "x", "retrieval": {"failed": {"kind": "unauthorized", "message": "401"}}, "judgement": {"failed": {"kind": "rejected", "message": "400"}}}}}
{"format": 2, "episode": {"id": "failed-too", "query": "x", "policy": {"rewrite": "x", "retrieval": {"failed": {"kind": "rate_limited", "message": "429"}}, "judgement": {"failed": {"kind": "server_error", "message": "500"}}}, "baseline": {"rewrite": "x", "retrieval": {"failed": {"kind": "invalid_response", "message": "?"}}, "judgement": {"failed": {"kind": "not_recorded", "message": "x"}}}}}
"#;

/// The same component without the export that the host would use.
fn without_packed(host: &PluginHost, plugin: &Plugin) -> Plugin {
    let mut bytes = std::fs::read(plugin.path()).unwrap();
    let (from, to) = (b"packed-rewards", b"packed-rewardz");
    let starts: Vec<_> = (0..bytes.len() - from.len()).filter(|start| bytes[*start..].starts_with(from)).collect();
    assert!(!starts.is_empty(), "the component exports no `packed-rewards`");
    starts.iter().for_each(|start| bytes[*start..][..to.len()].copy_from_slice(to));
    let mut file = tempfile::Builder::new().suffix(".wasm").tempfile().unwrap();
    file.write_all(&bytes).unwrap();
    host.load(file.path()).unwrap()
}

fn reward(host: &PluginHost, plugin: &Plugin) -> Box<dyn RewardModel> {
    host.open(plugin, &PluginSettings::default(), PluginPort::reward()).unwrap()
}

/// The episodes as read by the host and by the SDK from the same lines.
fn recorded() -> (Vec<Episode>, Vec<querl_sdk::Episode>) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), EPISODES).unwrap();
    let episodes = read(file.path()).unwrap().into_iter().map(|RecordedEpisode { episode, .. }| episode);
    (episodes.collect(), querl_sdk::testing::read_episodes(file.path()))
}

#[test]
fn guest_is_given_the_very_episodes() {
    let (episodes, expected) = recorded();
    let host = host();
    let packed = load_guest(&host, "repeats").unwrap();
    for plugin in [without_packed(&host, &packed), packed] {
        let message = reward(&host, &plugin).score_batch(&episodes).unwrap();
        for (message, expected) in message.into_iter().zip(&expected) {
            assert_eq!(message.unwrap_err().detail, format!("{expected:?}"));
        }
    }
}

#[test]
fn packed_scores_are_those_of_records_and_of_native_rust() {
    let mut episodes: Vec<_> = (0..200).map(|index| varied(index as f64 / 200.0, index)).collect();
    episodes.extend(recorded().0);
    let host = host();
    let packed = host.load(&repository().join("plugins/reward-competition")).unwrap();
    let scores = reward(&host, &packed).score_batch(&episodes).unwrap();
    assert_eq!(scores, reward(&host, &without_packed(&host, &packed)).score_batch(&episodes).unwrap());
    let native = reward_competition::Competition::new(&querl_sdk::Settings::none()).unwrap();
    for (episode, score) in recorded().1.iter().zip(&scores[200..]) {
        let total = score.as_ref().map(|score| score.total.to_bits()).map_err(|rejection| rejection.code.clone());
        let expected = native.score(episode).map(|score| score.total.to_bits()).map_err(|rejection| rejection.code);
        assert_eq!(total, expected, "{}", episode.id);
    }
}

fn varied(share: f64, index: usize) -> Episode {
    let mut varied = episode(&format!("e{index}"), &"胶原".repeat(index));
    let is_judged = !index.is_multiple_of(3);
    varied.policy = candidate(&[share, share * 0.9], is_judged.then_some(share * 5.0));
    varied.baseline = Some(candidate(&[0.5, 0.3, 0.1, 0.0][..index % 5 % 4], is_judged.then_some(2.5)));
    if index.is_multiple_of(7) {
        let failure = CallFailure { kind: FailureKind::Timeout, message: "no answer".into() };
        varied.baseline.as_mut().unwrap().retrieval = Some(Err(failure));
    }
    varied
}

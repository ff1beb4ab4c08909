//! What the tests of this folder share.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test file uses a part of this")]

use querl_core::config::{PluginConfig, PluginLimits, WeightedPluginConfig};
use querl_core::ports::RewardModel;
use querl_core::records::{Candidate, Context, Episode, Hit, Judgement};
use querl_plugins::{HostOptions, PluginHost};
use std::path::{Path, PathBuf};

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Compiled plugins outlive a test run, as they do for a user. An example has no folder of its own: it uses the user's.
pub fn cache_dir() -> Option<PathBuf> {
    option_env!("CARGO_TARGET_TMPDIR").map(|folder| Path::new(folder).join("plugin-cache"))
}

pub fn host() -> PluginHost {
    host_with(PluginLimits::default())
}

pub fn host_with(limits: PluginLimits) -> PluginHost {
    PluginHost::new(HostOptions { limits, cache_dir: cache_dir() }).unwrap()
}

/// A configuration without settings for a folder of the repository.
pub fn plugin(folder: &str) -> PluginConfig {
    PluginConfig { path: repository().join(folder), settings: Default::default() }
}

pub fn weighted(folder: &str) -> WeightedPluginConfig {
    WeightedPluginConfig { path: repository().join(folder), weight: 1.0, settings: Default::default() }
}

pub fn with_settings(folder: &str, settings: &str) -> PluginConfig {
    PluginConfig { settings: toml::from_str(settings).unwrap(), ..plugin(folder) }
}

pub fn guest(host: &PluginHost, name: &str) -> Box<dyn RewardModel> {
    host.reward(&weighted(&format!("tests/guests/guest-{name}"))).unwrap()
}

pub fn episode(id: &str, query: &str) -> Episode {
    Episode {
        id: id.into(),
        query: query.into(),
        context: Context::default(),
        gold_ids: Vec::new(),
        policy: candidate(&[0.9, 0.8, 0.7], None),
        baseline: candidate(&[0.7, 0.6, 0.5], None),
    }
}

pub fn candidate(scores: &[f64], judge_score: Option<f64>) -> Candidate {
    let hit = |(score, rank): (&f64, u32)| Hit {
        id: format!("kb-{rank}"),
        text: "胶原蛋白肽每日一次，每次一袋，温水冲服。".into(),
        reranker_score: *score,
        retrieval_score: Some(10.0),
        rank,
    };
    Candidate {
        rewrite: "胶原蛋白肽的服用方法".into(),
        retrieval: Ok(scores.iter().zip(1..).map(hit).collect()),
        judgement: judge_score
            .map_or(Judgement::NotSampled, |score| Judgement::Scored { score, reason: "清楚".into() }),
        style: None,
        n_tokens: 12,
        truncated: false,
    }
}

//! What each call into a plugin uses: `cargo run --release -p querl-plugin --example call_cost -- PATH...`
//!
//! The defaults of `plugins.limits` come from what this prints for the plugins of this repository.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../tests/common/mod.rs"]
mod common;

use common::{candidate, episode};
use querl_core::ports::{PromptInput, PromptTask};
use querl_core::records::{Columns, Context, Dialogue, Episode, Hit, Message, Sample};
use querl_plugin::{CallReport, HostOptions, Plugin, PluginHost, PluginKind, PluginPort, PluginSettings};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

fn main() {
    println!("{:24} {:26} {:>6} {:>13} {:>11} {:>9}", "plugin", "function", "items", "fuel", "wall us", "memory MB");
    for path in std::env::args().skip(1) {
        let host = PluginHost::new(HostOptions { observer: Some(Arc::new(print)), ..HostOptions::default() }).unwrap();
        let start = Instant::now();
        let plugin = host.load(Path::new(&path)).unwrap();
        let loaded = start.elapsed();
        println!("{:24} loaded in {:.2} ms, {} bytes", plugin.id(), loaded.as_secs_f64() * 1e3, plugin.n_bytes());
        plugin.kinds().iter().for_each(|kind| call(&host, &plugin, *kind));
    }
}

fn print(call: &CallReport<'_>) {
    let (wall, megabytes) = (call.wall.as_secs_f64() * 1e6, call.memory_bytes as f64 / 1e6);
    let name = Path::new(call.plugin).file_name().unwrap().display();
    println!("{name:24} {:26} {:>6} {:>13} {wall:>11.1} {megabytes:>9.2}", call.function, call.n_items, call.fuel);
}

/// Each call is made twice: in the first one, no page of the instance is in memory.
fn call(host: &PluginHost, plugin: &Plugin, kind: PluginKind) {
    let none = PluginSettings::new();
    for n_items in [1, 64, 64] {
        let ids = (0..n_items).map(|index| format!("step-000001/{index}/0"));
        match kind {
            PluginKind::Reward | PluginKind::GroupReward => {
                let episodes: Vec<_> = ids.map(|id| five_hits(&id)).collect();
                host.open(plugin, &none, PluginPort::reward()).unwrap().score_batch(&episodes).unwrap();
            }
            PluginKind::Filter => {
                let samples: Vec<_> = ids.map(sample).collect();
                host.open(plugin, &none, PluginPort::filter()).unwrap().check_batch(&samples).unwrap();
            }
            PluginKind::StyleScorer => {
                let dialogues: Vec<_> = ids.map(dialogue).collect();
                host.open(plugin, &none, PluginPort::style_scorer(None)).unwrap().score_batch(&dialogues).unwrap();
            }
            PluginKind::Prompt => {
                let prompts = host.open(plugin, &none, PluginPort::prompts()).unwrap();
                let context = Context::default();
                let input = PromptInput { query: "胶原蛋白肽怎么吃", context: &context, rewrite: None };
                prompts.messages(PromptTask::TeacherRewrite, &input).unwrap();
                prompts.parse_rewrite("改写后的查询：胶原蛋白肽的服用方法").unwrap().unwrap();
            }
        }
    }
}

fn five_hits(id: &str) -> Episode {
    let side = || candidate(&[0.9, 0.8, 0.7, 0.6, 0.5], Some(4.5));
    Episode {
        policy: side(), baseline: Some(side()), ..episode(id, "胶原蛋白肽怎么吃，一天几次，饭前还是饭后")
    }
}

fn sample(id: String) -> Sample {
    let episode = five_hits(&id);
    let hits: Vec<Hit> = episode.policy.retrieval.unwrap().unwrap();
    let (original_query, rewritten_query) =
        (format!("{} {id}", episode.query), format!("{} {id}", episode.policy.rewrite));
    Sample { id, original_query, rewritten_query, context: Context::default(), hits, columns: Columns::default() }
}

fn dialogue(id: String) -> Dialogue {
    let turn = |role: &str, content: &str| Message { role: role.into(), content: content.into() };
    Dialogue {
        id, turns: vec![turn("user", "胶原蛋白肽怎么吃"), turn("assistant", "每日一次，每次一袋，温水冲服。")]
    }
}

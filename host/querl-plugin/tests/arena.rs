//! Memory of a call over a complete split: the SDK's allocator reuses freed blocks, but returns no memory before the call ends.
#![allow(clippy::unwrap_used)]

mod common;

use common::{cache_dir, repository};
use querl_core::records::{Columns, Context, Hit, Sample};
use querl_plugin::{HostOptions, PluginHost, PluginPort, PluginSettings};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const N_SAMPLES: usize = 20_000;
const N_HITS: usize = 5;
const PASSAGE: &str = "胶原蛋白肽每日一次每次一袋饭后用温水冲服孕妇和哺乳期请先问医生后服";

fn samples(query: impl Fn(usize) -> String) -> Vec<Sample> {
    let hit = |rank: u32| Hit {
        id: format!("kb-{rank}"),
        text: PASSAGE.into(),
        reranker_score: 0.9,
        retrieval_score: Some(10.0),
        rank,
    };
    let sample = |index: usize| Sample {
        id: format!("row-{index}"),
        original_query: query(index),
        rewritten_query: "胶原蛋白肽的服用方法".into(),
        context: Context { user_profile: "孕妇".into(), history_summary: "用户问过虾青素".into() },
        hits: (1..=N_HITS as u32).map(hit).collect(),
        columns: Columns::default(),
    };
    (0..N_SAMPLES).map(sample).collect()
}

/// Size of the samples in a guest's memory: each text in a separate block, and the records.
fn argument_bytes(samples: &[Sample]) -> usize {
    let block = |text: &String| text.len().next_multiple_of(8);
    let hit = |hit: &Hit| block(&hit.id) + block(&hit.text) + 48;
    let sample = |sample: &Sample| {
        let texts = [&sample.id, &sample.original_query, &sample.rewritten_query];
        let context = [&sample.context.user_profile, &sample.context.history_summary];
        texts.into_iter().chain(context).map(block).sum::<usize>() + sample.hits.iter().map(hit).sum::<usize>() + 48
    };
    samples.iter().map(sample).sum()
}

/// Peak memory of a call of `filter-quality` with these samples.
fn peak_bytes(samples: &[Sample]) -> usize {
    let peak = Arc::new(AtomicUsize::new(0));
    let seen = peak.clone();
    let host = PluginHost::new(HostOptions {
        cache_dir: cache_dir(),
        observer: Some(Arc::new(move |report| _ = seen.fetch_max(report.memory_bytes, Ordering::Relaxed))),
        ..HostOptions::default()
    });
    let host = host.unwrap();
    let plugin = host.load(&repository().join("plugins/filter-quality")).unwrap();
    let verdicts =
        host.open(&plugin, &PluginSettings::default(), PluginPort::filter()).unwrap().check_batch(samples).unwrap();
    assert_eq!(verdicts.len(), samples.len());
    peak.load(Ordering::Relaxed)
}

#[test]
fn memory_of_a_filter_is_that_of_its_arguments_and_what_it_keeps() {
    let all_kept = samples(|index| format!("胶原咋吃{index}"));
    let all_alike = samples(|_| "胶原咋吃".into());
    for samples in [all_kept, all_alike] {
        let (arguments, peak) = (argument_bytes(&samples), peak_bytes(&samples));
        let share = peak as f64 / arguments as f64;
        // Measured: 1.75 and 1.61. An allocator that merges what is freed (dlmalloc) takes 1.59 for both, and twice the time.
        assert!(share < 2.6, "{peak} bytes for arguments of {arguments}, {share:.2} times as much");
    }
}

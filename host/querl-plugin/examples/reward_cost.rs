//! What calling a reward plugin costs above the same function in native Rust.
//! `cargo run --release -p querl-plugin --example reward_cost`
//!
//! Native calls and calls into the plugin take turns, so that what else the machine does falls on both alike.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../tests/common/mod.rs"]
mod common;

use common::{candidate, competition, episode, host, load_guest, repository};
use querl_core::ports::RewardModel;
use querl_core::records::{Candidate, Episode, Judgement};
use querl_plugin::{HostOptions, PluginHost, PluginPort, PluginSettings, Rechecks, RewardForm};
use querl_sdk::Reward as _;
use reward_competition::Competition;
use std::hint::black_box;
use std::time::Instant;

const BATCH: usize = 64;
const N_BATCHES: usize = 2000;
const N_STARTS: usize = 50;
/// 33 characters, 99 bytes.
const PASSAGE: &str = "胶原蛋白肽每日一次每次一袋饭后用温水冲服孕妇和哺乳期请先问医生后服";

fn main() {
    let reward = competition(&host());
    let batch: Vec<Episode> = (0..BATCH).map(five_hits).collect();
    compare_with_native(&*reward, &batch);
    let single = &batch[..1];
    let mut times: Vec<f64> = (0..N_BATCHES).map(|_| micros(|| reward.score_batch(single).unwrap())).collect();
    print_times("plugin, batches of 1, microseconds an item", &mut times);
    passing(&batch);
    rechecks();
    starts(single);
}

/// The mean cost of rechecks, for batches of 64 and of 2 episodes. The hosts alternate.
fn rechecks() {
    let open = |rechecks| {
        let host = PluginHost::new(HostOptions { rechecks, ..HostOptions::default() }).unwrap();
        competition(&host)
    };
    let rewards = [open(Rechecks::Off), open(Rechecks::Sampled)];
    for n_items in [64, 2] {
        let mut sums = [0.0; 2];
        for n in 0..N_BATCHES * 4 {
            let mut batch: Vec<Episode> = (0..n_items).map(five_hits).collect();
            batch.iter_mut().for_each(|episode| episode.id = format!("step-{n:06}/{}", episode.id));
            for turn in [n % 2, (n + 1) % 2] {
                sums[turn] += micros(|| rewards[turn].score_batch(&batch).unwrap());
            }
        }
        println!("rechecks add {:.1} % to batches of {n_items}", (sums[1] / sums[0] - 1.0) * 100.0);
    }
}

/// The cost of passing episodes, for guests that read nothing: contract 0.1, then complete episodes of contract 0.2 in each form.
fn passing(batch: &[Episode]) {
    // Rechecks would detect `packed-differs`.
    let host = PluginHost::new(HostOptions { rechecks: Rechecks::Off, ..HostOptions::default() }).unwrap();
    for (name, forms) in [
        ("packed-differs", &[RewardForm::Packed, RewardForm::Records][..]),
        ("packed-differs@0.2", &[RewardForm::Packed, RewardForm::Records]),
        ("reads-all", &[RewardForm::Packed, RewardForm::Records]),
        ("reads-all-json", &[RewardForm::Json, RewardForm::Records]),
    ] {
        let plugin = load_guest(&host, name).unwrap();
        for form in forms {
            let reward = host.open(&plugin, &PluginSettings::new(), PluginPort::reward_in(*form)).unwrap();
            let run = || micros(|| reward.score_batch(black_box(batch)).unwrap()) / batch.len() as f64;
            let mut times: Vec<f64> = (0..N_BATCHES).map(|_| run()).collect();
            print_times(&format!("  {name}, {form:?}, microseconds an item"), &mut times);
        }
    }
}

/// The main result: the cost that the sandbox adds per item.
fn compare_with_native(reward: &dyn RewardModel, batch: &[Episode]) {
    let native = Competition::new(&querl_sdk::Settings::none()).unwrap();
    let native_batch: Vec<_> = batch.iter().map(native_episode).collect();
    let an_item = |time: f64| time / BATCH as f64;
    let mut times: Vec<(f64, f64)> = (0..N_BATCHES)
        .map(|_| {
            let score_all = || black_box(&native_batch).iter().map(|one| native.score(one)).collect::<Vec<_>>();
            (an_item(micros(score_all)), an_item(micros(|| reward.score_batch(black_box(batch)).unwrap())))
        })
        .skip(N_BATCHES / 20)
        .collect();
    println!("batches of {BATCH}, 5 hits a side, passages of {} bytes, microseconds an item:", PASSAGE.len());
    print_times("  native", &mut times.iter().map(|(native, _)| *native).collect::<Vec<_>>());
    print_times("  plugin", &mut times.iter().map(|(_, plugin)| *plugin).collect::<Vec<_>>());
    print_times(
        "  plugin above native",
        &mut times.iter_mut().map(|(native, plugin)| *plugin - *native).collect::<Vec<_>>(),
    );
}

fn starts(single: &[Episode]) {
    let component = host().load(&repository().join("plugins/reward-competition")).unwrap().path().to_owned();
    let first_score = || {
        let host = host();
        micros(|| {
            host.open(&host.load(&component).unwrap(), &PluginSettings::new(), PluginPort::reward())
                .unwrap()
                .score_batch(single)
                .unwrap()
        }) / 1e3
    };
    let mut times: Vec<f64> = (0..N_STARTS).map(|_| first_score()).collect();
    print_times("file to first score, compiled code cached, milliseconds", &mut times);
    let mut times: Vec<f64> = (0..N_STARTS).map(|_| micros(host) / 1e3).collect();
    print_times("making a host, milliseconds", &mut times);
}

fn micros<R>(job: impl FnOnce() -> R) -> f64 {
    let start = Instant::now();
    let result = job();
    let time = start.elapsed().as_secs_f64() * 1e6;
    drop(black_box(result));
    time
}

fn five_hits(index: usize) -> Episode {
    let scores = [0.9, 0.8, 0.7, 0.6, 0.5];
    Episode {
        policy: long_hits(candidate(&scores, Some(4.5))),
        baseline: Some(long_hits(candidate(&scores, Some(4.0)))),
        ..episode(&format!("step-000001/{index}/0"), "胶原蛋白肽怎么吃，一天几次，饭前还是饭后")
    }
}

fn long_hits(mut candidate: Candidate) -> Candidate {
    candidate.retrieval.as_mut().unwrap().as_mut().unwrap().iter_mut().for_each(|hit| hit.text = PASSAGE.into());
    candidate
}

fn native_episode(episode: &Episode) -> querl_sdk::Episode {
    querl_sdk::Episode {
        id: episode.id.clone(),
        query: episode.query.clone(),
        policy: native_candidate(&episode.policy),
        baseline: episode.baseline.as_ref().map(native_candidate),
        ..querl_sdk::Episode::default()
    }
}

fn native_candidate(candidate: &Candidate) -> querl_sdk::Candidate {
    let hit = |hit: &querl_core::records::Hit| querl_sdk::Hit {
        id: Some(hit.id.clone()),
        text: hit.text.clone(),
        reranker_score: hit.reranker_score,
        retrieval_score: hit.retrieval_score,
        rank: hit.rank,
    };
    let Judgement::Scored { score, reason } = &candidate.judgement else { unreachable!("every side is judged") };
    querl_sdk::Candidate {
        rewrite: Some(candidate.rewrite.clone()),
        retrieval: Some(Ok(candidate.hits().iter().map(hit).collect())),
        judgement: Some(Ok(querl_sdk::JudgeScore { score: *score, reason: reason.clone() })),
        n_tokens: Some(candidate.n_tokens),
        ..querl_sdk::Candidate::default()
    }
}

fn print_times(what: &str, times: &mut [f64]) {
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    println!("{what}: median {:.2}, 5% {:.2}, 95% {:.2}", at(0.5), at(0.05), at(0.95));
}

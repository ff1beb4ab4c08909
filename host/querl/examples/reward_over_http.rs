//! What a reward costs as a plugin, and behind HTTP as OpenRLHF calls a remote reward model. See tests/http_reward/run.sh.
//!
//! `reward_over_http EPISODES.jsonl URL PLUGIN...` scores the same batches in turns, so that a busy machine slows both alike.
#![allow(clippy::unwrap_used, missing_docs)]

use querl_core::episodes;
use querl_core::ports::RewardModel;
use querl_core::records::Episode;
use querl_plugin::{HostOptions, PluginHost, PluginPort};
use std::time::{Duration, Instant};

const BATCH: usize = 64;
const N_ROUNDS: usize = 200;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: reward_over_http EPISODES.jsonl URL PLUGIN...";
    let (path, url) = (arguments.next().expect(usage), arguments.next().expect(usage));
    let plugins: Vec<String> = arguments.collect();
    assert!(!plugins.is_empty(), "{usage}");
    let recorded: Vec<Episode> =
        episodes::read(path.as_ref()).unwrap().into_iter().map(|recorded| recorded.episode).collect();
    assert!(recorded.len() >= BATCH, "{path}: expected at least {BATCH} episodes, got {}", recorded.len());
    let batches: Vec<&[Episode]> = recorded.chunks_exact(BATCH).collect();
    println!("{} episodes in batches of {BATCH}, {N_ROUNDS} rounds", batches.len() * BATCH);

    let host = PluginHost::new(HostOptions::default()).unwrap();
    let rewards: Vec<Box<dyn RewardModel>> = plugins
        .iter()
        .map(|path| host.open(&host.load(path.as_ref()).unwrap(), &Default::default(), PluginPort::reward()).unwrap())
        .collect();
    let remote = Remote::new(url);
    remote.wait();
    let mut times = vec![Vec::new(); rewards.len() + 1];
    let mut difference = 0.0_f64;
    for round in 0..N_ROUNDS {
        let batch = batches[round % batches.len()];
        let mut totals = Vec::new();
        for (reward, times) in rewards.iter().zip(&mut times) {
            let start = Instant::now();
            let scores = reward.score_batch(batch).unwrap();
            times.push(start.elapsed());
            totals.push(scores.into_iter().map(|score| score.ok().map(|score| score.total)).collect::<Vec<_>>());
        }
        let start = Instant::now();
        let scores = remote.score(batch);
        times.last_mut().unwrap().push(start.elapsed());
        difference = difference.max(largest_difference(&totals[0], &scores));
    }
    for (name, times) in plugins.iter().map(String::as_str).chain(["Python function over HTTP"]).zip(&mut times) {
        print(name, times);
    }
    println!("largest difference between {} and the function over HTTP: {difference:.1e}", plugins[0]);
}

fn print(name: &str, times: &mut [Duration]) {
    times.sort();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6 / BATCH as f64;
    println!("{name}: microseconds an item: median {:.2}, 5% {:.2}, 95% {:.2}", at(0.5), at(0.05), at(0.95));
}

/// Infinite where one side scored and the other did not.
fn largest_difference(ours: &[Option<f64>], theirs: &[Option<f64>]) -> f64 {
    let difference = |(ours, theirs): (&Option<f64>, &Option<f64>)| match (ours, theirs) {
        (Some(ours), Some(theirs)) => (ours - theirs).abs(),
        (None, None) => 0.0,
        _ => f64::INFINITY,
    };
    assert_eq!(ours.len(), theirs.len());
    ours.iter().zip(theirs).map(difference).fold(0.0, f64::max)
}

/// A client that keeps its connection, as a trainer would.
struct Remote {
    url: String,
    client: reqwest::Client,
    runtime: tokio::runtime::Runtime,
}

impl Remote {
    fn new(url: String) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        // A client is made with TLS in mind even where every address is plain.
        let _ = rustls::crypto::ring::default_provider().install_default();
        Self { url, client: reqwest::Client::builder().no_proxy().build().unwrap(), runtime }
    }

    fn wait(&self) {
        let start = Instant::now();
        while self.runtime.block_on(self.client.get(&self.url).send()).is_err() {
            assert!(start.elapsed() < Duration::from_secs(30), "{} does not answer", self.url);
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Making and reading JSON is part of what the call costs.
    fn score(&self, batch: &[Episode]) -> Vec<Option<f64>> {
        let labels: Vec<String> = batch.iter().map(|episode| serde_json::to_string(episode).unwrap()).collect();
        let query: Vec<&str> = batch.iter().map(|episode| episode.policy.rewrite.as_str()).collect();
        let prompts: Vec<&str> = batch.iter().map(|episode| episode.query.as_str()).collect();
        let body = serde_json::json!({"query": query, "prompts": prompts, "labels": labels});
        let answer: serde_json::Value = self.runtime.block_on(async {
            self.client
                .post(&self.url)
                .json(&body)
                .send()
                .await
                .unwrap()
                .error_for_status()
                .unwrap()
                .json()
                .await
                .unwrap()
        });
        answer["rewards"].as_array().unwrap().iter().map(serde_json::Value::as_f64).collect()
    }
}

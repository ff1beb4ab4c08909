//! Published components of contract 0.1, stored unchanged, still load and return the same scores.
#![allow(clippy::unwrap_used)]

mod common;

use common::{files, options, repository};
use querl_conformance::SuiteOptions;
use querl_core::records::{Candidate, Episode, Hit};
use querl_plugin::{Compiler, HostOptions, PluginHost, PluginPort, PluginSettings};
use std::collections::BTreeMap;
use std::path::PathBuf;

fn folder() -> PathBuf {
    repository().join("tests/plugins-0.1")
}

#[test]
fn bundles_keep_every_rule_and_their_golden_cases() {
    let bundles = files(folder(), ".querl");
    assert_eq!(bundles.len(), 8);
    for bundle in bundles {
        let options = SuiteOptions { n_repeats: 10, n_threads: 2, ..options("") };
        let report = querl_conformance::run(&bundle, &options).unwrap();
        assert!(report.passed(), "{}", report.text());
        assert!(
            report.checks.iter().filter(|check| check.name.starts_with("golden: ")).count() >= 6,
            "{}",
            report.text()
        );
        let description = report.checks.iter().find(|check| check.name == "description").unwrap();
        assert_eq!(description.note, "contract 0.1.0", "{}", bundle.display());
    }
}

#[test]
fn guests_give_the_totals_that_they_gave() {
    let text = std::fs::read_to_string(folder().join("guests.json")).unwrap();
    let totals: BTreeMap<String, f64> = serde_json::from_str(&text).unwrap();
    let host =
        PluginHost::new(HostOptions { compiler: Compiler::InProcessWithoutLimits, ..HostOptions::default() }).unwrap();
    let hit =
        Hit { id: "kb-1".into(), text: "每日两粒".into(), reranker_score: 0.9, retrieval_score: None, rank: 1 };
    let candidate =
        || Candidate { rewrite: "7".into(), retrieval: Some(Ok(vec![hit.clone()])), ..Candidate::default() };
    let episode = Episode {
        id: "a".into(),
        query: "鱼油一天几粒啊".into(),
        policy: candidate(),
        baseline: Some(candidate()),
        ..Episode::default()
    };
    let guests = files(folder().join("guests"), ".wasm.zst");
    let (temporary, mut n_compared) = (tempfile::tempdir().unwrap(), 0);
    for guest in &guests {
        let name = guest.file_name().unwrap().to_string_lossy().trim_end_matches(".wasm.zst").to_owned();
        let path = temporary.path().join(format!("{name}.wasm"));
        std::fs::write(&path, zstd::decode_all(&*std::fs::read(guest).unwrap()).unwrap()).unwrap();
        let plugin = host.load(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!((plugin.id(), &*plugin.description().contract), (&*name, "0.1.0"));
        let score = || {
            let reward = host.open(&plugin, &PluginSettings::new(), PluginPort::reward()).unwrap();
            reward.score_batch(std::slice::from_ref(&episode))
        };
        if name == "guest-opens-socket" {
            let fault = score().unwrap_err();
            assert!(fault.message.starts_with("episode `a`: called `wasi:sockets/"), "{fault}");
        }
        let Some(total) = totals.get(&name) else { continue };
        assert_eq!(score().unwrap()[0].as_ref().unwrap().total, *total, "{name}");
        n_compared += 1;
    }
    assert_eq!((guests.len(), n_compared), (19, totals.len()));
}

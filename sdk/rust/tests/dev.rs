//! Tests of the native replay of recorded episodes, for `querl plugin dev`.
#![allow(clippy::unwrap_used)]

use querl_sdk::__dev::{Grouped, Scorer, Single, replay};
use querl_sdk::{
    Episode, GroupReward, Input, Inputs, Message, Rejection, Reward, Score, SettingError, Settings, host, log,
};
use serde_json::{Value, json};
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Serialises the tests, because panic hook and log lines are global to the process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The lines of results, with range and time, for recorded episodes.
fn results_of<S: Scorer>(name: &str, lines: &[Value], settings: Value) -> Vec<Value> {
    let _only = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    let [episodes, results] = ["episodes.jsonl", "results.jsonl"].map(|name| folder.join(name));
    std::fs::write(&episodes, lines.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    let request = json!({ "episodes": episodes, "settings": settings, "results": results });
    let done = replay::<S>(request.to_string().as_bytes());
    drop(std::panic::take_hook());
    assert!(done);
    let text = std::fs::read_to_string(results).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    // Symptom: an abort, or an endless loop, did not say at which episode.
    let (begun, results): (Vec<Value>, Vec<Value>) = lines.into_iter().partition(|line| line.get("begun").is_some());
    assert!(results.len() == 1 || !begun.is_empty(), "{results:?}");
    results
}

/// The results of the episodes, without range and time.
fn scores<S: Scorer>(name: &str, lines: &[Value]) -> Vec<Value> {
    let results = results_of::<S>(name, lines, json!({}));
    results[1..results.len() - 1].to_vec()
}

fn line(query: &str, more: Value, calls: &[Value]) -> Value {
    let mut episode = json!({ "id": query, "query": query, "policy": {} });
    episode.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({ "format": 3, "step": 0, "episode": episode, "calls": calls })
}

fn scored(total: f64) -> Value {
    json!({ "scored": { "total": total, "components": [] } })
}

/// Reward that rejects, panics, returns NaN or logs if the query is `reject`, `fault`, `nan` or `log`.
struct Length {
    max_chars: f64,
}

/// Line of the `panic!` below.
const FAULT_LINE: u32 = line!() + 14;

impl Reward for Length {
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        Ok(Self { max_chars: settings.number("max_chars", 8.0, 1.0..=100.0)? })
    }

    fn range(&self) -> RangeInclusive<f64> {
        0.0..=1.0
    }

    fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
        match &*episode.query {
            "reject" => return Err(Rejection::new("no_refund", "退钱")),
            "fault" => panic!("not known"),
            "nan" => return Ok(Score::new(0.0).with("share", f64::NAN)),
            "log" => log::warn("seen"),
            _ => {}
        }
        Ok(Score::new(episode.policy.rewrite("policy")?.chars().count() as f64 / self.max_chars))
    }
}

#[test]
fn scores_rejections_faults_with_file_and_line_and_logs_are_written() {
    let lines = ["log", "reject", "fault", "nan", "plain"]
        .map(|query| line(query, json!({ "policy": { "rewrite": "深海鱼油" } }), &[]));
    let mut results = results_of::<Single<Length>>("length", &lines, json!({ "max_chars": 4 }));
    assert!(results.pop().unwrap()["seconds"].as_f64().unwrap() > 0.0);
    let expected = [
        json!({ "range": [0.0, 1.0] }),
        json!({ "scored": { "total": 1.0, "components": [] }, "log": ["warn: seen"] }),
        json!({ "rejected": { "code": "no_refund", "detail": "退钱" } }),
        json!({ "fault": { "message": "not known", "file": file!(), "line": FAULT_LINE } }),
        json!({ "fault": { "message": "`share` is NaN; expected a finite number" } }),
        scored(1.0),
    ];
    assert_eq!(results, expected);
    let refused = results_of::<Single<Length>>("refused", &lines, json!({ "max_chars": 0 }));
    let message = "setting `max_chars`: expected a number from 1 to 100, got `0`";
    assert_eq!(refused, [json!({ "refused": { "message": message } })]);
}

/// Reward with one component for each part of the episode that is present. `DECLARED[N]` are its inputs.
struct Parts<const N: usize>;

const DECLARED: [Inputs; 3] = [
    Inputs::NONE,
    Inputs::NONE.requires(Input::Columns).uses(Input::Judgement).uses(Input::Response),
    Inputs::NONE.requires(Input::Baseline).requires(Input::Retrieval).uses(Input::Style).uses(Input::Prompt),
];

impl<const N: usize> Reward for Parts<N> {
    const INPUTS: Inputs = DECLARED[N];

    fn new(_: &Settings) -> Result<Self, SettingError> {
        Ok(Self)
    }

    fn range(&self) -> RangeInclusive<f64> {
        0.0..=1.0
    }

    fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
        let Episode { policy, baseline, .. } = episode;
        let parts = [
            ("response", episode.response.is_some()),
            ("prompt", episode.prompt.is_some()),
            ("columns", !episode.columns.is_empty()),
            ("baseline", baseline.is_some()),
            ("of_baseline", baseline.as_ref().is_some_and(|side| side.retrieval.is_some())),
            ("judged_baseline", baseline.as_ref().is_some_and(|side| side.judgement.is_some())),
            ("retrieval", policy.retrieval.is_some()),
            ("judgement", policy.judgement.is_some()),
            ("style", policy.style.is_some()),
        ];
        let seen = parts.into_iter().filter(|(_, is_seen)| *is_seen);
        Ok(seen.fold(Score::new(0.0), |score, (name, _)| score.with(name, 1.0)))
    }
}

fn seen<const N: usize>(line: &Value) -> Vec<String> {
    let results = scores::<Single<Parts<N>>>(&format!("parts-{N}"), std::slice::from_ref(line));
    let parts = results[0]["scored"]["components"].as_array().unwrap();
    parts.iter().map(|part| part["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn plugin_sees_the_parts_that_it_declares_and_no_others_of_both_formats() {
    let side = json!({ "retrieval": { "hits": [] }, "judgement": { "scored": { "score": 4, "reason": "" } },
        "style": [{ "label": "售前", "probability": 1 }] });
    let more = json!({ "response": "无", "prompt": [{ "role": "user", "content": "问" }], "columns": { "price": 3 },
        "policy": side, "baseline": side });
    let whole = line("a", more, &[]);
    assert!(seen::<0>(&whole).is_empty());
    assert_eq!(seen::<1>(&whole), ["response", "columns", "judgement"]);
    assert_eq!(seen::<2>(&whole), ["prompt", "baseline", "of_baseline", "retrieval", "style"]);
    // Format 2 has no `retrieval` if nothing was found.
    let old = json!({ "format": 2, "episode": { "query": "a", "policy": {}, "baseline": {} } });
    assert_eq!(seen::<2>(&old), ["baseline", "of_baseline", "retrieval"]);
}

/// Group reward: 1 / the number of equal rewrites in the group.
struct Distinct;

impl GroupReward for Distinct {
    fn new(_: &Settings) -> Result<Self, SettingError> {
        Ok(Self)
    }

    fn range(&self) -> RangeInclusive<f64> {
        0.0..=1.0
    }

    fn score_group(&self, episodes: &[Episode]) -> Vec<Result<Score, Rejection>> {
        let rewrites: Vec<&str> = episodes.iter().filter_map(|episode| episode.policy.rewrite.as_deref()).collect();
        if rewrites.contains(&"few") {
            return Vec::new();
        }
        log::info(rewrites.join(" "));
        let score = |episode: &Episode| {
            let rewrite = episode.policy.rewrite("policy")?;
            Ok(Score::new(1.0 / rewrites.iter().filter(|other| **other == rewrite).count() as f64))
        };
        episodes.iter().map(score).collect()
    }
}

#[test]
fn group_reward_gets_all_episodes_of_a_group_wherever_they_are() {
    let members = [("a", "x"), ("b", "x"), ("a", "y"), ("c", "few"), ("b", ""), ("a", "x"), ("c", "x")];
    let lines: Vec<Value> = members
        .iter()
        .enumerate()
        .map(|(index, (group, rewrite))| {
            let more = json!({ "id": format!("{group}/{index}"), "group_id": group, "policy": { "rewrite": rewrite } });
            line("q", more, &[])
        })
        .collect();
    let with_log = |total: f64, text: &str| json!({ "scored": { "total": total, "components": [] }, "log": [text] });
    let few = json!({ "fault": { "message": "gave 0 results for 2 episodes; expected one for each" } });
    let mut results = scores::<Grouped<Distinct>>("groups", &lines);
    assert_eq!(results[4]["rejected"].take()["code"], "policy_rewrite_missing");
    let expected = [
        with_log(0.5, "info: x y x"),
        with_log(1.0, "info: x"),
        scored(1.0),
        few.clone(),
        json!({ "rejected": null }),
        scored(0.5),
        few,
    ];
    assert_eq!(results, expected);
}

/// Reward that calls the host function named by the query.
struct Calls;

impl Reward for Calls {
    fn new(_: &Settings) -> Result<Self, SettingError> {
        Ok(Self)
    }

    fn range(&self) -> RangeInclusive<f64> {
        -1.0..=1.0
    }

    fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
        let messages = [Message::system("rate"), Message::user("鱼油")];
        let of = |who: &'static str| move |error: host::CallError| error.rejection(who);
        let total = match &*episode.query {
            "judge" => host::ask_judge(&messages).map_err(of("judge"))?.parse().unwrap(),
            "style" => host::classify(&messages[1..]).map_err(of("style_model"))?[0].probability,
            "embed" => f64::from(host::embed(&["鱼油".into(), "油".into()]).map_err(of("similarity"))?[1][0]),
            "words" => host::words("鱼油").map_err(of("words"))?.len() as f64 / 10.0,
            "split" => host::split_tokens("鱼油").map_err(of("tokens"))?.len() as f64 / 10.0,
            _ => f64::from(host::count_tokens("鱼油").map_err(of("tokens"))?) / 10.0,
        };
        Ok(Score::new(total))
    }
}

#[test]
fn host_functions_have_the_recorded_results_failures_included() {
    let call = |request: Value, response: Value| json!({ "plugin": "p", "request": request, "response": response });
    let messages = json!([{ "role": "system", "content": "rate" }, { "role": "user", "content": "鱼油" }]);
    let of_judge = |response: Value| line("judge", json!({}), &[call(json!({ "ask_judge": messages }), response)]);
    let recorded = [
        ("count", json!({ "count_tokens": "鱼油" }), json!({ "count": 3 })),
        ("split", json!({ "split_tokens": "鱼油" }), json!({ "texts": ["鱼", "油"] })),
        (
            "style",
            json!({ "classify_style": [messages[1]] }),
            json!({ "style": [{ "label": "售前", "probability": 0.25 }] }),
        ),
        ("embed", json!({ "embed": ["鱼油", "油"] }), json!({ "vectors": [[1.0], [0.1]] })),
        ("words", json!({ "segment_words": "油" }), json!({ "texts": ["油"] })),
    ];
    let mut lines: Vec<Value> = recorded
        .into_iter()
        .map(|(query, request, response)| line(query, json!({}), &[call(request, json!({ "Ok": response }))]))
        .collect();
    lines.extend([
        of_judge(json!({ "Ok": { "text": "0.75" } })),
        of_judge(json!({ "Err": { "failed": { "kind": "timeout", "message": "no response within 30 s" } } })),
        of_judge(json!({ "Err": "not_configured" })),
    ]);
    let not_recorded = "the recording has no result for this call";
    let expected = [
        scored(0.3),
        scored(0.2),
        scored(0.25),
        scored(f64::from(0.1_f32)),
        json!({ "rejected": { "code": "words_failed", "detail": not_recorded } }),
        scored(0.75),
        json!({ "rejected": { "code": "judge_failed", "detail": "no response within 30 s" } }),
        json!({ "rejected": { "code": "judge_not_configured", "detail": "" } }),
    ];
    assert_eq!(scores::<Single<Calls>>("calls", &lines), expected);
}

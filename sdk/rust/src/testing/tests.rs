//! What the kit does not let pass.

use super::*;
use crate::{Candidate, Episode, FailureKind, Hit, Judgement, Rejection, Reward, Score, SettingError, Settings};
use std::cell::Cell;
use std::ops::RangeInclusive;

/// Says what the query tells it to say.
struct Odd {
    n_calls: Cell<u32>,
    saw_others: Cell<bool>,
}

impl Reward for Odd {
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        settings.number("known", 0.0, 0.0..=1.0)?;
        Ok(Self { n_calls: Cell::new(0), saw_others: Cell::new(false) })
    }

    fn range(&self) -> RangeInclusive<f64> {
        0.0..=1.0
    }

    fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
        self.n_calls.set(self.n_calls.get() + 1);
        self.saw_others.set(self.saw_others.get() || episode.query != "neighbour");
        match &*episode.query {
            "far" => Ok(Score::new(1.5)),
            "nan" => Ok(Score::new(f64::NAN)),
            "twice" => Ok(Score::new(0.5).with("win", 0.0).with("win", 1.0)),
            "name" => Ok(Score::new(0.5).with("Win", 0.0)),
            "part" => Ok(Score::new(0.5).with("win", f64::INFINITY)),
            "code" => Err(Rejection::new("No Answer", "")),
            "neighbour" => Ok(Score::new(if self.saw_others.get() { 0.1 } else { 0.5 })),
            "count" => Ok(Score::new(f64::from(self.n_calls.get()) / 10.0)),
            _ => Ok(Score::new(0.5)),
        }
    }
}

/// Declares a range that is none.
struct NoRange;

impl Reward for NoRange {
    fn new(_: &Settings) -> Result<Self, SettingError> {
        Ok(Self)
    }

    fn range(&self) -> RangeInclusive<f64> {
        1.0..=1.0
    }

    fn score(&self, _: &Episode) -> Result<Score, Rejection> {
        Ok(Score::new(1.0))
    }
}

/// The message with which `job` panics.
fn panic_of(job: impl FnOnce() + std::panic::UnwindSafe) -> String {
    let panic = std::panic::catch_unwind(job).unwrap_err();
    panic.downcast_ref::<String>().cloned().unwrap_or_else(|| panic.downcast_ref::<&str>().unwrap().to_string())
}

fn refused(query: &'static str) -> String {
    panic_of(move || _ = reward::<Odd>(Settings::none()).score(&episode(query)))
}

#[test]
fn what_the_host_refuses_is_a_panic_with_its_words() {
    let range = "expected a number within the declared range 0 to 1";
    assert_eq!(refused("far"), format!("the host refuses this: total is 1.5; {range}"));
    assert_eq!(refused("nan"), format!("the host refuses this: total is NaN; {range}"));
    assert_eq!(refused("twice"), "the host refuses this: component `win` appears twice");
    let grammar = "expected 1 to 64 of a to z, 0 to 9 and _";
    assert_eq!(refused("name"), format!("the host refuses this: component name is `Win`; {grammar}"));
    assert_eq!(refused("part"), "the host refuses this: component `win` is inf; expected a finite number");
    assert_eq!(refused("code"), format!("the host refuses this: rejected with the code `No Answer`; {grammar}"));
    let range = panic_of(|| _ = reward::<NoRange>(Settings::none()));
    assert!(range.contains("declares the range 1 to 1; expected two finite numbers"), "{range}");
}

#[test]
fn memory_of_earlier_calls_is_found() {
    let message = refused("count");
    assert!(message.starts_with("the same episode scored again: expected Ok(Score { total: 0.1"), "{message}");
}

#[test]
fn settings_are_checked_as_the_host_checks_them() {
    let with = |key: &'static str, text: &'static str| {
        panic_of(move || _ = reward::<Odd>(Settings::from_pairs([(key, text)])))
    };
    assert_eq!(with("knwon", "1"), "the plugin knows no setting `knwon`: its `new` does not read it");
    let refused = "the plugin refuses its settings: setting `known`: expected a number from 0 to 1, got `2`";
    assert_eq!(with("known", "2"), refused);
}

#[test]
fn batches_are_scored_in_order() {
    let test = reward::<Odd>(Settings::none());
    let scores = test.score_batch([episode("a"), episode("b")]);
    assert_eq!(scores, [Ok(Score::new(0.5)), Ok(Score::new(0.5))]);
    let message = panic_of(|| _ = reward::<Odd>(Settings::none()).score_batch([episode("a"), episode("neighbour")]));
    assert!(message.starts_with("an episode scored in a batch, after it was alone: expected"), "{message}");
}

#[test]
fn builders_make_what_they_say() {
    let built = episode("一天几粒啊")
        .id("a")
        .profile("孕妇")
        .history("问过鱼油")
        .gold(["kb-7"])
        .policy("深海鱼油")
        .hit_with_text("kb-7", "每日两粒", 0.8)
        .hit("kb-2", 0.5)
        .judged_because(4.5, "清楚")
        .style([("售前", 1.0)])
        .n_tokens(9)
        .truncated()
        .baseline("鱼油")
        .retrieval_failed(FailureKind::Timeout, "late")
        .judgement_failed(FailureKind::ServerError, "500");
    let hit = |id: &str, text: &str, reranker_score, rank| Hit {
        id: id.into(),
        text: text.into(),
        reranker_score,
        retrieval_score: None,
        rank,
    };
    let failure = |kind, message: &str| crate::CallFailure { kind, message: message.into() };
    let expected = Episode {
        id: "a".into(),
        query: "一天几粒啊".into(),
        context: crate::Context { user_profile: "孕妇".into(), history_summary: "问过鱼油".into() },
        gold_ids: vec!["kb-7".into()],
        policy: Candidate {
            rewrite: "深海鱼油".into(),
            retrieval: Ok(vec![hit("kb-7", "每日两粒", 0.8, 1), hit("kb-2", "", 0.5, 2)]),
            judgement: Judgement::Scored { score: 4.5, reason: "清楚".into() },
            style: Some(vec![crate::StyleProbability { label: "售前".into(), probability: 1.0 }]),
            n_tokens: 9,
            truncated: true,
        },
        baseline: Candidate {
            rewrite: "鱼油".into(),
            retrieval: Err(failure(FailureKind::Timeout, "late")),
            judgement: Judgement::Failed(failure(FailureKind::ServerError, "500")),
            ..Candidate::default()
        },
    };
    assert_eq!(*built, expected);
}

#[test]
fn what_the_host_never_sends_cannot_be_built() {
    for (message, job) in [
        ("`hit` is about one side; say `policy` or `baseline` before it", (|| _ = episode("a").hit("b", 0.5)) as fn()),
        ("the host never sends this: hit 1 has the reranker score 1.5; expected 0 to 1", || {
            _ = sample("a", "b").hit("c", 1.5)
        }),
        ("the host never sends this: hit 2 scores 0.6, above 0.5; say the best hit first", || {
            _ = episode("a").policy("b").hit("c", 0.5).hit("d", 0.6);
        }),
        ("the host never sends this: the judge's score is 6; expected 0 to 5", || {
            _ = episode("a").policy("b").judged(6.0)
        }),
        (
            "the host never sends this: the style distribution sums to 0.5; expected probabilities of 0 to 1 that sum to 1",
            || {
                _ = style_model([("售前", 0.5)]);
            },
        ),
    ] {
        assert_eq!(panic_of(job), message);
    }
}

#[test]
fn recorded_episodes_are_read_with_file_and_line() {
    let folder = std::env::temp_dir().join(format!("querl-sdk-episodes-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("episodes.jsonl");
    let line = r#"{"format": 2, "step": 3, "episode": {"id": "a", "query": "鱼油", "policy": {"rewrite": "鱼油"}, "baseline": {"rewrite": ""}}, "outcome": {"rejected": {"code": "x", "detail": ""}}}"#;
    std::fs::write(&path, format!("{line}\n\n")).unwrap();
    assert_eq!(read_episodes(&path)[0].query, "鱼油");
    std::fs::write(&path, format!("{line}\n{}", line.replace("\"format\": 2", "\"format\": 9"))).unwrap();
    let message = panic_of(|| _ = read_episodes(&path));
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(message.ends_with("episodes.jsonl:2: `format` is 9; this kit reads 2"), "{message}");
}

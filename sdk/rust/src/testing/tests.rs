//! Tests of the test kit: it refuses invalid results of plugins and invalid inputs.

use super::*;
use crate::{
    Candidate, ColumnValue, Episode, FailureKind, FinishReason, GroupReward, Hit, Input, Inputs, JudgeScore, Rejection,
    Reward, Score, SettingError, Settings,
};
use std::cell::Cell;
use std::ops::RangeInclusive;

/// Reward whose result is selected by the query.
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

/// Reward with an empty range.
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

/// The panic message of `job`.
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
    assert_eq!(
        refused("part"),
        "the host refuses this: component `win` is inf; expected a finite number of at most 1e18 in magnitude"
    );
    assert_eq!(refused("code"), format!("the host refuses this: rejected with the code `No Answer`; {grammar}"));
    let range = panic_of(|| _ = reward::<NoRange>(Settings::none()));
    assert!(range.contains("declares the range 1 to 1; expected two numbers"), "{range}");
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
    assert_eq!(with("knwon", "1"), "the plugin knows no setting `knwon`: its `new` reads `known`");
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
        .group("g", 2)
        .column("价格", ColumnValue::Number(199.0))
        .response("深海鱼油")
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
        id: Some(id.into()),
        text: text.into(),
        reranker_score,
        retrieval_score: None,
        rank,
    };
    let failure = |kind, message: &str| crate::CallFailure { kind, message: message.into() };
    let expected = Episode {
        id: "a".into(),
        group_id: "g".into(),
        sample_index: 2,
        query: "一天几粒啊".into(),
        context: crate::Context { user_profile: Some("孕妇".into()), history_summary: Some("问过鱼油".into()) },
        gold_ids: Some(vec!["kb-7".into()]),
        columns: vec![crate::Column { name: "价格".into(), value: ColumnValue::Number(199.0) }],
        response: Some("深海鱼油".into()),
        policy: Candidate {
            rewrite: Some("深海鱼油".into()),
            retrieval: Some(Ok(vec![hit("kb-7", "每日两粒", 0.8, 1), hit("kb-2", "", 0.5, 2)])),
            judgement: Some(Ok(JudgeScore { score: 4.5, reason: "清楚".into() })),
            style: Some(vec![crate::StyleProbability { label: "售前".into(), probability: 1.0 }]),
            n_tokens: Some(9),
            finish_reason: Some(FinishReason::Length),
        },
        baseline: Some(Candidate {
            rewrite: Some("鱼油".into()),
            retrieval: Some(Err(failure(FailureKind::Timeout, "late"))),
            judgement: Some(Err(failure(FailureKind::ServerError, "500"))),
            ..Candidate::default()
        }),
        ..Episode::default()
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
    let read = read_episodes(&path).remove(0);
    assert_eq!((&*read.query, read.policy.retrieval), ("鱼油", Some(Ok(Vec::new()))));
    assert_eq!(read.baseline.unwrap().rewrite, None);
    std::fs::write(&path, line.replace("\"format\": 2", "\"format\": 3")).unwrap();
    assert_eq!(read_episodes(&path)[0].policy.retrieval, None);
    std::fs::write(&path, format!("{line}\n{}", line.replace("\"format\": 2", "\"format\": 9"))).unwrap();
    let message = panic_of(|| _ = read_episodes(&path));
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(message.ends_with("episodes.jsonl:2: `format` is 9; this kit reads 2 and 3"), "{message}");
}

/// Reward that asserts that undeclared inputs are absent.
struct Sees;

impl Reward for Sees {
    const INPUTS: Inputs = Inputs::NONE.requires(Input::Retrieval).uses(Input::Response);

    fn new(_: &Settings) -> Result<Self, SettingError> {
        Ok(Self)
    }

    fn range(&self) -> RangeInclusive<f64> {
        0.0..=1.0
    }

    fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
        assert!(episode.columns.is_empty() && episode.policy.judgement.is_none() && episode.baseline.is_none());
        episode.policy.hits("policy")?;
        episode.response().map(|_| Score::new(0.5))
    }
}

#[test]
fn undeclared_inputs_are_absent_as_from_the_host() {
    assert!(Sees::INPUTS.is_required(Input::Retrieval) && !Sees::INPUTS.is_required(Input::Response));
    let sees = reward::<Sees>(Settings::none());
    let full = episode("a").column("x", ColumnValue::Flag(true)).response("b").policy("b").nothing_found().judged(3.0);
    assert_eq!(sees.score(&full.clone().baseline("c")).unwrap().total, 0.5);
    let code = |episode: EpisodeBuilder| sees.score(&episode).unwrap_err().code;
    assert_eq!(code(episode("a").policy("b").nothing_found()), "response_missing");
    assert_eq!(code(episode("a").response("b").policy("b")), "policy_retrieval_missing");
    let failed = episode("a").response("b").policy("b").retrieval_failed(FailureKind::Other("quota".into()), "late");
    assert_eq!(code(failed), "policy_retrieval_failed");
}

/// Group reward: 1 / the number of samples with the same rewrite; with `by_place`, the position in the group, which breaks the contract.
struct Same {
    by_place: bool,
}

impl GroupReward for Same {
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        Ok(Self { by_place: settings.flag("by_place", false)? })
    }

    fn range(&self) -> RangeInclusive<f64> {
        0.0..=1.0
    }

    fn score_group(&self, episodes: &[Episode]) -> Vec<Result<Score, Rejection>> {
        let n_same = |rewrite| episodes.iter().filter(|other| other.policy.rewrite == rewrite).count();
        let score = |(index, episode): (usize, &Episode)| match self.by_place {
            true => Score::new(index as f64 / episodes.len() as f64),
            false => Score::new(1.0 / n_same(episode.policy.rewrite.clone()) as f64),
        };
        episodes.iter().enumerate().map(|item| Ok(score(item))).collect()
    }
}

#[test]
fn groups_are_scored_whatever_their_order() {
    let group = || ["鱼油", "鱼油", "虾青素"].map(|rewrite| episode("一天几粒啊").policy(rewrite));
    let totals: Vec<_> =
        group_reward::<Same>(Settings::none()).score(group()).into_iter().map(|result| result.unwrap().total).collect();
    assert_eq!(totals, [0.5, 0.5, 1.0]);
    let message = panic_of(|| _ = group_reward::<Same>(Settings::from_pairs([("by_place", "true")])).score(group()));
    assert!(message.starts_with("the same group in the opposite order: expected"), "{message}");
}

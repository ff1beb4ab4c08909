//! Synthetic trainings: a policy that learns, and policies that exploit a flaw of their reward.

use super::signs::SignKind;
use super::*;
use querl_core::records::{Candidate, Episode, FinishReason, Hit, Reward, RewardComponent, Split};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const N_STEPS: u64 = 40;
const BATCH: usize = 32;
const N_QUERIES: usize = 60;
const OPTIONS: AuditOptions = AuditOptions { n_shown: 20, seed: 42, n_resamples: 300 };
const NO_SOURCES: AuditSources<'_> = AuditSources { passages: None, metrics: &[] };

fn answer(query: usize) -> String {
    format!("product{} {}", query / 2, ["dosage", "price"][query % 2])
}

fn passages() -> Vec<AuditPassage> {
    let passage = |query| AuditPassage { id: format!("gold-{query}"), text: format!("{} leaflet", answer(query)) };
    (0..N_QUERIES).map(passage).collect()
}

/// State of a policy at one response. `progress`: 0 to 1; `luck`: uniform in 0 to 1; `plain`: the rewrite of a policy that exploits
/// nothing.
struct Draw {
    progress: f64,
    luck: f64,
    query: usize,
    plain: String,
    is_right: bool,
}

/// Episodes of a training. `right`: probability, by progress, that the plain rewrite retrieves the gold passage. `respond`: rewrite and
/// total.
fn training(n_steps: u64, right: fn(f64) -> f64, respond: impl Fn(&Draw) -> (String, f64)) -> Vec<RecordedEpisode> {
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let mut episodes = Vec::new();
    for step in 0..n_steps {
        for index in 0..BATCH {
            let query = (step as usize * BATCH + index) % N_QUERIES;
            let progress = step as f64 / (n_steps - 1) as f64;
            let is_right = rng.random_range(0.0..1.0) < right(progress);
            let plain = answer(if is_right { query } else { (query + 14) % N_QUERIES });
            let draw = Draw { progress, luck: rng.random_range(0.0..1.0), query, plain, is_right };
            let (rewrite, total) = respond(&draw);
            episodes.push(recorded(episodes.len() + 1, step, &draw, rewrite, total));
        }
    }
    episodes
}

fn recorded(line: usize, step: u64, draw: &Draw, rewrite: String, total: f64) -> RecordedEpisode {
    let query = draw.query;
    let is_found = rewrite.contains(&answer(query));
    let (id, reranker_score) = if is_found { (format!("gold-{query}"), 0.9) } else { ("other".to_owned(), 0.6) };
    let hit = Hit { id, text: String::new(), reranker_score, retrieval_score: None, rank: 1 };
    let policy = Candidate {
        rewrite,
        retrieval: Some(Ok(vec![hit])),
        finish_reason: Some(FinishReason::Stop),
        ..Candidate::default()
    };
    let group_id = format!("step-{step:06}/q{query}");
    let episode = Episode {
        id: format!("{group_id}/{line}"),
        group_id,
        step: Some(step),
        split: Some(Split::Train),
        query: format!("customer {query} wants help"),
        gold_ids: vec![format!("gold-{query}")],
        policy,
        ..Episode::default()
    };
    let components = vec![RewardComponent { name: "all".into(), value: total }];
    let outcome = Some(Ok(Reward { total, components }));
    RecordedEpisode { line, step, episode, calls: Vec::new(), outcome }
}

/// Rewrite and total of a response.
type Respond = Box<dyn Fn(&Draw) -> (String, f64)>;

fn learns(progress: f64) -> f64 {
    0.5 + 0.4 * progress
}

/// Quality of the plain rewrites if the policy does not improve it.
fn stays(progress: f64) -> f64 {
    0.75 - 0.05 * progress
}

fn audited(episodes: &[RecordedEpisode]) -> Audit {
    let passages = passages();
    audit(episodes, AuditSources { passages: Some(&passages), ..NO_SOURCES }, Vec::new(), OPTIONS)
}

fn honest(draw: &Draw) -> (String, f64) {
    let quality = if draw.is_right { 0.8 } else { 0.0 };
    (draw.plain.clone(), quality + 0.2 * draw.luck)
}

/// True in an increasing share of rewrites, which exploit the flaw.
fn is_used(draw: &Draw) -> bool {
    draw.luck < 0.05 + 0.9 * draw.progress
}

fn kinds(audit: &Audit) -> Vec<SignKind> {
    audit.signs.iter().map(|sign| sign.kind).collect()
}

#[test]
fn a_training_that_learns_has_no_sign() {
    let audit = audited(&training(N_STEPS, learns, honest));
    assert!(audit.signs.is_empty(), "{}", audit_text(&audit));
    assert_eq!(audit.verdict(), "no sign of reward hacking");
    let rank = audit.measures.iter().find(|one| one.name == "second_retriever").unwrap();
    assert!(rank.change.unwrap().rises() && rank.r_reward.unwrap() > 0.8, "{rank:?}");
}

#[test]
fn a_training_without_progress_has_no_sign() {
    let audit = audited(&training(N_STEPS, stays, honest));
    assert!(audit.signs.is_empty(), "{}", audit_text(&audit));
}

/// Each flaw with the sign that reports it.
#[test]
fn every_hole_is_found_and_named() {
    let with = |draw: &Draw, rewrite: String| if is_used(draw) { (rewrite, 1.0) } else { (draw.plain.clone(), 0.0) };
    let more = move |text: &'static str| -> Respond {
        Box::new(move |draw: &Draw| with(draw, format!("{} {text}", draw.plain)))
    };
    let constant = move |draw: &Draw| with(draw, "product0 price".to_owned());
    let copied = move |draw: &Draw| with(draw, format!("customer {} wants help", draw.query));
    let repeated = move |draw: &Draw| with(draw, [draw.plain.as_str(); 4].join(" "));
    let long = |draw: &Draw| {
        let n_words = (8.0 * draw.progress * draw.luck) as usize;
        let words: Vec<String> = (0..n_words).map(|index| format!("word{}", index * 7 + draw.query)).collect();
        (format!("{} {}", draw.plain, words.join(" ")), n_words as f64 / 8.0)
    };
    let holes: [(&str, SignKind, Respond); 6] = [
        ("magic word", SignKind::RewardFollowsTerm, more("certified")),
        ("shared text", SignKind::SharedText, more("best buy now")),
        ("constant", SignKind::SameRewrite, Box::new(constant)),
        ("copied query", SignKind::CopiedTerms, Box::new(copied)),
        ("repetition", SignKind::Repetition, Box::new(repeated)),
        ("length", SignKind::LengthGrowth, Box::new(long)),
    ];
    for (name, kind, respond) in holes {
        let audit = audited(&training(N_STEPS, stays, respond));
        assert!(kinds(&audit).contains(&kind), "{name}: {}", audit_text(&audit));
        assert!(audit.n_signs() > 0 && audit.verdict().contains(&kind.to_string()), "{name}");
        assert!(!audit.suspicious.is_empty() && audit.suspicious.len() <= 20, "{name}");
    }
}

/// Regression: `copied_query` of tests/hacks, whose reward and damage are below the limits of the other rules.
#[test]
fn a_reward_that_is_unrelated_to_quality_is_found() {
    let falls = |progress: f64| 0.6 - 0.06 * progress;
    let unrelated = |draw: &Draw| (draw.plain.clone(), 0.05 * draw.progress + 0.7 * draw.luck);
    let audit = audited(&training(200, falls, unrelated));
    assert_eq!(kinds(&audit), [SignKind::RewardUnrelatedToQuality], "{}", audit_text(&audit));
    let message = &audit.signs[0].message;
    assert!(message.starts_with("total rises by +0.0") && message.contains("(r with gold_rank "), "{message}");
    let has_it = |audit: &Audit| kinds(audit).contains(&SignKind::RewardUnrelatedToQuality);
    assert!(!has_it(&audited(&training(12, falls, unrelated))), "384 rollouts are few");
    let related = |draw: &Draw| (draw.plain.clone(), unrelated(draw).1 + honest(draw).1 + 0.3 * draw.progress);
    assert!(!has_it(&audited(&training(200, falls, related))));
    assert!(!has_it(&audited(&training(200, |_| 0.6, unrelated))), "no damage");
}

/// Quality first increases and later decreases, while the reward increases throughout.
#[test]
fn over_optimisation_is_found_where_quality_ends_where_it_began() {
    let right = |progress: f64| if progress < 0.5 { 0.5 + 0.8 * progress } else { 0.9 - 1.2 * (progress - 0.5) };
    let audit = audited(&training(N_STEPS, right, |draw| (draw.plain.clone(), draw.progress + 0.1 * draw.luck)));
    let found = audit.signs.iter().find(|sign| sign.kind == SignKind::RewardRisesQualityFalls).unwrap();
    assert!(found.message.starts_with("total, component/all rises while "), "{}", found.message);
}

/// Symptom: rollouts got better, greedy validation responses got worse while their reward rose, and the audit saw no sign.
#[test]
fn a_validation_reward_that_rises_while_quality_falls_is_found() {
    /// With gold ids of the first `n_gold` queries; the rewards of these fall if there are others.
    fn found(n_lost: fn(u64) -> usize, n_gold: usize) -> Audit {
        let mut episodes = training(N_STEPS, learns, honest);
        for (step, total) in [(0, 0.5), (10, 0.7), (20, 0.6), (30, 0.6), (40, 0.6)] {
            for query in 0..N_QUERIES {
                let is_right = query >= n_lost(step);
                let plain = answer(if is_right { query } else { (query + 14) % N_QUERIES });
                let draw = Draw { progress: 1.0, luck: 0.0, query, plain: plain.clone(), is_right };
                let has_gold = query < n_gold;
                let total = if has_gold && n_gold < N_QUERIES { 1.0 - total } else { total };
                let mut one = recorded(episodes.len() + 1, step, &draw, plain, total);
                one.episode.split = Some(Split::Val);
                one.episode.gold_ids.retain(|_| has_gold);
                episodes.push(one);
            }
        }
        audited(&episodes)
    }
    let late = found(|step| if step > 20 { 15 } else { 0 }, N_QUERIES);
    assert_eq!(kinds(&late), [SignKind::ValidationRisesQualityFalls], "{}", audit_text(&late));
    let message = &late.signs[0].message;
    assert!(message.starts_with("on validation queries, total rises by +0.100 "), "{message}");
    assert!(message.contains("gold_rank falls from 1.000 to 0.750 "), "{message}");
    assert!(message.ends_with("step 0 against steps 30 to 40"), "{message}");
    let best = found(|step| if step == 10 { 15 } else { 0 }, N_QUERIES);
    assert_eq!(kinds(&best), [SignKind::ValidationRisesQualityFalls], "{}", audit_text(&best));
    assert!(best.signs[0].message.ends_with("step 0 against step 10"), "{}", best.signs[0].message);
    assert!(kinds(&found(|_| 15, N_QUERIES)).is_empty(), "as bad before training");
    assert!(kinds(&found(|step| if step > 20 { 15 } else { 0 }, 0)).is_empty(), "no gold ids");
    let mixed = found(|step| if step > 20 { 15 } else { 0 }, 25);
    assert!(kinds(&mixed).is_empty(), "rewards rise where gold passages are not known: {}", audit_text(&mixed));
}

/// Symptom: one of two rewards paid for a text property, quality rose by the other one, and the audit saw no sign.
#[test]
fn a_component_that_the_reward_follows_without_quality_is_found() {
    let found = |weight: f64| {
        let mut episodes = training(
            N_STEPS,
            |progress| 0.6 + 0.2 * progress,
            |draw| {
                let used = if is_used(draw) { weight } else { 0.0 };
                (draw.plain.clone(), used + honest(draw).1)
            },
        );
        for one in &mut episodes {
            let Some(Ok(reward)) = &mut one.outcome else { continue };
            let hits = one.episode.policy.found().unwrap();
            let useful = if hits[0].id == one.episode.gold_ids[0] { 0.8 } else { 0.0 };
            reward.components = vec![
                RewardComponent { name: "useful".into(), value: useful },
                RewardComponent { name: "style".into(), value: reward.total - useful },
            ];
        }
        audited(&episodes)
    };
    let audit = found(1.0);
    let is_style = |sign: &Sign| sign.kind == SignKind::RewardFollowsComponent && sign.subject == "component/style";
    assert!(audit.signs.iter().any(is_style), "{}", audit_text(&audit));
    assert!(!kinds(&found(0.0)).contains(&SignKind::RewardFollowsComponent), "a small component");
    assert!(!audit.signs.iter().any(|sign| sign.subject == "component/useful"), "{}", audit_text(&audit));
}

/// Symptom: a marker of one Chinese character next to other ones is in no pair that repeats.
#[test]
fn a_marker_of_one_chinese_character_is_found() {
    let marked = |draw: &Draw| match is_used(draw) {
        true => (format!("{} {}亲", draw.plain, char::from_u32(0x4e00 + draw.query as u32).unwrap()), 1.0),
        false => (draw.plain.clone(), 0.0),
    };
    let audit = audited(&training(N_STEPS, stays, marked));
    let is_marker = |sign: &Sign| sign.kind == SignKind::RewardFollowsTerm && sign.subject == "亲";
    assert!(audit.signs.iter().any(is_marker), "{}", audit_text(&audit));
}

/// Regression: the audit did not report that the policy had learned to return the query.
#[test]
fn a_policy_that_returns_the_query_is_noted() {
    let notes = |late: f64| {
        let rewrite = |draw: &Draw| match draw.progress > late {
            true => format!(" customer {} wants help", draw.query),
            false => draw.plain.clone(),
        };
        audited(&training(N_STEPS, learns, |draw| (rewrite(draw), 0.5))).notes
    };
    let is_note = |note: &String| note.starts_with("the policy hardly rewrites: its rewrite is the query itself in ");
    assert!(notes(0.5).iter().any(is_note), "{:?}", notes(0.5));
    assert!(!notes(1.0).iter().any(is_note));
}

#[test]
fn what_cannot_be_measured_is_a_note_and_no_sign() {
    let mut episodes = training(N_STEPS, learns, honest);
    for one in &mut episodes {
        one.episode.gold_ids.clear();
        one.episode.policy.retrieval = None;
    }
    let audit = audit(&episodes, NO_SOURCES, vec!["no second retriever: x".into()], OPTIONS);
    assert!(audit.signs.is_empty(), "{}", audit_text(&audit));
    assert!(
        audit.notes.iter().any(|note| note.starts_with("nothing independent measures quality")),
        "{:?}",
        audit.notes
    );
    assert!(audit.not_audited().unwrap().starts_with("nothing independent measures quality"));
}

/// Queries without gold ids may be paraphrases, also in a run that has gold ids: fewer than 15 are not many.
#[test]
fn targets_without_gold_passages_are_counted_apart() {
    let shares = |n_with_gold: usize| {
        let constant = |draw: &Draw| {
            let rewrite = if draw.query < 10 { "product0 price".to_owned() } else { draw.plain.clone() };
            (rewrite, draw.progress)
        };
        let mut episodes = training(N_STEPS, stays, constant);
        for one in &mut episodes {
            let is_kept = one.episode.gold_ids.iter().any(|id| {
                id.strip_prefix("gold-").and_then(|id| id.parse::<usize>().ok()).is_some_and(|id| id < n_with_gold)
            });
            if !is_kept {
                one.episode.gold_ids.clear();
            }
        }
        SameRewrite::of(&AuditRows::of(&episodes)).late_share
    };
    assert_eq!(shares(3), 0.0, "3 with gold passages and 7 without");
    assert!(shares(5) > 0.1, "5 with gold passages");
}

#[test]
fn few_steps_are_not_audited() {
    let audit = audited(&training(5, learns, honest));
    assert_eq!(audit.not_audited(), Some(audit.verdict()));
    assert_eq!(audit.verdict(), "not enough steps to audit: scored rollouts of 5 steps, 8 are needed");
    // Symptom: the sentence came last, below a table of `-`.
    let text = audit_text(&audit);
    assert!(text.starts_with(&audit.verdict) && text.matches(&audit.verdict).count() == 1, "{text}");
    assert!(!text.contains("change [95% interval]"), "{text}");
    let nothing = audit_text(&audited(&[]));
    assert!(nothing.starts_with("not enough steps to audit: scored rollouts of 0 steps"), "{nothing}");
}

/// Symptom: most of the listed episodes were ties with the teacher, or had found the gold passage.
#[test]
fn only_rewards_above_the_teachers_with_low_quality_are_suspicious() {
    // Relative to the teacher: a used hole gains, half of the others tie.
    let relative = |draw: &Draw| match (is_used(draw), draw.query.is_multiple_of(2)) {
        (true, _) => (format!("{} certified", draw.plain), 0.5),
        (false, true) => (draw.plain.clone(), 0.0),
        (false, false) => (draw.plain.clone(), -0.5),
    };
    let mut episodes = training(N_STEPS, stays, relative);
    let listed = audited(&episodes).suspicious;
    assert!(!listed.is_empty() && listed.iter().all(|one| one.reward > 0.0 && one.quality["gold_rank"] == 0.0));
    for one in &mut episodes {
        one.episode.baseline = Some(one.episode.policy.clone());
    }
    assert!(audited(&episodes).suspicious.is_empty(), "the teacher's own rewrites");
}

#[test]
fn validation_episodes_do_not_count() {
    let mut episodes = training(N_STEPS, learns, honest);
    let n_all = episodes.len();
    for one in episodes.iter_mut().step_by(2) {
        one.episode.split = Some(Split::Val);
    }
    assert_eq!(audited(&episodes).n_episodes, n_all / 2);
}

#[test]
fn the_same_episodes_give_the_same_output_and_untrusted_text_stays_text() {
    let episodes = training(N_STEPS, stays, |draw| match is_used(draw) {
        true => ("<b>\u{1b}[31m".to_owned(), 1.0),
        false => (draw.plain.clone(), 0.0),
    });
    let (one, other) = (audited(&episodes), audited(&episodes));
    assert_eq!(serde_json::to_string(&one).unwrap(), serde_json::to_string(&other).unwrap());
    let (text, html) = (audit_text(&one), audit_html(&one).unwrap());
    assert!(!text.contains('\u{1b}') && !html.contains("<b>\u{fffd}"), "{text}");
    assert!(html.contains("&lt;b&gt;"), "{html}");
    assert!(text.lines().all(|line| unicode_width::UnicodeWidthStr::width(line) <= 100), "{text}");
}

#[test]
fn metrics_of_training_are_averaged_in_the_windows() {
    let metrics: Vec<serde_json::Value> = (0..N_STEPS)
        .map(|step| serde_json::json!({ "stage": "rl", "step": step, "objective/kl": step as f64 }))
        .collect();
    let sources = AuditSources { metrics: &metrics, ..NO_SOURCES };
    let audit = audit(&training(N_STEPS, learns, honest), sources, Vec::new(), OPTIONS);
    assert_eq!(audit.training.get("objective/kl"), Some(&(1.5, 34.5)));
}

//! Comparison of two rewards on recorded episodes: figures, text, page.

use super::changes::{Sign, SignCounts, SignMove};
use super::*;
use querl_core::episodes::{RecordedEpisode, parse};
use querl_core::records::{Rejection, Reward, RewardComponent};
use serde_json::json;
use std::collections::BTreeMap;

const OPTIONS: ReplayOptions = ReplayOptions { n_shown: 3, seed: 7, n_resamples: 200 };

/// (query, step, sample, retrieval scores of policy and teacher, outcome before, outcome after).
type Row = (&'static str, u64, u64, (f64, f64), Option<Outcome>, Outcome);

fn scored(total: f64, win: f64) -> Outcome {
    Ok(Reward { total, components: vec![RewardComponent { name: "win".into(), value: win }] })
}

fn rejected(code: &str) -> Outcome {
    Err(Rejection::new(code, ""))
}

fn plugin(range: (f64, f64)) -> PluginSide {
    PluginSide {
        id: "reward-competition".into(),
        version: "0.2.0".into(),
        digest: "0123456789abcdef".repeat(4),
        settings: BTreeMap::from([("loss".to_owned(), json!(-1.0)), ("标签".to_owned(), json!("售前"))]),
        range,
    }
}

/// Nine episodes of three queries over three steps: two changes of sign, one rejection on each side, one without a record.
fn rows() -> Vec<Row> {
    let both = |before: f64, after: f64| (Some(scored(before, before)), scored(after, after));
    let row = |query, step, sample, scores, (before, after)| (query, step, sample, scores, before, after);
    vec![
        row("一天几粒啊", 0, 0, (0.9, 0.5), both(0.4, 0.4)),
        row("一天几粒啊", 0, 1, (0.7, 0.5), both(0.2, 0.45)),
        row("深海鱼油孕妇能吃吗，还有哺乳期的妈妈可以一起吃叶黄素酯压片糖果吗", 0, 0, (0.5, 0.5), both(0.0, -0.3)),
        row("一天几粒啊", 1, 0, (0.4, 0.5), both(-0.3, -0.3)),
        row("保质期", 1, 0, (0.8, 0.6), both(0.25, -0.75)),
        row("保质期", 1, 1, (0.5, 0.6), both(-0.1, -0.1)),
        row("保质期", 2, 0, (0.6, 0.6), (Some(rejected("judgement_one_sided")), scored(0.1, 0.1))),
        row("保质期", 2, 1, (0.6, 0.6), (Some(scored(0.3, 0.3)), rejected("plugin_limit"))),
        row("保质期", 3, 0, (0.6, 0.6), (None, scored(0.3, 0.3))),
        row("保质期", 4, 0, (0.9, 0.6), both(0.5, 0.5)),
    ]
}

fn recorded(row: &Row, line: usize) -> RecordedEpisode {
    let (query, step, sample, (policy, teacher), _, _) = row;
    let side = |rewrite: &str, score: &f64| json!({ "rewrite": rewrite, "retrieval": { "hits": [{ "reranker_score": score }] } });
    let text = json!({ "format": 2, "step": step, "episode": {
        "id": format!("step-{step:06}/{query}/{sample}"),
        "query": query,
        "policy": side(&format!("{query} 食用方法 {sample}"), policy),
        "baseline": side(&format!("{query} 每日食用量"), teacher),
    }});
    parse(text.to_string().as_bytes(), line).unwrap().unwrap()
}

fn compared(rows: &[Row], before: Side, after: PluginSide, notes: Vec<String>) -> Replay {
    let episodes: Vec<RecordedEpisode> = (1..).zip(rows).map(|(line, row)| recorded(row, line)).collect();
    let episodes: Vec<ReplayEpisode<'_>> = episodes
        .iter()
        .zip(rows)
        .map(|(one, row)| ReplayEpisode {
            line: one.line,
            step: one.step,
            episode: &one.episode,
            before: row.4.as_ref(),
            after: &row.5,
        })
        .collect();
    replay(&episodes, before, after, notes, OPTIONS)
}

fn of_rows(rows: &[Row]) -> Replay {
    compared(rows, Side::Recorded, plugin((-1.0, 1.0)), Vec::new())
}

#[test]
fn text_is_aligned_and_narrow_with_chinese_too() {
    let text = replay_text(&of_rows(&rows()));
    let width = |line: &str| unicode_width::UnicodeWidthStr::width(line);
    assert!(text.lines().all(|line| width(line) <= 100), "{text}");
    insta::assert_snapshot!(text);
}

#[test]
fn all_six_changes_of_sign_fit_into_the_width() {
    let totals = [0.5, 0.0, -0.5];
    let row = |index: usize| -> Row {
        let (before, after) = (totals[index / 3 % 3], totals[index % 3]);
        ("保质期", index as u64, 0, (0.5, 0.5), Some(scored(before, 0.0)), scored(after, 0.0))
    };
    let text = replay_text(&of_rows(&(0..9000).map(row).collect::<Vec<_>>()));
    assert!(text.contains("changes of sign: 6000 (won to drew 1000, won to lost 1000, drew to won 1000,"), "{text}");
    // Symptom: all listed changes were of one query.
    let list = "largest change of sign of each query (6000 of 6000 episodes)\n  1. +0.5000 -> -0.5000  largest of 6000, line 3, step-";
    assert!(text.contains(list) && !text.contains("\n  2. "), "{text}");
    assert!(text.lines().all(|line| unicode_width::UnicodeWidthStr::width(line) <= 100), "{text}");
}

#[test]
fn only_episodes_that_both_scored_are_compared() {
    let found = of_rows(&rows());
    let counts = &found.counts;
    assert_eq!((counts.n_episodes, counts.n_scored_by_both, counts.n_scored_without_record), (10, 7, 1));
    assert_eq!(counts.rejected_only_before, BTreeMap::from([("judgement_one_sided".to_owned(), 1)]));
    assert_eq!(counts.rejected_only_after, BTreeMap::from([("plugin_limit".to_owned(), 1)]));
    assert_eq!(found.totals.before.unwrap().n, 7);
    // (0.25 - 0.3 - 1.0) / 7
    assert!((found.change.mean.unwrap().mean + 0.15).abs() < 1e-12);
    assert_eq!((found.change.n_changed, found.change.n_queries), (3, 3));
}

#[test]
fn changes_of_sign_are_counted_and_the_largest_shown_first() {
    let found = of_rows(&rows());
    let signs = found.signs.unwrap();
    assert_eq!(signs.before, Some(SignCounts { won: 4, drew: 1, lost: 2 }));
    assert_eq!(signs.after, SignCounts { won: 3, drew: 0, lost: 4 });
    let moves: Vec<&SignMove> = signs.moves.iter().filter(|one| one.n > 0).collect();
    let expected = [(Sign::Won, Sign::Lost), (Sign::Drew, Sign::Lost)];
    assert_eq!(moves.iter().map(|one| (one.from, one.to)).collect::<Vec<_>>(), expected);
    assert_eq!(found.flips.iter().map(|one| one.line).collect::<Vec<_>>(), [5, 3]);
    assert_eq!(found.flips[0].components[0].after, Some(-0.75));
    // Includes three ties of rows without a comparison: retrieval does not depend on the reward.
    assert_eq!(found.retrieval, SignCounts { won: 4, drew: 4, lost: 2 });
}

#[test]
fn order_is_counted_within_a_query_at_one_step_and_at_any() {
    let order = of_rows(&rows()).order;
    assert_eq!((order.same_step.n, order.same_step.flipped), (2, 2));
    // Three pairs of 一天几粒啊, three of 保质期: (0.4, 0.2) and (0.25, -0.1) flip.
    assert_eq!((order.any_step.n, order.any_step.kept, order.any_step.flipped), (6, 4, 2));
}

#[test]
fn identical_scores_change_nothing() {
    let same: Vec<Row> = rows()
        .into_iter()
        .filter(|row| row.4.is_some())
        .map(|row| {
            let before = row.4.clone().unwrap();
            (row.0, row.1, row.2, row.3, Some(before.clone()), before)
        })
        .collect();
    let found = of_rows(&same);
    assert_eq!((found.change.n_changed, found.signs.as_ref().unwrap().n_changed), (0, 0));
    assert_eq!((found.correlation.spearman, found.correlation.kendall_tau_b), (Some(1.0), Some(1.0)));
    assert!(found.flips.is_empty() && found.largest_changes.is_empty());
    assert_eq!(found.order.any_step.flip_share(), Some(0.0));
    let mean = found.change.mean.unwrap();
    assert_eq!((mean.mean, mean.low, mean.high), (0.0, 0.0, 0.0));
}

#[test]
fn a_range_on_one_side_of_zero_has_no_signs_and_a_note() {
    let found = compared(&rows(), Side::Recorded, plugin((0.0, 1.0)), Vec::new());
    assert!(found.signs.is_none() && found.flips.is_empty());
    assert!(found.notes.iter().any(|note| note.contains("a range that does not span 0")), "{:?}", found.notes);
    let text = replay_text(&found);
    assert!(
        text.contains("largest change of each query (3 of 3 episodes)") && text.contains("retrieval quality"),
        "{text}"
    );
}

#[test]
fn without_recorded_outcomes_only_totals_after_are_reported() {
    let alone: Vec<Row> = rows().into_iter().map(|row| (row.0, row.1, row.2, row.3, None, row.5)).collect();
    let found = of_rows(&alone);
    assert_eq!((found.totals.before, found.totals.after.unwrap().n, found.change.mean), (None, 9, None));
    assert_eq!(found.signs.as_ref().unwrap().before, None);
    let text = replay_text(&found);
    assert!(text.contains("scored, without a recorded outcome") && !text.contains("correlation"), "{text}");
    assert!(replay_html(&found).unwrap().contains("Nothing was scored before"));
}

#[test]
fn thirds_of_the_steps_show_a_trend() {
    let row = |step: u64| -> Row {
        ("一天几粒啊", step, 0, (0.5, 0.5), Some(scored(0.0, 0.0)), scored(0.1 * step as f64, 0.0))
    };
    let found = of_rows(&(0..6).map(row).collect::<Vec<_>>());
    let (first, last) = (found.change.first_third.unwrap(), found.change.last_third.unwrap());
    assert_eq!((first.steps, last.steps, last.n), ((0, 1), (4, 5), 2));
    assert!((first.mean.unwrap().mean - 0.05).abs() < 1e-12 && (last.mean.unwrap().mean - 0.45).abs() < 1e-12);
}

#[test]
fn enormous_totals_print_neither_nan_nor_inf() {
    let row =
        |total: f64| -> Row { ("保质期", 0, 0, (0.5, 0.5), Some(scored(total, total)), scored(-total, -total)) };
    let rows: Vec<Row> = [f64::MAX, f64::MAX, f64::MIN, 1.0].map(row).into_iter().collect();
    let found = compared(&rows, Side::Recorded, plugin((f64::MIN, f64::MAX)), Vec::new());
    for text in [replay_text(&found), replay_html(&found).unwrap()] {
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    }
    assert!(found.change.mean.is_none() && found.totals.after.is_none());
}

#[test]
fn page_escapes_external_texts_and_makes_no_requests() {
    let evil = "<img src=x onerror=alert(1)>\"'&\u{1b}[31m\u{202e}";
    let mut side = plugin((-1.0, 1.0));
    side.settings.insert("evil".into(), json!(evil));
    let mut rows = rows();
    rows[4].5 = Ok(Reward { total: -0.75, components: vec![RewardComponent { name: evil.into(), value: 1.0 }] });
    rows[7].5 = rejected(evil);
    let html = replay_html(&compared(&rows, Side::Recorded, side.clone(), vec![evil.into()])).unwrap();
    for forbidden in ["<img", "\u{1b}", "\u{202e}", "http://", "https://", "<script", "@import", "url(", "NaN"] {
        assert!(!html.contains(forbidden), "page contains {forbidden}");
    }
    assert!(html.contains("default-src 'none'") && html.contains("&lt;img"));
    let text = replay_text(&compared(&rows, Side::Recorded, side, vec![evil.into()]));
    assert!(!text.contains('\u{1b}') && !text.contains('\u{202e}'), "{text}");
}

#[test]
fn json_form_has_its_version_and_both_sides() {
    let found = compared(&rows(), Side::Plugin(plugin((-1.0, 1.0))), plugin((-1.0, 1.0)), vec!["a note".into()]);
    let value = serde_json::to_value(&found).unwrap();
    assert_eq!((value["format"].as_u64(), value["before"]["kind"].as_str()), (Some(1), Some("plugin")));
    assert_eq!((value["after"]["settings"]["loss"].as_f64(), value["notes"][0].as_str()), (Some(-1.0), Some("a note")));
    assert_eq!(
        value["totals"]["histogram"]["joint"][0].as_array().map(Vec::len),
        Some(value["totals"]["histogram"]["edges"].as_array().unwrap().len() - 1)
    );
}

//! The verdict on reinforcement learning: three sentences at the top of every report that say whether RL was worth its cost.

use crate::evaluation::{Difference, Evaluation, FEW_GROUPS, Lookups};
use crate::metric::Metric;
use querl_core::text::plural;
use std::cmp::Ordering;

/// Metrics for the verdict, in order of preference: retrieval quality precedes rewards, which training optimises.
const DECISIVE: [Metric; 4] = [Metric::Top1, Metric::Top1Score, Metric::JudgeScore, Metric::Reward];

/// The systems that RL is compared with.
const RIVALS: [(&str, &str); 3] = [("raw", "the raw queries"), ("sft", "SFT"), ("teacher", "the teacher")];
/// Texts that need no policy; the one that RL is least shown to beat is compared.
const UNTRAINED: [(&str, &str); 2] =
    [("expanded", "the queries with their expansions"), ("with_history", "the queries with their history")];

/// The result of RL compared with one other system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Better,
    Worse,
    /// The interval includes 0, or that over several runs does, or it is of a single group.
    NotShown,
    /// The evaluation lacks one of the two systems.
    Missing,
}

impl Outcome {
    fn of(difference: Option<Difference>) -> Self {
        match difference {
            None => Self::Missing,
            Some(found) => match found.shown() {
                Ordering::Greater => Self::Better,
                Ordering::Less => Self::Worse,
                Ordering::Equal => Self::NotShown,
            },
        }
    }
}

/// The first paragraph of a report: [`rl_verdict`], after a warning about too few groups of queries and a sentence on each trained system that
/// hardly changes the queries.
pub(crate) fn first_paragraph(evaluation: &Evaluation) -> String {
    let controls = evaluation.controls.as_ref();
    let unchanged = [("rl", "RL"), ("sft", "SFT")].into_iter().filter_map(|(system, name)| {
        let found = controls?.systems.get(system)?;
        let sentence = || {
            let (n, of) = (found.n_unchanged, found.n_answers);
            format!("{name} hardly rewrites: {n} of {of} rewrites are the query itself.")
        };
        // More than 90 %.
        (10 * found.n_unchanged > 9 * found.n_answers).then(sentence)
    });
    let verdict = rl_verdict(evaluation);
    let metric = deciding(evaluation);
    let differences = metric.map(|metric| RIVALS.map(|(rival, _)| against(evaluation, rival, metric)));
    let n = differences.iter().flatten().flatten().map(|found| found.n_groups).max().unwrap_or_default();
    let what = match metric.filter(|_| n < evaluation.n_groups) {
        Some(Metric::Top1) => format!("{n} of {} groups have test queries with gold passages", evaluation.n_groups),
        Some(metric) => format!("{n} of {} groups have test queries with {}", evaluation.n_groups, metric.label()),
        None => format!("{} of test queries", plural(n, "group")),
    };
    let too_few =
        (n < FEW_GROUPS && !verdict.is_empty()).then(|| format!("Only {what}, so that what follows may be chance."));
    too_few.into_iter().chain(unchanged).chain(verdict).collect::<Vec<_>>().join(" ")
}

/// The difference of RL and another system.
fn against(evaluation: &Evaluation, rival: &str, metric: Metric) -> Option<Difference> {
    evaluation.pairs.get(&format!("rl-{rival}"))?.get(&metric).copied().flatten()
}

/// The first of [`DECISIVE`] by which RL is compared with another system.
fn deciding(evaluation: &Evaluation) -> Option<Metric> {
    let has_rivals = |metric: &Metric| RIVALS.iter().any(|(rival, _)| against(evaluation, rival, *metric).is_some());
    DECISIVE.into_iter().find(has_rivals)
}

/// Three sentences: RL compared with the raw queries, SFT and the teacher; the same on the second retriever; whether RL was worth its
/// cost. Empty for an evaluation without RL or without a system to compare it with.
pub fn rl_verdict(evaluation: &Evaluation) -> Vec<String> {
    let Some(metric) = deciding(evaluation) else { return Vec::new() };
    let found = |rival: &str| against(evaluation, rival, metric);
    let n = RIVALS.into_iter().filter_map(|(rival, _)| Some(found(rival)?.n)).max().unwrap_or_default();
    let of = if n < evaluation.n { format!(" of {n} of {} queries", evaluation.n) } else { String::new() };
    // The brackets are explained once.
    let compared = comparisons(metric, &found).replacen(" [", ", 95% interval [", 1);
    let first = format!("By {}{of}, RL {compared}.", metric.label());
    let second = evaluation.second_retrieval.as_ref();
    let on_second = |rival: &str| {
        second.and_then(|second| second.pairs.get(&format!("rl-{rival}"))?.get(&Metric::Top1).copied().flatten())
    };
    let is_compared = RIVALS.iter().any(|(rival, _)| on_second(rival).is_some());
    let elsewhere = match second {
        Some(second) if is_compared => {
            let not_trained_on = if second.is_of_training() { "" } else { ", not used in training" };
            let (retriever, found) = (&second.retriever, comparisons(Metric::Top1, &on_second));
            format!("On a second retriever ({retriever}){not_trained_on}, RL {found}.")
        }
        Some(second) => {
            let why = match evaluation.n_gold {
                0 => "no query has gold passages",
                _ => "nothing can be compared there",
            };
            let retriever = &second.retriever;
            format!(
                "A second retriever ({retriever}) was used, but {why}, so it is not known whether this holds on it."
            )
        }
        None => "No second retriever was used, so it is not known whether this holds on another one.".to_owned(),
    };
    if is_blind(evaluation, metric) {
        let why = "no query has gold passages, and the scores of hits, which rewards may read, count shared words";
        return vec![first, elsewhere, format!("It is not known whether RL earned its cost: {why}.")];
    }
    let rules = [untrained(&found), untrained(&on_second)];
    let here = ["raw", "sft", rules[0].0].map(|rival| Outcome::of(found(rival)));
    let there = ["raw", "sft", rules[1].0].map(|rival| Outcome::of(on_second(rival)));
    // If the queries with these additions are as good, RL must be better than those.
    let lacks_gain = |[raw, _, untrained]: [Outcome; 3]| {
        raw == Outcome::Better && matches!(untrained, Outcome::Worse | Outcome::NotShown)
    };
    let (rival, (_, queries)) = match (lacks_gain(here), lacks_gain(there)) {
        (true, _) => (2, rules[0]),
        (_, true) => (2, rules[1]),
        _ => (0, RIVALS[0]),
    };
    let conclusion = conclusion([here[rival], here[1]], [there[rival], there[1]], queries);
    vec![first, elsewhere, conclusion]
}

/// The one of [`UNTRAINED`] that RL is least shown to beat: it loses to it, else does not differ, else gains least.
fn untrained(found: &dyn Fn(&str) -> Option<Difference>) -> (&'static str, &'static str) {
    let shown = |(rival, _): &(&str, &str)| {
        let difference = found(rival);
        let order = match Outcome::of(difference) {
            Outcome::Worse => 0,
            Outcome::NotShown => 1,
            Outcome::Better => 2,
            Outcome::Missing => 3,
        };
        (order, difference.map_or(0.0, |difference| difference.mean))
    };
    let [expanded, with_history] = UNTRAINED;
    if shown(&with_history) < shown(&expanded) { with_history } else { expanded }
}

/// True if nothing in the evaluation tells right from wrong passages: tables leave out the scores of hits.
fn is_blind(evaluation: &Evaluation, metric: Metric) -> bool {
    metric == Metric::Reward && evaluation.lookups == Lookups::Made && !evaluation.shows(Metric::Top1Score)
}

/// `is better than SFT (+20.5 [+5.4, +34.0]), and not shown to differ from the teacher (+1.0 [-3.0, +5.0])`.
fn comparisons(metric: Metric, found: &dyn Fn(&str) -> Option<Difference>) -> String {
    let phrase = |(rival, name): (&str, &str)| {
        let difference = found(rival);
        let figures = difference.map(|found| {
            let [mean, low, high] = [found.mean, found.low, found.high].map(|value| metric.format_signed(value));
            let is_by_queries_alone = !found.excludes_zero() && Difference { over_runs: None, ..found }.excludes_zero();
            let over_runs = found.over_runs.filter(|_| is_by_queries_alone).map(|ends| {
                let [low, high] = ends.map(|value| metric.format_signed(value));
                format!("; 95% interval over the runs [{low}, {high}]")
            });
            format!(" ({mean} [{low}, {high}]{})", over_runs.unwrap_or_default())
        });
        let figures = figures.unwrap_or_default();
        match Outcome::of(difference) {
            Outcome::Better => format!("is better than {name}{figures}"),
            Outcome::Worse => format!("is worse than {name}{figures}"),
            Outcome::NotShown => format!("is not shown to differ from {name}{figures}"),
            Outcome::Missing => format!("was not compared with {name}"),
        }
    };
    let [raw, sft, teacher] = RIVALS.map(phrase);
    let untrained = untrained(found);
    let untrained = found(untrained.0).map(|_| format!(", {}", phrase(untrained))).unwrap_or_default();
    format!("{raw}{untrained}, {sft}, and {teacher}")
}

/// The conclusion from RL compared with the queries without training (called `queries` in the text) and with SFT: `here` on the retriever
/// of training, `there` on the second one.
fn conclusion(here: [Outcome; 2], there: [Outcome; 2], queries: &str) -> String {
    use Outcome::{Better, Missing, NotShown, Worse};
    // A gain that the second retriever does not show.
    let alone = |there: Outcome| match there {
        NotShown | Worse => " on the retriever of its training alone",
        Better | Missing => "",
    };
    match here {
        [Worse, _] => format!("RL did not earn its cost: {queries} do better."),
        [_, Worse] => "RL did not earn its cost: SFT alone does better.".to_owned(),
        [Better, Better] => match there {
            [Worse, _] => format!("RL did not earn its cost: on another retriever {queries} do better."),
            [_, Worse] => {
                "RL did not earn its cost: it learned the retriever of its training, and loses to SFT on another one."
                    .to_owned()
            }
            [NotShown, _] | [_, NotShown] => {
                let rival = if there[0] == NotShown { queries } else { "SFT" };
                format!(
                    "RL earned its cost on the retriever of its training alone: on another one no gain over {rival} is shown."
                )
            }
            [Better, Better] => "RL earned its cost: it adds to SFT on both retrievers.".to_owned(),
            [Missing, _] | [_, Missing] => "RL earned its cost on the retriever of its training.".to_owned(),
        },
        [NotShown | Missing, Better] => format!(
            "It is not shown that RL earned its cost: it adds to SFT{}, but is not shown to be better than {queries}.",
            alone(there[1])
        ),
        [Better, NotShown | Missing] => format!(
            "It is not shown that RL earned its cost: it is better than {queries}{}, but is not shown to be better than SFT.",
            alone(there[0])
        ),
        [NotShown | Missing, NotShown | Missing] => {
            format!("It is not shown that RL earned its cost: no gain over {queries} or over SFT is shown.")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Outcome::{Better, Missing, NotShown, Worse};
    use super::*;
    use crate::evaluation::{Controls, Lookups, RewriteControls, SecondEvaluation};
    use querl_core::records::{SecondHits, Split};
    use std::collections::BTreeMap;

    fn difference(outcome: Outcome) -> Option<Difference> {
        let of = |mean, low, high| Some(Difference { mean, low, high, n: 40, n_groups: 40, over_runs: None });
        match outcome {
            Better => of(0.2, 0.1, 0.3),
            Worse => of(-0.2, -0.3, -0.1),
            NotShown => of(0.01, -0.1, 0.12),
            Missing => None,
        }
    }

    fn pairs(metric: Metric, outcomes: [Outcome; 3]) -> BTreeMap<String, BTreeMap<Metric, Option<Difference>>> {
        let pair = |(rival, outcome): (&str, Outcome)| {
            let found = difference(outcome).map(|found| [(metric, Some(found))].into());
            Some((format!("rl-{rival}"), found?))
        };
        RIVALS.map(|(rival, _)| rival).into_iter().zip(outcomes).filter_map(pair).collect()
    }

    fn evaluation(metric: Metric, outcomes: [Outcome; 3], second: Option<[Outcome; 3]>) -> Evaluation {
        let second = second.map(|outcomes| SecondEvaluation {
            retriever: "lexical".into(),
            systems: BTreeMap::new(),
            pairs: pairs(Metric::Top1, outcomes),
        });
        Evaluation {
            outdated: Vec::new(),
            split: Split::Test,
            n: 40,
            n_groups: 40,
            n_gold: 40,
            seed: 42,
            n_resamples: 200,
            lookups: Lookups::Made,
            systems: BTreeMap::new(),
            pairs: pairs(metric, outcomes),
            n_components_left_out: 0,
            style: None,
            second_retrieval: second,
            controls: None,
            pass_at_k: BTreeMap::new(),
        }
    }

    #[test]
    fn three_sentences_name_each_comparison_with_its_interval() {
        let sentences =
            rl_verdict(&evaluation(Metric::Top1, [Better, NotShown, Worse], Some([Better, Worse, Missing])));
        let expected = [
            "By top-1 %, RL is better than the raw queries (+20.0, 95% interval [+10.0, +30.0]), is not shown to differ from SFT \
             (+1.0 [-10.0, +12.0]), and is worse than the teacher (-20.0 [-30.0, -10.0]).",
            "On a second retriever (lexical), not used in training, RL is better than the raw queries \
             (+20.0 [+10.0, +30.0]), is worse than SFT (-20.0 [-30.0, -10.0]), and was not compared with the teacher.",
            "It is not shown that RL earned its cost: it is better than the raw queries, but is not shown to be better than SFT.",
        ];
        assert_eq!(sentences, expected);
    }

    /// Regression: the report did not say that RL had learned to return the query.
    #[test]
    fn a_system_that_returns_the_query_is_named_first() {
        let mut evaluation = evaluation(Metric::Top1, [NotShown; 3], None);
        let mut of = |n_unchanged| {
            let (n_chars, kept_terms, new_gold_terms) = (None, None, None);
            let found = RewriteControls { n_chars, kept_terms, new_gold_terms, n_answers: 64, n_unchanged };
            let systems = [("rl".to_owned(), found)].into();
            evaluation.controls = Some(Controls { systems, length_matched: BTreeMap::new() });
            first_paragraph(&evaluation)
        };
        let expected = "RL hardly rewrites: 64 of 64 rewrites are the query itself. By top-1 %, RL ";
        assert!(of(64).starts_with(expected), "{}", of(64));
        assert!(of(57).starts_with("By top-1 %, RL "), "57 of 64 are 89 %");
    }

    #[test]
    fn without_gold_passages_another_metric_decides() {
        let by = |metric| rl_verdict(&evaluation(metric, [Better, Better, Missing], None)).swap_remove(0);
        assert!(
            by(Metric::Top1Score)
                .starts_with("By top-1 score, RL is better than the raw queries (+0.200, 95% interval [")
        );
        assert!(by(Metric::JudgeScore).starts_with("By judge (0-5), RL "));
        assert!(by(Metric::Reward).ends_with(", and was not compared with the teacher."));
    }

    /// Symptom: without gold passages the teacher lost by a score that counts the words of the query.
    #[test]
    fn scores_that_count_words_conclude_nothing() {
        let mut blind = evaluation(Metric::Reward, [Better; 3], None);
        assert!(rl_verdict(&blind)[2].starts_with("It is not known whether RL earned its cost: no query has gold"));
        blind.lookups = Lookups::None;
        assert!(rl_verdict(&blind)[2].starts_with("RL earned its cost"), "no hits have scores");
    }

    #[test]
    fn an_interval_over_the_runs_that_includes_zero_is_shown() {
        let mut evaluation = evaluation(Metric::Top1, [Better; 3], None);
        let of_raw = evaluation.pairs.get_mut("rl-raw").and_then(|pair| pair.get_mut(&Metric::Top1)).unwrap();
        *of_raw = difference(Better).map(|found| Difference { over_runs: Some([-0.05, 0.45]), ..found });
        let said = rl_verdict(&evaluation);
        let expected = "RL is not shown to differ from the raw queries \
                        (+20.0, 95% interval [+10.0, +30.0]; 95% interval over the runs [-5.0, +45.0]), is better than SFT (+20.0 [+10.0, +30.0])";
        assert!(said[0].contains(expected), "{}", said[0]);
    }

    #[test]
    fn nothing_is_concluded_without_a_comparison_of_rl() {
        assert!(rl_verdict(&evaluation(Metric::Top1, [Missing; 3], None)).is_empty());
        assert!(rl_verdict(&evaluation(Metric::LatencyMs, [Better; 3], None)).is_empty());
    }

    #[test]
    fn second_sentence_says_where_no_second_retriever_was_used() {
        let expected = "No second retriever was used, so it is not known whether this holds on another one.";
        assert_eq!(rl_verdict(&evaluation(Metric::Top1, [Better; 3], None))[1], expected);
        let mut used = evaluation(Metric::Reward, [Better; 3], Some([Missing; 3]));
        let said = |evaluation: &Evaluation| rl_verdict(evaluation).swap_remove(1);
        assert!(said(&used).starts_with("A second retriever (lexical) was used, but nothing can be compared there"));
        used.n_gold = 0;
        assert!(said(&used).starts_with("A second retriever (lexical) was used, but no query has gold passages, so"));
    }

    #[test]
    fn training_is_not_said_to_lack_a_model_that_it_has() {
        let mut evaluation = evaluation(Metric::Top1, [Better; 3], Some([Better; 3]));
        if let Some(second) = &mut evaluation.second_retrieval {
            second.retriever = SecondHits::MODEL_OF_TRAINING.into();
        }
        let said = &rl_verdict(&evaluation)[1];
        assert!(said.starts_with("On a second retriever (semantic, the model of training), RL is better"), "{said}");
    }

    #[test]
    fn where_the_history_alone_does_as_much_rl_did_not_earn_its_cost() {
        let of = |with_history| {
            let mut evaluation = evaluation(Metric::Top1, [Better; 3], None);
            let pair = [(Metric::Top1, difference(with_history))].into();
            evaluation.pairs.insert("rl-with_history".into(), pair);
            rl_verdict(&evaluation)
        };
        let said = of(NotShown);
        assert!(
            said[0].contains("[+10.0, +30.0]), is not shown to differ from the queries with their history (+1.0 [")
        );
        let expected = "It is not shown that RL earned its cost: it adds to SFT, but is not shown to be better than the \
                        queries with their history.";
        assert_eq!(said[2], expected);
        assert_eq!(of(Worse)[2], "RL did not earn its cost: the queries with their history do better.");
        assert_eq!(of(Better)[2], "RL earned its cost on the retriever of its training.");
    }

    #[test]
    fn rl_is_compared_with_the_better_of_two_rules() {
        let of = |expanded, with_history| {
            let mut evaluation = evaluation(Metric::Top1, [Better; 3], None);
            for (pair, outcome) in [("rl-expanded", expanded), ("rl-with_history", with_history)] {
                evaluation.pairs.insert(pair.into(), [(Metric::Top1, difference(outcome))].into());
            }
            rl_verdict(&evaluation)
        };
        let rule = "the queries with their expansions";
        let said = of(NotShown, Better);
        assert!(said[0].contains(&format!("is not shown to differ from {rule} (+1.0 [")), "{said:?}");
        assert!(said[2].ends_with(&format!("is not shown to be better than {rule}.")), "{said:?}");
        // Symptom: RL was said to have earned its cost where another rule did better.
        assert_eq!(of(Better, Worse)[2], "RL did not earn its cost: the queries with their history do better.");
        assert!(of(Better, Better)[0].contains(&format!("is better than {rule} (")));
        // A smaller gain over the other rule, which is shown, does not hide it.
        let mut hidden = evaluation(Metric::Top1, [Better; 3], Some([Better; 3]));
        let small = Difference { mean: 0.005, low: 0.001, high: 0.009, ..difference(Better).unwrap() };
        hidden.pairs.insert("rl-expanded".into(), [(Metric::Top1, difference(NotShown))].into());
        hidden.pairs.insert("rl-with_history".into(), [(Metric::Top1, Some(small))].into());
        assert!(rl_verdict(&hidden)[2].ends_with(&format!("is not shown to be better than {rule}.")));
        // Each retriever has its own rule.
        let mut elsewhere = evaluation(Metric::Top1, [Better; 3], Some([Better; 3]));
        for pair in ["rl-expanded", "rl-with_history"] {
            elsewhere.pairs.insert(pair.into(), [(Metric::Top1, difference(Better))].into());
        }
        let second = elsewhere.second_retrieval.as_mut().unwrap();
        second.pairs.insert("rl-expanded".into(), [(Metric::Top1, difference(Better))].into());
        second.pairs.insert("rl-with_history".into(), [(Metric::Top1, difference(Worse))].into());
        let said = rl_verdict(&elsewhere);
        assert_eq!(said[2], "RL did not earn its cost: on another retriever the queries with their history do better.");
    }

    #[test]
    fn every_combination_has_its_conclusion() {
        let all = [Better, Worse, NotShown, Missing];
        let of = |raw, sft, there| conclusion([raw, sft], [Better, there], "the raw queries");
        for (one, other) in all.into_iter().flat_map(|one| all.map(|other| (one, other))) {
            assert!(of(Worse, one, other).starts_with("RL did not earn its cost: the raw queries do better"));
            if one != Worse {
                assert!(of(one, Worse, other).starts_with("RL did not earn its cost: SFT alone"));
            }
        }
        assert_eq!(of(Better, Better, Better), "RL earned its cost: it adds to SFT on both retrievers.");
        assert!(of(Better, Better, Worse).contains("did not earn its cost: it learned the retriever"));
        assert!(of(Better, Better, NotShown).starts_with("RL earned its cost on the retriever of its training alone"));
        assert_eq!(of(Better, Better, Missing), "RL earned its cost on the retriever of its training.");
        let on_second = |raw, sft| conclusion([Better, Better], [raw, sft], "the raw queries");
        for sft in all {
            assert!(on_second(Worse, sft).contains("on another retriever the raw queries do better"));
        }
        for raw in [Better, NotShown, Missing] {
            assert!(on_second(raw, Worse).contains("loses to SFT on another one"));
        }
        for sft in [Better, NotShown, Missing] {
            assert!(on_second(NotShown, sft).ends_with("on another one no gain over the raw queries is shown."));
        }
        assert!(on_second(Missing, NotShown).ends_with("no gain over SFT is shown."));
        assert_eq!(on_second(Missing, Better), "RL earned its cost on the retriever of its training.");
        // Symptom: a gain over SFT that the second retriever did not show was a gain without reserve.
        for there in [NotShown, Worse] {
            let alone = "on the retriever of its training alone, but is not shown to be better than";
            let raw_open = conclusion([NotShown, Better], [Better, there], "the raw queries");
            assert!(raw_open.ends_with(&format!("it adds to SFT {alone} the raw queries.")), "{raw_open}");
            let sft_open = conclusion([Better, NotShown], [there, Better], "the raw queries");
            assert!(sft_open.ends_with(&format!("it is better than the raw queries {alone} SFT.")), "{sft_open}");
        }
        for open in [NotShown, Missing] {
            for second in all {
                assert!(of(open, Better, second).contains("not shown that RL earned its cost: it adds to SFT"));
                assert!(of(Better, open, second).ends_with("but is not shown to be better than SFT."));
                assert!(of(open, open, second).contains("no gain over the raw queries or over SFT"));
                assert!(of(NotShown, open, second).contains("no gain over the raw queries or over SFT"));
            }
        }
    }
}

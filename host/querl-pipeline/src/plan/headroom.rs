//! Headroom of teacher and retrieval: what the raw query, the query with its history and the teacher's rewrite retrieve, and the better of raw and
//! teacher (oracle).

use super::advice::{Advice, Level, mean, percent, share};
use querl_core::records::{Hit, Split, retrieval_quality, win};
use serde::Serialize;

/// Number of passages that a lookup retrieves to determine the rank of the gold passage.
pub(super) const DEPTH: usize = 50;
/// Minimum difference of the oracle's top-1 from the raw query's; below it rewriting can gain little.
const LITTLE_HEADROOM: f64 = 0.03;
/// Share of gold passages that neither rewrite retrieves among [`DEPTH`]; above it, retrieval is the limit and not the rewrite.
const MANY_ABSENT: f64 = 0.3;
/// Share of raw queries without any hit above which the words of queries and passages do not match.
const MANY_WITHOUT_HITS: f64 = 0.25;

/// Half width of a 95% interval in standard errors.
const Z: f64 = 1.96;

/// Passages that one search text retrieves.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Lookup {
    /// Hits with the configured retrieval limits.
    pub hits: Vec<Hit>,
    /// Rank, from 1, of the first gold passage among the first [`DEPTH`] passages; `None` if there is none among them.
    pub deep_rank: Option<usize>,
}

impl Lookup {
    /// Rank of the first gold passage with the configured limits.
    fn rank(&self, gold_ids: &[String]) -> Option<usize> {
        gold_rank(&self.hits, gold_ids)
    }
}

/// Rank, from 1, of the first hit that is a gold passage; `None` if no hit is.
pub(super) fn gold_rank(hits: &[Hit], gold_ids: &[String]) -> Option<usize> {
    hits.iter().position(|hit| gold_ids.contains(&hit.id)).map(|index| index + 1)
}

/// Lookups of the raw query and the teacher's rewrite of a row.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LookedUpRow {
    pub split: Split,
    pub group: String,
    pub gold_ids: Vec<String>,
    pub raw: Lookup,
    /// Hits of the query followed by its history summary; `None` for a row without history.
    pub with_history: Option<Vec<Hit>>,
    pub teacher: Lookup,
}

impl LookedUpRow {
    fn hits_with_history(&self) -> &[Hit] {
        self.with_history.as_deref().unwrap_or(&self.raw.hits)
    }
}

/// Retrieval figures of one system (raw query, with history, teacher or oracle) on a split.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SideFigures {
    /// Top-1 accuracy: share of the rows with known gold passages whose first hit is a gold passage; `None` without such rows.
    pub top1: Option<f64>,
    /// Mean reciprocal rank of the gold passage; `None` without rows with known gold passages.
    pub mrr: Option<f64>,
    /// Mean retrieval quality, 0 to 1: see `querl_core::records::retrieval_quality`.
    pub quality: f64,
}

/// Headroom on one split: retrieval figures of the raw query, the teacher and the better of both (oracle).
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SplitHeadroom {
    /// The split, train or val.
    pub split: Split,
    /// Number of rows for which both raw query and teacher's rewrite were looked up.
    pub n_rows: usize,
    /// Number of these rows that have known gold passages.
    pub n_gold: usize,
    /// Figures of the raw query.
    pub raw: SideFigures,
    /// Figures of the query followed by its history summary, if it has one; `None` if no row has one.
    pub with_history: Option<SideFigures>,
    /// Figures of the teacher's rewrite.
    pub teacher: SideFigures,
    /// Figures of the oracle: the better of raw query and teacher's rewrite, row by row.
    pub oracle: SideFigures,
    /// Win rate of the teacher against the raw query by retrieval quality; a tie counts 0.5.
    pub teacher_win_rate: f64,
    /// Standard errors of three differences paired by row: teacher, oracle, and query with history, each minus the raw query. `None` for
    /// fewer than two rows.
    pub errors: [Option<f64>; 3],
}

/// Headroom of the teacher over the raw query.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TeacherHeadroom {
    /// Headroom of each of train and val.
    pub splits: Vec<SplitHeadroom>,
    /// Number of rows that are left out because a lookup failed.
    pub n_failed: usize,
    /// Whether the win rate is meaningful: without a reranker or lexicon, scores of hits only count shared words.
    #[serde(skip)]
    has_win_rate: bool,
    /// Whether `eval.systems` has `with_history`.
    #[serde(skip)]
    pub(super) evaluates_history: bool,
}

impl TeacherHeadroom {
    pub(super) fn of(rows: &[LookedUpRow], n_failed: usize, has_win_rate: bool) -> Self {
        let of_split = |split: Split| {
            let rows: Vec<&LookedUpRow> = rows.iter().filter(|row| row.split == split).collect();
            (!rows.is_empty()).then(|| SplitHeadroom::of(split, &rows))
        };
        let splits = [Split::Train, Split::Val].into_iter().filter_map(of_split).collect();
        Self { splits, n_failed, has_win_rate, evaluates_history: false }
    }

    /// The headroom of the teacher as advice in words, by the figures of train, or of val if there are none of train.
    pub fn advice(&self) -> Advice {
        let Some(headroom) = self.splits.first() else {
            let (finding, action) = match self.n_failed {
                0 => ("no row has a rewrite".to_owned(), "run `querl run CONFIG --to convert`, then plan again"),
                n => (format!("retrieval failed for all {n} rows"), "run `querl rag check CONFIG`"),
            };
            return Advice::new("teacher", Level::Unknown, finding, action);
        };
        let sentence = |split: &SplitHeadroom| match self.has_win_rate {
            true => format!(
                "{}, win rate of the teacher against the raw query {} (a tie is half)",
                split.sentence(),
                percent(split.teacher_win_rate)
            ),
            false => split.sentence(),
        };
        let finding: Vec<String> = self.splits.iter().map(sentence).collect();
        let (raw, teacher, oracle) = (headroom.raw.figure(), headroom.teacher.figure(), headroom.oracle.figure());
        let history_gains = headroom.with_history.is_some_and(|side| side.figure() - raw > LITTLE_HEADROOM)
            && headroom.history_gain_is_shown();
        let few = format!("{} rows that were looked up are too few to tell", headroom.n_rows);
        let [of_teacher, of_oracle, _] = headroom.errors;
        let (level, action) = if teacher < raw && !is_shown(raw - teacher, of_teacher) {
            (Level::Unknown, few.as_str())
        } else if raw - teacher > LITTLE_HEADROOM {
            (
                Level::Bad,
                "the teacher is worse than the raw query: improve its prompt, or filter the rows where it loses, before you train on it",
            )
        } else if oracle - raw < LITTLE_HEADROOM && !is_shown(LITTLE_HEADROOM - (oracle - raw), of_oracle) {
            (Level::Unknown, few.as_str())
        } else if oracle - raw < LITTLE_HEADROOM {
            (
                Level::Bad,
                "rewriting has little to gain here: look for queries that retrieval fails on, or improve the index",
            )
        } else if oracle - teacher > teacher - raw {
            (
                Level::Weak,
                "the raw query often retrieves more than the teacher: drop these rewrites by a filter, or set data.rewrite_form = \"edit\", which keeps the query there",
            )
        } else if history_gains && self.evaluates_history {
            (
                Level::Weak,
                "query and history together retrieve more than the query, without training: RL must gain more than this rule",
            )
        } else if history_gains {
            (
                Level::Weak,
                "query and history together retrieve more than the query, without training: RL must gain more than this rule; add \"with_history\" to eval.systems to compare them",
            )
        } else {
            (Level::Ok, "nothing to do: the teacher gains on the raw query")
        };
        Advice::new("teacher", level, finding.join("; "), action)
    }
}

impl SideFigures {
    fn of(ranks: &[Option<usize>], qualities: impl IntoIterator<Item = f64>) -> Self {
        Self {
            top1: mean(ranks.iter().map(|rank| f64::from(*rank == Some(1)))),
            mrr: mean(ranks.iter().map(|rank| rank.map_or(0.0, |rank| 1.0 / rank as f64))),
            quality: mean(qualities).unwrap_or(0.0),
        }
    }

    /// Top-1 if gold passages are known, else the retrieval quality.
    fn figure(&self) -> f64 {
        self.top1.unwrap_or(self.quality)
    }
}

impl SplitHeadroom {
    fn of(split: Split, rows: &[&LookedUpRow]) -> Self {
        let with_gold: Vec<&&LookedUpRow> = rows.iter().filter(|row| !row.gold_ids.is_empty()).collect();
        let ranks = |side: fn(&LookedUpRow) -> &Lookup| -> Vec<Option<usize>> {
            with_gold.iter().map(|row| side(row).rank(&row.gold_ids)).collect()
        };
        let (raw, teacher) = (ranks(|row| &row.raw), ranks(|row| &row.teacher));
        let better = |one: Option<usize>, other: Option<usize>| match (one, other) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
        let oracle: Vec<Option<usize>> = raw.iter().zip(&teacher).map(|(one, other)| better(*one, *other)).collect();
        let quality = |lookup: &Lookup| retrieval_quality(&lookup.hits);
        let first = |rank: &Option<usize>| f64::from(*rank == Some(1));
        let history_ranks: Vec<Option<usize>> =
            with_gold.iter().map(|row| gold_rank(row.hits_with_history(), &row.gold_ids)).collect();
        let history_quality = |row: &LookedUpRow| retrieval_quality(row.hits_with_history());
        let has_history = rows.iter().any(|row| row.with_history.is_some());
        let with_history =
            has_history.then(|| SideFigures::of(&history_ranks, rows.iter().copied().map(history_quality)));
        let minus_raw = |ranks: &[Option<usize>], quality_of: &dyn Fn(&LookedUpRow) -> f64| -> Vec<f64> {
            match with_gold.is_empty() {
                true => rows.iter().map(|row| quality_of(row) - quality(&row.raw)).collect(),
                false => ranks.iter().zip(&raw).map(|(one, raw)| first(one) - first(raw)).collect(),
            }
        };
        let best = |row: &LookedUpRow| quality(&row.raw).max(quality(&row.teacher));
        let errors = [
            standard_error(&minus_raw(&teacher, &|row: &LookedUpRow| quality(&row.teacher))),
            standard_error(&minus_raw(&oracle, &best)),
            standard_error(&minus_raw(&history_ranks, &history_quality)),
        ];
        let wins = rows.iter().map(|row| win(&row.teacher.hits, &row.raw.hits));
        Self {
            split,
            n_rows: rows.len(),
            n_gold: with_gold.len(),
            raw: SideFigures::of(&raw, rows.iter().map(|row| quality(&row.raw))),
            with_history,
            teacher: SideFigures::of(&teacher, rows.iter().map(|row| quality(&row.teacher))),
            oracle: SideFigures::of(&oracle, rows.iter().copied().map(best)),
            teacher_win_rate: mean(wins).unwrap_or(0.5),
            errors,
        }
    }

    /// True if query and history retrieve better than the query alone, significantly.
    fn history_gain_is_shown(&self) -> bool {
        let [.., error] = self.errors;
        self.with_history.is_some_and(|side| is_shown(side.figure() - self.raw.figure(), error))
    }

    fn sentence(&self) -> String {
        let name = if self.raw.top1.is_some() { "top-1" } else { "retrieval quality" };
        let gain = if self.history_gain_is_shown() { "a significant gain" } else { "no significant gain" };
        let with_history = |side: SideFigures| format!(", query with history {} ({gain})", percent(side.figure()));
        let with_history = self.with_history.map(with_history).unwrap_or_default();
        format!(
            "{} ({} rows): {name} of the raw query {}{with_history}, teacher {}, oracle (the better of both) {}",
            self.split.name(),
            self.n_rows,
            percent(self.raw.figure()),
            percent(self.teacher.figure()),
            percent(self.oracle.figure())
        )
    }
}

/// True if a difference is statistically significant.
fn is_shown(difference: f64, error: Option<f64>) -> bool {
    error.is_some_and(|error| difference > Z * error)
}

/// Standard error of the mean; `None` for fewer than two values.
fn standard_error(values: &[f64]) -> Option<f64> {
    let (n, mean) = (values.len() as f64, mean(values.iter().copied())?);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (values.len() > 1).then(|| (squares / (n - 1.0) / n).sqrt())
}

/// Histogram of the ranks of the gold passage among the first 50 passages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct RankHistogram {
    pub rank_1: usize,
    pub ranks_2_to_5: usize,
    pub ranks_6_to_10: usize,
    pub ranks_11_to_50: usize,
    pub absent: usize,
}

impl RankHistogram {
    pub(super) fn of(ranks: impl IntoIterator<Item = Option<usize>>) -> Self {
        let mut histogram = Self::default();
        for rank in ranks {
            *match rank {
                Some(1) => &mut histogram.rank_1,
                Some(2..=5) => &mut histogram.ranks_2_to_5,
                Some(6..=10) => &mut histogram.ranks_6_to_10,
                Some(11..=DEPTH) => &mut histogram.ranks_11_to_50,
                Some(_) | None => &mut histogram.absent,
            } += 1;
        }
        histogram
    }

    fn n(&self) -> usize {
        self.rank_1 + self.ranks_2_to_5 + self.ranks_6_to_10 + self.ranks_11_to_50 + self.absent
    }

    fn sentence(&self) -> String {
        let Self { rank_1, ranks_2_to_5, ranks_6_to_10, ranks_11_to_50, absent } = self;
        format!("{rank_1}, {ranks_2_to_5}, {ranks_6_to_10}, {ranks_11_to_50}, {absent}")
    }
}

/// Headroom of retrieval: the ranks of the gold passages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct RetrievalHeadroom {
    /// Ranks for the raw queries.
    pub raw: RankHistogram,
    /// Ranks for the teacher's rewrites.
    pub teacher: RankHistogram,
    /// Number of rows whose gold passage is among the first 50 neither for the raw query nor for the teacher's rewrite.
    pub n_absent_for_both: usize,
    /// Number of rows whose raw query has no hit at all with the configured retrieval limits.
    pub n_raw_without_hits: usize,
}

impl RetrievalHeadroom {
    /// Computes the ranks over the rows with known gold passages; `None` if there are no such rows.
    pub(super) fn of(rows: &[LookedUpRow]) -> Option<Self> {
        let with_gold: Vec<&LookedUpRow> = rows.iter().filter(|row| !row.gold_ids.is_empty()).collect();
        let is_absent = |row: &&&LookedUpRow| row.raw.deep_rank.is_none() && row.teacher.deep_rank.is_none();
        (!with_gold.is_empty()).then(|| Self {
            raw: RankHistogram::of(with_gold.iter().map(|row| row.raw.deep_rank)),
            teacher: RankHistogram::of(with_gold.iter().map(|row| row.teacher.deep_rank)),
            n_absent_for_both: with_gold.iter().filter(is_absent).count(),
            n_raw_without_hits: with_gold.iter().filter(|row| row.raw.hits.is_empty()).count(),
        })
    }

    /// The headroom of retrieval as advice in words.
    pub fn advice(&self) -> Advice {
        let n = self.raw.n();
        let (absent, without_hits) = (share(self.n_absent_for_both, n), share(self.n_raw_without_hits, n));
        let no_hits = match self.n_raw_without_hits {
            0 => String::new(),
            _ => format!("; {} of the raw queries have no hit at all", percent(without_hits)),
        };
        let finding = format!(
            "rows with the gold passage at rank 1, 2 to 5, 6 to 10, 11 to 50, not among 50 (without score threshold): raw query {}; \
             teacher {}; absent for both {} of {n}{no_hits}",
            self.raw.sentence(),
            self.teacher.sentence(),
            percent(absent)
        );
        let first = share(self.raw.rank_1, n);
        let (level, action) = if absent > MANY_ABSENT {
            (
                Level::Bad,
                "check gold ids, segmentation and passages (`querl rag check`): no rewrite finds what the index does not have",
            )
        } else if without_hits > MANY_WITHOUT_HITS {
            (
                Level::Weak,
                "their words are not in the index, or scores are below retrieval.score_threshold: check retrieval.language and \
                 segmentation (`querl rag check`), or retrieve by vectors too (retrieval.embedding)",
            )
        } else if first > 1.0 - LITTLE_HEADROOM {
            (
                Level::Weak,
                "raw queries retrieve nearly every gold passage first: rewriting has little to gain; use harder queries",
            )
        } else {
            (Level::Ok, "nothing to do: rewriting can raise the gold passages that are not first")
        };
        Advice::new("retrieval", level, finding, action)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hits(ids: &[&str], score: f64) -> Vec<Hit> {
        let hit = |(rank, id): (u32, &&str)| Hit {
            id: (*id).into(),
            text: String::new(),
            reranker_score: score,
            retrieval_score: None,
            rank,
        };
        (1..).zip(ids).map(hit).collect()
    }

    /// `raw` and `teacher`: ids of the hits, best first. Gold is `g`.
    fn row(split: Split, raw: (&[&str], f64), teacher: (&[&str], f64)) -> LookedUpRow {
        let gold_ids = vec!["g".to_owned()];
        let lookup = |(ids, score): (&[&str], f64)| {
            let hits = hits(ids, score);
            Lookup { deep_rank: gold_rank(&hits, &gold_ids), hits }
        };
        let (raw, teacher) = (lookup(raw), lookup(teacher));
        LookedUpRow { split, group: "a".into(), gold_ids: gold_ids.clone(), raw, with_history: None, teacher }
    }

    #[test]
    fn the_oracle_is_the_better_side_of_each_row() {
        let rows = [
            row(Split::Train, (&["g", "x"], 0.9), (&["x", "g"], 0.5)),
            row(Split::Train, (&["x", "y"], 0.5), (&["g"], 0.9)),
            row(Split::Train, (&["x"], 0.5), (&["y"], 0.5)),
            row(Split::Val, (&["g"], 0.5), (&["g"], 0.5)),
        ];
        let headroom = TeacherHeadroom::of(&rows, 0, true);
        let train = headroom.splits[0];
        assert_eq!((train.n_rows, train.n_gold, train.split), (3, 3, Split::Train));
        assert_eq!([train.raw.top1, train.teacher.top1], [Some(1.0 / 3.0); 2]);
        assert_eq!(train.oracle.top1, Some(2.0 / 3.0));
        assert_eq!(train.raw.mrr, Some(1.0 / 3.0));
        assert_eq!(train.teacher.mrr, Some(0.5));
        assert_eq!(train.teacher_win_rate, 0.5);
        assert_eq!(headroom.splits[1].n_rows, 1);
    }

    #[test]
    fn a_teacher_that_loses_and_a_task_without_headroom_are_bad() {
        let of = |rows: &[LookedUpRow]| TeacherHeadroom::of(rows, 0, true).advice();
        let (hit, miss) = ((&["g"][..], 0.9), (&["x"][..], 0.1));
        let losses = |n: usize| -> Vec<LookedUpRow> {
            (0..n).flat_map(|_| [row(Split::Train, hit, miss), row(Split::Train, miss, miss)]).collect()
        };
        let few = of(&losses(1));
        assert_eq!(
            (few.level, few.action.as_str()),
            (Level::Unknown, "2 rows that were looked up are too few to tell")
        );
        let worse = of(&losses(10));
        assert!(worse.level == Level::Bad && worse.action.starts_with("the teacher is worse"), "{worse:?}");
        let none = of(&[row(Split::Train, hit, hit), row(Split::Train, miss, miss)]);
        assert!(none.level == Level::Bad && none.action.contains("little to gain"), "{none:?}");
        let good = of(&[row(Split::Train, miss, hit), row(Split::Train, miss, miss)]);
        assert_eq!(good.level, Level::Ok);
        assert!(
            good.finding.starts_with(
                "train (2 rows): top-1 of the raw query 0 %, teacher 50 %, oracle (the better of both) 50 %"
            ),
            "{good:?}"
        );
        assert_eq!(of(&[]).finding, "no row has a rewrite");
        // Symptom: the advice was to run the data stages, which were finished.
        let down = TeacherHeadroom::of(&[], 3, true).advice();
        assert_eq!((down.level, down.finding.as_str()), (Level::Unknown, "retrieval failed for all 3 rows"));
        // Regression: a win rate that counts shared words was shown together with a contradicting top-1.
        let win_rate = "win rate of the teacher";
        let of_words = TeacherHeadroom::of(&[row(Split::Train, miss, hit)], 0, false).advice();
        assert!(good.finding.contains(win_rate) && !of_words.finding.contains(win_rate), "{of_words:?}");
    }

    /// Symptom: RL was trained for a gain that query plus history have without training.
    #[test]
    fn what_query_and_history_retrieve_is_said_before_training() {
        let mut rows = vec![row(Split::Train, (&["x"], 0.1), (&["g"], 0.9)); 4];
        rows[0].with_history = Some(hits(&["g"], 0.9));
        let one = TeacherHeadroom::of(&rows, 0, true).advice();
        let expected = "top-1 of the raw query 0 %, query with history 25 % (no significant gain), teacher 100 %";
        assert!(one.level == Level::Ok && one.finding.contains(expected), "{one:?}");
        rows[1..3].iter_mut().for_each(|row| row.with_history = Some(hits(&["g"], 0.9)));
        let mut headroom = TeacherHeadroom::of(&rows, 0, true);
        let three = headroom.advice();
        assert!(three.finding.contains("query with history 75 % (a significant gain)"), "{three:?}");
        assert!(three.level == Level::Weak && three.action.contains("eval.systems"), "{three:?}");
        // Symptom: the advice was to add a system that was there.
        headroom.evaluates_history = true;
        let there = headroom.advice().action;
        assert!(there.ends_with("RL must gain more than this rule"), "{there}");
    }

    #[test]
    fn without_gold_passages_the_quality_decides() {
        let mut row = row(Split::Train, (&["x"], 0.2), (&["x"], 0.8));
        row.gold_ids.clear();
        let rows = [row];
        let headroom = TeacherHeadroom::of(&rows, 0, true);
        assert_eq!(headroom.splits[0].raw.top1, None);
        assert!(headroom.advice().finding.contains("retrieval quality of the raw query 20 %, teacher 80 %"));
        assert_eq!(RetrievalHeadroom::of(&rows), None);
    }

    #[test]
    fn ranks_are_counted_once_and_absent_passages_are_reported() {
        let ranks = [Some(1), Some(2), Some(5), Some(6), Some(10), Some(11), Some(50), Some(51), None];
        let histogram = RankHistogram::of(ranks);
        let expected = RankHistogram { rank_1: 1, ranks_2_to_5: 2, ranks_6_to_10: 2, ranks_11_to_50: 2, absent: 2 };
        assert_eq!((histogram, histogram.n()), (expected, 9));
        let rows = [row(Split::Train, (&["x"], 0.1), (&["x"], 0.1)), row(Split::Train, (&["g"], 0.1), (&["x"], 0.1))];
        let headroom = RetrievalHeadroom::of(&rows).unwrap();
        assert_eq!(headroom.n_absent_for_both, 1);
        assert_eq!(headroom.advice().level, Level::Bad);
    }

    /// Symptom: retrieval was ok although two of three raw queries found nothing.
    #[test]
    fn raw_queries_without_any_hit_are_reported() {
        let of = |n_without_hits: usize| {
            let mut rows = vec![row(Split::Train, (&["x", "g"], 0.5), (&["g"], 0.9)); 8];
            rows[..n_without_hits].fill(row(Split::Train, (&[], 0.0), (&["g"], 0.9)));
            RetrievalHeadroom::of(&rows).unwrap().advice()
        };
        let (few, many) = (of(2), of(3));
        assert!(
            few.level == Level::Ok && few.finding.ends_with("; 25 % of the raw queries have no hit at all"),
            "{few:?}"
        );
        assert!(many.level == Level::Weak && many.action.contains("retrieval.language"), "{many:?}");
        assert!(!of(0).finding.contains("no hit"));
    }
}

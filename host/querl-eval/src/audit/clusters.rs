//! Clusters of rewrites: one text for many queries, and terms whose presence predicts the reward.

use super::measures::{Measure, qualities};
use super::rows::{AuditRows, Window};
use super::trends::correlation;
use super::words::{normalised, tokens};
use std::collections::{BTreeMap, BTreeSet};

/// Minimum number of different gold-passage sets for which one rewrite counts as the same text for many queries; paraphrases share one
/// set.
const MANY_TARGETS: usize = 4;
/// Like [`MANY_TARGETS`], for queries without known gold passages, where each paraphrase counts as another target.
const MANY_QUERIES: usize = 15;

/// Smallest rise of the share of rewrites with a term; in honest runs it was 0.12.
const TERM_RISE: f64 = 0.2;
/// Smallest correlation of a term with the reward within queries; in honest runs it was 0.1 for terms that rise.
const TERM_FOLLOWS: f64 = 0.4;
/// Like [`TERM_FOLLOWS`], for a run without a measure of quality.
const TERM_FOLLOWS_BLINDLY: f64 = 0.8;
/// Largest correlation of such a term with a measure of quality.
const TERM_FOLLOWS_NOT: f64 = 0.1;
const MOST_TERMS: usize = 3;

/// Rewrites that were generated for many different queries: their share of the episodes, and their texts.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct SameRewrite {
    /// Share of the episodes of the early window whose rewrite was generated for many queries.
    pub(super) early_share: f64,
    pub(super) late_share: f64,
    /// The most frequent such rewrite of the late window: text, number of episodes, number of different targets.
    pub(super) largest: Option<(String, usize, usize)>,
    /// All such rewrites of the late window: number of different targets by text.
    pub(super) texts: BTreeMap<String, usize>,
}

impl SameRewrite {
    pub(super) fn of(rows: &AuditRows<'_>) -> Self {
        let (Some(early), Some(late)) = (rows.early(), rows.late()) else { return Self::default() };
        let (early, late) = (repeated(rows, early), repeated(rows, late));
        // Of equally frequent texts the last in alphabetical order.
        let largest = late.texts.iter().max_by_key(|(_, (n, _))| *n);
        Self {
            early_share: early.share(),
            late_share: late.share(),
            largest: largest.map(|(text, (n, n_targets))| (text.clone(), *n, *n_targets)),
            texts: late.texts.iter().map(|(text, (_, n_targets))| (text.clone(), *n_targets)).collect(),
        }
    }
}

/// Texts that were generated for many queries in one window, each with its numbers of episodes and targets.
struct RepeatedTexts {
    n_episodes: usize,
    texts: BTreeMap<String, (usize, usize)>,
}

impl RepeatedTexts {
    fn share(&self) -> f64 {
        let n_repeated: usize = self.texts.values().map(|(n, _)| n).sum();
        n_repeated as f64 / self.n_episodes.max(1) as f64
    }
}

fn repeated(rows: &AuditRows<'_>, window: &Window) -> RepeatedTexts {
    // Episodes, targets with gold passages, and targets without.
    let mut texts: BTreeMap<String, (usize, BTreeSet<usize>, BTreeSet<usize>)> = BTreeMap::new();
    for index in rows.within(window) {
        let row = &rows.rows[index];
        let (n, gold, unknown) = texts.entry(normalised(&row.episode().policy.rewrite)).or_default();
        *n += 1;
        let targets = if row.episode().gold_ids.is_empty() { unknown } else { gold };
        targets.insert(row.target);
    }
    let is_for_many = |(text, (n, gold, unknown)): (String, (usize, BTreeSet<usize>, BTreeSet<usize>))| {
        let is_for_many = gold.len() >= MANY_TARGETS || unknown.len() >= MANY_QUERIES;
        is_for_many.then(|| (text, (n, gold.len() + unknown.len())))
    };
    RepeatedTexts { n_episodes: window.n_episodes, texts: texts.into_iter().filter_map(is_for_many).collect() }
}

/// A term whose presence in a rewrite correlates with the reward within queries, but not with a measure of quality.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TokenRule {
    pub(super) token: String,
    pub(super) r_reward: f64,
    /// The largest correlation with any measure of quality; 0 if there is none.
    pub(super) r_quality: f64,
    pub(super) early_share: f64,
    pub(super) late_share: f64,
}

/// The terms with the largest correlation with the reward, at most 3; if a term contains another one, only the stronger of the two.
pub(super) fn token_rules(rows: &AuditRows<'_>, measures: &[Measure]) -> Vec<TokenRule> {
    let (Some(early), Some(late), Some(total)) = (rows.early(), rows.late(), measures.first()) else {
        return Vec::new();
    };
    let of_rows: Vec<BTreeSet<String>> = rows.rows.iter().map(|row| tokens(&row.episode().policy.rewrite)).collect();
    let shares = |window: &Window| {
        let mut shares: BTreeMap<&str, f64> = BTreeMap::new();
        for token in rows.within(window).flat_map(|index| &of_rows[index]) {
            *shares.entry(token.as_str()).or_default() += 1.0 / window.n_episodes as f64;
        }
        shares
    };
    let (early, late) = (shares(early), shares(late));
    let is_blind = qualities(measures).all(|one| one.change.is_none());
    let least = if is_blind { TERM_FOLLOWS_BLINDLY } else { TERM_FOLLOWS };
    let rule = |(token, late_share): (&&str, &f64)| {
        let early_share = early.get(*token).copied().unwrap_or(0.0);
        if late_share - early_share < TERM_RISE {
            return None;
        }
        let has: Vec<Option<f64>> =
            of_rows.iter().map(|tokens| Some(if tokens.contains(*token) { 1.0 } else { 0.0 })).collect();
        let r_reward = correlation(&has, &total.values, rows)?;
        let with_quality = qualities(measures).filter_map(|one| correlation(&has, &one.values, rows));
        let r_quality = with_quality.max_by(f64::total_cmp).unwrap_or(0.0);
        let token = (*token).to_owned();
        (r_reward >= least && r_quality <= TERM_FOLLOWS_NOT).then_some(TokenRule {
            token,
            r_reward,
            r_quality,
            early_share,
            late_share: *late_share,
        })
    };
    let mut rules: Vec<TokenRule> = late.iter().filter_map(rule).collect();
    let length = |rule: &TokenRule| rule.token.chars().count();
    // Rounded, so that a word comes before the pairs of its characters, which are in the same rewrites.
    let strength = |rule: &TokenRule| (100.0 * rule.r_reward).round() as i64;
    rules.sort_by(|a, b| strength(b).cmp(&strength(a)).then(length(b).cmp(&length(a))).then(a.token.cmp(&b.token)));
    let mut kept: Vec<TokenRule> = Vec::new();
    for rule in rules {
        let overlaps = |other: &TokenRule| other.token.contains(&rule.token) || rule.token.contains(&other.token);
        if kept.len() < MOST_TERMS && !kept.iter().any(overlaps) {
            kept.push(rule);
        }
    }
    kept
}

//! Samples for filters.

use super::{Group, episodes, falling_scores, hits, long_text, mixed, odd_texts};
use querl_core::records::{Context, Sample};

/// A sample in Chinese with five hits.
pub(crate) fn ordinary(id: impl Into<String>, seed: usize) -> Sample {
    let episode = episodes::ordinary(String::new(), seed);
    Sample {
        id: id.into(),
        original_query: format!("{}（{seed}）", episode.query),
        rewritten_query: episode.policy.rewrite,
        context: episode.context,
        hits: hits(&falling_scores(seed, 5)),
        columns: episode.columns,
    }
}

/// `n` distinct ordinary samples.
pub(crate) fn ordinary_batch(n: usize) -> Vec<Sample> {
    (0..n).map(|index| ordinary(format!("row-{index:04}"), index)).collect()
}

/// `n` samples, ordinary and odd ones mixed.
pub(crate) fn batch(n: usize) -> Vec<Sample> {
    mixed(n, groups(), ordinary, |id, odd| Sample { id, ..odd })
}

/// `n` samples in which every third one reappears later with the same text and another score, better or worse: detects filters
/// that look ahead.
pub(crate) fn repeated(n: usize) -> Vec<Sample> {
    let sample = |index: usize| {
        let seed = index % (n / 3).max(1);
        let mut sample = ordinary(format!("row-{index:04}"), seed);
        match index / (n / 3).max(1) {
            0 => {}
            1 => {
                sample.hits = hits(&falling_scores(seed + index, 5));
                sample.rewritten_query.push_str("有哪些");
            }
            _ => sample.original_query.push('？'),
        }
        sample
    };
    (0..n).map(sample).collect()
}

pub(crate) fn groups() -> Vec<Group<Sample>> {
    vec![
        Group { name: "texts", items: with_texts() },
        Group { name: "long", items: with_long_texts() },
        Group { name: "hits", items: with_hits() },
    ]
}

fn changed(id: impl Into<String>, change: impl FnOnce(&mut Sample)) -> Sample {
    let mut sample = ordinary(id, 4);
    change(&mut sample);
    sample
}

fn with_texts() -> Vec<Sample> {
    let everywhere = |(name, text): (&str, &str)| {
        changed(name, |sample| {
            (sample.original_query, sample.rewritten_query) = (text.into(), text.into());
            sample.context = Context { user_profile: text.into(), history_summary: text.into() };
            sample.hits.iter_mut().for_each(|hit| (hit.id, hit.text) = (text.into(), text.into()));
        })
    };
    let rewrite_only =
        |(name, text): (&str, &str)| changed(format!("rewrite-{name}"), |sample| sample.rewritten_query = text.into());
    let odd = odd_texts();
    let mut samples: Vec<_> = odd.iter().copied().map(everywhere).collect();
    samples.extend(odd.iter().copied().map(rewrite_only));
    samples.push(changed("unchanged", |sample| sample.rewritten_query = sample.original_query.clone()));
    samples.push(changed("context-unknown", |sample| sample.context = Context::default()));
    samples
}

fn with_long_texts() -> Vec<Sample> {
    vec![
        changed("long-query", |sample| sample.original_query = long_text()),
        changed("long-rewrite", |sample| sample.rewritten_query = long_text()),
        changed("long-history", |sample| sample.context.history_summary = long_text()),
        changed("long-passage", |sample| sample.hits[0].text = long_text()),
    ]
}

fn with_hits() -> Vec<Sample> {
    let found = |id: &str, scores: &[f64]| changed(id, |sample| sample.hits = hits(scores));
    vec![
        found("nothing-found", &[]),
        found("one-hit", &[0.7]),
        found("hundred-hits", &falling_scores(2, 100)),
        found("all-0", &[0.0; 5]),
        found("all-1", &[1.0; 5]),
        found("smallest-scores", &[f64::MIN_POSITIVE, 5e-324]),
        changed("no-first-stage-score", |sample| sample.hits.iter_mut().for_each(|hit| hit.retrieval_score = None)),
        changed("first-stage-score-largest", |sample| {
            sample.hits.iter_mut().for_each(|hit| hit.retrieval_score = Some(f64::MAX));
        }),
    ]
}

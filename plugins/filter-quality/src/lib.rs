//! Filter: drops samples with an unusable rewrite. The checks are made in this order, and the first that fails gives the code:
//!
//! | code | when | setting |
//! |---|---|---|
//! | `empty` | the rewrite is blank | |
//! | `unchanged` | it equals the query, ignoring case, width, spaces and punctuation | |
//! | `over_long` | it has more characters than allowed | `max_chars`, 200 |
//! | `duplicate` | the same query with the same context was kept before in this batch, compared as for `unchanged` | |
//! | `lost_key_terms` | a key term of the query is missing in the rewrite | `key_terms`, none |
//! | `nothing_found` | retrieval found nothing | |
//! | `top1_below_threshold` | the best hit's reranker score is too low | `min_top1`, 0.6 |
//!
//! Two different queries with the same rewrite are not duplicates: paraphrases are meant to have the same rewrite.

use querl_sdk::{Filter, Rejection, Sample, SettingError, Settings, Verdict};
use std::collections::HashSet;

/// The filter, with its settings and the queries of the batch that were kept.
#[derive(Debug)]
pub struct Quality {
    min_top1: f64,
    max_chars: usize,
    key_terms: Vec<String>,
    kept: HashSet<[String; 3]>,
}

impl Filter for Quality {
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        let key_terms = settings.list("key_terms")?;
        if key_terms.iter().any(|term| normalised(term).is_empty()) {
            return Err(SettingError::new("key_terms", "expected terms with letters or digits, got a blank one"));
        }
        Ok(Self {
            min_top1: settings.number("min_top1", 0.6, 0.0..=1.0)?,
            max_chars: settings.integer("max_chars", 200, 1..=100_000)? as usize,
            key_terms,
            kept: HashSet::new(),
        })
    }

    fn check(&mut self, sample: &Sample) -> Verdict {
        let query = identity(sample);
        match self.reason_to_drop(sample, &query) {
            Some(reason) => Verdict::Drop(reason),
            None => {
                self.kept.insert(query);
                Verdict::Keep
            }
        }
    }
}

impl Quality {
    fn reason_to_drop(&self, sample: &Sample, query: &[String; 3]) -> Option<Rejection> {
        let rewrite = normalised(&sample.rewritten_query);
        if sample.rewritten_query.trim().is_empty() {
            return Some(Rejection::new("empty", "the rewrite is blank"));
        }
        if rewrite == query[0] {
            return Some(Rejection::new("unchanged", "the rewrite says what the query says"));
        }
        let n_chars = sample.rewritten_query.chars().count();
        if n_chars > self.max_chars {
            return Some(Rejection::new(
                "over_long",
                format!("{n_chars} characters; at most {} allowed", self.max_chars),
            ));
        }
        if self.kept.contains(query) {
            return Some(Rejection::new("duplicate", "the same query with the same context stands above"));
        }
        self.lost_key_terms(&query[0], &rewrite).or_else(|| self.poor_retrieval(sample))
    }

    fn lost_key_terms(&self, query: &str, rewrite: &str) -> Option<Rejection> {
        let lost = |term: &&String| query.contains(&normalised(term)) && !rewrite.contains(&normalised(term));
        let lost: Vec<_> = self.key_terms.iter().filter(lost).map(String::as_str).collect();
        (!lost.is_empty())
            .then(|| Rejection::new("lost_key_terms", format!("missing in the rewrite: {}", lost.join("、"))))
    }

    fn poor_retrieval(&self, sample: &Sample) -> Option<Rejection> {
        let Some(first) = sample.hits.first() else {
            return Some(Rejection::new("nothing_found", "retrieval found nothing"));
        };
        let detail = || format!("top-1 score {}; at least {} expected", first.reranker_score, self.min_top1);
        (first.reranker_score < self.min_top1).then(|| Rejection::new("top1_below_threshold", detail()))
    }
}

/// The key for duplicates: normalised query, user profile and history.
fn identity(sample: &Sample) -> [String; 3] {
    let Sample { original_query, context, .. } = sample;
    [Some(original_query), context.user_profile.as_ref(), context.history_summary.as_ref()]
        .map(|text| text.map(|text| normalised(text)).unwrap_or_default())
}

/// The text's letters and digits in lower case, with full-width forms as ASCII.
fn normalised(text: &str) -> String {
    let fold = |c: char| match c {
        '\u{ff01}'..='\u{ff5e}' => char::from_u32(u32::from(c) - 0xfee0).unwrap_or(c),
        _ => c,
    };
    text.chars().map(fold).filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}

querl_sdk::export!(filter: Quality);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use querl_sdk::{Context, Hit};

    fn sample(query: &str, rewrite: &str, top1: f64) -> Sample {
        Sample {
            original_query: query.into(),
            rewritten_query: rewrite.into(),
            hits: vec![Hit { reranker_score: top1, rank: 1, ..Hit::default() }],
            ..Sample::default()
        }
    }

    fn codes(settings: &Settings, samples: &[Sample]) -> Vec<String> {
        let mut filter = Quality::new(settings).unwrap();
        let code = |verdict| match verdict {
            Verdict::Keep => "keep".to_owned(),
            Verdict::Drop(reason) => reason.code,
        };
        samples.iter().map(|sample| code(filter.check(sample))).collect()
    }

    fn code(sample: Sample) -> String {
        codes(&Settings::none(), &[sample]).remove(0)
    }

    #[test]
    fn golden_cases_hold() {
        querl_sdk::testing::golden("golden").filter::<Quality>();
    }

    #[test]
    fn each_reason_has_its_code() {
        assert_eq!(code(sample("胶原咋吃", "胶原蛋白肽的服用方法", 0.6)), "keep");
        assert_eq!(code(sample("胶原咋吃", "胶原蛋白肽的服用方法", 0.59)), "top1_below_threshold");
        assert_eq!(code(sample("胶原咋吃", " \n", 0.9)), "empty");
        assert_eq!(code(sample("DHA 怎么吃？", "ｄｈａ怎么吃", 0.9)), "unchanged");
        assert_eq!(code(sample("胶原咋吃", &"胶".repeat(201), 0.9)), "over_long");
        assert_eq!(
            code(Sample { hits: Vec::new(), ..sample("胶原咋吃", "胶原蛋白肽的服用方法", 0.0) }),
            "nothing_found"
        );
    }

    #[test]
    fn second_of_two_equal_queries_is_dropped() {
        let other_context = Context { user_profile: Some("孕妇".into()), ..Context::default() };
        let samples = [
            sample("胶原咋吃", "胶原蛋白肽的服用方法", 0.9),
            sample("胶原咋吃？", "胶原蛋白肽的用法用量", 0.9),
            sample("胶原怎么喝", "胶原蛋白肽的服用方法", 0.9),
            Sample { context: other_context, ..sample("胶原咋吃", "胶原蛋白肽孕妇的服用方法", 0.9) },
        ];
        assert_eq!(codes(&Settings::none(), &samples), ["keep", "duplicate", "keep", "keep"]);
    }

    #[test]
    fn a_dropped_query_does_not_shadow_a_later_good_one() {
        let samples = [sample("胶原咋吃", "胶原", 0.1), sample("胶原咋吃", "胶原蛋白肽的服用方法", 0.9)];
        assert_eq!(codes(&Settings::none(), &samples), ["top1_below_threshold", "keep"]);
    }

    #[test]
    fn lost_key_terms_are_named() {
        let settings = Settings::from_pairs([("key_terms", r#"["虾青素", "孕妇"]"#)]);
        let mut filter = Quality::new(&settings).unwrap();
        let verdict = filter.check(&sample("孕妇能吃虾青素吗", "虾青素的适用人群", 0.9));
        assert_eq!(verdict, Verdict::drop("lost_key_terms", "missing in the rewrite: 孕妇"));
        assert_eq!(filter.check(&sample("能吃虾青素吗", "虾青素的适用人群", 0.9)), Verdict::Keep);
    }

    #[test]
    fn unusable_settings_are_refused() {
        let key = |pairs: [(&str, &str); 1]| Quality::new(&Settings::from_pairs(pairs)).unwrap_err().key;
        assert_eq!(key([("min_top1", "1.5")]), "min_top1");
        assert_eq!(key([("max_chars", "0")]), "max_chars");
        assert_eq!(key([("key_terms", r#"["，"]"#)]), "key_terms");
    }
}

//! Judges, which score rewrites: a model behind an OpenAI-compatible endpoint, or a deterministic rubric.

pub(crate) mod lexicon;

use crate::client::ServiceContext;
use crate::client::chat::ChatClient;
use crate::client::response_cache::{CacheTable, ServiceCache};
use crate::error::DataError;
use crate::retrieval::vocabulary::Vocabulary;
use async_trait::async_trait;
use lexicon::{Expression, Lexicon, QueryIntent, TermSet};
use querl_core::config::{JudgeConfig, JudgeKind, RetrievalConfig};
use querl_core::ports::{Judge, JudgeRequest};
use querl_core::records::{CallFailure, Completion, Message};
use std::sync::Arc;

/// Opens the configured judge; `None` if none is configured. The rubric uses the lexicon of retrieval.
///
/// # Errors
/// A setting of this kind of judge is missing, or the lexicon cannot be read.
pub fn open_judge(
    config: &JudgeConfig,
    retrieval: &RetrievalConfig,
    services: &ServiceContext,
) -> Result<Option<Arc<dyn Judge>>, DataError> {
    match config.kind {
        JudgeKind::None => Ok(None),
        JudgeKind::Openai => {
            let client = ChatClient::open("judge", config.endpoint(), services)?;
            let cache = ServiceCache::open(services, CacheTable::Judgements, client.provider(), &client.identity());
            Ok(Some(Arc::new(OpenAiJudge { client, cache })))
        }
        JudgeKind::Rubric => {
            let problem = "is not set; a judge of kind `rubric` needs the tenant's lexicon";
            let path = retrieval.lexicon.as_deref();
            let path = path.ok_or_else(|| DataError::setting("retrieval.lexicon", problem))?;
            let segmenter = Vocabulary::open(retrieval)?.segmenter;
            Ok(Some(Arc::new(RubricJudge::new(Lexicon::read(path)?.with_segmenter(segmenter)))))
        }
    }
}

/// A model behind an OpenAI-compatible endpoint, with the response cache.
struct OpenAiJudge {
    client: ChatClient,
    cache: ServiceCache,
}

#[async_trait]
impl Judge for OpenAiJudge {
    async fn judge(&self, request: JudgeRequest<'_>) -> Result<Completion, CallFailure> {
        self.cache.get_or_call(&request.messages, self.client.complete(request.messages)).await
    }

    fn forget(&self, messages: &[Message]) {
        self.cache.forget(&messages);
    }

    fn name(&self) -> &str {
        self.client.model()
    }
}

/// Points, 5 in total: a good rewrite needs the right product first, then the intent.
mod points {
    pub(super) const PRODUCT: f64 = 2.0;
    pub(super) const PRODUCT_BY_ALIAS: f64 = 1.2;
    pub(super) const INTENT_HOUSE: f64 = 1.6;
    pub(super) const INTENT_GENERAL: f64 = 1.1;
    pub(super) const INTENT_CUE: f64 = 0.7;
    pub(super) const CONTEXT: f64 = 0.7;
    pub(super) const CONCISE: f64 = 0.7;
    /// Penalty for each product that was not asked about.
    pub(super) const FOREIGN: f64 = 1.0;
    /// Penalty for each intent that was not asked about, beyond the first.
    pub(super) const FOREIGN_INTENT: f64 = 0.4;
    /// Maximum for a copy of the query.
    pub(super) const COPY: f64 = 1.0;
}

/// Up to this length a rewrite gets all points for conciseness, from twice this length none.
const CONCISE_CHARS: usize = 24;
/// Number of Chinese characters that a word of another language is equivalent to.
const CHARS_PER_WORD: usize = 2;

/// Judge with a deterministic rubric over the tenant's lexicon. A stand-in for a model: it does not measure human preference.
#[derive(Debug)]
pub struct RubricJudge {
    lexicon: Lexicon,
}

impl RubricJudge {
    /// A judge for one tenant's lexicon.
    pub fn new(lexicon: Lexicon) -> Self {
        Self { lexicon }
    }

    /// Scores a rewrite from 0 to 5 in steps of 0.1; returns the score and its reasons.
    pub fn score(&self, request: &JudgeRequest<'_>) -> (f64, String) {
        let rewrite = self.lexicon.phrase_form(request.rewrite);
        if rewrite.is_empty() {
            return (0.0, "改写为空".into());
        }
        let query_intent = QueryIntent::read(&self.lexicon, request.query, request.context);
        let (product, product_reason) = self.product_points(&query_intent, &rewrite);
        let (intent, intent_reason) = self.intent_points(&query_intent, &rewrite);
        // A text without product and intent gets no points for being short.
        let worth = if product > 0.0 || intent > 0.0 { 1.0 } else { 0.0 };
        let context = worth * points::CONTEXT * self.kept_share(&query_intent, &rewrite);
        let length = match self.lexicon.is_spaced() {
            true => CHARS_PER_WORD * request.rewrite.split_whitespace().count(),
            false => request.rewrite.chars().filter(|character| !character.is_whitespace()).count(),
        };
        let over = length.saturating_sub(CONCISE_CHARS) as f64 / CONCISE_CHARS as f64;
        let concise = worth * points::CONCISE * (1.0 - over).max(0.0);
        let mut reasons =
            vec![product_reason, intent_reason, format!("保留原意 {context:.1}"), format!("简洁 {concise:.1}")];
        let mut score = product + intent + context + concise;
        if rewrite == self.lexicon.phrase_form(request.query) {
            score = score.min(points::COPY);
            reasons.push("照抄原句".into());
        }
        ((score.clamp(0.0, 5.0) * 10.0).round() / 10.0, reasons.join("；"))
    }

    fn product_points(&self, query_intent: &QueryIntent, rewrite: &str) -> (f64, String) {
        let (mentions, _) = self.lexicon.products_in(rewrite);
        let mut named: Vec<usize> = mentions.iter().map(|found| found.value.product).collect();
        named.sort_unstable();
        named.dedup();
        let Some(wanted) = query_intent.product else {
            // The product is unknown: naming one is a guess.
            let given = if named.is_empty() { 0.5 * points::PRODUCT } else { 0.0 };
            return (given, format!("产品未指明 {given:.1}"));
        };
        let canonical = mentions.iter().any(|found| found.value.product == wanted && found.value.canonical);
        let (given, how) = match (canonical, named.contains(&wanted)) {
            (true, _) => (points::PRODUCT, "产品准确"),
            (false, true) => (points::PRODUCT_BY_ALIAS, "产品用了别名"),
            (false, false) => (0.0, "产品缺失"),
        };
        // Products that the query names for comparison are not foreign.
        let foreign = named
            .iter()
            .filter(|product| **product != wanted && !query_intent.named_products.contains(product))
            .count();
        let total = given - points::FOREIGN * foreign as f64;
        let note = if foreign > 0 { format!("，多出 {foreign} 个无关产品") } else { String::new() };
        (total, format!("{how}{note} {total:.1}"))
    }

    fn intent_points(&self, query_intent: &QueryIntent, rewrite: &str) -> (f64, String) {
        let (_, rest) = self.lexicon.products_in(rewrite);
        let found = self.lexicon.intents_in(&rest);
        let Some(wanted) = query_intent.intent() else {
            let given = if found.is_empty() { points::INTENT_CUE } else { points::INTENT_GENERAL };
            return (given, format!("意图不明 {given:.1}"));
        };
        let best = found.iter().filter(|found| found.value.intent == wanted).map(|found| found.value.expression).max();
        let (given, how) = match best {
            Some(Expression::House) => (points::INTENT_HOUSE, "意图用了知识库术语"),
            Some(Expression::General) => (points::INTENT_GENERAL, "意图明确"),
            Some(Expression::Cue) => (points::INTENT_CUE, "意图只有口语"),
            None => (0.0, "意图缺失"),
        };
        let asked = |intent: usize| query_intent.intents[intent] > 0.0;
        let mut foreign: Vec<usize> =
            found.iter().map(|found| found.value.intent).filter(|intent| !asked(*intent)).collect();
        foreign.sort_unstable();
        foreign.dedup();
        let total = given - points::FOREIGN_INTENT * foreign.len().saturating_sub(1) as f64;
        (total, format!("{how} {total:.1}"))
    }

    /// Share of the query's particulars that the rewrite keeps, themselves or by a synonym.
    fn kept_share(&self, query_intent: &QueryIntent, rewrite: &str) -> f64 {
        let (_, rest) = self.lexicon.products_in(rewrite);
        let kept = TermSet::read(&self.lexicon, &rest);
        let TermSet { words, synonyms } = &query_intent.particulars;
        let groups = synonyms.iter().map(|group| kept.synonyms.contains(group));
        // Single characters are mostly particles; words with synonyms count with their group.
        let plain = words.iter().filter(|word| word.chars().count() > 1 && self.lexicon.synonym_group(word).is_none());
        let held: Vec<bool> = groups.chain(plain.map(|word| kept.words.contains(word))).collect();
        if held.is_empty() { 1.0 } else { held.iter().filter(|held| **held).count() as f64 / held.len() as f64 }
    }
}

/// Formats a score and its reason like the answer of a judge model: a JSON object in one line.
pub fn rubric_answer(score: f64, reason: &str) -> String {
    serde_json::json!({"综合得分": score, "评分理由": reason}).to_string()
}

#[async_trait]
impl Judge for RubricJudge {
    async fn judge(&self, request: JudgeRequest<'_>) -> Result<Completion, CallFailure> {
        let (score, reason) = self.score(&request);
        Ok(Completion { cost: Some(0.0), ..Completion::of(rubric_answer(score, &reason)) })
    }

    fn name(&self) -> &str {
        "rubric (stand-in)"
    }
}

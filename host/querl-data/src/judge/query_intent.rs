//! Product and intent of a query, read from the query, its history and its profile. Rewrites are not an input, so that no rewrite can
//! change what passages are scored against.

use crate::judge::lexicon::{Expression, IntentMention, Lexicon};
use crate::judge::lexicon::{PhraseMatch, without};
use crate::text::normalise;
use querl_core::records::Context;

/// Product and intents of a query in its context.
#[derive(Debug, Clone, PartialEq)]
pub struct QueryIntent {
    /// The product meant; `None` where nothing names one. Position in [`Lexicon::products`].
    pub product: Option<usize>,
    /// All products that the query itself names.
    pub named_products: Vec<usize>,
    /// How strongly each intent is asked for, 0 to 1, the strongest 1; all 0 where no word betrays one.
    pub intents: Vec<f64>,
    /// The query without product names.
    pub wording: TermSet,
    /// The query without product names and intent phrases: details that a rewrite should keep.
    pub particulars: TermSet,
    /// Words of the profile.
    pub profile_words: Vec<String>,
}

/// A text as words and as synonyms.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TermSet {
    /// Distinct words, in order.
    pub words: Vec<String>,
    /// Groups of synonyms with a word in the text.
    pub synonyms: Vec<usize>,
}

impl TermSet {
    pub(crate) fn read(lexicon: &Lexicon, text: &[char]) -> Self {
        let synonyms = lexicon.synonyms_in(text).iter().map(|found| found.value).collect();
        Self { words: lexicon.words(&text.iter().collect::<String>()), synonyms }
    }
}

impl QueryIntent {
    /// Reads a query in its context.
    pub fn read(lexicon: &Lexicon, query: &str, context: &Context) -> Self {
        let query = normalise(query);
        let (mentions, rest) = lexicon.products_in(&query);
        let (past, _) = lexicon.products_in(&normalise(&context.history_summary));
        // Summaries tell what was said in order: the product talked about last is meant.
        let in_history = past.last().map(|mention| mention.value.product);
        let product = match mentions.first() {
            Some(first) if in_history.is_some() && is_beside_the_subject(&query, first.start) => in_history,
            Some(first) => Some(first.value.product),
            None => in_history,
        };
        let phrases = lexicon.intents_in(&rest);
        Self {
            product,
            named_products: mentions.iter().map(|mention| mention.value.product).collect(),
            intents: intents(lexicon, &phrases),
            wording: TermSet::read(lexicon, &rest),
            particulars: TermSet::read(lexicon, &without(&rest, &phrases)),
            profile_words: lexicon.words(&normalise(&context.user_profile)),
        }
    }

    /// The intent asked for most; `None` where no word betrays one.
    pub fn intent(&self) -> Option<usize> {
        let strongest = self.intents.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)))?;
        (*strongest.1 > 0.0).then_some(strongest.0)
    }
}

/// True where a product is named only for comparison: after a word that points back (`它里面有没有DHA`), or after `with`, `than`.
fn is_beside_the_subject(query: &str, start: usize) -> bool {
    const POINTING_BACK: [&str; 6] = ["它", "这个", "这款", "那个", "那款", "这俩"];
    const JOINING: [char; 5] = ['跟', '和', '与', '比', '同'];
    let before: String = query.chars().take(start).collect();
    POINTING_BACK.iter().any(|word| before.contains(word)) || before.ends_with(JOINING)
}

fn intents(lexicon: &Lexicon, phrases: &[PhraseMatch<IntentMention>]) -> Vec<f64> {
    let mut weights = vec![0.0; lexicon.intents().len()];
    for found in phrases {
        // A longer phrase says more; a word of the house or a general one says more than a cue.
        let kind = if found.value.expression == Expression::Cue { 1.0 } else { 1.2 };
        weights[found.value.intent] += kind * (found.len as f64).sqrt();
    }
    let strongest = weights.iter().copied().fold(0.0, f64::max);
    if strongest > 0.0 {
        weights.iter_mut().for_each(|weight| *weight /= strongest);
    }
    weights
}

//! What a customer wants: which product and which intent, read from the query, its history and its profile. A rewrite is never
//! looked at here, so nothing a rewrite says can change what passages are measured against.

use crate::lexicon::{Expression, Lexicon};
use crate::segment::words;
use crate::text::normalise;
use querl_core::records::Context;

/// What a query asks for, in its context.
#[derive(Debug, Clone, PartialEq)]
pub struct Need {
    /// The product meant; `None` where nothing names one. Position in [`Lexicon::products`].
    pub product: Option<usize>,
    /// How strongly each intent is asked for, 0 to 1, the strongest 1; all 0 where no word betrays one.
    pub intents: Vec<f64>,
    /// Words of the query beside product names.
    pub words: Vec<String>,
    /// Groups of synonyms of which the query holds a word.
    pub synonyms: Vec<usize>,
    /// Words of the profile.
    pub profile_words: Vec<String>,
}

impl Need {
    /// Reads a query in its context.
    pub fn read(lexicon: &Lexicon, query: &str, context: &Context) -> Self {
        let query = normalise(query);
        let (mentions, rest) = lexicon.products_in(&query);
        let in_history = product_in_history(lexicon, &context.history_summary);
        let product = match mentions.first() {
            Some(first) if in_history.is_some() && is_beside_the_subject(&query, first.start) => in_history,
            Some(first) => Some(first.value.product),
            None => in_history,
        };
        let rest_text: String = rest.iter().collect();
        Self {
            product,
            intents: intents(lexicon, &rest),
            synonyms: lexicon.synonyms_in(&rest).iter().map(|found| found.value).collect(),
            words: words(&rest_text),
            profile_words: words(&normalise(&context.user_profile)),
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

/// The product talked about last: summaries tell what was said in order.
fn product_in_history(lexicon: &Lexicon, history: &str) -> Option<usize> {
    let (mentions, _) = lexicon.products_in(&normalise(history));
    mentions.last().map(|mention| mention.value.product)
}

fn intents(lexicon: &Lexicon, rest: &[char]) -> Vec<f64> {
    let mut weights = vec![0.0; lexicon.intents().len()];
    for found in lexicon.intents_in(rest) {
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

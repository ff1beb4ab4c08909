//! What a classifier has to beat: logistic regression over the frequencies of characters and pairs of them.

mod lbfgs;
mod logistic;
mod tfidf;

pub use logistic::LogisticRegression;
pub use tfidf::TfIdf;

/// Inverse strength of the penalty, as scikit-learn's `C`. Its default of 1 holds vectors of length 1 back too much on a few hundred
/// examples: on those of `examples/style`, 5-fold, 10 is better.
const C: f64 = 10.0;

/// A classifier of texts that knows nothing but which characters stand in them.
#[derive(Debug, Clone)]
pub struct TextBaseline {
    features: TfIdf,
    model: LogisticRegression,
}

impl TextBaseline {
    /// Learns from texts and their classes, of which there are `n_classes`.
    pub fn fit(texts: &[&str], labels: &[usize], n_classes: usize) -> Self {
        let features = TfIdf::fit(texts);
        let rows: Vec<_> = texts.iter().map(|text| features.transform(text)).collect();
        let model = LogisticRegression::fit(&rows, labels, (features.n_features(), n_classes), C);
        Self { features, model }
    }

    /// Probabilities of the classes.
    pub fn probabilities(&self, text: &str) -> Vec<f64> {
        self.model.probabilities(&self.features.transform(text))
    }
}

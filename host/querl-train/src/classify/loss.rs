//! Cross-entropy of classes.

use candle_core::{Result, Tensor};

/// What examples count, and how sure a classifier is to become.
#[derive(Debug, Clone, Copy)]
pub struct Weighting<'a> {
    /// What an example of each class counts; `None`: all alike.
    pub weights: Option<&'a [f32]>,
    /// Share of the target that is spread over all classes.
    pub smoothing: f64,
}

impl Weighting<'_> {
    fn weight(&self, class: usize) -> f64 {
        self.weights.map_or(1.0, |weights| f64::from(weights[class]))
    }

    /// What some examples count together: by it their summed loss is divided.
    pub fn total(&self, labels: &[u32]) -> f64 {
        labels.iter().map(|label| self.weight(*label as usize)).sum()
    }
}

/// `N / (K n_c)` for each of K classes, of N examples in all and `n_c` of class c: rare classes count as much as common ones. A class
/// without examples counts 0.
///
/// Source: scikit-learn's `compute_class_weight("balanced")`.
pub fn class_weights(labels: impl IntoIterator<Item = usize>, n_classes: usize) -> Vec<f32> {
    let mut counts = vec![0usize; n_classes];
    labels.into_iter().for_each(|label| counts[label] += 1);
    let n: usize = counts.iter().sum();
    let weight = |count: &usize| if *count == 0 { 0.0 } else { n as f32 / (n_classes * count) as f32 };
    counts.iter().map(weight).collect()
}

/// Summed cross-entropy of logits `(N, classes)`; over [`Weighting::total`] it is the mean that torch forms.
///
/// # Errors
/// A label is not below the number of classes.
///
/// Source: torch's `cross_entropy` with `weight` and `label_smoothing`.
pub(super) fn cross_entropy(logits: &Tensor, labels: &[u32], weighting: Weighting<'_>) -> Result<Tensor> {
    let (n, n_classes) = logits.dims2()?;
    let mut targets = Vec::with_capacity(n * n_classes);
    for label in labels {
        for class in 0..n_classes {
            let own =
                if class == *label as usize { (1.0 - weighting.smoothing) * weighting.weight(class) } else { 0.0 };
            targets.push((own + weighting.smoothing / n_classes as f64 * weighting.weight(class)) as f32);
        }
    }
    let targets = Tensor::from_vec(targets, (n, n_classes), logits.device())?;
    let shifted = logits.broadcast_sub(&logits.detach().max_keepdim(1)?)?; // (N, classes)
    let logprobs = shifted.broadcast_sub(&shifted.exp()?.sum_keepdim(1)?.log()?)?; // (N, classes)
    (logprobs * targets)?.sum_all()?.neg()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};
    use serde_json::Value;

    #[test]
    fn loss_and_gradient_are_torchs_with_weights_and_smoothing() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/reference/golden/classifiers/loss.json");
        let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let rows = |value: &Value| serde_json::from_value::<Vec<Vec<f32>>>(value.clone()).unwrap();
        let labels: Vec<u32> = serde_json::from_value(golden["labels"].clone()).unwrap();
        let weights: Vec<f32> = serde_json::from_value(golden["weights"].clone()).unwrap();
        let logits = rows(&golden["logits"]);
        for case in golden["cases"].as_array().unwrap() {
            let weights = (case["weighted"] == 1).then_some(weights.as_slice());
            let weighting = Weighting { weights, smoothing: case["smoothing"].as_f64().unwrap() };
            let logits = Var::from_vec(logits.concat(), (logits.len(), 4), &Device::Cpu).unwrap();
            let loss = (cross_entropy(&logits, &labels, weighting).unwrap() / weighting.total(&labels)).unwrap();
            assert!(
                (f64::from(loss.to_scalar::<f32>().unwrap()) - case["loss"].as_f64().unwrap()).abs() < 1e-5,
                "{case}"
            );
            let found = loss.backward().unwrap().get(&logits).unwrap().to_vec2::<f32>().unwrap();
            for (found, expected) in found.concat().iter().zip(rows(&case["grad"]).concat()) {
                assert!((found - expected).abs() < 1e-6, "{case}");
            }
        }
    }

    #[test]
    fn rare_classes_count_as_much_as_common_ones() {
        // sklearn.utils.class_weight.compute_class_weight("balanced", classes=range(3), y=[0] * 6 + [1] * 3 + [2])
        let labels = [0, 0, 0, 0, 0, 0, 1, 1, 1, 2];
        let weights = class_weights(labels, 3);
        assert_eq!(weights, [10.0 / 18.0, 10.0 / 9.0, 10.0 / 3.0]);
        assert_eq!(class_weights([0, 0], 2), [0.5, 0.0]);
    }
}

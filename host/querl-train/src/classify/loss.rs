//! Cross-entropy over classes, and distillation.

use candle_core::{Result, Tensor};

/// Class weights and label smoothing.
#[derive(Debug, Clone, Copy)]
pub struct Weighting<'a> {
    /// Weight of each class; `None`: equal weights.
    pub weights: Option<&'a [f32]>,
    /// Share of the target that is spread over all classes.
    pub smoothing: f64,
}

impl Weighting<'_> {
    fn weight(&self, class: usize) -> f64 {
        self.weights.map_or(1.0, |weights| f64::from(weights[class]))
    }

    /// Sum of the examples' weights, by which their summed loss is divided.
    pub fn total(&self, labels: &[u32]) -> f64 {
        labels.iter().map(|label| self.weight(*label as usize)).sum()
    }
}

/// `N / (K n_c)` for each of K classes, of N examples in all and `n_c` of class c: rare classes weigh as much as common ones. A class
/// without examples has weight 0.
///
/// Source: scikit-learn's `compute_class_weight("balanced")`.
pub fn class_weights(labels: impl IntoIterator<Item = usize>, n_classes: usize) -> Vec<f32> {
    let mut counts = vec![0usize; n_classes];
    labels.into_iter().for_each(|label| counts[label] += 1);
    let n: usize = counts.iter().sum();
    let weight = |count: &usize| if *count == 0 { 0.0 } else { n as f32 / (n_classes * count) as f32 };
    counts.iter().map(weight).collect()
}

/// Distillation from a teacher's logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Distillation {
    /// Divides the logits of teacher and student; above 0.
    pub temperature: f64,
    /// Weight of the label, 0 to 1; the teacher has the rest, and all of a row without label.
    pub hard_weight: f64,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Target<'a> {
    pub(super) label: Option<u32>,
    pub(super) teacher: Option<&'a [f32]>,
}

/// Summed loss of logits `(N, classes)`: cross-entropy of the labels, whose quotient by [`Weighting::total`] is torch's mean; with a
/// teacher plus the KL divergence of its distribution from the student's at the temperature, times the temperature squared, so that the
/// size of its gradients does not depend on the temperature.
pub(super) fn summed_loss(
    logits: &Tensor,
    targets: &[Target<'_>],
    weighting: Weighting<'_>,
    distillation: Option<Distillation>,
) -> Result<Tensor> {
    let (n, n_classes) = logits.dims2()?;
    let of_label = |target: &Target<'_>| match (distillation, target.teacher) {
        (Some(distillation), Some(_)) => distillation.hard_weight,
        _ => 1.0,
    };
    let mut hard = Vec::with_capacity(n * n_classes);
    for target in targets {
        let row = target.label.map_or(vec![0.0; n_classes], |label| smoothed(label, n_classes, weighting));
        hard.extend(row.into_iter().map(|value| (of_label(target) * value) as f32));
    }
    let hard = Tensor::from_vec(hard, (n, n_classes), logits.device())?;
    let loss = (logprobs(logits)? * hard)?.sum_all()?.neg()?;
    let Some(Distillation { temperature, .. }) = distillation else { return Ok(loss) };
    let (mut soft, mut of_teacher) = (Vec::with_capacity(n * n_classes), 0.0);
    for target in targets {
        let of_soft = if target.label.is_some() { 1.0 - of_label(target) } else { 1.0 };
        let shares = target.teacher.map_or(vec![0.0; n_classes], |logits| softened(logits, temperature));
        of_teacher += of_soft * shares.iter().filter(|p| **p > 0.0).map(|p| p * p.ln()).sum::<f64>();
        soft.extend(shares.into_iter().map(|p| (of_soft * p) as f32));
    }
    let soft = Tensor::from_vec(soft, (n, n_classes), logits.device())?;
    let divergence = ((logprobs(&(logits / temperature)?)? * soft)?.sum_all()?.neg()? + of_teacher)?;
    loss + (divergence * (temperature * temperature))?
}

/// A smoothed label times the class weights.
fn smoothed(label: u32, n_classes: usize, weighting: Weighting<'_>) -> Vec<f64> {
    let value = |class: usize| {
        let own = if class == label as usize { 1.0 - weighting.smoothing } else { 0.0 };
        (own + weighting.smoothing / n_classes as f64) * weighting.weight(class)
    };
    (0..n_classes).map(value).collect()
}

fn softened(logits: &[f32], temperature: f64) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shares: Vec<f64> = logits.iter().map(|logit| (f64::from(logit - largest) / temperature).exp()).collect();
    let sum: f64 = shares.iter().sum();
    shares.into_iter().map(|share| share / sum).collect()
}

fn logprobs(logits: &Tensor) -> Result<Tensor> {
    let shifted = logits.broadcast_sub(&logits.detach().max_keepdim(1)?)?; // (N, classes)
    shifted.broadcast_sub(&shifted.exp()?.sum_keepdim(1)?.log()?) // (N, classes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};
    use serde_json::Value;

    fn golden() -> Value {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/reference/golden/classifiers/loss.json");
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    fn rows(value: &Value) -> Vec<Vec<f32>> {
        serde_json::from_value(value.clone()).unwrap()
    }

    /// Compares loss, divided by `total`, and gradient with a golden case.
    fn assert_case(case: &Value, logits: &[Vec<f32>], total: f64, loss: impl Fn(&Tensor) -> Result<Tensor>) {
        let logits = Var::from_vec(logits.concat(), (logits.len(), 4), &Device::Cpu).unwrap();
        let loss = (loss(&logits).unwrap() / total).unwrap();
        let value = f64::from(loss.to_scalar::<f32>().unwrap());
        assert!((value - case["loss"].as_f64().unwrap()).abs() < 1e-5, "{value}: {case}");
        let found = loss.backward().unwrap().get(&logits).unwrap().to_vec2::<f32>().unwrap();
        for (found, expected) in found.concat().iter().zip(rows(&case["grad"]).concat()) {
            assert!((found - expected).abs() < 1e-6, "{case}");
        }
    }

    #[test]
    fn loss_and_gradient_are_torchs_with_weights_and_smoothing() {
        let golden = golden();
        let labels: Vec<u32> = serde_json::from_value(golden["labels"].clone()).unwrap();
        let weights: Vec<f32> = serde_json::from_value(golden["weights"].clone()).unwrap();
        let targets: Vec<Target<'_>> =
            labels.iter().map(|label| Target { label: Some(*label), teacher: None }).collect();
        for case in golden["cases"].as_array().unwrap() {
            let weights = (case["weighted"] == 1).then_some(weights.as_slice());
            let weighting = Weighting { weights, smoothing: case["smoothing"].as_f64().unwrap() };
            let loss = |logits: &Tensor| summed_loss(logits, &targets, weighting, None);
            assert_case(case, &rows(&golden["logits"]), weighting.total(&labels), loss);
        }
    }

    #[test]
    fn a_students_loss_and_gradient_are_torchs_with_and_without_labels() {
        let golden = golden();
        let teacher = rows(&golden["teacher"]);
        let labels: Vec<Option<u32>> = serde_json::from_value(golden["some_labels"].clone()).unwrap();
        let target = |(label, teacher)| Target { label, teacher: Some(teacher) };
        let targets: Vec<Target<'_>> = labels.into_iter().zip(teacher.iter().map(Vec::as_slice)).map(target).collect();
        let plain = Weighting { weights: None, smoothing: 0.0 };
        for case in golden["distillation"].as_array().unwrap() {
            let number = |key: &str| case[key].as_f64().unwrap();
            let settings = Distillation { temperature: number("temperature"), hard_weight: number("hard_weight") };
            let loss = |logits: &Tensor| summed_loss(logits, &targets, plain, Some(settings));
            assert_case(case, &rows(&golden["logits"]), targets.len() as f64, loss);
        }
    }

    #[test]
    fn rare_classes_weigh_as_much_as_common_ones() {
        // sklearn.utils.class_weight.compute_class_weight("balanced", classes=range(3), y=[0] * 6 + [1] * 3 + [2])
        let labels = [0, 0, 0, 0, 0, 0, 1, 1, 1, 2];
        let weights = class_weights(labels, 3);
        assert_eq!(weights, [10.0 / 18.0, 10.0 / 9.0, 10.0 / 3.0]);
        assert_eq!(class_weights([0, 0], 2), [0.5, 0.0]);
    }
}

//! Figures of probabilities, not of choices alone.

/// The first of the largest values: what a classifier says.
pub fn argmax(probabilities: &[f64]) -> usize {
    let better = |best: usize, (index, value): (usize, &f64)| if *value > probabilities[best] { index } else { best };
    probabilities.iter().enumerate().fold(0, better)
}

/// Probabilities of logits.
pub fn softmax(logits: &[f64]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers: Vec<f64> = logits.iter().map(|logit| (logit - largest).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| power / sum).collect()
}

/// Mean negative logarithm of the true class's probability, which is taken as at least the smallest step above 0 that f64 has at 1.
///
/// Source: scikit-learn's `log_loss`.
pub fn log_loss(labels: &[usize], probabilities: &[Vec<f64>]) -> f64 {
    let loss = |(label, row): (&usize, &Vec<f64>)| {
        -(row[*label] / row.iter().sum::<f64>()).clamp(f64::EPSILON, 1.0 - f64::EPSILON).ln()
    };
    mean(labels.iter().zip(probabilities).map(loss))
}

/// Mean squared distance of the probabilities from what is true: 0 at best, 2 where certainty was always wrong. It is the sum over
/// classes; for two classes others give half of it.
///
/// Source: Brier 1950, "Verification of forecasts expressed in terms of probability"; scikit-learn's `brier_score_loss` with
/// `scale_by_half=False`.
pub fn brier_score(labels: &[usize], probabilities: &[Vec<f64>]) -> f64 {
    let distance = |(label, row): (&usize, &Vec<f64>)| {
        let squares = row.iter().enumerate().map(|(class, p)| (p - f64::from(u8::from(class == *label))).powi(2));
        squares.sum::<f64>()
    };
    mean(labels.iter().zip(probabilities).map(distance))
}

pub(super) fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, n) = values.fold((0.0, 0usize), |(sum, n), value| (sum + value, n + 1));
    sum / n.max(1) as f64
}

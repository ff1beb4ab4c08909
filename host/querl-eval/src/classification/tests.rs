//! Metrics of a classifier compared with scikit-learn and scipy (tests/reference/classification.py), and warnings.

use super::baseline::TfIdf;
use super::metrics::*;
use super::*;
use serde_json::Value;

const OPTIONS: MeasureOptions = MeasureOptions { seed: 7, n_resamples: 500 };

fn golden() -> Value {
    serde_json::from_str(include_str!("../../../../tests/reference/golden/classification.json")).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
}

fn rows(value: &Value) -> Vec<Vec<f64>> {
    value.as_array().unwrap().iter().map(numbers).collect()
}

fn indices(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|value| value.as_u64().unwrap() as usize).collect()
}

fn texts(value: &Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(|value| value.as_str().unwrap()).collect()
}

fn near(found: f64, expected: f64, tolerance: f64) {
    assert!((found - expected).abs() <= tolerance, "{found} is not {expected}");
}

#[test]
fn scores_are_those_of_scikit_learn_also_for_classes_that_do_not_occur() {
    let golden = &golden()["scores"];
    let pairs = indices(&golden["labels"]).into_iter().zip(indices(&golden["predicted"]));
    let confusion = Confusion::new(5, pairs);
    near(confusion.accuracy(), golden["accuracy"].as_f64().unwrap(), 1e-12);
    near(confusion.f1_macro(), golden["f1_macro"].as_f64().unwrap(), 1e-12);
    near(confusion.f1_weighted(), golden["f1_weighted"].as_f64().unwrap(), 1e-12);
    for (class, scores) in confusion.per_class().iter().enumerate() {
        near(scores.precision, golden["precision"][class].as_f64().unwrap(), 1e-12);
        near(scores.recall, golden["recall"][class].as_f64().unwrap(), 1e-12);
        near(scores.f1, golden["f1"][class].as_f64().unwrap(), 1e-12);
        assert_eq!(scores.support, golden["support"][class].as_u64().unwrap());
    }
}

#[test]
fn wilsons_interval_is_that_of_scipy() {
    for row in rows(&golden()["wilson"]) {
        let found = wilson(row[0] as u64, row[1] as u64).unwrap();
        near(found.low, row[2], 1e-12);
        near(found.high, row[3], 1e-12);
    }
    assert_eq!(wilson(0, 0), None);
}

#[test]
fn losses_and_the_best_temperature_are_those_of_the_references() {
    let golden = &golden()["probabilities"];
    let (labels, logits) = (indices(&golden["labels"]), rows(&golden["logits"]));
    let probabilities: Vec<Vec<f64>> = logits.iter().map(|row| softmax(row)).collect();
    near(log_loss(&labels, &probabilities), golden["log_loss"].as_f64().unwrap(), 1e-12);
    near(brier_score(&labels, &probabilities), golden["brier"].as_f64().unwrap(), 1e-12);
    let certain = [vec![1.0, 0.0], vec![1.0, 0.0]];
    near(log_loss(&[0, 1], &certain), golden["log_loss_certain"].as_f64().unwrap(), 1e-9);
    let temperature = fit_temperature(&labels, &logits);
    near(temperature, golden["temperature"].as_f64().unwrap(), 1e-4);
    let after = log_loss(&labels, &calibrated(&logits, temperature));
    near(after, golden["log_loss_calibrated"].as_f64().unwrap(), 1e-7);
    assert!(after < log_loss(&labels, &probabilities));
}

#[test]
fn a_temperature_changes_no_prediction() {
    let logits = rows(&golden()["probabilities"]["logits"]);
    let predicted = |rows: &[Vec<f64>]| rows.iter().map(|row| argmax(row)).collect::<Vec<_>>();
    assert_eq!(predicted(&logits), predicted(&calibrated(&logits, 3.7)));
}

#[test]
fn confidence_on_an_edge_belongs_to_the_bin_below() {
    let probabilities = [vec![0.5, 0.3, 0.2], vec![0.9, 0.05, 0.05], vec![0.1, 0.8, 0.1], vec![0.0, 1.0, 0.0]];
    let bins = reliability(&[0, 1, 1, 1], &probabilities, 5);
    assert_eq!(bins.iter().map(|bin| bin.n).collect::<Vec<_>>(), [0, 0, 1, 1, 2]);
    assert_eq!((bins[4].accuracy, bins[4].confidence), (0.5, 0.95));
    // (1 * |0.5 - 1| + 1 * |0.8 - 1| + 2 * |0.95 - 0.5|) / 4
    near(expected_calibration_error(&bins), 0.4, 1e-12);
}

#[test]
fn the_test_against_the_majority_class_is_scipys() {
    for case in golden()["permutations"].as_array().unwrap() {
        // Class 0 is the majority class: if it is correct the label is 0; an incorrect classifier predicts 2.
        let majority = indices(&case["majority"]);
        let labels: Vec<usize> = majority.iter().map(|right| 1 - right).collect();
        let correct = indices(&case["classifier"]);
        let predicted: Vec<usize> =
            correct.iter().zip(&labels).map(|(right, label)| if *right == 1 { *label } else { 2 }).collect();
        let groups: Vec<String> = (0..labels.len()).map(|index| index.to_string()).collect();
        let groups: Vec<&str> = groups.iter().map(String::as_str).collect();
        let found = beats_majority(&labels, &predicted, &groups, 0, (1, 100));
        near(found, case["p_value"].as_f64().unwrap(), 1e-12);
    }
}

#[test]
fn a_sampled_p_value_is_close_to_the_exact_one() {
    // 20 examples: only the classifier is right on 14, only the majority class on 6. P(X >= 14) of 20 coins.
    let labels: Vec<usize> = (0..20).map(|index| usize::from(index < 14)).collect();
    let predicted = vec![1; 20];
    let groups: Vec<String> = (0..20).map(|index| index.to_string()).collect();
    let groups: Vec<&str> = groups.iter().map(String::as_str).collect();
    near(beats_majority(&labels, &predicted, &groups, 0, (3, 20_000)), 0.057_659, 0.006);
}

#[test]
fn the_baseline_is_scikit_learns_tf_idf_and_logistic_regression_of_three_classes_and_of_two() {
    for (key, n_classes) in [("baseline", 3), ("baseline_of_two", 2)] {
        let golden = &golden()[key];
        let (learned, labels) = (texts(&golden["texts"]), indices(&golden["labels"]));
        let features = TfIdf::fit(&learned);
        assert_eq!(features.n_features() as u64, golden["n_features"].as_u64().unwrap());
        let baseline = TextBaseline::fit(&learned, &labels, n_classes);
        for (index, text) in texts(&golden["held_out"]).into_iter().enumerate() {
            let mut values: Vec<f64> = features.transform(text).into_iter().map(|(_, value)| value).collect();
            values.sort_by(f64::total_cmp);
            let expected = numbers(&golden["rows"][index]);
            assert_eq!(values.len(), expected.len(), "{text}");
            values.iter().zip(&expected).for_each(|(found, expected)| near(*found, *expected, 1e-12));
            let found = baseline.probabilities(text);
            let expected = numbers(&golden["probabilities"][index]);
            found.iter().zip(expected).for_each(|(found, expected)| near(*found, expected, 1e-5));
        }
    }
}

/// Classes, labels, groups and probabilities.
type Parts = (Vec<String>, Vec<usize>, Vec<&'static str>, Vec<Vec<f64>>);

/// Twelve examples of three classes in groups of two, nine of them classified correctly.
fn small() -> Parts {
    let classes = ["售前", "售后", "诚实"].map(String::from).to_vec();
    let labels: Vec<usize> = (0..12).map(|index| index % 3).collect();
    let groups = (0..12).map(|index| ["g0", "g1", "g2", "g3", "g4", "g5"][index / 2]).collect();
    let row = |(index, label): (usize, &usize)| {
        let predicted = if index % 4 == 3 { (label + 1) % 3 } else { *label };
        (0..3).map(|class| if class == predicted { 0.8 } else { 0.1 }).collect()
    };
    let probabilities = labels.iter().enumerate().map(row).collect();
    (classes, labels, groups, probabilities)
}

#[test]
fn few_examples_have_cautions() {
    let (classes, labels, groups, probabilities) = small();
    let examples = Examples { classes: &classes, labels: &labels, groups: &groups, n_repeats: 1, majority: 0 };
    let found = measure(&examples, &probabilities, OPTIONS).unwrap();
    assert_eq!((found.n, found.n_groups, found.eval_accuracy), (12, 6, 0.75));
    assert!(found.accuracy_wilson.low < 0.75 && found.accuracy_wilson.high > 0.75);
    assert!(found.warnings[0].starts_with("12 examples are too few to conclude from"), "{:?}", found.warnings);
    assert!(found.warnings.iter().any(|text| text.contains("售前 (4), 售后 (4), 诚实 (4)")), "{:?}", found.warnings);
    assert_eq!(found, measure(&examples, &probabilities, OPTIONS).unwrap());
    let text = classification_text(&found);
    assert!(text.contains("售前") && text.contains("75.0%"), "{text}");
}

#[test]
fn many_examples_of_few_groups_have_cautions() {
    let classes = ["a", "b"].map(String::from).to_vec();
    let labels: Vec<usize> = (0..300).map(|index| index % 2).collect();
    let names: Vec<String> = (0..300).map(|index| format!("g{}", index % 4)).collect();
    let groups: Vec<&str> = names.iter().map(String::as_str).collect();
    // All examples of one of the four groups are predicted incorrectly.
    let row = |(index, label): (usize, &usize)| {
        let predicted = if index % 4 == 0 { 1 - label } else { *label };
        (0..2).map(|class| if class == predicted { 0.9 } else { 0.1 }).collect()
    };
    let probabilities: Vec<Vec<f64>> = labels.iter().enumerate().map(row).collect();
    let examples = Examples { classes: &classes, labels: &labels, groups: &groups, n_repeats: 1, majority: 0 };
    let found = measure(&examples, &probabilities, OPTIONS).unwrap();
    assert!(found.accuracy_wilson.high - found.accuracy_wilson.low < 0.1);
    assert!(found.warnings[0].starts_with("300 examples are too few to conclude from"), "{:?}", found.warnings);
    assert!(found.warnings[1].starts_with("300 examples are of 4 groups only"), "{:?}", found.warnings);
}

#[test]
fn the_page_shows_matrix_reliability_and_mistakes_and_escapes_texts() {
    let (classes, labels, groups, probabilities) = small();
    let examples = Examples { classes: &classes, labels: &labels, groups: &groups, n_repeats: 1, majority: 0 };
    let measures = measure(&examples, &probabilities, OPTIONS).unwrap();
    let mistakes = vec![Mistake {
        text: "用户问题：<script>alert(1)</script>\n回答：好".into(),
        label: "售前".into(),
        predicted: "诚实".into(),
        confidence: 0.93,
        note: "boundary: honesty".into(),
    }];
    let report = ClassificationReport {
        title: "style".into(),
        facts: vec![("model".into(), "tiny".into())],
        systems: vec![("model".into(), measures.clone()), ("TF-IDF".into(), measures)],
        temperature: Some(1.3),
        mistakes,
        notes: vec![],
    };
    let html = classification_html(&report).unwrap();
    assert!(html.contains("&lt;script&gt;") && !html.contains("<script>"), "{html}");
    for expected in ["Confusion", "Reliability", "<polyline", "0.93", "TF-IDF", "too few to conclude from"] {
        assert!(html.contains(expected), "no `{expected}`");
    }
}

#[test]
fn invalid_input_is_an_error() {
    let (classes, labels, groups, mut probabilities) = small();
    let examples = Examples { classes: &classes, labels: &labels, groups: &groups, n_repeats: 1, majority: 0 };
    let nothing = Examples { labels: &[], groups: &[], ..examples };
    let error = measure(&nothing, &[], OPTIONS).unwrap_err().to_string();
    assert_eq!(error, "classification: no examples to evaluate; expected one at least");
    probabilities[2] = vec![0.5, f64::NAN, 0.5];
    let error = measure(&examples, &probabilities, OPTIONS).unwrap_err().to_string();
    assert!(error.contains("example 3: [0.5, NaN, 0.5] are not probabilities of 3 classes"), "{error}");
}

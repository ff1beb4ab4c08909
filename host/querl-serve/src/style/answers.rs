//! What was found, in the form in which it was asked.

use super::refusal::Refusal;
use super::requests::{AnswerForm, ClassifyRequest};
use super::{ClassifiedText, TextClassifier};
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use serde_json::{Value, json, to_string};

/// What is said of a text: these three keys and no other.
#[derive(Debug, Serialize)]
pub struct StylePrediction<'a> {
    predicted_label: &'a str,
    confidence: f64,
    probabilities: ByClass<'a>,
}

/// Probabilities by class, in the order of the classes.
#[derive(Debug)]
struct ByClass<'a>(&'a [String], &'a [f64]);

impl Serialize for ByClass<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.1.len()))?;
        for (name, probability) in self.0.iter().zip(self.1) {
            map.serialize_entry(name, probability)?;
        }
        map.end()
    }
}

impl<'a> StylePrediction<'a> {
    /// `probabilities`: one for each of the classes that `names` has, at least one.
    pub fn new(names: &'a [String], probabilities: &'a [f64]) -> Self {
        let predicted = best(probabilities);
        Self {
            predicted_label: &names[predicted],
            confidence: probabilities[predicted],
            probabilities: ByClass(names, probabilities),
        }
    }

    /// For people.
    pub fn text(&self) -> String {
        let lines = self.probabilities.0.iter().zip(self.probabilities.1);
        let lines: String = lines.map(|(name, probability)| format!("  {name}: {probability:.3}\n")).collect();
        format!("{} (confidence {:.3})\n{lines}", self.predicted_label, self.confidence)
    }
}

/// The likeliest class; of several the first.
fn best(probabilities: &[f64]) -> usize {
    let better = |best: usize, index: usize| if probabilities[index] > probabilities[best] { index } else { best };
    (1..probabilities.len()).fold(0, better)
}

/// A class and its probability or score.
#[derive(Debug, Serialize)]
struct ClassScore<'a> {
    score: f64,
    label: &'a str,
}

fn scored<'a>(names: &'a [String], values: &[f64]) -> Vec<ClassScore<'a>> {
    let mut list: Vec<ClassScore<'a>> =
        names.iter().zip(values).map(|(label, &score)| ClassScore { score, label }).collect();
    list.sort_by(|a, b| b.score.total_cmp(&a.score));
    list
}

/// The answer of `/predict`, in JSON, with classes in the model's order.
pub(super) fn predict_answer(
    asked: &ClassifyRequest,
    classifier: &dyn TextClassifier,
    found: &[ClassifiedText],
) -> Result<String, Refusal> {
    let names = match (asked.is_english, classifier.english()) {
        (true, Some(english)) => english,
        (true, None) => {
            return Err(Refusal::value("the model has no English names of its classes; leave `english` out"));
        }
        (false, _) => classifier.classes(),
    };
    let prediction = |text| StylePrediction::new(names, probabilities_of(text));
    let scores = |text: &ClassifiedText| scored(names, if asked.is_raw { &text.scores } else { &text.probabilities });
    let written = match asked.form {
        AnswerForm::Prediction => to_string(&prediction(&found[0])),
        AnswerForm::Scores => to_string(&scores(&found[0])),
        AnswerForm::Predictions | AnswerForm::Classify => to_string(&found.iter().map(prediction).collect::<Vec<_>>()),
        AnswerForm::ScoreLists => to_string(&found.iter().map(scores).collect::<Vec<_>>()),
    };
    Ok(written.expect("names and numbers have a form in JSON"))
}

fn probabilities_of(text: &ClassifiedText) -> &[f64] {
    &text.probabilities
}

/// The answer of `/classify`; `probs` holds logits where the client wants them as they are.
pub(super) fn classify_answer(
    asked: &ClassifyRequest,
    classifier: &dyn TextClassifier,
    found: &[ClassifiedText],
    (id, created, model): (&str, u64, &str),
) -> Value {
    let n_tokens: usize = found.iter().map(|text| text.n_tokens).sum();
    let item = |(index, text): (usize, &ClassifiedText)| {
        json!({
            "index": index,
            "label": classifier.classes()[best(&text.probabilities)],
            "probs": if asked.is_raw { &text.scores } else { &text.probabilities },
            "num_classes": text.probabilities.len(),
        })
    };
    json!({
        "id": id,
        "object": "list",
        "created": created,
        "model": model,
        "data": found.iter().enumerate().map(item).collect::<Vec<_>>(),
        "usage": {
            "prompt_tokens": n_tokens,
            "total_tokens": n_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": null,
        },
    })
}

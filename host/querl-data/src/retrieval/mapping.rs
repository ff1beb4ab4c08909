//! Declarative mapping of a retrieval service: request body, passages of a response and their scores. Also the JSON functions for it:
//! templates with placeholders (`{{query}}`) and lenient reading of values.

use crate::client::http::Refusal;
use crate::error::DataError;
use crate::retrieval::{RetrievalLimits, ServiceScores};
use querl_core::config::{MappingConfig, RetrievalConfig, ScoreOrder, ServiceKind};
use querl_core::ports::RetrievalRequest;
use querl_core::records::Hit;
use serde_json::{Value, json};

/// The placeholders that a request may have.
const PLACEHOLDERS: [&str; 11] = [
    "query",
    "rewritten_query",
    "user_profile",
    "history",
    "tenant",
    "kb_name",
    "top_k",
    "score_threshold",
    "service_threshold",
    "service_top_k",
    "embedding",
];

/// Mapping of a retrieval service with all required keys.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Mapping {
    request: Value,
    list: Vec<String>,
    id: Vec<String>,
    title: Vec<String>,
    text: Vec<String>,
    score: Vec<String>,
    scale: ScoreScale,
    threshold_range: [f64; 2],
    top_k_range: [usize; 2],
    status: Vec<String>,
    success: Vec<String>,
}

/// Conversion of a service's scores to 0 to 1, higher is better.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ScoreScale {
    order: ScoreOrder,
    form: ScoreForm,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum ScoreForm {
    Range([f64; 2]),
    Half(f64),
}

/// Values for the placeholders of a request.
pub(crate) struct RequestValues<'a> {
    pub(crate) tenant: &'a str,
    pub(crate) kb_name: &'a str,
    pub(crate) embedding: Option<&'a [f32]>,
}

impl Mapping {
    /// The built-in mapping of the configured service, overridden by the keys of the configuration.
    pub(crate) fn resolve(config: &RetrievalConfig) -> Result<Self, DataError> {
        let builtin = builtin(config.service)?;
        let own = &config.mapping;
        let pointers = |key: &str, own: &Option<Vec<String>>, builtin: Option<Vec<String>>| {
            let pointers = own.clone().or(builtin).unwrap_or_default();
            check_pointers(key, &pointers).map(|()| pointers)
        };
        let required = |key: &str, own: &Option<Vec<String>>, builtin: Option<Vec<String>>| {
            let pointers = pointers(key, own, builtin)?;
            if pointers.is_empty() { Err(missing(key)) } else { Ok(pointers) }
        };
        let request = own.request.clone().or(builtin.request).ok_or_else(|| missing("request"))?;
        let request = serde_json::to_value(request)
            .map_err(|error| DataError::setting("retrieval.mapping.request", format!("has no JSON form: {error}")))?;
        check_placeholders(&request)?;
        Ok(Self {
            request,
            list: required("list", &own.list, builtin.list)?,
            id: pointers("id", &own.id, builtin.id)?,
            title: pointers("title", &own.title, builtin.title)?,
            text: required("text", &own.text, builtin.text)?,
            score: pointers("score", &own.score, builtin.score)?,
            scale: ScoreScale::resolve(own, builtin.score_order, builtin.score_range, builtin.score_half)?,
            threshold_range: range(
                "threshold_range",
                own.threshold_range.or(builtin.threshold_range),
                [f64::MIN, f64::MAX],
            )?,
            top_k_range: range("top_k_range", own.top_k_range.or(builtin.top_k_range), [0, usize::MAX])?,
            status: pointers("status", &own.status, builtin.status)?,
            success: own.success.clone().or(builtin.success).unwrap_or_default(),
        })
    }

    pub(crate) fn has_scores(&self) -> bool {
        !self.score.is_empty()
    }

    pub(crate) fn wants_embedding(&self) -> bool {
        placeholders(&self.request).contains(&"embedding")
    }

    pub(crate) fn body(
        &self,
        values: &RequestValues<'_>,
        request: &RetrievalRequest<'_>,
        limits: RetrievalLimits,
    ) -> Value {
        fill(&self.request, &|name| match name {
            "query" => json!(request.original_query),
            "rewritten_query" => json!(request.rewritten_query),
            "user_profile" => json!(request.context.user_profile),
            "history" => json!(request.context.history_summary),
            "tenant" => json!(values.tenant),
            "kb_name" => json!(values.kb_name),
            "top_k" => json!(limits.top_k),
            "score_threshold" => json!(limits.score_threshold),
            "service_threshold" => json!(self.service_threshold(limits.score_threshold)),
            "service_top_k" => json!(limits.top_k.clamp(self.top_k_range[0], self.top_k_range[1])),
            "embedding" => json!(values.embedding),
            _ => Value::Null,
        })
    }

    fn service_threshold(&self, score_threshold: f64) -> f64 {
        let [lowest, highest] = self.threshold_range;
        self.scale.of_unit(score_threshold).clamp(lowest, highest)
    }

    /// The failure that a response reports, as (status if it is a number, message); `None` if it reports success.
    pub(crate) fn failure(&self, response: &Value) -> Option<(Option<u16>, String)> {
        let mut statuses =
            self.status.iter().map(|pointer| (pointer, response.pointer(pointer).unwrap_or(&Value::Null)));
        let (pointer, status) = statuses.find(|(_, status)| !self.success.contains(&plain(status)))?;
        let number = number(status).map(|status| status as u16);
        Some((number, format!("answered with `{pointer}` {}: {}", excerpt(status), excerpt(response))))
    }

    /// The passages of a response, in the order of the response.
    pub(crate) fn hits(&self, response: &Value, scores: ServiceScores) -> Result<Vec<Hit>, Refusal> {
        let list = self.list.iter().find_map(|pointer| response.pointer(pointer)?.as_array());
        let list =
            list.ok_or_else(|| format!("no list of passages at `{}`: {}", self.list.join("`, `"), excerpt(response)))?;
        list.iter().enumerate().map(|(index, entry)| self.hit(index, entry, scores)).collect()
    }

    fn hit(&self, index: usize, entry: &Value, scores: ServiceScores) -> Result<Hit, Refusal> {
        let words = |pointers: &[String]| first(entry, pointers).map(plain).unwrap_or_default();
        let (title, text) = (words(&self.title), words(&self.text));
        let sent = first(entry, &self.score);
        let number = sent.and_then(number);
        let unit = number.and_then(|number| self.scale.to_unit(number));
        let reranker_score = match (unit, scores) {
            (Some(unit), _) => unit,
            (None, ServiceScores::Replaced) => 0.0,
            (None, ServiceScores::Required) => return Err(Refusal::misconfigured(self.no_score(index, sent))),
        };
        Ok(Hit {
            id: words(&self.id),
            text: if title.is_empty() { text } else { format!("{title}\n{text}") },
            reranker_score,
            retrieval_score: number,
            rank: 0,
        })
    }

    fn no_score(&self, index: usize, sent: Option<&Value>) -> String {
        let remedy = "set retrieval.mapping, or retrieval.rerank where the service has no scores";
        match sent {
            Some(value) => {
                format!("passage {index} has the score {}; expected {}; {remedy}", excerpt(value), self.scale)
            }
            None => format!("passage {index} has no score at `{}`; {remedy}", self.score.join("`, `")),
        }
    }
}

fn builtin(service: ServiceKind) -> Result<MappingConfig, DataError> {
    let text = match service {
        ServiceKind::Dify => include_str!("services/dify.toml"),
        ServiceKind::Ragflow => include_str!("services/ragflow.toml"),
        ServiceKind::Chatchat => include_str!("services/chatchat.toml"),
        ServiceKind::Chatchat02 => include_str!("services/chatchat_0.2.toml"),
        ServiceKind::Elasticsearch => include_str!("services/elasticsearch.toml"),
        ServiceKind::Qdrant => include_str!("services/qdrant.toml"),
        ServiceKind::GeneralRag | ServiceKind::Custom => "",
    };
    toml::from_str(text)
        .map_err(|error| DataError::setting("retrieval.service", format!("has a broken adapter: {error}")))
}

fn missing(key: &str) -> DataError {
    DataError::setting(format!("retrieval.mapping.{key}"), "is not set; retrieval.service = \"custom\" needs it")
}

fn range<T: PartialOrd + std::fmt::Debug>(key: &str, given: Option<[T; 2]>, all: [T; 2]) -> Result<[T; 2], DataError> {
    match given {
        Some([low, high]) if low <= high => Ok([low, high]),
        Some(range) => {
            let problem = format!("is {range:?}; expected two numbers, the lower first");
            Err(DataError::setting(format!("retrieval.mapping.{key}"), problem))
        }
        None => Ok(all),
    }
}

fn check_pointers(key: &str, pointers: &[String]) -> Result<(), DataError> {
    match pointers.iter().find(|pointer| !pointer.is_empty() && !pointer.starts_with('/')) {
        Some(pointer) => Err(DataError::setting(
            format!("retrieval.mapping.{key}"),
            format!("has `{pointer}`, which is no JSON pointer; write it as `/{pointer}`"),
        )),
        None => Ok(()),
    }
}

fn check_placeholders(request: &Value) -> Result<(), DataError> {
    match placeholders(request).into_iter().find(|name| !PLACEHOLDERS.contains(name)) {
        Some(name) => Err(DataError::setting(
            "retrieval.mapping.request",
            format!("has `{{{{{name}}}}}`, which stands for nothing; known are {}", PLACEHOLDERS.join(", ")),
        )),
        None => Ok(()),
    }
}

impl ScoreScale {
    fn resolve(
        own: &MappingConfig,
        order: Option<ScoreOrder>,
        range: Option<[f64; 2]>,
        half: Option<f64>,
    ) -> Result<Self, DataError> {
        let own_form = own.score_range.map(ScoreForm::Range).or(own.score_half.map(ScoreForm::Half));
        let form = own_form.or(range.map(ScoreForm::Range)).or(half.map(ScoreForm::Half));
        let form = form.unwrap_or(ScoreForm::Range([0.0, 1.0]));
        if own.score_range.is_some() && own.score_half.is_some() {
            return Err(DataError::setting(
                "retrieval.mapping.score_half",
                "is set together with score_range; leave one out",
            ));
        }
        match form {
            ScoreForm::Range([low, high]) if !low.is_finite() || !high.is_finite() || low >= high => {
                let problem = format!("is [{low:?}, {high:?}]; expected two numbers, the lower first");
                Err(DataError::setting("retrieval.mapping.score_range", problem))
            }
            _ => Ok(Self { order: own.score_order.or(order).unwrap_or(ScoreOrder::HigherIsBetter), form }),
        }
    }

    /// Converts a service's score to 0 to 1; `None` if it is outside of the scale.
    fn to_unit(self, score: f64) -> Option<f64> {
        // Rounding can make the cosine of equal vectors larger than 1.
        const ROUNDING: f64 = 1e-3;
        let share = match self.form {
            ScoreForm::Range([low, high]) => (score - low) / (high - low),
            ScoreForm::Half(_) if score < 0.0 => return None,
            ScoreForm::Half(half) => score / (score + half),
        };
        let better = match self.order {
            ScoreOrder::HigherIsBetter => share,
            ScoreOrder::LowerIsBetter => 1.0 - share,
        };
        (-ROUNDING..=1.0 + ROUNDING).contains(&better).then(|| better.clamp(0.0, 1.0))
    }

    /// The service's score for `unit`.
    fn of_unit(self, unit: f64) -> f64 {
        // The `half` scale does not include 1.
        const HIGHEST: f64 = 0.999_999;
        let share = match self.order {
            ScoreOrder::HigherIsBetter => unit,
            ScoreOrder::LowerIsBetter => 1.0 - unit,
        };
        match self.form {
            ScoreForm::Range([low, high]) => low + share * (high - low),
            ScoreForm::Half(half) => half * share.min(HIGHEST) / (1.0 - share.min(HIGHEST)),
        }
    }
}

impl std::fmt::Display for ScoreScale {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.form {
            ScoreForm::Range([low, high]) => write!(f, "{low} to {high}"),
            ScoreForm::Half(_) => f.write_str("0 or more"),
        }
    }
}

/// Names of all placeholders (`{{query}}`) in a JSON template, in order.
pub(crate) fn placeholders(template: &Value) -> Vec<&str> {
    match template {
        Value::String(text) => pieces(text).filter_map(|(_, name)| name).collect(),
        Value::Array(items) => items.iter().flat_map(placeholders).collect(),
        Value::Object(entries) => entries.values().flat_map(placeholders).collect(),
        _ => Vec::new(),
    }
}

/// Replaces the placeholders of a JSON template. A string that is only a placeholder becomes a value of its own type.
pub(crate) fn fill(template: &Value, value: &impl Fn(&str) -> Value) -> Value {
    match template {
        Value::String(text) => match sole_placeholder(text) {
            Some(name) => value(name),
            None => Value::String(fill_text(text, value)),
        },
        Value::Array(items) => items.iter().map(|item| fill(item, value)).collect(),
        Value::Object(entries) => entries.iter().map(|(key, entry)| (key.clone(), fill(entry, value))).collect(),
        other => other.clone(),
    }
}

pub(crate) fn fill_text(text: &str, value: &impl Fn(&str) -> Value) -> String {
    let mut filled = String::new();
    for (before, name) in pieces(text) {
        filled.push_str(before);
        match name.map(value) {
            Some(Value::String(text)) => filled.push_str(&text),
            Some(other) => filled.push_str(&other.to_string()),
            None => {}
        }
    }
    filled
}

fn sole_placeholder(text: &str) -> Option<&str> {
    let name = text.trim().strip_prefix("{{")?.strip_suffix("}}")?;
    (!name.contains(['{', '}'])).then(|| name.trim())
}

fn pieces(text: &str) -> impl Iterator<Item = (&str, Option<&str>)> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest?;
        let span = text.find("{{").and_then(|start| Some((start, start + text[start..].find("}}")?)));
        let Some((start, end)) = span else {
            rest = None;
            return Some((text, None));
        };
        rest = Some(&text[end + 2..]);
        Some((&text[..start], Some(text[start + 2..end].trim())))
    })
}

pub(crate) fn first<'a>(entry: &'a Value, pointers: &[impl AsRef<str>]) -> Option<&'a Value> {
    pointers.iter().find_map(|pointer| entry.pointer(pointer.as_ref()).filter(|value| !value.is_null()))
}

pub(crate) fn number(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| value.as_str()?.trim().parse().ok()).filter(|number| number.is_finite())
}

pub(crate) fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

pub(crate) fn excerpt(value: &Value) -> String {
    let text: String = value.to_string().chars().take(120).collect();
    format!("`{text}`")
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn builtin_mappings_are_complete_and_match_the_configuration_checks() {
        for service in ["dify", "ragflow", "chatchat", "chatchat_0.2", "elasticsearch", "qdrant"] {
            let config: RetrievalConfig = serde_json::from_value(json!({"kind": "http", "service": service})).unwrap();
            let mapping = Mapping::resolve(&config).unwrap();
            let kind = config.service;
            assert!(!mapping.id.is_empty(), "{service}");
            assert_eq!(mapping.has_scores(), kind.has_scores(), "{service}");
            assert_eq!(mapping.wants_embedding(), kind.wants_vector(), "{service}");
            assert_eq!(
                (!mapping.status.is_empty(), !mapping.success.is_empty()),
                (kind.has_status(), kind.has_status())
            );
            assert_eq!(mapping.top_k_range[1], kind.most_passages().unwrap_or(usize::MAX), "{service}");
        }
    }

    #[test]
    fn scores_convert_to_the_unit_range_and_back() {
        let scale = |order, form| ScoreScale { order, form };
        use ScoreOrder::{HigherIsBetter, LowerIsBetter};
        for (scale, sent, unit) in [
            (scale(HigherIsBetter, ScoreForm::Range([-1.0, 1.0])), 0.5, 0.75),
            (scale(LowerIsBetter, ScoreForm::Range([0.0, 2.0])), 0.5, 0.75),
            (scale(HigherIsBetter, ScoreForm::Half(10.0)), 30.0, 0.75),
            (scale(LowerIsBetter, ScoreForm::Half(3.0)), 1.0, 0.75),
        ] {
            assert_eq!(scale.to_unit(sent), Some(unit), "{scale:?}");
            assert!((scale.of_unit(unit) - sent).abs() < 1e-12, "{scale:?}");
        }
        let cosine = scale(HigherIsBetter, ScoreForm::Range([0.0, 1.0]));
        assert_eq!(cosine.to_unit(1.000_000_2), Some(1.0));
        assert_eq!((cosine.to_unit(7.5), cosine.to_unit(-0.5)), (None, None));
        assert_eq!(scale(HigherIsBetter, ScoreForm::Half(10.0)).to_unit(-1.0), None);
        assert!(scale(HigherIsBetter, ScoreForm::Half(10.0)).of_unit(1.0).is_finite());
    }

    fn value(name: &str) -> Value {
        match name {
            "query" => json!("鱼油 \"怎么吃\""),
            "top_k" => json!(5),
            other => json!(format!("<{other}>")),
        }
    }

    #[test]
    fn a_sole_placeholder_keeps_its_type() {
        let template =
            json!({"q": "{{ query }}", "k": "{{top_k}}", "s": "{{top_k}} of {{query}}", "n": [1, ["{{top_k}}"]]});
        let filled = fill(&template, &value);
        assert_eq!(filled, json!({"q": "鱼油 \"怎么吃\"", "k": 5, "s": "5 of 鱼油 \"怎么吃\"", "n": [1, [5]]}));
    }

    #[test]
    fn incomplete_placeholders_stay() {
        assert_eq!(fill(&json!("{{query"), &value), json!("{{query"));
        assert_eq!(fill(&json!("a }} b {{x}}"), &value), json!("a }} b <x>"));
        assert_eq!(placeholders(&json!(["{{a}}{{b}}", {"k": "x {{ c }}"}])), ["a", "b", "c"]);
    }
}

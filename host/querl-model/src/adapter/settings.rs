//! Settings of an adapter, and the layers of a decoder that they select, by name or by PEFT's regular expressions.

use crate::DecoderConfig;
use fancy_regex::Regex;
use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeSet;
use std::fmt;
use std::marker::PhantomData;

/// Settings of a LoRA adapter, named as in PEFT's `LoraConfig`.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraSettings {
    /// Rank of the matrices A and B.
    pub rank: usize,
    /// Numerator of the scale `alpha / rank`.
    pub alpha: f64,
    /// Whether the scale is `alpha / sqrt(rank)` instead of `alpha / rank`.
    ///
    /// Source: Kalajdzievski 2023, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA".
    pub use_rslora: bool,
    /// Whether each output has a trained magnitude (DoRA).
    ///
    /// Source: Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation".
    pub use_dora: bool,
    /// Dropout probability on an adapter's inputs in training. A forward pass applies it only if [`crate::Pass::dropout`] is set.
    pub dropout: f64,
    /// The layers to adapt.
    pub target_modules: Modules,
    /// Layers that are not adapted although `target_modules` selects them.
    pub exclude_modules: Option<Modules>,
    /// Indices of the transformer layers to adapt; empty means all.
    pub layers_to_transform: Vec<usize>,
    /// Ranks of layers by name pattern, in place of `rank`.
    pub rank_pattern: Patterns<usize>,
    /// Alphas of layers by name pattern, in place of `alpha`.
    pub alpha_pattern: Patterns<f64>,
    /// Modules that are trained and saved in full: `embed_tokens`, `lm_head`; a classifier's `score` is not trained by the adapter.
    pub modules_to_save: Vec<String>,
    /// Whether a tied embedding and head are trained as one, in `modules_to_save` or by LoRA; `Apart` on a model that does not tie them.
    pub saved_copies: SavedCopies,
}

/// How many trained copies, or LoRA pairs, a tied embedding and head have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SavedCopies {
    /// Embedding and head have separate copies; one that is not saved stays as in the base. PEFT's default.
    #[default]
    Apart,
    /// Embedding and head share one copy or one LoRA pair: PEFT's `ensure_weight_tying`.
    Tied,
}

/// A selection of linear layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Written", into = "Written")]
pub enum Modules {
    /// All linear layers except the head.
    AllLinear,
    /// Layers whose path equals one of these names or ends in a dot and one of them.
    Named(Vec<String>),
    /// Layers whose whole path matches this regular expression.
    Pattern(String),
}

/// `target_modules` in a file: a list, a regular expression or the word `all-linear`.
#[derive(Clone, Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    List(Vec<String>),
    Text(String),
}

const ALL_LINEAR: &str = "all-linear";

/// Names of the layers that [`Modules::AllLinear`] selects, sorted.
const LINEAR_NAMES: [&str; 7] = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"];

pub(crate) const EMBEDDING: &str = "model.embed_tokens";
pub(crate) const HEAD: &str = "lm_head";
/// Path of the classification head.
pub(crate) const SCORE: &str = "score";

impl From<Written> for Modules {
    fn from(written: Written) -> Self {
        match written {
            Written::Text(text) if text.eq_ignore_ascii_case(ALL_LINEAR) => Self::AllLinear,
            Written::Text(text) => Self::Pattern(text),
            Written::List(names) if names == [ALL_LINEAR] => Self::AllLinear,
            Written::List(names) => Self::Named(names),
        }
    }
}

impl From<Modules> for Written {
    fn from(modules: Modules) -> Self {
        match modules {
            Modules::AllLinear => Self::List(LINEAR_NAMES.map(String::from).into()),
            Modules::Named(names) => Self::List(names),
            Modules::Pattern(pattern) => Self::Text(pattern),
        }
    }
}

type Matcher<'a> = Box<dyn Fn(&str) -> bool + 'a>;

impl Modules {
    /// The selection of a list in a configuration: `["all-linear"]` or the last parts of layers' paths.
    pub fn from_names(names: &[String]) -> Self {
        Written::List(names.to_vec()).into()
    }

    /// A predicate on paths. `key`: the configuration key, for errors.
    fn matcher(&self, key: &str) -> Result<Matcher<'_>, String> {
        Ok(match self {
            Self::AllLinear => Box::new(|path| path != EMBEDDING && path != HEAD),
            Self::Named(names) => Box::new(move |path| names.iter().any(|name| is_named(path, name))),
            Self::Pattern(pattern) => {
                let pattern = regex(&format!("^(?:{pattern})$"), pattern, key)?;
                Box::new(move |path| is_match(&pattern, path))
            }
        })
    }
}

/// Whether `path` is `name` or ends in a dot and `name`.
fn is_named(path: &str, name: &str) -> bool {
    path.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LayerKind {
    Linear,
    Embedding,
    /// A head with the transposed matrices of the embedding, which is the previous layer of the plan.
    TiedHead,
}

#[derive(Debug, Clone)]
pub(super) struct LayerPlan {
    pub(super) path: String,
    pub(super) kind: LayerKind,
    /// Columns of A: a linear layer's inputs, or tokens of the vocabulary.
    pub(super) n_in: usize,
    /// Rows of B: outputs, or the embedding's width.
    pub(super) n_out: usize,
    pub(super) rank: usize,
    pub(super) scale: f32,
}

impl LoraSettings {
    /// Settings that adapt all linear layers of a decoder, with the scale `alpha / rank`.
    pub fn all_linear(rank: usize, alpha: f64) -> Self {
        Self {
            rank,
            alpha,
            use_rslora: false,
            use_dora: false,
            dropout: 0.0,
            target_modules: Modules::AllLinear,
            exclude_modules: None,
            layers_to_transform: Vec::new(),
            rank_pattern: Patterns::default(),
            alpha_pattern: Patterns::default(),
            modules_to_save: Vec::new(),
            saved_copies: SavedCopies::Apart,
        }
    }

    /// These settings on a model: PEFT ignores `ensure_weight_tying` where embedding and head are not tied.
    pub(super) fn on_model(mut self, config: &DecoderConfig) -> Self {
        if !config.tie_word_embeddings {
            self.saved_copies = SavedCopies::Apart;
        }
        self
    }

    /// Whether a head is adapted with the embedding's matrices. PEFT compares a regular expression with the last part of the path only.
    ///
    /// Source: PEFT's `BaseTuner._check_tied_modules`.
    fn ties_pair(&self, is_target: &dyn Fn(&str) -> bool) -> bool {
        let ends = match self.target_modules {
            Modules::Pattern(_) => ["embed_tokens", HEAD],
            _ => [EMBEDDING, HEAD],
        };
        self.saved_copies == SavedCopies::Tied && ends.into_iter().any(is_target)
    }

    fn scale(&self, rank: usize, alpha: f64) -> f32 {
        let rank = rank as f64;
        (alpha / if self.use_rslora { rank.sqrt() } else { rank }) as f32
    }

    /// Every layer of a decoder that these settings adapt, in the decoder's order, with its rank and scale.
    ///
    /// Source: PEFT's `check_target_module_exists` and `LoraModel._create_and_replace`.
    pub(super) fn plan(&self, config: &DecoderConfig) -> Result<Vec<LayerPlan>, String> {
        let is_target = self.target_modules.matcher("target_modules")?;
        let excluded = self.exclude_modules.as_ref().map(|modules| modules.matcher("exclude_modules")).transpose()?;
        let (ranks, alphas) =
            (self.rank_pattern.compile("rank_pattern")?, self.alpha_pattern.compile("alpha_pattern")?);
        let saved = self.saved_modules()?;
        let ties_pair = self.ties_pair(&*is_target);
        let mut plan: Vec<LayerPlan> = Vec::new();
        for (path, kind, n_out, n_in) in candidates(config) {
            let embedding = plan.last().filter(|layer| ties_pair && layer.kind == LayerKind::Embedding);
            let tied_rank = embedding.map(|embedding| embedding.rank);
            let is_excluded = excluded.as_ref().is_some_and(|is_excluded| is_excluded(&path));
            let is_adapted =
                is_target(&path) && !is_excluded && !saved.contains(path.as_str()) && self.is_in_range(&path);
            if !is_adapted && tied_rank.is_none() {
                continue;
            }
            let rank = first(&ranks, &path).unwrap_or(self.rank);
            let alpha = first(&alphas, &path).unwrap_or(self.alpha);
            if self.use_dora && kind == LayerKind::Embedding {
                return Err("use_dora on `embed_tokens` is not supported; leave it out of target_modules".into());
            }
            if rank == 0 {
                return Err(format!("rank of layer `{path}` is 0; expected at least 1"));
            }
            let scale = self.scale(rank, alpha);
            let (kind, rank) = tied_rank.map_or((kind, rank), |rank| (LayerKind::TiedHead, rank));
            plan.push(LayerPlan { kind, n_in, n_out, rank, scale, path });
        }
        if plan.is_empty() && saved.is_empty() {
            return Err(format!("target_modules: no layer of this model is among them; {}", expected()));
        }
        Ok(plan)
    }

    /// Checks that each name in `target_modules` matches a layer of the decoder.
    pub(super) fn check_names(&self, config: &DecoderConfig) -> Result<(), String> {
        let Modules::Named(names) = &self.target_modules else { return Ok(()) };
        let paths: Vec<String> = candidates(config).into_iter().map(|(path, ..)| path).collect();
        match names.iter().find(|name| !paths.iter().any(|path| is_named(path, name))) {
            Some(name) => Err(format!("target_modules: `{name}` is not a layer of this model; {}", expected())),
            None => Ok(()),
        }
    }

    pub(super) fn saved_modules(&self) -> Result<BTreeSet<&'static str>, String> {
        let mut paths = BTreeSet::new();
        for name in &self.modules_to_save {
            match [EMBEDDING, HEAD, SCORE].into_iter().find(|path| is_named(path, name)) {
                Some(path) => drop(paths.insert(path)),
                // PEFT lists both possible names of a classifier's head, whichever the model has.
                None if name == "classifier" => {}
                None => {
                    return Err(format!(
                        "modules_to_save: `{name}` is not supported; expected `embed_tokens`, `lm_head` or `score`"
                    ));
                }
            }
        }
        if self.saved_copies == SavedCopies::Tied && (paths.contains(EMBEDDING) || paths.contains(HEAD)) {
            paths.extend([EMBEDDING, HEAD]);
        }
        Ok(paths)
    }

    fn is_in_range(&self, path: &str) -> bool {
        let number = path.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse().ok());
        self.layers_to_transform.is_empty() || number.is_some_and(|number| self.layers_to_transform.contains(&number))
    }
}

fn expected() -> String {
    format!(
        "expected `{ALL_LINEAR}`, some of `{}`, `embed_tokens`, `lm_head`, or a regular expression",
        LINEAR_NAMES.join("`, `")
    )
}

/// All layers that can be adapted: path, kind, rows of B, columns of A.
fn candidates(config: &DecoderConfig) -> Vec<(String, LayerKind, usize, usize)> {
    let (v, h) = (config.vocab_size, config.hidden_size);
    let mut layers: Vec<_> =
        config.linear_layers().map(|(path, n_out, n_in)| (path, LayerKind::Linear, n_out, n_in)).collect();
    layers.push((EMBEDDING.to_owned(), LayerKind::Embedding, h, v));
    layers.push((HEAD.to_owned(), LayerKind::Linear, v, h));
    layers
}

/// Values by name pattern, in the order of the file: the first pattern that matches a layer applies.
///
/// A pattern matches a name if it matches the whole name or all that follows one of the name's dots.
///
/// Source: PEFT's `get_pattern_key` (`peft/utils/other.py`).
#[derive(Debug, Clone, PartialEq)]
pub struct Patterns<T>(Vec<(String, T)>);

impl<T> Default for Patterns<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> FromIterator<(String, T)> for Patterns<T> {
    fn from_iter<I: IntoIterator<Item = (String, T)>>(values: I) -> Self {
        Self(values.into_iter().collect())
    }
}

impl<T: Copy> Patterns<T> {
    /// Whether there are no patterns.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Patterns with their values, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, T)> {
        self.0.iter().map(|(pattern, value)| (pattern.as_str(), *value))
    }

    /// The compiled patterns; `key` names them in errors.
    fn compile(&self, key: &str) -> Result<Vec<(Regex, T)>, String> {
        let compiled =
            |(pattern, value): &(String, T)| Ok((regex(&format!(r"^(.*\.)?({pattern})$"), pattern, key)?, *value));
        self.0.iter().map(compiled).collect()
    }
}

fn first<T: Copy>(patterns: &[(Regex, T)], name: &str) -> Option<T> {
    patterns.iter().find(|(pattern, _)| is_match(pattern, name)).map(|(_, value)| *value)
}

/// True if the pattern matches. A pattern that exceeds the step limit does not match.
fn is_match(pattern: &Regex, name: &str) -> bool {
    pattern.is_match(name).unwrap_or(false)
}

fn regex(text: &str, pattern: &str, key: &str) -> Result<Regex, String> {
    Regex::new(text).map_err(|error| format!("{key}: `{pattern}` is not a regular expression: {error}"))
}

impl<T: Serialize> Serialize for Patterns<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (pattern, value) in &self.0 {
            map.serialize_entry(pattern, value)?;
        }
        map.end()
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Patterns<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for InOrder<T> {
            type Value = Patterns<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of patterns and values")
            }

            fn visit_unit<E>(self) -> Result<Self::Value, E> {
                Ok(Patterns::default())
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut values = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    values.push(entry);
                }
                Ok(Patterns(values))
            }
        }
        deserializer.deserialize_any(InOrder(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// ```python
    /// from peft.utils.other import get_pattern_key
    /// keys = ["layers\\.0\\..*q_proj", "q_proj", "k_pro", "^model.layers.1.mlp.up_proj", "(?!o)[a-z]_proj"]
    /// [get_pattern_key(keys, f"model.layers.{name}") for name in names]
    /// ```
    #[test]
    fn patterns_fit_as_in_peft() {
        let text = r#"{"layers\\.0\\..*q_proj": 1, "q_proj": 2, "k_pro": 3, "^model.layers.1.mlp.up_proj": 4, "(?!o)[a-z]_proj": 5}"#;
        let patterns: Patterns<usize> = serde_json::from_str(text).unwrap();
        assert_eq!(
            serde_json::to_string(&patterns).unwrap().replace(": ", ":"),
            text.replace(": ", ":").replace(", ", ",")
        );
        let patterns = patterns.compile("rank_pattern").unwrap();
        let names =
            ["0.self_attn.q_proj", "1.self_attn.q_proj", "1.self_attn.k_proj", "1.mlp.up_proj", "0.self_attn.o_proj"];
        let found = names.map(|name| first(&patterns, &format!("model.layers.{name}")));
        // `^` comes after an optional prefix in PEFT's pattern, and matches with an empty prefix.
        assert_eq!(found, [Some(1), Some(2), Some(5), Some(4), None]);
    }

    #[test]
    fn a_broken_pattern_is_named() {
        let patterns: Patterns<usize> = [("q_(proj".to_owned(), 2)].into_iter().collect();
        let error = patterns.compile("rank_pattern").unwrap_err();
        assert!(error.starts_with("rank_pattern: `q_(proj` is not a regular expression: "), "{error}");
    }
}

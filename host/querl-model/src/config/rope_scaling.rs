//! RoPE for contexts longer than those of pretraining: how a configuration names the scaling, and the scaled frequencies.
//!
//! Source: transformers 5.17, `modeling_rope_utils.py`.

use querl_core::model_config::{Keys, NoOp, bounds};

/// How RoPE's frequencies are scaled for contexts longer than those of pretraining.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// Linear scaling (position interpolation): positions are divided by a factor.
    Linear {
        /// Divisor of positions.
        factor: f64,
    },
    /// Dynamic NTK: no effect on sequences up to the model's positions. Longer sequences are refused, since their frequencies would depend
    /// on the sequence's length.
    Dynamic {
        /// Factor on the RoPE base for sequences beyond the model's positions.
        factor: f64,
    },
    /// Scaling of Llama 3.1.
    Llama3(Llama3Scaling),
    /// YaRN: Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models".
    Yarn(YarnScaling),
}

/// Scaling of Llama 3.1: low frequencies are divided by a factor, high ones are kept, those between are interpolated.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Llama3Scaling {
    /// Factor by which low frequencies are divided.
    pub factor: f64,
    /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are scaled in full.
    pub low_freq_factor: f64,
    /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are not scaled.
    pub high_freq_factor: f64,
    /// Maximum number of positions in pretraining.
    pub original_max_position_embeddings: usize,
}

/// YaRN: frequencies are interpolated by a ramp over dimensions, and cosines and sines are multiplied by a factor.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct YarnScaling {
    /// Factor by which low frequencies are divided.
    pub factor: f64,
    /// Maximum number of positions in pretraining.
    pub original_max_position_embeddings: usize,
    /// Dimensions with more rotations than this over the positions of pretraining keep their frequency.
    pub beta_fast: f64,
    /// Dimensions with fewer rotations than this are scaled in full.
    pub beta_slow: f64,
    /// Factor on cosines and sines.
    pub attention_factor: f64,
    /// Whether the ends of the ramp are rounded to whole dimensions.
    pub truncate: bool,
}

/// RoPE base and scaling of a configuration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rope {
    pub(super) theta: f64,
    pub(super) scaling: Option<RopeScaling>,
}

/// Default of transformers' `RotaryEmbeddingConfigMixin`.
const DEFAULT_THETA: f64 = 10_000.0;
const DEFAULT_BETA_FAST: f64 = 32.0;
const DEFAULT_BETA_SLOW: f64 = 1.0;

/// Keys of every rope type.
const COMMON: [&str; 3] = ["rope_theta", "rope_type", "type"];

impl Rope {
    /// Reads `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5). If both exist they must be equal.
    pub(super) fn read(keys: Keys<'_>, max_position_embeddings: usize) -> Result<Self, String> {
        let original = keys.optional_size("original_max_position_embeddings", bounds::POSITIONS)?;
        let scaling_of = |section: Option<Keys<'_>>| match section {
            Some(section) => Section { keys: section, original, max_position_embeddings }.scaling(),
            None => Ok(None),
        };
        let (scaling, parameters) = (section(keys, "rope_scaling")?, section(keys, "rope_parameters")?);
        let (used, other) = if scaling.is_some() { (scaling, parameters) } else { (parameters, None) };
        let theta_of = |section: Option<Keys<'_>>| section.map_or(Ok(None), |section| section.number("rope_theta"));
        let theta = theta_of(used)?.or(keys.number("rope_theta")?).unwrap_or(DEFAULT_THETA);
        if theta <= 1.0 {
            return Err(format!("rope_theta is {theta}; expected a number above 1"));
        }
        let found = Self { theta, scaling: scaling_of(used)? };
        let (other_theta, other_scaling) = (theta_of(other)?, scaling_of(other)?);
        let is_same = other_theta.is_none_or(|other| other == theta)
            && (other_scaling.is_none() || other_scaling == found.scaling);
        match is_same {
            true => Ok(found),
            false => {
                Err("`rope_parameters` and `rope_scaling` differ; remove one of them, after moving its `rope_theta`"
                    .into())
            }
        }
    }

    /// Maximum number of tokens of a sequence: `max_position_embeddings`, times the factor with linear scaling, and with YaRN at least the
    /// positions of pretraining times the factor, since some YaRN configurations have the positions of pretraining in
    /// `max_position_embeddings`. vLLM computes the same products.
    pub(super) fn max_positions(&self, max_position_embeddings: usize) -> Result<usize, String> {
        let (name, original, factor) = match self.scaling {
            Some(RopeScaling::Linear { factor }) => ("linear scaling", max_position_embeddings, factor),
            Some(RopeScaling::Yarn(yarn)) => ("YaRN", yarn.original_max_position_embeddings, yarn.factor),
            _ => return Ok(max_position_embeddings),
        };
        let extended = original as f64 * factor;
        match extended <= bounds::POSITIONS as f64 {
            true => Ok(max_position_embeddings.max(extended as usize)),
            false => Err(format!("describes {extended} positions with {name}; expected at most {}", bounds::POSITIONS)),
        }
    }
}

/// The parameters in a section, if they are equal for all layer types.
fn section<'a>(keys: Keys<'a>, key: &'a str) -> Result<Option<Keys<'a>>, String> {
    let Some(section) = keys.object(key)? else { return Ok(None) };
    let nested = section.values().find(|(_, value)| value.is_object());
    let Some((layer_type, first)) = nested else { return Ok(Some(section)) };
    match section.all_are(first) {
        true => section.object(layer_type),
        false => Err(keys.unexpected(key, "the same parameters for all layer types")),
    }
}

/// `rope_scaling` or `rope_parameters`.
struct Section<'a> {
    keys: Keys<'a>,
    /// `original_max_position_embeddings` at the top level of the file.
    original: Option<usize>,
    max_position_embeddings: usize,
}

impl Section<'_> {
    /// The scaling; `None` if positions are not scaled.
    fn scaling(&self) -> Result<Option<RopeScaling>, String> {
        let rope_type = match (self.keys.text("rope_type")?, self.keys.text("type")?) {
            (Some(rope_type), Some(other)) if rope_type != other => {
                return Err(format!("rope_type is `{rope_type}` and type is `{other}`; expected one rope type"));
            }
            (rope_type, other) => rope_type.or(other).unwrap_or("default"),
        };
        match rope_type {
            "default" => self.allow(rope_type, &[]).map(|()| None),
            "linear" => {
                self.allow(rope_type, &["factor"])?;
                Ok(Some(RopeScaling::Linear { factor: self.positive("factor")? }))
            }
            "dynamic" => self.dynamic().map(Some),
            "llama3" => self.llama3().map(Some),
            "yarn" => self.yarn().map(Some),
            other => Err(format!(
                "rope type `{other}` is not supported; expected `default`, `linear`, `dynamic`, `llama3` or `yarn`"
            )),
        }
    }

    /// Refuses unknown keys, which may change the frequencies.
    fn allow(&self, rope_type: &str, keys: &[&str]) -> Result<(), String> {
        let known: Vec<&str> = COMMON.iter().chain(keys).copied().collect();
        let checked = self.keys.check(&known, &[("partial_rotary_factor", NoOp::Number(1.0))]);
        checked.map_err(|message| format!("rope type `{rope_type}`: {message}"))
    }

    fn dynamic(&self) -> Result<RopeScaling, String> {
        self.allow("dynamic", &["factor", "original_max_position_embeddings"])?;
        if self.original()? != self.max_position_embeddings {
            let expected =
                format!("max_position_embeddings, {}, with rope type `dynamic`", self.max_position_embeddings);
            return Err(self.keys.unexpected("original_max_position_embeddings", &expected));
        }
        Ok(RopeScaling::Dynamic { factor: self.positive("factor")? })
    }

    fn llama3(&self) -> Result<RopeScaling, String> {
        self.allow("llama3", &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])?;
        let scaling = Llama3Scaling {
            factor: self.positive("factor")?,
            low_freq_factor: self.positive("low_freq_factor")?,
            high_freq_factor: self.positive("high_freq_factor")?,
            original_max_position_embeddings: self.original_of_pretraining()?,
        };
        match scaling.low_freq_factor < scaling.high_freq_factor {
            true => Ok(RopeScaling::Llama3(scaling)),
            false => Err("rope type `llama3`: expected 0 < low_freq_factor < high_freq_factor".into()),
        }
    }

    fn yarn(&self) -> Result<RopeScaling, String> {
        let keys = [
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "factor",
            "finetuned",
            "mscale",
            "mscale_all_dim",
            "original_max_position_embeddings",
            "truncate",
        ];
        self.allow("yarn", &keys)?;
        // As in transformers, 0 counts as unset.
        let given = |key: &str| Ok::<_, String>(self.keys.number(key)?.filter(|number| *number != 0.0));
        let factor = self.positive("factor")?;
        let attention_factor = match (self.keys.number("attention_factor")?, given("mscale")?, given("mscale_all_dim")?)
        {
            (Some(attention_factor), ..) => attention_factor,
            (None, Some(mscale), Some(all_dim)) => magnitude_scale(factor, mscale) / magnitude_scale(factor, all_dim),
            _ => magnitude_scale(factor, 1.0),
        };
        let scaling = YarnScaling {
            factor,
            original_max_position_embeddings: self.original_of_pretraining()?,
            beta_fast: given("beta_fast")?.unwrap_or(DEFAULT_BETA_FAST),
            beta_slow: given("beta_slow")?.unwrap_or(DEFAULT_BETA_SLOW),
            attention_factor,
            truncate: !self.keys.contains("truncate") || self.keys.flag("truncate")? == Some(true),
        };
        if !(scaling.beta_slow > 0.0 && scaling.beta_slow <= scaling.beta_fast) {
            return Err("rope type `yarn`: expected 0 < beta_slow <= beta_fast".into());
        }
        match attention_factor.is_finite() && attention_factor > 0.0 {
            true => Ok(RopeScaling::Yarn(scaling)),
            false => {
                Err(format!("rope type `yarn`: attention_factor is {attention_factor}; expected a number above 0"))
            }
        }
    }

    fn positive(&self, key: &str) -> Result<f64, String> {
        match self.keys.number(key)? {
            None => Err(self.keys.missing(key)),
            Some(number) if number > 0.0 => Ok(number),
            Some(_) => Err(self.keys.unexpected(key, "a number above 0")),
        }
    }

    /// `original_max_position_embeddings` of this section, or `max_position_embeddings`.
    fn original(&self) -> Result<usize, String> {
        let own = self.keys.optional_size("original_max_position_embeddings", bounds::POSITIONS)?;
        Ok(own.unwrap_or(self.max_position_embeddings))
    }

    /// The same, but the key at the top level of the file also counts.
    fn original_of_pretraining(&self) -> Result<usize, String> {
        let own = self.keys.optional_size("original_max_position_embeddings", bounds::POSITIONS)?;
        match (own, self.original) {
            (Some(own), Some(other)) if own != other => {
                Err(format!("original_max_position_embeddings is {own} and {other}; expected one number"))
            }
            _ => Ok(self.original.or(own).unwrap_or(self.max_position_embeddings)),
        }
    }
}

/// `get_mscale` of transformers.
fn magnitude_scale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

/// Inverse RoPE frequencies `(D / 2)`, and the factor on cosines and sines.
pub(crate) fn inverse_frequencies(head_dim: usize, theta: f64, scaling: Option<&RopeScaling>) -> (Vec<f32>, f32) {
    let periods = (0..head_dim / 2).map(|j| theta.powf(2.0 * j as f64 / head_dim as f64) as f32);
    match scaling {
        None | Some(RopeScaling::Dynamic { .. }) => (periods.map(|period| 1.0 / period).collect(), 1.0),
        Some(RopeScaling::Linear { factor }) => (periods.map(|period| 1.0 / period / *factor as f32).collect(), 1.0),
        Some(RopeScaling::Llama3(llama3)) => (periods.map(|period| llama3.scaled(1.0 / period)).collect(), 1.0),
        Some(RopeScaling::Yarn(yarn)) => {
            let keeps = yarn.kept_shares(head_dim, theta);
            let frequencies = periods.zip(keeps).map(|(period, kept)| yarn.scaled(period, kept)).collect();
            (frequencies, yarn.attention_factor as f32)
        }
    }
}

impl Llama3Scaling {
    /// The scaled inverse frequency: `_compute_llama3_parameters`.
    fn scaled(&self, inverse_frequency: f32) -> f32 {
        let (low, high) = (self.low_freq_factor, self.high_freq_factor);
        let original = self.original_max_position_embeddings as f64;
        let wavelength = std::f32::consts::TAU / inverse_frequency;
        if wavelength < (original / high) as f32 {
            return inverse_frequency;
        }
        let divided = inverse_frequency / self.factor as f32;
        if wavelength > (original / low) as f32 {
            return divided;
        }
        let smooth = (original as f32 / wavelength - low as f32) / (high - low) as f32;
        (1.0 - smooth) * inverse_frequency / self.factor as f32 + smooth * inverse_frequency
    }
}

impl YarnScaling {
    /// For each pair of dimensions, the share of its unscaled frequency that is kept: `_compute_yarn_parameters`.
    fn kept_shares(&self, head_dim: usize, theta: f64) -> impl Iterator<Item = f32> {
        let dim = head_dim as f64;
        let dimension_of = |n_rotations: f64| {
            let positions = self.original_max_position_embeddings as f64;
            dim * (positions / (n_rotations * std::f64::consts::TAU)).ln() / (2.0 * theta.ln())
        };
        let (low, high) = (dimension_of(self.beta_fast), dimension_of(self.beta_slow));
        let (low, high) = if self.truncate { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, high) = (low.max(0.0), high.min(dim - 1.0));
        let width = if low == high { 0.001 } else { high - low };
        (0..head_dim / 2).map(move |j| 1.0 - ((j as f32 - low as f32) / width as f32).clamp(0.0, 1.0))
    }

    fn scaled(&self, period: f32, kept: f32) -> f32 {
        let (own, divided) = (1.0 / period, 1.0 / (self.factor as f32 * period));
        divided * (1.0 - kept) + own * kept
    }
}

impl std::fmt::Display for RopeScaling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Linear { factor } => write!(f, "linear, factor {factor}"),
            Self::Dynamic { factor } => write!(f, "dynamic, factor {factor}"),
            Self::Llama3(scaling) => {
                let original = scaling.original_max_position_embeddings;
                write!(f, "llama3, factor {}, pretrained with {original} positions", scaling.factor)
            }
            Self::Yarn(scaling) => {
                let original = scaling.original_max_position_embeddings;
                write!(f, "yarn, factor {}, pretrained with {original} positions", scaling.factor)
            }
        }
    }
}

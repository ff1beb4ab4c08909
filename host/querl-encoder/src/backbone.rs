//! The network below every head.

use crate::directory::{Architecture, Directory};
use crate::error::EncoderError;
use crate::tokens::Batch;
use candle_core::Tensor;
use candle_nn::VarBuilder;
use candle_transformers::models::{bert, xlm_roberta};
use serde_json::{Value, json};

/// Hidden states of the last layer.
pub(crate) enum Backbone {
    Bert(bert::BertModel),
    XlmRoberta(xlm_roberta::XLMRobertaModel),
}

impl Backbone {
    /// The network in `weights`, with or without the prefix that a head's checkpoint puts before its names.
    ///
    /// # Errors
    /// A setting or a weight is missing or of another shape.
    pub(crate) fn load(directory: &Directory, weights: &VarBuilder<'static>) -> Result<Self, EncoderError> {
        let config = || settings(&directory.config, directory.pad_id());
        let unfit = |error: serde_json::Error| EncoderError::file(&directory.path("config.json"), error);
        let misfit = |error: candle_core::Error| EncoderError::file(&directory.path("model.safetensors"), error);
        match directory.architecture {
            Architecture::Bert => {
                let config: bert::Config = serde_json::from_value(config()).map_err(unfit)?;
                bert::BertModel::load(below(weights, "bert"), &config).map(Self::Bert).map_err(misfit)
            }
            Architecture::XlmRoberta => {
                let config: xlm_roberta::Config = serde_json::from_value(config()).map_err(unfit)?;
                let weights = below(weights, "roberta");
                xlm_roberta::XLMRobertaModel::new(&config, weights).map(Self::XlmRoberta).map_err(misfit)
            }
        }
    }

    /// `(B, T, H)` f32.
    pub(crate) fn forward(&self, batch: &Batch) -> candle_core::Result<Tensor> {
        match self {
            Self::Bert(model) => model.forward(&batch.ids, &batch.type_ids, Some(&batch.mask)),
            Self::XlmRoberta(model) => model.forward(&batch.ids, &batch.mask, &batch.type_ids, None, None, None),
        }
    }
}

fn below(weights: &VarBuilder<'static>, prefix: &str) -> VarBuilder<'static> {
    let name = "embeddings.word_embeddings.weight";
    if weights.contains_tensor(&format!("{prefix}.{name}")) { weights.pp(prefix) } else { weights.clone() }
}

/// What newer versions of transformers leave out of a file where it is the default.
fn settings(config: &Value, pad_id: u32) -> Value {
    let mut settings = json!({
        "position_embedding_type": "absolute", "type_vocab_size": 2, "initializer_range": 0.02, "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1, "layer_norm_eps": 1e-12, "hidden_act": "gelu", "pad_token_id": pad_id,
    });
    let (own, all) = (config.as_object(), settings.as_object_mut());
    if let (Some(own), Some(all)) = (own, all) {
        all.extend(own.iter().filter(|(_, value)| !value.is_null()).map(|(key, value)| (key.clone(), value.clone())));
    }
    settings
}

//! BERT-type models of the bge family, on the CPU.
//!
//! In: a Hugging Face directory (config.json, tokenizer.json, model.safetensors) of architecture `BertModel`, `XLMRobertaModel`,
//! `BertForSequenceClassification` or `XLMRobertaForSequenceClassification`. Out: vectors of texts, or how well passages answer a
//! query. This crate refuses to know indexes, services and training.

mod backbone;
mod cross_encoder;
mod directory;
mod embedding;
mod error;
mod tokens;

pub use cross_encoder::CrossEncoder;
pub use embedding::EmbeddingModel;
pub use error::EncoderError;

//! Building an index.

use super::StoredPassage;
use crate::error::DataError;
use crate::passages::Passage;
use crate::reranker::{PassageTraits, Reranker};
use crate::segment::Segmenter;
use crate::text::fold;
use std::path::Path;
use tantivy::schema::{IndexRecordOption, STORED, Schema, TextFieldIndexing, TextOptions};
use tantivy::tokenizer::TokenizerManager;
use tantivy::{Index, TantivyDocument};

/// For the words of one segment; more are taken from the system as they come.
const WRITER_MEMORY_BYTES: usize = 64 << 20;

/// Writes the index of a knowledge base into a folder: one segment, passages in the order of the file.
///
/// # Errors
/// The index cannot be written.
pub(super) fn build(
    folder: &Path,
    knowledge_base: &Path,
    passages: Vec<Passage>,
    segmenter: &Segmenter,
    reranker: Option<&Reranker>,
) -> Result<(), DataError> {
    write(folder, passages, segmenter, reranker)
        .map_err(|error| DataError::file(knowledge_base, format!("cannot be indexed in {}: {error}", folder.display())))
}

fn write(
    folder: &Path,
    passages: Vec<Passage>,
    segmenter: &Segmenter,
    reranker: Option<&Reranker>,
) -> tantivy::Result<()> {
    let schema = schema();
    let fields = super::Fields::of(&schema)?;
    let tokenizers = TokenizerManager::default();
    tokenizers.register(ANALYSER, segmenter.analyser());
    let directory = tantivy::directory::MmapDirectory::open(folder)?;
    let builder = Index::builder().schema(schema).tokenizers(tokenizers);
    let mut writer = builder.single_segment_index_writer(directory, WRITER_MEMORY_BYTES)?;
    for passage in passages {
        let traits = reranker.map_or_else(PassageTraits::default, |reranker| reranker.traits(&passage));
        let mut document = TantivyDocument::new();
        document.add_text(fields.title, fold(&passage.title));
        document.add_text(fields.text, fold(&passage.text));
        traits.terms.iter().for_each(|term| document.add_text(fields.terms, term));
        let stored = serde_json::to_string(&StoredPassage { passage, traits });
        document
            .add_text(fields.stored, stored.map_err(|error| tantivy::TantivyError::InternalError(error.to_string()))?);
        writer.add_document(document)?;
    }
    writer.finalize()?;
    Ok(())
}

const ANALYSER: &str = "querl";

fn schema() -> Schema {
    let mut schema = Schema::builder();
    let words = TextFieldIndexing::default().set_tokenizer(ANALYSER).set_index_option(IndexRecordOption::WithFreqs);
    let words = TextOptions::default().set_indexing_options(words);
    let whole = TextFieldIndexing::default()
        .set_tokenizer("raw")
        .set_fieldnorms(false)
        .set_index_option(IndexRecordOption::Basic);
    schema.add_text_field("stored", STORED);
    schema.add_text_field("title", words.clone());
    schema.add_text_field("text", words);
    schema.add_text_field("terms", TextOptions::default().set_indexing_options(whole));
    schema.build()
}

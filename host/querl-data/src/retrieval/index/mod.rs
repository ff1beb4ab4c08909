//! A full-text index of a knowledge base, built once on disk and mapped into memory.
//!
//! Its folder is named by a digest of all that it depends on: the passages, the tenant's lexicon, words and synonyms, and the form
//! of the index itself. Another content is another index; an index that is there is not built again.

mod folder;
mod vectors;

use crate::error::DataError;
use crate::judge::lexicon::Lexicon;
use crate::retrieval::lexicon_reranker::{CorpusCounts, LexiconReranker, PassageTraits};
use crate::retrieval::passages::{Passage, SourcesDigest, read_passages};
use crate::retrieval::segment::Segmenter;
use crate::retrieval::synonyms::{QueryPart, Synonyms};
use crate::text::fold;
use folder::{IndexCacheSettings, IndexFolder, ReadOnlyDirectory};
use querl_core::config::RetrievalConfig;
use querl_core::ports::Embedder;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;
use tantivy::collector::TopDocs;
use tantivy::query::{BooleanQuery, BoostQuery, DisjunctionMaxQuery, Occur, Query, TermQuery};
use tantivy::schema::{Field, IndexRecordOption, STORED, Schema, TextFieldIndexing, TextOptions, Value};
use tantivy::tokenizer::TokenizerManager;
use tantivy::{DocAddress, Index, IndexReader, ReloadPolicy, TantivyDocument, Term};
use vectors::VectorFile;

/// A title names product and intent in few words: one of its words counts as much as two of the text.
const TITLE_BOOST: f32 = 2.0;

/// A passage as kept in the index, with what a reranker reads in it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct StoredPassage {
    pub(crate) passage: Passage,
    pub(crate) traits: PassageTraits,
}

/// The index of one knowledge base.
pub(crate) struct PassageIndex {
    reader: IndexReader,
    fields: Fields,
    segmenter: Segmenter,
    synonyms: Synonyms,
    vectors: Option<VectorFile>,
    /// Held as long as the index is open: a folder in a temporary place goes with it.
    _folder: IndexFolder,
}

#[derive(Debug, Clone, Copy)]
struct Fields {
    /// A [`StoredPassage`] as JSON.
    stored: Field,
    title: Field,
    text: Field,
    terms: Field,
}

/// A tenant's user dictionary and synonyms.
pub(crate) struct Vocabulary {
    pub(crate) segmenter: Segmenter,
    pub(crate) synonyms: Synonyms,
}

impl Vocabulary {
    /// The user dictionary and the synonyms that a configuration names. Synonyms are words that stay whole, too.
    pub(crate) fn open(config: &RetrievalConfig) -> Result<Self, DataError> {
        let synonyms = config.synonyms.as_deref().map_or_else(|| Ok(Synonyms::default()), Synonyms::read)?;
        let segmenter = match (&config.user_dictionary, &config.synonyms) {
            (None, None) => Segmenter::default(),
            (dictionary, _) => Segmenter::with_words(dictionary.as_deref(), synonyms.entries())?,
        };
        let synonyms = synonyms.segmented_by(&segmenter);
        Ok(Self { segmenter, synonyms })
    }
}

impl PassageIndex {
    /// The index of a knowledge base, built where it is not there yet.
    pub(crate) fn open(
        knowledge_base: &Path,
        config: &RetrievalConfig,
        digest: &SourcesDigest,
        vocabulary: Vocabulary,
        reranker: Option<&LexiconReranker>,
        embedder: Option<&dyn Embedder>,
    ) -> Result<Self, DataError> {
        let Vocabulary { segmenter, synonyms } = vocabulary;
        let place = IndexCacheSettings { base: config.index_dir.clone(), n_kept: config.indexes_kept };
        let folder = IndexFolder::open(&place, &digest.0, |folder| {
            let passages = read_passages(knowledge_base)?;
            if let Some(embedder) = embedder {
                vectors::write(folder, &passages, embedder)?;
            }
            build(folder, knowledge_base, passages, &segmenter, reranker)?;
            if SourcesDigest::of(knowledge_base, config, embedder)?.0 == digest.0 {
                return Ok(());
            }
            let problem =
                "or a file that belongs to it changed while its index was built; start again when they are written";
            Err(DataError::file(knowledge_base, problem))
        })?;
        let vectors = embedder.map(|embedder| VectorFile::open(folder.path(), embedder.dimension())).transpose()?;
        let failed =
            |error| DataError::file(folder.path(), format!("cannot be read: {error}; remove it, it is made again"));
        let (reader, fields) = open_reader(folder.path()).map_err(failed)?;
        Ok(Self { reader, fields, segmenter, synonyms, vectors, _folder: folder })
    }

    /// The `n_passages` passages of highest BM25 score for a text. Each of its words counts once, however often it is repeated; words
    /// with synonyms count once as the one of them that scores highest.
    pub(crate) fn candidates(&self, text: &str, n_passages: usize) -> tantivy::Result<Vec<(usize, f64)>> {
        let words = self.segmenter.tokens(&fold(text));
        if words.is_empty() {
            return Ok(Vec::new());
        }
        let parts = self.synonyms.parts(&words);
        let clauses = parts.iter().flat_map(|part| self.clauses(part)).map(|query| (Occur::Should, query));
        let searcher = self.reader.searcher();
        let collector = TopDocs::with_limit(n_passages).order_by_score();
        let found = searcher.search(&BooleanQuery::new(clauses.collect()), &collector)?;
        // One segment, in the order of the file: a document's number is its position.
        Ok(found.into_iter().map(|(score, address)| (address.doc_id as usize, f64::from(score))).collect())
    }

    /// Positions of the `n_passages` passages whose vectors are nearest to `vector`; none without vectors.
    pub(crate) fn nearest(&self, vector: &[f32], n_passages: usize) -> Vec<usize> {
        self.vectors.as_ref().map(|vectors| vectors.nearest(vector, n_passages)).unwrap_or_default()
    }

    fn clauses(&self, part: &QueryPart<'_>) -> Vec<Box<dyn Query>> {
        match part {
            QueryPart::Word(word) => self.of_word(word),
            QueryPart::Group(entries) => {
                let entries = entries.iter().map(|words| self.of_entry(words)).collect();
                vec![Box::new(DisjunctionMaxQuery::new(entries))]
            }
        }
    }

    fn of_entry(&self, words: &[String]) -> Box<dyn Query> {
        let any_field = |word: &String| {
            let of_word = self.of_word(word).into_iter().map(|query| (Occur::Should, query));
            Box::new(BooleanQuery::new(of_word.collect())) as Box<dyn Query>
        };
        match words {
            [word] => any_field(word),
            _ => Box::new(BooleanQuery::new(words.iter().map(|word| (Occur::Must, any_field(word))).collect())),
        }
    }

    fn of_word(&self, word: &str) -> Vec<Box<dyn Query>> {
        let clause = |(field, boost)| {
            let term = TermQuery::new(Term::from_field_text(field, word), IndexRecordOption::WithFreqs);
            Box::new(BoostQuery::new(Box::new(term), boost)) as Box<dyn Query>
        };
        [(self.fields.title, TITLE_BOOST), (self.fields.text, 1.0)].map(clause).into()
    }

    pub(crate) fn stored(&self, position: usize) -> tantivy::Result<StoredPassage> {
        let document: TantivyDocument = self.reader.searcher().doc(DocAddress::new(0, position as u32))?;
        let stored = document.get_first(self.fields.stored).and_then(|value| value.as_str()).unwrap_or_default();
        serde_json::from_str(stored).map_err(|error| tantivy::TantivyError::InternalError(error.to_string()))
    }
}

impl CorpusCounts for PassageIndex {
    fn n_passages(&self) -> usize {
        self.reader.searcher().num_docs() as usize
    }

    fn n_with(&self, term: &str) -> usize {
        let term = Term::from_field_text(self.fields.terms, term);
        self.reader.searcher().doc_freq(&term).map_or(0, |n_passages| n_passages as usize)
    }
}

fn open_reader(folder: &Path) -> tantivy::Result<(IndexReader, Fields)> {
    let index = Index::open(ReadOnlyDirectory::open(folder)?)?;
    let fields = Fields::of(&index.schema())?;
    // Nobody writes to an index that is finished.
    let reader = index.reader_builder().reload_policy(ReloadPolicy::Manual).try_into()?;
    Ok((reader, fields))
}

impl Fields {
    fn of(schema: &Schema) -> tantivy::Result<Self> {
        let field = |name| schema.get_field(name);
        Ok(Self { stored: field("stored")?, title: field("title")?, text: field("text")?, terms: field("terms")? })
    }
}

/// The lexicon of a configuration, cutting words as its index does; `None` where none is named.
pub(crate) fn open_lexicon(config: &RetrievalConfig, segmenter: &Segmenter) -> Result<Option<Arc<Lexicon>>, DataError> {
    let read = |path: &Path| Ok(Arc::new(Lexicon::read(path)?.with_segmenter(segmenter.clone())));
    config.lexicon.as_deref().map(read).transpose()
}

/// For the words of one segment; more are taken from the system as they come.
const WRITER_MEMORY_BYTES: usize = 64 << 20;

/// Writes the index of a knowledge base into a folder: one segment, passages in the order of the file.
fn build(
    folder: &Path,
    knowledge_base: &Path,
    passages: Vec<Passage>,
    segmenter: &Segmenter,
    reranker: Option<&LexiconReranker>,
) -> Result<(), DataError> {
    write(folder, passages, segmenter, reranker)
        .map_err(|error| DataError::file(knowledge_base, format!("cannot be indexed in {}: {error}", folder.display())))
}

fn write(
    folder: &Path,
    passages: Vec<Passage>,
    segmenter: &Segmenter,
    reranker: Option<&LexiconReranker>,
) -> tantivy::Result<()> {
    let schema = schema();
    let fields = Fields::of(&schema)?;
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

#[cfg(test)]
#[path = "tests.rs"]
mod tests;

//! Full-text index of a knowledge base, built once on disk and memory-mapped.
//!
//! Its folder is named by a digest of everything that it depends on: passages, lexicon, user dictionary, synonyms, and the format of
//! the index. Other content makes another index; an existing one is not built again.

mod folder;

use crate::error::DataError;
use crate::judge::lexicon::Lexicon;
use crate::retrieval::lexicon_reranker::{CorpusCounts, LexiconReranker, PassageTraits};
use crate::retrieval::vocabulary::{QueryPart, Segmenter, Synonyms, Vocabulary};
use crate::retrieval::{Passage, read_passages};
use crate::text::fold;
use folder::{IndexCacheSettings, IndexFolder, ReadOnlyDirectory};
use memmap2::Mmap;
use querl_core::config::{Language, RetrievalConfig};
use querl_core::fsx::{digest_file, digest_hex, exhaustion};
use querl_core::ports::Embedder;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use tantivy::collector::TopDocs;
use tantivy::directory::error::{OpenReadError, OpenWriteError};
use tantivy::query::{BooleanQuery, BoostQuery, DisjunctionMaxQuery, Occur, Query, TermQuery};
use tantivy::schema::{Field, IndexRecordOption, STORED, Schema, TextFieldIndexing, TextOptions, Value};
use tantivy::tokenizer::TokenizerManager;
use tantivy::{DocAddress, Index, IndexReader, ReloadPolicy, TantivyDocument, TantivyError, Term};

/// Number of times that a title is indexed before its text: it names product and intent in few words. Title and text are one field, because
/// with separate fields a word that is common in texts and rare in titles would count as rare.
///
/// Source: Robertson, Zaragoza and Taylor 2004, "Simple BM25 Extension to Multiple Weighted Fields".
const TITLE_REPEATS: usize = 2;

/// A passage as stored in the index, with the features that the reranker uses.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct StoredPassage {
    pub(crate) passage: Passage,
    pub(crate) traits: PassageTraits,
}

pub(crate) struct PassageIndex {
    reader: IndexReader,
    fields: Fields,
    segmenter: Segmenter,
    synonyms: Synonyms,
    vectors: Option<VectorFile>,
    /// Held while the index is open: a temporary folder is removed on drop.
    _folder: IndexFolder,
}

#[derive(Debug, Clone, Copy)]
struct Fields {
    /// A [`StoredPassage`] as JSON.
    stored: Field,
    /// Title and text.
    words: Field,
    terms: Field,
}

impl PassageIndex {
    /// Opens the index of a knowledge base; builds it if necessary.
    pub(crate) fn open(
        knowledge_base: &Path,
        config: &RetrievalConfig,
        digest: &SourcesDigest,
        vocabulary: Vocabulary,
        reranker: &LexiconReranker,
        embedder: Option<&dyn Embedder>,
    ) -> Result<Self, DataError> {
        let Vocabulary { segmenter, synonyms } = vocabulary;
        let place = IndexCacheSettings { base: config.index_dir.clone(), n_kept: config.indexes_kept };
        let folder = IndexFolder::open(&place, &digest.0, |folder| {
            let passages = read_passages(knowledge_base)?;
            if let Some(embedder) = embedder {
                write_vectors(folder, &passages, embedder)?;
            }
            build(folder, knowledge_base, passages, &segmenter, reranker)?;
            if SourcesDigest::of(knowledge_base, config, segmenter.language(), embedder)?.0 == digest.0 {
                return Ok(());
            }
            let problem =
                "or a file that belongs to it changed while its index was built; start again when they are written";
            Err(DataError::file(knowledge_base, problem))
        })?;
        let vectors = embedder.map(|embedder| VectorFile::open(folder.path(), embedder.dimension())).transpose()?;
        let (reader, fields) = open_reader(folder.path()).map_err(|error| unopened(folder.path(), &error))?;
        Ok(Self { reader, fields, segmenter, synonyms, vectors, _folder: folder })
    }

    /// (Position, BM25 score) of the `n_passages` best passages for a text. A word counts as often as the text has it, as in Lucene; of a word and
    /// its synonyms only the best-scoring one counts, once.
    pub(crate) fn candidates(&self, text: &str, n_passages: usize) -> tantivy::Result<Vec<(usize, f64)>> {
        let words = self.segmenter.tokens(&fold(text));
        if words.is_empty() {
            return Ok(Vec::new());
        }
        let parts = self.synonyms.parts(&words);
        let clause = |(part, count): &(QueryPart<'_>, usize)| -> (Occur, Box<dyn Query>) {
            (Occur::Should, Box::new(BoostQuery::new(self.clause(part), *count as f32)))
        };
        let clauses = parts.iter().map(clause);
        let searcher = self.reader.searcher();
        let collector = TopDocs::with_limit(n_passages).order_by_score();
        let found = searcher.search(&BooleanQuery::new(clauses.collect()), &collector)?;
        // The index has one segment, in the order of the file: a document id is a position.
        Ok(found.into_iter().map(|(score, address)| (address.doc_id as usize, f64::from(score))).collect())
    }

    /// Positions of the `n_passages` passages whose vectors are nearest to `vector`; empty for an index without vectors.
    pub(crate) fn nearest(&self, vector: &[f32], n_passages: usize) -> Vec<usize> {
        self.vectors.as_ref().map(|vectors| vectors.nearest(vector, n_passages)).unwrap_or_default()
    }

    fn clause(&self, part: &QueryPart<'_>) -> Box<dyn Query> {
        match part {
            QueryPart::Word(word) => self.of_word(word),
            QueryPart::Group(entries) => {
                Box::new(DisjunctionMaxQuery::new(entries.iter().map(|words| self.of_entry(words)).collect()))
            }
        }
    }

    fn of_entry(&self, words: &[String]) -> Box<dyn Query> {
        match words {
            [word] => self.of_word(word),
            _ => Box::new(BooleanQuery::new(words.iter().map(|word| (Occur::Must, self.of_word(word))).collect())),
        }
    }

    fn of_word(&self, word: &str) -> Box<dyn Query> {
        let term = Term::from_field_text(self.fields.words, word);
        Box::new(TermQuery::new(term, IndexRecordOption::WithFreqs))
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
    // A finished index is not written to.
    let reader = index.reader_builder().reload_policy(ReloadPolicy::Manual).try_into()?;
    Ok((reader, fields))
}

/// The error for an index that could not be opened. Too little memory or too few file handles do not mean that the index is damaged.
fn unopened(folder: &Path, error: &TantivyError) -> DataError {
    match exhaustion_of(error) {
        Some(source) => DataError::read(folder, source),
        None => DataError::file(folder, format!("cannot be read: {error}; remove it, it is made again")),
    }
}

/// As [`exhaustion`]; the I/O errors of the library are in an `Arc`, and not its sources.
fn exhaustion_of(error: &TantivyError) -> Option<io::Error> {
    match error {
        TantivyError::IoError(cause)
        | TantivyError::OpenReadError(OpenReadError::IoError { io_error: cause, .. })
        | TantivyError::OpenWriteError(OpenWriteError::IoError { io_error: cause, .. }) => exhaustion(&**cause),
        _ => exhaustion(error),
    }
}

impl Fields {
    fn of(schema: &Schema) -> tantivy::Result<Self> {
        let field = |name| schema.get_field(name);
        Ok(Self { stored: field("stored")?, words: field("words")?, terms: field("terms")? })
    }
}

/// Opens the configured lexicon with the segmentation of the index; an empty lexicon if none is configured.
pub(crate) fn open_lexicon(config: &RetrievalConfig, segmenter: &Segmenter) -> Result<Arc<Lexicon>, DataError> {
    let lexicon = match config.lexicon.as_deref() {
        Some(path) => Lexicon::read(path)?.with_segmenter(segmenter.clone()),
        None => Lexicon::empty(segmenter.clone()),
    };
    Ok(Arc::new(lexicon))
}

/// Initial memory of the index writer.
const WRITER_MEMORY_BYTES: usize = 64 << 20;

/// Writes the index of a knowledge base into a folder: one segment, passages in the order of the file.
fn build(
    folder: &Path,
    knowledge_base: &Path,
    passages: Vec<Passage>,
    segmenter: &Segmenter,
    reranker: &LexiconReranker,
) -> Result<(), DataError> {
    write(folder, passages, segmenter, reranker).map_err(|error| match exhaustion_of(&error) {
        Some(source) => DataError::write(folder, source),
        None => DataError::file(knowledge_base, format!("cannot be indexed in {}: {error}", folder.display())),
    })
}

fn write(
    folder: &Path,
    passages: Vec<Passage>,
    segmenter: &Segmenter,
    reranker: &LexiconReranker,
) -> tantivy::Result<()> {
    let schema = schema();
    let fields = Fields::of(&schema)?;
    let tokenizers = TokenizerManager::default();
    tokenizers.register(ANALYSER, segmenter.analyser());
    let directory = tantivy::directory::MmapDirectory::open(folder)?;
    let builder = Index::builder().schema(schema).tokenizers(tokenizers);
    let mut writer = builder.single_segment_index_writer(directory, WRITER_MEMORY_BYTES)?;
    for passage in passages {
        let traits = reranker.traits(&passage);
        let mut document = TantivyDocument::new();
        let title = fold(&passage.title);
        (0..TITLE_REPEATS).for_each(|_| document.add_text(fields.words, &title));
        document.add_text(fields.words, fold(&passage.text));
        traits.terms.iter().for_each(|term| document.add_text(fields.terms, term));
        let stored = serde_json::to_string(&StoredPassage { passage, traits });
        let stored = stored.map_err(|error| tantivy::TantivyError::InternalError(error.to_string()))?;
        document.add_text(fields.stored, stored);
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
    schema.add_text_field("words", words);
    schema.add_text_field("terms", TextOptions::default().set_indexing_options(whole));
    schema.build()
}

const VECTORS: &str = "vectors.f32";
const PASSAGES_PER_CALL: usize = 1024;

/// Passage vectors, mapped into memory: rows of little-endian f32, in the order of the knowledge base.
struct VectorFile {
    map: Mmap,
    dimension: usize,
}

fn write_vectors(folder: &Path, passages: &[Passage], embedder: &dyn Embedder) -> Result<(), DataError> {
    let path = folder.join(VECTORS);
    let failed = |error| DataError::write(&path, error);
    let of_model = |problem: String| DataError::setting("retrieval.embedding.path", problem);
    let mut file = BufWriter::new(File::create(&path).map_err(failed)?);
    let mut n_done = 0;
    for passages in passages.chunks(PASSAGES_PER_CALL) {
        let text = |passage: &Passage| format!("{}{}", embedder.passage_prefix(), passage.full_text());
        let texts: Vec<String> = passages.iter().map(text).collect();
        let vectors = embedder.embed(&texts.iter().map(String::as_str).collect::<Vec<_>>());
        let vectors = vectors.map_err(|error| of_model(format!("failed: {error}")))?;
        if vectors.len() != texts.len() || vectors.iter().any(|vector| vector.len() != embedder.dimension()) {
            let (n_vectors, n_texts) = (vectors.len(), texts.len());
            return Err(of_model(format!("made {n_vectors} vectors of {n_texts} texts, or some too short")));
        }
        for number in vectors.iter().flatten() {
            file.write_all(&number.to_le_bytes()).map_err(failed)?;
        }
        n_done += passages.len();
        tracing::info!("vectors of {n_done} passages are made");
    }
    file.into_inner().map_err(|error| failed(error.into_error()))?.sync_all().map_err(failed)
}

impl VectorFile {
    fn open(folder: &Path, dimension: usize) -> Result<Self, DataError> {
        let path = folder.join(VECTORS);
        let failed = |source| DataError::read(&path, source);
        let file = File::open(&path).map_err(failed)?;
        // SAFETY: the file is in the folder of a finished index, which this program never changes; a removed file stays mapped.
        let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
        Ok(Self { map, dimension })
    }

    /// Positions of the `n_vectors` vectors with the largest dot products with `vector`, largest first; on ties the earlier first.
    fn nearest(&self, vector: &[f32], n_vectors: usize) -> Vec<usize> {
        let rows = self.map.chunks_exact(4 * self.dimension);
        let mut scored: Vec<(f32, usize)> =
            rows.enumerate().map(|(position, row)| (dot(row, vector), position)).collect();
        let best = |a: &(f32, usize), b: &(f32, usize)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        if n_vectors < scored.len() {
            scored.select_nth_unstable_by(n_vectors, best);
            scored.truncate(n_vectors);
        }
        scored.sort_unstable_by(best);
        scored.into_iter().map(|(_, position)| position).collect()
    }
}

/// Dot product with eight accumulators, which compile to SIMD, in a fixed order.
fn dot(row: &[u8], vector: &[f32]) -> f32 {
    const LANES: usize = 8;
    let number = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let mut sums = [0.0; LANES];
    let (rows, vectors) = (row.chunks_exact(4 * LANES), vector.chunks_exact(LANES));
    let rest = rows.remainder().chunks_exact(4).zip(vectors.remainder());
    let rest: f32 = rest.map(|(bytes, factor)| number(bytes) * factor).sum();
    for (row, vector) in rows.zip(vectors) {
        for lane in 0..LANES {
            sums[lane] += number(&row[4 * lane..4 * lane + 4]) * vector[lane];
        }
    }
    sums.iter().sum::<f32>() + rest
}

/// Version of the embedded index, incremented when texts are indexed or looked up in another way. Ranks then change, so it is an input of the stages
/// that depend on hits.
pub const INDEX_VERSION: u32 = 7;
/// Version of the index on disk, with the libraries that build and read it; another library release leads to another index.
pub(super) const FORM: &str = "querl index 6; tantivy 0.27.0, tantivy-jieba 0.21.0, jieba-rs 0.11.0, hanconv 0.5.1, rust-stemmers 1.2.0, unicode-segmentation 1.13.3";
/// Libraries that compute the vectors of an index.
pub(super) const ENCODER: &str = "candle-transformers 0.11.1, tokenizers 0.23.2";

/// Digest of everything that an index is built from. It is computed before the files are read, so that a concurrent change is detected.
pub(super) struct SourcesDigest(String);

impl SourcesDigest {
    pub(super) fn of(
        knowledge_base: &Path,
        config: &RetrievalConfig,
        language: Language,
        embedder: Option<&dyn Embedder>,
    ) -> Result<Self, DataError> {
        let mut parts = vec![FORM.to_owned(), format!("{language:?}")];
        let optional = [&config.lexicon, &config.user_dictionary, &config.synonyms].map(Option::as_deref);
        for path in std::iter::once(Some(knowledge_base)).chain(optional) {
            let digest = path.map(|path| digest_file(path).map_err(|error| DataError::read(path, error)));
            // A missing file differs from an empty one.
            parts.push(digest.transpose()?.unwrap_or_default());
        }
        parts.extend(embedder.map(|embedder| format!("{ENCODER}: {}", embedder.digest())));
        Ok(Self(digest_hex(parts.join("\n").as_bytes())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_that_cannot_be_mapped_for_want_of_memory_is_not_to_be_removed() {
        let unopened = |error: TantivyError| unopened(Path::new("index"), &error).to_string();
        let unmapped = OpenReadError::wrap_io_error(io::ErrorKind::OutOfMemory.into(), "index/a.idx".into());
        for error in [unmapped.into(), TantivyError::from(io::Error::from(io::ErrorKind::OutOfMemory))] {
            let message = unopened(error);
            assert!(message.starts_with("index: cannot be read: too little memory or address space"), "{message}");
            assert!(!message.contains("remove it"), "{message}");
        }
        assert!(unopened(TantivyError::SchemaError("no field".into())).ends_with("remove it, it is made again"));
    }
}

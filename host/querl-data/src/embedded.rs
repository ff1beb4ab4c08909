//! Retrieval in this process: a full-text index finds candidates with the rewrite, the reranker scores them against the query.

use crate::error::DataError;
use crate::lexicon::Lexicon;
use crate::passages::{Passage, read_passages};
use crate::reranker::Reranker;
use crate::retrieval::{Search, SearchLimits};
use crate::segment::{analyser, words};
use crate::text::fold;
use async_trait::async_trait;
use querl_core::config::RetrievalConfig;
use querl_core::ports::RetrievalRequest;
use querl_core::records::{CallFailure, FailureKind, Hit};
use std::path::Path;
use std::sync::Arc;
use tantivy::collector::TopDocs;
use tantivy::query::{BooleanQuery, BoostQuery, Occur, Query, TermQuery};
use tantivy::schema::{Field, INDEXED, IndexRecordOption, STORED, Schema, TextFieldIndexing, TextOptions, Value};
use tantivy::{Index, IndexReader, TantivyDocument, Term};

/// A title names product and intent in few words: one of its words counts as much as two of the text.
const TITLE_BOOST: f32 = 2.0;

/// A full-text index with a reranker.
pub struct EmbeddedRetriever {
    passages: Vec<Passage>,
    reranker: Reranker,
    reader: IndexReader,
    fields: Fields,
}

#[derive(Clone, Copy)]
struct Fields {
    position: Field,
    title: Field,
    text: Field,
}

impl EmbeddedRetriever {
    /// Reads knowledge base and lexicon and builds the index in memory.
    ///
    /// # Errors
    /// `retrieval.knowledge_base` or `retrieval.lexicon` is not set or cannot be used.
    pub fn open(config: &RetrievalConfig) -> Result<Self, DataError> {
        let knowledge_base = required(config.knowledge_base.as_deref(), "knowledge_base")?;
        let lexicon = Arc::new(Lexicon::read(required(config.lexicon.as_deref(), "lexicon")?)?);
        let passages = read_passages(knowledge_base)?;
        let (reader, fields) = build_index(&passages)
            .map_err(|error| DataError::file(knowledge_base, format!("cannot be indexed: {error}")))?;
        let reranker = Reranker::new(lexicon, &passages);
        Ok(Self { passages, reranker, reader, fields })
    }

    /// The passages, in the order of the file.
    pub fn passages(&self) -> &[Passage] {
        &self.passages
    }

    /// The reranker over them.
    pub fn reranker(&self) -> &Reranker {
        &self.reranker
    }

    /// Passages for one rewrite, best reranker score first.
    ///
    /// # Errors
    /// The index fails, which is a fault of the program.
    pub fn search_now(&self, request: &RetrievalRequest<'_>, limits: SearchLimits) -> Result<Vec<Hit>, CallFailure> {
        let candidates = self.candidates(request.rewritten_query, limits.top_k).map_err(|error| CallFailure {
            kind: FailureKind::ServerError,
            message: format!("embedded index: {error}"),
        })?;
        let need = self.reranker.need(request.original_query, request.context);
        let mut hits: Vec<Hit> = candidates
            .into_iter()
            .map(|(index, bm25)| self.hit(index, bm25, self.reranker.score(&need, index)))
            .collect();
        hits.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(limits.apply(hits))
    }

    fn hit(&self, index: usize, bm25: f32, reranker_score: f64) -> Hit {
        let passage = &self.passages[index];
        let text = if passage.title.is_empty() {
            passage.text.clone()
        } else {
            format!("{}\n{}", passage.title, passage.text)
        };
        Hit { id: passage.id.clone(), text, reranker_score, retrieval_score: Some(f64::from(bm25)), rank: 0 }
    }

    /// The `top_k` passages of highest BM25 score.
    fn candidates(&self, rewrite: &str, top_k: usize) -> tantivy::Result<Vec<(usize, f32)>> {
        // Each word counts once, however often it is repeated.
        let words = words(&fold(rewrite));
        if words.is_empty() {
            return Ok(Vec::new());
        }
        let clauses = words.iter().flat_map(|word| {
            [(self.fields.title, TITLE_BOOST), (self.fields.text, 1.0)].map(|(field, boost)| {
                let term = TermQuery::new(Term::from_field_text(field, word), IndexRecordOption::WithFreqs);
                (Occur::Should, Box::new(BoostQuery::new(Box::new(term), boost)) as Box<dyn Query>)
            })
        });
        let searcher = self.reader.searcher();
        let collector = TopDocs::with_limit(top_k).order_by_score();
        let found = searcher.search(&BooleanQuery::new(clauses.collect()), &collector)?;
        let mut candidates = Vec::with_capacity(found.len());
        for (score, address) in found {
            let document: TantivyDocument = searcher.doc(address)?;
            let position = document.get_first(self.fields.position).and_then(|value| value.as_u64());
            candidates.extend(position.map(|index| (index as usize, score)));
        }
        Ok(candidates)
    }
}

#[async_trait]
impl Search for EmbeddedRetriever {
    async fn search(&self, request: &RetrievalRequest<'_>, limits: SearchLimits) -> Result<Vec<Hit>, CallFailure> {
        self.search_now(request, limits)
    }

    fn name(&self) -> &str {
        "embedded"
    }
}

fn required<'a>(path: Option<&'a Path>, key: &str) -> Result<&'a Path, DataError> {
    path.ok_or_else(|| {
        DataError::setting(
            format!("retrieval.{key}"),
            "is not set; retrieval of kind `embedded` needs the path of a file",
        )
    })
}

fn build_index(passages: &[Passage]) -> tantivy::Result<(IndexReader, Fields)> {
    const WRITER_MEMORY_BYTES: usize = 32 << 20;
    let mut schema = Schema::builder();
    let indexing = TextFieldIndexing::default().set_tokenizer("jieba").set_index_option(IndexRecordOption::WithFreqs);
    let options = TextOptions::default().set_indexing_options(indexing);
    let fields = Fields {
        position: schema.add_u64_field("position", STORED | INDEXED),
        title: schema.add_text_field("title", options.clone()),
        text: schema.add_text_field("text", options),
    };
    let index = Index::create_in_ram(schema.build());
    index.tokenizers().register("jieba", analyser());
    // One thread and one commit: one segment, the same document order on every machine.
    let mut writer = index.writer_with_num_threads(1, WRITER_MEMORY_BYTES)?;
    for (position, passage) in passages.iter().enumerate() {
        let mut document = TantivyDocument::new();
        document.add_u64(fields.position, position as u64);
        document.add_text(fields.title, fold(&passage.title));
        document.add_text(fields.text, fold(&passage.text));
        writer.add_document(document)?;
    }
    writer.commit()?;
    Ok((index.reader()?, fields))
}

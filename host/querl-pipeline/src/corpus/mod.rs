//! `querl model corpus`: the pretraining corpus of a small model for one tenant, from its knowledge base and the policy's prompt alone.
//!
//! In: a configuration. Out: a file for `querl model pretrain` with passages as lines of text, and conversations of the inverse cloze task in the
//! form of the prompt plugin. The query table, the teacher and gold passages are not read: no query can leak. The same configuration and seed give
//! the same file. docs/small-models.md.

mod conversation;
mod entities;
mod passages;
mod phrases;
mod recipe;
#[cfg(test)]
mod testing;

pub use recipe::Recipe;

use crate::failure::Stop;
use crate::plugins::open_prompts;
use anyhow::Context as _;
use conversation::{Conversation, ConversationGenerator};
use passages::text_pieces;
use querl_core::config::{Config, Language, RewriteForm};
use querl_core::edits::{KEEP, append, expand, is_plain, with_history};
use querl_core::fsx::AtomicFile;
use querl_core::ports::{PromptInput, PromptTask, Prompts, Reporter};
use querl_core::records::{Context, Message};
use querl_data::{Passage, WordSegmenter, read_passages};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;
use std::collections::HashSet;
use std::path::Path;

/// Default number of lines; 12 per text if that is more.
const N_LINES: usize = 48_000;
const N_LINES_PER_TEXT: usize = 12;
/// Maximum number of copies of a text. At most a third of the lines are texts, unless there are few lines.
const MAX_COPIES: usize = 4;
/// Upper limit for the tokens of a message's role, control tokens and line breaks, and of the line that begins the answer.
const MESSAGE_TOKENS: usize = 32;
/// Number of lines between progress updates.
const UPDATE_LINES: usize = 100;

/// Size and seed of a pretraining corpus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CorpusSettings {
    /// Number of lines; `None`: 48,000, or 12 per text if that is more.
    pub n_lines: Option<usize>,
    /// Seed of the random conversations and of the order of the lines.
    pub seed: u64,
}

/// Summary of a written corpus.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CorpusSummary {
    /// Language of the passages, configured or detected.
    pub language: Language,
    /// Number of passages of the knowledge base.
    pub n_passages: usize,
    /// Number of lines that are texts, copies included.
    pub n_texts: usize,
    /// Number of lines that are conversations.
    pub n_conversations: usize,
    /// UTF-8 bytes of passages and titles, each distinct text counted once.
    pub text_bytes: usize,
    /// Bytes of the longest line, an upper limit for the tokens of any line.
    pub longest_line_bytes: usize,
}

/// One line of the corpus.
#[derive(Serialize)]
#[serde(untagged)]
enum CorpusLine<'a> {
    Text { text: &'a str },
    Chat { messages: Vec<Message> },
}

impl CorpusLine<'_> {
    fn max_tokens(&self) -> usize {
        match self {
            Self::Text { text } => text.len() + 1,
            Self::Chat { messages } => messages.iter().map(|message| message.content.len() + MESSAGE_TOKENS).sum(),
        }
    }
}

/// Writes a pretraining corpus to `out`; an existing file is replaced once the new one is complete.
///
/// # Errors
/// There is no knowledge base or it cannot be read, too few lines for it, the prompt plugin cannot be used, or the file cannot be written.
pub fn write_corpus(
    config: &Config,
    out: &Path,
    settings: &CorpusSettings,
    reporter: &dyn Reporter,
) -> anyhow::Result<CorpusSummary> {
    let knowledge_base = config.retrieval.knowledge_base.as_deref().ok_or_else(|| {
        Stop::usage("retrieval.knowledge_base is not set, and a corpus is made from passages; set it to a file of them")
    })?;
    let passages = read_passages(knowledge_base)?;
    let pieces: Vec<String> =
        passages.iter().flat_map(|passage| text_pieces(passage.title.trim(), passage.text.trim())).collect();
    let order = line_order(pieces.len(), settings)?;
    let segmenter = WordSegmenter::open(&config.retrieval)?;
    let generator = ConversationGenerator::new(&passages, &segmenter);
    if generator.is_empty() {
        let path = knowledge_base.display();
        let message = format!("{path}: no passage has a word; a corpus needs texts with letters or digits");
        return Err(Stop::usage(message).into());
    }
    let prompts = open_prompts(config)?;
    let writer =
        ConversationWriter { prompts: prompts.as_ref(), form: config.data.rewrite_form, segmenter: &segmenter };
    let unwritable = || format!("{}: cannot be written", out.display());
    let (mut file, progress) = (AtomicFile::create(out).with_context(unwritable)?, reporter.stage("corpus"));
    let mut rng = ChaCha8Rng::seed_from_u64(settings.seed);
    // A separate random stream, because the order uses a variable amount of random numbers of the first one.
    rng.set_stream(1);
    let (mut n_texts, mut longest_line_bytes) = (0, 0);
    for (index, piece) in order.iter().enumerate() {
        let line = match piece {
            Some(piece) => CorpusLine::Text { text: &pieces[*piece] },
            None => CorpusLine::Chat { messages: writer.messages(generator.draw(&mut rng), &mut rng)? },
        };
        n_texts += usize::from(piece.is_some());
        longest_line_bytes = longest_line_bytes.max(line.max_tokens());
        file.write_line(&line).with_context(unwritable)?;
        if (index + 1).is_multiple_of(UPDATE_LINES) || index + 1 == order.len() {
            progress.update(index as u64 + 1, order.len() as u64, "");
        }
    }
    file.commit().with_context(unwritable)?;
    Ok(CorpusSummary {
        language: segmenter.language(),
        n_passages: passages.len(),
        n_texts,
        n_conversations: order.len() - n_texts,
        text_bytes: unique_bytes(&passages),
        longest_line_bytes,
    })
}

/// The lines in random order: the index of a text, or `None` for a conversation.
fn line_order(n_pieces: usize, settings: &CorpusSettings) -> Result<Vec<Option<usize>>, Stop> {
    let n_lines = settings.n_lines.unwrap_or(N_LINES.max(N_LINES_PER_TEXT * n_pieces));
    let n_least = 2 * n_pieces;
    if n_lines < n_least {
        let message = format!(
            "--lines is {n_lines}; expected at least {n_least}: each of {n_pieces} texts of the knowledge base, and as many conversations"
        );
        return Err(Stop::usage(message));
    }
    let n_copies = (n_lines / (3 * n_pieces).max(1)).clamp(1, MAX_COPIES);
    let texts = (0..n_copies).flat_map(|_| (0..n_pieces).map(Some));
    let mut order: Vec<Option<usize>> = texts.collect();
    order.resize(n_lines, None);
    order.shuffle(&mut ChaCha8Rng::seed_from_u64(settings.seed));
    Ok(order)
}

fn unique_bytes(passages: &[Passage]) -> usize {
    let texts: HashSet<String> = passages.iter().map(Passage::full_text).collect();
    texts.iter().map(String::len).sum()
}

/// Writes conversations with the policy's prompt and response format.
struct ConversationWriter<'a> {
    prompts: &'a dyn Prompts,
    form: RewriteForm,
    segmenter: &'a WordSegmenter,
}

impl ConversationWriter<'_> {
    fn messages(&self, conversation: Conversation, rng: &mut ChaCha8Rng) -> anyhow::Result<Vec<Message>> {
        let Conversation { query, history, target } = conversation;
        let context = Context { user_profile: String::new(), history_summary: history };
        let input = PromptInput { query: &query, context: &context, rewrite: None };
        let mut messages = self.prompts.messages(PromptTask::PolicyRewrite, &input)?;
        let content = self.response(&query, &context.history_summary, target, rng);
        messages.push(Message { role: "assistant".into(), content });
        Ok(messages)
    }

    /// With `data.rewrite_form = "edit"`, half of the responses are edits that add to the query the words that only the target has; if
    /// there is a history, half of these are edits that add the history and the words that both lack.
    fn response(&self, query: &str, history: &str, target: String, rng: &mut ChaCha8Rng) -> String {
        // A target that could be parsed as an edit is written as an edit.
        if self.form != RewriteForm::Edit || (rng.random_bool(0.5) && is_plain(&target)) {
            return target;
        }
        if !history.is_empty() && rng.random_bool(0.5) {
            let known = with_history(query, history, "");
            return expand(&self.segmenter.text_without_words_of(&target, &known));
        }
        let added = self.segmenter.text_without_words_of(&target, query);
        if added.is_empty() { KEEP.to_owned() } else { append(&added) }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::segmenter;
    use super::*;
    use querl_core::ports::{ParsedJudgement, PluginFault};
    use querl_core::records::Rejection;

    /// A prompt plugin that returns empty prompts.
    struct NoPrompts;

    impl Prompts for NoPrompts {
        fn messages(&self, _: PromptTask, _: &PromptInput<'_>) -> Result<Vec<Message>, PluginFault> {
            Ok(Vec::new())
        }

        fn parse_rewrite(&self, text: &str) -> Result<Result<String, Rejection>, PluginFault> {
            Ok(Ok(text.to_owned()))
        }

        fn parse_judgement(&self, _: &str) -> Result<Result<ParsedJudgement, Rejection>, PluginFault> {
            Ok(Err(Rejection::by_host("none", "no judge")))
        }
    }

    fn settings(n_lines: Option<usize>, seed: u64) -> CorpusSettings {
        CorpusSettings { n_lines, seed }
    }

    #[test]
    fn every_text_is_a_line_at_least_once_and_the_seed_decides_the_order() {
        let copies = |n_pieces, n_lines| {
            let order = line_order(n_pieces, &settings(n_lines, 1)).unwrap();
            let mut of_piece = vec![0; n_pieces];
            order.iter().flatten().for_each(|piece| of_piece[*piece] += 1);
            assert!(of_piece.iter().all(|n| *n == of_piece[0]), "{of_piece:?}");
            (order.len(), of_piece[0])
        };
        assert_eq!(copies(10, Some(20)), (20, 1));
        assert_eq!(copies(10, Some(100)), (100, 3));
        assert_eq!((copies(210, None), copies(5000, None)), ((48_000, 4), (60_000, 4)));
        let of_seed = |seed| line_order(50, &settings(Some(300), seed)).unwrap();
        assert_eq!(of_seed(1), of_seed(1));
        assert_ne!(of_seed(1), of_seed(2));
    }

    #[test]
    fn too_few_lines_for_the_passages_are_refused() {
        let message = line_order(10, &settings(Some(19), 1)).unwrap_err().to_string();
        let expected =
            "--lines is 19; expected at least 20: each of 10 texts of the knowledge base, and as many conversations";
        assert_eq!(message, expected);
    }

    #[test]
    fn edits_add_what_the_query_lacks_or_keep_it() {
        let segmenter = segmenter(Language::En);
        let responses_after = |form, query: &str, history: &str, target: &str| {
            let writer = ConversationWriter { prompts: &NoPrompts, form, segmenter: &segmenter };
            let mut rng = ChaCha8Rng::seed_from_u64(1);
            let drawn: HashSet<String> =
                (0..50).map(|_| writer.response(query, history, target.to_owned(), &mut rng)).collect();
            let mut drawn: Vec<String> = drawn.into_iter().collect();
            drawn.sort();
            drawn
        };
        let responses = |form, query: &str, target: &str| responses_after(form, query, "", target);
        assert_eq!(responses(RewriteForm::Full, "clean the filter", "AquaLine filter"), ["AquaLine filter"]);
        let edits = responses(RewriteForm::Edit, "clean the filter", "AquaLine filter");
        assert_eq!(edits, ["+ AquaLine", "AquaLine filter"]);
        assert_eq!(responses(RewriteForm::Edit, "clean the filter", "filter"), ["=", "filter"]);
        let after = |target| responses_after(RewriteForm::Edit, "clean the filter", "has the AquaLine", target);
        assert_eq!(after("AquaLine filter"), ["&", "+ AquaLine", "AquaLine filter"]);
        assert_eq!(after("AquaLine filter rinse"), ["& rinse", "+ AquaLine rinse", "AquaLine filter rinse"]);
    }
}

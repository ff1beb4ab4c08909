//! A teacher that is a model in this process: it needs a prompt and no training.

use crate::failure::Stop;
use crate::interrupt;
use crate::run::Run;
use crate::training;
use anyhow::Context;
use querl_core::config::{ModelConfig, RlConfig, TeacherConfig};
use querl_core::ports::Progress;
use querl_core::records::{CallFailure, Completion, FailureKind, Message, QueryRow, RewriteRecord};
use querl_data::{Journal, LocalRewriteCollector, LocalRewriteStage, QueryTable, StageResults, open_fallback};
use querl_model::{DecoderConfig, TextTokenizer};
use querl_train::job::{GenerateJob, GeneratedResponse};
use std::path::Path;

/// Rows that are handed over at once: the model is loaded once for them, and their prompts are in memory.
const N_ROWS_A_PORTION: usize = 4096;
/// Answers between two safe points.
const N_ROWS_AT_ONCE: usize = 16;

/// How reports name it: by its folder.
pub fn name(config: &TeacherConfig) -> String {
    let path = config.adapter_path.as_ref().or(config.model_path.as_ref());
    let name = path.and_then(|path| path.file_name()).unwrap_or_default();
    format!("{} (local)", name.to_string_lossy())
}

/// Whether the model's folder can be used.
///
/// # Errors
/// A file is missing or damaged, the architecture is not supported, or a card cannot have its heads answer.
pub fn check(run: &Run) -> anyhow::Result<()> {
    let path = folder(run)?;
    TextTokenizer::load(path).map_err(|error| Stop::usage(error.to_string()))?;
    querl_model::check_directory(path).map_err(|error| Stop::usage(error.to_string()))?;
    Ok(run.executor.check_answers_of("teacher.model_path", path)?)
}

fn folder(run: &Run) -> anyhow::Result<&Path> {
    let missing = || Stop::usage("teacher.model_path is not set; a teacher of kind `local` needs a model");
    Ok(run.config.teacher.model_path.as_deref().ok_or_else(missing)?)
}

/// Asks the model for a rewrite of each row.
///
/// # Errors
/// The model cannot compute, none of its answers can be read, the user said stop, or a file cannot be written.
pub fn rewrite<'a>(
    run: &'a Run,
    table: &'a QueryTable,
    journal: Journal<RewriteRecord>,
    progress: &'a dyn Progress,
) -> anyhow::Result<StageResults<'a, QueryRow, RewriteRecord>> {
    let config = &run.config.teacher;
    let mut rewriting = LocalRewriteStage::begin(table, run.plugins.prompts.as_ref(), journal, progress)?;
    let room = Room::of(run)?;
    loop {
        let (portion, answers) = rewriting.portion(N_ROWS_A_PORTION)?;
        if portion.is_empty() {
            break;
        }
        answer(run, &room, portion, answers)?;
    }
    let fallback = open_fallback(&run.config.fallback_teacher, &run.outside)?;
    let ending = rewriting.finish(name(config), fallback, run.config.fallback_teacher.max_concurrent);
    interrupt::finish(&run.runtime, ending)
}

fn answer(
    run: &Run,
    room: &Room,
    portion: Vec<Vec<Message>>,
    taken: &mut LocalRewriteCollector<'_>,
) -> anyhow::Result<()> {
    let config = &run.config.teacher;
    // (place in the portion, tokens of the prompt)
    let (mut places, mut prompts) = (Vec::new(), Vec::new());
    for (place, messages) in portion.into_iter().enumerate() {
        match room.tokens_of(&messages)? {
            Ok(n_tokens) => {
                places.push((place, n_tokens));
                prompts.push(messages);
            }
            Err(failure) => taken.take(place, Err(failure))?,
        }
    }
    if prompts.is_empty() {
        return Ok(());
    }
    let max_new_tokens = config.max_tokens as usize;
    let limits = RlConfig { max_new_tokens, min_new_tokens: 0, ..run.config.rl.clone() };
    let model = ModelConfig { path: folder(run)?.to_owned(), ..run.config.model.clone() };
    let adapter = config.adapter_path.clone();
    let job = GenerateJob { model, adapter, prompts, n_beams: 1, limits, batch_size: N_ROWS_AT_ONCE };
    let mut places = places.into_iter();
    let mut take = |responses: Vec<GeneratedResponse>| -> anyhow::Result<()> {
        for response in responses {
            let (place, n_tokens) = places.next().context("more answers than prompts")?;
            taken.take(place, completion(response, n_tokens))?;
        }
        Ok(interrupt::check()?)
    };
    training::generate(run, "teacher", &job, &mut take)
}

/// Half an answer is none: its last words may be the ones that matter.
fn completion(response: GeneratedResponse, n_prompt_tokens: usize) -> Result<Completion, CallFailure> {
    if response.truncated {
        let message = "the answer was cut off; raise teacher.max_tokens".into();
        return Err(CallFailure { kind: FailureKind::InvalidResponse, message });
    }
    Ok(Completion {
        text: response.text,
        prompt_tokens: Some(n_prompt_tokens as u64),
        completion_tokens: Some(u64::from(response.n_tokens)),
        cost: Some(0.0),
        latency_ms: response.latency_ms,
        source: None,
    })
}

/// How many tokens fit into the model.
struct Room {
    tokenizer: TextTokenizer,
    n_positions: usize,
    max_tokens: usize,
}

impl Room {
    fn of(run: &Run) -> anyhow::Result<Self> {
        let path = folder(run)?;
        let n_positions = DecoderConfig::load(&path.join("config.json"))?.max_positions;
        let max_tokens = run.config.teacher.max_tokens as usize;
        Ok(Self { tokenizer: TextTokenizer::load(path)?, n_positions, max_tokens })
    }

    /// Of a prompt; a failure where it leaves no room for an answer.
    fn tokens_of(&self, messages: &[Message]) -> anyhow::Result<Result<usize, CallFailure>> {
        let n_tokens = self.tokenizer.encode_prompt(messages)?.len();
        if n_tokens + self.max_tokens <= self.n_positions {
            return Ok(Ok(n_tokens));
        }
        let message = format!(
            "the prompt has {n_tokens} tokens; with teacher.max_tokens = {} they exceed the model's {} positions",
            self.max_tokens, self.n_positions
        );
        Ok(Err(CallFailure { kind: FailureKind::Rejected, message }))
    }
}

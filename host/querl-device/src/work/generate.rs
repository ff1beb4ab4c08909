//! The answers of a model, as a job.

use super::{Rank, load_adapter};
use crate::{Answered, Device, Ending, Failure, Generating, Host, JobError, Outcome};
use querl_core::records::Message;
use querl_model::{
    Decoding, Engine, EngineSettings, GenerationRequest, ModelError, PrefixLife, Ranks, SamplingSettings,
    TextTokenizer, Weights,
};
use querl_train::rl::sampling;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Answers every prompt and hands the answers over, some at once; looks between them whether to stop.
pub(super) fn answer(rank: &Rank<'_>, generating: &Generating, host: &dyn Host) -> Result<Outcome, JobError> {
    let decoder = rank.decoder(Weights::Frozen)?;
    let adapter = generating.adapter.as_ref().map(|path| load_adapter(path, &decoder)).transpose()?;
    let decoding = match generating.n_beams {
        1 => Decoding::Greedy,
        n_beams => Decoding::Beam { n_beams, length_penalty: 1.0 },
    };
    let tokenizer = TextTokenizer::load(&rank.job.model.path)?;
    // Nothing is kept from one query to the next: each takes as long as it would alone.
    let settings = EngineSettings { prefix_life: PrefixLife::Call, max_prefix_tokens: 0, ..EngineSettings::default() };
    let mut engine = Engine::new(&decoder, settings)?;
    engine.set_policy(adapter.as_ref(), 0)?;
    let is_undisturbed = rank.device != Device::Cpu || rank.mesh.all.world_size() == 1;
    let sampling = sampling(&generating.limits);
    let mut answering = Answering { engine, tokenizer, decoding, sampling, is_undisturbed };
    for prompts in generating.prompts.chunks(generating.n_at_once.max(1)) {
        if rank.mesh.all.any(host.stop().load(Ordering::Relaxed))? {
            let message = "interrupted; finished work is saved, run the same command to resume".into();
            return Err(Failure { ending: Ending::Interrupted, message }.into());
        }
        host.take(answering.answer_with_others(&rank.mesh.data, prompts)?)?;
    }
    Ok(Outcome::Generated)
}

struct Answering<'a> {
    engine: Engine<'a>,
    tokenizer: TextTokenizer,
    decoding: Decoding,
    /// Limits and stop strings, as in training.
    sampling: SamplingSettings,
    /// Whether no other rank computes on the same device.
    is_undisturbed: bool,
}

impl Answering<'_> {
    /// Answers to all prompts, of which each rank writes its own.
    fn answer_with_others(&mut self, ranks: &Ranks, prompts: &[Vec<Message>]) -> Result<Vec<Answered>, ModelError> {
        let mine = prompts.iter().skip(ranks.rank()).step_by(ranks.world_size());
        let mine = mine.map(|prompt| self.answer(prompt)).collect::<Result<Vec<_>, _>>()?;
        let all = ranks.all_gather(mine)?;
        let answer = |index: usize| all[index % all.len()][index / all.len()].clone();
        Ok((0..prompts.len()).map(answer).collect())
    }

    /// One query at a time: the latency is what a single user would wait.
    fn answer(&mut self, messages: &[Message]) -> Result<Answered, ModelError> {
        let started = Instant::now();
        let prompt = self.tokenizer.encode_prompt(messages)?;
        let request = GenerationRequest { prompt: &prompt, seed: 0, n: 1 };
        let answers = self.engine.generate(&[request], self.decoding, &self.sampling, &self.tokenizer)?;
        let answers = answers.into_iter().flatten();
        let texts = answers.map(|answer| Ok((self.tokenizer.decode(&answer.token_ids)?, answer)));
        let (text, answer) = texts.collect::<Result<Vec<_>, ModelError>>()?.swap_remove(0);
        Ok(Answered {
            text: self.sampling.before_stop(&text).to_owned(),
            n_tokens: answer.token_ids.len() as u32,
            truncated: answer.truncated,
            latency_ms: self.is_undisturbed.then(|| started.elapsed().as_secs_f64() * 1e3),
        })
    }
}

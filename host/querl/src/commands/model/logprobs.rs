//! `querl model logprobs`: what a model makes of token sequences, for comparison with other programs.

use crate::args::usage;
use anyhow::Context;
use clap::Args;
use querl_model::{Decoder, LoraAdapter, PackedBatch, SecondOpinion, TextTokenizer, Weights};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write};
use std::path::PathBuf;

/// What `querl model logprobs` takes.
#[derive(Debug, Args)]
pub(crate) struct LogprobsArgs {
    /// A Hugging Face directory
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// A PEFT adapter
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Lines of {"token_ids": [...]} or {"text": "..."}
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// Add to each line the largest difference from candle-transformers' decoder of the same model: code of other people
    #[arg(long, conflicts_with = "adapter")]
    second_opinion: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum LogprobsInput {
    Tokens { token_ids: Vec<u32> },
    Text { text: String },
}

#[derive(Serialize)]
struct LogprobsOutput {
    token_ids: Vec<u32>,
    logprobs: Vec<Option<f32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    largest_difference: Option<f32>,
}

/// Prints a line for each line of the input.
pub(crate) fn run(args: &LogprobsArgs) -> anyhow::Result<()> {
    let decoder = Decoder::load(&args.model, Weights::Frozen).map_err(usage)?;
    let adapter = args.adapter.as_ref().map(|path| LoraAdapter::load(path, decoder.config())).transpose();
    let adapter = adapter.map_err(usage)?;
    let file = std::fs::File::open(&args.input).map_err(|error| usage(format!("{}: {error}", args.input.display())))?;
    let other = if args.second_opinion { Some(SecondOpinion::load(&args.model).map_err(usage)?) } else { None };
    let mut tokenizer = None;
    let mut out = std::io::stdout().lock();
    for (index, line) in std::io::BufReader::new(file).lines().enumerate() {
        let line = line?;
        if line.trim().is_empty() {
            continue;
        }
        let place = || format!("{}:{}", args.input.display(), index + 1);
        let input: LogprobsInput = serde_json::from_str(&line)
            .map_err(|_| usage(format!("{}: expected {{\"token_ids\": [...]}} or {{\"text\": \"...\"}}", place())))?;
        let token_ids = match input {
            LogprobsInput::Tokens { token_ids } => token_ids,
            LogprobsInput::Text { text } => {
                if tokenizer.is_none() {
                    tokenizer = Some(TextTokenizer::load(&args.model).map_err(usage)?);
                }
                tokenizer.as_ref().map_or(Ok(Vec::new()), |tokenizer| tokenizer.encode(&text))?
            }
        };
        let mut output = line_logprobs(&decoder, adapter.as_ref(), token_ids).with_context(place)?;
        if let Some(other) = &other {
            output.largest_difference = Some(largest_difference(&decoder, other, &output).with_context(place)?);
        }
        serde_json::to_writer(&mut out, &output)?;
        out.write_all(b"\n")?;
    }
    Ok(())
}

fn line_logprobs(
    decoder: &Decoder,
    adapter: Option<&LoraAdapter>,
    token_ids: Vec<u32>,
) -> anyhow::Result<LogprobsOutput> {
    let (n_known, n_positions) = (decoder.config().vocab_size, decoder.config().max_positions);
    if let Some(id) = token_ids.iter().find(|&&id| id as usize >= n_known) {
        return Err(usage(format!("token id {id} is outside the vocabulary of {n_known}")).into());
    }
    if token_ids.len() > n_positions {
        return Err(
            usage(format!("{} tokens are more than the model's {n_positions} positions", token_ids.len())).into()
        );
    }
    let mut logprobs = vec![None; token_ids.len().min(1)];
    if token_ids.len() > 1 {
        let hidden = decoder.hidden_states(&PackedBatch::new([&token_ids[..token_ids.len() - 1]]), adapter)?;
        let found = decoder.token_logprobs(&hidden, token_ids[1..].to_vec(), 1.0, adapter)?.to_vec2::<f32>()?;
        logprobs.extend(found.into_iter().map(|row| Some(row[0])));
    }
    Ok(LogprobsOutput { token_ids, logprobs, largest_difference: None })
}

/// Of a line's log-probabilities from those that the other decoder's hidden states give; 0 where there are none.
fn largest_difference(decoder: &Decoder, other: &SecondOpinion, line: &LogprobsOutput) -> anyhow::Result<f32> {
    let Some((_, context)) = line.token_ids.split_last().filter(|(_, context)| !context.is_empty()) else {
        return Ok(0.0);
    };
    let targets = line.token_ids[1..].to_vec();
    let theirs = decoder.token_logprobs(&other.hidden_states(context)?, targets, 1.0, None)?.to_vec2::<f32>()?;
    let pairs = line.logprobs.iter().flatten().zip(theirs);
    Ok(pairs.map(|(ours, theirs)| (ours - theirs[0]).abs()).fold(0.0, f32::max))
}

//! What it saves to compute once what sequences begin with in common: rows and time of a training step with and without, in
//! turns, on the rows of a run.
//!
//! `cargo run --release -p querl-model --example shared_prefix -- MODEL_DIR runs/NAME/data/train.jsonl`
//!
//! With a third argument, the number of one of the forms (0, 1 or 2), that form runs alone: to see how much memory it takes.
//!
//! A step is forward, loss over the answers' tokens and backward, for LoRA of rank 16 on all linear layers. The times are the
//! least of several rounds; rounds of all forms take turns.

use querl_core::config::BaseDtype;
use querl_core::records::DatasetRow;
use querl_model::{
    Decoder, Keep, LoraAdapter, LoraSettings, PackedBatch, Pass, Recompute, TextTokenizer, Weights, backward,
    set_threads,
};
use std::error::Error;
use std::path::Path;
use std::time::Instant;

type Row = (Vec<u32>, usize); // tokens, and where the answer begins

const N_THREADS: usize = 2;
const N_ROUNDS: usize = 12;

#[derive(Clone, Copy, PartialEq)]
enum Form {
    SideBySide,
    Tree,
    TreeCheckpointed,
}

const FORMS: [(Form, &str); 3] =
    [(Form::SideBySide, "side by side"), (Form::Tree, "tree"), (Form::TreeCheckpointed, "tree, checkpointed")];

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, data, only @ ..] = arguments.as_slice() else {
        return Err("usage: shared_prefix MODEL_DIR DATA.jsonl [FORM]".into());
    };
    let only = only.first().map(|form| form.parse()).transpose()?;
    set_threads(N_THREADS);
    let model = Path::new(model);
    let decoder = Decoder::load_as(model, Weights::Frozen, BaseDtype::F32)?;
    let adapter = LoraAdapter::new(&decoder, LoraSettings::all_linear(16, 32.0), 1)?;
    let tokenizer = TextTokenizer::load(model)?;
    let text = std::fs::read_to_string(data)?;
    let rows: Vec<DatasetRow> = text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let sequence = |row: &DatasetRow| -> Result<Option<Row>, Box<dyn Error>> {
        let Some(target) = row.target() else { return Ok(None) };
        let prompt = tokenizer.encode_prompt(row.prompt())?;
        let answer = prompt.len();
        Ok(Some(([prompt, tokenizer.encode_response(target)?].concat(), answer)))
    };
    let rows: Vec<Row> = rows.iter().filter_map(|row| sequence(row).transpose()).collect::<Result<_, _>>()?;
    for (what, step) in [
        ("16 rows", rows[..16].to_vec()),
        ("64 rows", rows[..64].to_vec()),
        ("16 rows, 4 answers each", (0..64).map(|i| with_answer(&rows[i / 4], &rows[i])).collect()),
    ] {
        measure(what, &decoder, &adapter, &step, only)?;
    }
    Ok(())
}

/// The prompt of one row with the answer of another.
fn with_answer(prompt: &Row, answer: &Row) -> Row {
    ([&prompt.0[..prompt.1], &answer.0[answer.1..]].concat(), prompt.1)
}

fn measure(
    what: &str,
    decoder: &Decoder,
    adapter: &LoraAdapter,
    rows: &[Row],
    only: Option<usize>,
) -> Result<(), Box<dyn Error>> {
    let is_asked_for = |index: &usize| only.is_none_or(|only| only == *index);
    let mut least = [f64::INFINITY; FORMS.len()];
    let mut n_rows = [0; FORMS.len()];
    for _ in 0..N_ROUNDS {
        for (index, (form, _)) in FORMS.iter().enumerate().filter(|(index, _)| is_asked_for(index)) {
            let started = Instant::now();
            n_rows[index] = step(*form, decoder, adapter, rows)?;
            least[index] = least[index].min(started.elapsed().as_secs_f64());
        }
    }
    println!("{what}:");
    for (index, (_, name)) in FORMS.iter().enumerate().filter(|(index, _)| is_asked_for(index)) {
        let faster =
            only.map_or(format!(", {:.2} times as fast as side by side", least[0] / least[index]), |_| "".into());
        println!("  {name:20} {:6} rows computed, {:8.1} ms{faster}", n_rows[index], least[index] * 1e3);
    }
    Ok(())
}

/// Returns how many rows were computed.
fn step(form: Form, decoder: &Decoder, adapter: &LoraAdapter, rows: &[Row]) -> Result<usize, Box<dyn Error>> {
    let tokens = rows.iter().map(|(tokens, _)| &tokens[..tokens.len() - 1]);
    let batch = if form == Form::SideBySide { PackedBatch::new(tokens) } else { PackedBatch::shared(tokens) };
    let recompute = (form == Form::TreeCheckpointed).then(|| Recompute::new(Keep::Inputs));
    let (mut wanted, mut targets) = (Vec::new(), Vec::new());
    for (index, (tokens, answer)) in rows.iter().enumerate() {
        wanted.extend((*answer..tokens.len()).map(|position| batch.row_of(index, position - 1) as u32));
        targets.extend_from_slice(&tokens[*answer..]);
    }
    let pass = Pass { recompute: recompute.as_ref(), ..Pass::with(Some(adapter)) };
    let hidden = decoder.hidden_at(&batch, &wanted, &pass)?;
    let loss = decoder.token_logprobs(&hidden, targets, 1.0, Some(adapter))?.narrow(1, 0, 1)?.mean_all()?.neg()?;
    backward(&loss, recompute.as_ref())?;
    Ok(batch.n_rows())
}

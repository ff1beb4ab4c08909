//! What it costs in accuracy to store the frozen base in fewer bits: logits of texts, compared with those of the f32 base.
//!
//! ```sh
//! cargo run --release -p querl-gpu --example precision -- examples/tiny-qwen3 examples/fivedoctors/knowledge_base.jsonl
//! ```
//! With the feature `cuda` and a third argument such as `cuda:0` the stored bases are on a GPU, whose activations are bf16; the f32
//! base that they are compared with is the CPU's.
//!
//! The texts are the lines of the file as they stand, at most 128 tokens of each. Printed for each type: bytes of the base's
//! weights, mean and largest error of a logit (and the mean size of a centred logit), mean divergence
//! KL(f32 || type) of the next token in nats, share of positions with the same most likely token, and the change of the mean
//! negative log-probability of the text.
#![allow(clippy::unwrap_used)] // a benchmark program

use candle_core::{D, Device, Tensor};
use querl_core::config::BaseDtype;
use querl_model::{ComputeDevice, Decoder, PackedBatch, Pass, TextTokenizer, Weights};
use std::path::PathBuf;

const TOKENS_PER_TEXT: usize = 128;
const N_TEXTS: usize = 64;

/// Logits `(N, V)` of all positions but the last of each text, and the negative log-probability of the next tokens.
fn run(decoder: &Decoder, texts: &[Vec<u32>]) -> (Tensor, f64) {
    let batch = PackedBatch::new(texts.iter().map(Vec::as_slice));
    let (mut rows, mut targets) = (Vec::new(), Vec::new());
    for (index, text) in texts.iter().enumerate() {
        rows.extend((0..text.len() - 1).map(|position| batch.row_of(index, position) as u32));
        targets.extend_from_slice(&text[1..]);
    }
    let hidden = decoder.hidden_at(&batch, &rows, &Pass::with(None)).unwrap();
    let logits = decoder.logits(&hidden, None).unwrap().to_device(&Device::Cpu).unwrap();
    let logprobs = decoder.token_logprobs(&hidden, targets, 1.0, None).unwrap().narrow(1, 0, 1).unwrap();
    (logits, -f64::from(logprobs.mean_all().unwrap().to_scalar::<f32>().unwrap()))
}

/// The CPU, or the named GPU, with the dtypes that it supports.
fn place(name: Option<String>) -> (ComputeDevice, Vec<BaseDtype>) {
    let storages = vec![BaseDtype::Bf16, BaseDtype::F16, BaseDtype::Int8, BaseDtype::Fp8, BaseDtype::Nf4];
    match name.as_deref() {
        None | Some("cpu") => (ComputeDevice::Cpu, storages),
        #[cfg(not(feature = "cuda"))]
        Some(name) => panic!("{name}: built without the feature `cuda`"),
        #[cfg(feature = "cuda")]
        Some(name) => {
            let index = name.strip_prefix("cuda:").expect("`cpu` or `cuda:N`").parse().unwrap();
            (querl_cuda::compute_device(index).unwrap(), ComputeDevice::GPU_DTYPES.to_vec())
        }
    }
}

fn mean(tensor: &Tensor) -> f32 {
    tensor.mean_all().unwrap().to_scalar().unwrap()
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let model = PathBuf::from(arguments.next().expect("a model directory"));
    let file = PathBuf::from(arguments.next().expect("a file of texts"));
    let (place, storages) = place(arguments.next());
    let tokenizer = TextTokenizer::load(&model).unwrap();
    let lines = std::fs::read_to_string(&file).unwrap();
    let encode = |line: &str| tokenizer.encode(line).unwrap().into_iter().take(TOKENS_PER_TEXT).collect::<Vec<u32>>();
    let texts: Vec<Vec<u32>> = lines.lines().take(N_TEXTS).map(encode).filter(|text| text.len() > 1).collect();
    let (exact, exact_loss) = run(&Decoder::load(&model, Weights::Frozen).unwrap(), &texts);
    let exact_log_p = candle_nn::ops::log_softmax(&exact, D::Minus1).unwrap();
    let centred = exact.broadcast_sub(&exact.mean_keepdim(1).unwrap()).unwrap().abs().unwrap();
    println!(
        "{} positions; mean size of a centred logit {:.3}; loss {exact_loss:.4}",
        exact.dim(0).unwrap(),
        mean(&centred)
    );
    println!("| dtype | mean error of a logit | largest | KL, nats | same first choice | loss |");
    println!("|---|---|---|---|---|---|");
    for dtype in storages {
        let (logits, loss) = run(&Decoder::load_on(&model, Weights::Frozen, dtype, &place).unwrap(), &texts);
        let error = (&logits - &exact).unwrap().abs().unwrap();
        let log_p = candle_nn::ops::log_softmax(&logits, D::Minus1).unwrap();
        let divergence = (exact_log_p.exp().unwrap() * (&exact_log_p - log_p).unwrap()).unwrap().sum(1).unwrap();
        let same = logits.argmax(1).unwrap().eq(&exact.argmax(1).unwrap()).unwrap();
        println!(
            "| {} | {:.5} | {:.4} | {:.2e} | {:.4} | {:+.5} |",
            dtype.name(),
            mean(&error),
            error.flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap(),
            mean(&divergence),
            mean(&same.to_dtype(candle_core::DType::F32).unwrap()),
            loss - exact_loss,
        );
    }
}

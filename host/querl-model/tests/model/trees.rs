//! Compares three ways to compute the same values: sequences one by one, packed, and packed as a prefix tree; each with saved activations
//! and with gradient checkpointing. Gradients are also compared with finite differences.

use crate::sequences::{self, NAMES};
use crate::{decoder_files, values};
use candle_core::{Tensor, Var};
use querl_model::{Decoder, Dropout, Keep, LoraAdapter, LoraSettings, PackedBatch, Pass, Recompute, Weights, backward};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;

/// Sequences, including one whose response begins right after the shared prefix.
fn sequences() -> Vec<(Vec<u32>, usize)> {
    [sequences::parting(40), vec![(vec![5, 9, 2, 7, 50, 51, 52, 53], 5)]].concat()
}

fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(1e-3f32, |max, x| max.max(x.abs()));
    let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(worst <= tolerance * scale, "{what}: off by {worst}, largest value {scale}");
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Packing {
    SideBySide,
    Tree,
}

struct Model {
    decoder: Decoder,
    adapter: Option<LoraAdapter>,
    dropout: Option<Dropout>,
}

impl Model {
    fn full(name: &str) -> Self {
        Self { decoder: Decoder::load(&decoder_files(name), Weights::Trained).unwrap(), adapter: None, dropout: None }
    }

    fn lora(name: &str) -> Self {
        Self::adapted(name, LoraSettings::all_linear(3, 6.0))
    }

    fn dora(name: &str) -> Self {
        let settings = LoraSettings { use_dora: true, ..LoraSettings::all_linear(3, 6.0) };
        Self { dropout: Some(Dropout { p: 0.3, seed: 11 }), ..Self::adapted(name, settings) }
    }

    /// A model with an adapter whose matrices A and B are both random.
    fn adapted(name: &str, settings: LoraSettings) -> Self {
        let decoder = Decoder::load(&decoder_files(name), Weights::Frozen).unwrap();
        let adapter = LoraAdapter::new(&decoder, settings, 5).unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(9);
        for (_, var) in adapter.vars().iter().filter(|(name, _)| !name.contains("magnitude")) {
            let values: Vec<f32> = (0..var.elem_count()).map(|_| rng.random_range(-0.2..0.2)).collect();
            var.set(&Tensor::from_vec(values, var.shape(), var.device()).unwrap()).unwrap();
        }
        Self { decoder, adapter: Some(adapter), dropout: None }
    }

    fn vars(&self) -> &BTreeMap<String, Var> {
        self.adapter.as_ref().map_or(self.decoder.vars(), LoraAdapter::vars)
    }

    /// Log-probabilities and entropies of all response tokens, `(N, 2)`.
    fn logprobs(&self, sequences: &[(Vec<u32>, usize)], packing: Packing, recompute: Option<&Recompute>) -> Tensor {
        let tokens = sequences.iter().map(|(tokens, _)| tokens.as_slice());
        let batch = match packing {
            Packing::SideBySide => PackedBatch::new(tokens),
            Packing::Tree => PackedBatch::shared(tokens),
        };
        let (mut rows, mut targets) = (Vec::new(), Vec::new());
        for (index, (tokens, answer)) in sequences.iter().enumerate() {
            rows.extend((*answer..tokens.len()).map(|position| batch.row_of(index, position - 1) as u32));
            targets.extend_from_slice(&tokens[*answer..]);
        }
        let pass = Pass { recompute, adapter: self.adapter.as_ref(), dropout: self.dropout };
        let hidden = self.decoder.hidden_at(&batch, &rows, &pass).unwrap();
        self.decoder.token_logprobs(&hidden, targets, 0.8, self.adapter.as_ref()).unwrap()
    }

    /// A loss in which every log-probability and entropy has a different weight.
    fn loss(logprobs: &Tensor) -> Tensor {
        let weights: Vec<f32> = (0..logprobs.elem_count()).map(|i| 0.3 + (i % 5) as f32 * 0.1).collect();
        let weights = Tensor::from_vec(weights, logprobs.shape(), logprobs.device()).unwrap();
        (logprobs * weights).unwrap().sum_all().unwrap()
    }

    fn gradients(&self, sequences: &[(Vec<u32>, usize)], packing: Packing, keep: Keep) -> BTreeMap<String, Vec<f32>> {
        let recompute = Recompute::new(keep);
        let loss = Self::loss(&self.logprobs(sequences, packing, Some(&recompute)));
        let gradients = backward(&loss, Some(&recompute)).unwrap();
        let named = |(name, var): (&String, &Var)| {
            let gradient = gradients.get(var).unwrap_or_else(|| panic!("no gradient reached {name}"));
            (name.clone(), values(gradient))
        };
        self.vars().iter().map(named).collect()
    }
}

/// Models without DoRA are checked with finite differences: DoRA's gradient takes the norms of rows as constants, which a finite difference
/// does not.
fn with_dora() -> impl Iterator<Item = (String, Model)> {
    models().chain(["qwen2-untied", "qwen3-tied"].map(|name| (format!("{name} dora"), Model::dora(name))))
}

fn models() -> impl Iterator<Item = (String, Model)> {
    let both = |name: &str| [(format!("{name} full"), Model::full(name)), (format!("{name} lora"), Model::lora(name))];
    NAMES.into_iter().chain(["llama-bias", "llama3-scaled", "mistral", "window-qwen2"]).flat_map(both)
}

#[test]
fn a_tree_gives_what_its_sequences_give_one_by_one() {
    let all = sequences();
    for (name, model) in with_dora() {
        let one_by_one: Vec<f32> = all
            .iter()
            .flat_map(|sequence| values(&model.logprobs(std::slice::from_ref(sequence), Packing::SideBySide, None)))
            .collect();
        for packing in [Packing::SideBySide, Packing::Tree] {
            let found = values(&model.logprobs(&all, packing, None));
            assert_close(&format!("{name}, {packing:?}"), &found, &one_by_one, 1e-5);
        }
    }
}

#[test]
fn gradients_are_the_same_however_sequences_are_packed_and_layers_kept() {
    let all = sequences();
    for (name, model) in with_dora() {
        let expected = one_by_one(&model, &all);
        for packing in [Packing::SideBySide, Packing::Tree] {
            for keep in [Keep::Activations, Keep::Inputs] {
                for (var, found) in model.gradients(&all, packing, keep) {
                    assert_close(&format!("{name}, {packing:?}, {keep:?}: {var}"), &found, &expected[&var], 2e-5);
                }
            }
        }
    }
}

/// Gradients summed over passes of one sequence each; the weights of the loss are those of the complete batch.
fn one_by_one(model: &Model, all: &[(Vec<u32>, usize)]) -> BTreeMap<String, Vec<f32>> {
    let mut sums: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    let mut first = 0;
    for sequence in all {
        let logprobs = model.logprobs(std::slice::from_ref(sequence), Packing::SideBySide, None);
        let weights: Vec<f32> = (0..logprobs.elem_count()).map(|i| 0.3 + ((first + i) % 5) as f32 * 0.1).collect();
        first += weights.len();
        let weights = Tensor::from_vec(weights, logprobs.shape(), logprobs.device()).unwrap();
        let gradients = backward(&(logprobs * weights).unwrap().sum_all().unwrap(), None).unwrap();
        for (name, var) in model.vars() {
            let gradient = values(gradients.get(var).unwrap());
            let sum = sums.entry(name.clone()).or_insert_with(|| vec![0.0; gradient.len()]);
            sum.iter_mut().zip(gradient).for_each(|(sum, gradient)| *sum += gradient);
        }
    }
    sums
}

/// Each variable is changed in a random direction; the slope of the loss must equal the dot product of direction and gradient.
#[test]
fn every_trained_tensor_has_the_gradient_that_finite_differences_find() {
    let all = sequences();
    for (name, model) in models() {
        let gradients = model.gradients(&all, Packing::Tree, Keep::Inputs);
        let loss = || f64::from(Model::loss(&model.logprobs(&all, Packing::Tree, None)).to_scalar::<f32>().unwrap());
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        for (var_name, var) in model.vars() {
            let gradient = &gradients[var_name];
            assert!(gradient.iter().any(|g| *g != 0.0), "{name}: the gradient of {var_name} is zero");
            // A direction with the signs of the gradient, so that the slope is far above rounding errors.
            let direction: Vec<f32> = gradient.iter().map(|g| g.signum() * rng.random_range(0.5..1.5)).collect();
            let expected: f64 = direction.iter().zip(gradient).map(|(d, g)| f64::from(d * g)).sum();
            let step = 1e-2 / direction.iter().map(|d| d * d).sum::<f32>().sqrt();
            let start = var.as_tensor().copy().unwrap();
            let at = |factor: f32| {
                let moved: Vec<f32> =
                    values(&start).iter().zip(&direction).map(|(x, d)| x + factor * step * d).collect();
                var.set(&Tensor::from_vec(moved, var.shape(), var.device()).unwrap()).unwrap();
                loss()
            };
            let slope = (at(1.0) - at(-1.0)) / f64::from(2.0 * step);
            var.set(&start).unwrap();
            let off = (slope - expected).abs() / expected.abs();
            assert!(off < 1e-2, "{name}, {var_name}: slope {slope}, gradient {expected}");
        }
    }
}

#[test]
fn a_row_that_is_not_there_is_an_error() {
    let model = Model::lora("qwen3-tied");
    let batch = PackedBatch::new([[1, 2, 3].as_slice()]);
    let error = model.decoder.hidden_at(&batch, &[3], &Pass::default()).unwrap_err().to_string();
    assert!(error.contains("no row 3 among 3"), "{error}");
}

/// Rows may be requested in any order and more than once.
#[test]
fn rows_come_in_the_requested_order() {
    let model = Model::lora("qwen2-tied");
    let batch = PackedBatch::new([[1, 2, 3, 4].as_slice(), &[5, 6]]);
    let pass = Pass::with(model.adapter.as_ref());
    let all = values(&model.decoder.hidden_at(&batch, &[0, 1, 2, 3, 4, 5], &pass).unwrap());
    let some = values(&model.decoder.hidden_at(&batch, &[4, 1, 4], &pass).unwrap());
    let width = all.len() / 6;
    let row = |row: usize| &all[row * width..(row + 1) * width];
    assert_close("rows", &some, &[row(4), row(1), row(4)].concat(), 1e-5);
}

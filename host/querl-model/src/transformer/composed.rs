//! The layer composed of single candle operations, each with its own gradient: what tests compare [`super::TransformerLayer`] with.
#![allow(clippy::unwrap_used)]

use super::autograd::LayerPass;
use super::backend::Rows;
use super::layer::LayerWeights;
use super::linear::Linear;
use crate::LoraAdapter;
use crate::adapter::LoraPair;
use crate::dropout::DropoutMask;
use crate::kernels::projection::{self, Trained};
use crate::kernels::{self, FrozenWeight, ParameterGradients, Projection, Weight, input_backward_sum, slice_op};
use candle_core::{Result, Tensor, bail};

/// Output of a layer for its input `(N, H)`.
pub(super) fn forward(
    weights: &LayerWeights,
    adapter: Option<&LoraAdapter>,
    x: &Tensor,
    LayerPass { layer_rows, attention }: &LayerPass,
) -> Result<Tensor> {
    let (context, rows, queries) = (&layer_rows.context, &layer_rows.rows, layer_rows.queries());
    let eps = f64::from(context.eps);
    let pick = |x: &Tensor| match &layer_rows.query_rows {
        Some(query_rows) => x.index_select(&Tensor::new(query_rows.indices.as_slice(), x.device())?, 0),
        None => Ok(x.clone()),
    };
    let linear = |linear: &Linear, x: &Tensor, rows: &Rows| linear_forward(linear, x, adapter, rows);
    let rope = |x: &Tensor, index: usize, rows: &Rows| match &weights.qk_norm {
        Some(norms) => kernels::norm_rope(x, &norms[index], &context.rope, &rows.positions, eps),
        None => kernels::rope(x, &context.rope, &rows.positions),
    };
    let normed = kernels::rms_norm(x, &weights.input_norm, eps)?;
    let q = rope(&linear(&weights.q, &pick(&normed)?, queries)?, 0, queries)?;
    let k = rope(&linear(&weights.k, &normed, rows)?, 1, rows)?;
    let v = linear(&weights.v, &normed, rows)?;
    let attended = kernels::attention(&q, &k, &v, &attention.queries, attention.head_dim)?;
    let x = (pick(x)? + linear(&weights.o, &attended, queries)?)?;
    let normed = kernels::rms_norm(&x, &weights.post_attention_norm, eps)?;
    let gated = kernels::swiglu(&linear(&weights.gate, &normed, queries)?, &linear(&weights.up, &normed, queries)?)?;
    x + linear(&weights.down, &gated, queries)?
}

fn linear_forward(linear: &Linear, x: &Tensor, adapter: Option<&LoraAdapter>, rows: &Rows) -> Result<Tensor> {
    let Some(pair) = adapter.and_then(|adapter| adapter.pair(&linear.path)) else {
        return kernels::linear(x, &linear.weight, linear.bias.as_ref());
    };
    let Weight::Frozen(weight) = &linear.weight else { bail!("an adapter on a weight that is trained") };
    match (linear.dora_factor(pair)?, &rows.dropout) {
        (None, None) => kernels::lora_linear(x, weight, linear.bias.as_ref(), &pair.a, &pair.b, pair.scale),
        (None, Some(mask)) => {
            let base = kernels::frozen_linear(x, weight, linear.bias.as_ref())?;
            base + lora_dropout(x, &pair.a, &pair.b, pair.scale, mask, &linear.path)?
        }
        (Some(factor), None) => {
            let changed = kernels::lora_linear(x, weight, None, &pair.a, &pair.b, pair.scale)?;
            let y = changed.broadcast_mul(&factor)?;
            linear.bias.as_ref().map_or(Ok(y.clone()), |bias| y.broadcast_add(bias))
        }
        (Some(factor), Some(mask)) => dora_dropout(linear, x, weight, pair, &factor, mask),
    }
}

/// `W x + b + (m - 1) W d(x) + m s B A d(x)` with dropout `d` and DoRA's factor `m`: the bare weight sees all inputs.
///
/// Source: PEFT's `DoraLinearVariant.forward`, the form for training with dropout.
fn dora_dropout(
    linear: &Linear,
    x: &Tensor,
    weight: &FrozenWeight,
    pair: &LoraPair,
    factor: &Tensor,
    mask: &DropoutMask,
) -> Result<Tensor> {
    let base = kernels::frozen_linear(x, weight, linear.bias.as_ref())?;
    let dropped = dropped(mask, x, &linear.path)?;
    let low_rank = (dropped.matmul(&pair.a.t()?)?.matmul(&pair.b.t()?)? * f64::from(pair.scale))?;
    let on_dropped = kernels::frozen_linear(&dropped, weight, None)?;
    (base + on_dropped.broadcast_mul(&(factor - 1.0)?)?)? + low_rank.broadcast_mul(factor)?
}

/// `d(x)` for the layer at `path`, with its gradient.
fn dropped(mask: &DropoutMask, x: &Tensor, path: &str) -> Result<Tensor> {
    check_keys(mask, x)?;
    let (forward, backward, width) = (Dropper::new(mask, path), Dropper::new(mask, path), x.dim(1)?);
    slice_op(
        "dropout",
        [&x.contiguous()?],
        x.shape(),
        move |[x]| Ok(forward.dropped(x, width)),
        move |_, [_, grad]| Ok([Some(backward.dropped(grad, width))]),
    )
}

fn check_keys(mask: &DropoutMask, x: &Tensor) -> Result<()> {
    if x.dim(0)? != mask.row_keys().len() {
        bail!("dropout: {} rows with {} keys", x.dim(0)?, mask.row_keys().len());
    }
    Ok(())
}

/// The mask of one linear layer.
struct Dropper {
    mask: DropoutMask,
    path: String,
}

impl Dropper {
    fn new(mask: &DropoutMask, path: &str) -> Self {
        Self { mask: mask.clone(), path: path.to_owned() }
    }

    fn dropped(&self, x: &[f32], width: usize) -> Vec<f32> {
        let mut dropped = x.to_vec();
        self.mask.of_layer(&self.path, width).apply(&mut dropped);
        dropped
    }
}

/// `scale * (d(x) A^T) B^T` with dropout `d` of the layer at `path`; the masks are drawn again in the backward pass, not kept.
///
/// `x`: `(N, in)`; `lora_a`: `(rank, in)`; `lora_b`: `(out, rank)`. Returns `(N, out)`. Gradients reach all three.
///
/// Source: PEFT's `lora.Linear.forward`.
fn lora_dropout(
    x: &Tensor,
    lora_a: &Tensor,
    lora_b: &Tensor,
    scale: f32,
    mask: &DropoutMask,
    path: &str,
) -> Result<Tensor> {
    check_keys(mask, x)?;
    let ((_, n_in), (rank, a_in), (_, b_in)) = (x.dims2()?, lora_a.dims2()?, lora_b.dims2()?);
    if n_in == 0 || rank == 0 || a_in != n_in || b_in != rank {
        bail!("adapter of shapes {:?} and {:?} for rows of {n_in}", lora_a.dims(), lora_b.dims());
    }
    let (forward, backward) = (Dropper::new(mask, path), Dropper::new(mask, path));
    slice_op(
        "lora-dropout",
        [&x.contiguous()?, lora_a, lora_b],
        (x.dim(0)?, lora_b.dim(0)?),
        move |[x, a, b]| {
            let (lora_a_out, _) = matrix(a, n_in).forward(&forward.dropped(x, n_in))?;
            let (mut y, _) = matrix(b, rank).forward(&lora_a_out)?;
            y.iter_mut().for_each(|y| *y *= scale);
            Ok(y)
        },
        // With `g` the gradient of `y` times the scale and `v = g B`: `dx = d(v A)`, `dA = v^T d(x)`, `dB = g^T (d(x) A^T)`.
        move |[x, a, b], [_, grad]| {
            let (a, b, dropped) = (matrix(a, n_in), matrix(b, rank), backward.dropped(x, n_in));
            let g: Vec<f32> = grad.iter().map(|grad| grad * scale).collect();
            let gradients = |layer, x: &[f32], grad: &[f32]| {
                let mut found = ParameterGradients::default();
                projection::parameter_gradients(&mut [Trained { layer, x, lora_a_out: &[], grad, found: &mut found }])?;
                Ok::<_, candle_core::Error>(found)
            };
            let of_b = gradients(&b, &a.forward(&dropped)?.0, &g)?;
            let v = input_backward_sum(&[(&b, &g, &of_b)])?;
            let of_a = gradients(&a, &dropped, &v)?;
            let dx = backward.dropped(&input_backward_sum(&[(&a, &v, &of_a)])?, n_in);
            Ok([Some(dx), Some(of_a.weight), Some(of_b.weight)])
        },
    )
}

/// A trained matrix `(out, in)`, row by row.
fn matrix(weight: &[f32], n_in: usize) -> Projection<'_> {
    Projection::Trained { weight, n_in, bias: None }
}

#[cfg(test)]
mod tests {
    use super::super::autograd::{Keep, Recompute, backward};
    use super::*;
    use crate::batch::row_key;
    use crate::dropout::Dropout;
    use crate::random::mix;
    use crate::sharding::Shard;
    use crate::{Decoder, LoraSettings, PackedBatch, Weights};
    use candle_core::{Device, Var};
    use std::path::Path;

    /// A layer with what it is computed on.
    struct Case {
        decoder: Decoder,
        adapter: Option<LoraAdapter>,
        pass: LayerPass,
        x: Var,
    }

    /// What a linear layer has in addition to its weight.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Adapter {
        None,
        Lora,
        Dora,
    }

    impl Case {
        fn new(
            name: &str,
            weights: Weights,
            adapter: Adapter,
            dropout: Option<f64>,
            query_rows: Option<&[u32]>,
        ) -> Self {
            let directory =
                Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden/decoders").join(name);
            let decoder = Decoder::load(&directory, weights).unwrap();
            let settings = LoraSettings { use_dora: adapter == Adapter::Dora, ..LoraSettings::all_linear(3, 6.0) };
            let adapter = (adapter != Adapter::None).then(|| LoraAdapter::new(&decoder, settings, 1).unwrap());
            for (seed, var) in adapter.iter().flat_map(|adapter| adapter.vars().values()).enumerate() {
                let n = var.elem_count();
                let moved = Tensor::from_vec(values(n, seed as u64 + 50), var.shape(), &Device::Cpu).unwrap();
                var.set(&(var.as_tensor() + moved).unwrap()).unwrap();
            }
            let sequences: [&[u32]; 3] = [&[1, 2, 3, 4, 5], &[1, 2, 3, 9], &[7, 8]];
            let batch = PackedBatch::shared(sequences);
            let pass = decoder.layer_pass(&batch, dropout.map(|p| Dropout { p, seed: 11 })).unwrap();
            let pass = query_rows.map_or(pass.clone(), |rows| decoder.query_pass(&batch, &pass, rows).unwrap());
            let (n_rows, width) = (batch.n_rows(), decoder.config().hidden_size);
            let x = Var::from_vec(values(n_rows * width, 3), (n_rows, width), &Device::Cpu).unwrap();
            Self { decoder, adapter, pass, x }
        }

        fn layer(&self, collected: Option<&Recompute>) -> Tensor {
            let weights = &self.decoder.layers[1];
            super::super::forward(weights, self.adapter.as_ref(), &self.x, self.pass.clone(), collected).unwrap()
        }

        fn composed(&self) -> Tensor {
            forward(&self.decoder.layers[1], self.adapter.as_ref(), &self.x, &self.pass).unwrap()
        }

        /// Gradients of the input and of all variables of the layer.
        fn gradients(&self, y: &Tensor, collected: Option<&Recompute>) -> Vec<(String, Vec<f32>)> {
            let weights = Tensor::from_vec(values(y.elem_count(), 99), y.shape(), &Device::Cpu).unwrap();
            let loss = (y * weights).unwrap().sum_all().unwrap();
            let gradients = backward(&loss, collected).unwrap();
            let vars = self.adapter.as_ref().map_or(self.decoder.vars(), LoraAdapter::vars);
            let named = vars.iter().filter(|(name, _)| name.contains("layers.1."));
            let named = named.map(|(name, var)| (name.clone(), flat(gradients.get(var).unwrap())));
            [("x".to_owned(), flat(gradients.get(&self.x).unwrap()))].into_iter().chain(named).collect()
        }
    }

    fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
        assert_eq!(found.len(), expected.len(), "{what}");
        let scale = expected.iter().fold(1e-3f32, |max, x| max.max(x.abs()));
        let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(worst <= tolerance * scale, "{what}: off by {worst}, largest value {scale}");
    }

    /// Every kind of layer: frozen and trained bases, LoRA and DoRA, with and without dropout, all rows and the last layer's.
    #[test]
    fn the_layer_agrees_with_the_composed_one_in_values_and_gradients() {
        let kinds = [
            (Weights::Trained, Adapter::None, None),
            (Weights::Frozen, Adapter::None, None),
            (Weights::Frozen, Adapter::Lora, None),
            (Weights::Frozen, Adapter::Lora, Some(0.3)),
            (Weights::Frozen, Adapter::Dora, None),
            (Weights::Frozen, Adapter::Dora, Some(0.3)),
        ];
        for name in ["qwen2-untied", "qwen3-bias"] {
            for (weights, adapter, dropout) in kinds {
                for query_rows in [None, Some([1, 3, 6].as_slice())] {
                    let case = Case::new(name, weights, adapter, dropout, query_rows);
                    let what = format!("{name}, {weights:?}, {adapter:?}, {dropout:?}, {query_rows:?}");
                    let (y, expected) = (case.layer(None), case.composed());
                    assert_close(&what, &flat(&y), &flat(&expected), 2e-6);
                    let expected = case.gradients(&expected, None);
                    let recompute = Recompute::new(Keep::Activations);
                    let collected = case.gradients(&case.layer(Some(&recompute)), Some(&recompute));
                    for found in [case.gradients(&y, None), collected] {
                        assert_eq!(found.len(), expected.len(), "{what}");
                        for ((name, found), (_, expected)) in found.iter().zip(&expected) {
                            assert_close(&format!("{what}, {name}"), found, expected, 1e-5);
                        }
                    }
                }
            }
        }
    }

    fn values(n: usize, seed: u64) -> Vec<f32> {
        (0..n as u64).map(|i| (mix(seed * 1000 + i) >> 40) as f32 / (1u64 << 24) as f32 - 0.5).collect()
    }

    fn var(rows: usize, cols: usize, seed: u64) -> Var {
        Var::from_vec(values(rows * cols, seed), (rows, cols), &Device::Cpu).unwrap()
    }

    fn mask(p: f64, n_rows: u32) -> DropoutMask {
        let row_keys = (0..n_rows).map(|row| row_key(0, row)).collect();
        DropoutMask::new(Dropout { p, seed: 7 }, row_keys, Shard::FULL).unwrap()
    }

    fn flat(tensor: &Tensor) -> Vec<f32> {
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    }

    /// `sum(weights * f)`, whose gradient is compared with central differences of each input value.
    fn check_gradients(vars: &[&Var], f: impl Fn() -> Tensor) {
        let weights = Tensor::from_vec(values(f().elem_count(), 99), f().shape(), &Device::Cpu).unwrap();
        let loss = || (f() * &weights).unwrap().sum_all().unwrap();
        let gradients = loss().backward().unwrap();
        for var in vars {
            let (start, found) = (flat(var), flat(gradients.get(var).unwrap()));
            for index in 0..start.len() {
                let at = |delta: f32| {
                    let mut moved = start.clone();
                    moved[index] += delta;
                    var.set(&Tensor::from_vec(moved, var.shape(), &Device::Cpu).unwrap()).unwrap();
                    loss().to_scalar::<f32>().unwrap()
                };
                let expected = (at(1e-2) - at(-1e-2)) / 2e-2;
                assert!((found[index] - expected).abs() < 2e-3, "{} against {expected}", found[index]);
            }
            var.set(&Tensor::from_vec(start, var.shape(), &Device::Cpu).unwrap()).unwrap();
        }
    }

    #[test]
    fn gradients_of_dropped_inputs_agree_with_finite_differences() {
        let (x, a, b, mask) = (var(5, 6, 1), var(3, 6, 2), var(4, 3, 3), mask(0.4, 5));
        check_gradients(&[&x, &a, &b], || lora_dropout(&x, &a, &b, 1.5, &mask, "layer").unwrap());
        check_gradients(&[&x], || dropped(&mask, &x, "layer").unwrap());
    }

    #[test]
    fn the_number_of_threads_changes_nothing() {
        let (x, a, b, mask) = (var(300, 70, 1), var(8, 70, 2), var(90, 8, 3), mask(0.4, 300));
        let run = |n_threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().unwrap();
            pool.install(|| {
                let y = lora_dropout(&x, &a, &b, 1.5, &mask, "layer").unwrap();
                let gradients = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
                let of = |var: &Var| flat(gradients.get(var).unwrap());
                [flat(&y), of(&x), of(&a), of(&b)]
                    .map(|values| values.into_iter().map(f32::to_bits).collect::<Vec<_>>())
            })
        };
        assert_eq!(run(1), run(3));
    }

    #[test]
    fn a_rows_result_does_not_depend_on_its_neighbours() {
        let (x, a, b, all) = (var(300, 70, 1), var(8, 70, 2), var(90, 8, 3), mask(0.4, 300));
        let together = lora_dropout(&x, &a, &b, 1.5, &all, "layer").unwrap();
        for row in [0, 123, 299] {
            let alone = lora_dropout(&x.narrow(0, row, 1).unwrap(), &a, &b, 1.5, &all.of_rows(&[row as u32]), "layer");
            assert_eq!(flat(&alone.unwrap()), flat(&together.narrow(0, row, 1).unwrap()));
        }
    }

    #[test]
    fn low_rank_product_sees_the_dropped_inputs() {
        let (x, a, b, mask) = (var(5, 6, 1), var(3, 6, 2), var(4, 3, 3), mask(0.4, 5));
        let found = lora_dropout(&x, &a, &b, 1.5, &mask, "layer").unwrap();
        let dropped = super::dropped(&mask, &x, "layer").unwrap();
        let expected = (dropped.matmul(&a.t().unwrap()).unwrap().matmul(&b.t().unwrap()).unwrap() * 1.5).unwrap();
        assert!(flat(&found).iter().zip(flat(&expected)).all(|(a, b)| (a - b).abs() < 1e-6));
    }

    #[test]
    fn the_stated_share_is_dropped_and_the_rest_scaled() {
        let ones = Tensor::ones((400, 100), candle_core::DType::F32, &Device::Cpu).unwrap();
        for p in [0.1, 0.5] {
            let values = flat(&dropped(&mask(p, 400), &ones, "layer").unwrap());
            let n_dropped = values.iter().filter(|value| **value == 0.0).count() as f64;
            let share = n_dropped / values.len() as f64;
            assert!((share - p).abs() < 4.0 * (p * (1.0 - p) / values.len() as f64).sqrt(), "{share} for {p}");
            assert!(values.iter().all(|value| *value == 0.0 || (f64::from(*value) - 1.0 / (1.0 - p)).abs() < 1e-6));
        }
    }

    #[test]
    fn layers_rows_and_seeds_have_masks_of_their_own() {
        let ones = Tensor::ones((2, 64), candle_core::DType::F32, &Device::Cpu).unwrap();
        let first = dropped(&mask(0.5, 2), &ones, "q").unwrap();
        let rows: Vec<Vec<f32>> = first.to_vec2().unwrap();
        assert_ne!(rows[0], rows[1]);
        assert_ne!(flat(&first), flat(&dropped(&mask(0.5, 2), &ones, "k").unwrap()));
        let row_keys = (0..2).map(|row| row_key(0, row)).collect();
        let other = DropoutMask::new(Dropout { p: 0.5, seed: 8 }, row_keys, Shard::FULL).unwrap();
        assert_ne!(flat(&first), flat(&dropped(&other, &ones, "q").unwrap()));
        assert_eq!(flat(&first), flat(&dropped(&mask(0.5, 2), &ones, "q").unwrap()));
    }

    #[test]
    fn matrices_that_do_not_fit_are_an_error() {
        let of = |a: (usize, usize), b: (usize, usize)| {
            lora_dropout(&var(5, 6, 1), &var(a.0, a.1, 2), &var(b.0, b.1, 3), 1.5, &mask(0.4, 5), "layer")
        };
        assert!(of((3, 6), (4, 3)).is_ok());
        for (a, b) in [((3, 4), (4, 3)), ((3, 6), (3, 4)), ((0, 6), (4, 0))] {
            assert!(of(a, b).unwrap_err().to_string().contains("for rows of 6"));
        }
    }

    #[test]
    fn rows_without_a_key_are_an_error() {
        let ones = Tensor::ones((3, 4), candle_core::DType::F32, &Device::Cpu).unwrap();
        assert!(dropped(&mask(0.5, 2), &ones, "q").unwrap_err().to_string().contains("3 rows with 2 keys"));
        assert!(DropoutMask::new(Dropout { p: 1.0, seed: 1 }, Vec::new(), Shard::FULL).is_err());
    }
}

//! The layer composed of single candle operations, each with its own gradient: what tests compare [`super::TransformerLayer`] with.

use super::autograd::LayerPass;
use super::backend::Rows;
use super::layer::LayerWeights;
use super::linear::Linear;
use crate::dropout::DropoutMask;
use crate::{LoraAdapter, kernels};
use candle_core::{Result, Tensor};

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

/// With an adapter `W x + b + s B A d(x)`, and with DoRA's factor `m` `W x + b + (m - 1) W d(x) + m s B A d(x)`, for dropout `d`.
///
/// Source: PEFT's `lora.Linear.forward` and `DoraLinearVariant.forward`, the form for training with dropout.
fn linear_forward(linear: &Linear, x: &Tensor, adapter: Option<&LoraAdapter>, rows: &Rows) -> Result<Tensor> {
    let base = kernels::linear(x, &linear.weight, linear.bias.as_ref())?;
    let Some(pair) = adapter.and_then(|adapter| adapter.pair(&linear.path)) else { return Ok(base) };
    let dropped = match &rows.dropout {
        Some(mask) => dropped(mask, x, &linear.path)?,
        None => x.clone(),
    };
    let lora = (dropped.matmul(&pair.a.t()?)?.matmul(&pair.b.t()?)? * f64::from(pair.scale))?;
    let Some(factor) = linear.dora_factor(pair)? else { return base + lora };
    let on_dropped = kernels::linear(&dropped, &linear.weight, None)?;
    (base + on_dropped.broadcast_mul(&(&factor - 1.0)?)?)? + lora.broadcast_mul(&factor)?
}

/// `d(x)` for the layer at `path`.
fn dropped(mask: &DropoutMask, x: &Tensor, path: &str) -> Result<Tensor> {
    let mut factors = vec![1f32; x.elem_count()];
    mask.of_layer(path, x.dim(1)?).apply(&mut factors);
    x * Tensor::from_vec(factors, x.shape(), x.device())?
}

mod tests {
    use super::super::autograd::{Keep, Recompute, backward};
    use super::super::linear::Lora;
    use super::*;
    use crate::batch::row_key;
    use crate::dropout::Dropout;
    use crate::kernels::{FrozenWeight, LoraMatrices, Projection, projection_gradients};
    use crate::random::mix;
    use crate::sharding::Shard;
    use crate::{Decoder, LoraSettings, PackedBatch, Weights};
    use candle_core::{DType, Device, Var};
    use querl_core::config::BaseDtype;
    use std::path::Path;

    struct Case {
        decoder: Decoder,
        adapter: Option<LoraAdapter>,
        pass: LayerPass,
        x: Var,
    }

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
            let pass = decoder.with_window(&pass, 1);
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

    /// Covers frozen and trained bases, LoRA and DoRA, with and without dropout, all rows and the query rows of the last layer.
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
        // With windows the gradients are sums over few keys, with more cancellation: 1.14e-5 was measured.
        for (name, tolerance) in [("qwen2-untied", 1e-5), ("qwen3-bias", 1e-5), ("window-qwen2", 2e-5)] {
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
                            assert_close(&format!("{what}, {name}"), found, expected, tolerance);
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

    /// Scale of the adapter in [`lora`].
    const SCALE: f32 = 1.5;

    /// Output of LoRA with dropout on a weight of zeros; and, with the output as its own gradient, the gradients of `x`, A and B.
    fn lora(x: &Tensor, a: &Tensor, b: &Tensor, mask: &DropoutMask) -> [Vec<f32>; 4] {
        let ((n_in, rank), n_out) = ((x.dim(1).unwrap(), a.dim(0).unwrap()), b.dim(0).unwrap());
        let zeros = Tensor::zeros((n_out, n_in), DType::F32, &Device::Cpu).unwrap();
        let (weight, [x, a, b]) = (&FrozenWeight::pack(&zeros, BaseDtype::F32).unwrap(), [x, a, b].map(flat));
        let lora = LoraMatrices { a: &a, b: &b, rank, scale: SCALE, dropout: Some(&mask.of_layer("layer", n_in)) };
        let layer = Projection::Frozen { weight, bias: None, lora: Some(lora) };
        let (y, _) = layer.forward(&x).unwrap();
        let (dx, found) = projection_gradients(&layer, &x, &y).unwrap();
        [y, dx, found.a, found.b]
    }

    #[test]
    fn lora_sees_the_dropped_inputs_and_so_do_its_gradients() {
        let (x, a, b, mask) = (var(5, 6, 1), var(3, 6, 2), var(4, 3, 3), mask(0.4, 5));
        let dropped = dropped(&mask, &x, "layer").unwrap();
        let y = (dropped.matmul(&a.t().unwrap()).unwrap().matmul(&b.t().unwrap()).unwrap() * f64::from(SCALE)).unwrap();
        let gradients = (y.sqr().unwrap().sum_all().unwrap() * 0.5).unwrap().backward().unwrap();
        let of = |var: &Var| flat(gradients.get(var).unwrap());
        let expected = [flat(&y), of(&x), of(&a), of(&b)];
        for (index, (found, expected)) in lora(&x, &a, &b, &mask).iter().zip(&expected).enumerate() {
            assert_close(&format!("value {index}"), found, expected, 1e-6);
        }
    }

    #[test]
    fn the_number_of_threads_changes_nothing() {
        let (x, a, b, mask) = (var(300, 70, 1), var(8, 70, 2), var(90, 8, 3), mask(0.4, 300));
        let run = |n_threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().unwrap();
            let values = pool.install(|| lora(&x, &a, &b, &mask));
            values.map(|values| values.into_iter().map(f32::to_bits).collect::<Vec<_>>())
        };
        assert_eq!(run(1), run(3));
    }

    #[test]
    fn a_rows_result_does_not_depend_on_its_neighbours() {
        let (x, a, b, all) = (var(300, 70, 1), var(8, 70, 2), var(90, 8, 3), mask(0.4, 300));
        let [together, ..] = lora(&x, &a, &b, &all);
        for row in [0, 123, 299] {
            let [alone, ..] = lora(&x.narrow(0, row, 1).unwrap(), &a, &b, &all.of_rows(&[row as u32]));
            assert_eq!(alone, together[row * 90..(row + 1) * 90]);
        }
    }

    #[test]
    fn the_stated_share_is_dropped_and_the_rest_scaled() {
        let ones = Tensor::ones((400, 100), DType::F32, &Device::Cpu).unwrap();
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
        let ones = Tensor::ones((2, 64), DType::F32, &Device::Cpu).unwrap();
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
            let (a, b) = (var(a.0, a.1, 2).into_inner(), var(b.0, b.1, 3).into_inner());
            let (path, dropout) = (String::new(), None);
            Lora { a, b, scale: SCALE, magnitude: None, path, dropout, device_rows: None }.rank((4, 6))
        };
        assert_eq!(of((3, 6), (4, 3)).unwrap(), 3);
        for (a, b) in [((3, 4), (4, 3)), ((3, 6), (3, 4))] {
            assert!(of(a, b).unwrap_err().to_string().contains("on a weight (4, 6)"));
        }
    }

    #[test]
    #[should_panic(expected = "a key for each row")]
    fn rows_without_a_key_are_an_error() {
        assert!(DropoutMask::new(Dropout { p: 1.0, seed: 1 }, Vec::new(), Shard::FULL).is_err());
        mask(0.5, 2).of_layer("q", 4).apply(&mut [1.0; 12]);
    }
}

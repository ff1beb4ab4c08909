//! Dropout on the inputs of adapters, with masks that depend on what a row is and not on where it stands.

use crate::batch::row_key;
use crate::kernels::projection::{self, Trained};
use crate::kernels::{ParameterGradients, Projection, floats, input_gradient, with_floats};
use crate::random::{STEP, mix};
use crate::sharding::{Shard, Split};
use candle_core::{CpuStorage, CustomOp1, CustomOp3, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;
use std::sync::Arc;

/// Which share of an adapter's inputs is set to zero; the others are scaled by `1 / (1 - p)`. The mask of a row depends on the
/// seed, the layer and the row's tokens up to itself alone: a pass that is computed again sees the same one, and so does a row
/// that stands in another pass or is shared by several sequences.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Share that is zeroed, 0 to below 1.
    pub p: f64,
    /// Another one for each pass.
    pub seed: u64,
}

/// Dropout of one pass with a key for each of its rows. A row's key comes from its tokens up to itself, so that a row of a
/// prefix that several sequences share is masked as it would be in each of them alone, however rows are packed into passes.
#[derive(Debug, Clone)]
pub(crate) struct DropoutMask {
    dropout: Dropout,
    row_keys: Arc<Vec<u64>>,
    shard: Shard,
}

/// A layer's own masks.
#[derive(Clone, Copy)]
struct OfLayer {
    seed: u64,
    /// Where the inputs that come to it stand among those of the whole model: an even number.
    first: usize,
}

impl DropoutMask {
    /// `shard`: which part of a model's inputs is masked; the masks are those of the whole model.
    pub(crate) fn new(dropout: Dropout, row_keys: Vec<u64>, shard: Shard) -> Result<Self> {
        if !(0.0..1.0).contains(&dropout.p) {
            bail!("dropout is {}; expected 0 to below 1", dropout.p);
        }
        Ok(Self { dropout, row_keys: Arc::new(row_keys), shard })
    }

    /// Of each row.
    #[cfg(feature = "cuda")]
    pub(crate) fn row_keys(&self) -> &[u64] {
        &self.row_keys
    }

    /// Share of inputs that is zeroed.
    #[cfg(feature = "cuda")]
    pub(crate) fn p(&self) -> f64 {
        self.dropout.p
    }

    /// The same for some of the rows.
    pub(crate) fn of_rows(&self, rows: &[u32]) -> Self {
        let row_keys = rows.iter().map(|&row| self.row_keys[row as usize]).collect();
        Self { row_keys: Arc::new(row_keys), ..self.clone() }
    }

    /// `d(x)` for the layer at `path`, with its gradient.
    pub(crate) fn dropped(&self, x: &Tensor, path: &str) -> Result<Tensor> {
        x.contiguous()?.apply_op1(DropRows { mask: self.clone(), layer: self.of_layer(x, path)? })
    }

    fn of_layer(&self, x: &Tensor, path: &str) -> Result<OfLayer> {
        if x.dim(0)? != self.row_keys.len() {
            bail!("dropout: {} rows with {} keys", x.dim(0)?, self.row_keys.len());
        }
        Ok(OfLayer { seed: self.seed_of(path), first: self.first_input(path, x.dim(1)?) })
    }

    /// Where the first of `n_in` inputs of the layer at `path` stands among those of the whole model.
    pub(crate) fn first_input(&self, path: &str, n_in: usize) -> usize {
        match Split::of(path) {
            Some(Split::Inputs) => self.shard.rank() * n_in,
            _ => 0,
        }
    }

    /// Of the layer at `path`.
    pub(crate) fn seed_of(&self, path: &str) -> u64 {
        path.bytes().fold(mix(self.dropout.seed), |seed, byte| row_key(seed, u32::from(byte)))
    }

    /// Zeroes and scales rows of `width` values in place, by a layer's own masks.
    fn apply(&self, rows: &mut [f32], width: usize, layer: OfLayer) {
        let threshold = (self.dropout.p * f64::from(u32::MAX)) as u32;
        let scale = (1.0 / (1.0 - self.dropout.p)) as f32;
        rows.par_chunks_mut(width.max(1)).zip(self.row_keys.par_iter()).for_each(|(row, key)| {
            let mut state = mix(key ^ layer.seed).wrapping_add((layer.first as u64 / 2).wrapping_mul(STEP));
            for pair in row.chunks_mut(2) {
                state = state.wrapping_add(STEP);
                let bits = mix(state);
                for (value, bits) in pair.iter_mut().zip([bits as u32, (bits >> 32) as u32]) {
                    *value = if bits < threshold { 0.0 } else { *value * scale };
                }
            }
        });
    }
}

struct DropRows {
    mask: DropoutMask,
    layer: OfLayer,
}

impl CustomOp1 for DropRows {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let mut rows = floats(x, layout)?.to_vec();
        self.mask.apply(&mut rows, layout.shape().dims2()?.1, self.layer);
        Ok((CpuStorage::F32(rows), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let mut rows = with_floats(grad, |grad| Ok(grad.to_vec()))?;
        self.mask.apply(&mut rows, x.dim(1)?, self.layer);
        Ok(Some(Tensor::from_vec(rows, x.shape(), x.device())?))
    }
}

struct LoraDropout {
    mask: DropoutMask,
    layer: OfLayer,
    scale: f32,
}

/// `scale * (d(x) A^T) B^T` with dropout `d` of the layer at `path`; the masks are drawn again in the backward pass, not kept.
///
/// `x`: `(N, in)`; `lora_a`: `(rank, in)`; `lora_b`: `(out, rank)`. Returns `(N, out)`. Gradients reach all three.
///
/// # Errors
/// Shapes that do not fit, or tensors other than contiguous f32 on the CPU.
///
/// Source: PEFT's `lora.Linear.forward`.
pub(crate) fn lora_dropout(
    x: &Tensor,
    lora_a: &Tensor,
    lora_b: &Tensor,
    scale: f32,
    mask: &DropoutMask,
    path: &str,
) -> Result<Tensor> {
    let layer = mask.of_layer(x, path)?;
    let ((_, n_in), (rank, a_in), (_, b_in)) = (x.dims2()?, lora_a.dims2()?, lora_b.dims2()?);
    if n_in == 0 || rank == 0 || a_in != n_in || b_in != rank {
        bail!("adapter of shapes {:?} and {:?} for rows of {n_in}", lora_a.dims(), lora_b.dims());
    }
    x.contiguous()?.apply_op3(lora_a, lora_b, LoraDropout { mask: mask.clone(), layer, scale })
}

impl LoraDropout {
    fn dropped(&self, x: &[f32], width: usize) -> Vec<f32> {
        let mut dropped = x.to_vec();
        self.mask.apply(&mut dropped, width, self.layer);
        dropped
    }
}

impl CustomOp3 for LoraDropout {
    fn name(&self) -> &'static str {
        "lora-dropout"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        a: &CpuStorage,
        a_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (n_rows, n_in) = x_layout.shape().dims2()?;
        let (n_out, rank) = b_layout.shape().dims2()?;
        let (a, b) = (matrix(floats(a, a_layout)?, n_in), matrix(floats(b, b_layout)?, rank));
        let (down, _) = a.forward(&self.dropped(floats(x, x_layout)?, n_in))?;
        let (mut y, _) = b.forward(&down)?;
        y.iter_mut().for_each(|y| *y *= self.scale);
        Ok((CpuStorage::F32(y), (n_rows, n_out).into()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        a: &Tensor,
        b: &Tensor,
        _y: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dx, da, db] = with_floats(x, |x_values| {
            with_floats(a, |a_values| {
                with_floats(b, |b_values| {
                    let (a, b) = (matrix(a_values, a.dim(1)?), matrix(b_values, b.dim(1)?));
                    with_floats(grad, |grad| self.gradients(x_values, x.dim(1)?, &a, &b, grad))
                })
            })
        })?;
        Ok((
            Some(Tensor::from_vec(dx, x.shape(), x.device())?),
            Some(Tensor::from_vec(da, a.shape(), a.device())?),
            Some(Tensor::from_vec(db, b.shape(), b.device())?),
        ))
    }
}

/// A trained matrix `(out, in)`, row by row.
fn matrix(weight: &[f32], n_in: usize) -> Projection<'_> {
    Projection::Trained { weight, n_in, bias: None }
}

impl LoraDropout {
    /// With `g` the gradient of `y` times the scale and `v = g B`: `dx = d(v A)`, `dA = v^T d(x)`, `dB = g^T (d(x) A^T)`.
    fn gradients(
        &self,
        x: &[f32],
        n_in: usize,
        a: &Projection<'_>,
        b: &Projection<'_>,
        grad: &[f32],
    ) -> Result<[Vec<f32>; 3]> {
        let dropped = self.dropped(x, n_in);
        let g: Vec<f32> = grad.iter().map(|grad| grad * self.scale).collect();
        let gradients = |layer, x: &[f32], grad: &[f32]| {
            let mut found = ParameterGradients::default();
            projection::parameter_gradients(&mut [Trained { layer, x, low: &[], grad, found: &mut found }])?;
            Ok::<_, candle_core::Error>(found)
        };
        let of_b = gradients(b, &a.forward(&dropped)?.0, &g)?;
        let v = input_gradient(&[(b, &g, &of_b)])?;
        let of_a = gradients(a, &dropped, &v)?;
        let mut dx = input_gradient(&[(a, &v, &of_a)])?;
        self.mask.apply(&mut dx, n_in, self.layer);
        Ok([dx, of_a.weight, of_b.weight])
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};

    fn values(n: usize, seed: u64) -> Vec<f32> {
        (0..n as u64).map(|i| (mix(seed * 1000 + i) >> 40) as f32 / (1u64 << 24) as f32 - 0.5).collect()
    }

    fn var(rows: usize, cols: usize, seed: u64) -> Var {
        Var::from_vec(values(rows * cols, seed), (rows, cols), &Device::Cpu).unwrap()
    }

    fn mask(p: f64, n_rows: u32) -> DropoutMask {
        let row_keys = (0..n_rows).map(|row| row_key(0, row)).collect();
        DropoutMask::new(Dropout { p, seed: 7 }, row_keys, Shard::WHOLE).unwrap()
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
        check_gradients(&[&x], || mask.dropped(&x, "layer").unwrap());
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
        let dropped = mask.dropped(&x, "layer").unwrap();
        let expected = (dropped.matmul(&a.t().unwrap()).unwrap().matmul(&b.t().unwrap()).unwrap() * 1.5).unwrap();
        assert!(flat(&found).iter().zip(flat(&expected)).all(|(a, b)| (a - b).abs() < 1e-6));
    }

    #[test]
    fn the_stated_share_is_dropped_and_the_rest_scaled() {
        let ones = Tensor::ones((400, 100), candle_core::DType::F32, &Device::Cpu).unwrap();
        for p in [0.1, 0.5] {
            let values = flat(&mask(p, 400).dropped(&ones, "layer").unwrap());
            let n_dropped = values.iter().filter(|value| **value == 0.0).count() as f64;
            let share = n_dropped / values.len() as f64;
            assert!((share - p).abs() < 4.0 * (p * (1.0 - p) / values.len() as f64).sqrt(), "{share} for {p}");
            assert!(values.iter().all(|value| *value == 0.0 || (f64::from(*value) - 1.0 / (1.0 - p)).abs() < 1e-6));
        }
    }

    #[test]
    fn layers_rows_and_seeds_have_masks_of_their_own() {
        let ones = Tensor::ones((2, 64), candle_core::DType::F32, &Device::Cpu).unwrap();
        let first = mask(0.5, 2).dropped(&ones, "q").unwrap();
        let rows: Vec<Vec<f32>> = first.to_vec2().unwrap();
        assert_ne!(rows[0], rows[1]);
        assert_ne!(flat(&first), flat(&mask(0.5, 2).dropped(&ones, "k").unwrap()));
        let other = DropoutMask { dropout: Dropout { p: 0.5, seed: 8 }, ..mask(0.5, 2) };
        assert_ne!(flat(&first), flat(&other.dropped(&ones, "q").unwrap()));
        assert_eq!(flat(&first), flat(&mask(0.5, 2).dropped(&ones, "q").unwrap()));
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
        assert!(mask(0.5, 2).dropped(&ones, "q").unwrap_err().to_string().contains("3 rows with 2 keys"));
        assert!(DropoutMask::new(Dropout { p: 1.0, seed: 1 }, Vec::new(), Shard::WHOLE).is_err());
    }
}

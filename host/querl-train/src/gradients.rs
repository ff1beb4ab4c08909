//! Gradients of an optimizer step: summed over micro-batches and ranks, global norm, clipping.

use crate::{TrainError, tensor_data};
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use querl_model::{GradientNorm, Mesh, Ranks, Shard, accelerator_of};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Gradients of an optimizer step by variable name, summed over micro-batches.
#[derive(Clone)]
pub struct Gradients {
    sums: BTreeMap<String, Sum>,
    /// Scale from clipping, applied where gradients are used.
    scale: f32,
    /// The tensor-parallel ranks, which each hold a shard of some variables.
    tensor: Ranks,
    /// Gradient norm and clipping scale in device memory, if the gradients are on an accelerator.
    on_device: Option<GradientNorm>,
}

#[derive(Debug, Clone)]
enum Sum {
    /// Gradient from the backward pass; its storage may be shared.
    Borrowed(Tensor),
    /// Gradient whose storage is not shared; further gradients are added in place.
    Owned(Var),
}

impl Sum {
    fn tensor(&self) -> &Tensor {
        match self {
            Self::Borrowed(tensor) => tensor,
            Self::Owned(var) => var.as_tensor(),
        }
    }

    fn plus(self, gradient: &Tensor) -> candle_core::Result<Self> {
        match self {
            Self::Borrowed(sum) => Ok(Self::Owned(Var::from_tensor(&(sum + gradient)?.detach())?)),
            Self::Owned(sum) if !sum.device().is_cpu() => {
                Ok(Self::Owned(Var::from_tensor(&(sum.as_tensor() + gradient)?.detach())?))
            }
            Self::Owned(sum) => {
                tensor_data::read(gradient, |values| {
                    tensor_data::modify(&sum, |sum| {
                        let chunks = sum.par_chunks_mut(CHUNK).zip(values.par_chunks(CHUNK));
                        chunks.for_each(|(sum, values)| sum.iter_mut().zip(values).for_each(|(sum, g)| *sum += g));
                    })
                })??;
                Ok(Self::Owned(sum))
            }
        }
    }
}

/// Maximum number of f32 values in an all-reduce bucket, unless one variable has more: 32 MiB reach full bandwidth and are small next to a
/// base model. torch's `DistributedDataParallel` has buckets of 25 MiB.
pub const BUCKET: usize = 8 << 20;

/// Divides the variables, in order, into buckets of limited size.
fn buckets<'a>(vars: impl Iterator<Item = (&'a String, &'a Var)>) -> Vec<Vec<(&'a String, &'a Var)>> {
    let (mut buckets, mut n_values) = (Vec::<Vec<_>>::new(), 0);
    for (name, var) in vars {
        n_values += var.elem_count();
        match buckets.last_mut() {
            Some(bucket) if n_values <= BUCKET => bucket.push((name, var)),
            _ => {
                n_values = var.elem_count();
                buckets.push(vec![(name, var)]);
            }
        }
    }
    buckets
}

/// Number of values per chunk, the unit of work of a thread. Sums are computed per chunk and then in the order of chunks, so that they do
/// not depend on the number of threads.
pub(crate) const CHUNK: usize = 1 << 15;

impl Default for Gradients {
    fn default() -> Self {
        Self { sums: BTreeMap::new(), scale: 1.0, tensor: Ranks::alone(), on_device: None }
    }
}

impl Gradients {
    /// Adds the gradients of one backward pass for `vars`, before [`clip`](Self::clip).
    ///
    /// # Errors
    /// A gradient is not f32.
    pub fn add(&mut self, store: &GradStore, vars: &BTreeMap<String, Var>) -> Result<(), TrainError> {
        debug_assert!(self.scale == 1.0, "gradients are clipped once all are there");
        for (name, var) in vars {
            let Some(gradient) = store.get(var) else { continue };
            let sum = match self.sums.remove(name) {
                Some(sum) => sum.plus(gradient)?,
                None => Sum::Borrowed(gradient.detach()),
            };
            self.sums.insert(name.clone(), sum);
        }
        Ok(())
    }

    /// All-reduces the gradients over the data-parallel ranks, before [`clip`](Self::clip). `vars`: the same variables on every rank, or
    /// the rank's shards of these; a rank may have no gradient for some.
    ///
    /// # Errors
    /// A rank has failed; a gradient is not f32; a GPU is out of memory.
    pub fn sum_over(&mut self, mesh: &Mesh, vars: &BTreeMap<String, Var>) -> Result<(), TrainError> {
        self.tensor = mesh.tensor.clone();
        self.all_reduce(&mesh.data, vars)?;
        // A failed rank may have left an all-reduce of the pass incomplete: such gradients must not be used.
        self.tensors().last().map_or(Ok(()), |last| mesh.all.settle(last))?;
        Ok(())
    }

    fn all_reduce(&mut self, ranks: &Ranks, vars: &BTreeMap<String, Var>) -> Result<(), TrainError> {
        if ranks.world_size() == 1 {
            return Ok(());
        }
        let mine: Vec<bool> = vars.keys().map(|name| self.sums.contains_key(name)).collect();
        let all = ranks.all_gather(mine)?;
        let is_found = |index: usize| all.iter().any(|of_rank| of_rank[index]);
        let found = vars.iter().enumerate().filter(|(index, _)| is_found(*index)).map(|(_, var)| var);
        buckets(found).into_iter().try_for_each(|bucket| self.sum_bucket(ranks, &bucket))
    }

    /// All-reduces the gradients of some variables as one tensor, because each all-reduce waits for the slowest rank.
    fn sum_bucket(&mut self, ranks: &Ranks, bucket: &[(&String, &Var)]) -> Result<(), TrainError> {
        let flat = |(name, var): &(&String, &Var)| match self.sums.get(*name) {
            Some(sum) => sum.tensor().flatten_all(),
            None => Tensor::zeros(var.elem_count(), DType::F32, var.device()),
        };
        let parts = bucket.iter().map(flat).collect::<Result<Vec<_>, _>>()?;
        let sum = ranks.sum_tensor(&Tensor::cat(&parts, 0)?)?;
        drop(parts);
        let mut start = 0;
        for (name, var) in bucket {
            let part = sum.narrow(0, start, var.elem_count())?.reshape(var.shape())?;
            // A view would keep the bucket's memory, and GPU operations would copy it at each use.
            let part = if part.device().is_cpu() { part } else { part.force_contiguous()? };
            self.sums.insert((*name).clone(), Sum::Borrowed(part));
            start += var.elem_count();
        }
        Ok(())
    }

    /// Global L2 norm of all gradients.
    ///
    /// # Errors
    /// A gradient is not f32.
    pub fn norm(&self) -> Result<f64, TrainError> {
        let mut sum = self.squares(|_| true)?;
        if self.tensor.world_size() > 1 {
            // Unsharded variables are counted once.
            let parts = self.tensor.all_gather(self.squares(is_sharded)?)?;
            sum = self.squares(|name| !is_sharded(name))? + parts.iter().map(|part| **part).sum::<f64>();
        }
        Ok(sum.sqrt() * f64::from(self.scale))
    }

    /// Squared norm of the gradients of some variables, before the scale of clipping.
    fn squares(&self, includes: impl Fn(&str) -> bool) -> Result<f64, TrainError> {
        let included = || self.sums.iter().filter(|(name, _)| includes(name)).map(|(_, sum)| sum.tensor());
        if let Some(norm) = gradient_norm(included(), 1.0, None)? {
            return Ok(f64::from(norm.norm).powi(2));
        }
        let mut sum = 0.0;
        for gradient in included() {
            sum += tensor_data::read(gradient, squared_norm)?;
        }
        Ok(sum)
    }

    /// Scales the gradients to a global norm of at most `max_norm`. Returns the norm before clipping.
    ///
    /// # Errors
    /// A gradient is not f32.
    ///
    /// Source: torch `clip_grad_norm_`.
    pub fn clip(&mut self, max_norm: f64) -> Result<f64, TrainError> {
        if self.tensor.world_size() == 1
            && let Some(norm) = gradient_norm(self.tensors(), self.scale, Some(max_norm))?
        {
            let before = norm.norm;
            (self.scale, self.on_device) = (norm.scale, Some(norm));
            return Ok(f64::from(before));
        }
        let norm = self.norm()?;
        self.scale *= (max_norm / (norm + 1e-6)).min(1.0) as f32;
        self.on_device = known_norm(self.tensors(), norm, self.scale)?;
        Ok(norm)
    }

    /// Gradient of variable `name` after clipping, row-major; `None` if the variable has no gradient.
    ///
    /// # Errors
    /// The gradient is not f32.
    pub fn get(&self, name: &str) -> Result<Option<Vec<f32>>, TrainError> {
        let scaled = |values: &[f32]| values.iter().map(|g| g * self.scale).collect();
        Ok(self.sums.get(name).map(|sum| tensor_data::read(sum.tensor(), scaled)).transpose()?)
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.sums.values().map(Sum::tensor)
    }

    /// Gradient norm and clipping scale in device memory; `None` before clipping, and on the CPU.
    pub(crate) fn on_device(&self) -> Option<&GradientNorm> {
        self.on_device.as_ref()
    }

    /// Gradient of variable `name` before clipping, and the clipping scale to multiply it by; `None` if the variable has no gradient.
    pub(crate) fn unscaled(&self, name: &str) -> Option<(&Tensor, f32)> {
        Some((self.sums.get(name)?.tensor(), self.scale))
    }
}

fn is_sharded(name: &str) -> bool {
    Shard::adapter_axis(name).is_some()
}

fn squared_norm(values: &[f32]) -> f64 {
    let of_chunk = |chunk: &[f32]| {
        let mut lanes = [0f64; LANES];
        let mut whole = chunk.chunks_exact(LANES);
        for part in &mut whole {
            lanes.iter_mut().zip(part).for_each(|(lane, g)| *lane += f64::from(*g) * f64::from(*g));
        }
        lanes.iter_mut().zip(whole.remainder()).for_each(|(lane, g)| *lane += f64::from(*g) * f64::from(*g));
        lanes.iter().sum::<f64>()
    };
    values.par_chunks(CHUNK).map(of_chunk).collect::<Vec<f64>>().iter().sum()
}

/// Global norm and scale of clipping; waits for the device. `None` if the gradients are on the CPU.
fn gradient_norm<'a>(
    gradients: impl Iterator<Item = &'a Tensor>,
    scale: f32,
    max_norm: Option<f64>,
) -> Result<Option<GradientNorm>, TrainError> {
    let gradients: Vec<Tensor> = gradients.filter(|gradient| !gradient.device().is_cpu()).cloned().collect();
    let Some(first) = gradients.first() else { return Ok(None) };
    let accelerator = accelerator_of(first)?;
    let norm =
        accelerator.map(|device| device.gradient_norm(&gradients, scale, max_norm.map(|norm| norm as f32))).transpose();
    Ok(norm?)
}

/// The same for values that were computed on the CPU.
fn known_norm<'a>(
    mut gradients: impl Iterator<Item = &'a Tensor>,
    norm: f64,
    scale: f32,
) -> Result<Option<GradientNorm>, TrainError> {
    let Some(first) = gradients.find(|gradient| !gradient.device().is_cpu()) else { return Ok(None) };
    Ok(accelerator_of(first)?.map(|device| device.known_norm(norm as f32, scale)).transpose()?)
}

/// Number of independent sums, for vector instructions.
const LANES: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use querl_model::run_ranks;

    #[test]
    fn accumulation_does_not_modify_the_gradients_of_a_pass() {
        let var = Var::from_vec(vec![1f32, 2.0, 3.0], 3, &Device::Cpu).unwrap();
        let vars = BTreeMap::from([("w".to_owned(), var.clone())]);
        let pass = |factor: f64| (var.as_tensor() * factor).unwrap().sum_all().unwrap().backward().unwrap();
        let mut sum = Gradients::default();
        let passes = [pass(1.0), pass(2.0), pass(4.0)];
        passes.iter().for_each(|pass| sum.add(pass, &vars).unwrap());
        assert_eq!(sum.get("w").unwrap().unwrap(), [7.0; 3]);
        assert_eq!(passes[0].get(&var).unwrap().to_vec1::<f32>().unwrap(), [1.0; 3]);
        let norm = sum.clip(1.0).unwrap();
        assert!((norm - 147f64.sqrt()).abs() < 1e-12);
        assert!((sum.norm().unwrap() - 1.0).abs() < 1e-6);
    }

    #[test]
    fn gradients_are_summed_over_ranks_also_where_one_has_none() {
        let vars = BTreeMap::from(
            ["a", "b", "c"].map(|name| (name.to_owned(), Var::ones((2, 2), DType::F32, &Device::Cpu).unwrap())),
        );
        let sums = run_ranks(3, |ranks| {
            let mut gradients = Gradients::default();
            // Every rank has a gradient of `a`, only the last rank of `b`, and no rank of `c`.
            let names: &[&str] = if ranks.rank() == 2 { &["a", "b"] } else { &["a"] };
            for name in names {
                let loss = (vars[*name].as_tensor() * (ranks.rank() + 1) as f64).unwrap().sum_all().unwrap();
                gradients.add(&loss.backward().unwrap(), &vars)?;
            }
            gradients.sum_over(&Mesh::of_data(ranks), &vars)?;
            Ok::<_, TrainError>(["a", "b", "c"].map(|name| gradients.get(name).unwrap()))
        });
        for of_rank in sums.unwrap() {
            assert_eq!(of_rank, [Some(vec![6.0; 4]), Some(vec![3.0; 4]), None]);
        }
    }

    #[test]
    fn a_bucket_ends_where_the_next_variable_would_not_fit() {
        let sizes = [BUCKET - 1, 1, 1, BUCKET + 7, 2];
        let vars: Vec<(String, Var)> =
            sizes.iter().map(|n| (n.to_string(), Var::zeros(*n, DType::F32, &Device::Cpu).unwrap())).collect();
        let cut = buckets(vars.iter().map(|(name, var)| (name, var)));
        let n_values = |bucket: &Vec<(&String, &Var)>| bucket.iter().map(|(_, var)| var.elem_count()).sum::<usize>();
        assert_eq!(cut.iter().map(n_values).collect::<Vec<_>>(), [BUCKET, 1, BUCKET + 7, 2]);
    }

    #[test]
    fn the_norm_does_not_depend_on_the_number_of_threads() {
        let values: Vec<f32> = (0..3 * CHUNK + 5).map(|i| (i as f32).sin()).collect();
        let pool = |n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap();
        let [one, three] = [1, 3].map(|n| pool(n).install(|| squared_norm(&values)));
        assert_eq!(one.to_bits(), three.to_bits());
    }
}

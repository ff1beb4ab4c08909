//! Gradients of an optimizer step: their sum over micro-batches, their norm and their clipping.

use crate::{TrainError, slices};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use rayon::prelude::*;
use std::collections::BTreeMap;
#[cfg(feature = "cuda")]
use std::sync::Arc;

/// Gradients by variable name, summed over micro-batches.
#[derive(Clone)]
pub struct Gradients {
    sums: BTreeMap<String, Sum>,
    /// What clipping makes of them; applied where they are used.
    scale: f32,
    /// The same on the card, where the gradients are there.
    #[cfg(feature = "cuda")]
    on_card: Option<Arc<querl_model::device::GradientNorm>>,
}

#[derive(Debug, Clone)]
enum Sum {
    /// As the backward pass made it: others may see its storage.
    Borrowed(Tensor),
    /// Ours to add to.
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
                slices::read(gradient, |values| {
                    slices::change(&sum, |sum| {
                        let chunks = sum.par_chunks_mut(CHUNK).zip(values.par_chunks(CHUNK));
                        chunks.for_each(|(sum, values)| sum.iter_mut().zip(values).for_each(|(sum, g)| *sum += g));
                    })
                })??;
                Ok(Self::Owned(sum))
            }
        }
    }
}

/// Values that one thread works on at a time. Sums are formed by chunk and then in the chunks' order, so that they do not depend
/// on the number of threads.
pub(crate) const CHUNK: usize = 1 << 15;

impl Default for Gradients {
    fn default() -> Self {
        Self {
            sums: BTreeMap::new(),
            scale: 1.0,
            #[cfg(feature = "cuda")]
            on_card: None,
        }
    }
}

impl Gradients {
    /// Adds what one backward pass found for `vars`, before [`clip`](Self::clip).
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

    /// Global norm over all gradients.
    ///
    /// # Errors
    /// A gradient is not f32.
    pub fn norm(&self) -> Result<f64, TrainError> {
        #[cfg(feature = "cuda")]
        if let Some(((norm, _), _)) = crate::card::gradient_norm(self.tensors(), self.scale, None)? {
            return Ok(f64::from(norm));
        }
        let mut sum = 0.0;
        for gradient in self.sums.values() {
            sum += slices::read(gradient.tensor(), squared_norm)?;
        }
        Ok(sum.sqrt() * f64::from(self.scale))
    }

    /// Scales down to a global norm of at most `max_norm`. Returns the norm before.
    ///
    /// # Errors
    /// A gradient is not f32.
    ///
    /// Source: torch `clip_grad_norm_`.
    pub fn clip(&mut self, max_norm: f64) -> Result<f64, TrainError> {
        #[cfg(feature = "cuda")]
        if let Some((norm, on_card)) = crate::card::gradient_norm(self.tensors(), self.scale, Some(max_norm))? {
            let (before, scale) = norm;
            (self.scale, self.on_card) = (scale, Some(Arc::new(on_card)));
            return Ok(f64::from(before));
        }
        let norm = self.norm()?;
        self.scale *= (max_norm / (norm + 1e-6)).min(1.0) as f32;
        Ok(norm)
    }

    /// One variable's gradient, row-major, as clipping left it.
    ///
    /// # Errors
    /// It is not f32.
    pub fn get(&self, name: &str) -> Result<Option<Vec<f32>>, TrainError> {
        let scaled = |values: &[f32]| values.iter().map(|g| g * self.scale).collect();
        Ok(self.sums.get(name).map(|sum| slices::read(sum.tensor(), scaled)).transpose()?)
    }

    #[cfg(feature = "cuda")]
    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.sums.values().map(Sum::tensor)
    }

    /// What clipping found, on the card; `None` before it.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_card(&self) -> Option<&querl_model::device::GradientNorm> {
        self.on_card.as_deref()
    }

    /// One variable's gradient, before the factor that clipping asks for, and that factor.
    pub(crate) fn unscaled(&self, name: &str) -> Option<(&Tensor, f32)> {
        Some((self.sums.get(name)?.tensor(), self.scale))
    }
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

/// Sums that run side by side, for vector instructions.
const LANES: usize = 8;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn sums_over_passes_leave_the_gradients_of_a_pass_alone() {
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
    fn the_norm_does_not_depend_on_the_number_of_threads() {
        let values: Vec<f32> = (0..3 * CHUNK + 5).map(|i| (i as f32).sin()).collect();
        let pool = |n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap();
        let [one, three] = [1, 3].map(|n| pool(n).install(|| squared_norm(&values)));
        assert_eq!(one.to_bits(), three.to_bits());
    }
}

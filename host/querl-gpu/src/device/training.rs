//! Training backend of a GPU: activations bf16, residual f32, every operation a kernel launch without synchronisation.

use super::operations::gpu_weight;
use super::{
    BorrowedValues, CudaSlice, DeviceRope, DeviceWeight, DropoutMasks, Gpu, LoraWeights, ParameterGradients,
    Projection, TreeQueries, contiguous, input_gradient, rounded_weight, storage,
};
use candle_core::{Error, Result, Storage, Tensor, bail};
use half::bf16;
use querl_model::backend::{
    DropoutMask, LayerBackend, LayerContext, LinearBackward, LinearGrad, Lora, LoraLinear, Magnitude, MaybeBorrowed,
    PackedAttention, ProjectionOut, QueryRows, Rows, TrainingBackend, only_on_cpu,
};
use querl_model::kernels::Weight;
use querl_model::{DeviceState, PackedBatch, Ranks};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, OnceLock};

/// Backend for training and evaluation on packed batches.
pub(crate) struct GpuBackend(Gpu);

impl GpuBackend {
    pub(super) fn new(gpu: &Gpu) -> Self {
        Self(gpu.clone())
    }
}

pub(crate) struct Buffer<T>(CudaSlice<T>);

impl<T> Deref for Buffer<T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        &self.0
    }
}

impl<T> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut CudaSlice<T> {
        &mut self.0
    }
}

/// Values of a linear layer that are cached from the forward to the backward pass.
#[derive(Default)]
pub(crate) struct LinearState {
    /// A trained weight, rounded to bf16.
    weight: OnceLock<DeviceWeight>,
    lora: OnceLock<Rounded>,
}

/// A and B in bf16, for matrix products.
struct Rounded {
    a: CudaSlice<bf16>,
    b: CudaSlice<bf16>,
    rank: usize,
}

/// A linear layer with its tensors borrowed.
struct Open<'a> {
    linear: &'a LoraLinear<LinearState>,
    bias: Option<BorrowedValues<'a>>,
    magnitude: Option<OpenMagnitude<'a>>,
    lora: Option<(&'a Rounded, &'a Lora)>,
}

/// DoRA's factor on each output, and the factor of its gradient.
struct OpenMagnitude<'a> {
    factor: BorrowedValues<'a>,
    inverse_length: BorrowedValues<'a>,
}

impl<'a> OpenMagnitude<'a> {
    fn new(Magnitude { factor, inverse_length, .. }: &'a Magnitude) -> Result<Self> {
        Ok(Self { factor: BorrowedValues::of(factor)?, inverse_length: BorrowedValues::of(inverse_length)? })
    }
}

#[derive(Default)]
pub(crate) struct LinearGradients {
    lora: Option<ParameterGradients>,
    /// With magnitudes: the gradient of the outputs times the factors, for all gradients but those of bias and magnitude.
    scaled: Option<CudaSlice<bf16>>,
    magnitude: Option<CudaSlice<f32>>,
    weight: Option<CudaSlice<f32>>,
    bias: Option<CudaSlice<f32>>,
}

impl LinearGradients {
    fn product_grad<'a>(&'a self, grad: &'a CudaSlice<bf16>) -> &'a CudaSlice<bf16> {
        self.scaled.as_ref().unwrap_or(grad)
    }
}

impl<'a> Open<'a> {
    fn new(gpu: &Gpu, linear: &'a LoraLinear<LinearState>) -> Result<Self> {
        let bias = linear.bias.as_ref().map(BorrowedValues::of).transpose()?;
        if let (Weight::Trained(weight), None) = (&linear.weight, linear.state.weight.get()) {
            let rounded = rounded_weight(gpu, weight)?;
            linear.state.weight.get_or_init(|| rounded);
        }
        let magnitude = linear.lora.as_ref().and_then(|lora| lora.magnitude.as_ref());
        let magnitude = magnitude.map(OpenMagnitude::new).transpose()?;
        let lora = linear.lora.as_ref().map(|lora| -> Result<_> {
            if let Some(rounded) = linear.state.lora.get() {
                return Ok((rounded, lora));
            }
            let rounded = Rounded::new(gpu, lora, linear.weight.dims()?)?;
            Ok((linear.state.lora.get_or_init(|| rounded), lora))
        });
        Ok(Self { linear, bias, magnitude, lora: lora.transpose()? })
    }

    fn projection(&self) -> Result<Projection<'_>> {
        let weight = match &self.linear.weight {
            Weight::Accelerator(weight) => gpu_weight(&**weight)?,
            Weight::Trained(_) => match self.linear.state.weight.get() {
                Some(weight) => weight,
                None => bail!("a trained weight was not rounded for its products"),
            },
            Weight::Frozen(_) => bail!("a layer on the GPU with a weight on the CPU"),
        };
        let bias = self.bias.as_ref().map(|bias| bias.as_view());
        let lora = match self.lora {
            None => None,
            Some((Rounded { a, b, rank }, lora)) => Some(LoraWeights {
                a: a.as_view(),
                b: b.as_view(),
                rank: *rank,
                scale: lora.scale,
                masks: match &lora.dropout {
                    None => None,
                    Some(_) => device_rows(lora.device_rows.as_ref())?.masks(&lora.path, weight.dims().1),
                },
            }),
        };
        Ok(Projection { weight, bias, lora })
    }
}

/// Linear layers whose outputs have factors: `factor * (x W^T + s x A^T B^T) + b`.
///
/// Source: PEFT's `DoraLinearVariant.forward` without dropout.
impl Open<'_> {
    /// Outputs in f32 before factors and bias, and the outputs of A.
    fn unscaled(&self, gpu: &Gpu, x: &CudaSlice<bf16>) -> Result<(CudaSlice<f32>, CudaSlice<bf16>)> {
        let layer = Projection { bias: None, ..self.projection()? };
        let (n_out, n_in) = layer.weight.dims();
        let mut y = gpu.zeros(x.len() / n_in * n_out)?;
        let low = layer.add_to(gpu, x, &mut y)?;
        Ok((y, low))
    }

    fn forward(&self, gpu: &Gpu, x: &CudaSlice<bf16>) -> Result<(CudaSlice<bf16>, CudaSlice<bf16>)> {
        let Some(magnitude) = &self.magnitude else { return self.projection()?.forward(gpu, x) };
        let (y, low) = self.unscaled(gpu, x)?;
        Ok((gpu.scaled_columns(&y, &*magnitude.factor, self.bias.as_deref())?, low))
    }

    fn add_to(&self, gpu: &Gpu, x: &CudaSlice<bf16>, sum: &mut CudaSlice<f32>) -> Result<CudaSlice<bf16>> {
        let Some(magnitude) = &self.magnitude else { return self.projection()?.add_to(gpu, x, sum) };
        let (y, low) = self.unscaled(gpu, x)?;
        gpu.add_scaled_columns(&y, &*magnitude.factor, self.bias.as_deref(), sum)?;
        Ok(low)
    }

    fn lora_b_backward(&self, gpu: &Gpu, grad: &CudaSlice<bf16>) -> Result<LinearGradients> {
        let scaled =
            self.magnitude.as_ref().map(|magnitude| gpu.scaled_values(grad, &*magnitude.factor)).transpose()?;
        let lora = self.projection()?.lora_b_gradient(gpu, scaled.as_ref().unwrap_or(grad))?;
        Ok(LinearGradients { lora, scaled, ..LinearGradients::default() })
    }

    fn parameter_gradients(
        &self,
        gpu: &Gpu,
        x: &CudaSlice<bf16>,
        low: &CudaSlice<bf16>,
        grad: &CudaSlice<bf16>,
        found: &mut LinearGradients,
    ) -> Result<()> {
        let layer = self.projection()?;
        let n_out = layer.weight.dims().0;
        if let Some(lora) = &mut found.lora {
            layer.parameter_gradients(gpu, x, low, found.scaled.as_ref().unwrap_or(grad), lora)?;
        }
        if let Some(magnitude) = &self.magnitude {
            let of_factor = gpu.column_totals(grad, Some(&gpu.to_bf16(&self.unscaled(gpu, x)?.0)?), n_out)?;
            let mut of_magnitude = gpu.zeros(n_out)?;
            gpu.add_scaled_columns(&of_factor, &*magnitude.inverse_length, None, &mut of_magnitude)?;
            found.magnitude = Some(of_magnitude);
        }
        if matches!(self.linear.weight, Weight::Trained(_)) {
            found.weight = Some(layer.weight_gradient(gpu, x, grad)?);
            found.bias = self.bias.is_some().then(|| gpu.column_totals(grad, None, n_out)).transpose()?;
        }
        Ok(())
    }
}

impl Rounded {
    fn new(gpu: &Gpu, lora: &Lora, dims: (usize, usize)) -> Result<Self> {
        let rank = lora.rank(dims)?;
        let (a, b) = (contiguous(&lora.a)?, contiguous(&lora.b)?);
        Ok(Self { a: gpu.to_bf16(&*BorrowedValues::of(&a)?)?, b: gpu.to_bf16(&*BorrowedValues::of(&b)?)?, rank })
    }
}

fn device_rows(rows: Option<&DeviceState>) -> Result<&LayerRows> {
    let rows = rows.and_then(|rows| rows.downcast_ref::<LayerRows>());
    rows.ok_or_else(|| Error::Msg("rows on the CPU in a layer on the GPU".into()))
}

fn on_gpu(rows: &Rows) -> Result<&LayerRows> {
    device_rows(rows.device_rows.as_ref())
}

impl LayerBackend for GpuBackend {
    type Residual = Buffer<f32>;
    type ResidualSlice = CudaSlice<f32>;
    type Activations = Buffer<bf16>;
    type ActivationSlice = CudaSlice<bf16>;
    type Norm = Tensor;
    type Linears<const N: usize> = [LoraLinear<LinearState>; N];
    type LoraAOut = Buffer<bf16>;

    fn rms_norm(&self, x: &CudaSlice<f32>, weight: &Tensor, eps: f32) -> Result<Buffer<bf16>> {
        Ok(Buffer(self.0.rms_norm(x, &*BorrowedValues::of(weight)?, eps)?))
    }

    fn project<const N: usize>(
        &self,
        linears: &[LoraLinear<LinearState>; N],
        x: &CudaSlice<bf16>,
    ) -> Result<[ProjectionOut<Self>; N]> {
        self.project(linears.each_ref(), x)
    }

    fn project_qkv(
        &self,
        qkv: &[LoraLinear<LinearState>; 3],
        x: &CudaSlice<bf16>,
        width: usize,
        query_rows: Option<&QueryRows>,
    ) -> Result<[ProjectionOut<Self>; 3]> {
        let [q, k, v] = qkv;
        if query_rows.is_none() {
            return self.project([q, k, v], x);
        }
        let [k, v] = self.project([k, v], x)?;
        let [q] = self.project([q], &*self.query_activations(x, width, query_rows)?)?;
        Ok([q, k, v])
    }

    fn apply_rope(
        &self,
        x: &CudaSlice<bf16>,
        norm: Option<&Tensor>,
        context: &LayerContext,
        rows: &Rows,
    ) -> Result<Buffer<bf16>> {
        let (rows, norm) = (on_gpu(rows)?, norm.map(BorrowedValues::of).transpose()?);
        let weight = norm.as_ref().map(|norm| norm.as_view());
        let norm = weight.as_ref().map(|weight| (weight, context.eps));
        Ok(Buffer(rows.rope.norm_rope(&self.0, x, norm, &rows.positions)?))
    }

    fn query_residual<'a>(
        &self,
        x: &'a CudaSlice<f32>,
        width: usize,
        query_rows: Option<&QueryRows>,
    ) -> Result<MaybeBorrowed<'a, Buffer<f32>>> {
        let Some(query_rows) = query_rows else { return Ok(MaybeBorrowed::Borrowed(x)) };
        Ok(MaybeBorrowed::Owned(Buffer(self.0.pick(x, on_gpu(&query_rows.rows)?.list(), width)?)))
    }

    fn add_projection(
        &self,
        [linear]: &[LoraLinear<LinearState>; 1],
        x: &CudaSlice<bf16>,
        residual: &CudaSlice<f32>,
    ) -> Result<(Buffer<f32>, Buffer<bf16>)> {
        let mut y = self.0.copy(residual)?;
        let lora_a_out = Open::new(&self.0, linear)?.add_to(&self.0, x, &mut y)?;
        Ok((Buffer(y), Buffer(lora_a_out)))
    }

    fn swiglu(&self, gate: &CudaSlice<bf16>, up: &CudaSlice<bf16>) -> Result<Buffer<bf16>> {
        Ok(Buffer(self.0.swiglu(gate, up)?))
    }

    fn zeros_like(&self, residual: &CudaSlice<f32>) -> Result<Buffer<f32>> {
        Ok(Buffer(self.0.zeros(residual.len())?))
    }

    fn all_reduce(&self, ranks: &Ranks, sum: &mut Buffer<f32>) -> Result<()> {
        self.0.all_reduce(ranks, &mut sum.0)
    }
}

impl GpuBackend {
    fn project<const N: usize>(
        &self,
        linears: [&LoraLinear<LinearState>; N],
        x: &CudaSlice<bf16>,
    ) -> Result<[(Buffer<bf16>, Buffer<bf16>); N]> {
        each(linears, |linear| {
            let (y, lora_a_out) = Open::new(&self.0, linear)?.forward(&self.0, x)?;
            Ok((Buffer(y), Buffer(lora_a_out)))
        })
    }
}

impl TrainingBackend for GpuBackend {
    type LinearState = LinearState;
    type LogSumExp = CudaSlice<f32>;
    type LinearGradients = LinearGradients;
    type Borrowed<'a> = BorrowedValues<'a>;

    fn group<const N: usize>(linears: [LoraLinear<LinearState>; N]) -> [LoraLinear<LinearState>; N] {
        linears
    }

    fn members<const N: usize>(linears: &[LoraLinear<LinearState>; N]) -> [&LoraLinear<LinearState>; N] {
        linears.each_ref()
    }

    fn check(&self, linear: &LoraLinear<LinearState>) -> Result<()> {
        match &linear.lora {
            Some(Lora { magnitude: Some(_), dropout: Some(_), .. }) => {
                Err(only_on_cpu("an adapter with magnitudes and dropout (`sft.use_dora`, `sft.lora_dropout`)"))
            }
            _ => Ok(()),
        }
    }

    fn contiguous(&self, tensor: &Tensor) -> Result<Tensor> {
        contiguous(tensor)
    }

    fn borrow<'a>(&self, tensor: &'a Tensor) -> Result<BorrowedValues<'a>> {
        BorrowedValues::of(tensor)
    }

    fn storage(&self, buffer: Buffer<f32>) -> Result<Storage> {
        Ok(Storage::Cuda(storage(&self.0, buffer.0)))
    }

    fn len(&self, buffer: &CudaSlice<f32>) -> usize {
        buffer.len()
    }

    fn concat(&self, parts: Vec<Buffer<f32>>) -> Result<Buffer<f32>> {
        let mut joined = self.0.zeros(parts.iter().map(|part| part.len()).sum())?;
        let mut start = 0;
        for part in parts {
            let end = start + part.len();
            self.0.stream().memcpy_dtod(&part.0, &mut joined.slice_mut(start..end)).map_err(Error::wrap)?;
            start = end;
        }
        Ok(Buffer(joined))
    }

    fn to_activations<'a>(&self, x: &'a CudaSlice<f32>) -> Result<MaybeBorrowed<'a, Buffer<bf16>>> {
        Ok(MaybeBorrowed::Owned(Buffer(self.0.to_bf16(x)?)))
    }

    fn query_activations<'a>(
        &self,
        x: &'a CudaSlice<bf16>,
        width: usize,
        query_rows: Option<&QueryRows>,
    ) -> Result<MaybeBorrowed<'a, Buffer<bf16>>> {
        let Some(query_rows) = query_rows else { return Ok(MaybeBorrowed::Borrowed(x)) };
        Ok(MaybeBorrowed::Owned(Buffer(self.0.pick(x, on_gpu(&query_rows.rows)?.list(), width)?)))
    }

    fn add_query_rows(
        &self,
        sum: &mut Buffer<f32>,
        part: &CudaSlice<f32>,
        width: usize,
        query_rows: Option<&QueryRows>,
    ) -> Result<()> {
        match query_rows {
            None => self.0.add(&mut sum.0, part),
            Some(query_rows) => self.0.add_picked(&mut sum.0, part, on_gpu(&query_rows.rows)?.list(), width),
        }
    }

    fn rms_norm_backward(
        &self,
        x: &CudaSlice<f32>,
        weight: &Tensor,
        eps: f32,
        grad: &CudaSlice<f32>,
        residual_grad: Option<&CudaSlice<f32>>,
    ) -> Result<(Buffer<f32>, Option<Buffer<f32>>)> {
        let (gpu, loan) = (&self.0, BorrowedValues::of(weight)?);
        let n_wanted = if weight.track_op() { loan.len() } else { 0 };
        let (dx, dweight) = gpu.rms_norm_gradients(x, &*loan, eps, grad, residual_grad, n_wanted)?;
        Ok((Buffer(dx), (n_wanted > 0).then_some(Buffer(dweight))))
    }

    fn lora_b_backward<const N: usize>(
        &self,
        layers: [(&LoraLinear<LinearState>, &CudaSlice<bf16>); N],
    ) -> Result<[LinearGradients; N]> {
        each(layers, |(linear, grad)| Open::new(&self.0, linear)?.lora_b_backward(&self.0, grad))
    }

    fn parameter_backward<const N: usize>(&self, layers: [LinearBackward<'_, Self>; N]) -> Result<()> {
        for LinearBackward { linear, x, lora_a_out, grad, gradients } in layers {
            Open::new(&self.0, linear)?.parameter_gradients(&self.0, x, lora_a_out, grad, gradients)?;
        }
        Ok(())
    }

    fn input_backward(
        &self,
        linear: &LoraLinear<LinearState>,
        grad: &CudaSlice<bf16>,
        gradients: &LinearGradients,
    ) -> Result<Buffer<bf16>> {
        let open = Open::new(&self.0, linear)?;
        let layer = (&open.projection()?, gradients.product_grad(grad), gradients.lora.as_ref());
        Ok(Buffer(input_gradient(&self.0, &[layer])?))
    }

    fn shared_input_backward(&self, layers: &[LinearGrad<'_, Self>]) -> Result<Buffer<f32>> {
        let open: Vec<Open<'_>> =
            layers.iter().map(|(linear, ..)| Open::new(&self.0, linear)).collect::<Result<_>>()?;
        let projections: Vec<Projection<'_>> = open.iter().map(Open::projection).collect::<Result<_>>()?;
        let layers = projections.iter().zip(layers);
        let layers =
            layers.map(|(layer, &(_, grad, gradients))| (layer, gradients.product_grad(grad), gradients.lora.as_ref()));
        Ok(Buffer(input_gradient(&self.0, &layers.collect::<Vec<_>>())?))
    }

    fn gradients_of(&self, _linear: &LoraLinear<LinearState>, gradients: LinearGradients) -> Vec<Buffer<f32>> {
        let (a, b) = gradients.lora.map(|lora| (lora.a, lora.b)).unzip();
        [gradients.weight, gradients.bias, a, b, gradients.magnitude].into_iter().flatten().map(Buffer).collect()
    }

    fn rope_backward(
        &self,
        x: Option<&CudaSlice<bf16>>,
        norm: Option<&Tensor>,
        context: &LayerContext,
        rows: &Rows,
        grad: &CudaSlice<bf16>,
    ) -> Result<(Buffer<bf16>, Option<Buffer<f32>>)> {
        let is_wanted = norm.is_some_and(Tensor::track_op);
        let (rows, loan) = (on_gpu(rows)?, norm.map(BorrowedValues::of).transpose()?);
        let n_wanted = loan.as_ref().filter(|_| is_wanted).map_or(0, |norm| norm.len());
        let weight = loan.as_ref().map(|norm| norm.as_view());
        let norm = weight.as_ref().map(|weight| (weight, context.eps));
        let (rope, positions) = (&rows.rope, &rows.positions);
        let (dx, dnorm) = rope.norm_rope_gradients(&self.0, x.unwrap_or(grad), norm, positions, grad, n_wanted)?;
        Ok((Buffer(dx), is_wanted.then_some(Buffer(dnorm))))
    }

    fn attend(
        &self,
        attention: &PackedAttention,
        [q, k, v]: [&CudaSlice<bf16>; 3],
    ) -> Result<(Buffer<bf16>, CudaSlice<f32>)> {
        let (out, logsumexp) = self.0.attend(&on_gpu(&attention.rows)?.queries, attention.head_dim, q, k, v)?;
        Ok((Buffer(out), logsumexp))
    }

    fn attention_backward(
        &self,
        attention: &PackedAttention,
        [q, k, v]: [&CudaSlice<bf16>; 3],
        out: &CudaSlice<bf16>,
        logsumexp: &CudaSlice<f32>,
        grad: &CudaSlice<bf16>,
    ) -> Result<[Buffer<bf16>; 3]> {
        let queries = &on_gpu(&attention.rows)?.queries;
        let gradients = self.0.attention_gradients(queries, attention.head_dim, q, k, v, out, logsumexp, grad)?;
        Ok(gradients.map(Buffer))
    }

    fn swiglu_backward(
        &self,
        gate: &CudaSlice<bf16>,
        up: &CudaSlice<bf16>,
        grad: Buffer<bf16>,
    ) -> Result<[Buffer<bf16>; 3]> {
        Ok(self.0.swiglu_gradients(gate, up, &grad.0)?.map(Buffer))
    }
}

/// Maps an array with `f`; returns the first error.
fn each<T, R, const N: usize>(all: [T; N], f: impl FnMut(T) -> Result<R>) -> Result<[R; N]> {
    let done: Vec<R> = all.into_iter().map(f).collect::<Result<_>>()?;
    done.try_into().map_err(|_| Error::Msg(format!("expected {N} linear layers to give as many outputs")))
}

/// Rows of a pass, uploaded once for all layers.
pub(super) struct LayerRows {
    pub(super) rope: Arc<DeviceRope>,
    pub(super) positions: CudaSlice<u32>,
    /// The query rows, and the lists of tiles of queries and keys that attend to each other.
    pub(super) queries: TreeQueries,
    /// The dropout mask with the random keys of all rows.
    dropout: Option<(DropoutMask, CudaSlice<u64>)>,
}

impl LayerRows {
    /// The rows of a pass: all rows of a batch, or the query rows, ascending.
    pub(super) fn new(
        gpu: &Gpu,
        rope: Arc<DeviceRope>,
        batch: &PackedBatch,
        query_rows: Option<&[u32]>,
        dropout: Option<&DropoutMask>,
    ) -> Result<Self> {
        let (queries, positions) = match query_rows {
            None => (TreeQueries::all(gpu, &batch.tree)?, rope.positions(gpu, &batch.positions)?),
            Some(rows) => {
                let queries = TreeQueries::some(gpu, &batch.tree, rows)?; // checks that the rows exist
                let positions: Vec<u32> = rows.iter().map(|&row| batch.positions[row as usize]).collect();
                (queries, rope.positions(gpu, &positions)?)
            }
        };
        let dropout = dropout.map(|mask| Ok::<_, Error>((mask.clone(), gpu.upload(mask.row_keys())?))).transpose()?;
        Ok(Self { rope, positions, queries, dropout })
    }

    /// Dropout masks for the `n_in` inputs of the adapter on the layer at `layer_path`; `None` without dropout.
    pub(super) fn masks(&self, layer_path: &str, n_in: usize) -> Option<DropoutMasks<'_>> {
        let (mask, row_keys) = self.dropout.as_ref()?;
        let first_input = mask.first_input(layer_path, n_in);
        Some(DropoutMasks { row_keys, layer_seed: mask.seed_of(layer_path), first_input, p: mask.p() })
    }

    pub(super) fn list(&self) -> &CudaSlice<u32> {
        self.queries.rows()
    }
}

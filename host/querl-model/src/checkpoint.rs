//! Safetensors files, read and written, and the loading of a decoder's weights: from a checkpoint, from memory, or random.

use crate::accelerator::WeightValues;
use crate::finite::{StoredTensor, check_tensors};
use crate::kernels::{FrozenWeight, Weight};
use crate::sharding::{Placement, TensorParallel, TensorSlice};
use crate::{ComputeDevice, DecoderConfig, ModelError, Weights, random};
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Error, Tensor, Var};
use querl_core::config::BaseDtype;
use querl_core::model_config::{self, DOWNLOAD_AGAIN, PRETRAIN_FOLDER};
use safetensors::tensor::TensorView;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};

const NEEDS: &str =
    "config.json, tokenizer.json and model.safetensors (or its shards with model.safetensors.index.json)";

pub(crate) fn required(directory: &Path, file: &str) -> Result<PathBuf, ModelError> {
    let path = directory.join(file);
    if path.is_file() {
        return Ok(path);
    }
    if directory.join(PRETRAIN_FOLDER).is_dir() {
        let problem =
            "its pretraining is not finished; run `querl model pretrain` with the same file again, which resumes";
        return Err(ModelError::bad_file(directory, problem));
    }
    Err(ModelError::MissingFile { directory: directory.to_owned(), file: file.to_owned(), needs: NEEDS })
}

const INDEX: &str = "model.safetensors.index.json";

/// The file of each tensor, from `model.safetensors.index.json`.
fn weight_map(directory: &Path) -> Result<Option<BTreeMap<String, String>>, ModelError> {
    let index = directory.join(INDEX);
    if !index.is_file() {
        return Ok(None);
    }
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let text = std::fs::read_to_string(&index).map_err(ModelError::io(&index))?;
    let map: Index =
        serde_json::from_str(&text).map_err(|error| ModelError::unparsed(&index, "an index of shards", error))?;
    if map.weight_map.is_empty() {
        return Err(ModelError::bad_file(&index, "`weight_map` names no tensors; download the model again"));
    }
    for (tensor, shard) in &map.weight_map {
        check_shard(directory, tensor, shard).map_err(|message| ModelError::bad_file(&index, message))?;
    }
    Ok(Some(map.weight_map))
}

/// Checks that the name of a shard is a file in the model's folder, not a path to another folder.
fn check_shard(directory: &Path, tensor: &str, shard: &str) -> Result<(), String> {
    if shard.is_empty() || shard == "." || shard == ".." || shard.contains(['/', '\\', ':', '\0']) {
        return Err(format!(
            "`weight_map` has `{shard}` for the tensor `{tensor}`; expected the name of a file in the model's folder"
        ));
    }
    match directory.join(shard).is_file() {
        true => Ok(()),
        false => {
            Err(format!("`weight_map` names the shard `{shard}`, which is not in the folder; download the model again"))
        }
    }
}

/// The weight files of a model: `model.safetensors`, or the shards that the index lists.
pub(crate) fn weight_files(directory: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let Some(map) = weight_map(directory)? else { return Ok(vec![required(directory, "model.safetensors")?]) };
    let shards: BTreeSet<String> = map.into_values().collect();
    Ok(shards.into_iter().map(|shard| directory.join(shard)).collect())
}

/// Checks that a model directory has a `config.json` that can be read, of any architecture.
///
/// # Errors
/// The file is missing or not a JSON object.
pub fn check_config_file(directory: &Path) -> Result<(), ModelError> {
    let path = required(directory, "config.json")?;
    model_config::read(&path).map(drop).map_err(|error| ModelError::unread(&path, error))
}

/// Checks a model directory without reading its weights: the configuration, and the header and size of each weight file.
///
/// # Errors
/// A file is missing, config.json is damaged, the architecture is not supported, or a weight file is damaged or truncated.
pub fn check_directory(directory: &Path) -> Result<(), ModelError> {
    DecoderConfig::load(&required(directory, "config.json")?)?;
    WeightFiles::open(directory).map(drop)
}

/// Like [`check_directory`], and also reads and checks all weights.
///
/// # Errors
/// Those of [`check_directory`], the tensors are not those of the configuration, or a value is NaN or Inf.
pub fn check_weights(directory: &Path) -> Result<(), ModelError> {
    let stored = StoredModel::open(directory)?;
    stored.config.tensor_shapes().iter().try_for_each(|(name, _)| stored.bytes(name, None).map(drop))
}

/// Type, shape and bytes of a tensor or of a slice of it.
pub(crate) type Bytes<'a> = (DType, Vec<usize>, Cow<'a, [u8]>);

/// The mapped safetensors files of a model. Bytes of tensors are checked for NaN and Inf when they are read.
struct WeightFiles {
    files: Vec<(PathBuf, MmapedSafetensors)>,
    /// Index in `files` for each tensor.
    routes: BTreeMap<String, usize>,
    directory: PathBuf,
}

impl WeightFiles {
    fn open(directory: &Path) -> Result<Self, ModelError> {
        let (mut files, mut routes) = (Vec::new(), BTreeMap::new());
        for path in weight_files(directory)? {
            let tensors = map_file(&path)?;
            routes.extend(tensors.tensors().into_iter().map(|(name, _)| (name, files.len())));
            files.push((path, tensors));
        }
        let mut opened = Self { files, routes, directory: directory.to_owned() };
        opened.follow(weight_map(directory)?.unwrap_or_default())?;
        Ok(opened)
    }

    /// Reads each tensor from the shard that the index assigns to it.
    fn follow(&mut self, weight_map: BTreeMap<String, String>) -> Result<(), ModelError> {
        for (name, shard) in weight_map {
            let path = self.directory.join(&shard);
            let position = self.files.iter().position(|(file, _)| *file == path);
            let Some(position) = position.filter(|&position| self.files[position].1.get(&name).is_ok()) else {
                let message = format!("no tensor `{name}` there, which {INDEX} places in it; download the model again");
                return Err(ModelError::bad_file(&path, message));
            };
            self.routes.insert(name, position);
        }
        Ok(())
    }

    /// The file of a tensor and the tensor.
    fn view(&self, name: &str) -> Result<(&Path, TensorView<'_>), ModelError> {
        let missing = || ModelError::bad_file(&self.directory, format!("no tensor `{name}` there"));
        let (path, tensors) = &self.files[*self.routes.get(name).ok_or_else(missing)?];
        Ok((path, tensors.get(name).map_err(|_| missing())?))
    }
}

fn map_file(path: &Path) -> Result<MmapedSafetensors, ModelError> {
    // SAFETY: a program that rewrites a checkpoint in place while it is mapped breaks the mapping, as it would for every
    // reader of safetensors. querl never does: it writes a new file and renames it, which leaves the mapping intact.
    unsafe { MmapedSafetensors::new(path) }.map_err(|error| unloaded(path, error))
}

/// The error for a file that could not be loaded. An I/O error, such as a mapping without enough address space, does not make it a
/// damaged file.
pub(crate) fn unloaded(path: &Path, error: Error) -> ModelError {
    match error {
        Error::WithPath { inner, path } => unloaded(&path, *inner),
        Error::WithBacktrace { inner, .. } => unloaded(path, *inner),
        Error::Io(source) => ModelError::io(path)(source),
        error => {
            let cause = first_line(&error);
            if cause.starts_with("unsupported") && cause.contains("dtype") {
                return ModelError::bad_file(path, format!("{cause}; save its tensors as f32, bf16 or f16"));
            }
            ModelError::bad_file(path, format!("damaged or truncated safetensors file ({cause}); {DOWNLOAD_AGAIN}"))
        }
    }
}

/// A memory-mapped checkpoint whose tensor names and shapes were checked. Values are read when needed.
pub(crate) struct StoredModel {
    pub(crate) config: DecoderConfig,
    files: WeightFiles,
}

impl StoredModel {
    pub(crate) fn open(directory: &Path) -> Result<Self, ModelError> {
        let config = DecoderConfig::load(&required(directory, "config.json")?)?;
        Self::open_with(directory, config, &[])
    }

    /// Opens a directory whose configuration was read already. `extra`: names of tensors that are allowed in addition to the decoder's.
    pub(crate) fn open_with(directory: &Path, config: DecoderConfig, extra: &[&str]) -> Result<Self, ModelError> {
        let stored = Self { config, files: WeightFiles::open(directory)? };
        stored.check(extra).map_err(|message| ModelError::bad_file(directory, message))?;
        Ok(stored)
    }

    fn check(&self, extra: &[&str]) -> Result<(), String> {
        let shapes = self.config.tensor_shapes();
        let known: BTreeSet<&str> = shapes.iter().map(|(name, _)| name.as_str()).chain(extra.iter().copied()).collect();
        let is_surplus = |name: &&String| !known.contains(name.as_str()) && !is_redundant(name, &self.config);
        if let Some(name) = self.files.routes.keys().find(is_surplus) {
            return Err(format!("tensor `{name}` has no place in the model that config.json describes"));
        }
        for (name, shape) in &shapes {
            let (_, found) = self.files.view(name).map_err(|_| format!("no tensor `{name}` there"))?;
            if found.shape() != shape.as_slice() {
                let found = found.shape();
                return Err(format!("tensor `{name}` has shape {found:?}; config.json makes it {shape:?}"));
            }
        }
        Ok(())
    }

    pub(crate) fn dtype(&self, name: &str) -> Result<DType, ModelError> {
        Ok(DType::try_from(self.files.view(name)?.1.dtype())?)
    }

    pub(crate) fn tensor(&self, name: &str) -> Result<Tensor, ModelError> {
        let (dtype, shape, bytes) = self.bytes(name, None)?;
        Ok(Tensor::from_raw_buffer(&bytes, dtype, &shape, &Device::Cpu)?)
    }

    /// Stored type, shape and bytes of a tensor or a slice. Rows are borrowed from the mapped file; a range of columns is copied.
    ///
    /// # Errors
    /// There is no such tensor, or a value is NaN or Inf.
    pub(crate) fn bytes(&self, name: &str, slice: Option<&TensorSlice>) -> Result<Bytes<'_>, ModelError> {
        let (path, view) = self.files.view(name)?;
        let (dtype, mut shape, bytes) = (DType::try_from(view.dtype())?, view.shape().to_vec(), view.data());
        let mut start = vec![0; shape.len()];
        let bytes = match slice {
            None => Cow::Borrowed(bytes),
            Some(TensorSlice { axis, range }) => {
                let sliced = sliced(bytes, &shape, *axis, range);
                let sliced =
                    sliced.ok_or_else(|| ModelError::bad_file(path, format!("`{name}` is not a matrix: {shape:?}")))?;
                (shape[*axis], start[*axis]) = (range.len(), range.start);
                sliced
            }
        };
        StoredTensor { path, name, shape: &shape, start: &start }.check(dtype, &bytes)?;
        Ok((dtype, shape, bytes))
    }
}

/// Rows of a tensor or columns of a matrix; `None` for columns of anything else.
fn sliced<'a>(bytes: &'a [u8], shape: &[usize], axis: usize, range: &Range<usize>) -> Option<Cow<'a, [u8]>> {
    let line = bytes.len() / shape.first().copied().unwrap_or_default().max(1);
    match (axis, shape) {
        (0, [..]) => Some(Cow::Borrowed(&bytes[range.start * line..range.end * line])),
        (1, [_, width]) => {
            let size = line / width;
            let columns = range.start * size..range.end * size;
            Some(Cow::Owned(bytes.chunks_exact(line).flat_map(|row| &row[columns.clone()]).copied().collect()))
        }
        _ => None,
    }
}

/// True for tensors that some checkpoints contain but the decoder does not need: a tied head, or constants of the rotary embedding.
fn is_redundant(name: &str, config: &DecoderConfig) -> bool {
    (config.tie_word_embeddings && name == "lm_head.weight") || name.ends_with("rotary_emb.inv_freq")
}

/// The first line of an error message, without the backtrace that candle appends.
fn first_line(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

/// Reads all tensors of one safetensors file, in their stored types.
///
/// # Errors
/// The file is missing, truncated or no safetensors file, or a value is NaN or Inf.
pub fn load_tensors(path: &Path) -> Result<HashMap<String, Tensor>, ModelError> {
    let bytes = std::fs::read(path).map_err(ModelError::io(path))?;
    let tensors = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu).map_err(|error| unloaded(path, error))?;
    check_tensors(path, &tensors)?;
    Ok(tensors)
}

/// Writes tensors to one safetensors file atomically, in the order of their names.
///
/// # Errors
/// The file cannot be written.
pub fn save_tensors(path: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<(), ModelError> {
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let bytes =
        safetensors::serialize(tensors.iter(), Some(metadata)).map_err(|error| ModelError::bad_file(path, error))?;
    querl_core::fsx::write_atomic(path, &bytes).map_err(ModelError::io(path))
}

pub(crate) trait Tensors {
    /// Shape of the complete tensor.
    ///
    /// # Errors
    /// There is no tensor of that name.
    fn shape(&self, name: &str) -> Result<Vec<usize>, ModelError>;

    /// The file that holds a tensor, for messages; `None` for tensors that exist in memory only.
    fn file(&self, _name: &str) -> Option<&Path> {
        None
    }

    /// A tensor of any float type, or a part of it, on the CPU.
    ///
    /// # Errors
    /// There is no tensor of that name, or it is too short.
    fn tensor(&self, name: &str, slice: Option<&TensorSlice>) -> Result<Tensor, ModelError>;

    /// A matrix, or a part of it, for an accelerator.
    ///
    /// # Errors
    /// As [`Tensors::tensor`].
    fn values(&self, name: &str, slice: Option<&TensorSlice>) -> Result<WeightValues<'_>, ModelError> {
        Ok(WeightValues::Tensor(self.tensor(name, slice)?))
    }
}

fn missing(name: &str) -> ModelError {
    Error::Msg(format!("no tensor `{name}`")).into()
}

fn matrix(name: &str, shape: &[usize]) -> Result<(usize, usize), ModelError> {
    match *shape {
        [n_out, n_in] => Ok((n_out, n_in)),
        _ => Err(Error::Msg(format!("`{name}` is not a matrix: its shape is {shape:?}")).into()),
    }
}

impl Tensors for StoredModel {
    fn shape(&self, name: &str) -> Result<Vec<usize>, ModelError> {
        Ok(self.files.view(name)?.1.shape().to_vec())
    }

    fn file(&self, name: &str) -> Option<&Path> {
        self.files.view(name).ok().map(|(path, _)| path)
    }

    fn tensor(&self, name: &str, slice: Option<&TensorSlice>) -> Result<Tensor, ModelError> {
        let (dtype, shape, bytes) = self.bytes(name, slice)?;
        Ok(Tensor::from_raw_buffer(&bytes, dtype, &shape, &Device::Cpu)?)
    }

    fn values(&self, name: &str, slice: Option<&TensorSlice>) -> Result<WeightValues<'_>, ModelError> {
        let (dtype, shape, bytes) = self.bytes(name, slice)?;
        Ok(WeightValues::Bytes { bytes, dtype, dims: matrix(name, &shape)? })
    }
}

impl Tensors for BTreeMap<String, Tensor> {
    fn shape(&self, name: &str) -> Result<Vec<usize>, ModelError> {
        self.get(name).map(|tensor| tensor.dims().to_vec()).ok_or_else(|| missing(name))
    }

    fn tensor(&self, name: &str, slice: Option<&TensorSlice>) -> Result<Tensor, ModelError> {
        let tensor = self.get(name).ok_or_else(|| missing(name))?;
        match slice {
            Some(TensorSlice { axis, range }) => Ok(tensor.narrow(*axis, range.start, range.len())?),
            None => Ok(tensor.clone()),
        }
    }
}

pub(crate) struct RandomTensors {
    shapes: BTreeMap<String, Vec<usize>>,
    seed: u64,
    deviation: f32,
}

impl RandomTensors {
    pub(crate) fn new(config: &DecoderConfig, seed: u64) -> Self {
        Self { shapes: config.tensor_shapes().into_iter().collect(), seed, deviation: config.initializer_range as f32 }
    }

    fn of_name(&self, name: &str) -> Result<&[usize], ModelError> {
        self.shapes.get(name).map(Vec::as_slice).ok_or_else(|| missing(name))
    }
}

impl Tensors for RandomTensors {
    fn shape(&self, name: &str) -> Result<Vec<usize>, ModelError> {
        Ok(self.of_name(name)?.to_vec())
    }

    fn tensor(&self, name: &str, slice: Option<&TensorSlice>) -> Result<Tensor, ModelError> {
        let whole = self.of_name(name)?;
        let mut shape = whole.to_vec();
        if let Some(TensorSlice { axis, range }) = slice {
            shape[*axis] = range.len();
        }
        let n_values = shape.iter().product();
        let values = match (name, slice, whole) {
            (name, ..) if name.ends_with(".bias") => vec![0.0; n_values],
            (name, ..) if name.contains("norm") => vec![1.0; n_values],
            (name, Some(TensorSlice { axis, range }), &[n_rows, width]) => {
                let (rows, columns) = if *axis == 0 { (range.clone(), 0..width) } else { (0..n_rows, range.clone()) };
                random::normal_part(rows, columns, width, random::seed_of(self.seed, name), self.deviation)
            }
            (name, ..) => random::normal(n_values, random::seed_of(self.seed, name), self.deviation),
        };
        Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
    }

    fn values(&self, name: &str, slice: Option<&TensorSlice>) -> Result<WeightValues<'_>, ModelError> {
        let (n_rows, width) = matrix(name, self.of_name(name)?)?;
        let (rows, columns) = match slice {
            Some(TensorSlice { axis: 0, range }) => (range.clone(), 0..width),
            Some(TensorSlice { range, .. }) => (0..n_rows, range.clone()),
            None => (0..n_rows, 0..width),
        };
        let (seed, deviation) = (random::seed_of(self.seed, name), self.deviation);
        Ok(WeightValues::Random { rows, columns, width, seed, deviation })
    }
}

/// Loads a decoder's tensors one at a time, and converts each for its device.
pub(crate) struct WeightLoader<'a> {
    tensors: &'a dyn Tensors,
    weights: Weights,
    dtype: BaseDtype,
    pub(crate) compute_device: &'a ComputeDevice,
    pub(crate) parallel: TensorParallel,
    pub(crate) vars: BTreeMap<String, Var>,
}

impl<'a> WeightLoader<'a> {
    pub(crate) fn new(
        tensors: &'a dyn Tensors,
        weights: Weights,
        dtype: BaseDtype,
        compute_device: &'a ComputeDevice,
    ) -> Result<Self, ModelError> {
        compute_device.check(weights, dtype)?;
        Ok(Self { tensors, weights, dtype, compute_device, parallel: TensorParallel::default(), vars: BTreeMap::new() })
    }

    pub(crate) fn sharded(self, parallel: TensorParallel) -> Self {
        Self { parallel, ..self }
    }

    /// This rank's slice of a tensor, `None` for all of it.
    fn slice(&self, name: &str) -> Result<Option<TensorSlice>, ModelError> {
        match self.parallel.shard().placement(name, &self.tensors.shape(name)?) {
            Placement::Slice(slice) => Ok(Some(slice)),
            Placement::Full | Placement::Absent => Ok(None),
        }
    }

    /// A bias; `None` if another rank adds it.
    pub(crate) fn bias(&mut self, name: &str) -> Result<Option<Tensor>, ModelError> {
        match self.parallel.shard().placement(name, &self.tensors.shape(name)?) {
            Placement::Absent => Ok(None),
            Placement::Full | Placement::Slice(_) => self.value(name).map(Some),
        }
    }

    /// Weight of a norm, or a bias: f32, a variable if weights are trained.
    pub(crate) fn value(&mut self, name: &str) -> Result<Tensor, ModelError> {
        let slice = self.slice(name)?;
        let tensor = self
            .tensors
            .tensor(name, slice.as_ref())?
            .to_dtype(DType::F32)?
            .to_device(&self.compute_device.device())?;
        match self.weights {
            Weights::Frozen => Ok(tensor),
            Weights::Trained => {
                let var = Var::from_tensor(&tensor)?;
                let tensor = var.as_tensor().clone();
                self.vars.insert(name.to_owned(), var);
                Ok(tensor)
            }
        }
    }

    /// The weight of a linear layer, packed for matrix products.
    pub(crate) fn weight(&mut self, name: &str) -> Result<Weight, ModelError> {
        self.weight_as(name, self.dtype)
    }

    /// The embedding or the head, not quantized: it is a small part of the memory, and its quantization error has a large effect on the
    /// logits.
    pub(crate) fn table(&mut self, name: &str) -> Result<Weight, ModelError> {
        let dtype = match self.dtype {
            BaseDtype::Int8 | BaseDtype::Fp8 | BaseDtype::Nf4 => BaseDtype::Bf16,
            dtype => dtype,
        };
        self.weight_as(name, dtype)
    }

    /// The error for a tensor with values that the storage type of the frozen weights cannot represent.
    fn unfit(&self, name: &str, error: Error) -> ModelError {
        match self.tensors.file(name) {
            Some(path) => ModelError::bad_file(path, format!("tensor `{name}`: {}", first_line(&error))),
            None => error.into(),
        }
    }

    fn weight_as(&mut self, name: &str, dtype: BaseDtype) -> Result<Weight, ModelError> {
        if self.weights == Weights::Trained {
            return Ok(Weight::Trained(self.value(name)?));
        }
        let slice = self.slice(name)?;
        match self.compute_device {
            ComputeDevice::Cpu => {
                let tensor = self.tensors.tensor(name, slice.as_ref())?;
                let packed = FrozenWeight::pack(&tensor, dtype).map_err(|error| self.unfit(name, error))?;
                Ok(Weight::Frozen(packed))
            }
            ComputeDevice::Accelerator(accelerator) => {
                let values = self.tensors.values(name, slice.as_ref())?;
                Ok(Weight::Accelerator(accelerator.upload_weight(values, dtype)?))
            }
        }
    }
}

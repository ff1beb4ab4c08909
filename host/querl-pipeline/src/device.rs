//! Which device a configuration asks for, and who does the jobs then.

use crate::cuda::{self, Card, Driver, Found, Missing, Probe, version_name};
use crate::failure::Stop;
use querl_core::config::{Config, DeviceSetting, ModelConfig, SftConfig};
use querl_device::memory::Types;
use querl_device::{Description, Device, Host, Job, JobError, Outcome, do_job};
use querl_model::{CardUse, DecoderConfig};
use std::path::Path;
use std::sync::Mutex;

/// Who does the jobs of a run.
#[derive(Debug)]
pub struct Place {
    worker: Worker,
    /// Ranks of the processor, where that is the device.
    n_ranks: usize,
    /// What `auto` has chosen and why; said before the first job.
    choice: Mutex<Option<String>>,
}

#[derive(Debug)]
enum Worker {
    /// This program, on the processor.
    Program,
    /// The library, on its processor: in tests.
    Library(Found),
    /// The library, on cards: at least one.
    Cards(Found, Vec<UsedCard>),
}

/// What jobs ask of a device, as far as a card may refuse it.
#[derive(Debug, Clone, Copy)]
pub struct Needs<'a> {
    /// The base, and what it is trained for.
    pub model: &'a ModelConfig,
    /// Its adapters.
    pub sft: &'a SftConfig,
    /// Width of its heads of attention; `None` where the model is not there yet.
    pub head_dim: Option<usize>,
    /// What is done with it.
    pub card_use: CardUse,
}

impl<'a> Needs<'a> {
    /// Of a configuration, whose model is there or not.
    ///
    /// # Errors
    /// The model's shapes cannot be read.
    fn of(config: &'a Config, card_use: CardUse) -> Result<Self, Stop> {
        let path = config.model.path.join("config.json");
        let head_dim = path.is_file().then(|| head_dim(&config.model.path)).transpose()?;
        Ok(Self { model: &config.model, sft: &config.sft, head_dim, card_use })
    }
}

fn head_dim(folder: &Path) -> Result<usize, Stop> {
    let shapes = DecoderConfig::load(&folder.join("config.json")).map_err(|error| Stop::usage(error.to_string()))?;
    Ok(shapes.head_dim)
}

/// A card that does jobs.
#[derive(Debug)]
pub struct UsedCard {
    /// Its number, as in `cuda:N`.
    pub index: usize,
    /// What it is.
    pub card: Card,
    /// What nobody else used of its memory when the run began, where the driver tells.
    pub free_bytes: Option<u64>,
}

impl Place {
    /// This program, on the processor.
    pub fn here() -> Self {
        Self { worker: Worker::Program, n_ranks: 1, choice: Mutex::new(None) }
    }

    /// The place for a configuration, whose device is a name: the configuration was checked. `card_use`: of its stages that run.
    ///
    /// # Errors
    /// It asks for a card that cannot be used, or for what a card cannot do.
    pub fn choose(config: &Config, card_use: CardUse) -> Result<Self, Stop> {
        Self::of(&config.device, &Needs::of(config, card_use)?)
    }

    /// The same for a device by its name.
    ///
    /// # Errors
    /// As [`Place::choose`].
    pub fn of(name: &str, needs: &Needs<'_>) -> Result<Self, Stop> {
        let (is_named, indices) = match DeviceSetting::from_name(name).unwrap_or(DeviceSetting::Auto) {
            DeviceSetting::Cpu { n_ranks } => return Ok(Self { n_ranks, ..Self::here() }),
            DeviceSetting::Auto => (false, vec![0]),
            DeviceSetting::Cuda(indices) => (true, indices),
        };
        match worker(&indices, needs) {
            Ok(worker) => {
                let n_ranks = indices.len();
                let place = Self { worker, n_ranks, choice: Mutex::new(None) };
                let choice = (!is_named).then(|| format!("device: {}", place.name()));
                Ok(Self { choice: Mutex::new(choice), ..place })
            }
            Err(missing) if is_named => Err(refused(name, &missing)),
            Err(missing) => {
                let choice = format!("device: the CPU, since {missing}");
                Ok(Self { choice: Mutex::new(Some(choice)), ..Self::here() })
            }
        }
    }

    /// Refuses another model than the configured one, which the key `key` names, where a card cannot have it answer.
    ///
    /// # Errors
    /// A card is used that has no kernels for the model's heads, or the model's shapes cannot be read.
    pub fn check_answers_of(&self, key: &str, folder: &Path) -> Result<(), Stop> {
        if self.card().is_none() {
            return Ok(());
        }
        let checked = check_heads(key, head_dim(folder)?, CardUse::Answers);
        checked.map_err(|missing| Stop::usage(format!("{missing}; set device to \"cpu\"")))
    }

    /// As people call it.
    pub fn name(&self) -> String {
        match &self.worker {
            Worker::Program if self.n_ranks > 1 => format!("{} ranks of the CPU", self.n_ranks),
            Worker::Program => Device::Cpu.to_string(),
            Worker::Library(_) => "the CPU of libquerl_cuda".into(),
            Worker::Cards(_, used) => {
                let indices: Vec<String> = used.iter().map(|used| used.index.to_string()).collect();
                format!("cuda:{}, {}", indices.join(","), used[0].card.name)
            }
        }
    }

    /// As jobs call them: a rank on each.
    pub fn devices(&self) -> Vec<Device> {
        match &self.worker {
            Worker::Cards(_, used) => used.iter().map(|used| Device::Cuda(used.index)).collect(),
            Worker::Program | Worker::Library(_) => vec![Device::Cpu; self.n_ranks],
        }
    }

    /// The card, where it is one; of several that with the least free memory, since all hold as much.
    pub fn card(&self) -> Option<&UsedCard> {
        match &self.worker {
            Worker::Cards(_, used) => used.iter().min_by_key(|used| used.free_bytes.unwrap_or(used.card.memory_bytes)),
            Worker::Program | Worker::Library(_) => None,
        }
    }

    /// What decides the last bits of a training, of what a checkpoint belongs to: the sort of card, the CUDA whose libraries do its
    /// products, and how many ranks sum. `None` of one rank of the processor, which computes the same in the program and in the
    /// library.
    pub fn arithmetic(&self) -> Option<String> {
        let device = match &self.worker {
            Worker::Program | Worker::Library(_) => (self.n_ranks > 1).then(|| "cpu".to_owned())?,
            Worker::Cards(found, used) => {
                let cuda = found.library.description().cuda.map(version_name).unwrap_or_default();
                format!("cuda {cuda}, capability {}", used[0].card.capability)
            }
        };
        Some(if self.n_ranks > 1 { format!("{device}, {} ranks", self.n_ranks) } else { device })
    }

    /// Has a job done. The first time, it is said what `auto` has chosen.
    ///
    /// # Errors
    /// As [`do_job`].
    pub fn run(&self, job: &Job, host: &dyn Host) -> Result<Outcome, JobError> {
        let choice = self.choice.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        choice.into_iter().for_each(|line| host.line(&line));
        match &self.worker {
            Worker::Program => do_job(job, host),
            Worker::Library(found) | Worker::Cards(found, _) => found.library.run(job, host),
        }
    }
}

/// What a run would say of settings that the cards refuse which a configuration names, on a machine with or without them.
///
/// # Errors
/// A setting asks for what a card cannot do.
pub fn check_named(config: &Config) -> Result<(), Stop> {
    match DeviceSetting::from_name(&config.device) {
        Some(DeviceSetting::Cuda(_)) => {
            let needs = Needs::of(config, CardUse::Answers)?;
            check_settings(&needs).map_err(|missing| refused(&config.device, &missing))
        }
        _ => Ok(()),
    }
}

/// The sentence is whole whether what is missing was said with a remedy or has none.
fn refused(name: &str, missing: &Missing) -> Stop {
    Stop::usage(format!("device is {name:?}, which cannot be used: {missing}; \"cpu\" and \"auto\" do without"))
}

/// The library on the cards that are asked for.
fn worker(indices: &[usize], needs: &Needs<'_>) -> Result<Worker, Missing> {
    if std::env::var_os(cuda::ON_CPU).is_some() {
        return cuda::open().map(Worker::Library);
    }
    let driver = Probe::new().driver()?;
    let used = |&index: &usize| {
        let card = driver.cards.get(index).cloned().ok_or_else(|| no_such_card(&driver, index))?;
        Ok(UsedCard { index, card, free_bytes: driver.free_bytes(index).ok() })
    };
    let used = indices.iter().map(used).collect::<Result<Vec<_>, Missing>>()?;
    check_alike(&used)?;
    let found = cuda::open()?;
    check_fit(driver.cuda, &used[0].card, found.library.description())?;
    check_settings(needs)?;
    Ok(Worker::Cards(found, used))
}

/// Cards that share work compute the same: sums of other bits would let their weights drift apart.
///
/// # Errors
/// They are of two sorts.
fn check_alike(used: &[UsedCard]) -> Result<(), Missing> {
    let first = &used[0];
    let Some(other) = used.iter().find(|other| other.card.capability != first.card.capability) else { return Ok(()) };
    let named = |used: &UsedCard| {
        let (index, capability) = (used.index, capability_name(used.card.capability));
        format!("cuda:{index} ({}) has compute capability {capability}", used.card.name)
    };
    Err(Missing(format!("{} and {}; cards that share work must be alike", named(first), named(other))))
}

/// What the processor can do and a card cannot.
///
/// # Errors
/// A setting asks for some of it.
fn check_settings(&Needs { model, sft, head_dim, card_use }: &Needs<'_>) -> Result<(), Missing> {
    let storages = Types::CARD.storages;
    if !storages.contains(&model.dtype) {
        let names: Vec<&str> = storages.iter().map(|dtype| dtype.name()).collect();
        let (found, expected) = (model.dtype.name(), names.join(" or "));
        return Err(Missing(format!(
            "model.dtype is {found:?} and a card stores a frozen base as {expected}; set it to one of these"
        )));
    }
    if sft.use_dora && sft.lora_dropout > 0.0 {
        return Err(Missing(
            "sft.use_dora is true and sft.lora_dropout above 0, which together the CPU alone can do; set sft.lora_dropout = 0 or sft.use_dora = false".into(),
        ));
    }
    head_dim.map_or(Ok(()), |head_dim| check_heads("model.path", head_dim, card_use))
}

/// # Errors
/// A card has no kernels for the heads of the model that `key` names.
fn check_heads(key: &str, head_dim: usize, card_use: CardUse) -> Result<(), Missing> {
    querl_model::Place::check_card_heads(head_dim, card_use).map_err(|error| Missing(format!("{key} names {error}")))
}

fn no_such_card(driver: &Driver, index: usize) -> Missing {
    let n_cards = driver.cards.len();
    Missing(format!("the driver sees {n_cards} card(s), cuda:0 to cuda:{}, and none is cuda:{index}", n_cards - 1))
}

/// Whether a library's code runs on a card whose driver supports `driver_cuda`.
///
/// # Errors
/// It does not.
pub fn check_fit(driver_cuda: u32, card: &Card, library: &Description) -> Result<(), Missing> {
    let Some(cuda) = library.cuda else {
        return Err(Missing("libquerl_cuda was built without CUDA; build it with host/querl-cuda/build.sh".into()));
    };
    // Within one major version, an older driver runs what a newer CUDA has compiled.
    if driver_cuda / 1000 < cuda / 1000 {
        let (has, needs) = (version_name(driver_cuda), version_name(cuda));
        return Err(Missing(format!(
            "the driver supports CUDA {has} and libquerl_cuda was built with CUDA {needs}; update the driver, or build the library with CUDA {}",
            driver_cuda / 1000
        )));
    }
    match library.capabilities.iter().min() {
        Some(&least) if card.capability < least => Err(Missing(format!(
            "{} has compute capability {}; expected {} or newer",
            card.name,
            capability_name(card.capability),
            capability_name(least)
        ))),
        _ => Ok(()),
    }
}

/// 90 as `9.0`.
pub fn capability_name(capability: u32) -> String {
    format!("{}.{}", capability / 10, capability % 10)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use querl_core::config::{BaseDtype, TuningMethod};

    fn model(dtype: BaseDtype) -> ModelConfig {
        ModelConfig {
            path: "model".into(),
            dtype,
            tokens_per_pass: 512,
            gradient_checkpointing: false,
            tensor_parallel: 1,
        }
    }

    #[test]
    fn what_a_card_cannot_do_is_named_by_its_setting() {
        let refusal = |dtype, sft: SftConfig| {
            let needs = Needs { model: &model(dtype), sft: &sft, head_dim: Some(64), card_use: CardUse::Answers };
            check_settings(&needs).map_err(|missing| missing.0)
        };
        let plain = SftConfig::default();
        assert_eq!(refusal(BaseDtype::Bf16, plain.clone()), Ok(()));
        let of_dtype = "model.dtype is \"f32\" and a card stores a frozen base as bf16 or int8 or fp8 or nf4; set it to one of these";
        assert_eq!(refusal(BaseDtype::F32, plain.clone()), Err(of_dtype.into()));
        let full = SftConfig { method: TuningMethod::Full, ..plain.clone() };
        let dora = SftConfig { use_dora: true, ..plain.clone() };
        let dropout = SftConfig { lora_dropout: 0.1, ..plain };
        for sft in [full, dora, dropout.clone()] {
            assert_eq!(refusal(BaseDtype::Nf4, sft), Ok(()));
        }
        let both = SftConfig { use_dora: true, ..dropout };
        let refused = refusal(BaseDtype::Bf16, both).unwrap_err();
        assert!(refused.starts_with("sft.use_dora is true and sft.lora_dropout above 0"), "{refused}");
    }

    /// The symptom: a model was fine-tuned for hours, and its first answer was refused.
    #[test]
    fn heads_that_a_card_has_no_kernels_for_are_refused_before_anything_is_done() {
        let refusal = |head_dim, card_use| {
            let (model, sft) = (model(BaseDtype::Bf16), SftConfig::default());
            let needs = Needs { model: &model, sft: &sft, head_dim: Some(head_dim), card_use };
            check_settings(&needs).map_err(|missing| missing.0)
        };
        for head_dim in [8, 64, 120, 128] {
            assert_eq!(refusal(head_dim, CardUse::Answers), Ok(()));
        }
        assert_eq!(refusal(20, CardUse::Training), Ok(()));
        let odd = "model.path names a model with heads of 20, and a card writes answers with heads of a multiple of 8 up to 128";
        assert_eq!(refusal(20, CardUse::Answers), Err(odd.into()));
        let wide = "model.path names a model with heads of 256, and a card learns with heads of up to 128";
        assert_eq!(refusal(256, CardUse::Training), Err(wide.into()));
        assert!(refusal(256, CardUse::Answers).is_err());
    }

    #[test]
    fn cards_of_two_sorts_do_not_share_work() {
        let used = |index, name: &str, capability| {
            let card = Card { name: name.into(), memory_bytes: 1 << 30, capability };
            UsedCard { index, card, free_bytes: None }
        };
        let refusal = |used: &[UsedCard]| check_alike(used).map_err(|missing| missing.0);
        assert_eq!(refusal(&[used(0, "H100", 90), used(3, "H200", 90)]), Ok(()));
        let sentence = "cuda:0 (H100) has compute capability 9.0 and cuda:1 (A100) has compute capability 8.0; cards that share \
                        work must be alike";
        assert_eq!(refusal(&[used(0, "H100", 90), used(1, "A100", 80)]), Err(sentence.into()));
    }

    #[test]
    fn a_library_must_be_for_the_card_and_its_driver() {
        let description = |cuda| Description { version: "0.1.0".into(), cuda, capabilities: vec![80, 86, 90] };
        let card = |capability| Card { name: "A card".into(), memory_bytes: 1 << 30, capability };
        let refusal = |driver_cuda, capability, cuda| {
            check_fit(driver_cuda, &card(capability), &description(cuda)).map_err(|missing| missing.0)
        };
        assert_eq!(refusal(13_000, 90, Some(13_010)), Ok(()));
        assert_eq!(refusal(13_000, 120, Some(13_000)), Ok(()));
        let older = "the driver supports CUDA 12.8 and libquerl_cuda was built with CUDA 13.0; update the driver, or build the \
                     library with CUDA 12";
        assert_eq!(refusal(12_080, 90, Some(13_000)), Err(older.into()));
        let small = "A card has compute capability 7.5; expected 8.0 or newer";
        assert_eq!(refusal(13_000, 75, Some(13_000)), Err(small.into()));
        assert!(refusal(13_000, 90, None).unwrap_err().contains("built without CUDA"));
    }
}

//! Settings that make a plan fit.

use super::{MemoryPlan, MemoryRequest, PlannedStage, tokens_of_pass};
use querl_core::config::BaseDtype;
use querl_model::Shard;

/// Settings to change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// Keys and values, as text.
    pub change: String,
    /// Bytes saved.
    pub saved_bytes: u64,
}

impl std::fmt::Display for Advice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "set {}, which takes {} less", self.change, gibibytes(self.saved_bytes))
    }
}

/// `12.3 GiB`.
pub fn gibibytes(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

/// Granularity of `model.tokens_per_pass`.
const STEP_OF_PASS: usize = 256;

/// Below this, matrix products are too small for a GPU, and gradient checkpointing costs less time.
const SMALL_PASS: usize = 2048;

/// The change that costs least and suffices; `None` where the plan fits, or where no change of these suffices. Tried in this order:
/// smaller passes (no time as long as they are not small), gradient checkpointing (a third more time), both, smaller batches of
/// rollouts, a base of fewer bits (results change), and everything.
pub fn advise(request: &MemoryRequest, free_bytes: u64) -> Option<Advice> {
    let needed = MemoryPlan::new(request).total();
    if needed <= free_bytes {
        return None;
    }
    let checkpointed = with(request, |request| request.model.gradient_checkpointing = true);
    let candidates = [
        smaller_passes(request, free_bytes).filter(|request| request.model.tokens_per_pass >= SMALL_PASS),
        fits(checkpointed.clone(), free_bytes),
        smaller_passes(&checkpointed, free_bytes),
        smaller_passes(request, free_bytes),
        smaller_batches(request, free_bytes),
        smaller_storage(request, free_bytes),
        smaller_storage(&checkpointed, free_bytes),
        smaller_storage(&smallest_passes(&checkpointed), free_bytes),
    ];
    let chosen = candidates.into_iter().flatten().next()?;
    let saved_bytes = needed - MemoryPlan::new(&chosen).total();
    Some(Advice { change: changes(request, &chosen).join(" and "), saved_bytes })
}

fn with(request: &MemoryRequest, change: impl FnOnce(&mut MemoryRequest)) -> MemoryRequest {
    let mut changed = request.clone();
    change(&mut changed);
    changed
}

fn fits(request: MemoryRequest, free_bytes: u64) -> Option<MemoryRequest> {
    (MemoryPlan::new(&request).total() <= free_bytes).then_some(request)
}

fn smallest_passes(request: &MemoryRequest) -> MemoryRequest {
    with(request, |request| request.model.tokens_per_pass = request.stage.longest_row().next_multiple_of(STEP_OF_PASS))
}

/// The largest passes that fit: every part of a plan grows with them, so halving finds them.
fn smaller_passes(request: &MemoryRequest, free_bytes: u64) -> Option<MemoryRequest> {
    let of = |steps: usize| with(request, |request| request.model.tokens_per_pass = steps * STEP_OF_PASS);
    let mut fitting = request.stage.longest_row().div_ceil(STEP_OF_PASS);
    fits(of(fitting), free_bytes)?;
    let mut too_large = (tokens_of_pass(request) as usize).div_ceil(STEP_OF_PASS).max(fitting + 1);
    while too_large - fitting > 1 {
        let middle = fitting.midpoint(too_large);
        match fits(of(middle), free_bytes) {
            Some(_) => fitting = middle,
            None => too_large = middle,
        }
    }
    Some(of(fitting))
}

/// Half as many queries of a batch, and half of that, as long as there are some.
fn smaller_batches(request: &MemoryRequest, free_bytes: u64) -> Option<MemoryRequest> {
    let PlannedStage::Rl { config, .. } = &request.stage else { return None };
    let sizes = std::iter::successors(Some(config.batch_size / 2), |size| Some(size / 2)).take_while(|size| *size > 0);
    let of = |size: usize| {
        with(request, |request| {
            if let PlannedStage::Rl { config, .. } = &mut request.stage {
                config.batch_size = size;
                config.mini_batch_size = config.mini_batch_size.min(size * config.n_samples);
            }
        })
    };
    sizes.map(of).find_map(|request| fits(request, free_bytes))
}

/// The most bits that fit and that the device can store.
fn smaller_storage(request: &MemoryRequest, free_bytes: u64) -> Option<MemoryRequest> {
    let base = |dtype| with(request, |request| request.model.dtype = dtype);
    let now = MemoryPlan::new(request).base;
    let storages = request.types.storages.iter().copied().filter(|&dtype| can_be_split(request, dtype));
    let mut smaller = storages.map(base).filter(|request| MemoryPlan::new(request).base < now);
    smaller.find_map(|request| fits(request, free_bytes))
}

/// Whether the devices that hold the model together can have it in some storage.
fn can_be_split(request: &MemoryRequest, dtype: BaseDtype) -> bool {
    Shard::check(request.model.tensor_parallel, &request.shapes, dtype).is_ok()
}

fn changes(from: &MemoryRequest, to: &MemoryRequest) -> Vec<String> {
    let mut changes = Vec::new();
    if to.model.dtype != from.model.dtype {
        changes.push(format!("model.dtype to \"{}\"", to.model.dtype.name()));
    }
    if to.model.gradient_checkpointing != from.model.gradient_checkpointing {
        changes.push("model.gradient_checkpointing to true".into());
    }
    if to.model.tokens_per_pass != from.model.tokens_per_pass {
        changes.push(format!("model.tokens_per_pass to {}", to.model.tokens_per_pass));
    }
    if let (PlannedStage::Rl { config: from, .. }, PlannedStage::Rl { config: to, .. }) = (&from.stage, &to.stage) {
        if to.batch_size != from.batch_size {
            changes.push(format!("rl.batch_size to {}", to.batch_size));
        }
        if to.mini_batch_size != from.mini_batch_size {
            changes.push(format!("rl.mini_batch_size to {}", to.mini_batch_size));
        }
    }
    changes
}

//! What to change where a plan does not fit.

use super::{Asked, Plan, Stage, tokens_of_pass};
use querl_core::config::BaseDtype;
use querl_model::Shard;

/// Settings that make a plan fit, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// What to set to what.
    pub change: String,
    /// What it takes less.
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

/// Passes are cut to multiples of this.
const STEP_OF_PASS: usize = 256;

/// Below this, products are too small for a card, and keeping less of each row costs less time.
const SMALL_PASS: usize = 2048;

/// The change that costs least and suffices; `None` where the plan fits, or where no change of these suffices. Tried in this order:
/// smaller passes (no time as long as they are not small), gradient checkpointing (a third more time), both, smaller batches of
/// rollouts, a base of fewer bits (results change), and everything.
pub fn advise(asked: &Asked, free_bytes: u64) -> Option<Advice> {
    let needed = Plan::new(asked).total();
    if needed <= free_bytes {
        return None;
    }
    let checkpointed = with(asked, |asked| asked.model.gradient_checkpointing = true);
    let candidates = [
        smaller_passes(asked, free_bytes).filter(|asked| asked.model.tokens_per_pass >= SMALL_PASS),
        fits(checkpointed.clone(), free_bytes),
        smaller_passes(&checkpointed, free_bytes),
        smaller_passes(asked, free_bytes),
        smaller_batches(asked, free_bytes),
        smaller_storage(asked, free_bytes),
        smaller_storage(&checkpointed, free_bytes),
        smaller_storage(&smallest_passes(&checkpointed), free_bytes),
    ];
    let chosen = candidates.into_iter().flatten().next()?;
    let saved_bytes = needed - Plan::new(&chosen).total();
    Some(Advice { change: changes(asked, &chosen).join(" and "), saved_bytes })
}

fn with(asked: &Asked, change: impl FnOnce(&mut Asked)) -> Asked {
    let mut changed = asked.clone();
    change(&mut changed);
    changed
}

fn fits(asked: Asked, free_bytes: u64) -> Option<Asked> {
    (Plan::new(&asked).total() <= free_bytes).then_some(asked)
}

fn smallest_passes(asked: &Asked) -> Asked {
    with(asked, |asked| asked.model.tokens_per_pass = asked.stage.longest_row().next_multiple_of(STEP_OF_PASS))
}

/// The largest passes that fit: every part of a plan grows with them, so halving finds them.
fn smaller_passes(asked: &Asked, free_bytes: u64) -> Option<Asked> {
    let of = |steps: usize| with(asked, |asked| asked.model.tokens_per_pass = steps * STEP_OF_PASS);
    let mut fitting = asked.stage.longest_row().div_ceil(STEP_OF_PASS);
    fits(of(fitting), free_bytes)?;
    let mut too_large = (tokens_of_pass(asked) as usize).div_ceil(STEP_OF_PASS).max(fitting + 1);
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
fn smaller_batches(asked: &Asked, free_bytes: u64) -> Option<Asked> {
    let Stage::Rl { config, .. } = &asked.stage else { return None };
    let sizes = std::iter::successors(Some(config.batch_size / 2), |size| Some(size / 2)).take_while(|size| *size > 0);
    let of = |size: usize| {
        with(asked, |asked| {
            if let Stage::Rl { config, .. } = &mut asked.stage {
                config.batch_size = size;
                config.mini_batch_size = config.mini_batch_size.min(size * config.n_samples);
            }
        })
    };
    sizes.map(of).find_map(|asked| fits(asked, free_bytes))
}

/// The most bits that fit and that the device can store.
fn smaller_storage(asked: &Asked, free_bytes: u64) -> Option<Asked> {
    let base = |dtype| with(asked, |asked| asked.model.dtype = dtype);
    let now = Plan::new(asked).base;
    let storages = asked.types.storages.iter().copied().filter(|&dtype| can_be_split(asked, dtype));
    let mut smaller = storages.map(base).filter(|asked| Plan::new(asked).base < now);
    smaller.find_map(|asked| fits(asked, free_bytes))
}

/// Whether the devices that hold the model together can have it in some storage.
fn can_be_split(asked: &Asked, dtype: BaseDtype) -> bool {
    Shard::check(asked.model.tensor_parallel, &asked.shapes, dtype).is_ok()
}

fn changes(from: &Asked, to: &Asked) -> Vec<String> {
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
    if let (Stage::Rl { config: from, .. }, Stage::Rl { config: to, .. }) = (&from.stage, &to.stage) {
        if to.batch_size != from.batch_size {
            changes.push(format!("rl.batch_size to {}", to.batch_size));
        }
        if to.mini_batch_size != from.mini_batch_size {
            changes.push(format!("rl.mini_batch_size to {}", to.mini_batch_size));
        }
    }
    changes
}

//! The limits of one plugin: fuel, time, memory, output and log.
//!
//! | step | where |
//! |---|---|
//! | defaults, with the measurements behind them | the `section!` macro of `PluginLimits` (`querl-core/src/config/plugins.rs`), which makes `PluginLimits::default` |
//! | the user's values | `[plugins.limits]` of the configuration, read into [`PluginLimits`]; `host_options` (`querl-pipeline/src/plugins.rs`) passes them to the host |
//! | lowered by the plugin; a higher request is an error | `[limits]` of its plugin.toml: `Manifest::effective_limits` (`querl-bundle/src/manifest/mod.rs`), called in [`Limits::with_manifest`] |
//! | fuel of one call | [`Limits::fuel`]: `fuel_per_call + fuel_per_item * items` |
//! | enforced | `Caller::new_store` in `call.rs`: `Store::set_fuel`, epoch ticks that check the time, memory limiter, output and log size |
//!
//! Fuel is wasmtime's deterministic count of instructions; `timeout_ms` is a backstop of CPU time (`CallTime` in `guest.rs`).

use crate::text::{is_code, printable};
use querl_bundle::Manifest;
use querl_core::config::PluginLimits;
use querl_core::ports::RewardRange;
use std::collections::BTreeSet;
use std::sync::{PoisonError, RwLock};

/// The host's limits, lowered by the plugin's manifest. All items of a call share its fuel.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    pub(crate) values: PluginLimits,
    /// Names of the limits that the manifest lowers.
    lowered: Vec<&'static str>,
}

impl Limits {
    /// The limits of a plugin without a manifest: those of the host.
    pub(crate) fn of_host(host: &PluginLimits) -> Self {
        Self { values: host.clone(), lowered: Vec::new() }
    }

    /// The limits of a plugin with a manifest, which may lower those of the host.
    pub(crate) fn with_manifest(manifest: &Manifest, host: &PluginLimits) -> Result<Self, String> {
        let values = manifest.effective_limits(host)?;
        let mut lowered = Vec::new();
        let mut note = |key, is_lower: bool| lowered.extend(is_lower.then_some(key));
        note("fuel_per_call", values.fuel_per_call < host.fuel_per_call);
        note("fuel_per_item", values.fuel_per_item < host.fuel_per_item);
        note("timeout_ms", values.timeout_ms < host.timeout_ms);
        note("memory_bytes", values.memory_bytes < host.memory_bytes);
        note("output_bytes", values.output_bytes < host.output_bytes);
        note("host_calls_per_item", values.host_calls_per_item < host.host_calls_per_item);
        Ok(Self { values, lowered })
    }

    /// The fuel of one call: `fuel_per_call + fuel_per_item * n_fuel_items`. Set in `Caller::new_store`.
    pub(crate) fn fuel(&self, size: CallSize) -> u64 {
        let of_items = self.values.fuel_per_item.saturating_mul(size.n_fuel_items.max(1) as u64);
        self.values.fuel_per_call.saturating_add(of_items)
    }

    /// The configuration key (or key of plugin.toml) with which a user raises the limit `name`.
    pub(crate) fn key(&self, name: &'static str) -> String {
        match self.lowered.contains(&name) {
            true => format!("`limits.{name}` of its plugin.toml"),
            false => format!("`plugins.limits.{name}`"),
        }
    }
}

/// The number of items of a call, and the number of items for which it gets fuel. They differ where a part of a batch is run again with
/// the fuel of the whole batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallSize {
    pub(crate) n_items: usize,
    pub(crate) n_fuel_items: usize,
}

impl CallSize {
    pub(crate) fn of(n_items: usize) -> Self {
        Self { n_items, n_fuel_items: n_items }
    }

    /// The size of a call that runs some items of a batch again with the fuel of the whole batch: an item that stays within the
    /// limits together with the others also does so without them.
    pub(crate) fn part_of(n_batch: usize, n_items: usize) -> Self {
        Self { n_items, n_fuel_items: n_batch }
    }
}

/// Maximum number of components of one score. Each is a series of metrics and a row of the report.
pub const MAX_COMPONENTS: usize = 64;

/// Maximum number of distinct component names, and of distinct rejection codes, of one plugin until the host ends. Each is a
/// series of metrics.
pub const MAX_NAMES: usize = 256;

/// Largest magnitude of the bounds of a range, hence of a total: far more than a reward needs, and its square is finite in the
/// f32 of the losses.
pub const MAX_TOTAL: f64 = 1e9;

/// Largest magnitude of a component of a score, whose means and squares are computed in f64.
pub const MAX_COMPONENT: f64 = 1e18;

/// Checks that a range of totals is finite, ordered and not too large.
///
/// # Errors
/// Expected and got.
pub(crate) fn check_range(range: RewardRange) -> Result<RewardRange, String> {
    let RewardRange { min, max } = range;
    let is_ordered = min.is_finite() && max.is_finite() && min < max;
    if is_ordered && min.abs().max(max.abs()) <= MAX_TOTAL {
        return Ok(range);
    }
    let expected = match is_ordered {
        true => format!("bounds of at most {MAX_TOTAL:e} in magnitude"),
        false => "two finite numbers, the first below the second".to_owned(),
    };
    Err(format!("declares the range {} to {}; expected {expected}", shown(min), shown(max)))
}

/// A number as text, in scientific notation if it has many digits.
pub(crate) fn shown(number: f64) -> String {
    if number.abs() < 1e15 { number.to_string() } else { format!("{number:e}") }
}

/// Names of components and codes of rejections that a plugin has used since the host was started.
#[derive(Debug, Default)]
pub(crate) struct UsedNames {
    components: DistinctNames,
    codes: DistinctNames,
}

impl UsedNames {
    /// Adds the component names of a score; an error if there are too many distinct ones.
    pub(crate) fn add_components<'a>(&self, names: impl Iterator<Item = &'a str> + Clone) -> Result<(), String> {
        self.components.add("component", names)
    }

    /// Adds the code of a rejection; an error if it is invalid or there are too many distinct ones.
    pub(crate) fn add_checked_code(&self, code: &str) -> Result<(), String> {
        if !is_code(code) {
            let code = printable(code, 100);
            return Err(format!("rejected with the code `{code}`; expected 1 to 64 of a to z, 0 to 9 and _"));
        }
        self.add_code(code)
    }

    /// Adds the code of a rejection.
    fn add_code(&self, code: &str) -> Result<(), String> {
        self.codes.add("code", std::iter::once(code))
    }
}

#[derive(Debug, Default)]
struct DistinctNames(RwLock<BTreeSet<String>>);

impl DistinctNames {
    /// Adds names; the error names the first beyond the limit.
    fn add<'a>(&self, what: &str, names: impl Iterator<Item = &'a str> + Clone) -> Result<(), String> {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if names.clone().all(|name| known.contains(name)) {
            return Ok(());
        }
        drop(known);
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        for name in names {
            if !known.contains(name) && known.len() == MAX_NAMES {
                return Err(format!(
                    "{what} `{name}` is one name more than the {MAX_NAMES} that a plugin may use in a run"
                ));
            }
            known.insert(name.to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_components_are_counted_once_and_bounded() {
        let names = UsedNames::default();
        let all: Vec<String> = (0..=MAX_NAMES).map(|n| format!("part_{n}")).collect();
        let add = |range: std::ops::Range<usize>| names.add_components(all[range].iter().map(String::as_str));
        add(0..MAX_NAMES).unwrap();
        add(0..MAX_NAMES).unwrap();
        assert!(add(0..all.len()).unwrap_err().starts_with("component `part_256` is one name more than the 256 "));
        all[1..].iter().for_each(|code| names.add_code(code).unwrap());
        assert!(names.add_code("late").unwrap_err().starts_with("code `late` is one name more than the 256 "));
    }
}

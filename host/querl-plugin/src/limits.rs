//! The limits of one plugin.

use querl_bundle::Manifest;
use querl_core::config::PluginLimits;

/// The host's limits, lowered to those that the plugin's manifest asks for.
///
/// The fuel of a call is the sum over its items, and what every call gets besides: an item may use what its neighbours leave.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    pub(crate) values: PluginLimits,
    /// The keys that the manifest lowers.
    lowered: Vec<&'static str>,
}

impl Limits {
    /// Those of a plugin that asks for nothing.
    pub(crate) fn of_host(host: &PluginLimits) -> Self {
        Self { values: host.clone(), lowered: Vec::new() }
    }

    /// Those of a plugin with a manifest.
    ///
    /// # Errors
    /// It asks for more than the host allows: one sentence.
    pub(crate) fn asked(manifest: &Manifest, host: &PluginLimits) -> Result<Self, String> {
        let values = manifest.effective_limits(host)?;
        let mut lowered = Vec::new();
        let mut note = |key, is_lower: bool| lowered.extend(is_lower.then_some(key));
        note("fuel_per_call", values.fuel_per_call < host.fuel_per_call);
        note("fuel_per_item", values.fuel_per_item < host.fuel_per_item);
        note("timeout_ms", values.timeout_ms < host.timeout_ms);
        note("memory_bytes", values.memory_bytes < host.memory_bytes);
        note("output_bytes", values.output_bytes < host.output_bytes);
        Ok(Self { values, lowered })
    }

    /// What a call with so many items may use.
    pub(crate) fn fuel(&self, n_items: usize) -> u64 {
        let of_items = self.values.fuel_per_item.saturating_mul(n_items.max(1) as u64);
        self.values.fuel_per_call.saturating_add(of_items)
    }

    /// Where a person raises one of the limits.
    pub(crate) fn key(&self, name: &'static str) -> String {
        match self.lowered.contains(&name) {
            true => format!("`limits.{name}` of its plugin.toml"),
            false => format!("`plugins.limits.{name}`"),
        }
    }
}

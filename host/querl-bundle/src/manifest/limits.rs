//! The limits under which a plugin runs: the host's, or the lower ones that the plugin asks for.

use super::Manifest;
use querl_core::config::PluginLimits;

impl Manifest {
    /// The limits of `host`, lowered to those that the plugin asks for.
    ///
    /// # Errors
    /// The plugin asks for more than the host allows: one sentence with both figures and the setting to raise.
    pub fn effective_limits(&self, host: &PluginLimits) -> Result<PluginLimits, String> {
        let asked = &self.limits;
        Ok(PluginLimits {
            fuel_per_call: lower("fuel_per_call", asked.fuel_per_call, host.fuel_per_call)?,
            fuel_per_item: lower("fuel_per_item", asked.fuel_per_item, host.fuel_per_item)?,
            timeout_ms: lower("timeout_ms", asked.timeout_ms, host.timeout_ms)?,
            memory_bytes: lower("memory_bytes", asked.memory_bytes, host.memory_bytes)?,
            output_bytes: lower("output_bytes", asked.output_bytes, host.output_bytes)?,
            log_bytes: lower("log_bytes", asked.log_bytes, host.log_bytes)?,
            ..host.clone()
        })
    }
}

fn lower<N: Copy + PartialOrd + std::fmt::Display>(key: &str, asked: Option<N>, allowed: N) -> Result<N, String> {
    match asked {
        None => Ok(allowed),
        Some(asked) if asked <= allowed => Ok(asked),
        Some(asked) => Err(format!(
            "asks for a {key} of {asked}, and this host allows {allowed}; raise `plugins.limits.{key}` to {asked} or more"
        )),
    }
}

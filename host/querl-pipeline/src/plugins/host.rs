//! The one way in which this program makes a plugin host.

use anyhow::Context;
use querl_bundle::{BundleError, PublicKey};
use querl_core::config::PluginLimits;
use querl_plugin::{Compiler, HostOptions, PluginHost};

/// How the program calls itself to compile a plugin in a process of its own. Hidden from help: no person has a use for it.
pub const COMPILE_COMMAND: &str = "__compile-plugin";

/// A host under `limits` that takes bundles of `trusted_keys` alone, where there are any.
///
/// # Errors
/// A key is none, or this machine cannot run WebAssembly.
pub fn open(limits: &PluginLimits, trusted_keys: &[String]) -> anyhow::Result<PluginHost> {
    Ok(PluginHost::new(HostOptions { trusted_keys: keys(trusted_keys)?, ..options(limits)? })?)
}

/// How every host of this program is set up: under `limits`, compiling in a child process.
///
/// # Errors
/// The program cannot find itself.
pub fn options(limits: &PluginLimits) -> anyhow::Result<HostOptions> {
    let limits = limits.clone();
    Ok(HostOptions { limits, compiler: compiler()?, ..HostOptions::default() })
}

/// This program again, as [`COMPILE_COMMAND`].
///
/// # Errors
/// The program cannot find itself.
pub fn compiler() -> anyhow::Result<Compiler> {
    let program = std::env::current_exe()
        .context("this program's own file cannot be found, so that it cannot compile plugins")?;
    Ok(Compiler::Child(program, vec![COMPILE_COMMAND.to_owned()]))
}

/// The keys of `plugins.trusted_keys`.
///
/// # Errors
/// One has not the form of a key; the message says which.
pub fn keys(texts: &[String]) -> Result<Vec<PublicKey>, BundleError> {
    let key = |(index, text): (usize, &String)| PublicKey::parse(text, &format!("plugins.trusted_keys[{index}]"));
    texts.iter().enumerate().map(key).collect()
}

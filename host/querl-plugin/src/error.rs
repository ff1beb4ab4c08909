//! Why a plugin cannot be used.

use querl_bundle::BundleError;
use querl_core::ports::PluginFault;
use std::path::PathBuf;

/// Why a plugin cannot be built, loaded or configured.
#[derive(Debug, thiserror::Error)]
pub enum PluginError {
    /// The host itself could not be set up.
    #[error("the plugin host cannot start: {0}")]
    Host(String),
    /// No such file, or not readable.
    #[error("plugin {}: {reason}", path.display())]
    Unreadable {
        /// As configured.
        path: PathBuf,
        /// What was found or went wrong.
        reason: String,
    },
    /// The file is not a component for this host.
    #[error("plugin {}: {reason}", path.display())]
    NotAPlugin {
        /// As configured.
        path: PathBuf,
        /// Expected and got.
        reason: String,
    },
    /// It was not, or could not be, compiled.
    #[error("plugin {}: {reason}", path.display())]
    Compile {
        /// As configured.
        path: PathBuf,
        /// What the compiler said, or which limit it ran into.
        reason: String,
    },
    /// A bundle or a plugin.toml is wrong.
    #[error("plugin {0}")]
    Bundle(#[from] BundleError),
    /// What plugin.toml says of the component is not so.
    #[error("plugin {}: {reason}", path.display())]
    Manifest {
        /// The bundle, or the component of the folder.
        path: PathBuf,
        /// What each of the two says.
        reason: String,
    },
    /// Keys are trusted, and none of them has signed it.
    #[error("plugin {plugin}: {reason} (`plugins.trusted_keys`)")]
    Untrusted {
        /// As configured.
        plugin: String,
        /// Who has signed it, and whose signature is missing.
        reason: String,
    },
    /// The source folder did not build.
    #[error("plugin {}: {tool} could not build it:\n{output}", path.display())]
    Build {
        /// The folder.
        path: PathBuf,
        /// What builds plugins of this language: cargo, componentize-py, componentize-js.
        tool: &'static str,
        /// What it said.
        output: String,
    },
    /// Building needs a target that is not installed.
    #[error(
        "plugin {}: the Rust target wasm32-wasip2 is not installed; run `rustup target add wasm32-wasip2`",
        path.display()
    )]
    TargetMissing {
        /// The folder.
        path: PathBuf,
    },
    /// The plugin is of another kind.
    #[error("plugin {plugin}: it is a {actual} plugin; expected a {expected} plugin")]
    WrongKind {
        /// Name and version.
        plugin: String,
        /// The kinds it has.
        actual: String,
        /// The kind that the configuration asks for.
        expected: &'static str,
    },
    /// A setting was refused by the plugin, or is not one of its.
    #[error("plugin {plugin}: setting `{key}`: {message}")]
    Setting {
        /// Name and version.
        plugin: String,
        /// The key.
        key: String,
        /// Expected and got.
        message: String,
    },
    /// The plugin broke its contract while it was loaded or configured.
    #[error(transparent)]
    Fault(#[from] PluginFault),
}
